"""Adapters of peft on a parallel model: which of them act on all ranks alike, and which its forward cannot compute.

peft's own forwards wrap the model that is parallel. What they hand to layers about the rows of a rank's batch would
meet rows of all ranks' documents, and what they add to the loss would count once for each rank. Layers that act when
the model becomes parallel are part of its trial; of those that come later only the kinds below are known.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from functools import lru_cache
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import nn

from seqpar.private.peft import held_by_hook, kinds, method_of
from seqpar.private.torch import forward_pre_hooks

# Values in the hooks by which peft informs layers about rows of the batch, and why several ranks cannot have them.
BY_ROW = {
    "alora_offsets": (
        "aLoRA begins at a token of each row, and a rank's rows are of all documents; leave alora_invocation_tokens out"
    ),
    "adapter_names": (
        "adapter_names chooses an adapter for each row, and a rank's rows are of all documents; call set_adapter on "
        "every rank"
    ),
    "scalings": "X-LoRA scales adapters for each token of a rank's batch, and a rank's rows are of all documents",
    "task_ids": "Poly chooses weights by task_ids for each row of a batch, and a rank's rows are of all documents",
}
SHADOW = "Shadow adds what a second model makes of a rank's batch, and a rank's rows are of all documents"
# Kinds of adapters in the config of a PeftModel, and why they cannot be computed.
KINDS = {
    "PREFIX_TUNING": (
        "prefix tuning gives each row keys of a cache, and a rank's rows are of all documents; take another adapter, "
        "such as PromptTuningConfig"
    ),
    "CPT": (
        "CPT computes its loss from the logits of a rank's rows, which are of all documents, so it trains with data "
        "parallelism only"
    ),
    "XLORA": BY_ROW["scalings"],
    "POLY": BY_ROW["task_ids"],
    "SHADOW": SHADOW,
}
# Packages of peft.tuners whose layers compute each row independently; layers of others are tried with the model.
BY_ITSELF = {
    "adalora", "beft", "boft", "c3a", "deft", "delora", "fourierft", "frod", "glora", "gralora", "hira",
    "hra", "ia3", "ln_tuning", "loha", "lokr", "lora", "miss", "oft", "osf", "peanut", "psoft", "pvera", "randlora",
    "road", "shira", "supertuning", "tinylora", "trainable_tokens", "unilora", "vblora", "vera", "waveft",
}  # fmt: skip


def unwrapped(wrapper: Any) -> nn.Module:
    """The model inside a PeftModel; any other model itself.

    Raises: ValueError or NotImplementedError if peft's forward would bypass the model's, or reads rows.
    """
    within = is_of(wrapper, "peft", "PeftModel")
    model: nn.Module = wrapper.get_base_model() if within else wrapper
    if any(isinstance(module, kinds("BaseAdaptedAttention")) for module in model.modules()):
        raise ValueError(
            f"parallelize({type(wrapper).__name__}): an adaption prompt keeps the forward that its model had before; "
            "call parallelize(model, comm) first, and then get_peft_model"
        )
    if reason := _unfit_kind(*wrapper.peft_config.values()) if within else "":
        raise NotImplementedError(f"parallelize({type(wrapper).__name__}): {reason}")
    return model


def unfit_wrapper() -> str:
    """Why the forward of a PeftModel that this thread is in cannot be computed, or "": it may have come later."""
    loaded = sys.modules.get("peft.peft_model")
    frame: FrameType | None = None if loaded is None else sys._getframe(1)
    while frame is not None:
        if frame.f_code in _forwards_of(loaded.PeftModel):  # type: ignore[union-attr]
            return _unfit_kind(frame.f_locals["self"].active_peft_config)
        frame = frame.f_back
    return ""


@lru_cache(1)
def _forwards_of(kind: Any) -> frozenset[CodeType]:
    forwards = [each.__dict__.get("forward") for each in (kind, *kind.__subclasses__())]
    return frozenset(forward.__code__ for forward in forwards if isinstance(forward, FunctionType))


def _unfit_kind(*configs: Any) -> str:
    """Why adapters of these configs cannot be computed, or ""."""
    kinds = [str(config.peft_type) for config in configs]
    return next((reason for kind, reason in KINDS.items() if any(kind in each for each in kinds)), "")


def adapted(model: nn.Module) -> list[nn.Module]:
    """The layers of a model that have adapters, and whole layers that train with them."""
    layers = kinds("BaseTunerLayer", "AuxiliaryTrainingWrapper")
    return [module for module in model.modules() if isinstance(module, layers)] if layers else []


def acting(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Those of the layers whose adapters are neither disabled nor merged into the weights."""
    return [x for x in layers if not (getattr(x, "disable_adapters", False) or getattr(x, "merged", False))]


def unfit_adapters(model: nn.Module, layers: Sequence[Any], tried: Collection[nn.Module], *, loss: bool) -> str:
    """Why a forward cannot compute these layers of a model, and what to do, or "".

    tried: layers that acted when the model became parallel. loss: whether the forward has labels.
    """
    for layer in layers:  # those of X-LoRA take hooks while they are disabled too
        for name, reason in BY_ROW.items():
            if any(held_by_hook(hook, name) is not None for hook in forward_pre_hooks(layer).values()):
                return reason
    for layer in acting(layers):
        method = method_of(layer)
        if method == "shadow":
            return SHADOW
        if method and method not in BY_ITSELF and layer not in tried:
            return (
                f"{type(layer).__qualname__} of peft's {method} came after parallelize, which has not tried whether it "
                "mixes a rank's rows; add it before seqpar.parallelize"
            )
        chosen = getattr(layer, "lora_velora_init_type", None) or {}
        averages = chosen and any(chosen.get(name, "random") != "random" for name in layer.active_adapters)
        if averages and layer.training and torch.is_grad_enabled():
            return "VeLoRA projects inputs on the mean over the rows of a rank; set init_type='random' in VeloraConfig"
    for config in getattr(model, "peft_config", {}).values() if loss else ():
        if getattr(config, "orth_reg_weight", 0):
            return (
                f"AdaLoRA adds its orthogonal regularization (orth_reg_weight={config.orth_reg_weight}) to the loss of "
                "every rank, so that their sum has it several times; set orth_reg_weight=0, and if you want the term, "
                "add it divided by comm.size"
            )
    return ""


def acting_adapters(layers: Sequence[nn.Module]) -> list[tuple[str, ...]]:
    """Which adapters act in layers: the different combinations of active, merged and disabled ones, in order."""
    names = ("active_adapters", "merged_adapters", "disable_adapters")
    return list(dict.fromkeys(tuple(str(getattr(layer, name, None)) for name in names) for layer in layers))


def is_of(model: object, package: str, name: str) -> bool:
    """Whether a model is of a class of a package, which is imported if it exists."""
    return isinstance(model, getattr(sys.modules.get(package), name, ()))
