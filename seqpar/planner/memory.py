"""Bytes of a training step on a rank, at each moment that can be its peak.

    loss        all layers' activations, the head's gradient, and a chunk of logits with its gradient
    head        the backward of the head: its gradient is scaled, cast and summed
    last        the backward of the last layer, with the activations of all layers before it
    earlier     that of the layer before, while the last one's gradients are summed
    first       that of the first layer, where all gradients but its own are there
    step        the whole state

Which of them is the peak depends on the rows: activations grow with rows, state and gathered weights do not. Without a
`Training`, only buffers, activations and the weights of two layers count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from seqpar.plan.traffic import DTYPE_BYTES
from seqpar.planner.hardware import Hardware
from seqpar.planner.shape import ModelShape
from seqpar.planner.training import Training

LOGITS = 1024  # rows of a chunk of the head
# NCCL's buffer of a channel to a peer (NCCL_BUFFSIZE), and the channels that it connects to each peer over NVLink
# (`p2pnChannelsPerPeer`, 2 for an NVLink, at most 32): 7 peers take up to 0.94 GB once an exchange has reached them.
BUFFER, CONNECTED = 4 << 20, 32
SLACK = 32  # 1/32 of memory is left to the allocator's fragmentation
WORDS = {
    "loss": "at the loss", "head": "in the head's backward",
    "last": "in the last layer's backward", "earlier": "in a layer's backward",
    "first": "in the first layer's backward", "step": "at the optimizer's step", "rows": "",
}  # fmt: skip


class Moment(NamedTuple):
    """Bytes of a rank at one moment of a step: ``fixed + row * rows``."""

    name: str
    fixed: int
    row: int


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank: the largest of some moments, out of ``usable`` bytes. state: of them the model's, if counted."""

    moments: tuple[Moment, ...]
    usable: int
    state: int = 0

    @classmethod
    def of(
        cls, shape: ModelShape, hardware: Hardware, stage_bytes: int, training: Training | None = None, ranks: int = 1
    ) -> Memory:
        """The memory of a model on a machine. training: None leaves out the model's state. ranks: of the plan.

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
        stages = stage_bytes * ((3 if nccl else 2) * size + 2 * acc) // size
        buffers = (hardware.node - 1) * CONNECTED * BUFFER if nccl else 0
        logits = 2 * LOGITS * shape.vocab * acc
        usable = hardware.memory - hardware.reserve - hardware.memory // SLACK
        if training is None:
            gathered = 2 * size * -(-shape.parameters // shape.layers)
            row = shape.activation_bytes + acc * working
            return cls((Moment("rows", stages + buffers + gathered + logits + states, row),), usable)
        moments = _moments(shape, training, ranks, logits=logits, exchanged=stages + states, accumulators=acc * working)
        state = _share(training.state_bytes * shape.parameters, training.over(ranks))
        return cls(tuple(m._replace(fixed=m.fixed + buffers) for m in moments), usable, state)

    @property
    def fixed(self) -> int:
        """Bytes of a rank without rows."""
        return self.bytes(0)

    @property
    def rows(self) -> int:
        """The most rows that fit a rank; 0 if none fit."""
        if self.fixed > self.usable:
            return 0
        return min((self.usable - m.fixed) // m.row for m in self.moments if m.row)

    def bytes(self, rows: int) -> int:
        """Bytes of a rank with this many rows."""
        return max(m.fixed + m.row * rows for m in self.moments)

    def peak(self, rows: int) -> str:
        """The moment of the most bytes, in words."""
        return WORDS[max(self.moments, key=lambda m: m.fixed + m.row * rows).name]


def _moments(
    shape: ModelShape, training: Training, ranks: int, *, logits: int, exchanged: int, accumulators: int
) -> list[Moment]:
    """The moments of a step under FSDP2 with the loss of `seqpar.train.linear_cross_entropy`.

    exchanged, accumulators: bytes of attention's exchanges, and bytes a row, in a layer's backward.
    """
    shards, layers = training.over(ranks), shape.layers
    weight, summed = DTYPE_BYTES[training.weights], DTYPE_BYTES[training.reductions]
    head = shape.vocab * shape.hidden
    root = head * (1 if shape.tied else 2) + shape.hidden  # gathered all step
    layer = -(-(shape.parameters - root) // layers)
    kept, recomputed = shape.kept_bytes(fused_norms=training.fused_norms)
    norm = shape.hidden * (4 + 2 * DTYPE_BYTES[shape.dtype]) if not training.fused_norms else 0
    stays = 0 if training.reshard is True else weight * layers * layer // int(training.reshard or 1)
    gathered = 0 if training.reshard is False else weight * layer
    # gradients are a part of the state that a layer's backward makes
    before = _share((training.state_bytes - summed) * shape.parameters, shards)
    gradients = _share(summed * layer, shards)
    held = before + weight * root + stays
    at_loss = held + gathered + (weight + summed) * head + logits
    at_head = held + gathered + (weight + 2 * summed) * head
    backward = held + weight * head + 2 * gathered + exchanged
    row = recomputed + shape.gradient_bytes + accumulators
    one, normed = kept // layers, kept + norm + 2 * DTYPE_BYTES[shape.dtype] * shape.hidden
    return [
        Moment("loss", at_loss, normed),
        Moment("head", at_head, normed),
        Moment("last", backward, kept + row),
        Moment("earlier", backward + summed * layer + gradients, kept - one + row),
        Moment("first", backward + summed * layer + (layers - 1) * gradients, one + row),
        Moment("step", before + _share(summed * shape.parameters, shards) + stays, 0),
    ]


def _share(size: int, shards: int) -> int:
    return -(-size // shards)
