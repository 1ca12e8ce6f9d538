"""Bytes that a training step takes on a rank, beside the model's own state, which is `Hardware.reserve`."""

from __future__ import annotations

from dataclasses import dataclass

from seqpar.plan.traffic import DTYPE_BYTES
from seqpar.planner.hardware import Hardware
from seqpar.planner.shape import ModelShape

LOGITS = 1024  # rows of a chunk of the head
SLACK = 32  # one part in so many of the memory is left to fragments of the allocator


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank: ``fixed + row * rows``, of which ``usable`` there are."""

    fixed: int
    row: int
    usable: int

    @classmethod
    def of(cls, shape: ModelShape, hardware: Hardware, stage_bytes: int) -> Memory:
        """The memory of a model on a machine.

        A row keeps its activations by the recompute policy, and in one layer at a time the accumulators of output and
        query gradient. The rest: two stages of keys with their gradients, two layers' weights as FSDP gathers them, and
        a chunk of logits with its gradient.
        """
        size = DTYPE_BYTES[shape.dtype]
        acc = max(4, size)
        row = shape.activation_bytes + acc * shape.heads * (shape.dim + shape.values)
        stages = 2 * stage_bytes * (size + acc) // size
        gathered = 2 * size * -(-shape.parameters // shape.layers)
        logits = 2 * LOGITS * shape.vocab * acc
        usable = hardware.memory - hardware.reserve - hardware.memory // SLACK
        return cls(stages + gathered + logits, row, usable)

    @property
    def rows(self) -> int:
        """The most rows that a rank can take; none if nothing fits."""
        return max(0, (self.usable - self.fixed) // self.row)

    def bytes(self, rows: int) -> int:
        """Of a rank with so many rows."""
        return self.fixed + self.row * rows
