"""A call of `linear_attention` on one rank: its part of the plan, and its rows as kernels take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from seqpar.kernels import acc_dtype
from seqpar.kernels.recurrent import Recurrence, RecurrentKernel
from seqpar.ops.core.collective_op import Record
from seqpar.ops.recurrent.chain import StateChain
from seqpar.ops.recurrent.gather import StateGather
from seqpar.ops.recurrent.local import LocalRuns
from seqpar.ops.recurrent.pipeline import StatePipeline
from seqpar.ops.recurrent.relaid import Relaid
from seqpar.ops.recurrent.rows import document_runs
from seqpar.ops.recurrent.scan import passing
from seqpar.plan import Plan
from seqpar.plan.recurrence import LayerBytes
from seqpar.plan.travel import TravelWay, layer_way

StatesPassing = StateGather | StateChain | StatePipeline


@dataclass(eq=False)
class LinearCall(Record):
    """A call of `linear_attention`: what its backward needs besides tensors."""

    side: LocalRuns
    passing: StatesPassing | None  # None if no document is on several ranks
    relaid: Relaid | None
    kernel: RecurrentKernel
    scale: float
    normalize: bool
    return_state: bool

    def recurrence(self, rows: Sequence[Tensor | None]) -> Recurrence:
        """Some rows of q, k, v, decay and beta, normalised and in the dtypes that the kernel wants."""
        own, v = list(rows), rows[2]
        assert v is not None
        dtype = acc_dtype(v.dtype)
        if self.normalize:
            wide = [x.to(dtype) for x in rows[:2] if x is not None]
            own[:2] = [x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in wide]
        dtypes = [dtype if self.kernel.casts else v.dtype] * 3 + [dtype] * 2
        own = [None if x is None else x.to(kind) for x, kind in zip(own, dtypes, strict=True)]
        return Recurrence(*own, self.scale)  # type: ignore[arg-type]


def way_of_layer(plan: Plan, travel: str, layer: LayerBytes) -> TravelWay:
    """How states or rows of a layer travel, the same on all ranks whose tensors agree; cached."""
    make = lambda: layer_way(document_runs(plan), layer, travel)  # noqa: E731
    return plan.memo(("layer way", travel, layer), make)  # type: ignore[no-any-return]


def tables_of(
    plan: Plan, rank: int, travel: str, layer: LayerBytes, kernel: RecurrentKernel, device: torch.device
) -> tuple[LocalRuns, StatesPassing | None, Relaid | None]:
    """What a rank's call takes from a plan; cached. None where nothing passes, and where rows stay."""
    relaid, inside, way = None, plan, way_of_layer(plan, travel, layer)
    if way.inside is not None:
        relaid = Relaid.of(plan, rank)
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
