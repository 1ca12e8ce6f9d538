"""`state_scan`: the state that enters every document run, from what each run does to a state.

A run leaves the state ``S_out = M S_in + S``: S is what it leaves from zero, M its map of the state that enters. So
the state that enters run n of a document follows from the runs before it, wherever they are::

    S_in(0) = 0      S_in(1) = S(0)      S_in(2) = M(1) S(1-1) + S(1)      S_in(3) = M(2) S_in(2) + S(2)   ...

Each rank gets S and M of the runs before its own and folds them, all documents at once: one exchange each way, of two
tensors. A document's first run is never multiplied, and its map never sent.

Source: Sun et al. 2025 (LASP-2), with maps, and with need-only rows in place of an all-gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seqpar.comm import Comm, Tag
from seqpar.facts.value import Memo
from seqpar.kernels import acc_dtype
from seqpar.ops.core.agreement import abort_on_error, agreement, digest_of_call
from seqpar.ops.core.autocast import no_autocast
from seqpar.ops.core.collective_op import CollectiveOp, Record, Tensors
from seqpar.ops.core.device import stream_of
from seqpar.ops.core.repetition import check_repetition
from seqpar.ops.move.relayout import Moves, exchanged, row_numbers
from seqpar.ops.recurrent.recompute import gradients
from seqpar.ops.recurrent.rows import check_plan, document_runs, moves_of, plan_and_comm
from seqpar.plan import Plan
from seqpar.plan.runs import Chain


def state_scan(states: Tensor, maps: Tensor, plan: Plan, comm: Comm) -> Tensor:
    """The state that enters each of this rank's document runs. A collective, forward and backward.

    states [runs, H, K, V]: what each run leaves from a zero state, in position order. maps: of the entering state,
    [runs, H] or [runs, H, K] logarithms of factors, or [runs, H, K, K] matrices that multiply from the left; of any
    value for a document's first run. The number of runs is ``seqpar.recurrent.runs(plan, rank).counts.size``.

    Returns [runs, H, K, V], zeros for a document's first run, in float64 for float64 states and float32 for others,
    which is also the dtype that travels. A rank gets the states of all runs before its last one in each document, and
    their maps, each once. Differentiable in states and maps.

    Raises: ValueError for shapes that do not fit the plan or each other, on every rank; NotImplementedError in a
    compiled model, where the number of runs is unknown, and for double backward.
    """
    if torch.compiler.is_compiling():
        raise NotImplementedError("state_scan: not supported in a compiled model; call it outside")
    return SCAN([states, maps], [plan, comm])[0]


@dataclass(frozen=True, eq=False)
class Folding(Memo):
    """A rank's part of a scan: the moves of states and of maps, and how arrived and own runs are folded.

    Tables of a level: the runs whose states and maps it takes, among own and then arrived ones.
    """

    states: Moves
    maps: Moves
    chain: Chain
    of_maps: list[np.ndarray[Any, Any]]
    _memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, plan: Plan, rank: int) -> Folding:
        """A rank's part of a plan."""
        table = document_runs(plan)
        own, chain = table.of_rank(rank), Chain.of(table, rank)
        requests = table.earlier_runs()
        later = ~table.opens[requests.item]
        local = lambda numbers: np.searchsorted(own, numbers)  # noqa: E731
        arrived, states = moves_of(requests, rank, own.size, local)
        mapped, maps = moves_of(type(requests)(*(column[later] for column in requests)), rank, own.size, local)
        # the place among own and arrived maps of each own and arrived state; any place for a first run
        order = np.argsort(mapped)
        at = np.minimum(np.searchsorted(mapped[order], arrived), max(order.size - 1, 0))
        place = np.concatenate([np.arange(own.size), own.size + (order[at] if order.size else 0 * at)])
        return cls(states, maps, chain, [place[level] for level in chain.levels])

    def on(self, device: torch.device) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """The levels' numbers of states and of maps, and the row of the state that enters each run, counted from 1."""
        return self.memo(stream_of(device), lambda: _on(self, device))  # type: ignore[no-any-return]


def _on(folding: Folding, device: torch.device) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    arrays = [*folding.chain.levels, *folding.of_maps, folding.chain.entered + 1]
    *tables, entered = row_numbers(arrays, device)
    half = len(tables) // 2
    return list(zip(tables[:half], tables[half:], strict=True)), entered


