"""The schedule of one attention call: who computes when, and which exchange hides behind which computation.

Forward, for the steps of a plan in order (K: keys of a step arrive, C: a step is computed)::

    enter | post K1  C0  wait K1 | post K2  C1  wait K2 | ...  | leave

Backward is the same walk; the gradients of a step's keys (G) leave when it is computed and are taken in one step
later, so that they ride while the next step is computed::

    enter | post K1  C0  wait K1 | post K2  C1  post G1  wait K2 | post K3  C2  wait G1  post G2  wait K3 | ... | leave

All ranks post in this one order, whatever they have to move at each step: an order between two ranks alone passes on
gloo and deadlocks on NCCL. At most two stages of received keys are alive: the one computed and the one arriving.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from seqpar.comm import Work
from seqpar.kernels import Grads, Operands, Sums
from seqpar.ops import trade
from seqpar.ops.call import Call, Inside, Phase, facts_of
from seqpar.ops.keys import Keys
from seqpar.ops.rows import add, index, take
from seqpar.plan import Part, Step, replicated
from seqpar.plan.steps import count


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor, list[Inside]]:
    """Output [T, H, D_v], lse [H, T], and the inside tensors of every part."""
    steps = call.steps()
    out = q.new_zeros(q.shape[0], call.heads, call.v_dim)
    lse = q.new_full((call.heads, q.shape[0]), -torch.inf, dtype=call.acc)
    if call.alone:
        part = steps[0].part
        here = _inside(call, part, [q[: part.q.rows], k[: part.kv.rows], v[: part.kv.rows]], out, lse, sinks)
        _compute(call, steps[0], here, here.k, here.v)
        return out, lse, [here]
    entries = {}
    for part in call.parts():
        heads, kv = call.shares(part)
        legs = [trade.Leg(q, part.q, heads), trade.Leg(k, part.kv, kv), trade.Leg(v, part.kv, kv)]
        entries[part.width] = trade.enter(call.comm, call.tag(Phase.ENTER, part.width), part, legs)
    insides: dict[int, Inside] = {}

    def inside(part: Part) -> Inside:
        if part.width not in insides:
            insides[part.width] = _inside(call, part, entries[part.width](), out, lse, sinks)
        return insides[part.width]

    leaves: list[Callable[[], None]] = []
    arriving = Keys(call, steps, Phase.KEYS)
    for step, here, keys, values in walk(arriving, inside):
        _compute(call, step, here, keys, values)
        if step.ends:
            leaves.append(_leave(call, step.part, here, out, lse))
    for finish in leaves:
        finish()
    return out, lse, list(insides.values())


def walk(buffers: Keys, inside: Callable[[Part], Inside]) -> Iterator[tuple[Step, Inside, Tensor, Tensor]]:
    """Each step with its part's tensors and its keys and values; the next step's are on their way meanwhile.

    The caller holds the buffers: what is on its way when a step fails must outlive the step until peers know why.
    """
    steps = buffers.steps
    for n, step in enumerate(steps):
        here = inside(step.part)
        if n == 0:
            buffers.post(n, here.k, here.v)
        keys, values = buffers.wait(n, here.k, here.v)
        if n + 1 < len(steps):
            ahead = inside(steps[n + 1].part)
            buffers.post(n + 1, ahead.k, ahead.v)
        yield step, here, keys, values


def _inside(call: Call, part: Part, tensors: list[Tensor], out: Tensor, lse: Tensor, sinks: Tensor | None) -> Inside:
    """A part's tensors; where nothing is traded its results are views of the call's."""
    q, k, v = tensors
    if part.q.trivial:
        here = Inside(q, k, v, out[: part.q.rows], lse[:, : part.q.rows])
    else:
        rows, heads = q.shape[:2]
        here = Inside(q, k, v, out.new_zeros(rows, heads, call.v_dim), lse.new_full((heads, rows), -torch.inf))
    if sinks is not None:
        mine = call.shares(part)[0][part.share]
        here.lse.copy_(sinks.to(call.acc)[mine, None].expand_as(here.lse))
    return here


def _compute(call: Call, step: Step, here: Inside, keys: Tensor, values: Tensor) -> None:
    """Add one step's keys to the part's output. A sink is a sum that was there before the first key."""
    first, wide = step.first and not call.sinks, call.dtype == call.acc
    if len(step.pos) or step.first or step.last:
        if wide:
            here.acc = here.out
        elif here.acc is None and not (first and step.last):
            here.acc = torch.zeros_like(here.out, dtype=call.acc)
        facts = facts_of(step, call.device)
        for heads, kv, score in call.blocks(step.part):
            acc = None if here.acc is None else here.acc[:, heads]
            out = here.out[:, heads] if step.last and not wide else None
            operands = Operands(here.q[:, heads], keys[:, kv], values[:, kv], facts, score)
            call.kernel.forward(operands, Sums(acc, here.lse[heads], out, first))
    if step.last:
        here.acc = None


def _leave(call: Call, part: Part, here: Inside, out: Tensor, lse: Tensor) -> Callable[[], None]:
    """Output and, if it is returned, lse on their way out of the head trade."""
    if part.q.trivial:
        return lambda: None
    heads, _ = call.shares(part)
    legs = [trade.Leg(here.out, part.q, heads, target=out)]
    if call.return_lse:
        legs.append(trade.Leg(here.lse.t(), part.q, heads, target=lse.t()))
    return trade.leave(call.comm, call.tag(Phase.LEAVE, part.width), part, legs)


@dataclass(eq=False)
class Back:
    """The gradients of one part inside the head trade. home [N, h_kv, D + D_v]: of the rank's own keys and values."""

    dout: Tensor
    delta: Tensor
    dq: Tensor
    home: Tensor


