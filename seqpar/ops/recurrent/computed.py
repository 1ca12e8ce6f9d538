"""Recurrences over the runs of a plan: what `linear_attention` and `channel_scan` have in common.

A rank computes all of its runs at once, between exchanges of what they do to states (`whole`), or in blocks of heads
that pass states on (`blocks`). Where runs are so short that states cost more than moving rows, it does so on rows in a
contiguous layout (`relaid`). Backward computes the forward's local parts again, from the inputs and from the states
that entered. A verb's tensors are those of `seqpar.ops.recurrent.call`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqpar.comm import Comm, Tag
from seqpar.kernels import acc_dtype
from seqpar.kernels.recurrent import RecurrentKernel
from seqpar.ops.attention.source import plan_and_comm
from seqpar.ops.core.agreement import abort_on_error, agreement, plan_fact
from seqpar.ops.core.collective_op import Tensors, check_dense
from seqpar.ops.core.compared import hashed
from seqpar.ops.core.device import no_autocast
from seqpar.ops.core.precompute import recent_recurrent
from seqpar.ops.core.regions import check_repetition
from seqpar.ops.recurrent import blocks, whole
from seqpar.ops.recurrent.call import LinearCall, tables_of, way_of_layer
from seqpar.ops.recurrent.checks import most_threads
from seqpar.ops.recurrent.pipeline import StatePipeline
from seqpar.ops.recurrent.relaid import ContiguousRows
from seqpar.ops.recurrent.rows import rank_runs
from seqpar.plan import Plan
from seqpar.plan.recurrence import LayerBytes
from seqpar.plan.travel import LAYER_WAYS, check_travel


class States(NamedTuple):
    """States that this rank has, [documents, H, K, V] or [documents, C, N], and the numbers of their documents."""

    documents: Sequence[int]
    states: Tensor

    @classmethod
    def of(cls, name: str, values: Sequence[Any], states: Tensor) -> States:
        """The states that a verb returns to a rank."""
        plan, comm = plan_and_comm(name, values)
        own = rank_runs(plan, comm.rank)
        return cls(own.documents[own.closes].tolist(), states)


class CheckedCall(NamedTuple):
    """A verb's call, whose tensors are checked. facts: what ranks compare of them. scale, normalize: of q and k."""

    layer: LayerBytes
    kernel: RecurrentKernel
    facts: dict[str, Any]
    scale: float = 1.0
    normalize: bool = False
    channels: bool = False


def computed(
    name: str, tensors: Sequence[Any], values: Sequence[Any], ask: Callable[[Plan, Comm, int], CheckedCall],
    travel: str, return_state: bool, grads: Sequence[bool],
) -> tuple[list[Tensor], Tensors, LinearCall]:  # fmt: skip
    """out and states, the tensors that backward needs, and the call. A collective.

    ask(plan, comm, threads): the checks of a verb, which raise on all ranks, with the most threads that a rank has.
    """
    plan, comm = plan_and_comm(name, values)
    threads = most_threads(name, comm)
    with agreement(name, comm) as agreed:
        check_dense(name, tensors)
        asked = ask(plan, comm, threads)
        check_travel(name, travel, LAYER_WAYS)
        v, (*_, rates, initial) = tensors[2], tensors
        way = way_of_layer(plan, travel, asked.layer)
        recent_recurrent.note(comm, tables_of, travel, asked.layer, asked.kernel, v.device)
        facts = {
            "plan": plan_fact(plan), "dtype": v.dtype, "device": v.device.type, **asked.facts,
            "initial": initial is not None, "scale": asked.scale, "normalize": asked.normalize,
            "kernel": asked.kernel.name, "travel": way[:2], "return_state": bool(return_state),
            # where rows move, a rank computes gradients of rows of others
            "requires grad": True in grads if way.inside is None else tuple(grads),
        }  # fmt: skip
        agreed.of(plan, facts, apart=True)
        if comm.check_every == "call":
            equal = {"rates": rates, "initial_state": initial}
            agreed.values = {f"a hash of {title}": hashed(x) for title, x in equal.items() if x is not None}
    stamp = hash((plan, str(asked.scale), asked.normalize, asked.kernel.name, way, id(comm.stats), comm.rank))
    check_repetition(name, comm, stamp, "plan, scale or travel")
    side, passed, relaid = tables_of(plan, comm.rank, travel, asked.layer, asked.kernel, v.device)
    tag = Tag(agreed.digest, comm.next_call(), 0, 0, name)
    call = LinearCall(
        comm, tag, side, passed, relaid, asked.kernel, asked.scale, asked.normalize, bool(return_state), asked.channels,
        True in grads, stamp=stamp,
    )  # fmt: skip
    saved = list(tensors)
    with abort_on_error(comm, f"{name}, call {tag.call}"), no_autocast(v.device.type), torch.no_grad():
        if relaid is not None:
            saved[:5] = relaid.there(saved[:5], comm, tag)
        out, states, kept = _module_of(call).forward(call, call.inputs(saved), tag)
        if relaid is not None:
            (out,) = relaid.home([out], comm, tag)
            states = relaid.final_home(states, comm, tag) if return_state else states
    states = states if return_state else states[:0]
    # `data`: a result that views another may not be changed in place
    return [(x[..., 0] if call.channels else x).data for x in (out, states)], [*saved, *kept], call


def differentiated(
    call: LinearCall, saved: Sequence[Any], grads: Tensors, needs: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of a verb's tensors, from those of out and states. A collective."""
    tag, comm, relaid, name = call.way_back(), call.comm, call.relaid, call.tag.name
    tensors, kept = saved[:7], saved[7:]
    inputs = call.inputs(tensors)
    dout, dstates = (x[..., None] if call.channels and x is not None else x for x in grads)
    with abort_on_error(comm, f"{name}, call {tag.call}"), no_autocast(inputs[2].device.type):
        if relaid is not None:
            dout, dstates = _grads_there(relaid, call, dout, dstates, inputs, tag)
        if not call.return_state:
            dstates = None
        found = _module_of(call).backward(call, inputs, kept, dout, dstates, needs, tag)
        if relaid is None:
            return [_shaped(g, x) if need else None for x, g, need in zip(tensors, found, needs, strict=True)]
        full = [x if x is None else _shaped(g, x) for x, g in zip(tensors, found, strict=True)]
        full[:5] = relaid.home(full[:5], comm, tag)
    return [g if need else None for g, need in zip(full, needs, strict=True)]


def _shaped(grad: Tensor | None, x: Tensor) -> Tensor:
    """The gradient of a verb's tensor, from that of the same with all dims; None for zero."""
    return torch.zeros_like(x) if grad is None else grad.reshape(x.shape)


def _module_of(call: LinearCall) -> Any:
    """The module with the forward and the backward of a call."""
    return blocks if isinstance(call.passing, StatePipeline) else whole


def _grads_there(
    relaid: ContiguousRows,
    call: LinearCall,
    dout: Tensor | None,
    dstates: Tensor | None,
    inputs: Sequence[Any],
    tag: Tag,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of results on the ranks that computed them. inputs: of those ranks."""
    q, _, v, *_ = inputs
    dout = v.new_zeros(relaid.rows.rows_in, *v.shape[1:]) if dout is None else dout
    (dout,) = relaid.there([dout], call.comm, tag)
    if not call.return_state:
        return dout, None
    if dstates is None:
        shape = relaid.final.rows_out, v.shape[1], q.shape[2], v.shape[2]
        dstates = v.new_zeros(shape, dtype=acc_dtype(v.dtype))
    return dout, relaid.final_there(dstates, call.comm, tag)
