"""Reasons against computing a model row by row, from its modules and configs, before it is tried."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from seqpar.foreign.kinds import kind_of

# Modules that look at other tokens by design, in models of tokens.
OVER_TOKENS = (
    nn.RNNBase, nn.Conv1d, nn.AvgPool1d, nn.MaxPool1d, nn.LPPool1d, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d,
)  # fmt: skip
SEES = "it has modules that see other tokens"
# in a config the size of windows and the layers with them, their mask's function, and tokens seen beside that size
WINDOWS = (
    ("sliding_window", "sliding_attention", "sliding_window_causal_mask", 0),
    ("sliding_window", "sliding_attention", "bidirectional_sliding_window_mask", 1),
    ("attention_chunk_size", "chunked_attention", "chunked_causal_mask", 0),
)
OF_CHANNELS = ("Dropout1d", "Dropout2d", "Dropout3d", "FeatureAlphaDropout")


def mixing(model: nn.Module) -> list[str]:
    """Why a model with PyTorch's attention cannot be computed row by row, as far as classes and configs tell."""
    reasons = []
    names = [f"{name or 'the model'} ({type(m).__name__})" for name, m in model.named_modules() if _over_tokens(m)]
    if names:
        reasons.append(f"{SEES}: {', '.join(names)}")
    reasons += dropping(model) + renorming(model)
    for inner in _of_transformers(model):
        from seqpar.integrations.hf.config import config_refusals

        reasons += [reason for reason in config_refusals(inner) if reason not in reasons]
    return reasons


def _over_tokens(module: nn.Module) -> bool:
    return isinstance(module, OVER_TOKENS) and getattr(module, "kernel_size", None) not in (1, (1,))


def dropping(model: nn.Module) -> list[str]:
    """Reasons: it drops whole paths or channels of a sequence at random, which each rank would do differently."""
    reasons = []
    if any("DropPath" in type(m).__name__ and getattr(m, "drop_prob", 1) for m in model.modules()):
        reasons.append("it drops whole paths of a sequence at random (DropPath)")
    for what, kinds in ("paths", ("StochasticDepth",)), ("channels", OF_CHANNELS):
        # in eval these do nothing, whatever their p
        names = {type(m).__name__ for m in model.modules() if m.training and type(m).__name__ in kinds and m.p}
        if names:
            reasons.append(f"it drops whole {what} of a sequence at random ({', '.join(sorted(names))})")
    return reasons


def renorming(model: nn.Module) -> list[str]:
    """Reasons: its forward changes weights depending on the tokens, and training goes on from these weights."""
    names = [name or "the model" for name, m in model.named_modules()
             if getattr(m, "max_norm", None) is not None and isinstance(m, (nn.Embedding, nn.EmbeddingBag))
             and m.weight.requires_grad]  # fmt: skip
    return (
        [f"its forward rescales weights of the tokens that a rank has: max_norm of {', '.join(names)}"] if names else []
    )


def windows_of(model: nn.Module) -> tuple[int, ...]:
    """The most tokens of a document that the windows and chunks of transformers models leave whole, ascending.

    For more, such a model makes a mask, unless it gets fewer rows. Which masks it makes is known by the functions that
    its code imports.
    """
    base, found = getattr(sys.modules.get("transformers"), "PreTrainedModel", ()), set[int]()
    for inner in (module for module in model.modules() if isinstance(module, base)):
        makes = [name for name in vars(sys.modules[kind_of(inner).__module__]) if "mask" in name]
        several = getattr(inner.config, "is_heterogeneous", False)
        for config in inner.config.per_layer_config if several else [inner.config]:
            kinds = getattr(config, "layer_types", None)
            for name, kind, mask, more in WINDOWS:
                size = getattr(config, name, None)
                if isinstance(size, int) and (kinds is None or kind in kinds) and any(mask in each for each in makes):
                    found.add(size + more)
    return tuple(sorted(found))


def _of_transformers(model: nn.Module) -> list[Any]:
    """The transformers models in a module, without those nested in others."""
    base = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    if base is None:
        return []
    if isinstance(model, base):
        return [model]
    return [inner for child in model.children() for inner in _of_transformers(child)]
