"""One digest of anything that a call returns: equal if and only if every bit is."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def digest(value: Any) -> str:
    """The digest of tensors, arrays, numbers, strings, containers and dataclasses, whose field names do not count."""
    h = hashlib.blake2b(digest_size=12)
    for part in _parts(value):
        h.update(part)
        h.update(b"|")
    return h.hexdigest()


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        x = value.detach().resolve_conj().resolve_neg().contiguous()
        yield f"{x.dtype}{list(x.shape)}".encode()
        yield (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy().tobytes()
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype}{list(value.shape)}".encode()
        yield np.ascontiguousarray(value).tobytes()
    elif isinstance(value, Mapping):
        yield b"{"
        for key in value:
            yield from _parts(key)
            yield from _parts(value[key])
        yield b"}"
    elif isinstance(value, (list, tuple)):
        yield b"["
        for item in value:
            yield from _parts(item)
        yield b"]"
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        # fields and their derivations may be renamed; their values may not change
        yield from _parts([getattr(value, f.name) for f in dataclasses.fields(value) if not f.name.startswith("_")])
    elif value is None or isinstance(value, (bool, int, float, str, complex, slice, range, np.generic)):
        yield repr(value.item() if isinstance(value, np.generic) else value).encode()
    else:
        raise TypeError(f"no digest of a {type(value).__name__}")
