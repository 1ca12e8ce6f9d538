"""The interface between a step's segments and another library's attention.

The defaults are FlashAttention's conventions: many sequences in one call, ``cu_seqlens`` of queries and keys; a causal
mask or window aligned at the last query and last key; ``lse`` of shape ``[H, rows]``. The lse that a library returns
for a row that sees no key (+inf in FlashAttention-2, -inf in 3 and 4, 0 in torch's CPU operator) is never read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from re import match

import torch
from torch import Tensor

from seqpar.kernels.protocol import CallSpec
from seqpar.kernels.vendor.varlen import VarlenCall

LOW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class Results:
    """Further inputs of backward, for the rows of one call.

    out: final output; None where ``delta`` is not exactly ``rowsum(dout * out)``. lse: final, over all keys, +inf for
    a row that sees none. lse and delta: [H, rows], contiguous, in the accumulation dtype.
    """

    dout: Tensor
    out: Tensor | None
    lse: Tensor
    delta: Tensor


class Library(ABC):
    """A library's forward and backward, and their limits.

    varlen: a call takes many segments, else one. squares: causal segments must have as many queries as keys, so that
    the mask's alignment does not matter, and there are no windows. rounds: results are rounded to the inputs' dtype.
    from_delta: backward takes ``delta`` instead of the output. alignment: tensors and their rows must start at a
    multiple of this many bytes. shortest: the fewest queries or keys of a call. rows_per_segment, rows_per_call: with
    fewer query rows on average, the tiles of a position kernel are assumed to cost less than calls; the values for CUDA
    are not measured.
    """

    name: str
    varlen = True
    squares = False
    rounds = True
    from_delta = False
    alignment = 16
    shortest = 1
    rows_per_segment = 32
    rows_per_call = 256

    def missing(self) -> str | None:
        """Why this machine cannot run it, whatever the call; None if it can."""
        return None

    @abstractmethod
    def refuses(self, spec: CallSpec) -> str | None:
        """Why the call is refused, or None."""

    def varies(self, spec: CallSpec) -> str | None:
        """Why its backward of the call has other bits every time; None if it can have the same."""
        return None

    def accepts(self, *tensors: Tensor) -> bool:
        """Whether it can compute a call with these values. Only a CPU library may look at them."""
        return True

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: VarlenCall, scale: float) -> tuple[Tensor, Tensor]:
        """Normalised output [rows, H, D_v] and natural-log lse [H, rows] of one call."""

    def attend_unrounded(
        self, q: Tensor, k: Tensor, v: Tensor, call: VarlenCall, scale: float
    ) -> tuple[Tensor, Tensor] | None:
        """As `attend`, with the output in the accumulation dtype; None if the library rounds it in this call.

        Rows that see no key may hold anything; their lse is -inf.
        """
        return None

    @abstractmethod
    def differentiate(
        self, q: Tensor, k: Tensor, v: Tensor, results: Results, call: VarlenCall, scale: float, deterministic: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of one call. Rows and keys outside all segments get zeros."""


@cache
def installed(package: str) -> tuple[int, ...] | None:
    """The version of an installed distribution as numbers, the beta's number last; None if it is not installed."""
    try:
        numbers = match(r"(\d+)\.(\d+)(?:\.(\d+))?(?:\.?b(?:eta)?\.?(\d+))?", version(package))
    except PackageNotFoundError:
        return None
    final = 1 << 30  # makes a release later than its betas
    return tuple(int(x) if x else (0, 0, 0, final)[i] for i, x in enumerate(numbers.groups())) if numbers else ()


def outdated(package: str, least: tuple[int, ...], below: tuple[int, ...] = (1 << 30,)) -> str | None:
    """Why an installed distribution is not a version known to fit, or None."""
    numbers = installed(package)
    if numbers is None:
        return f"{package} is not installed"
    if least <= numbers < below:
        return None
    wanted = ".".join(str(x) for x in least[:3]) + (f"b{least[3]}" if least[3:] else "")
    limit = f" and below {below[0]}" if below[0] < 1 << 30 else ""
    return f"{package} {version(package)} is installed, it needs {wanted} or later{limit}"


def refuses_on_cuda(library: Library, spec: CallSpec, *, least: int = 80, most: int = 129) -> str | None:
    """What every CUDA library refuses: other devices and dtypes, and scores that are not just scaled products."""
    name = library.name
    if spec.device != "cuda":
        return f"{name} runs on CUDA devices, q is on {spec.device}"
    missing = library.missing()
    if missing:
        return f"{name}: {missing}"
    if not least <= spec.capability <= most:
        return f"{name} is for capability {least / 10} to {most / 10}, the device has {spec.capability / 10}"
    if spec.dtype not in LOW:
        return f"{name} has no {spec.dtype}"
    if not spec.plain:
        return f"{name} has no softcap, ALiBi or counter-based dropout here"
    if spec.dim % 8 or spec.v_dim % 8:
        return f"{name} needs head dims that are multiples of 8, got {spec.dim} and {spec.v_dim}"
    return None
