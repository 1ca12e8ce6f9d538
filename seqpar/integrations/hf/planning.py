"""Plans for a transformers model: a document is only spread over ranks if that gains enough time.

Spreading has costs outside a plan's forecast: the host plans the batch, rows move to other ranks, and keys follow them
in every layer. Its gain is at most the slowest rank's time with its own documents, less the bound that no plan beats:
seconds for long documents, microseconds for short ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedModel

from seqpar.data.union import Brought, layout_of
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.facts.value import Ints
from seqpar.integrations.hf.shape import shape_of
from seqpar.plan import Plan
from seqpar.planner import Forecast, Hardware, ModelShape, plan_batch
from seqpar.planner.bound import document_ticks, lower_bound
from seqpar.planner.cost import Ticks
from seqpar.planner.memory import Memory
from seqpar.planner.scale import weights_for

# Seconds that spreading a batch costs besides computing it. For 8 documents of 128 tokens on 2 ranks of an Intel Xeon:
# 2 ms for planning, 1.5 ms for moving rows, 1 ms per layer for exchanging keys.
SPREADING = 3e-3


class State(NamedTuple):
    """The properties of a model that plans depend on and that may change: recomputation, and the device type."""

    recomputed: bool
    device: str


class ModelPlanner:
    """Plans batches for a model of one shape, in its current `State`."""

    def __init__(self, model: PreTrainedModel, *, causal: bool) -> None:
        self._model, self._causal = model, causal
        # cached: it is asked for every batch, and walking a model takes long
        self._recomputing = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
        self._weighed: dict[State, tuple[ModelShape, Hardware]] = {}

    def state(self) -> State:
        """The inputs of a plan besides the batch."""
        recomputed = any(module.gradient_checkpointing for module in self._recomputing)
        return State(recomputed, self._model.device.type)

    def __call__(self, lengths: Ints, ranks: int, state: Any, brought: Brought | None) -> Plan:
        """The plan of documents of these lengths. brought: None if every rank has all documents."""
        mask = Mask(lengths, causal=self._causal)
        shape, machine = self._weigh(state)
        if brought is not None and ranks > 1:
            source = layout_of(lengths, brought)
            apart = forecast_apart(mask, source, shape, machine)
            if apart.seconds - apart.least <= SPREADING:
                return Plan(mask, source).with_forecast(apart)
        return plan_batch(lengths, ranks, masks=mask, model=shape, hardware=machine)

    def _weigh(self, state: State) -> tuple[ModelShape, Hardware]:
        if state not in self._weighed:
            # the device decides how much fits: its memory, and what else uses it, is unknown
            machine = replace(Hardware.preset("cpu" if state.device == "cpu" else "h100"), memory=1 << 60)
            shape = shape_of(self._model.config.get_text_config())
            self._weighed[state] = replace(shape, recompute="full") if state.recomputed else shape, machine
        return self._weighed[state]


def forecast_apart(mask: Mask, source: Layout, shape: ModelShape, machine: Hardware) -> Forecast:
    """The forecast if each rank computes the documents that `source` gives it, alone."""
    layers = [(mask, shape.attention_count)]
    w = weights_for(layers, shape, machine)
    rows = source.sizes()
    ticks = np.zeros(source.ranks, np.int64)
    np.add.at(ticks, source.holders().of(mask.offsets[:-1]), document_ticks(layers, w))
    attention = ticks - rows * w.per_row + (w.forward.stage + w.backward.stage) * shape.attention_count * (rows > 0)
    recurrent = rows * (w.per_row - w.row - w.label)
    phases = Ticks(attention, np.zeros_like(ticks), rows * w.row, rows * w.label, recurrent)
    bound = lower_bound(layers, w, source.ranks)
    return Forecast(phases, bound, w.second, rows, Memory.of(shape, machine, 0), shape, machine, machine.node)
