"""The schedule of one attention call: the order of its steps, and which computation hides which exchange.

Forward, for the steps of a plan in order (K: keys of a step arrive, C: a step is computed)::

    enter | post K1  C0  wait K1 | post K2  C1  wait K2 | ...  | leave

Backward is the same walk. The gradients of a step's keys (G) are sent when the step is computed and received one step
later, so that they travel while the next step is computed::

    enter | post K1  C0  wait K1 | post K2  C1  post G1  wait K2 | post K3  C2  wait G1  post G2  wait K3 | ... | leave

If keys enter a node once, those of step n enter with K(n-1) and are forwarded with Kn. Their gradients are summed in
the node with Gn and leave it with G(n+1).

All ranks post in this one order, even if they move nothing at some step: a pairwise order passes on gloo and deadlocks
on NCCL. At most two stages of received keys are alive: the computed one and the arriving one. On CUDA, keys that come
from their owners are posted two steps ahead, and three stages are alive::

    enter | post K1  post K2  C0  wait K1 | post K3  C1  wait K2 | post K4  C2  ... | leave

A plan with several Ulysses widths has a part for each, and steps part by part: widths rise in forward and fall in
backward, as if forward ran back in time. Queries, keys and values, and their gradients, are more bytes than the output
and its gradient. So the part without overlap is the smaller message in both directions, here for widths 1 and 8::

    forward    post qkv | compute 1 | wait qkv | compute 8 | post out, wait out
    backward   post dout, wait dout | compute 8 | post dqkv | compute 1 | wait dqkv

The host never waits for a device. A plan's row numbers and facts are uploaded before the first exchange of a batch's
first layer. An exchange is posted before the kernels that hide it, since on CUDA it starts when the stream reaches its
posting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from seqpar.comm.base import pairs
from seqpar.kernels import Grads, Kernel, Operands, Sums, softmax
from seqpar.kernels.blockwise import attend
from seqpar.ops.attention import heads as trade
from seqpar.ops.attention.call import Call, Heads, PartTensors, Phase, uploaded
from seqpar.ops.attention.grads import GradientExchange, KeyGradients
from seqpar.ops.attention.keys import KeyExchange
from seqpar.ops.attention.rows import leading, near, take
from seqpar.ops.core.device import profile_range
from seqpar.plan import Part, Step


def forward(
    call: Call,
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    slopes: Tensor | None,
) -> tuple[Tensor, Tensor, list[PartTensors]]:
    """Output [T, H, D_v], lse [H, T], and every part's inside tensors. slopes: in the accumulation dtype."""
    recipe, heads = call.recipe, call.signature.heads
    call.uploaded = uploaded(call.plan, recipe.steps, q.device)
    empty = partial(call.comm.empty, kept=True) if recipe.trades else torch.empty  # which peers may write directly
    out = empty((q.shape[0], heads, call.signature.v_dim), dtype=q.dtype, device=q.device).zero_()
    lse = empty((heads, q.shape[0]), dtype=recipe.acc, device=q.device).fill_(-torch.inf)
    entries = {part.width: _enter(call, part, q, k, v) for part in recipe.parts if not part.trivial}
    insides: dict[int, PartTensors] = {}

    def inside(part: Part) -> PartTensors:
        if part.width not in insides:
            if part.trivial:
                traded = [leading(q, part.q.rows), leading(k, part.kv.rows), leading(v, part.kv.rows)]
            else:
                traded = entries[part.width]()
            insides[part.width] = _inside(call, part, traded, out, lse, sinks, slopes)
        return insides[part.width]

    if recipe.alone:
        tensors = inside(recipe.parts[0])
        _compute(call, kernel, recipe.steps[0], tensors, tensors.k, tensors.v)
        return out, lse, [tensors]
    leaves: list[Callable[[], None]] = []
    arriving = KeyExchange(call, Phase.KEYS, recipe.steps)
    for step, tensors, keys, values in walk(arriving, inside):
        _compute(call, kernel, step, tensors, keys, values)
        if step.ends and not step.part.q.trivial:
            leaves.append(_leave(call, step.part, tensors, out, lse))
    for finish in leaves:
        finish()
    return out, lse, list(insides.values())


