"""Tile sizes and launch options of a kernel: a pure function of a printable descriptor."""

from __future__ import annotations

from dataclasses import dataclass

# Compute capabilities that have configurations: data centre GPUs of 8.0, 9.0 and 10.x; 86 stands for all with less
# shared memory (8.6, 8.9, 12.x).
GENERATIONS = (80, 86, 90, 100)
CLASSES = {2: (64, 96, 128, 192, 256, 512), 4: (64, 128, 256)}  # bytes of an element -> head dims that end a class


@dataclass(frozen=True)
class Descriptor:
    """The facts that decide a launch.

    direction: "forward", "dq", "dkdv". dim, v_dim: head dims of keys and values. itemsize: bytes of an input element.
    generation: one of GENERATIONS, or 0 for Triton's interpreter.
    """

    direction: str
    dim: int
    v_dim: int
    itemsize: int
    generation: int


@dataclass(frozen=True)
class LaunchConfig:
    """A configuration.

    bm, bn: query and key rows of a tile. warps, stages: Triton's launch options. tma: load tiles through tensor
    descriptors where strides allow, which also takes fewer registers.
    """

    bm: int
    bn: int
    warps: int
    stages: int
    tma: bool = False


# fmt: off
# (bm, bn, warps, stages) by generation (32: float32 on every generation) and direction, one for each class of head
# dims; with a fifth, False, tiles are loaded by pointers where descriptors were measured to be slower
_TABLES: dict[int, dict[str, tuple[tuple[int, ...], ...]]] = {
    80: {
        "forward": (
            (128, 128, 8, 3), (128, 128, 8, 3), (64, 128, 8, 2), (32, 64, 8, 2), (64, 64, 8, 2),
            (32, 32, 8, 2),
        ),
        "dq": ((128, 64, 8, 2), (128, 64, 8, 2), (64, 128, 8, 2), (32, 64, 8, 2), (64, 64, 8, 2), (32, 32, 8, 2)),
        "dkdv": ((64, 128, 8, 2), (32, 128, 8, 2), (64, 64, 8, 2), (64, 32, 4, 2), (64, 64, 8, 2), (16, 32, 8, 2)),
    },
    86: {
        "forward": ((128, 64, 8, 2), (128, 32, 8, 2), (64, 64, 8, 2), (64, 32, 8, 1), (32, 64, 8, 1), (32, 32, 8, 2)),
        "dq": ((128, 64, 8, 2), (64, 64, 8, 2), (64, 32, 4, 2), (32, 32, 4, 2), (32, 32, 8, 1), (16, 32, 8, 2)),
        "dkdv": ((64, 128, 8, 2), (64, 64, 8, 2), (64, 64, 8, 2), (64, 32, 4, 2), (32, 32, 8, 2), (16, 32, 8, 2)),
    },
    90: {
        "forward": (
            (64, 128, 4, 3), (128, 128, 8, 3), (128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 8, 2),
            (32, 32, 8, 2),
        ),
        "dq": (
            (64, 128, 4, 3, False), (128, 64, 8, 3, False), (128, 64, 8, 3, False), (128, 64, 8, 2), (64, 32, 8, 3),
            (32, 32, 8, 2),
        ),
        "dkdv": ((64, 64, 4, 2), (64, 128, 8, 2), (64, 64, 4, 2), (32, 64, 8, 3), (64, 32, 8, 2), (32, 32, 8, 1)),
    },
    100: {
        "forward": (
            (128, 128, 8, 3), (128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 8, 2),
            (32, 32, 8, 2),
        ),
        "dq": ((128, 64, 8, 2), (128, 64, 8, 2), (128, 64, 8, 2), (64, 64, 8, 2), (64, 64, 8, 2), (32, 32, 8, 2)),
        "dkdv": ((64, 128, 8, 2), (64, 128, 8, 2), (64, 128, 8, 2), (64, 64, 8, 2), (64, 32, 8, 2), (32, 32, 8, 1)),
    },
    32: {
        "forward": ((16, 32, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
        "dq": ((16, 32, 4, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
        "dkdv": ((32, 16, 4, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    },
}
# (generation, direction, head dim of keys, of values) -> one that is not its class's
_UNEVEN = {(90, "dkdv", 192, 128): (64, 64, 8, 3)}
# fmt: on


def generation(capability: int) -> int:
    """The generation whose configurations fit a device of that capability, 0 if it is too old."""
    if capability in (86, 89) or capability >= 120:
        return 86
    return max((g for g in GENERATIONS if g <= capability and g != 86), default=0)


def pieces(dim: int, itemsize: int = 2) -> tuple[int, int]:
    """Widths of the one or two pieces that a head dim is cut into; the second is 0 if one is enough.

    80 = 64 + 16, 96 = 64 + 32, 192 = 128 + 64. Two pieces of 112 would take as much as one of 128, so it is padded.
    512 = 256 + 256, as a tensor descriptor loads up to 256 columns. Products of float32 keep whole rows in registers,
    hence 128 = 64 + 64 for them.
    """
    least = 16  # of a tensor core product
    one, two = max(least, 1 << (dim.bit_length() - 1)), 0
    if dim > one:
        rest = max(least, 1 << (dim - one - 1).bit_length())
        one, two = (one, rest) if rest < one else (2 * one, 0)
    return (one // 2, one // 2) if one >= (128 if itemsize == 4 else 512) and not two else (one, two)


def configure(d: Descriptor) -> LaunchConfig:
    """The configuration for a descriptor.

    Each is the largest tile whose binary fits shared memory and spills no registers (a few in some backwards) with all
    supported versions of Triton (`bench/gpu/binaries.py`). On 9.0 an H200 has timed those for head dims up to 256, with
    Triton 3.6 in bf16 at 64, 96, 128, 192 with values of 128, and 256 (`bench/gpu/run.py --slice tune`): each is the
    fastest of its direction, with the others unchanged, among those that spill little with every version. Not
    timed: dkdv at 96, and all that is not 9.0. A product of fewer than 64 rows is no ``wgmma``, so these tiles have 64
    query rows and more, or 64 keys in dkdv, except dkdv at 256, where such tiles are slower or spill. Forward at 256
    merges with earlier sums through local memory, and is 1.9 times as fast as with 32 rows, which need none.
    """
    if d.generation == 0:
        return LaunchConfig(64, 64, 4, 1)
    classes = CLASSES[d.itemsize]
    n = next(n for n, end in enumerate(classes) if max(d.dim, d.v_dim) <= end)
    table = _TABLES[32 if d.itemsize == 4 else d.generation]
    uneven = None if d.itemsize == 4 else _UNEVEN.get((d.generation, d.direction, d.dim, d.v_dim))
    bm, bn, warps, stages, *tma = uneven or table[d.direction][n]
    return LaunchConfig(bm, bn, warps, stages, tma=d.itemsize == 2 and d.generation in (90, 100) and tma != [False])
