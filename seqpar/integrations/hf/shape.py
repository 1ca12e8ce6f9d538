"""The planner's shape of any transformers config: planning never fails because a config is unusual."""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers import PreTrainedConfig

from seqpar.integrations.hf.sizes import FFN, HEADS, HIDDEN, KEY_HEADS, LAYERS
from seqpar.planner import ModelShape


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