def _enter(call: Call, part: Part, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], list[Tensor]]:
    heads, kv = call.recipe.widths[part.width].shares
    legs = [trade.Leg(q, part.q, heads), trade.Leg(k, part.kv, kv), trade.Leg(v, part.kv, kv)]
    return trade.enter(call, Phase.ENTER, part, legs, kept=True)


def walk(
    exchange: KeyExchange, inside: Callable[[Part], PartTensors]
) -> Iterator[tuple[Step, PartTensors, Tensor, Tensor]]:
    """Each step with its part's tensors, its keys and its values; the keys of one or two steps more arrive meanwhile.

    The caller holds the exchange: if a step fails, messages must outlive the step until peers know the reason.
    """
    steps = exchange.steps

    def post(n: int) -> None:
        if n < len(steps):
            tensors = inside(steps[n].part)
            exchange.post(n, tensors.k, tensors.v)

    for n in range(exchange.ahead):
        post(n)
    for n, step in enumerate(steps):
        tensors = inside(step.part)
        keys, values = exchange.wait(n, tensors.k, tensors.v)
        post(n + exchange.ahead)
        yield step, tensors, keys, values


def _inside(
    call: Call, part: Part, traded: list[Tensor], out: Tensor, lse: Tensor, sinks: Tensor | None, slopes: Tensor | None
) -> PartTensors:
    """A part's tensors. Parts that are views of the call's output reuse it instead of allocating their own."""
    if part.q.trivial:
        own = leading(out, part.q.rows), leading(lse, part.q.rows, 1)
    else:
        rows, heads = traded[0].shape[:2]
        own = out.new_zeros(rows, heads, call.signature.v_dim), lse.new_full((heads, rows), -torch.inf)
    tensors = PartTensors(*traded, *own, call.blocks(part, slopes))
    if call.signature.return_max_logit:
        tensors.top = torch.full_like(tensors.lse, -torch.inf, memory_format=torch.contiguous_format)
    if sinks is not None:
        mine = call.recipe.widths[part.width].shares[0][part.share]
        tensors.lse.copy_(sinks.to(call.recipe.acc)[mine, None].expand_as(tensors.lse))
    return tensors


def _compute(call: Call, kernel: Kernel, step: Step, tensors: PartTensors, keys: Tensor, values: Tensor) -> None:
    """Add one step's keys to the part's output, band after band. A sink counts as an earlier sum."""
    first, wide = step.first and not call.signature.sinks, call.signature.dtype == call.recipe.acc
    if len(step.pos) or step.first or step.last:
        if wide:
            tensors.acc = tensors.out
        elif tensors.acc is None and not (first and step.last and len(step.bands) == 1):
            tensors.acc = (torch.empty_like if first else torch.zeros_like)(tensors.out, dtype=call.recipe.acc)
        bands = call.uploaded.facts[step.number]
        with profile_range("compute", step.number):
            for facts in bands:
                last = step.last and facts is bands[-1]
                for heads, kv, score in tensors.blocks:
                    q, acc, out = _of_heads(heads, tensors.q, tensors.acc, tensors.out if last and not wide else None)
                    lse = tensors.lse if heads is None else tensors.lse[heads]
                    operands = Operands(q, *_of_heads(kv, keys, values), facts, score)
                    top = tensors.top if tensors.top is None or heads is None else tensors.top[heads]
                    attend(kernel, operands, Sums(acc, lse, out, first, top))
                first = False
    if step.last:
        tensors.acc = None


def largest(call: Call, insides: Sequence[PartTensors]) -> Tensor:
    """The largest scores of each head [H], of all keys of all ranks: parts' own ones, then between pairs of ranks."""
    recipe, s, comm = call.recipe, call.signature, call.comm
    top = torch.full((s.heads,), -torch.inf, dtype=recipe.acc, device=s.device)
    for part, tensors in zip(recipe.parts, insides, strict=True):
        mine = recipe.widths[part.width].shares[0][part.share]
        if tensors.top is not None and tensors.top.numel():
            top[mine] = torch.maximum(top[mine], tensors.top.amax(-1))
    for stage, peer in pairs(comm.rank, comm.size):
        heard = comm.empty(top.shape, top.dtype, top.device)
        comm.exchange({peer: [top]}, {peer: [heard]}, tag=call.message(Phase.LARGEST, stage)).wait()
        top = torch.maximum(top, heard)
    return top


