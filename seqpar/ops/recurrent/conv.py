"""`causal_conv1d`: the short depthwise convolution of recurrent layers, over the runs of a plan.

Each run is convolved behind the rows before it, which come from other ranks where they lie there (`rows.halo`)::

    run of 3 rows, filter of 3 taps      h h x x x   ->   y y y
                                         halo of 2

All runs are laid one after another, each behind its halo; outputs that would mix two runs are not taken. Where runs are
so short that most rows would be in a halo, rows go to a contiguous layout and results come back (`relaid`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu

from seqpar.comm import Comm, Tag
from seqpar.facts.value import Ints, Memo, cached
from seqpar.kernels import acc_dtype
from seqpar.ops.attention.source import plan_and_comm, values_of
from seqpar.ops.core.agreement import agreement, plan_fact
from seqpar.ops.core.collective_op import CollectiveOp, Record, Tensors, check_dense
from seqpar.ops.core.device import autocasts, no_autocast, stream_of
from seqpar.ops.core.precompute import recent_recurrent
from seqpar.ops.core.regions import check_repetition
from seqpar.ops.move.relayout import facts_of_rows, row_numbers
from seqpar.ops.recurrent.recompute import gradients
from seqpar.ops.recurrent.relaid import ContiguousRows
from seqpar.ops.recurrent.rows import RowMap, check_rows, document_runs, rank_runs
from seqpar.plan import Plan
from seqpar.plan.runs import check_unbranched
from seqpar.plan.travel import HALO_WAYS, TravelWay, check_travel, halo_way

ACTIVATIONS = (None, "silu")


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: Plan | Tensor,
    comm: Comm | None = None,
    *,
    activation: str | None = None,
    travel: str = "auto",
) -> Tensor:
    """This rank's rows of a causal depthwise convolution of each document. A collective, forward and backward.

    Spec over ranks, for row p of a document that starts at row s, with x zero before s:

        y[p, c] = activation(bias[c] + sum of weight[c, n] * x[p - (W - 1) + n, c] for n in 0 .. W - 1)

    x [T, C], this rank's rows; weight [C, W], as a depthwise `torch.nn.Conv1d` has it in [C, 1, W]; bias [C] or None;
    all of one floating dtype; under autocast all but float64 are cast first, as by torch's own convolutions.
    activation: None or "silu". Returns [T, C] in that dtype; pad rows are zeros, and what they hold enters nothing.
    Products are summed in float32, or float64 for float64, where the activation is computed too. Runs may be shorter
    than the filter. The gradients of weight and bias are this rank's shares: sum them over ranks.

    travel: what ranks send. "halo": each gets the W - 1 rows before each of its runs that it does not hold. "rows": all
    rows go to a contiguous layout, and results come back. "auto": what costs less by `seqpar.plan.travel`.

    In a compiled model ``plan`` is a handle, ``seqpar.bind(plan, comm)``, without a comm.

    Raises: ValueError for shapes, dtypes or an activation that do not fit, on every rank, before any byte moves;
    NotImplementedError for double backward.
    """
    return CONV(autocasts([x, weight, bias]), values_of("causal_conv1d", plan, comm), activation, travel)[0]


@dataclass(frozen=True, eq=False)
class RowsWithHalo(Memo):
    """The rows of all runs, each behind its halo: where local rows and halo rows go, and where results are taken."""

    rows: int
    halo: Ints
    local: Ints
    order: Ints
    _memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @staticmethod
    @cached
    def of(plan: Plan, rank: int, reach: int) -> RowsWithHalo:
        """The rows of a rank's runs behind halos of `reach` rows; cached."""
        own = rank_runs(plan, rank)
        numbers, tokens = np.arange(own.counts.size), own.positions.size
        local = np.arange(tokens) + reach * (1 + np.repeat(numbers, own.counts))
        halo = (own.starts[:-1] + reach * numbers)[:, None] + np.arange(reach)
        return RowsWithHalo(tokens + reach * numbers.size, halo.ravel(), local, own.local(own.positions))

    def on(self, device: torch.device) -> Sequence[Tensor]:
        """halo, local and order on a device, uploaded once per stream."""
        return self.memo(stream_of(device), lambda: row_numbers([self.halo, self.local, self.order], device))  # type: ignore[no-any-return]


@cached
def way_of_rows(plan: Plan, reach: int, size: int, travel: str) -> TravelWay:
    """How rows of `size` bytes reach filters; cached."""
    return halo_way(document_runs(plan), reach, size, travel)


def tables_of(
    plan: Plan, rank: int, reach: int, size: int, travel: str
) -> tuple[RowMap, RowsWithHalo, ContiguousRows | None]:
    """What a rank's call takes from a plan; cached. The last is None where rows stay."""
    relaid = None if way_of_rows(plan, reach, size, travel).inside is None else ContiguousRows.of(plan, rank)
    inside = plan if relaid is None else relaid.plan
    return RowMap.of(inside, rank, "halo", reach), RowsWithHalo.of(inside, rank, reach), relaid


def convolved(
    x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor, laid: RowsWithHalo, activation: str | None
) -> Tensor:
    """The convolution of a rank's rows behind their halos. before [runs * (W - 1), C]: the halos."""
    taps, dtype = weight.shape[1], acc_dtype(x.dtype)
    halo, local, order = laid.on(x.device)
    lined = x.new_zeros(laid.rows, x.shape[1]).index_copy(0, halo, before).index_copy(0, local, x[order])
    lined, filters = lined.to(dtype), weight.to(dtype)
    count = max(laid.rows - taps + 1, 0)
    y = lined[:count] * filters[:, 0]
    for tap in range(1, taps):
        y = y + lined[tap : tap + count] * filters[:, tap]
    y = y[local - (taps - 1)]
    if bias is not None:
        y = y + bias.to(dtype)
    y = (silu(y) if activation == "silu" else y).to(x.dtype)
    return x.new_zeros(x.shape).index_copy(0, order, y)


