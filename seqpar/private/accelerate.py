"""accelerate's private names: how its hooks keep a module's forward, and its weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from seqpar.private import PrivateNames

names = PrivateNames("accelerate", "1.10 to 1.15", globals(), {})
FORWARD, HOOK = names.key("_old_forward"), names.key("_hf_hook")  # attributes of a module


def below_hook(function: Callable[..., Any], module: Any, name: str) -> tuple[Any, str] | None:
    """What keeps the method that a hook surrounds, the module, and the attribute's name; None if this is no hook's."""
    of_hook = getattr(function, "__module__", "") == "accelerate.hooks" and name != FORWARD and FORWARD in vars(module)
    return (module, FORWARD) if of_hook else None


def offloaded(module: Any, name: str) -> Any:
    """A parameter or buffer that accelerate has put away until the module's forward; None if it has not."""
    hook = module.__dict__.get(HOOK)
    for each in getattr(hook, "hooks", [hook]):
        if (stored := getattr(each, "weights_map", None)) is not None and name in stored:
            return stored[name]
    return None
