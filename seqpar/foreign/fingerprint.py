"""Fingerprints of a forward's arguments, by which ranks find out that they were given different ones."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import NamedTuple
from weakref import WeakSet, ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from seqpar.comm import Comm
from seqpar.foreign.kinds import name_of

# Numbers of the forwards before which ranks compare weights: the first, which detects weights drawn or loaded
# differently, and some later ones, by which an optimizer has stepped even if gradients are accumulated.
COMPARED = frozenset({0, 1, 2, 4, 8, 16})
SPREAD = 0x1E3779B97F4A7C15  # spreads numbers over all bits
CHUNK = 1 << 20  # elements that are looked at together, so that little memory is needed beside a large tensor
SUMS = 32  # of a `sketch`
# Ranks' gradients of the output may be further apart than bits: where each rank's kernels round in another order, as in
# a loss behind a decoder. All of bfloat16's last digits differ by 0.4 % of the norm, other targets by the norm itself.
SAME_GRADIENT = 0.01  # of the norm
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightsHash(NamedTuple):
    """A fingerprint of a model's weights before a forward, for the comparison of ranks.

    stepped: whether an optimizer may have stepped since the first one; buffers count before the first one alone, since
    a step does not write to them.
    """

    stepped: bool
    value: int


def check_weights(what: str, every: Sequence[WeightsHash | None]) -> None:
    """Raise ValueError if the weights of two ranks differ. what: begins the message.

    every: by rank; None where a rank compares its weights before other forwards, as one that froze a parameter does.
    """
    first: dict[bool, tuple[int, int]] = {}
    for rank, weights in enumerate(every):
        if weights is None:
            continue
        before, value = first.setdefault(weights.stepped, (rank, weights.value))
        if value == weights.value:
            continue
        if weights.stepped:
            raise ValueError(
                f"{what}: weights differ between rank {before} and rank {rank} since an optimizer stepped with "
                "gradients that are shares; start again from equal weights, and call "
                "seqpar.train.sync_gradients(model.parameters(), comm) before every step of the optimizer"
            )
        raise ValueError(
            f"{what}: weights differ between rank {before} and rank {rank} (by fingerprint); load the same ones on "
            "every rank, or draw them with the same seed"
        )


class WeightChecks:
    """Says before which forwards of a model ranks compare its weights: see `COMPARED`.

    After the first one only forwards with gradients count, as optimizers step between these. Parameters that are
    trainable for the first time start a count of their own, and other modules, such as adapters, start anew.
    """

    def __init__(self) -> None:
        self._modules: list[ref[nn.Module]] = []  # that the counts are for
        self._counts: dict[int, int] = {}  # forwards by a hash of the parameters that are trainable
        self._now = 0

    def weights(self, model: nn.Module, modules: Sequence[nn.Module]) -> WeightsHash | None:
        """The weights for the forward that begins, None if this rank compares none. modules: all of the model."""
        if len(modules) != len(self._modules) or any(a() is not b for a, b in zip(self._modules, modules)):
            self._modules, self._counts = list(map(ref, modules)), {}
        parameters = [p for module in modules for p in module._parameters.values() if p is not None]
        self._now = hash(tuple([p.requires_grad for p in parameters]))
        count = self._counts.get(self._now, 0)
        if count not in COMPARED or (count and not torch.is_grad_enabled()):
            return None
        return WeightsHash(count > 0, weights_of(model, buffers=not count))

    def passed(self) -> None:
        """Count that forward, since all ranks have begun it."""
        count = self._counts.get(self._now, 0)
        if not count or torch.is_grad_enabled():
            self._counts[self._now] = count + 1


def leaves(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Tensors and plain values with their paths; for anything else its type."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from leaves(each, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for n, each in enumerate(value):
            yield from leaves(each, f"{name}.{n}")
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from leaves(getattr(value, field.name), f"{name}.{field.name}")
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        yield name, torch.from_numpy(np.ascontiguousarray(value))
    elif isinstance(value, (Tensor, bool, int, float, str)):
        yield name, value
    elif value is not None:
        yield name, type(value).__qualname__


def fingerprint(value: object) -> object:
    """Equal for equal values, almost never for others: a tensor's shape, dtype and `hashed`, or the value's repr."""
    return (tuple(value.shape), value.dtype, hashed(value)) if isinstance(value, Tensor) else repr(value)


def weights_of(model: nn.Module, *, buffers: bool = True) -> int:
    """A fingerprint of a model's parameters, and of its buffers, without those that a wrapper has sharded.

    Not taken from the state dict: reading that makes fully_shard drop the weights that a forward needs.
    """
    found, seen = 0, set[int]()
    for path, module in model.named_modules():
        for name, x in (*module._parameters.items(), *(module._buffers.items() if buffers else ())):
            if x is not None and id(x) not in seen:
                seen.add(id(x))
                if x.is_meta and (x := _offloaded(module, name)) is None:
                    _warn_of_meta(model, f"{path}.{name}".lstrip("."))
                found = (found * SPREAD + hashed(x)) % (1 << 64)
    return found


def _offloaded(module: nn.Module, name: str) -> Tensor | None:
    """A parameter or buffer that accelerate has put away until the module's forward."""
    hook = module.__dict__.get("_hf_hook")
    for each in getattr(hook, "hooks", [hook]):
        stored = getattr(each, "weights_map", None)
        if stored is not None and name in stored:
            return stored[name]  # type: ignore[no-any-return]
    return None