def backward(
    call: Call, insides: list[Inside], sinks: Tensor | None, dout: Tensor, dlse: Tensor | None, shapes: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv and this rank's share of dsinks, all in the accumulation dtype but dq. shapes: query and key rows."""
    steps = call.steps()
    parts = call.parts()
    here = {p.width: inside for p, inside in zip(parts, insides, strict=True)}
    entries = {p.width: _back_enter(call, p, dout, dlse) for p in parts}
    dsinks = None if sinks is None else torch.zeros(call.heads, dtype=call.acc, device=call.device)
    dq = dout.new_zeros(shapes[0], call.heads, call.dim, dtype=call.dtype)
    home = dout.new_zeros(shapes[1], call.kv_heads, call.dim + call.v_dim, dtype=call.acc)
    backs: dict[int, Back] = {}

    def inside(part: Part) -> Inside:
        if part.width not in backs:
            incoming = entries[part.width]()
            backs[part.width] = _back(call, part, here[part.width], incoming, sinks, dsinks, dq, home)
        return here[part.width]

    if call.alone:
        tensors = inside(parts[0])
        back = backs[parts[0].width]
        _differentiate(call, steps[0], tensors, back, tensors.k, tensors.v, back.home, fused=dlse is None)
        _back_leave(call, parts[0], back, dq, home)()
        return dq, home[..., : call.dim], home[..., call.dim :], dsinks
    riding = Riding(call)
    leaves: list[Callable[[], None]] = []
    arriving = Keys(call, steps, Phase.BACK_KEYS)
    for step, tensors, keys, values in walk(arriving, inside):
        back = backs[step.part.width]
        own = step.local
        grads = back.home if own else back.home.new_zeros(len(step.pos), *back.home.shape[1:])
        if len(step.pos):
            _differentiate(call, step, tensors, back, keys, values, grads, fused=dlse is None)
        riding.arrive(grads)
        if not own:
            if step.own is not None:
                back.home += take(grads, index(step, step.own, call.device))
            riding.depart(step, grads, back.home)
        if step.ends:
            riding.arrive(None)
            leaves.append(_back_leave(call, step.part, back, dq, home))
    for finish in leaves:
        finish()
    return dq, home[..., : call.dim], home[..., call.dim :], dsinks


def _back_enter(call: Call, part: Part, dout: Tensor, dlse: Tensor | None) -> Callable[[], list[Tensor]]:
    heads, _ = call.shares(part)
    legs = [trade.Leg(dout, part.q, heads)]
    if call.return_lse:
        dlse = dout.new_zeros(dout.shape[:2], dtype=call.acc) if dlse is None else dlse.t()
        legs.append(trade.Leg(dlse, part.q, heads))
    return trade.enter(call.comm, call.tag(Phase.BACK_ENTER, part.width), part, legs)


def _back(
    call: Call, part: Part, here: Inside, incoming: list[Tensor], sinks: Tensor | None, dsinks: Tensor | None,
    dq: Tensor, home: Tensor,
) -> Back:  # fmt: skip
    """Gradients at their start, and delta, once for the whole backward, from the output as returned.

    Where nothing is traded the gradients are views of the call's.
    """
    dout = incoming[0]
    if part.blind.size:  # what they hold must not reach a key through 0 * NaN
        dout = dout.index_fill(0, index(part, part.blind, call.device), 0.0)  # type: ignore[arg-type]
    delta = (dout.to(call.acc) * here.out.to(call.acc)).sum(-1).t()
    if len(incoming) > 1:
        delta = delta - torch.where(here.lse == -torch.inf, 0.0, incoming[1].t())
    if dsinks is not None and sinks is not None:
        mine = call.shares(part)[0][part.share]
        weight = torch.exp(sinks.to(call.acc)[mine, None] - here.lse)
        weight = torch.where(here.lse == -torch.inf, 0.0, weight)  # no key, and a sink of -inf
        dsinks[mine] -= (torch.where(weight == 0, 0.0, weight * delta)).sum(-1)
    if not part.kv.trivial:
        home = here.k.new_zeros(*here.k.shape[:2], call.dim + call.v_dim, dtype=call.acc)
    if not (part.q.trivial and call.dtype == call.acc):
        dq = torch.zeros_like(here.q, dtype=call.acc)
    return Back(dout, delta.contiguous(), dq[: part.q.rows], home[: part.kv.rows])


def _differentiate(
    call: Call, step: Step, here: Inside, back: Back, keys: Tensor, values: Tensor, grads: Tensor, *, fused: bool
) -> None:
    """Add the gradients of one step to dq and to ``grads``."""
    facts = facts_of(step, call.device)
    for heads, kv, score in call.blocks(step.part):
        operands = Operands(here.q[:, heads], keys[:, kv], values[:, kv], facts, score)
        call.kernel.backward(
            operands,
            Grads(
                back.dout[:, heads], here.lse[heads], back.delta[heads], here.out[:, heads] if fused else None,
                dq=back.dq[:, heads], dk=grads[:, kv, : call.dim], dv=grads[:, kv, call.dim :],
            ),
        )  # fmt: skip


class Riding:
    """Gradients of received keys on their way, one exchange at a time."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.work: Work | None = None
        self.step: Step | None = None
        self.home = self.carry = torch.empty(0)
        self.arriving: dict[int, Tensor] = {}

    def depart(self, step: Step, grads: Tensor, home: Tensor) -> None:
        """Post the gradients of a step's keys, and what arrives for own keys and, in a ring, for the next step's."""
        call = self.call
        if not call.kv_grads or not (step.grad_sends or step.grad_recvs or step.carry_rows):
            return
        sends = {
            peer: [take(grads, index(step, rows, call.device)).contiguous()] for peer, rows in step.grad_sends.items()
        }
        self.arriving = {
            peer: call.comm.empty((count(rows), *home.shape[1:]), call.acc, call.device)
            for peer, rows in step.grad_recvs.items()
        }
        recvs = {peer: [x] for peer, x in self.arriving.items()}
        if step.carry_rows:
            assert step.carry is not None
            self.carry = call.comm.empty((step.carry_rows, *home.shape[1:]), call.acc, call.device)
            recvs[step.carry] = [self.carry]
        self.step, self.home = step, home
        self.work = call.comm.exchange(sends, recvs, tag=call.tag(Phase.BACK_GRADS, step.number))

    def arrive(self, grads: Tensor | None) -> None:
        """Wait for what is on its way and add it: to own keys in the order of ranks, and to the gradients at hand."""
        if self.work is None or self.step is None:
            return
        self.work.wait()
        for peer in sorted(self.arriving):
            add(self.home, index(self.step, self.step.grad_recvs[peer], self.call.device), self.arriving[peer])
        if self.step.carry_rows and grads is not None:
            grads += self.carry
        self.work = self.step = None


def _back_leave(call: Call, part: Part, back: Back, dq: Tensor, home: Tensor) -> Callable[[], None]:
    """Gradients on their way out of the head trade; key heads that several shares read are summed."""
    heads, kv = call.shares(part)
    several = replicated(call.heads, call.kv_heads, part.width)
    legs = []
    if not (part.q.trivial and call.dtype == call.acc):
        legs.append(trade.Leg(back.dq.to(call.dtype), part.q, heads, target=dq))
    if call.kv_grads and not part.kv.trivial:
        grads = back.home if several or part.width == 1 else back.home.to(call.dtype)
        legs.append(trade.Leg(grads, part.kv, kv, target=home, summed=several))
    if not legs:
        return lambda: None
    return trade.leave(call.comm, call.tag(Phase.BACK_LEAVE, part.width), part, legs)
