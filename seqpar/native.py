"""The compiled extension, if it was built: operators for the CPU and CUDA that know no ranks and no layouts."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch

AVX512_BF16 = 3  # SP_AVX512_BF16 of csrc/base/isa.h
DIMS = 6  # of a non-contiguous tensor that the operators move: SP_DIMS of csrc/base/dims.h


@cache
def missing() -> str | None:
    """Why the compiled operators cannot be used, or None."""
    try:
        importlib.import_module("seqpar._C")
    except ModuleNotFoundError:
        return (
            "seqpar._C was not built; with torch installed and a C++ compiler on Linux, reinstall seqpar "
            "(pip install --no-build-isolation .)"
        )
    except ImportError as error:
        return f"seqpar._C does not load: {error}"
    return None


def lacks(operator: str) -> str | None:
    """Why the compiled operator of that name cannot be used, or None."""
    if missing() is None and not hasattr(torch.ops.seqpar_native, operator):
        return f"seqpar._C was built before it had {operator}: build it again (python setup.py build_ext --inplace)"
    return missing()


@cache
def widens_bf16() -> bool:
    """Whether this CPU multiplies bf16 faster as float32, for want of fast instructions (``csrc/base/isa.h``)."""
    return missing() is None and int(ops().isa()) < AVX512_BF16


@cache
def without_cuda() -> str | None:
    """Why the compiled operators for CUDA cannot be used, or None. Needs no device."""
    if missing() is None and not ops().with_cuda():
        return "seqpar._C was built without CUDA: reinstall seqpar with nvcc, 12.8 or newer, on the path"
    return missing()


def ops() -> Any:
    """The operators, ``torch.ops.seqpar_native``.

    Raises: NotImplementedError naming the missing part.
    """
    why = missing()
    if why is not None:
        raise NotImplementedError(why)
    return torch.ops.seqpar_native