_told: WeakSet[nn.Module] = WeakSet()


def _warn_of_meta(model: nn.Module, name: str) -> None:
    if model not in _told:
        _told.add(model)
        warnings.warn(
            f"{name} of a parallel {name_of(model)} is on the meta device, so that ranks do not compare its values",
            stacklevel=2,
        )


def hashed(x: object) -> int:
    """A fingerprint of 64 bits; other elements, or the same in another order, almost never have it.

    0 for an empty tensor, and for a DTensor or another shard.
    """
    if not isinstance(x, Tensor) or not x.numel() or x.is_meta or type(x).__module__.startswith("torch.distributed"):
        return 0
    if is_traceable_wrapper_subclass(x):  # as quantised weights, which consist of others
        found = 0
        for name in x.__tensor_flatten__()[0]:
            found = (found * SPREAD + hashed(getattr(x, name))) % (1 << 64)
        return found
    with torch._C.DisableTorchFunctionSubclass():
        bits = _bits(x.detach().as_subclass(Tensor)).reshape(-1)
    factors = _random(0, min(CHUNK, len(bits)), bits.device) | 1  # odd, so that any change of one element counts
    found = torch.zeros((), dtype=torch.int64, device=bits.device)
    for chunk in bits.split(CHUNK):
        chunk = chunk.long()
        # numbers such as 1.0 have all their bits at the upper end, where products would lose them
        found = found * SPREAD + ((chunk ^ (chunk >> 32)) * factors[: len(chunk)]).sum()
    return int(found)


def sketch(x: Tensor) -> list[float]:
    """A tensor's sum of squares, and `SUMS` sums of its elements with random signs.

    The squared differences of these sums between two tensors add up to the squared norm of the tensors' difference, on
    average over signs, and nearly so where many elements differ. An element that stands in another place goes unnoticed
    once in `2 * SUMS` pairs of places, which have a sum and a sign in common.
    """
    x = x.detach()
    x = (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).reshape(-1)
    sums = torch.zeros(1 + SUMS, dtype=torch.float64, device=x.device)
    for n, chunk in enumerate(x.split(CHUNK)):
        wide, random = chunk.double(), _random(n * CHUNK, len(chunk), x.device)
        sums[0] += wide.square().sum()
        sums[1:].index_add_(0, (random >> 32) % SUMS, torch.where(random < 0, -wide, wide))
    return sums.tolist()  # type: ignore[no-any-return]


def check_gradient(room: str, comm: Comm, grad: Tensor, *, of: str = "", more: str = "") -> None:
    """Raise ValueError on every rank if the gradient of a model's output differs between ranks. A collective.

    room: begins the message. of: says whose output, as " of Latte". more: what else may be done about it.
    """
    every = comm.gather(f"{room}: backward{of}", sketch(grad))
    for rank, other in enumerate(every):
        if (apart := _apart(every[0], other)) > SAME_GRADIENT:
            raise ValueError(
                f"{room}: the gradient of the output{of} differs between rank 0 and rank {rank}, by about {apart:.0%} "
                f"of its norm; compute the whole loss on every rank, from the same target{more}"
            )


def _apart(first: list[float], second: list[float]) -> float:
    """The norm of the difference of two tensors, relative to the larger norm, from their sketches."""
    squares, larger = (first[0], second[0]), max(first[0], second[0])
    if not any(map(math.isfinite, squares)):
        return 0.0  # an overflow happens on all ranks, and a gradient scaler will skip the step
    if not all(map(math.isfinite, squares)):
        return math.inf
    return math.dist(first[1:], second[1:]) / larger**0.5 if larger else 0.0


def _random(first: int, count: int, device: torch.device) -> Tensor:
    """Pseudo-random integers of 64 bits for places from the first one on, the same on every device."""
    x = torch.arange(first + 1, first + 1 + count, device=device) * SPREAD
    return (x ^ (x >> 32)) * SPREAD


def _bits(x: Tensor) -> Tensor:
    """A tensor's memory as integers: hashes and sums have no kernels for every dtype."""
    x = x.detach().resolve_conj().resolve_neg()
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.contiguous().view(_WHOLE[x.element_size()])
