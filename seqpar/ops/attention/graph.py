"""Attention in graphs: the ops that compiled models run, and that dispatch modes see.

::

    seqpar::attention           q k v sinks slopes, handles, options   ->  out lse ticket
    seqpar::attention_backward  gradients, q k v out lse, ticket       ->  dq dk dv dsinks

Plan and comm come through handles and are looked up when the op runs. While a graph is traced nobody knows them, so
fake results depend on q and v alone, and what backward needs of the call beyond its tensors, a `Record`, rides in the
storage of the ticket: where autograd, a recomputation or a compiled graph takes the ticket, it comes along.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from seqpar.kernels import acc_dtype
from seqpar.ops.attention.api import agreed_call, attend, differentiate, refuse_double_backward
from seqpar.ops.attention.call import Call, Inside, Options
from seqpar.ops.attention.recompute import check, late_of, settle
from seqpar.ops.core.handles import carried, carry, uncompiled, values_of
from seqpar.plan import Part, Plan

Kept = tuple[Tensor | None, ...]  # q, k, v, out, lse of one part inside the head trade; None: as outside


@dataclass(eq=False)
class Record:
    """What forward leaves to backward besides the op's arguments and results, whose memory it must not refer to: the
    graph may write over that. call: without slopes. passes: backward passes so far. kept: of each part, or nothing."""

    call: Call
    kept: list[Kept] | None
    passes: int = 0


@uncompiled
def _forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, slopes: Tensor | None, handles: Sequence[Tensor],
    scale: float | None, softcap: float, dropout_p: float, dropout_seed: int | None, deterministic: bool, kernel: str,
    return_lse: bool, grads: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    late, given = late_of(handles)
    options = Options(scale, softcap, dropout_p, dropout_seed, deterministic, kernel, return_lse)
    plan, comm, seed = settle(late, values_of(given, Plan) if given else (), options)
    call = agreed_call(q, k, v, sinks, slopes, plan, comm, options._replace(dropout_seed=seed), grads)
    out, lse, insides = attend(call, q, k, v, sinks)
    parts, kept = call.parts(), None
    if any(grads) and not all(part.trivial for part in parts):
        kept = [_kept(part, inside, (q, k, v)) for part, inside in zip(parts, insides, strict=True)]
    return out, lse, carry(Record(replace(call, score=replace(call.score, slopes=None)), kept))


def _kept(part: Part, inside: Inside, outside: Sequence[Tensor]) -> Kept:
    """What of a part backward cannot take from the op's arguments and results, in memory of its own."""
    traded = (inside.q, inside.k, inside.v)
    own = [x.clone() if _same_memory(x, y) else x for x, y in zip(traded, outside, strict=True)]
    return (*own, *((None, None) if part.q.trivial else (inside.out, inside.lse)))


def _same_memory(x: Tensor, y: Tensor) -> bool:
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    if any(x.dim() != 3 for x in (q, k, v)):
        raise ValueError(f"q, k, v must be packed [rows, heads, dim], got {[list(x.shape) for x in (q, k, v)]}")
    rows, heads, _ = q.shape
    ticket = torch.empty((), dtype=torch.int64, device="cpu")
    return q.new_empty(rows, heads, v.shape[2]), q.new_empty(heads, rows, dtype=acc_dtype(q.dtype)), ticket


@uncompiled
def _backward(
    dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None,
    slopes: Tensor | None, out: Tensor, lse: Tensor, ticket: Tensor, needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    (record,) = carried(ticket)
    call: Call = replace(record.call, repeat=record.passes)
    record.passes += 1
    if slopes is not None:
        call = replace(call, score=replace(call.score, slopes=slopes.to(call.acc).contiguous()))
    parts = call.parts()
    kept = record.kept or [(q[: p.q.rows], k[: p.kv.rows], v[: p.kv.rows], None, None) for p in parts]
    dq, dk, dv, dsinks = differentiate(call, [Inside(*x) for x in kept], sinks, out, lse, dout, dlse)
    return (
        dq if needs[0] else lse.new_empty(0),
        _apart(dk, call) if needs[1] else lse.new_empty(0),
        _apart(dv, call) if needs[2] else lse.new_empty(0),
        dsinks.to(sinks.dtype) if needs[3] and sinks is not None and dsinks is not None else lse.new_empty(0),
    )


def _apart(x: Tensor, call: Call) -> Tensor:
    """dk or dv in memory of its own: both are views of one tensor, and results of an op may not be."""
    return x.to(call.dtype, copy=True, memory_format=torch.contiguous_format)


def _fake_backward(
    dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None,
    slopes: Tensor | None, out: Tensor, lse: Tensor, ticket: Tensor, needs: Sequence[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    pairs = zip((q, k, v, sinks), needs, strict=True)
    return tuple(x.new_empty(x.shape) if x is not None and need else lse.new_empty(0) for x, need in pairs)


class _Attention(torch.autograd.Function):
    """The ops in autograd. All is saved, as nobody knows what will be traded."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        ctx.recomputes = False
        with torch._C._AutoDispatchBelowAutograd():
            out, lse, ticket = torch.ops.seqpar.attention(*arguments)
        ctx.set_materialize_grads(False)
        ctx.call = carried(ticket)[0].call if type(ticket) is Tensor else None  # none while a graph is traced
        ctx.mark_non_differentiable(ticket)
        ctx.save_for_backward(*arguments[:5], out, lse, ticket)
        return out, lse, ticket

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        needs, saved = list(ctx.needs_input_grad[:4]), ctx.saved_tensors
        if ctx.call is not None and type(saved[-1]) is Tensor:
            check(ctx.call, carried(saved[-1])[0].call)
        found = torch.ops.seqpar.attention_backward(dout, dlse, *saved, needs)
        return (*(x if need else None for x, need in zip(found, needs, strict=True)), *[None] * 10)


@uncompiled
def _differentiable(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in arguments[:4]):
        return _Attention.apply(*arguments)  # type: ignore[no-any-return]
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.seqpar.attention(*arguments)  # type: ignore[no-any-return]


_LIBRARY = torch.library.Library("seqpar", "FRAGMENT")
_LIBRARY.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? alibi_slopes, Tensor[] handles, float? scale, "
    "float softcap, float dropout_p, SymInt? dropout_seed, bool deterministic, str kernel, bool return_lse, "
    "bool[] grads) -> (Tensor out, Tensor lse, Tensor ticket)",
    tags=torch.Tag.pt2_compliant_tag,
)
_LIBRARY.define(
    "attention_backward(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor? sinks, "
    "Tensor? alibi_slopes, Tensor out, Tensor lse, Tensor ticket, bool[] needs) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
    tags=torch.Tag.pt2_compliant_tag,
)
_LIBRARY.impl("attention", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("attention", _differentiable, "Autograd")
_LIBRARY.impl("attention_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("seqpar::attention", _fake_forward, lib=_LIBRARY)
torch.library.register_fake("seqpar::attention_backward", _fake_backward, lib=_LIBRARY)
