"""What a recurrent layer computes while states travel, measured in bytes that a rank's link moves in that time.

A head of a row takes, in forward, ``6 K V + 4 C (K + V)`` operations in chunks of ``C = 64`` rows; a training step
computes it twice in forward and twice as much in backward, so a direction takes twice that on average. What a run does
to a state takes half of it, and with matrices as maps, which are K more columns beside the V of the state,
``(V + K) / V`` times that half. A head of one value, of a recurrence with a state for each channel, has no such
products: an element of its state takes a row as long as `STEP` operations, and what a run does to it comes with that,
but for one step a chunk. A device computes some heads at once: as many as threads on the CPU, which the fewer heads of
a block leave idle otherwise, and `WIDTH` on a GPU, where all of them go from chunk to chunk together.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

CHUNK = 64  # rows; ROWS of seqpar.kernels.recurrent.chunked, which plans may not import
# operations of a device while its link moves a byte: 100e9 / 1e9 of a core and a loopback, 100e12 / 50e9 of a GPU
RATES = {"cpu": 100, "cuda": 2000}
WIDTH = 64
STEP = 1200  # a core took 47 ns for an element of 16 states of 512 channels, forward and backward, in float32


class LayerWork(NamedTuple):
    """A layer's computation, in both directions on average. heads, groups: those of values, and of keys.

    width: heads that are computed at once. row: bytes for a row of so many heads. leave: of those, if only what the row
    does to a state is computed, and its map.
    """

    heads: int
    groups: int
    width: int
    row: int
    leave: int

    @classmethod
    def of(
        cls, heads: int, groups: int, dim: int, values: int, *, beta: bool, device: str, threads: int,
        channels: bool = False,
    ) -> LayerWork:  # fmt: skip
        """The work of a layer. threads: of a rank, on the CPU. channels: heads of one value are computed in steps."""
        kind = "cpu" if device == "cpu" else "cuda"
        width = threads if kind == "cpu" else WIDTH
        row = 2 * (STEP * dim if channels else 6 * dim * values + 4 * CHUNK * (dim + values))
        if kind == "cuda":
            row *= WIDTH  # its rate is that of all heads together
        row = -(-row // RATES[kind])
        if channels:
            return cls(heads, groups, width, row, -(-row // CHUNK))
        return cls(heads, groups, width, row, row * (values + dim) // (2 * max(values, 1)) if beta else row // 2)

    @property
    def blocks(self) -> list[int]:
        """The numbers of blocks into which heads can be cut, so that each has whole groups, or part of one."""
        return _blocks(self.heads, self.groups)

    def rounds(self, blocks: int = 1) -> int:
        """How often a device goes through the rows for one block of heads."""
        return -(-self.heads // blocks // self.width)


@lru_cache
def _blocks(heads: int, groups: int) -> list[int]:
    return [n for n in range(1, heads + 1) if not heads % n and not (groups % n and n % groups)]
