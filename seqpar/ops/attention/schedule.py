"""The schedule of one attention call: who computes when, and which exchange hides behind which computation.

Forward, for the steps of a plan in order (K: keys of a step arrive, C: a step is computed)::

    enter | post K1  C0  wait K1 | post K2  C1  wait K2 | ...  | leave

Backward is the same walk; the gradients of a step's keys (G) leave when it is computed and are taken in one step
later, so that they ride while the next step is computed::

    enter | post K1  C0  wait K1 | post K2  C1  post G1  wait K2 | post K3  C2  wait G1  post G2  wait K3 | ... | leave

Where keys enter a node once, those of step n enter with K(n-1) and are spread with Kn; their gradients are summed in
the node with Gn and leave it with G(n+1).

All ranks post in this one order, whatever they have to move at each step: an order between two ranks alone passes on
gloo and deadlocks on NCCL. At most two stages of received keys are alive: the one computed and the one arriving.

The host waits for no device. What a plan says is uploaded before the first exchange of a batch's first layer; an
exchange is posted before the kernels that hide it, since on CUDA it starts when the stream reaches its posting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from seqpar.kernels import Grads, Operands, Sums
from seqpar.ops.attention import heads as trade
from seqpar.ops.attention.call import Call, Inside, Phase
from seqpar.ops.attention.grads import Riding
from seqpar.ops.attention.keys import Keys
from seqpar.ops.attention.rows import take
from seqpar.ops.core.device import profile_range
from seqpar.plan import Part, Step, replicated


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor, list[Inside]]:
    """Output [T, H, D_v], lse [H, T], and the inside tensors of every part."""
    steps = call.steps()
    out = _outside(call, (q.shape[0], call.heads, call.v_dim), q.dtype).zero_()
    lse = _outside(call, (call.heads, q.shape[0]), call.acc).fill_(-torch.inf)
    if call.alone:
        part = steps[0].part
        here = _inside(call, part, [q[: part.q.rows], k[: part.kv.rows], v[: part.kv.rows]], out, lse, sinks)
        _compute(call, steps[0], here, here.k, here.v)
        return out, lse, [here]
    entries = {}
    for part in call.parts():
        heads, kv = call.shares(part)
        legs = [trade.Leg(q, part.q, heads), trade.Leg(k, part.kv, kv), trade.Leg(v, part.kv, kv)]
        entries[part.width] = trade.enter(call, Phase.ENTER, part, legs)
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


def _outside(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory for local rows; that which peers write directly if some come out of a head trade."""
    empty = call.comm.empty if any(part.width > 1 for part in call.parts()) else torch.empty
    return empty(shape, dtype=dtype, device=call.device)


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
            here.acc = (torch.empty_like if first else torch.zeros_like)(here.out, dtype=call.acc)
        facts = call.uploaded.facts[step.number]
        with profile_range("compute", step.number):
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
    return trade.leave(call, Phase.LEAVE, part, legs)


@dataclass(eq=False)
class Back:
    """The gradients of one part inside the head trade. home [N, h_kv, D + D_v]: of the rank's own keys and values.

    out: the final output where ``delta`` is ``rowsum(dout * out)`` and nothing else.
    """

    dout: Tensor
    delta: Tensor
    out: Tensor | None
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
    dq = _outside(call, (shapes[0], call.heads, call.dim), call.dtype).zero_()
    home = _outside(call, (shapes[1], call.kv_heads, call.dim + call.v_dim), call.acc).zero_()

    def start(step: Step) -> Back:
        width = step.part.width
        fused = _fused(call, step.part, dlse)
        return _back(call, step, here[width], entries[width](), sinks, dsinks, dq, home, fused=fused)

    if call.alone:
        tensors, back = here[parts[0].width], start(steps[0])
        _differentiate(call, steps[0], tensors, back, tensors.k, tensors.v, back.home)
        _back_leave(call, parts[0], back, dq, home)()
        return dq, home[..., : call.dim], home[..., call.dim :], dsinks
    leaves: list[Callable[[], None]] = []
    arriving = Keys(call, steps, Phase.BACK_KEYS)
    for step, tensors, keys, values in walk(arriving, lambda part: here[part.width]):
        if step.first:
            back = start(step)
            riding = Riding(call, [s for s in steps if s.part is step.part], back.home)
        grads = back.home if step.local else riding.blank(step)
        _differentiate(call, step, tensors, back, keys, values, grads)
        riding.arrive(grads)
        if not step.local:
            if step.own is not None:
                back.home += take(grads, call.uploaded.rows(step.own))
            riding.depart(step, grads)
        if step.ends:
            riding.finish(step.number + 1)  # no gradients leave with the local step that follows
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
    return trade.enter(call, Phase.BACK_ENTER, part, legs)


def _fused(call: Call, part: Part, dlse: Tensor | None) -> bool:
    """Whether a kernel may make delta of the output alone, as no row of a part has a gradient of lse.

    Inside a head trade rows are those of several ranks, and each may have one where lse is returned.
    """
    return dlse is None if part.width == 1 else not call.return_lse


def _back(
    call: Call, step: Step, here: Inside, incoming: list[Tensor], sinks: Tensor | None, dsinks: Tensor | None,
    dq: Tensor, home: Tensor, *, fused: bool,
) -> Back:  # fmt: skip
    """A part's gradients at its first step, and delta, once for the whole backward, from the output as returned.

    Where nothing is traded the gradients are views of the call's.
    """
    part, dout = step.part, incoming[0]
    if dout.numel() and (dout.stride(2) != 1 or 0 in dout.stride()):  # autograd expands the gradient of a sum
        dout = dout.contiguous()
    if part.blind.size:  # what they hold must not reach a key through 0 * NaN
        facts = call.uploaded.facts[step.number]
        dout = dout.masked_fill((facts.lo >= facts.hi)[:, None, None], 0.0)
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
    out = here.out if fused else None
    return Back(dout, delta.contiguous(), out, dq[: part.q.rows], home[: part.kv.rows])


def _differentiate(
    call: Call, step: Step, here: Inside, back: Back, keys: Tensor, values: Tensor, grads: Tensor
) -> None:
    """Add the gradients of one step to dq and to ``grads``: nothing without keys, as of a rank without rows."""
    if not len(step.pos):
        return
    facts = call.uploaded.facts[step.number]
    with profile_range("differentiate", step.number):
        for heads, kv, score in call.blocks(step.part):
            operands = Operands(here.q[:, heads], keys[:, kv], values[:, kv], facts, score)
            out = None if back.out is None else back.out[:, heads]
            call.kernel.backward(
                operands,
                Grads(
                    back.dout[:, heads], here.lse[heads], back.delta[heads], out,
                    dq=back.dq[:, heads], dk=grads[:, kv, : call.dim], dv=grads[:, kv, call.dim :],
                ),
            )  # fmt: skip


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
    return trade.leave(call, Phase.BACK_LEAVE, part, legs)
