"""What a trial is valid for: the classes of a model's modules, and their forwards; of a block, also what they read.

Where one of them is another later, the model is tried again, or its next forward is an error. In a trial of a whole
model nothing else is watched: dtype, device, requires_grad, hooks and flags change nothing, and neither do forwards
that a known library puts around those that were there. A block is tried once for all that are alike, so hooks and plain
attributes of its modules count too.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from functools import lru_cache, partial
from types import FunctionType, MethodType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from seqpar.foreign import kind_of
from seqpar.foreign.hooks import Named
from seqpar.foreign.wrap import ForwardWrapper, places_of
from seqpar.private.torch import HOOKS, TENSORS
from seqpar.trial.readings import GivenRows

LIBRARIES = {
    "builtins", "functools", "torch", "diffusers", "transformers", "accelerate", "peft", "torchao", "bitsandbytes",
    "deepspeed", "lightning", "pytorch_lightning", "liger_kernel", "trl", "seqpar",
}  # fmt: skip

PLAIN = {bool, int, float, str, type(None)}
NOT_SAID = nn.Module().__dict__.keys() - {"training"} | {"forward"}
TABLES = TENSORS[0], *HOOKS  # of a module


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


_written = lru_cache(1024)(code_of)  # of classes' forwards


def is_known(code: Any) -> bool:
    """Whether a function or class is of a known library, by where it was written."""
    code = getattr(code, "func", code)
    if isinstance(code, (FunctionType, MethodType)):  # `functools.wraps` changes its module
        where = getattr(code, "__globals__", {}).get("__name__")
    else:
        where = getattr(code if hasattr(code, "__qualname__") else type(code), "__module__", None)
    return (where or "builtins").partition(".")[0] in LIBRARIES


def kinds_of(named: Named, blocks: Collection[str]) -> dict[str, Hashable]:
    """What each block runs: classes, forwards, hooks, and attributes of its modules and processors.

    named: in the order of `nn.Module.named_modules`, in which a block's modules follow it.
    """
    facts, around = {name: list[Any]() for name in blocks}, list[tuple[str, list[Any]]]()
    for path, module in named:
        while around and not path.startswith(around[-1][0]):
            around.pop()
        if path in facts:
            around.append((f"{path}.", facts[path]))
        if not around:
            continue
        attributes, kind = module.__dict__, type(module)
        own = [kind, _written(kind.forward), *_attributes(attributes)]
        if "forward" in attributes:
            own.append(own_forward(module))
        for key in TABLES:
            if key in attributes and (some := attributes[key]):
                own += [k if x is None else code_of(x) for k, x in some.items() if x is None or callable(x)]
        if "processor" in attributes:
            own.append(said_of(attributes["processor"]))
        for within, each in around:
            each += path[len(within) :], *own
    return {name: tuple(each) for name, each in facts.items()}


def said_of(x: Any) -> Any:
    """What an object's attributes say, or an argument of a block: of a tensor its shape and dtype."""
    if isinstance(x, Tensor):
        return x.shape, x.dtype
    return x if type(x) in PLAIN or isinstance(x, GivenRows) else (_value(x), *_attributes(getattr(x, "__dict__", {})))


def _attributes(some: Mapping[str, Any]) -> list[Any]:
    """What attributes say, without those that every module has."""
    return [(k, v if type(v) in PLAIN else _value(v)) for k, v in some.items() if k not in NOT_SAID]


def _value(x: Any, depth: int = 2) -> Any:
    """What a value says: numbers and strings, also inside of others, and the code of functions; else its type."""
    if type(x) in PLAIN or not depth:
        return x if type(x) in PLAIN else type(x)
    if isinstance(x, (tuple, list, set, frozenset)):
        return (tuple if isinstance(x, (tuple, list)) else frozenset)([_value(v, depth - 1) for v in x])
    if isinstance(x, Mapping):
        return tuple([(k if type(k) is str else None, _value(v, depth - 1)) for k, v in x.items()])
    if isinstance(x, partial):
        return _value((x.func, x.args, x.keywords), depth)
    return code_of(x) if isinstance(x, (FunctionType, MethodType)) else type(x)
