"""The state that a trial restores: a model's buffers and attributes, compiled code, random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from seqpar.foreign.wrap import replaced
from seqpar.private.torch import parameters_of, uncompiled_calls

Buffers = dict[tuple[nn.Module, str], Tensor]
_WRAPPERS = ("torch.nn.parallel", "torch.distributed", "torch._dynamo")  # set up once, at a first forward
LARGEST = 1 << 26  # bytes up to which a copy of a tensor is kept; caches and tables may be larger
KEPT = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bfloat16, torch.float16,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
}  # fmt: skip
GENERATORS = (random.Random, np.random.Generator, torch.Generator)
OF_MODULES = nn.Module().__dict__.keys()
# packages whose objects do not hold the state of a model
STATELESS = ("builtins", "torch", "numpy", "seqpar", "threading", "_thread", "concurrent", "multiprocessing", "logging")


class SavedState:
    """A model's state other than its parameters: buffers, and attributes such as the length of a table.

    Lists, sets, dicts, tensors of up to 64 MiB, random generators and plain objects in attributes are restored too, and
    those inside them, such as the counters of a library's hooks. So are these in the arguments of its forward.
    """

    def __init__(self, model: nn.Module, arguments: Iterable[Any] = ()) -> None:
        self._modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
        self._types = [type(m) for m in self._modules]
        self._buffers = [dict(m._buffers) for m in self._modules]
        self._attributes = [{} if is_wrapper(m) else dict(m.__dict__) for m in self._modules]
        own = [x for several in self._attributes for name, x in several.items() if name not in OF_MODULES]
        kept = {id(x) for m in self._modules for x in (*parameters_of(m).values(), *m._buffers.values())}
        inside = [x for x in held([*own, *arguments]) if id(x) not in kept]
        self._objects = [(x, copy(x)) for x in inside if type(x) in (list, set, dict)]
        self._drawing = [(x, _state_of(x)) for x in inside if isinstance(x, GENERATORS)]
        self._tensors = [_Kept(x) for x in inside if _can_be_kept(x)]
        self._copies: Buffers = {
            (m, name): x.clone()
            for m, several in zip(self._modules, self._buffers) for name, x in several.items() if x is not None
        }  # fmt: skip

    def changed(self) -> Buffers:
        """Copies of the buffers whose values have changed, in their former shapes."""
        changed = {}
        for (module, name), former in self._copies.items():
            now = module._buffers.get(name)
            if now is not None and now.shape == former.shape and not torch.equal(now, former):
                changed[module, name] = now.clone()
        return changed

    def left(self) -> list[str]:
        """What a call has left behind: names of buffers, and of attributes that are another object or hold others."""
        names = [f"the buffer {key} of {type(module).__name__}" for module, key in self.changed()]
        written = self.written()
        for module, before in zip(self._modules, self._attributes):
            for key in sorted((module.__dict__.keys() | before.keys()) - OF_MODULES) if before else ():
                now = module.__dict__.get(key)
                if now is not before.get(key) or (written and any(x is y for x in held([now]) for y in written)):
                    names.append(f"the attribute {key} of {type(module).__name__}")
        return names

    def written(self) -> list[Any]:
        """The lists, sets, dicts and tensors in attributes and arguments that hold other items now."""
        written = [x for x, before in self._objects if not _same_items(x, before)]
        return written + [each.tensor for each in self._tensors if each.changed()]

    def would_write(self) -> bool:
        """Whether `restore` would write to tensors, which a graph may need as they are."""
        return bool(self.changed()) or any(each.changed() for each in self._tensors)

    def restore(self, others: Buffers | None = None) -> None:
        """Restore everything. others: values for some buffers in place of the saved ones."""
        for module, kind, several, before in zip(self._modules, self._types, self._buffers, self._attributes):
            for name in module._buffers.keys() - several.keys():
                del module._buffers[name]
            for name, x in several.items():
                module._buffers[name] = x
                if x is not None:
                    value = (others or {}).get((module, name), self._copies[module, name])
                    if not torch.equal(x, value) and not _same_bits(x, value):
                        x.copy_(value)
            if before and type(module) is kind:  # a lazy module changes its class once it knows its sizes
                for name in module.__dict__.keys() - before.keys():
                    del module.__dict__[name]
                for name, attribute in before.items():
                    if name not in module.__dict__ or module.__dict__[name] is not attribute:
                        module.__dict__[name] = attribute
        for x, before in self._objects:
            if _same_items(x, before):  # it may belong to others too, who must not see it empty
                continue
            if type(x) is list:
                x[:] = before
            else:
                if type(x) is set or x.keys() != before.keys():
                    x.clear()
                x.update(before)
        for x, drawn in self._drawing:
            _set_state(x, drawn)
        for each in self._tensors:
            each.restore()


class _Kept:
    """The values of a tensor that is no parameter or buffer."""

    def __init__(self, x: Tensor) -> None:
        self.tensor, self._version = x, self._version_of(x)
        self._values = self._distinct().clone()

    def _distinct(self) -> Tensor:
        """The elements without those that `expand` repeats."""
        x = self.tensor.detach()
        return x[tuple([slice(0, 1) if step == 0 else slice(None) for step in x.stride()])]

    @staticmethod
    def _version_of(x: Tensor) -> int:
        return -1 if x.is_inference() else x._version

    def changed(self) -> bool:
        """Whether the tensor has other values now, in its former shape."""
        version = self._version_of(self.tensor)
        if version == self._version >= 0 or (version < 0 and not torch.is_inference_mode_enabled()):
            return False  # outside of that mode its tensors cannot be written
        now = self._distinct()
        return now.shape == self._values.shape and not (torch.equal(now, self._values) or _same_bits(now, self._values))

    @torch.no_grad()
    def restore(self) -> None:
        """Put the values back, if the tensor was written to since."""
        if self.changed():
            self._distinct().copy_(self._values)
            self._version = self._version_of(self.tensor)


def _can_be_kept(x: Any) -> bool:
    """Whether a value is a plain tensor of not too many bytes in memory of this process."""
    if type(x) not in (Tensor, nn.Parameter) or x.layout != torch.strided or x.dtype not in KEPT:
        return False
    if x.is_meta or x.is_nested or not x.numel():
        return False
    reach = x.storage_offset() + sum((n - 1) * step for n, step in zip(x.shape, x.stride())) + 1
    memory = x.untyped_storage().nbytes()  # FSDP1 frees it and leaves views behind
    return reach * x.itemsize <= memory and min(x.nbytes, memory) <= LARGEST


def held(values: Iterable[Any]) -> Iterator[Any]:
    """Values and all that lies inside them, each once: in lists, tuples, sets and dicts, and attributes of objects.

    The attributes of an object come as a dict. Modules, tensors and objects of `STATELESS` packages stay closed.
    """
    stack, seen = list(values), set[int]()
    while stack:
        x = stack.pop()
        kind = type(x)  # not its `__class__`, which a proxy has of something that may be gone
        if id(x) in seen or issubclass(kind, (str, bytes, int, float, type(None), type, nn.Module)):
            continue
        seen.add(id(x))
        yield x
        if issubclass(kind, dict):
            stack += x.values()
        elif issubclass(kind, (list, tuple, set, frozenset)):
            stack += x
        elif not (kind.__module__.startswith(STATELESS) or callable(x)):
            stack.append(getattr(x, "__dict__", None))


def _same_items(x: Any, y: Any) -> bool:
    """Whether two lists, dicts or sets hold the same objects, in the same order."""
    if type(x) is dict:
        return _same_items([*x.keys(), *x.values()], [*y.keys(), *y.values()])
    return len(x) == len(y) and all(a is b for a, b in zip(x, y))


def _same_bits(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are the same where NaN equals NaN."""
    return x.dtype.is_floating_point and bool(((x == y) | (x.isnan() & y.isnan())).all())


