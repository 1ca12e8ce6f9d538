"""Autocast as in torch's own attention: one rule for verbs, layers and models of other libraries."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from seqpar.private import torch as torch_private


def autocast_dtype(kind: str) -> torch.dtype | None:
    """The dtype of autocast on devices of this kind, None if it is off."""
    if kind == "meta" or not torch.is_autocast_enabled(kind):  # torch knows no autocast of meta tensors
        return None
    return torch.get_autocast_dtype(kind)


def no_autocast(kind: str) -> AbstractContextManager[None]:
    """A context without autocast on devices of this kind: it would round products of the accumulation dtype."""
    return nullcontext() if autocast_dtype(kind) is None else torch.autocast(kind, enabled=False)


def autocast(x: Tensor) -> Tensor:
    """x as autocast casts attention's inputs: fp64 and non-floating tensors stay unchanged."""
    dtype = autocast_dtype(x.device.type)
    return x if dtype is None or x.dtype == torch.float64 or not x.is_floating_point() else x.to(dtype)


def autocasts(values: Sequence[Any]) -> list[Any]:
    """Tensors as `autocast` casts them; other values, which a verb has yet to check, are unchanged."""
    if not torch.compiler.is_compiling() and not torch_private.is_any_autocast_enabled():
        return list(values)
    return [autocast(x) if isinstance(x, Tensor) else x for x in values]
