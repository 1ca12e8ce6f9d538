"""What a stage of a model is to the planner, and what a move between layouts and a stage under a layout cost.

A layout is the name of the dimension that is sharded, or None where every rank has all. Sizes are global: bytes and
operations of all ranks together, of which a rank has the share of its elements. The slowest rank counts:

    keep      nothing
    switch    one exchange; rank r sends a_r (1 - b_r) of the bytes, where a_r and b_r are its shares of both dims
    split     nothing
    gather    one exchange; rank r receives 1 - a_r
    local     the stage takes max(a_r) of its work: uneven sizes and idle ranks are in that
    ulysses   queries, keys, values and the output are switched to heads and back, 2 exchanges
    ring      keys and values go round, ranks - 1 exchanges, of which attention hides as much as the hardware can; and
              fetched rows and the steps cost what they cost a kernel
    copies    layout None: every rank does all the work
    parts     of a stage that comes from elsewhere and goes on elsewhere: one is computed while others move

On a grid (`seqpar.dsp.grid`), groups of `core` neighbours hold shares of one dimension throughout, and a layout says
what the ranks across groups shard. These move it among themselves as above. A stage that mixes what is held has its
attention shared inside the groups, and nothing else that it mixes is sharded.

In training everything comes again on the way back: exchanges once (a ring twice), linear work twice, attention 2.5
times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from seqpar.dsp.space import Sharding, largest_part, shares
from seqpar.planner import Hardware
from seqpar.planner.hardware import BACKWARD

MODES = ("local", "ulysses", "ring", "copies")


@dataclass(frozen=True)
class Stage:
    """A part of a model that mixes some dimensions.

    whole: dimensions that it mixes, which are not sharded inside. bytes: of the tensors that cross its border on the
    way in, and again on the way out. flops, attention: operations of a forward, in linear layers and in attended pairs.
    memory: bytes kept for backward. heads, kv_heads: of an attention over `whole` that ranks can share by heads, and if
    `ring` also in a ring; 0: they cannot. filled: only where every rank has a share. qkv: bytes of its queries, and of
    its keys and values together. rest: layouts that what stands before the stage allows, or None where nothing does, so
    that any will do. rest_filled: only those in which every rank has a share; so at the end, if this is the last stage.

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
    apart: frozenset[str] = frozenset()
    rest: frozenset[Sharding] | None = None
    rest_filled: bool = False

    def __post_init__(self) -> None:
        """Take any collection for a set, and raise ValueError for what no stage has."""
        object.__setattr__(self, "whole", frozenset([self.whole] if isinstance(self.whole, str) else self.whole))
        object.__setattr__(self, "qkv", tuple(self.qkv))
        object.__setattr__(self, "apart", frozenset([self.apart] if isinstance(self.apart, str) else self.apart))
        if self.rest is not None:
            object.__setattr__(self, "rest", frozenset(self.rest))
        figures = (self.bytes, self.flops, self.attention, self.memory, self.heads, self.kv_heads, *self.qkv)
        if any(not n >= 0 for n in figures) or (self.heads and not self.kv_heads) or self.rest == frozenset():
            raise ValueError(f"a stage has figures of at least 0, key heads with its heads, and some rest; got {self}")


class StageChoice(NamedTuple):
    """Of one stage: the layout that its input has before (its rest), the layout inside, how and in how many parts."""

    before: Sharding
    layout: Sharding
    mode: str
    parts: int = 1


class MoveCost(NamedTuple):
    """Seconds of a change of layout: of any one, and of each global byte; or arrays of these, of several ones."""

    fixed: Any
    each: Any

    def seconds(self, size: float) -> Any:
        """Of tensors of so many global bytes."""
        return self.fixed + self.each * size if size else 0.0 * self.fixed  # of an array: as many