def _state_of(source: Any) -> Any:
    if isinstance(source, torch.Generator):
        return source.get_state()
    return source.getstate() if isinstance(source, random.Random) else source.bit_generator.state


def _set_state(source: Any, state: Any) -> None:
    if isinstance(source, torch.Generator):
        source.set_state(state)
    elif isinstance(source, random.Random):
        source.setstate(state)
    else:
        source.bit_generator.state = state


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module is a wrapper of PyTorch's, such as DDP, whose attributes change in every forward.

    A module under `fully_shard` does not count, though FSDP2 derives a class of its own from the user's.
    """
    kind = type(module)
    return str(kind.__module__).startswith(_WRAPPERS) and not any(
        issubclass(each, nn.Module) and not str(each.__module__).startswith("torch.") for each in kind.__mro__
    )


@contextmanager
def saved(model: nn.Module, arguments: Iterable[Any] = ()) -> Iterator[SavedState]:
    """Restore the model, its arguments, and the random generators of torch, Python and numpy, after the block."""
    state = SavedState(model, arguments)
    of_torch, of_python, of_numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    devices = {x.device for x in (*model.buffers(), *model.parameters())}
    states = [(i, torch.cuda.get_rng_state(i)) for i in devices if i.type == "cuda"]
    try:
        yield state
    finally:
        state.restore()
        if not torch.equal(of_torch, torch.get_rng_state()):
            torch.set_rng_state(of_torch)
        if of_python != random.getstate():
            random.setstate(of_python)
        if str(of_numpy) != str(np.random.get_state()):
            np.random.set_state(of_numpy)
        for device, of_device in states:
            torch.cuda.set_rng_state(of_device, device)


@contextmanager
def eager(model: nn.Module) -> Iterator[None]:
    """Run the model uncompiled: compiling for two runs would not pay."""
    with ExitStack() as stack:
        for _, module, name, uncompiled in uncompiled_calls(model.named_modules()):
            stack.enter_context(replaced(module, {name: uncompiled}))
        yield
