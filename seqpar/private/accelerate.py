"""accelerate's private names: how its hooks keep a module's forward, and its weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from seqpar.private import PrivateNames

names = PrivateNames("accelerate", "1.10 to 1.15", globals(), {})
FORWARD, HOOK = names.key("_old_forward"), names.key("_hf_hook")  # attributes of a module


def keeps_below(function: Callable[..., Any], module: Any, name: str) -> bool:
    """Whether a function is a hook's, which keeps the method that it surrounds as `FORWARD` of the module."""
    return getattr(function, "__module__", "") == "accelerate.hooks" and name != FORWARD and FORWARD in vars(module)


def offloaded(module: Any, name: str) -> Any:
    """A parameter or buffer that accelerate has put away until the module's forward; None if it has not."""
    hook = module.__dict__.get(HOOK)
    for each in getattr(hook, "hooks", [hook]):
        if (stored := getattr(each, "weights_map", None)) is not None and name in stored:
            return stored[name]
    return None
