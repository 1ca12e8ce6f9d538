"""Fingerprints of a forward's arguments, by which ranks find out that they were given different ones.

Fingerprints of its weights are in `seqpar.foreign.weights`, sketches of its output's gradient in
`seqpar.foreign.gradients`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

SPREAD = 0x1E3779B97F4A7C15  # spreads numbers over all bits
CHUNK = 1 << 20  # elements that are looked at together, so that little memory is needed beside a large tensor
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
    """Equal for equal values, almost never for others: a tensor's shape, dtype and `hashed`, or the value's repr."""
    return (tuple(value.shape), value.dtype, hashed(value)) if isinstance(value, Tensor) else repr(value)


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
    factors = pseudo_random(0, min(CHUNK, len(bits)), bits.device) | 1  # odd, so that any change of one element counts
    found = torch.zeros((), dtype=torch.int64, device=bits.device)
    for chunk in bits.split(CHUNK):
        chunk = chunk.long()
        # numbers such as 1.0 have all their bits at the upper end, where products would lose them
        found = found * SPREAD + ((chunk ^ (chunk >> 32)) * factors[: len(chunk)]).sum()
    return int(found)


def pseudo_random(first: int, count: int, device: torch.device) -> Tensor:
    """Pseudo-random integers of 64 bits for places from the first one on, the same on every device."""
    x = torch.arange(first + 1, first + 1 + count, device=device) * SPREAD
    return (x ^ (x >> 32)) * SPREAD


def _bits(x: Tensor) -> Tensor:
    """A tensor's memory as integers: hashes and sums have no kernels for every dtype."""
    x = x.detach().resolve_conj().resolve_neg()
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.contiguous().view(_WHOLE[x.element_size()])
