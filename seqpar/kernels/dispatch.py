"""Which devices and libraries this machine has, and whether Triton's version of a function takes a tensor."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


def on_triton(x: Tensor) -> bool:
    """Whether x is on a CUDA device and Triton is installed, so that Triton's version of a function takes it."""
    return x.is_cuda and triton_installed()


@cache
def triton_installed() -> bool:
    """Whether Triton can be imported. The modules that use it import it on first use."""
    return find_spec("triton") is not None


@cache
def no_cuda() -> str | None:
    """Why no CUDA device can be used, or None."""
    hip = getattr(torch.version, "hip", None)
    if hip is not None:
        return f"it needs CUDA, this torch is built for ROCm {hip}"
    return None if torch.cuda.is_available() else "there is no CUDA device"
