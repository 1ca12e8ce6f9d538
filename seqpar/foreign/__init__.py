"""Models that are not seqpar's: how their forwards are replaced, their hooks, and their classes.

The class of a module is that of its code: `fully_shard` puts a class of its own in front, with another name.
"""

from __future__ import annotations

from torch import nn


def kind_of(module: nn.Module) -> type[nn.Module]:
    """The class of a module without what `fully_shard` makes of it."""
    # by name: to import FSDP takes long
    return next(kind for kind in type(module).__mro__ if "FSDPModule" not in {each.__name__ for each in kind.__mro__})


def name_of(module: nn.Module) -> str:
    """The name of that class."""
    return kind_of(module).__name__
