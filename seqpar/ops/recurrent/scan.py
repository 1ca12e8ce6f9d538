"""`state_scan`: the state that enters every document run, from what each run does to a state.

A run leaves the state ``S_out = M S_in + S``: S is what it leaves from zero, M its map of the state that enters. So
the state that enters run n of a document follows from the runs before it, wherever they are. Either all of those come
in one exchange (`gather`), or what the run before has left comes in steps (`chain`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seqpar.comm import Comm, Tag
from seqpar.facts.value import cached
from seqpar.kernels import acc_dtype
from seqpar.ops.attention.source import check_plan, plan_and_comm
from seqpar.ops.core.agreement import abort_on_error, agreement, plan_fact
from seqpar.ops.core.collective_op import CollectiveOp, Record, Tensors, check_dense
from seqpar.ops.core.device import no_autocast
from seqpar.ops.core.precompute import recent_recurrent
from seqpar.ops.core.regions import check_repetition
from seqpar.ops.recurrent.chain import StateChain
from seqpar.ops.recurrent.gather import StateGather
from seqpar.ops.recurrent.rows import document_runs
from seqpar.plan import Plan
from seqpar.plan.recurrence import LayerBytes
from seqpar.plan.runs import check_unbranched
from seqpar.plan.travel import STATE_WAYS, TravelWay, check_travel, state_way


def state_scan(states: Tensor, maps: Tensor, plan: Plan, comm: Comm, *, travel: str = "auto") -> Tensor:
    """The state that enters each of this rank's document runs. A collective, forward and backward.

    states [runs, H, K, V]: what each run leaves from a zero state, in position order. maps: of the entering state,
    [runs, H] or [runs, H, K] logarithms of factors, or [runs, H, K, K] matrices that multiply from the left; of any
    value for a document's first run. The number of runs is ``seqpar.recurrent.runs(plan, rank).counts.size``.

    travel: "gather", in one exchange each way: a rank gets the states of all runs before its last one in each document,
    and their maps, each once. "chain": each run gets one state, of the run before it, in blocks of heads, in as many
    exchanges as there are ranks' borders in a document, and one less than blocks more. "auto": the one that costs less
    by `seqpar.plan.travel`.

    Returns [runs, H, K, V], zeros for a document's first run, in float64 for float64 states and float32 for others,
    which is also the dtype that travels. Differentiable in states and maps.

    Raises: ValueError for shapes that do not fit the plan or each other, or an unknown travel, on every rank;
    NotImplementedError in a compiled model, where the number of runs is unknown, and for double backward.
    """
    if torch.compiler.is_compiling():
        raise NotImplementedError("state_scan: not supported in a compiled model; call it outside")
    return SCAN([states, maps], [plan, comm], travel)[0]


@cached
def way_of_states(plan: Plan, travel: str, layer: LayerBytes) -> TravelWay:
    """How states travel, the same on all ranks whose tensors agree; cached."""
    return state_way(document_runs(plan), layer, travel)


def tables_of(plan: Plan, rank: int, travel: str, layer: LayerBytes) -> StateGather | StateChain:
    """What a rank's call takes from a plan; cached."""
    return passing(plan, rank, way_of_states(plan, travel, layer))


def passing(plan: Plan, rank: int, way: TravelWay) -> StateGather | StateChain:
    """A rank's part of the passing of states; cached."""
    table = document_runs(plan)
    if way.travel == "gather":
        return plan.memo(("gather", rank), lambda: StateGather.of(table, rank))  # type: ignore[no-any-return]
    return plan.memo(("chain", way.blocks, rank), lambda: StateChain.of(table, rank, way.blocks))  # type: ignore[no-any-return]


@dataclass(eq=False)
class ScanCall(Record):
    """A scan: what its backward needs in addition to tensors."""

    passing: StateGather | StateChain


