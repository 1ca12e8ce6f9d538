"""Reasons against computing a model row by row, from its modules and configs, before it is tried."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from seqpar.foreign import kind_of
from seqpar.private import torch as torch_private
from seqpar.private.transformers import recorded_of

# Modules that look at other tokens by design, in models of tokens.
OVER_TOKENS = (
    nn.RNNBase, nn.Conv1d, nn.AvgPool1d, nn.MaxPool1d, nn.LPPool1d, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d,
)  # fmt: skip
# Modules that normalise by statistics over tokens, which are on many ranks here, with pads among them.
NORMS = (torch_private.BatchNorm, torch_private.InstanceNorm)
SEES = "it has modules that see other tokens"
OF_CHANNELS = ("Dropout1d", "Dropout2d", "Dropout3d", "FeatureAlphaDropout")


def mixing(model: nn.Module) -> list[str]:
    """Why a model with PyTorch's attention cannot be computed row by row, as far as classes and configs show."""
    reasons = []
    names = [f"{name or 'the model'} ({type(m).__name__})" for name, m in model.named_modules() if _over_tokens(m)]
    if names:
        reasons.append(f"{SEES}: {', '.join(names)}")
    return reasons + dropping(model) + renorming(model) + of_transformers(model)


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
    """Reasons: its forward changes weights depending on the tokens, and training continues from these weights."""
    names = [name or "the model" for name, m in model.named_modules()
             if getattr(m, "max_norm", None) is not None and isinstance(m, (nn.Embedding, nn.EmbeddingBag))
             and m.weight.requires_grad]  # fmt: skip
    return (
        [f"its forward rescales weights of the tokens that a rank has: max_norm of {', '.join(names)}"] if names else []
    )


def recording(module: nn.Module) -> list[str]:
    """Reasons: transformers records the router logits of each call of a module in it, if they are asked for."""
    found = [f"{name or 'it'} ({type(m).__name__})" for name, m in module.named_modules() if _is_recorded(m)]
    return [f"transformers records router logits of {', '.join(found)}"] if found else []


def _is_recorded(module: nn.Module) -> bool:
    """Whether a model of the file in which a module is written records router logits of such modules."""
    written_in: Any = sys.modules.get(kind_of(module).__module__)
    tables = [recorded_of(kind, None) for kind in vars(written_in).values() if isinstance(kind, type)]
    entries = [table["router_logits"] for table in tables if isinstance(table, dict) and "router_logits" in table]
    kinds = [getattr(entry, "target_class", entry) for entry in entries]
    return any(isinstance(kind, type) and isinstance(module, kind) for kind in kinds)


def of_transformers(model: nn.Module) -> list[str]:
    """Reasons: it is a transformers model or has some inside."""
    base = getattr(sys.modules.get("transformers"), "PreTrainedModel", ())
    inner = next(((name, m) for name, m in model.named_modules() if isinstance(m, base)), None)
    if inner is None:
        return []
    name, kind = inner[0], kind_of(inner[1]).__name__
    return [
        f"{f'{name} ({kind})' if name else 'it'} is a transformers model, whose masks would be of one rank's rows; "
        "give it to seqpar.parallelize(model, comm) without sdpa=True, or load it with "
        "attn_implementation='seqpar' and call it inside seqpar.parallel(plan, comm)"
    ]


def check_model(model: nn.Module) -> None:
    """Raise if a module of the model takes statistics over the tokens of one rank only.

    Norms over a token's own channels (LayerNorm, RMSNorm) are right on any rows. So is BatchNorm with frozen statistics
    (in eval); InstanceNorm never is. A loss that uses such statistics is not detected: compute it with `token_mean`.

    Raises: NotImplementedError naming every such module.
    """
    found = [
        f"{name or 'the model'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if isinstance(module, NORMS) and (module.training or module.running_mean is None)
    ]
    if found:
        raise NotImplementedError(
            f"check_model: {', '.join(found)}: statistics over the tokens of one rank are not those of the batch; "
            "freeze them with .eval(), or use LayerNorm, RMSNorm or GroupNorm over a token's channels"
        )
