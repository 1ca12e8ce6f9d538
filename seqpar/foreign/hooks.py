"""Hooks and code of others in a model: what moves or casts weights may stay, anything else sees a share of the rows.

A blur over queries mixes a rank's rows alone, dropout draws numbers for them, and a cache that decides by the rows
decides otherwise than for all of them. Code of a user may look at rows or not: nothing tells, so there is a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakSet

from torch import nn

from seqpar.foreign.kinds import name_of
from seqpar.foreign.wrap import Around

Named = Sequence[tuple[str, nn.Module]]  # a model and all modules in it, by name: one walk serves several checks
HARMLESS = (
    "GroupOffloadingHook", "LazyPrefetchGroupOffloadingHook", "LayerExecutionTrackerHook", "LayerwiseCastingHook",
    "PeftInputAutocastDisableHook",
)  # fmt: skip
SKIPPING = ("TransformerBlockSkipHook", "FeedForwardSkipHook")  # leave out a module, or drop some of its numbers
CACHING = ("PyramidAttentionBroadcastHook",)  # return a module's earlier output, whatever the rows are


def check_hooks(named: Named, also: Iterable[str] = ()) -> None:
    """Raise NotImplementedError for a hook that may look at rows. also: more kinds of hooks that may stay."""
    model = named[0][1]
    for path, key, hook in _hooks_of(named):
        kind = type(hook).__name__
        if not (kind in HARMLESS or kind in also or (kind in SKIPPING and _skips_all(hook))):
            raise NotImplementedError(
                f"{name_of(model)} has the hook {kind} of diffusers on {path or 'itself'}, which sees a rank's share "
                "of the rows, and may mix them, draw random numbers for them, or decide by them; remove it, by the "
                "model's disable_cache() if it is a cache, or by "
                f"HookRegistry.check_if_exists_or_initialize(model).remove_hook({key!r})"
            )


def with_cache(named: Named) -> list[str]:
    """Modules with a hook that returns earlier outputs, so that they must get the same rows every time."""
    return [path for path, _, hook in _hooks_of(named) if type(hook).__name__ in CACHING]


def _skips_all(hook: Any) -> bool:
    """Whether a hook leaves out a whole module of one stream; it would exchange the two of others."""
    streams = getattr(hook, "_metadata", None)
    return bool(hook.dropout == 1.0) and getattr(streams, "return_encoder_hidden_states_index", None) is None


def _hooks_of(named: Named) -> Iterator[tuple[str, str, object]]:
    """The hooks of diffusers in a model: the module's name, the name of registration, the hook."""
    for path, module in named:
        for key, hook in getattr(module.__dict__.get("_diffusers_hook"), "hooks", {}).items():
            yield path, key, hook


LIBRARIES = {
    "builtins", "torch", "diffusers", "transformers", "accelerate", "peft", "torchao", "bitsandbytes", "deepspeed",
    "lightning", "pytorch_lightning", "liger_kernel", "trl", "seqpar",
}  # fmt: skip
_told: WeakSet[nn.Module] = WeakSet()


def warn_of_own_code(named: Named) -> None:
    """Warn once for a model whose inner modules run code that is of none of the known libraries."""
    model = named[0][1]
    if model in _told:
        return
    for path, module in named[1:]:
        if found := own_code(module):
            _told.add(model)
            warnings.warn(
                f"{path} of a parallel {name_of(model)} has {next(iter(found.values()))}, which sees a rank's tokens "
                "alone, and nothing tries whether it mixes, counts or numbers them",
                stacklevel=2,
            )
            return


def warn_of_own_hooks(model: nn.Module, paths: Iterable[str]) -> None:
    """Warn once for a hook of a user on modules whose trials do not call it, as it runs before and after their rows."""
    for path in paths:
        module = model.get_submodule(path)
        if module not in _told and _own_hooks(module):
            _told.add(module)
            warnings.warn(
                f"{path} of a parallel {name_of(model)} has a hook of your own, which sees a rank's share of the rows, "
                "and nothing tries whether it mixes, counts or numbers them; let it look at each row by itself, or put "
                f"it on a module inside {path}, where it is tried",
                stacklevel=2,
            )


def own_code(module: nn.Module, *, forwards: bool = True) -> dict[object, str]:
    """What a user has put on a module, by something that tells it from what comes in its place later.

    forwards: whether to look at forwards of the module and its class.
    """
    own, kind, found = module.__dict__, type(module), dict[object, str]()
    if not _is_known(kind):
        found[kind.__qualname__] = f"the class {kind.__qualname__} of your own"
    elif forwards and not _is_known(kind.forward):
        found["written", _code_of(kind.forward)] = f"a forward of your own in its class {kind.__qualname__}"
    processor = own.get("processor", module._modules.get("processor"))
    if not _is_known(type(processor)):
        found["processor", type(processor)] = "a processor of your own"
    forward = own.get("forward")
    if forwards and forward is not None and not isinstance(forward, Around) and not _is_known(_inner(forward)):
        found["forward", _code_of(forward)] = "a forward of your own"
    for name, value in own.items():
        if type(value) is FunctionType and name != "forward" and not _is_known(value):
            found[name, value.__code__] = f"a function of your own, {name}"
    return found | {("hook", _code_of(hook)): "a hook of your own" for hook in _own_hooks(module)}


def _own_hooks(module: nn.Module) -> list[Any]:
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return [hook for hook in hooks if not _is_known(_inner(hook))]


def _code_of(function: Any) -> Any:
    """The code of a function, the same one for a function that each step creates anew; the class of an object."""
    inner = _inner(function)
    return inner.__code__ if isinstance(inner, (FunctionType, MethodType)) else inner


def _inner(function: Any) -> Any:
    """The function in a partial; an object that is called by its class."""
    function = getattr(function, "func", function)
    return function if hasattr(function, "__qualname__") or hasattr(function, "__func__") else type(function)


def _is_known(code: Any) -> bool:
    """Whether code is of a library: a function by where it was written, as `functools.wraps` changes its module."""
    if isinstance(code, (FunctionType, MethodType)):
        where = getattr(code, "__globals__", {}).get("__name__")
    else:
        where = getattr(code, "__module__", None)
    return (where or "builtins").partition(".")[0] in LIBRARIES
