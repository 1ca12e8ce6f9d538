"""Fingerprints of a forward's arguments, by which ranks find out that they were given different ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass

import numpy as np
import torch
from torch import Tensor, nn

# Numbers of the forwards before which ranks compare weights: the first, which detects weights drawn or loaded
# differently, and some later ones, by which an optimizer has stepped even if gradients are accumulated.
COMPARED = frozenset({0, 1, 2, 4, 8, 16})
SPREAD = 0x1E3779B97F4A7C15  # spreads numbers over all bits
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
    """Equal for equal values, almost never for others: a tensor's shape, dtype and `ordered`, or the value's repr."""
    return (tuple(value.shape), value.dtype, ordered(value)) if isinstance(value, Tensor) else repr(value)


def weights_of(model: nn.Module, *, buffers: bool = True) -> int:
    """A fingerprint of a model's parameters, and of its buffers, without those that a wrapper has sharded.

    Not taken from the state dict: reading that makes fully_shard drop the weights that a forward needs.
    """
    return sum(map(hashed, (*model.parameters(), *(model.buffers() if buffers else ()))))


def hashed(x: object) -> int:
    """A fingerprint of 64 bits; tensors of other elements almost never collide. 0 for an empty tensor or a DTensor."""
    if type(x) not in (Tensor, nn.Parameter) or not x.numel() or x.is_meta:  # type: ignore[attr-defined]
        return 0
    bits = _bits(x)
    # one that combines bits by exclusive or does not tell equal elements, as of new norms and biases, from others
    return int(torch.hash_tensor(bits).view(torch.int64) ^ (bits.sum(dtype=torch.int64) * SPREAD))  # type: ignore[attr-defined]


def ordered(x: Tensor) -> int:
    """`hashed`, with the places of elements: the same elements in another order have another fingerprint."""
    if type(x) not in (Tensor, nn.Parameter) or not x.numel() or x.is_meta:
        return 0
    bits = _bits(x).reshape(-1).long()
    places = torch.arange(1, 2 * bits.numel(), 2, device=x.device)
    # odd factors, spread over all bits; the sum wraps
    return int((bits * (places * SPREAD)).sum())


def _bits(x: Tensor) -> Tensor:
    """A tensor's memory as integers: hashes and sums have no kernels for every dtype."""
    x = x.detach().resolve_conj().resolve_neg()
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.contiguous().view(_WHOLE[x.element_size()])
