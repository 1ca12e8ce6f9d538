"""Bytes of a training step on a rank, at each moment that can be its peak.

    loss        all layers' activations, the head's gradient, and a chunk of logits with its gradient
    head        the backward of the head: its gradient is scaled, cast and summed
    last        the backward of the last layer, with the activations of all layers before it
    earlier     that of the layer before, while the last one's gradients are summed
    turn        that of the last layer, or the first, of those that recompute by one policy, where there are two
    first       that of the first layer, where all gradients but its own are there
    step        the whole state

Which of them is the peak depends on the rows: activations grow with rows, state and gathered weights do not. Without a
`Training`, only buffers, activations and the weights of two layers count.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from seqpar.plan.traffic import DTYPE_BYTES
from seqpar.planner.blocks import PolicyBytes
from seqpar.planner.hardware import Hardware
from seqpar.planner.shape import ModelShape
from seqpar.planner.training import Training

LOGITS = 1024  # rows of a chunk of the head
EXPANDED = 256 << 20  # bytes of a buffer that is made of latents: the default of `seqpar.latent_attention`
# NCCL's buffer of a channel to a peer (NCCL_BUFFSIZE), and the channels that it connects to each peer over NVLink
# (`p2pnChannelsPerPeer`, 2 for an NVLink, at most 32): 7 peers take up to 0.94 GB once an exchange has reached them.
BUFFER, CONNECTED = 4 << 20, 32
SLACK = 32  # 1/32 of memory is left to the allocator's fragmentation
# Logits, their logarithms of softmax and the gradients of both, where the loss takes all logits at once.
LOGIT_BYTES = 12
BACKWARD = ("last", "earlier", "turn", "first")  # moments in a layer's backward
KINDS = ("state", "weights", "activations", "head", "exchanges")
WORDS = {
    "loss": "at the loss", "head": "in the head's backward",
    "last": "in the last layer's backward", "earlier": "in a layer's backward",
    "turn": "in a layer's backward", "first": "in the first layer's backward", "step": "at the optimizer's step",
    "rows": "", "host": "on the host",
}  # fmt: skip


class Moment(NamedTuple):
    """Bytes of a rank at one moment of a step, by kind, and ``row`` bytes of activations for each of its rows.

    state: of the model. weights: gathered, with gradients that are being summed. head: logits and the head's gradient.
    exchanged: buffers of the comm, states on their way, and a tile. stages: keys on their way, and those made of
    latents, with their gradients, but no more than those of all other ranks, ``keys`` bytes for each row of a rank.
    """

    name: str
    state: int
    weights: int
    head: int
    exchanged: int
    row: int
    stages: int = 0
    keys: int = 0

    @property
    def fixed(self) -> int:
        """Bytes of a rank without rows."""
        return self.state + self.weights + self.head + self.exchanged

    def bytes(self, rows: int) -> int:
        """Bytes of a rank with this many rows."""
        return self.fixed + self.row * rows + min(self.stages, self.keys * rows)

    def rows(self, most: int) -> int:
        """The most rows of a rank with so many bytes."""
        room = most - self.fixed
        return max(room // (self.row + self.keys), (room - self.stages) // self.row)

    def kinds(self, rows: int) -> dict[str, int]:
        """Bytes by kind of a rank with this many rows."""
        exchanges = self.exchanged + min(self.stages, self.keys * rows)
        return dict(zip(KINDS, (self.state, self.weights, self.row * rows, self.head, exchanges), strict=True))


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank: the largest of some moments, out of ``usable`` bytes. state: of them the model's, if counted.

    host: bytes of the host's memory, out of ``usable_on_host``; no moment if none are used.
    """

    moments: tuple[Moment, ...]
    usable: int
    state: int = 0
    host: Moment | None = None
    usable_on_host: int = 0

    @classmethod
    def of(
        cls,
        shape: ModelShape,
        hardware: Hardware,
        stage_bytes: int,
        training: Training | None = None,
        ranks: int = 1,
        *,
        first: tuple[int, str] = (0, "none"),
        own_loss: bool = True,
    ) -> Memory:
        """The memory of a model on a machine. training: None leaves out the model's state. ranks: of the plan.

        first: how many of the first layers recompute by another policy than the model's, and which; with a `Training`.
        own_loss: whether the loss is `seqpar.train.linear_cross_entropy`; otherwise all logits are in memory at once.

        A row keeps its activations under the recompute policy, and in one layer at a time the accumulators of output
        and query gradient, or the products of a recurrence. Fixed: two stages of keys with their gradients, two layers'
        weights as FSDP gathers them, and a chunk of logits with its gradient; the states of a recurrent layer that pass
        along a document's ranks of one node, with their gradients; the keys that latents become, for some heads at a
        time, with their gradients. With NCCL a third stage of keys, which arrives while one waits, and NCCL's buffers
        for the peers of a node.

        Raises: ValueError if something is kept on the host without bytes for it.
        """
        size, nccl = DTYPE_BYTES[shape.dtype], hardware.inside.channels is not None
        acc = max(4, size)
        working, states = shape.heads * (shape.dim + shape.values), 0
        if shape.recurrent is not None:
            working = max(working, shape.recurrent.working)
            passed = shape.recurrent.bytes(shape.dtype)
            states = 2 * hardware.node * (passed.state + passed.map)
        stages = stage_bytes * ((3 if nccl else 2) * size + 2 * acc) // size
        made = shape.kv_heads * (shape.dim + shape.values) * (size + acc) if shape.latents else 0  # of a row
        expanded = EXPANDED * (size + acc) // acc if made else 0
        buffers = (hardware.node - 1) * CONNECTED * BUFFER if nccl else 0
        logits = 2 * LOGITS * shape.vocab * acc
        usable = hardware.memory - hardware.reserve - hardware.memory // SLACK
        if training is None:
            gathered = 2 * size * -(-shape.parameters // shape.layers)
            row = shape.activation_bytes + acc * working
            exchanged = stages + buffers + states
            return cls(
                (Moment("rows", 0, gathered, logits, exchanged, row, expanded, made * max(1, ranks - 1)),), usable
            )
        count, policy = first
        parts = [(count, replace(shape, recompute=policy)), (shape.layers - count, shape)]
        parameters = shape.parameters
        if shape.blocks:
            policies = [part.recompute for layers, part in parts for _ in range(layers)]
            traced = [block.under(each) for block, each in zip(shape.blocks, policies)]
            runs = [_Run.traced(each, len(list(same)), acc * working) for each, same in groupby(traced)]
            parameters = shape.embeddings + shape.hidden + sum(block.parameters for block in shape.blocks)
        else:
            runs = [_Run.of(part, layers, training, acc * working) for layers, part in parts if layers]
        moments = _moments(
            shape, training, ranks, runs, parameters=parameters, logits=logits, exchanged=states, own_loss=own_loss
        )
        keys = (ranks - 1) * shape.row_bytes * (size + acc) // size + made * max(1, ranks - 1)
        stages = (stages if ranks > 1 else 0) + expanded
        moments = [m._replace(stages=stages, keys=keys) if m.name in BACKWARD else m for m in moments]
        moments = [m._replace(exchanged=m.exchanged + buffers) for m in moments]
        state = _share(training.state_bytes * parameters, training.over(ranks))
        inputs = size * shape.hidden * sum(run.layers for run in runs if run.offloads)
        if (inputs or training.state_on_host) and not training.host_bytes:
            raise ValueError(
                "layers' inputs or the state on the host need bytes there: give Training(host_bytes=...), for a rank"
            )
        state_there = 0
        if training.state_on_host:
            moments = [m._replace(state=0) for m in moments if m.name != "step"]
            state, state_there = 0, state
        host = Moment("host", state_there, 0, 0, 0, inputs) if inputs or training.state_on_host else None
        return cls(tuple(moments), usable, state, host, training.host_bytes)

    @property
    def fixed(self) -> int:
        """Bytes of a rank without rows."""
        return self.bytes(0)

    @property
    def rows(self) -> int:
        """The most rows that fit a rank; 0 if none fit."""
        if any(m.fixed > most for m, most in self.limits):
            return 0
        return min(m.rows(most) for m, most in self.limits if m.row)

    @property
    def limits(self) -> list[tuple[Moment, int]]:
        """Every moment, and what is used on the host, with the bytes that there are."""
        limits = [(m, self.usable) for m in self.moments]
        return limits if self.host is None else [*limits, (self.host, self.usable_on_host)]

    def bytes(self, rows: int) -> int:
        """Bytes of a rank with this many rows."""
        return self.most(rows).bytes(rows)

    def most(self, rows: int) -> Moment:
        """The moment of the most bytes with this many rows."""
        return max(self.moments, key=lambda m: m.bytes(rows))

    def peak(self, rows: int) -> str:
        """The moment of the most bytes, in words."""
        return WORDS[self.most(rows).name]


class _Run(NamedTuple):
    """Layers that recompute by one policy. Bytes a row: what a layer holds, and works with in its backward.

    late: bytes a row when all gradients of a layer's weights are there, which the shape does not say.
    """

    layers: int
    held: int
    working: int
    tile: int
    offloads: bool
    tiles: bool
    late: int = 0

    @classmethod
    def of(cls, shape: ModelShape, layers: int, training: Training, accumulators: int) -> _Run:
        """accumulators: bytes a row of attention's or a recurrence's, in a layer's backward."""
        kept, recomputed = shape.kept_bytes(fused_norms=training.fused_norms)
        held, tiles = kept // shape.layers, shape.recompute in ("tiled", "offload")
        working = held + recomputed + shape.gradient_bytes + accumulators
        return cls(layers, held, working, shape.tile_bytes * tiles, shape.recompute == "offload", tiles)

    @classmethod
    def traced(cls, block: PolicyBytes, layers: int, accumulators: int) -> _Run:
        """Layers as they were traced. accumulators: as for `of`."""
        offloads = block.policy == "offload"
        working, late = block.held + block.working + accumulators, block.late + accumulators
        return cls(layers, block.held, working, block.fixed, offloads, offloads or block.policy == "tiled", late)


def _moments(
    shape: ModelShape, training: Training, ranks: int, runs: list[_Run], *,
    parameters: int, logits: int, exchanged: int, own_loss: bool,
) -> list[Moment]:  # fmt: skip
    """The moments of a step under FSDP2.

    exchanged: bytes of a recurrence's exchanges in a layer's backward.
    """
    shards, layers = training.over(ranks), shape.layers
    weight, summed = DTYPE_BYTES[training.weights], DTYPE_BYTES[training.reductions]
    head, root = shape.vocab * shape.hidden, shape.embeddings + shape.hidden  # gathered all step
    layer = -(-(parameters - root) // layers)
    stays = 0 if training.reshard is True else weight * layers * layer // int(training.reshard or 1)
    gathered = 0 if training.reshard is False else weight * layer
    # gradients are a part of the state that a layer's backward makes
    before = _share((training.state_bytes - summed) * parameters, shards)
    step, gradients = before + _share(summed * parameters, shards), _share(summed * layer, shards)
    if training.accumulates:
        before, gradients = step, 0
    held, kept = weight * root + stays, sum(run.layers * run.held for run in runs)
    if runs[-1].tiles:
        norm = DTYPE_BYTES[shape.dtype] * shape.hidden
    else:
        norm = 0 if training.fused_norms else shape.hidden * (4 + 2 * DTYPE_BYTES[shape.dtype])
    normed = kept + norm + 2 * DTYPE_BYTES[shape.dtype] * shape.hidden
    if own_loss:
        # the buffer from which the last layer's weights were gathered is still there
        loss = Moment("loss", before, held + weight * layer, (weight + summed) * head + logits, 0, normed)
        moments = [loss, Moment("head", before, held + gathered, (weight + 2 * summed) * head, 0, normed)]
    else:
        row = normed + LOGIT_BYTES * shape.vocab
        moments = [Moment("loss", before, held + gathered, weight * head, 0, row)]

    def backward(name: str, nth: int, run: _Run, before_it: int) -> list[Moment]:
        """The backward of a layer; before_it: bytes a row that the layers before it hold."""
        done = layers - 1 - nth  # layers whose gradients are there, and whose weights are not any more
        weights = held - stays * done // layers + 2 * gathered + summed * layer * (done > 0)
        state = before + gradients * done
        early = Moment(name, state, weights, weight * head, exchanged + run.tile, before_it + run.working)
        return [early, early._replace(weights=weights + weight * layer, row=before_it + run.late)][: 1 + (run.late > 0)]

    start, holds = 0, 0
    for run in runs:
        places = {start: "turn", start + run.layers - 1: "turn", layers - 2: "earlier", layers - 1: "last"}
        for nth, name in (places | {0: "first"} if layers > 1 else {0: "last"}).items():
            if start <= nth < start + run.layers:
                moments += backward(name, nth, run, holds + (nth - start) * run.held)
        start, holds = start + run.layers, holds + run.layers * run.held
    return [*moments, Moment("step", step, stays, 0, 0, 0)]


def _share(size: int, shards: int) -> int:
    return -(-size // shards)
