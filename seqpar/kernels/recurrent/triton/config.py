"""Blocks and launch options of the recurrent kernels: a pure function of a printable descriptor."""

from __future__ import annotations

from dataclasses import dataclass

MAX_DIM = 256  # of keys; values have any


@dataclass(frozen=True)
class RecurrentDescriptor:
    """The facts that decide a launch.

    kernel: the name of its function. dim: of keys. columns: of the states. itemsize: bytes of an input element.
    """

    kernel: str
    dim: int
    columns: int
    itemsize: int


@dataclass(frozen=True)
class RecurrentConfig:
    """bk, bc: columns of a block of K, and of the states. warps, stages: Triton's launch options."""

    bk: int
    bc: int
    warps: int
    stages: int


def configure(d: RecurrentDescriptor) -> RecurrentConfig:
    """The configuration of a kernel, the same on every generation of GPUs.

    It fits their shared memory, and no GPU has timed it yet.
    """
    bk, bc = padded(d.dim), padded(d.columns)
    if d.kernel in ("pairs", "pair_gradients", "gradients"):
        return RecurrentConfig(min(bk, 32), min(bc, 32), 8, 1)
    wide = bk > 64 or d.itemsize == 4
    return RecurrentConfig(bk, min(bc, 32 if d.itemsize == 2 else 16), 8 if wide else 4, 1)


def padded(dim: int) -> int:
    """The least power of two that holds it and that products take."""
    return max(16, 1 << (dim - 1).bit_length())