def _scan(
    tensors: Sequence[Any], values: Sequence[Any], travel: str, grads: Sequence[bool]
) -> tuple[list[Tensor], Tensors, ScanCall]:
    (states, maps), (plan, comm) = tensors, plan_and_comm("state_scan", values)
    with agreement("state_scan", comm) as call:
        check_dense("state_scan", tensors)
        layer = _checked(states, maps, plan, comm, travel)
        way = way_of_states(plan, travel, layer)
        recent_recurrent.note(comm, tables_of, travel, layer)
        facts = {
            "plan": plan_fact(plan), "dtypes": (states.dtype, maps.dtype), "device": states.device.type,
            "dims": (states.shape[1:], maps.shape[1:]), "travel": way[:2], "requires grad": True in grads,
        }  # fmt: skip
        call.of(plan, facts)
    stamp = hash((plan, way[:2], id(comm.stats), comm.rank))
    check_repetition("state_scan", comm, stamp, "plan or travel")
    tag = Tag(call.digest, comm.next_call(), 0, 0, "state_scan")
    record = ScanCall(comm, tag, passing(plan, comm.rank, way), stamp=stamp)
    wide = [x.to(acc_dtype(states.dtype)) for x in tensors]
    with abort_on_error(comm, f"state_scan, call {tag.call}"), no_autocast(states.device.type):
        kept = record.passing.forward(*wide, comm, tag)
    return kept[:1], [states, maps, *kept], record


def _scan_back(call: ScanCall, saved: Sequence[Any], grads: Tensors, needs: Sequence[bool]) -> Tensors:
    """The gradients of states and maps."""
    tag, (states, maps, *kept) = call.way_back(), saved
    entered = kept[0]
    (dentered,) = grads
    dentered = torch.zeros_like(entered) if dentered is None else dentered
    with abort_on_error(call.comm, f"state_scan, call {tag.call}"), no_autocast(states.device.type):
        wide = states.to(entered.dtype), maps.to(entered.dtype)
        found = call.passing.backward(*wide, kept, dentered, call.comm, tag)
    return [g.to(x.dtype) if need else None for g, x, need in zip(found, (states, maps), needs, strict=True)]


def _checked(states: object, maps: object, plan: Plan, comm: Comm, travel: object) -> LayerBytes:
    """The bytes of states and maps that fit a plan."""
    check_plan("state_scan", plan, comm)
    check_unbranched("state_scan", plan.mask)
    if not isinstance(states, Tensor) or not isinstance(maps, Tensor):
        raise TypeError(f"state_scan takes two tensors, got {type(states).__name__} and {type(maps).__name__}")
    runs = document_runs(plan).of_rank(comm.rank).size
    if states.dim() != 4 or states.shape[0] != runs or not states.dtype.is_floating_point:
        raise ValueError(
            f"state_scan: states on rank {comm.rank} must be floating [{runs} runs, heads, keys, values], got "
            f"{states.dtype} {list(states.shape)}"
        )
    n, h, k, _ = states.shape
    shapes = [[n, h], [n, h, k], [n, h, k, k]]
    if list(maps.shape) not in shapes or not maps.dtype.is_floating_point or maps.device != states.device:
        raise ValueError(
            f"state_scan: maps must be floating of shape {shapes[0]}, {shapes[1]} or {shapes[2]} on {states.device}, "
            f"got {maps.dtype} {list(maps.shape)} on {maps.device}"
        )
    check_travel("state_scan", travel, STATE_WAYS)
    size = acc_dtype(states.dtype).itemsize
    return LayerBytes(h, states.shape[1:].numel() * size, maps.shape[1:].numel() * size)


def _fake(states: Tensor, *_: object) -> list[Tensor]:
    return [states.new_empty(states.shape, dtype=acc_dtype(states.dtype))]


SCAN = CollectiveOp(
    "state_scan",
    _scan,
    _fake,
    tensors="Tensor states, Tensor maps",
    options="str travel",
    results="Tensor entered",
    back=_scan_back,
    reads_results=True,
)