@dataclass(frozen=True)
class Costs:
    """What moves and stages take on some ranks of a machine.

    core, held: the size of the groups of a grid, and the dimension that they hold; 1 and None: there is none.

    Raises: ValueError for a grid that is none.
    """

    dims: Mapping[str, int]
    ranks: int
    hardware: Hardware
    training: bool = True
    core: int = 1
    held: Sharding = None

    def __post_init__(self) -> None:
        """Raise ValueError unless every rank of a group has a share of what it holds."""
        if self.ranks < 1 or self.core < 1 or self.ranks % self.core or (self.core > 1) != (self.held is not None):
            raise ValueError(f"groups of core={self.core} of {self.ranks} ranks cannot hold {self.held!r}")
        if self.held is not None and self.dims.get(self.held, 0) < self.core:
            raise ValueError(f"{self.core} ranks cannot hold {self.held!r} of {dict(self.dims)}, one element each")

    @property
    def groups(self) -> int:
        """How many there are: the ranks that move layouts among themselves."""
        return self.ranks // self.core

    @cached_property
    def layouts(self) -> tuple[Sharding, ...]:
        """All layouts: a dimension of one element too, which one rank then has."""
        return (*self.dims, None)

    @cached_property
    def parts(self) -> dict[Sharding, np.ndarray]:
        """Each rank's share under every layout, of 1."""
        held = [1] if self.held is None else shares(self.dims[self.held], self.core)
        mine = np.array(held) / sum(held)
        found = {None: np.tile(mine, self.groups)}
        for dim, size in self.dims.items():
            if dim == self.held:
                split = np.array([shares(n, self.groups) for n in held])
                found[dim] = split.T.reshape(-1) / size
            else:
                found[dim] = np.outer(shares(size, self.groups), mine).reshape(-1) / size
        return found

    @cached_property
    def largest(self) -> dict[Sharding, float]:
        """The largest share of any rank."""
        held = 1 if self.held is None else self.dims[self.held]
        own = -(-held // self.core)
        found: dict[Sharding, float] = {None: own / held}
        for dim, size in self.dims.items():
            mine = own if dim == self.held else size
            found[dim] = -(-mine // self.groups) / size * (1.0 if dim == self.held else own / held)
        return found

    @cached_property
    def filled(self) -> frozenset[Sharding]:
        """Layouts in which every rank has a share."""
        return frozenset(layout for layout, parts in self.parts.items() if parts.all())

    def wire(self, inside: bool) -> MoveCost:
        """Of one exchange inside the groups, or across them: nodes are full, and both networks work at once."""
        machine, ranks = self.hardware, self.core if inside else self.groups
        node = machine.node if inside else max(1, machine.node // self.core)
        if ranks <= node:
            return MoveCost(machine.inside.latency, 1 / machine.inside.bandwidth)
        near = (node - 1) / (ranks - 1)
        each = max(near / machine.inside.bandwidth, (1 - near) / machine.across.bandwidth)
        return MoveCost(max(machine.inside.latency, machine.across.latency), each)

    @cached_property
    def wires(self) -> tuple[MoveCost, MoveCost]:
        """Across groups, and inside them."""
        return self.wire(False), self.wire(True)

    @cached_property
    def moves(self) -> dict[tuple[Sharding, Sharding], MoveCost]:
        """Of every pair of layouts."""
        own, a = self.parts[None], np.stack([self.parts[dim] for dim in self.dims] or [self.parts[None]])
        switches = _busiest(a[:, None], a, own).max(-1)
        gathers = np.maximum((self.groups - 1) * a, own - a).max(-1)
        found = {(at, at): MoveCost(0.0, 0.0) for at in self.layouts}
        for n, src in enumerate(self.dims):
            found[None, src] = MoveCost(0.0, 0.0)
            parts = {**dict(zip(self.dims, switches[n], strict=True)), None: gathers[n]}
            for dst, part in parts.items():
                if src != dst:
                    found[src, dst] = self.exchange(float(part), 1) if self.groups > 1 else MoveCost(0.0, 0.0)
        return found

    def sent(self, src: Sharding, dst: Sharding) -> np.ndarray:
        """What each rank sends, or receives if that is more, of each global byte."""
        a, b, own = (self.parts[layout] for layout in (src, dst, None))
        if src == dst or src is None:
            return np.zeros(self.ranks)
        if dst is None:
            return np.maximum((self.groups - 1) * a, own - a)
        return _busiest(a, b, own)

    def gathered(self) -> np.ndarray:
        """What each rank sends, or receives if that is more, of each global byte, where groups gather at the end."""
        return np.maximum((self.core - 1) * self.parts[None], 1 - self.parts[None])

    @cached_property
    def gather(self) -> MoveCost:
        """Of what the groups hold, at the end."""
        return self.exchange(float(self.gathered().max()), 1, inside=True) if self.core > 1 else MoveCost(0.0, 0.0)

    def exchange(self, part: float, times: float, *, inside: bool = False) -> MoveCost:
        """Of so many exchanges that together take a part of every global byte, there and back in training."""
        both, wire = 2 if self.training else 1, self.wires[inside]
        return MoveCost(both * times * wire.fixed, both * part * wire.each)

    def modes(self, stage: Stage, layout: Sharding) -> dict[str, float]:
        """Seconds of a stage in each way that it can be run where a layout comes in; none where it cannot."""
        part, inside = self.largest[layout], self.held in stage.whole
        attention = self._attention(stage)
        linear, beside = part * self._linear(stage), part * attention
        if not inside and layout not in stage.whole:
            return {"copies" if layout is None else "local": linear + beside}
        ranks = self.core if inside else self.groups
        if not stage.heads or (inside and layout in stage.whole):
            return {}
        if stage.filled and layout is not None and not inside and self.dims[layout] < ranks:
            return {}
        # of everything, what the ranks that share have together
        common = part / self.largest[None] if inside else self.largest[None]
        queries, keys = stage.qkv
        copies = max(1.0, ranks / stage.kv_heads)  # of a key head, on as many ranks
        to_heads = self.exchange(part * (1 - 1 / ranks), 2, inside=inside).seconds(2 * queries + copies * keys)
        heads = common * -(-stage.heads // ranks) / stage.heads * attention
        if ranks == 1:
            to_heads = 0.0
        found = {"ulysses": linear + heads + to_heads}
        return found | (
            {"ring": linear + self._ring(stage, ranks, beside, common, inside=inside)} if stage.ring else {}
        )

    def _ring(self, stage: Stage, ranks: int, attention: float, common: float, *, inside: bool) -> float:
        """Seconds of an attention in a ring, of which a rank's part takes so long. common: what its ranks have of all.

        Keys and values go round once, and on the way back twice, with their gradients. A row of theirs that was fetched
        and a step cost a kernel what they cost the core's planner.
        """
        if ranks == 1:
            return attention
        again = 1.5 if self.training else 1
        fetched = common * (1 - 1 / ranks)
        around = self.exchange(again * fetched, again * (ranks - 1), inside=inside).seconds(stage.qkv[1])
        attention += fetched * self._rows(stage, self.hardware.attention.key_pairs)
        attention += (ranks - 1) * self.hardware.attention.stage * (2 if self.training else 1)
        return attention + max(around - attention, around * (1 - self.hardware.hidden))

    @cached_property
    def table(self) -> MoveCost:
        """All moves, [from, to] in the order of the layouts."""
        fixed, each = np.array([[self.moves[a, b] for b in self.layouts] for a in self.layouts]).transpose(2, 0, 1)
        return MoveCost(fixed, each)

    def through(
        self, stage: Stage, inside: float, before: Sharding, layout: Sharding, after: Sharding, parts: int
    ) -> float:
        """Seconds of a stage that takes so long inside, with the moves of what comes in and of what goes out.

        Raises: ValueError for parts that it cannot be run in.
        """
        into, out = self.moves[before, layout], self.moves[layout, after]
        if parts == 1:
            return into.seconds(stage.bytes) + inside + out.seconds(stage.bytes)
        if type(parts) is not int or parts < 1 or not self.parted(stage, before, layout, after):
            raise ValueError(
                f"stage {stage.name} cannot be run in {parts} parts from {before!r} by {layout!r} to {after!r}: parts "
                f"are of a dimension in apart, {sorted(stage.apart)}, and moved to another one"
            )
        assert layout is not None
        return float(self._overlapped(stage.bytes, into, inside, out, parts, self._largest_part(layout, parts)))

    def through_all(self, stage: Stage, inside: np.ndarray, parts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """The same for all layouts before, inside and after, and in how many of these parts: seconds, parts.

        inside: seconds by layout, infinite where the stage cannot be run.
        """
        at, moves, size = self.layouts, self.table, stage.bytes
        into, out = MoveCost(*(x[:, :, None] for x in moves)), MoveCost(*(x[None] for x in moves))
        inside = inside[None, :, None]
        seconds = into.seconds(size) + inside + out.seconds(size)
        chosen = np.ones(seconds.shape, dtype=int)
        apart = np.array([dim in stage.apart and dim != self.held for dim in at])
        if apart.any():
            other = ~np.eye(len(at), dtype=bool)
            sharded = np.array([dim is not None for dim in at])
            may = apart[None, :, None] & other[:, :, None] & (other & sharded)[None]
            for count in parts:
                if count > 1:
                    part = np.array([self._largest_part(dim, count) if dim is not None else 1.0 for dim in at])
                    took = self._overlapped(size, into, inside, out, count, part[None, :, None])
                    better = may & (took < seconds)
                    seconds[better], chosen[better] = took[better], count
        return seconds, chosen

    def parted(self, stage: Stage, before: Sharding, layout: Sharding, after: Sharding) -> bool:
        """Whether a stage can be run in parts: of what all others have whole before and after."""
        return layout in stage.apart and layout != self.held and layout not in (before, after) and after is not None

    def _largest_part(self, layout: str, parts: int) -> float:
        return largest_part(self.dims[layout], self.groups, parts)

    def _overlapped(self, size: float, into: MoveCost, inside: Any, out: MoveCost, parts: int, largest: Any) -> Any:
        """Seconds of a stage that is computed in parts while others come in and go out, over one link in order.

        Nothing is faster than the slowest of the three, with a part of the other two before and after it. As much of
        the moves as the hardware cannot hide comes on top. In training all halves come again on the way back, and
        backward is two thirds of the work.
        """
        extra, hidden = parts - 1, self.hardware.hidden
        comes, goes = (move.seconds(size) + extra * move.fixed for move in (into, out))
        inside, shown = inside + extra * self.hardware.call, (1 - hidden) * (comes + goes)
        comes, goes = hidden * comes, hidden * goes
        if not self.training:
            return shown + _pipeline(comes, inside, goes, largest)
        there = _pipeline(comes / 2, inside / 3, goes / 2, largest)
        return shown + there + _pipeline(goes / 2, 2 * inside / 3, comes / 2, largest)

    def memory(self, stage: Stage, layout: Sharding) -> float:
        """Bytes that the fullest rank keeps for backward."""
        return self.largest[layout] * stage.memory

    def _linear(self, stage: Stage) -> float:
        return stage.flops / self.hardware.linear_rate * (3 if self.training else 1)

    def _attention(self, stage: Stage) -> float:
        """Of its pairs, and of its rows."""
        pairs = math.prod(self.dims[dim] for dim in stage.whole)
        return self._rows(stage, pairs + self.hardware.attention.query_pairs)

    def _rows(self, stage: Stage, pairs: float) -> float:
        """Of so many pairs for every row, each of which takes what one of the stage's own does."""
        rates, each = self.hardware.attention, stage.attention / math.prod(self.dims[dim] for dim in stage.whole)
        return pairs * each * (1 / rates.rate + (BACKWARD / rates.backward_rate if self.training else 0.0))


def _pipeline(into: Any, inside: Any, out: Any, part: Any) -> Any:
    """Seconds of parts, the largest of which is that part of all, through three stations: what goes out waits for all
    that comes in, as both are on one link."""
    first = np.maximum(part * into + inside + part * out, part * (into + inside) + out)
    return np.maximum(first, np.maximum(into + part * (inside + out), into + out))


def _busiest(a: np.ndarray, b: np.ndarray, own: np.ndarray) -> np.ndarray:
    """What a rank sends, or receives if that is more, in a switch from shares a to shares b of what its group holds."""
    return np.maximum(a * (1 - b / own), b * (1 - a / own))  # type: ignore[no-any-return]
