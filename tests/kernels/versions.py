"""Functions that torch and Triton both compute: their names for parametrize, and where each of them runs."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch

VERSIONS = [
    "torch",
    pytest.param("triton", marks=pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")),
]


def version(name: str, module: str) -> tuple[ModuleType, str]:
    """The version's module, and a device on which it is taken; Triton without a GPU is its interpreter."""
    if name == "torch":
        return importlib.import_module(f"seqpar.kernels.{module}"), "cpu"
    fused = {"softmax": "merge"}.get(module, module)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return importlib.import_module(f"seqpar.kernels.triton.{fused}"), device
