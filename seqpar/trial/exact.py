"""The arithmetic of a trial: 32 bits at least, as 16 would hide such effects as logits times 0.95.

Parameters and buffers of 16 bits are replaced by copies of 32. Those of a layer are there while that layer is called,
so a model needs memory for one layer more, and for what lies outside of its layers: embeddings and the head. The
model's own tensors are not touched. A quantised model computes as it is, since its products take no other inputs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.foreign.wrap import replaced
from seqpar.private.torch import TENSORS

# How exact products of 32 bits are, by all the names that PyTorch has for it: object, name, and the value for exact.
PRODUCTS: tuple[tuple[Any, str, Any], ...] = (
    (torch.backends.cudnn, "allow_tf32", False),
    (torch.backends.cuda.matmul, "fp32_precision", "ieee"),
    (torch.backends.mkldnn.matmul, "fp32_precision", "ieee"),  # type: ignore[attr-defined]
)
_setting = threading.Lock()
_inside = 0  # threads in `exact_products`, as these settings are those of the process
_before: list[Callable[[], None]] = []  # what the first of them found, to be set again


def quantised(model: nn.Module) -> bool:
    """Whether products of a model take weights of fewer bits than 16, or in a form of their own."""
    config = model.__dict__.get("config")
    own = (p for p in model.parameters() if not p.is_floating_point() or p.dtype.itemsize < 2 or not _is_plain(p))
    return getattr(config, "quantization_config", None) is not None or next(own, None) is not None


@contextmanager
def wide(model: nn.Module) -> Iterator[None]:
    """A context in which a model computes in 32 bits, if its own are 16."""
    with ExitStack() as stack:
        stack.enter_context(exact_products())
        if not quantised(model) and any(map(_is_narrow, chain(model.parameters(), model.buffers()))):
            outside, layers = [], []
            _divide(model, outside, layers)
            stack.enter_context(_widened(outside))
            for layer in dict.fromkeys(layers):
                stack.enter_context(_widened_in_calls(layer))
        yield


@contextmanager
def exact_products() -> Iterator[None]:
    """A context in which products of 32 bits are exact, in all threads of the process."""
    global _inside
    with _setting:
        if not _inside:
            _before[:] = _set_exact()
        _inside += 1
    try:
        yield
    finally:
        with _setting:
            _inside -= 1
            if not _inside:
                for restore in _before:
                    restore()


def _set_exact() -> list[Callable[[], None]]:
    """Make products exact; returns what sets the former values again."""
    settings = [(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest")]
    settings += [(partial(getattr, x, name), partial(setattr, x, name), exact) for x, name, exact in PRODUCTS]
    found = []
    for read, write, exact in settings:
        with suppress(RuntimeError):  # PyTorch does not say a value by a name while others contradict it
            found.append((partial(write, read()), partial(write, exact)))
    for _, make_exact in found:
        make_exact()
    return [restore for restore, _ in found]


def _divide(module: nn.Module, outside: list[nn.Module], layers: list[nn.Module]) -> None:
    """A module's parts: those that lie in a list of layers, whole, and the others."""
    outside.append(module)
    for part in module.children():
        if isinstance(module, nn.ModuleList):
            layers.append(part)
        else:
            _divide(part, outside, layers)


@contextmanager
def _widened_in_calls(layer: nn.Module) -> Iterator[None]:
    """A context in which a layer and its parts have tensors of 32 bits while it is called."""
    with ExitStack() as stack:
        called = stack.enter_context(ExitStack())

        def before(*_: Any) -> None:
            called.enter_context(_widened(layer.modules()))

        def after(*_: Any) -> None:
            called.close()

        stack.callback(layer.register_forward_pre_hook(before).remove)
        stack.callback(layer.register_forward_hook(after, always_call=True).remove)
        yield


@contextmanager
def _widened(modules: Iterable[nn.Module]) -> Iterator[None]:
    """A context in which modules have copies of 32 bits of their own tensors of 16, and tied ones are one copy."""
    copies: dict[int, Tensor] = {}

    def wider(x: Tensor | None) -> Tensor | None:
        if x is None or not _is_narrow(x):
            return x
        if id(x) not in copies:
            copy = x.detach().float()
            copies[id(x)] = nn.Parameter(copy, requires_grad=False) if isinstance(x, nn.Parameter) else copy
        return copies[id(x)]

    with ExitStack() as stack:
        for module in modules:
            own = {name: module.__dict__[name] for name in TENSORS}
            new = {name: {key: wider(x) for key, x in several.items()} for name, several in own.items()}
            stack.enter_context(replaced(module, new))
        yield


def _is_narrow(x: Tensor) -> bool:
    return x.is_floating_point() and x.dtype.itemsize == 2 and _is_plain(x)


def _is_plain(x: Tensor) -> bool:
    return type(x.data) is Tensor
