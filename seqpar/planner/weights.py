"""The planner's coefficients in ticks: what a model's rows, pairs and transfers cost on a machine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from seqpar.facts.value import Ints
from seqpar.plan.traffic import DTYPE_BYTES
from seqpar.planner.carried import RecurrentWeights
from seqpar.planner.hardware import Hardware, Link
from seqpar.planner.shape import ModelShape

PAIR = 1024  # ticks of an attended pair in forward, at the finest scale
LARGEST_AREA = 62  # no document has 2 ** 62 pairs or more


class AttentionTicks(NamedTuple):
    """Ticks of one layer's attention in one direction. merge: of a row that sees fetched keys, every second stage."""

    pair: int
    query: int
    key: int
    piece: int
    stage: int
    merge: int


class LinkTicks(NamedTuple):
    """Ticks of a link: per exchange, key row, gradient of a key row, and row of a head trade in each direction.

    On the way in a head trade moves query, key and value, on the way out the output; in backward the directions swap.
    hop_...: of a row that goes to one peer or comes from it; while it does, rows of other peers may move.
    """

    latency: int
    key: int
    grad: int
    enter: int
    leave: int
    hop_key: int
    hop_grad: int
    hop_enter: int
    hop_leave: int


@dataclass(frozen=True)
class Weights:
    """A model on a machine, in ticks. row, label: all layers, forward and backward. second: the seconds of a tick.

    area: `AttentionTicks.pair` is the cost of ``2**area`` attended pairs. recurrent: of all recurrent
    layers; None without them.
    """

    forward: AttentionTicks
    backward: AttentionTicks
    row: int
    label: int
    inside: LinkTicks
    across: LinkTicks
    heads: int
    kv_heads: int
    row_bytes: int
    second: float
    area: int = 0
    recurrent: RecurrentWeights | None = None

    @classmethod
    @lru_cache(maxsize=16)
    def of(cls, shape: ModelShape, hardware: Hardware, *, coarse: int = 0) -> Weights:
        """The weights of a model on a machine. coarse: a tick is ``2**coarse`` of the finest ticks."""
        a = hardware.attention
        pair = shape.pair_flops / a.rate
        second = pair / PAIR * 2.0**coarse
        repeated = shape.recompute not in ("none", "keep-attention")  # attention's forward
        own = 2.5 * shape.pair_flops / a.backward_rate
        back = own + (pair if repeated else 0.0)
        expanded = shape.expand_flops / hardware.linear_rate  # again in backward, with two products of its gradient
        # as many pairs together as cost about PAIR ticks; if one direction is much dearer, some thousand ticks in that
        # one
        dearer = max(0, round(max(pair, back) / pair).bit_length() - 3)
        area = min(max(0, coarse - dearer), LARGEST_AREA)

        def direction(cost: float, calls: int, products: int, merging: float) -> AttentionTicks:
            pairs, key = (2**area, a.query_pairs), cost * a.key_pairs + products * expanded
            # on zigzag shards a row sees keys of three in four stages
            merge = cost * a.query_pairs if a.merge_pairs is None else 1.5 * merging * a.merge_pairs
            seconds = (*(cost * each for each in pairs), key, calls * a.piece, calls * a.stage, merge)
            return AttentionTicks(*(round(s / second) for s in seconds))

        def wire(link: Link) -> LinkTicks:
            size = DTYPE_BYTES[shape.dtype]
            queries, outputs = (shape.heads * dim * size for dim in (shape.dim, shape.values))
            bytes_ = shape.row_bytes, shape.row_bytes * max(4, size) / size, queries + shape.row_bytes, outputs
            rates = link.bandwidth, link.alone
            return LinkTicks(
                *(round(s / second) for s in (link.latency, *(b / rate for rate in rates for b in bytes_)))
            )

        return cls(
            forward=direction(pair, 1, 1, pair),
            backward=direction(back, *((2, 4) if repeated else (1, 3)), back - own + own / 3),
            # at least 1, so that no batch is free
            row=max(1, round(shape.trained_flops / hardware.linear_rate / second)),
            label=round(3 * shape.head_flops / hardware.linear_rate / second),
            inside=wire(hardware.inside),
            across=wire(hardware.across),
            heads=shape.heads,
            kv_heads=shape.key_heads,
            row_bytes=shape.row_bytes,
            second=second,
            area=area,
            recurrent=None if shape.recurrent is None else RecurrentWeights.of(shape, hardware, second),
        )

    @cached_property
    def both(self) -> AttentionTicks:
        """Ticks of one layer's attention, forward and backward."""
        return AttentionTicks(*map(sum, zip(self.forward, self.backward)))

    @property
    def per_row(self) -> int:
        """Ticks of a row in addition to attention, forward and backward: linear layers, recurrences and its label."""
        return self.row + self.label + (0 if self.recurrent is None else self.recurrent.row)

    def areas(self, pairs: Ints) -> Ints:
        """The whole multiples of ``2**area`` in these attended pairs."""
        return pairs >> self.area if self.area else pairs

    def begun(self, pairs: Ints) -> Ints:
        """As `areas`, rounded up, so that the ranks' sum is no less than the whole."""
        return -(-pairs >> self.area) if self.area else pairs
