"""Which tile sizes a kernel is launched with: a pure function of a printable descriptor."""

from __future__ import annotations

from dataclasses import dataclass

GENERATIONS = (80, 90, 100)  # capabilities that configurations are made for; a device takes the newest not above it
MAX_DIM = 256


@dataclass(frozen=True)
class Descriptor:
    """direction: "forward", "dq", "dkdv". dim, v_dim: of keys and values. itemsize: bytes of an element of the inputs.
    generation: one of GENERATIONS, or 0 for Triton's interpreter."""

    direction: str
    dim: int
    v_dim: int
    itemsize: int
    generation: int


@dataclass(frozen=True)
class Config:
    """bm, bn: query and key rows of a tile. warps, stages: of Triton's launch."""

    bm: int
    bn: int
    warps: int
    stages: int


def generation(capability: int) -> int:
    """The generation whose configurations a device takes."""
    return max((g for g in GENERATIONS if g <= capability), default=0)


def pieces(dim: int) -> tuple[int, int]:
    """Widths of the one or two products that a head dim is cut into; the second is 0 if one is enough.

    80 = 64 + 16, 96 = 64 + 32, 192 = 128 + 64; 112 takes as much in two pieces as padded to 128, so it has one.
    """
    least = 16  # of a tensor core product
    low = max(least, 1 << (dim.bit_length() - 1))
    if dim <= low:
        return low, 0
    rest = max(least, 1 << (dim - low - 1).bit_length())
    return (low, rest) if rest < low else (2 * low, 0)


def configure(d: Descriptor) -> Config:
    """The configuration for a descriptor."""
    wide = max(sum(pieces(d.dim)), sum(pieces(d.v_dim)))
    if d.generation == 0:
        return Config(64, 64, 4, 1)
    return Config(64, 64, 4, 2)


def parts(programs: int, work: int, processors: int) -> int:
    """Into how many parts the work of each of so many programs is split, to fill the processors twice over.

    work: tiles of the longest program; a part has at least one.
    """
    return max(1, min(-(-2 * processors // max(programs, 1)), work, 16))
