"""Adapters of peft on a parallel model: which of them act on all ranks alike, and which its forward cannot compute.

peft's own forwards wrap the model that is parallel. What they hand to layers about the rows of a rank's batch would
meet rows of all ranks' documents, and what they add to the loss would count once for each rank.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

ADAPTED = (("peft.tuners.tuners_utils", "BaseTunerLayer"), ("peft.utils.other", "AuxiliaryTrainingWrapper"))
# Keywords of the hooks by which peft tells layers about rows of the batch, and why these cannot be told.
BY_ROW = {
    "alora_offsets": (
        "aLoRA begins at a token of each row, and a rank's rows are of all documents; leave alora_invocation_tokens out"
    ),
    "adapter_names": (
        "adapter_names chooses an adapter for each row, and a rank's rows are of all documents; call set_adapter on "
        "every rank"
    ),
}


def unwrapped(wrapper: Any) -> nn.Module:
    """The model inside a PeftModel; any other model itself.

    Raises: ValueError or NotImplementedError if peft's forward would not go through that of the model, or reads rows.
    """
    within = is_of(wrapper, "peft", "PeftModel")
    model: nn.Module = wrapper.get_base_model() if within else wrapper
    if any(is_of(module, "peft.tuners.adaption_prompt.layer", "_BaseAdaptedAttention") for module in model.modules()):
        raise ValueError(
            f"parallelize({type(wrapper).__name__}): an adaption prompt keeps the forward that its model had before; "
            "call parallelize(model, comm) first, and then get_peft_model"
        )
    kinds = [str(config.peft_type) for config in wrapper.peft_config.values()] if within else []
    if any("PREFIX_TUNING" in kind for kind in kinds):
        raise NotImplementedError(
            f"parallelize({type(wrapper).__name__}): prefix tuning gives each row keys of a cache, and a rank's rows "
            "are of all documents; take another adapter, such as PromptTuningConfig"
        )
    if any("CPT" in kind for kind in kinds):
        raise NotImplementedError(
            f"parallelize({type(wrapper).__name__}): CPT computes its loss from the logits of a rank's rows, which are "
            "of all documents, so it trains with data parallelism only"
        )
    return model


def adapted(model: nn.Module) -> list[nn.Module]:
    """The layers of a model that have adapters, and whole layers that train beside them."""
    kinds = tuple(filter(None, (getattr(sys.modules.get(package), name, None) for package, name in ADAPTED)))
    return [module for module in model.modules() if isinstance(module, kinds)] if kinds else []


def unfit_adapters(model: nn.Module, layers: Sequence[nn.Module], *, loss: bool) -> str:
    """Why a forward cannot compute these layers of a model, and what to do, or "". loss: whether it has labels."""
    for layer in layers:
        for hook in layer._forward_pre_hooks.values():
            said = hook.keywords if isinstance(hook, partial) else {}
            for name, reason in BY_ROW.items():
                if said.get(name) is not None:
                    return reason
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
