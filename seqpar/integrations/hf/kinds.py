"""Classes of modules as their code has them: `fully_shard` puts a class of its own in front, with another name."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule


def kind_of(module: nn.Module) -> type[nn.Module]:
    """The class of a module without what `fully_shard` makes of it."""
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))


def name_of(module: nn.Module) -> str:
    """The name of that class."""
    return kind_of(module).__name__
