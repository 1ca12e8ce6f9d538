"""Functions that torch and Triton both compute: their names for parametrize, and where each of them runs."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from types import ModuleType

import pytest

VERSIONS = [
    "torch",
    pytest.param("triton", marks=pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")),
]


def version(name: str, module: str) -> tuple[ModuleType, str]:
    """The version's module, and a device on which it is taken; Triton is its interpreter here."""
    if name == "torch":
        plain = {"softmax": "softmax", "delta": "softmax", "rows": "memory.copy"}.get(module, f"memory.{module}")
        return importlib.import_module(f"seqpar.kernels.{plain}"), "cpu"
    fused = "merge" if module == "softmax" else module
    return importlib.import_module(f"seqpar.kernels.triton.{fused}"), "cpu"
