"""What the forwards of a model run, in a few numbers: they change when a user changes what the model computes.

A trial shows what a model did with its rows. It holds until somebody puts in another module, forward, method or hook,
or sets a mode or a flag by which code may choose.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from functools import partial
from itertools import count
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules import module as of_torch

from seqpar.foreign.wrap import Around, closed_over
from seqpar.trial.protect import OF_MODULES, STATELESS, is_wrapper

FEW = 16  # elements of a container that are looked at
DEEP = 3  # functions inside functions, as in closures and partials
LEFT_OUT = {*OF_MODULES, "forward", "_diffusers_hook"}  # those hooks are checked by themselves, and count steps
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
GLOBAL_HOOKS = ("_global_forward_pre_hooks", "_global_forward_hooks")

_numbers: dict[int, tuple[Callable[[], Any], int]] = {}  # of modules, by their ids; an address may be used again
_count = count()
_hashes: dict[int, tuple[CodeType, int]] = {}  # of code objects, by their ids
KEPT = 4096  # hashes
FLAGS, WORDS = 64, 16  # combinations of a model's flags that trials tell apart, and of its strings, which may be steps


class Code(NamedTuple):
    """Hashes of what the forwards of a model run, in this process.

    written: modules with their modes, and the code of their classes, forwards and hooks. held: functions and classes of
    objects in attributes. flags: attributes that are None, a bool, an enum or a dtype, and whether a number is 0.
    words: those that are strings.
    """

    written: int
    held: int
    flags: int
    words: int


def code_of(modules: Iterable[nn.Module]) -> Code:
    """The code of a model, given as all modules in it."""
    notes = _Notes()
    for hooks in GLOBAL_HOOKS:
        for hook in getattr(of_torch, hooks, {}).values():
            notes.add_function(notes.written, hook, DEEP)
    for module in modules:
        notes.add_module(module)
    return Code(*(hash(tuple(several)) for several in (notes.written, notes.held, notes.flags, notes.words)))


def code_among(ranks: int, modules: Iterable[nn.Module]) -> Code:
    """The code of a model that some ranks share. One process alone has no need to read it: no change can do harm."""
    alone = ranks == 1 and not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
    return Code(0, 0, 0, 0) if alone else code_of(modules)


def autocast_dtypes() -> tuple[torch.dtype | None, ...]:
    """The dtypes to which autocast casts on CPU and GPU, None where it is off; code may be another one under it."""
    return tuple(torch.get_autocast_dtype(d) if torch.is_autocast_enabled(d) else None for d in ("cpu", "cuda"))


@contextmanager
def under_autocast(dtypes: Sequence[torch.dtype | None]) -> Iterator[None]:
    """A block with autocast as `autocast_dtypes` found it."""
    with ExitStack() as stack:
        for device, now, dtype in zip(("cpu", "cuda"), autocast_dtypes(), dtypes):
            if now != dtype:
                stack.enter_context(torch.autocast(device, dtype, enabled=dtype is not None))
        yield


class Few:
    """Values that count while there are few of them: where one changes in every step, trials do not follow it."""

    def __init__(self, most: int) -> None:
        self.most, self._seen = most, set[Hashable]()

    def known(self, value: Hashable) -> Hashable:
        """The value if it is one of the first, else None."""
        if len(self._seen) < self.most:
            self._seen.add(value)
        return value if value in self._seen else None


class KnownCodes:
    """The codes of a model on all ranks, as trials tell them apart: without flags and words where there are too many.

    All ranks ask for the same codes in the same order, and so get the same keys.
    """

    def __init__(self) -> None:
        self._flags, self._words = Few(FLAGS), Few(WORDS)

    def key(self, codes: Iterable[Code]) -> Hashable:
        """What stands for these codes."""
        return tuple([(x.written, x.held, self._flags.known(x.flags), self._words.known(x.words)) for x in codes])


def _number(module: nn.Module) -> int:
    own = id(module)  # by identity: a module may have a hash of its own, as a metric's of its state
    found = _numbers.get(own)
    if found is None or found[0]() is not module:
        found = _numbers[own] = ref(module, lambda _, own=own: _numbers.pop(own, None)), next(_count)
    return found[1]


class _Notes:
    """What was found on a walk through a model, in its order."""

    def __init__(self) -> None:
        self.written: list[Hashable] = []
        self.held: list[Hashable] = []
        self.flags: list[Hashable] = []
        self.words: list[Hashable] = []
        self.seen: set[int] = set()  # ids of classes and objects, which the model holds meanwhile

    def add_module(self, module: nn.Module) -> None:
        own, kind = module.__dict__, type(module)
        self.written += _number(module), module.training  # a compiled module asks its own for the mode
        self.add_class(kind)
        for hooks in HOOKS:
            if several := own.get(hooks):
                for hook in several.values():
                    self.add_function(self.written, hook, DEEP)
        if (forward := own.get("forward")) is not None:
            self.add_function(self.written, forward, DEEP)
        for tensors in ("_parameters", "_buffers"):
            if several := own.get(tensors):
                self.flags += [x is None for x in several.values()]
        # nobody sets attributes of PyTorch's layers that have no parts, and those of its wrappers change in every step
        if (str(kind.__module__).startswith("torch.nn.modules.") and not own.get("_modules")) or is_wrapper(module):
            return
        for name, value in list(own.items()):  # another thread may set some
            if name not in LEFT_OUT:
                self.add(value, DEEP)

    def add_class(self, kind: type) -> None:
        if id(kind) in self.seen:
            return
        self.seen.add(id(kind))
        self.written.append(f"{kind.__module__}.{kind.__qualname__}")
        for each in kind.__mro__:
            if str(each.__module__).startswith(("torch.", "builtins")):
                continue
            for value in list(each.__dict__.values()):
                inner = value.fget if type(value) is property else value
                inner = inner.__func__ if type(inner) in (staticmethod, classmethod) else inner
                if type(inner) is FunctionType:
                    self.written.append(_hash_of(inner.__code__))
                    if inner.__closure__:
                        self.add_function(self.written, inner, DEEP - 1)
                elif type(value) in (bool, str, int, float, type(None), partial):
                    self.add(value, 1)
        forward = getattr(kind, "forward", None)
        self.written.append(_hash_of(forward.__code__) if type(forward) is FunctionType else None)

    def add(self, value: Any, deep: int) -> None:
        """A value in an attribute, a closure or an argument."""
        kind = type(value)
        if kind is bool or value is None or kind is torch.dtype or kind is torch.device:
            self.flags.append(value)
        elif kind is str:
            self.words.append(value)
        elif kind is int or kind is float:  # which may count steps
            self.flags.append(value != 0)
        elif issubclass(kind, (Tensor, nn.Module)):
            self.held.append(kind.__qualname__)
        elif deep:
            try:
                self._add_other(value, kind, deep)
            except Exception:  # an object may raise whatever it is asked
                self.held.append(kind.__qualname__)

    def _add_other(self, value: Any, kind: type, deep: int) -> None:
        if issubclass(kind, Enum):
            self.flags.append((kind.__qualname__, value.name))
        elif issubclass(kind, (list, set, frozenset)):
            if len(value) <= FEW:  # which may be logs; functions alone choose code there
                self._add_all([x for x in value if callable(x)], deep)
        elif issubclass(kind, (tuple, dict)):
            inside = list(value.values() if issubclass(kind, dict) else value)
            if len(inside) <= FEW:
                self._add_all([x for x in inside if type(x) in (bool, str, type(None)) or callable(x)], deep)
        elif callable(value):
            self.add_function(self.held, value, deep)
        else:
            self._add_object(self.held, value, deep)

    def _add_object(self, notes: list[Hashable], value: Any, deep: int) -> None:
        """An object's class, and its attributes, such as the settings in a config."""
        kind = type(value)
        notes.append(kind.__qualname__)
        if id(value) not in self.seen and not kind.__module__.startswith(STATELESS):
            self.seen.add(id(value))
            self._add_all(list(getattr(value, "__dict__", {}).values()), deep)

    def add_function(self, notes: list[Hashable], function: Any, deep: int) -> None:
        """A function's code, and what it was made with: not the object, since a hook may be made anew in every step."""
        try:
            self._add_function(notes, function, deep)
        except Exception:
            notes.append(type(function).__qualname__)

    def _add_function(self, notes: list[Hashable], function: Any, deep: int) -> None:
        kind = type(function)
        if kind is Around:
            function, kind = function.forward, type(function.forward)
        if kind is MethodType:
            owner, function, kind = function.__self__, function.__func__, type(function.__func__)
            if isinstance(owner, type):
                notes.append(f"{owner.__module__}.{owner.__qualname__}")
            elif isinstance(owner, nn.Module):
                notes.append(type(owner).__qualname__)
            elif deep:
                self._add_object(notes, owner, deep)
        if kind is FunctionType:
            notes.append(_hash_of(function.__code__))
            defaults = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
            self._add_all([*closed_over(function), *defaults], deep)
        elif kind is partial:
            self.add_function(notes, function.func, deep)
            self._add_all([*function.args, *function.keywords.values()], deep)
        elif issubclass(kind, type):
            notes.append(f"{function.__module__}.{function.__qualname__}")
        elif issubclass(kind, nn.Module) or kind.__module__.startswith(STATELESS):  # and functions written in C
            notes.append(getattr(function, "__qualname__", kind.__qualname__))
        elif deep:
            self.add_class(kind)
            self._add_object(notes, function, deep)

    def _add_all(self, values: Iterable[Any], deep: int) -> None:
        for value in values:
            self.add(value, deep - 1)


def _hash_of(code: CodeType) -> int:
    """The hash of a function's code; not of the function, which may hold a model."""
    found = _hashes.get(id(code))
    if found is None or found[0] is not code:
        if len(_hashes) > KEPT:
            _hashes.clear()
        found = _hashes[id(code)] = code, hash(code)
    return found[1]
