"""What ranks compare of the arguments of a forward, which must be the same on all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass

import numpy as np
import torch
from torch import Tensor, nn

_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def leaves(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Tensors and plain values with their paths; of anything else its type."""
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
    """What equal values share, and others hardly: of a tensor shape, dtype and `ordered`, of others what they print."""
    return (tuple(value.shape), value.dtype, ordered(value)) if isinstance(value, Tensor) else repr(value)


def weights_of(model: nn.Module) -> int:
    """A number that models of equal parameters and buffers share; those that a wrapper has sharded are left out.

    Not of the state dict: asking for that makes fully_shard take the weights back that a forward needs.
    """
    return sum(map(hashed, (*model.parameters(), *model.buffers())))


def hashed(x: object) -> int:
    """A number that equal tensors share, and others hardly; of a part of a larger one, such as a DTensor, nothing."""
    if type(x) not in (Tensor, nn.Parameter) or not x.numel() or x.is_meta:  # type: ignore[attr-defined]
        return 0
    return int(torch.hash_tensor(x.detach()).view(torch.int64))  # type: ignore[attr-defined]


def ordered(x: Tensor) -> int:
    """`hashed`, with every element's place in it: the same elements in another order have another number."""
    if type(x) not in (Tensor, nn.Parameter) or not x.numel() or x.is_meta:
        return 0
    x = x.detach().resolve_conj().resolve_neg()
    x = torch.view_as_real(x) if x.is_complex() else x
    bits = x.contiguous().reshape(-1).view(_WHOLE[x.element_size()]).long()
    places = torch.arange(1, 2 * bits.numel(), 2, device=x.device)
    # odd factors, spread over all bits; the sum wraps
    return int((bits * (places * 0x1E3779B97F4A7C15)).sum())
