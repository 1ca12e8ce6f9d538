"""Autocast as torch's own attention has it: one rule for layers, rerouted calls and transformers models."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def autocast_dtype(kind: str) -> torch.dtype | None:
    """The dtype of autocast on devices of a kind, None where it is off."""
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def no_autocast(kind: str) -> AbstractContextManager[None]:
    """No autocast inside on devices of a kind: it would round the products of the accumulation dtype."""
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def autocast(x: Tensor) -> Tensor:
    """x as autocast casts what attention takes: fp64, and what is no float, stays."""
    dtype = autocast_dtype(x.device.type)
    return x if dtype is None or x.dtype == torch.float64 or not x.is_floating_point() else x.to(dtype)
