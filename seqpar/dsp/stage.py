"""What a stage of a model is to the planner, and what a move between layouts and a stage under a layout cost.

A layout is the name of the dimension that is sharded, or None where every rank has all. Sizes are global: bytes and
operations of all ranks together, of which a rank has the share of its elements. The slowest rank counts:

    keep      nothing
    switch    one exchange; rank r sends a_r (1 - b_r) of the bytes, where a_r and b_r are its shares of both dims
    split     nothing
    gather    one exchange; rank r receives 1 - a_r
    local     the stage takes max(a_r) of its work: uneven sizes and idle ranks are in that
    ulysses   queries, keys, values and the output are switched to heads and back, 2 exchanges
    ring      keys and values go round, ranks - 1 exchanges, of whose time attention hides half at most: as much as
              bench/timeline.py has measured
    copies    layout None: every rank does all the work

In training everything comes again on the way back: exchanges once (a ring twice), linear work twice, attention 2.5
times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from seqpar.dsp.space import shares
from seqpar.planner import Hardware
from seqpar.planner.hardware import BACKWARD

Layout = str | None
MODES = ("local", "ulysses", "ring", "copies")


@dataclass(frozen=True)
class Stage:
    """A part of a model that mixes some dimensions.

    whole: dimensions that it mixes, which are not sharded inside. bytes: of the tensors that cross its border on the
    way in, and again on the way out. flops, attention: operations of a forward, in linear layers and in attended pairs.
    memory: bytes kept for backward. heads, kv_heads: of an attention over `whole` that ranks can share by heads, and if
    `ring` also in a ring; 0: they cannot. filled: only where every rank has a share. qkv: bytes of its queries, and of
    its keys and values together. rest: layouts that what stands before the stage allows, or None where nothing
    does, so that any will do.

    Raises: ValueError for figures that are none.
    """

    name: str
    whole: frozenset[str] = frozenset()
    bytes: float = 0.0
    flops: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    heads: int = 0
    kv_heads: int = 0
    qkv: tuple[float, float] = (0.0, 0.0)
    ring: bool = True
    filled: bool = False
    rest: frozenset[Layout] | None = None

    def __post_init__(self) -> None:
        """Take any collection for a set, and raise ValueError for what no stage has."""
        object.__setattr__(self, "whole", frozenset([self.whole] if isinstance(self.whole, str) else self.whole))
        if self.rest is not None:
            object.__setattr__(self, "rest", frozenset(self.rest))
        figures = (self.bytes, self.flops, self.attention, self.memory, self.heads, self.kv_heads, *self.qkv)
        if any(not n >= 0 for n in figures) or (self.heads and not self.kv_heads) or self.rest == frozenset():
            raise ValueError(f"a stage has figures of at least 0, key heads with its heads, and some rest; got {self}")


class Move(NamedTuple):
    """Seconds of a change of layout: of any one, and of each global byte."""

    fixed: float
    each: float

    def seconds(self, size: float) -> float:
        """Of tensors of so many global bytes."""
        return self.fixed + self.each * size if size else 0.0


@dataclass(frozen=True)
class Costs:
    """What moves and stages take on some ranks of a machine."""

    dims: Mapping[str, int]
    ranks: int
    hardware: Hardware
    training: bool = True

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """All layouts: a dimension of one element too, which one rank then has."""
        return (*self.dims, None)

    @cached_property
    def parts(self) -> dict[str, list[float]]:
        """Each rank's share of every dimension, of 1."""
        return {dim: [n / size for n in shares(size, self.ranks)] for dim, size in self.dims.items()}

    @cached_property
    def largest(self) -> dict[Layout, float]:
        """The largest share of any rank."""
        return {None: 1.0} | {dim: max(parts) for dim, parts in self.parts.items()}

    @cached_property
    def wire(self) -> Move:
        """Of one exchange among all ranks: nodes are full, and both networks work at once."""
        machine = self.hardware
        if self.ranks <= machine.node:
            return Move(machine.inside.latency, 1 / machine.inside.bandwidth)
        near = (machine.node - 1) / (self.ranks - 1)
        each = max(near / machine.inside.bandwidth, (1 - near) / machine.across.bandwidth)
        return Move(max(machine.inside.latency, machine.across.latency), each)

    @cached_property
    def moves(self) -> dict[tuple[Layout, Layout], Move]:
        """Of every pair of layouts."""
        return {(a, b): self._move(a, b) for a in self.layouts for b in self.layouts}

    def _move(self, src: Layout, dst: Layout) -> Move:
        if src == dst or src is None or self.ranks == 1:
            return Move(0.0, 0.0)
        return self.exchange(max(self.sent(src, dst)), 1)

    def sent(self, src: Layout, dst: Layout) -> list[float]:
        """What each rank sends, or receives if that is more, of each global byte."""
        if src == dst or src is None:
            return [0.0] * self.ranks
        a = self.parts[src]
        if dst is None:
            return [max((self.ranks - 1) * own, 1 - own) for own in a]
        return [max(own * (1 - other), other * (1 - own)) for own, other in zip(a, self.parts[dst], strict=True)]

    def exchange(self, part: float, times: int) -> Move:
        """Of so many exchanges that together take a part of every global byte, there and back in training."""
        both = 2 if self.training else 1
        return Move(both * times * self.wire.fixed, both * part * self.wire.each)

    def modes(self, stage: Stage, layout: Layout) -> dict[str, float]:
        """Seconds of a stage in each way that it can be run where a layout comes in; none where it cannot."""
        if layout is None:
            return {"copies": self._linear(stage) + self._attention(stage)}
        part = self.largest[layout]
        if layout not in stage.whole:
            return {"local": part * (self._linear(stage) + self._attention(stage))}
        if not stage.heads or (stage.filled and not min(self.parts[layout])):
            return {}
        linear, queries, keys = part * self._linear(stage), *stage.qkv
        copies = max(1.0, self.ranks / stage.kv_heads)  # of a key head, on as many ranks
        to_heads = self.exchange(part * (1 - 1 / self.ranks), 2).seconds(2 * queries + copies * keys)
        inside = -(-stage.heads // self.ranks) / stage.heads * self._attention(stage)
        around = self.exchange((1 - 1 / self.ranks) * (1.5 if self.training else 1), self.ranks - 1).seconds(keys)
        beside = part * self._attention(stage)
        if self.ranks == 1:
            to_heads = around = 0.0
        found = {"ulysses": linear + inside + to_heads}
        return found | ({"ring": linear + beside + max(around - beside, around / 2)} if stage.ring else {})

    def memory(self, stage: Stage, layout: Layout) -> float:
        """Bytes that the fullest rank keeps for backward."""
        return self.largest[layout] * stage.memory

    def _linear(self, stage: Stage) -> float:
        return stage.flops / self.hardware.linear_rate * (3 if self.training else 1)

    def _attention(self, stage: Stage) -> float:
        rates = self.hardware.attention
        return stage.attention * (1 / rates.rate + (BACKWARD / rates.backward_rate if self.training else 0.0))