def folded(states: Tensor, maps: Tensor, far_states: Tensor, far_maps: Tensor, folding: Folding) -> Tensor:
    """The states that enter the rank's runs, from its own and the arrived states and maps."""
    levels, entered = folding.on(states.device)
    known, mapped = torch.cat([states, far_states]), torch.cat([maps, far_maps])
    left = [known.new_zeros(1, *known.shape[1:])]
    for n, (of_states, of_maps) in enumerate(levels):
        state = known[of_states]
        if n:
            state = state + applied(mapped[of_maps], left[-1][: len(of_maps)])
        left.append(state)
    return torch.cat(left)[entered]


def applied(maps: Tensor, states: Tensor) -> Tensor:
    """Maps, as `state_scan` takes them, of states [runs, H, K, V]."""
    if maps.dim() == 4:
        return maps @ states
    return maps.exp()[(..., *[None] * (4 - maps.dim()))] * states


@dataclass(eq=False)
class ScanCall(Record):
    """A scan: what its backward needs besides tensors."""

    folding: Folding


def _scan(
    tensors: Sequence[Any], values: Sequence[Any], grads: Sequence[bool]
) -> tuple[list[Tensor], Tensors, ScanCall]:
    (states, maps), (plan, comm) = tensors, plan_and_comm("state_scan", values)
    number = comm.next_call()
    with agreement("state_scan", comm) as call:
        folding = _checked(states, maps, plan, comm)
        call.facts = {
            "plan": plan.digest(), "dtypes": (states.dtype, maps.dtype), "device": states.device.type,
            "dims": (states.shape[1:], maps.shape[1:]), "requires grad": True in grads,
        }  # fmt: skip
        if comm.size > 1:
            key = "state_scan", *call.facts.values()
            call.digest = plan.memo(key, lambda: digest_of_call("state_scan", call.facts))
    stamp = hash((plan, id(comm.stats), comm.rank))
    check_repetition("state_scan", comm, stamp, "plan", recorded=True in grads)
    record = ScanCall(comm, Tag(call.digest, number, 0, 0, "state_scan"), folding, stamp=stamp)
    dtype = acc_dtype(states.dtype)
    wide_states, wide_maps = states.to(dtype), maps.to(dtype)
    with abort_on_error(comm, f"state_scan, call {number}"), no_autocast(states.device.type):
        far = exchanged([wide_states, wide_maps], comm, [folding.states, folding.maps], record.tag)
        entered = folded(wide_states, wide_maps, *far, folding)
    return [entered], [states, maps, *far], record


def _scan_back(call: ScanCall, saved: Sequence[Any], grads: Tensors, needs: Sequence[bool]) -> Tensors:
    """The gradients of states and maps."""
    tag, folding = call.way_back(), call.folding
    states, maps, *far = saved
    dtype = far[0].dtype
    with abort_on_error(call.comm, f"state_scan, call {tag.call}"), no_autocast(states.device.type):
        inputs = [states.to(dtype), maps.to(dtype), *far]
        found = gradients(lambda *x: folded(*x, folding), inputs, [True] * 4, grads)
        local, remote = (
            found[:2],
            [torch.zeros_like(x) if g is None else g for g, x in zip(found[2:], far, strict=True)],
        )
        moves = [folding.states.transposed(), folding.maps.transposed()]
        home = exchanged(remote, call.comm, moves, tag)
        sums = [x if g is None else g + x for g, x in zip(local, home, strict=True)]
    return [x.to(y.dtype) if need else None for x, y, need in zip(sums, (states, maps), needs, strict=True)]


def _checked(states: object, maps: object, plan: Plan, comm: Comm) -> Folding:
    """The folding of a plan's runs on this rank, for states and maps that fit it."""
    check_plan("state_scan", plan, comm)
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
    return plan.memo(("folding", comm.rank), lambda: Folding.of(plan, comm.rank))  # type: ignore[no-any-return]


def _fake(states: Tensor, maps: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return states.new_empty(states.shape, dtype=acc_dtype(states.dtype)), torch.empty(
        (), dtype=torch.int64, device="cpu"
    )


def _fake_back(
    dentered: Tensor | None, states: Tensor, maps: Tensor, entered: Tensor, ticket: Tensor, needs: Sequence[bool]
) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape if need else 0) for x, need in zip((states, maps), needs, strict=True))


SCAN = CollectiveOp("state_scan", _scan, back=_scan_back)
SCAN.define(2, "(Tensor states, Tensor maps, Tensor[] handles, bool[] grads) -> (Tensor entered, Tensor ticket)", _fake)
SCAN.define_back(
    "(Tensor? dentered, Tensor states, Tensor maps, Tensor entered, Tensor ticket, bool[] needs) "
    "-> (Tensor dstates, Tensor dmaps)",
    _fake_back,
)