@dataclass(eq=False)
class ConvCall(Record):
    """A convolution: what its backward needs in addition to tensors."""

    rows: RowMap
    laid: RowsWithHalo
    relaid: ContiguousRows | None
    activation: str | None


def _conv(
    tensors: Sequence[Any], values: Sequence[Any], activation: str | None, travel: str, grads: Sequence[bool]
) -> tuple[list[Tensor], Tensors, ConvCall]:
    (x, weight, bias), (plan, comm) = tensors, plan_and_comm("causal_conv1d", values)
    with agreement("causal_conv1d", comm) as call:
        check_dense("causal_conv1d", tensors)
        check_rows("causal_conv1d", x, plan, comm)
        check_unbranched("causal_conv1d", plan.mask)
        _check(x, weight, bias, activation, travel)
        reach, size = weight.shape[1] - 1, x.shape[1] * x.itemsize
        way = way_of_rows(plan, reach, size, travel)
        recent_recurrent.note(comm, tables_of, reach, size, travel)
        own = {"plan": plan_fact(plan), "taps": reach + 1, "activation": activation, "bias": bias is not None}
        own["travel"] = way.travel
        call.of(plan, own | facts_of_rows(x, True in grads), apart=True)
    stamp = hash((plan, activation, way, id(comm.stats), comm.rank))
    check_repetition("causal_conv1d", comm, stamp, "plan, activation or travel")
    rows, laid, relaid = tables_of(plan, comm.rank, reach, size, travel)
    tag = Tag(call.digest, comm.next_call(), 0, 0, "causal_conv1d")
    record = ConvCall(comm, tag, rows, laid, relaid, activation, stamp=stamp)
    with no_autocast(x.device.type):
        x = x.detach() if relaid is None else relaid.there([x.detach()], comm, tag)[0]
        before = rows.apply(x, comm, tag)
        y = convolved(x, weight, bias, before, laid, activation)
        if relaid is not None:
            (y,) = relaid.home([y], comm, tag)
    return [y], [x if relaid else tensors[0], weight, bias, before], record


def _conv_back(call: ConvCall, saved: Sequence[Any], grads: Tensors, needs: Sequence[bool]) -> Tensors:
    """The gradients of x, weight and bias."""
    tag, relaid = call.way_back(), call.relaid
    x, weight, bias, before = saved
    (dy,) = grads
    with no_autocast(x.device.type):
        if dy is None:
            dy = x.new_zeros(x.shape[0] if relaid is None else relaid.rows.rows_in, x.shape[1])
        if relaid is not None:
            (dy,) = relaid.there([dy], call.comm, tag)
        dx, dweight, dbias, dbefore = gradients(
            lambda *inputs: convolved(*inputs, call.laid, call.activation),
            [x, weight, bias, before],
            [needs[0] or relaid is not None, needs[1], needs[2], True],
            [dy],
        )
        halos = torch.zeros_like(before) if dbefore is None else dbefore
        of_halos = call.rows.apply_transposed(halos, call.comm, tag)
        dx = of_halos if dx is None else dx + of_halos
        if relaid is not None:
            (dx,) = relaid.home([dx], call.comm, tag)
    return [dx if needs[0] else None, dweight, dbias]


def _check(x: Tensor, weight: object, bias: object, activation: object, travel: object) -> None:
    if x.dim() != 2 or not x.dtype.is_floating_point:
        raise ValueError(f"causal_conv1d: x must be floating [rows, channels], got {x.dtype} {list(x.shape)}")
    for name, parameter, dims in (("weight", weight, 2), ("bias", bias, 1)):
        if name == "bias" and parameter is None:
            continue
        if not isinstance(parameter, Tensor) or parameter.dim() != dims or parameter.shape[0] != x.shape[1]:
            got = list(parameter.shape) if isinstance(parameter, Tensor) else repr(parameter)
            shape = f"[{x.shape[1]}, taps]" if dims == 2 else f"[{x.shape[1]}]"
            raise ValueError(f"causal_conv1d: {name} must be {shape} for x {list(x.shape)}, got {got!s:.200}")
        if parameter.dtype != x.dtype or parameter.device != x.device:
            raise ValueError(
                f"causal_conv1d: {name} is {parameter.dtype} on {parameter.device}, x {x.dtype} on {x.device}; give "
                "both one dtype and device"
            )
    if isinstance(weight, Tensor) and weight.shape[1] == 0:
        raise ValueError("causal_conv1d: weight has no taps; give at least 1")
    if activation not in ACTIVATIONS:
        raise ValueError(f'causal_conv1d: activation must be None or "silu", got {activation!r:.200}')
    check_travel("causal_conv1d", travel, HALO_WAYS)


def _fake(x: Tensor, *_: object) -> list[Tensor]:
    return [x.new_empty(x.shape)]


CONV = CollectiveOp(
    "causal_conv1d",
    _conv,
    _fake,
    tensors="Tensor x, Tensor weight, Tensor? bias",
    options="str? activation, str travel",
    results="Tensor y",
    back=_conv_back,
)
