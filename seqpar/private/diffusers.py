"""diffusers' private names. Attributes of its objects are read; nothing here imports diffusers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from seqpar.private import PrivateNames

names = PrivateNames("diffusers", "0.41 to 0.42", globals(), {})
parallel_config = names.attribute("_parallel_config")  # of a model that shares its tokens itself
streams_of = names.attribute("_metadata")  # of a hook that leaves out a block: what the block returns
HOOKS = names.key("_diffusers_hook")  # a module's attribute with the registry of its hooks
# Attention backends whose operators are known. None: diffusers does not tell, so calls are counted.
BACKENDS = (None, "native", "_native_cudnn", "_native_efficient", "_native_flash", "_native_math")


def hooks_of(module: Any) -> Mapping[str, Any]:
    """The hooks of a module, by the names under which they are registered."""
    return getattr(module.__dict__.get(HOOKS), "hooks", {})


def backend_of(processor: Any) -> str | None:
    """The attention backend of a processor, or the active one; None if diffusers does not tell."""
    backend = getattr(processor, "_attention_backend", None)
    if backend is None:
        module = sys.modules.get("diffusers.models.attention_dispatch")
        backend = getattr(getattr(module, "_AttentionBackendRegistry", None), "_active_backend", None)
    return getattr(backend, "value", backend)


def below_hook(function: Callable[..., Any]) -> tuple[Any, str] | None:
    """What keeps the method that a hook surrounds, and the attribute's name; None if this is no hook's forward."""
    if getattr(function, "__module__", "") != "diffusers.hooks.hooks":
        return None
    (kept,) = [cell.cell_contents for cell in function.__closure__ or ()]  # the hook's references to functions
    return kept, "forward" if kept.original_forward is None else "original_forward"
