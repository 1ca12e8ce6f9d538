"""A call of `linear_attention` or `channel_scan` on one rank: its part of the plan, and its rows as kernels take them.

A verb's tensors are q, k, v, decay and beta, which have rows, rates and initial states; None for those it has not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seqpar.facts.value import cached
from seqpar.kernels import acc_dtype
from seqpar.kernels.recurrent import Recurrence, RecurrentKernel
from seqpar.ops.core.collective_op import Record
from seqpar.ops.recurrent.chain import StateChain
from seqpar.ops.recurrent.checks import channel_dims
from seqpar.ops.recurrent.gather import StateGather
from seqpar.ops.recurrent.local import LocalRuns
from seqpar.ops.recurrent.pipeline import StatePipeline
from seqpar.ops.recurrent.relaid import ContiguousRows
from seqpar.ops.recurrent.rows import document_runs
from seqpar.ops.recurrent.scan import passing
from seqpar.plan import Plan
from seqpar.plan.recurrence import LayerBytes
from seqpar.plan.travel import TravelWay, layer_way

FORGETS = -750.0  # a logarithm whose factor is 0 in float64, as are those of all below it

StatesPassing = StateGather | StateChain | StatePipeline


@dataclass(eq=False)
class LinearCall(Record):
    """A call: what its backward needs in addition to tensors.

    channels: of `channel_scan`, whose tensors lack dims of heads and of values: each channel is a head of one value.
    recorded: a backward may follow.
    """

    side: LocalRuns
    passing: StatesPassing | None  # None if no document is on several ranks
    relaid: ContiguousRows | None
    kernel: RecurrentKernel
    scale: float
    normalize: bool
    return_state: bool
    channels: bool
    recorded: bool

    def inputs(self, tensors: Sequence[Any]) -> list[Any]:
        """A verb's tensors with all dims; q and k that `channel_scan` has not are ones."""
        if not self.channels:
            return list(tensors)
        q, k, v, decay, beta, rates, initial = tensors
        ones = v.new_ones(v.shape[0], 1, channel_dims(q, k, rates, initial))
        q, k = (ones if x is None else x[:, None] for x in (q, k))
        return [q, k, v[..., None], decay, beta, rates, None if initial is None else initial[..., None]]

    def recurrence(self, rows: Sequence[Tensor | None], rates: Tensor | None) -> Recurrence:
        """Some rows of q, k, v, decay and beta, normalised, and rates, in the dtypes that the kernel wants."""
        own, v = list(rows), rows[2]
        assert v is not None
        dtype = acc_dtype(v.dtype)
        if self.normalize:
            wide = [x.to(dtype) for x in rows[:2] if x is not None]
            own[:2] = [x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in wide]
        dtypes = [dtype if self.kernel.casts else v.dtype] * 3 + [dtype] * 2
        own = [None if x is None else x.to(kind) for x, kind in zip(own, dtypes, strict=True)]
        if own[3] is not None and rates is None:
            own[3] = own[3].clamp(min=FORGETS)  # kernels subtract sums of decays
        return Recurrence(*own, self.scale, None if rates is None else rates.to(dtype))  # type: ignore[arg-type]


@cached
def way_of_layer(plan: Plan, travel: str, layer: LayerBytes) -> TravelWay:
    """How states or rows of a layer travel, the same on all ranks whose tensors agree; cached."""
    return layer_way(document_runs(plan), layer, travel)


def tables_of(
    plan: Plan, rank: int, travel: str, layer: LayerBytes, kernel: RecurrentKernel, device: torch.device
) -> tuple[LocalRuns, StatesPassing | None, ContiguousRows | None]:
    """What a rank's call takes from a plan; cached. None where nothing passes, and where rows stay."""
    relaid, inside, way = None, plan, way_of_layer(plan, travel, layer)
    if way.inside is not None:
        relaid = ContiguousRows.of(plan, rank)
        inside, way = relaid.plan, way.inside
    side = LocalRuns.of(inside, rank)
    if way.travel == "pipeline" and way.steps:
        pipeline = StatePipeline.of(inside, rank, way.blocks)
        if device.type == "cpu":
            pipeline.all_tables(kernel, device)
        return side, pipeline, relaid
    if device.type == "cpu":
        side.tables(kernel, device)
    return side, passing(inside, rank, way) if way.steps else None, relaid
