"""peft's private names: where its layers are, and what its hooks hold."""

from __future__ import annotations

import sys
from functools import partial
from types import FunctionType
from typing import Any

from seqpar.private import PrivateNames

names = PrivateNames(
    "peft", "0.18 to 0.21", globals(), {
        "peft.tuners.adaption_prompt.layer": "_BaseAdaptedAttention",
        "peft.tuners.tuners_utils": "BaseTunerLayer",
        "peft.utils.other": "AuxiliaryTrainingWrapper",
    },
)  # fmt: skip


def kinds(*several: str) -> tuple[type, ...]:
    """Classes of peft, by their names; none before it is imported."""
    return tuple(getattr(names, name) for name in several) if "peft" in sys.modules else ()


def held_by_hook(hook: Any, name: str) -> Any:
    """The value of this name that a hook of peft holds, as a partial or in its closure; or None."""
    if isinstance(hook, partial):
        return hook.keywords.get(name)
    of_peft = isinstance(hook, FunctionType) and hook.__module__.startswith("peft.")
    inside = hook.__code__.co_freevars if of_peft else ()
    return hook.__closure__[inside.index(name)].cell_contents if name in inside else None


def method_of(layer: Any) -> str:
    """The package of peft.tuners that has a layer's class; "" for a layer without adapters of its own."""
    modules = (kind.__module__.split(".") for kind in type(layer).__mro__)
    return next((parts[2] for parts in modules if parts[:2] == ["peft", "tuners"] and len(parts) > 3), "")
