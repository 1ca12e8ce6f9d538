"""Bytes of a training step on a rank, without the model's state, which is `Hardware.reserve`."""

from __future__ import annotations

from dataclasses import dataclass

from seqpar.plan.traffic import DTYPE_BYTES
from seqpar.planner.hardware import Hardware
from seqpar.planner.shape import ModelShape

LOGITS = 1024  # rows of a chunk of the head
# NCCL's buffer of a channel to a peer (NCCL_BUFFSIZE), and the channels that it connects to each peer over NVLink
# (`p2pnChannelsPerPeer`, 2 for an NVLink, at most 32): 7 peers take up to 0.94 GB once an exchange has reached them.
BUFFER, CONNECTED = 4 << 20, 32
SLACK = 32  # 1/32 of memory is left to the allocator's fragmentation


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank: ``fixed + row * rows``, out of ``usable`` bytes."""

    fixed: int
    row: int
    usable: int

    @classmethod
    def of(cls, shape: ModelShape, hardware: Hardware, stage_bytes: int) -> Memory:
        """The memory of a model on a machine.

        A row keeps its activations under the recompute policy, and in one layer at a time the accumulators of output
        and query gradient, or the products of a recurrence. Fixed: two stages of keys with their gradients, two layers'
        weights as FSDP gathers them, and a chunk of logits with its gradient; the states of a recurrent layer that pass
        along a document's ranks of one node, with their gradients. With NCCL a third stage of keys, which arrives while
        one waits, and NCCL's buffers for the peers of a node.
        """
        size, nccl = DTYPE_BYTES[shape.dtype], hardware.inside.channels is not None
        acc = max(4, size)
        working, states = shape.heads * (shape.dim + shape.values), 0
        if shape.recurrent is not None:
            working = max(working, shape.recurrent.working)
            passed = shape.recurrent.bytes(shape.dtype)
            states = 2 * hardware.node * (passed.state + passed.map)
        row = shape.activation_bytes + acc * working
        stages = stage_bytes * ((3 if nccl else 2) * size + 2 * acc) // size
        buffers = (hardware.node - 1) * CONNECTED * BUFFER if nccl else 0
        gathered = 2 * size * -(-shape.parameters // shape.layers)
        logits = 2 * LOGITS * shape.vocab * acc
        usable = hardware.memory - hardware.reserve - hardware.memory // SLACK
        return cls(stages + buffers + gathered + logits + states, row, usable)

    @property
    def rows(self) -> int:
        """The most rows that fit a rank; 0 if none fit."""
        return max(0, (self.usable - self.fixed) // self.row)

    def bytes(self, rows: int) -> int:
        """Bytes of a rank with this many rows."""
        return self.fixed + self.row * rows