def _of_heads(heads: Heads, *tensors: Any) -> Sequence[Any]:
    """Some heads of tensors [rows, heads, dim]; None stays None."""
    return tensors if heads is None else [None if x is None else x[:, heads] for x in tensors]


def _leave(call: Call, part: Part, tensors: PartTensors, out: Tensor, lse: Tensor) -> Callable[[], None]:
    """Send output and, if it is returned, lse out of the head trade."""
    heads, _ = call.recipe.widths[part.width].shares
    legs = [trade.Leg(tensors.out, part.q, heads, target=out)]
    if call.signature.return_lse:
        legs.append(trade.Leg(tensors.lse.t(), part.q, heads, target=lse.t()))
    return trade.leave(call, Phase.LEAVE, part, legs)


@dataclass(eq=False)
class PartGradients:
    """The gradients of one part inside the head trade. home [N, h_kv, D + D_v]: of the rank's own keys and values.

    out: the final output; None where ``delta`` is not exactly ``rowsum(dout * out)``.
    """

    dout: Tensor
    delta: Tensor
    out: Tensor | None
    dq: Tensor
    home: KeyGradients


def backward(
    call: Call, kernel: Kernel, insides: list[PartTensors], sinks: Tensor | None, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv and this rank's share of dsinks; all but dq in the accumulation dtype."""
    recipe, signature = call.recipe, call.signature
    by_width = {p.width: tensors for p, tensors in zip(recipe.parts, insides, strict=True)}
    incoming = [dout, dlse.t()] if signature.return_lse and dlse is not None else [dout]
    entries = {p.width: _enter_back(call, p, incoming) for p in reversed(recipe.parts) if not p.q.trivial}
    dsinks = None if sinks is None else torch.zeros(signature.heads, dtype=call.recipe.acc, device=signature.device)
    empty = partial(call.comm.empty, kept=True) if recipe.trades else torch.empty  # which peers may write directly
    dq = empty((dout.shape[0], signature.heads, signature.dim), dtype=signature.dtype, device=dout.device).zero_()
    shape = recipe.rows[1], signature.kv_heads, sum(signature.wire)
    home = KeyGradients.of(empty(shape, dtype=recipe.acc, device=dout.device).zero_(), signature.wire[0])

    def start(step: Step) -> PartGradients:
        part, width = step.part, step.part.width
        traded = [leading(x, part.q.rows) for x in incoming] if part.q.trivial else entries[width]()
        return _part_gradients(call, step, by_width[width], traded, sinks, dsinks, dq, home)

    if recipe.alone:
        (tensors,), grads = insides, start(recipe.steps[0])
        _differentiate(call, kernel, recipe.steps[0], tensors, grads, tensors.k, tensors.v, grads.home)
        _leave_back(call, recipe.parts[0], grads, dq, home.both)()
        return dq, home.dk, home.dv, dsinks
    leaves: list[Callable[[], None]] = []
    arriving = KeyExchange(call, Phase.BACK_KEYS, recipe.backward_steps)
    for step, tensors, keys, values in walk(arriving, lambda part: by_width[part.width]):
        if step.first:
            grads = start(step)
            leaving = GradientExchange(call, [s for s in recipe.steps if s.part is step.part], grads.home)
        of_step = grads.home if step.local else leaving.blank(step)
        _differentiate(call, kernel, step, tensors, grads, keys, values, of_step)
        leaving.arrive()
        if not step.local:
            own = call.uploaded.steps[step.number].own
            if own is not None:
                grads.home.both.add_(take(of_step.both, own))
            leaving.depart(step, of_step)
        if step.ends:
            leaving.finish(step.number + 1)  # the next step is local, so no gradients leave with it
            leaves.append(_leave_back(call, step.part, grads, dq, home.both))
    for finish in leaves:
        finish()
    return dq, home.dk, home.dv, dsinks


def _enter_back(call: Call, part: Part, incoming: list[Tensor]) -> Callable[[], list[Tensor]]:
    """Gradients of the output and, if there is one, of lse [T, H] on their way into the head trade."""
    heads, _ = call.recipe.widths[part.width].shares
    if call.signature.return_lse and part.width > 1 and len(incoming) == 1:  # as another rank may have one of lse
        dout = incoming[0]
        incoming = [dout, dout.new_zeros(dout.shape[:2], dtype=call.recipe.acc)]
    return trade.enter(call, Phase.BACK_ENTER, part, [trade.Leg(x, part.q, heads) for x in incoming])


def _part_gradients(
    call: Call, step: Step, tensors: PartTensors, incoming: list[Tensor], sinks: Tensor | None, dsinks: Tensor | None,
    dq: Tensor, home: KeyGradients,
) -> PartGradients:  # fmt: skip
    """A part's gradients at its first step; computes delta once for the whole backward, from the returned output.

    Without a head trade the gradients are views of the call's.
    """
    part, dout, signature = step.part, incoming[0], call.signature
    if dout.numel() and (dout.stride(2) != 1 or 0 in dout.stride()):  # autograd expands the gradient of a sum
        dout = dout.contiguous()
    dout = near(dout)
    if part.blind.size:  # their values must not reach a key through 0 * NaN
        dout = dout.index_fill(0, call.uploaded.numbers[id(part.blind)].long(), 0.0)
    delta = softmax.delta(dout, tensors.out, call.uploaded.facts[step.number][0])
    if len(incoming) > 1:
        delta = delta - incoming[1].t().masked_fill(tensors.lse == -torch.inf, 0.0)
    if dsinks is not None and sinks is not None:
        mine = call.recipe.widths[part.width].shares[0][part.share]
        weight = torch.exp(sinks.to(call.recipe.acc)[mine, None] - tensors.lse)
        weight = weight.masked_fill(tensors.lse == -torch.inf, 0.0)  # no key, and a sink of -inf
        dsinks[mine] -= (weight * delta).masked_fill(weight == 0, 0.0).sum(-1)
    if not part.kv.trivial:
        shape = *tensors.k.shape[:2], sum(signature.wire)
        home = KeyGradients.of(tensors.k.new_zeros(shape, dtype=call.recipe.acc), signature.wire[0])
    elif part.kv.rows < home.both.shape[0]:
        home = KeyGradients.of(home.both[: part.kv.rows], signature.wire[0])
    if not (part.q.trivial and signature.dtype == call.recipe.acc):
        dq = torch.zeros_like(tensors.q, dtype=call.recipe.acc)
    out = tensors.out if len(incoming) == 1 else None
    return PartGradients(dout, delta.contiguous(), out, leading(dq, part.q.rows), home)


def _differentiate(
    call: Call, kernel: Kernel, step: Step, tensors: PartTensors, part: PartGradients, keys: Tensor, values: Tensor,
    grads: KeyGradients,
) -> None:  # fmt: skip
    """Add the gradients of one step to dq and ``grads``; nothing without keys, as on a rank without rows."""
    if not len(step.pos):
        return
    with profile_range("differentiate", step.number):
        for facts, (heads, kv, score) in product(call.uploaded.facts[step.number], tensors.blocks):
            q, out, dout, dq = _of_heads(heads, tensors.q, part.out, part.dout, part.dq)
            k, v, dk, dv = _of_heads(kv, keys, values, grads.dk, grads.dv)
            lse, delta = (tensors.lse, part.delta) if heads is None else (tensors.lse[heads], part.delta[heads])
            kernel.backward(Operands(q, k, v, facts, score), Grads(dout, lse, delta, out, dq, dk, dv))


def _leave_back(call: Call, part: Part, grads: PartGradients, dq: Tensor, home: Tensor) -> Callable[[], None]:
    """Send gradients out of the head trade; key heads that several shares read are summed."""
    own, s = call.recipe.widths[part.width], call.signature
    (heads, kv), several, legs = own.shares, own.several, []
    if not part.q.trivial:
        legs.append(trade.Leg(grads.dq.to(s.dtype), part.q, heads, target=dq))
    elif s.dtype != call.recipe.acc:
        leading(dq, part.q.rows).copy_(grads.dq)
    if s.kv_grads and not part.kv.trivial:
        of_keys = grads.home.both if several or part.width == 1 else grads.home.both.to(s.dtype)
        legs.append(trade.Leg(of_keys, part.kv, kv, target=home, summed=several))
    if not legs:
        return lambda: None
    return trade.leave(call, Phase.BACK_LEAVE, part, legs)
