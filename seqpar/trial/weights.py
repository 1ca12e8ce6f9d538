"""The weights of a trial: drawn at random in 32 bits, whatever the model's own are.

No rounding hides anything then, nor does a gate of zero, nor an adapter that begins at zero. The weights of a layer are
there while that layer is called, so a model needs memory for one layer more, and for what lies outside of its layers:
embeddings and the head. The model's own tensors are not touched. Weights of quantised layers cannot be drawn and stay;
their products round to few bits, as `compare.close` allows for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.foreign.wrap import replaced
from seqpar.ops.core.device import autocast_dtype, no_autocast
from seqpar.private import torch as torch_private
from seqpar.private.torch import TENSORS, buffers_of

KINDS = "cpu", "cuda"  # of devices that have autocast
NUMBERS = 1_000_003  # random numbers, which are repeated in larger weights; a prime, so no two rows of one are equal
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


def coarse(model: nn.Module, *, random: bool) -> bool:
    """Whether products round to few bits. random: whether a model has random weights, else its own."""
    casts = any(map(autocast_dtype, KINDS))
    return quantised(model) or (not random and (casts or any(map(_is_narrow, model.parameters()))))


def is_plain(x: Tensor) -> bool:
    """Whether a tensor or parameter has values of its own, which may be replaced."""
    plain = type(x) in (Tensor, nn.Parameter) and _is_plain(x) and x.layout is torch.strided
    return plain and not x.is_meta and bool(x.numel()) and x.is_floating_point() and x.dtype.itemsize > 1


@contextmanager
def drawn(model: nn.Module, device: torch.device | None = None) -> Iterator[None]:
    """A context in which a model has random weights, and computes in 32 bits or its own 64.

    device: of the weights, by default their own; given, those that are put away are drawn too.

    A quantised model keeps its dtypes, since its products take no other inputs, and draws only what is not quantised.
    """
    numbers = {id(p): n for n, p in enumerate(model.parameters())}
    widens = not quantised(model)
    outside, layers = [], []
    _divide(model, outside, layers)
    with ExitStack() as stack:
        stack.enter_context(exact_products())
        for kind in KINDS:
            stack.enter_context(no_autocast(kind))
        stack.enter_context(_drawn(outside, numbers, widens, device))
        for layer in dict.fromkeys(layers):
            stack.enter_context(_drawn_in_calls(layer, numbers, widens, device))
        yield


@contextmanager
def without_zeros(model: nn.Module) -> Iterator[None]:
    """A context in which buffers of zeros, such as a gate that opens later, have random numbers."""
    with ExitStack() as stack:
        for module in model.modules():
            own = buffers_of(module)
            zeros = {name for name, x in own.items() if x is not None and is_plain(x) and not x.any()}
            if zeros:
                new = {k: _values(x, n, False, x.device) if k in zeros else x for n, (k, x) in enumerate(own.items())}
                stack.enter_context(replaced(module, {TENSORS[1]: new}))
        yield


def widened(x: Tensor) -> Tensor:
    """A tensor of 16 bits in 32, any other as it is."""
    return x.detach().float() if _is_narrow(x) else x


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
def _drawn_in_calls(
    layer: nn.Module, numbers: dict[int, int], widens: bool, device: torch.device | None
) -> Iterator[None]:  # fmt: skip
    """A context in which a layer and its parts have random weights while it is called."""
    with ExitStack() as stack:
        called = stack.enter_context(ExitStack())

        def before(*_: Any) -> None:
            called.enter_context(_drawn(layer.modules(), numbers, widens, device))

        def after(*_: Any) -> None:
            called.close()

        stack.callback(layer.register_forward_pre_hook(before).remove)
        stack.callback(layer.register_forward_hook(after, always_call=True).remove)
        yield


@contextmanager
def _drawn(
    modules: Iterable[nn.Module], numbers: dict[int, int], widens: bool, device: torch.device | None
) -> Iterator[None]:  # fmt: skip
    """A context in which modules have random weights, tied ones the same, and buffers of 16 bits have 32.

    numbers: of the model's parameters, by id, which seed what is drawn.
    """
    others: dict[int, Tensor] = {}

    def other(x: Tensor | None) -> Tensor | None:
        if x is None or id(x) in others:
            return x if x is None else others[id(x)]
        if id(x) in numbers and (is_plain(x) or (device is not None and x.is_meta)):
            values = _values(x, numbers[id(x)], widens, device or x.device)
            others[id(x)] = nn.Parameter(values, requires_grad=False)
        elif widens and id(x) not in numbers:
            others[id(x)] = widened(x).to(device or x.device)
        return others.get(id(x), x)

    with ExitStack() as stack:
        # a mode around may refuse random numbers, or replace them
        with torch.no_grad(), torch_private.DisableTorchFunction():
            for module in modules:
                for kind in () if isinstance(module, torch.jit.ScriptModule) else TENSORS:
                    own = module.__dict__[kind]
                    new = {name: other(x) for name, x in own.items()}
                    if any(x is not own[name] for name, x in new.items()):  # a module may write to its dict of buffers
                        stack.enter_context(replaced(module, {kind: new}))
        yield


def _values(x: Tensor, number: int, widens: bool, device: torch.device) -> Tensor:
    """Random weights in place of a parameter.

    A vector may have to be positive; a matrix should preserve the size of its input.
    """
    numbers, first = _numbers(device), 7919 * number % NUMBERS
    if (end := first + x.numel()) > NUMBERS:
        numbers = numbers.repeat(-(-end // NUMBERS))
    values = numbers[first:end].view(x.shape)
    values = values * (3 / x.shape[-1]) ** 0.5 if x.dim() > 1 else values.abs() / 2 + 0.5
    return values.to(torch.float32 if widens and _is_narrow(x) else x.dtype)


@lru_cache(4)
def _numbers(device: torch.device) -> Tensor:
    """Random numbers between -1 and 1."""
    values = torch.rand(NUMBERS, generator=torch.Generator().manual_seed(0), device="cpu")
    return (values * 2 - 1).to(device)


def _is_narrow(x: Tensor) -> bool:
    return x.is_floating_point() and x.dtype.itemsize == 2 and _is_plain(x)


def _is_plain(x: Tensor) -> bool:
    return type(x.data) is Tensor
