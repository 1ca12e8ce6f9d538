"""Modules that drop numbers at random, which ranks would do differently."""

from __future__ import annotations

from torch import nn


def active_dropout(model: nn.Module) -> str:
    """The name and probability of the first dropout that is active, "" if there is none."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0:
            name = next(name for name, other in model.named_modules() if other is module)
            return f"{name or 'the model'} is dropout with p={module.p} in training"
    return ""
