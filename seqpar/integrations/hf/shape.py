"""The shape that the planner weighs, of any config of transformers: no plan fails because a config is unusual."""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers import PreTrainedConfig

from seqpar.planner import ModelShape


def shape_of(config: PreTrainedConfig) -> ModelShape:
    """What the planner weighs: of a config it does not know, what all of them have, and usual sizes where one has less.

    A figure that a config gives layer by layer counts as the mean of all layers.
    """
    try:
        return ModelShape.from_config(config)
    except Exception:  # whatever an unusual config holds, a rough plan is better than none
        pass
    layers = _size(config, "num_hidden_layers", "n_layer", "num_layers") or 32
    heads = _size(config, "num_attention_heads", "n_head", "num_heads", "num_query_heads") or 32
    hidden = _size(config, "hidden_size", "n_embd", "d_model", "dim") or 64 * heads
    kv_heads = _size(config, "num_key_value_heads", "num_kv_heads") or heads
    return ModelShape(
        name=str(getattr(config, "model_type", "")), hidden=hidden, layers=layers, heads=heads,
        kv_heads=kv_heads if heads % kv_heads == 0 else heads,
        dim=_size(config, "head_dim") or max(1, hidden // heads),
        ffn=_size(config, "intermediate_size", "n_inner", "ffn_dim", "d_ff") or 4 * hidden,
        vocab=_size(config, "vocab_size") or 32_000, gated=False,
    )  # fmt: skip


def _size(config: PreTrainedConfig, *names: str) -> int:
    """The first of a config's entries that is a size, 0 if none is; of a list, the mean."""
    for name in names:
        try:
            value: Any = getattr(config, name, None)
            size = 0 if value is None else round(float(np.mean(value)))
        except Exception:  # no number, or one that this config gives only layer by layer
            continue
        if size > 0:
            return size
    return 0
