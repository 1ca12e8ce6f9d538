"""Plans for a transformers model: a document is only spread over ranks if that gains enough time.

Spreading has costs outside a plan's forecast: the host plans the batch, rows move to other ranks, and keys follow them
in every layer. Its gain is at most the slowest rank's time with its own documents, less the lower bound for any plan:
seconds for long documents, microseconds for short ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from transformers import PreTrainedConfig, PreTrainedModel

from seqpar.data.union import Brought, layout_of
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.facts.value import Ints
from seqpar.integrations.hf.config import FFN, HEADS, HIDDEN, KEY_HEADS, LAYERS, PlanState
from seqpar.integrations.hf.indexed import layers
from seqpar.integrations.hf.latents import hands_on_latents
from seqpar.plan import Plan
from seqpar.planner import Forecast, Hardware, ModelShape, plan_batch
from seqpar.planner.bound import document_ticks, lower_bound, weights_for
from seqpar.planner.cost import Ticks
from seqpar.planner.memory import Memory

# Seconds that spreading a batch adds to computing it. For 8 documents of 128 tokens on 2 ranks of an Intel Xeon:
# 2 ms for planning, 1.5 ms for moving rows, 1 ms per layer for exchanging keys.
SPREADING = 3e-3


class ModelPlanner:
    """Plans batches for a model of one shape, in its current `PlanState`."""

    def __init__(self, model: PreTrainedModel, *, causal: bool) -> None:
        self._model, self._causal = model, causal
        self._weighed: dict[PlanState, tuple[ModelShape, Hardware]] = {}

    def __call__(self, lengths: Ints, ranks: int, state: PlanState, brought: Brought | None) -> Plan:
        """The plan of documents of these lengths. brought: None if every rank has all documents."""
        mask = Mask(lengths, causal=self._causal)
        shape, machine = self._weigh(state)
        if brought is not None and ranks > 1:
            source = layout_of(lengths, brought)
            apart = forecast_apart(mask, source, shape, machine)
            if apart.seconds - apart.least <= SPREADING:
                return Plan(mask, source).with_forecast(apart)
        return plan_batch(lengths, ranks, masks=mask, model=shape, hardware=machine)

    def _weigh(self, state: PlanState) -> tuple[ModelShape, Hardware]:
        if state not in self._weighed:
            # the device decides how much fits: its memory, and what else uses it, is unknown
            machine = replace(Hardware.preset("cpu" if state.device == "cpu" else "h100"), memory=1 << 60)
            config = self._model.config.get_text_config()
            shape = shape_of(config)
            if layers(self._model):
                shape = shape_of_chosen(shape, config)
            else:
                shape = replace(shape, latents=shape.latents and hands_on_latents(self._model))
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


def shape_of_chosen(shape: ModelShape, config: PreTrainedConfig) -> ModelShape:
    """The shape of a model whose layers choose their keys: each rank computes all heads of its queries, as if one.

    The indexer's heads add to it, and its key to what is fetched. shape: from the sizes that all configs have.
    """
    rotated, index = config.qk_rope_head_dim, config.index_head_dim
    return replace(
        shape, heads=1, kv_heads=1, v_dim=shape.heads * config.v_head_dim, kv_rank=config.kv_lora_rank,
        dim=shape.heads * (config.qk_nope_head_dim + rotated) + config.index_n_heads * index,
        rope_dim=rotated + index, latents=True,
    )  # fmt: skip


def shape_of(config: PreTrainedConfig) -> ModelShape:
    """The shape for the planner. For an unknown config: the entries that all configs have, and typical sizes elsewhere.

    A size given per layer counts as the mean of all layers.
    """
    try:
        return ModelShape.from_config(config)
    except Exception:  # whatever an unusual config holds, a rough plan is better than none
        pass
    layers, heads = _size(config, *LAYERS) or 32, _size(config, *HEADS) or 32
    hidden, kv_heads = _size(config, *HIDDEN) or 64 * heads, _size(config, *KEY_HEADS) or heads
    return ModelShape(
        name=str(getattr(config, "model_type", "")), hidden=hidden, layers=layers, heads=heads,
        kv_heads=kv_heads if heads % kv_heads == 0 else heads,
        dim=_size(config, "head_dim") or max(1, hidden // heads),
        ffn=_size(config, *FFN) or 4 * hidden,
        vocab=_size(config, "vocab_size") or 32_000, gated=False,
    )  # fmt: skip


def _size(config: PreTrainedConfig, *names: str) -> int:
    """The first of these entries that is a size, 0 if none is; the mean of a list."""
    for name in names:
        try:
            value: Any = getattr(config, name, None)
            size = 0 if value is None else round(float(np.mean(value)))
        except Exception:  # not a number, or given per layer only
            continue
        if size > 0:
            return size
    return 0
