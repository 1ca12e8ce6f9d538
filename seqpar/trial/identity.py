"""What a trial is valid for: the classes of a model's modules, and their forwards.

Where one of them is another later, the model is tried again, or its next forward is an error. Nothing else is watched:
dtype, device, requires_grad, hooks and flags change nothing, and neither do forwards that a known library puts around
those that were there.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch.distributed as dist
from torch import nn

from seqpar.foreign import kind_of
from seqpar.foreign.wrap import ForwardWrapper, places_of

LIBRARIES = {
    "builtins", "functools", "torch", "diffusers", "transformers", "accelerate", "peft", "torchao", "bitsandbytes",
    "deepspeed", "lightning", "pytorch_lightning", "liger_kernel", "trl", "seqpar",
}  # fmt: skip


def identity(ranks: int, modules: Iterable[nn.Module]) -> int:
    """A number for what modules run, in this process; 0 if no other rank or process is there to compute them.

    ranks: that share the model.
    """
    if ranks == 1 and not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return 0  # where nothing is shared, no change can do harm
    return hash(tuple([(kind.__module__, kind.__qualname__, *_forwards(m)) for m in modules for kind in [kind_of(m)]]))


def own_code(module: nn.Module) -> tuple[Any, ...]:
    """The class and forwards of a module as far as they are of no known library, each None else."""
    kind = kind_of(module)
    return (None if is_known(kind) else kind, *_forwards(module, known=False))


def _forwards(module: nn.Module, *, known: bool = True) -> tuple[Any, Any]:
    """The code of the forward of a module's class, None if `known` is false and it is a library's, and of its own."""
    written = getattr(kind_of(module), "forward", None)
    return (code_of(written) if known or not is_known(written) else None), own_forward(module)


def own_forward(module: nn.Module) -> Any:
    """The code of the forward that a user gave this instance, inside what libraries put around it; else None."""
    *_, (owner, name) = places_of(module)
    forward = vars(owner).get(name)
    while forward is not None:
        if isinstance(forward, ForwardWrapper):
            forward = forward.forward
        elif isinstance(forward, partial) and is_known(forward.func):
            forward = next(iter(forward.args), None)
        elif not is_known(forward):
            return None if getattr(forward, "__func__", None) is type(module).forward else code_of(forward)
        else:
            forward = getattr(forward, "__wrapped__", None)
    return None


def code_of(function: Any) -> Any:
    """The code of a function, the same one for a function that each step creates anew; the class of an object."""
    function = getattr(function, "func", function)
    if isinstance(function, (FunctionType, MethodType)):
        return function.__code__
    return function if hasattr(function, "__qualname__") else type(function)


def is_known(code: Any) -> bool:
    """Whether a function or class is of a known library, by where it was written."""
    code = getattr(code, "func", code)
    if isinstance(code, (FunctionType, MethodType)):  # `functools.wraps` changes its module
        where = getattr(code, "__globals__", {}).get("__name__")
    else:
        where = getattr(code if hasattr(code, "__qualname__") else type(code), "__module__", None)
    return (where or "builtins").partition(".")[0] in LIBRARIES
