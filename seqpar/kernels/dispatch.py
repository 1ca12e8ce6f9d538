"""Where a function has a version in Triton beside the one in torch: which of them a tensor takes."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from torch import Tensor


def on_triton(x: Tensor) -> bool:
    """Whether x lies on a CUDA device and Triton is installed. Triton itself is imported by who uses it."""
    return x.is_cuda and _installed()


@cache
def _installed() -> bool:
    return find_spec("triton") is not None
