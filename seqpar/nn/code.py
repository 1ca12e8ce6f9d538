"""What the forwards of a model run, in two numbers: they change when a user changes what the model computes.

A trial shows what a model did with its rows. It holds until somebody puts in another module, forward, method or hook,
or sets a mode or a flag by which code may choose.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from enum import Enum
from functools import lru_cache, partial
from itertools import count
from types import FunctionType, MethodType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from seqpar.nn.saved_state import OF_MODULES, STATELESS, is_wrapper
from seqpar.nn.wrap import Around

FEW = 16  # elements of a list in which functions are looked for
DEEP = 3  # functions inside functions, as in closures and partials
LEFT_OUT = {*OF_MODULES, "forward", "_diffusers_hook"}  # those hooks are checked by themselves, and count steps
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_numbers: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # a module's address may be that of a former one
_count = count()


class Code(NamedTuple):
    """Hashes of what the forwards of a model run, in this process.

    written: modules, and the code of their classes, forwards, hooks, and functions in attributes. chosen: modes of
    modules, and attributes that are flags: None, a bool, a string, an enum, a dtype, whether a number is 0.
    """

    written: int
    chosen: int


def code_of(modules: Iterable[nn.Module]) -> Code:
    """The code of a model, given as all modules in it."""
    notes = _Notes()
    for module in modules:
        notes.add_module(module)
    return Code(hash(tuple(notes.written)), hash(tuple(notes.chosen)))


def autocast_dtypes() -> tuple[torch.dtype | None, ...]:
    """The dtypes to which autocast casts on CPU and GPU, None where it is off; code may be another one under it."""
    return tuple(torch.get_autocast_dtype(d) if torch.is_autocast_enabled(d) else None for d in ("cpu", "cuda"))


def identity_of(modules: Iterable[nn.Module]) -> int:
    """A hash of the modules that a model has: another one after one was put in, taken out or replaced."""
    return hash(tuple(map(_number, modules)))


def _number(module: nn.Module) -> int:
    if (number := _numbers.get(module)) is None:
        number = _numbers[module] = next(_count)
    return number


class _Notes:
    """What was found on a walk through a model, in its order."""

    def __init__(self) -> None:
        self.written: list[Hashable] = []
        self.chosen: list[Hashable] = []
        self.seen: set[Any] = set()  # classes, and ids of objects, which the model holds meanwhile

    def add_module(self, module: nn.Module) -> None:
        own, kind = module.__dict__, type(module)
        self.written += _number(module), kind
        self.chosen.append(module.training)  # a compiled module asks its own
        if kind not in self.seen:
            self._add_class(kind)
        for hooks in HOOKS:
            if several := own.get(hooks):
                for hook in several.values():
                    self._add_function(hook, DEEP)
        if forward := own.get("forward"):
            self._add_function(forward, DEEP)
        # nobody sets flags of PyTorch's layers, and those of its wrappers change in every step
        if kind.__module__.startswith("torch.nn.modules.") or is_wrapper(module):
            return
        for name, value in own.items():
            if name not in LEFT_OUT:
                self._add(value, DEEP)

    def _add_class(self, kind: type) -> None:
        self.seen.add(kind)
        for each in kind.__mro__:
            if not each.__module__.startswith(("torch.", "builtins")):
                self.written += map(_code, filter(_is_function, each.__dict__.values()))
                self.chosen += [x for x in each.__dict__.values() if type(x) in (bool, str)]
        self.written.append(_code(kind.forward) if _is_function(getattr(kind, "forward", None)) else None)

    def _add(self, value: Any, deep: int) -> None:
        kind = type(value)
        if kind in _FLAGS:
            self.chosen.append(value)
        elif kind in (int, float):  # which may count steps
            self.chosen.append(value != 0)
        elif issubclass(kind, (Tensor, nn.Module)):
            self.chosen.append(kind)
        elif issubclass(kind, Enum):
            self.chosen.append(value)
        elif deep == 0:
            return
        elif callable(value):
            self._add_function(value, deep)
        elif kind in (list, tuple, dict):
            inside = value.values() if kind is dict else value
            if len(inside) <= FEW:
                for each in inside:
                    if callable(each) and not isinstance(each, nn.Module):
                        self._add_function(each, deep - 1)
        else:
            self._add_object(value, deep)

    def _add_object(self, value: Any, deep: int) -> None:
        """An object's class, and its attributes, such as the settings in a config."""
        self.written.append(type(value))
        if id(value) not in self.seen and not type(value).__module__.startswith(STATELESS):
            self.seen.add(id(value))
            for each in getattr(value, "__dict__", {}).values():
                self._add(each, deep - 1)

    def _add_function(self, function: Any, deep: int) -> None:
        """A function's code, and what it was made with: not the object, since a hook may be made anew in every step."""
        if isinstance(function, Around):
            function = function.forward
        if isinstance(function, MethodType):
            self.written.append(type(function.__self__))
            function = function.__func__
        if deep == 0:
            self.written.append(type(function))
        elif isinstance(function, FunctionType):
            self.written.append(function.__code__)
            cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
            self._add_all([*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()], deep)
        elif isinstance(function, partial):
            self._add_function(function.func, deep - 1)
            self._add_all([*function.args, *function.keywords.values()], deep)
        elif isinstance(function, type) or not hasattr(function, "__dict__"):  # a class, or written in C
            self.written.append(function if isinstance(function, type) else getattr(function, "__qualname__", None))
        elif not isinstance(function, nn.Module):
            self.written.append(getattr(function, "__qualname__", None))
            if type(function) not in self.seen:
                self._add_class(type(function))
            self._add_object(function, deep)

    def _add_all(self, values: Iterable[Any], deep: int) -> None:
        for value in values:
            self._add(value, deep - 1)


_FLAGS = {bool, str, type(None), torch.dtype, torch.device}


def _is_function(value: Any) -> bool:
    return type(value) is FunctionType


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


@lru_cache(4096)
def _code(function: FunctionType) -> int:
    """The hash of a function's code; its code is kept as long as this is remembered."""
    return hash(function.__code__)
