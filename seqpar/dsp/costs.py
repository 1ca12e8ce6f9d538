"""The planner's view of a stage, and the cost of a move between shardings and of a stage under a sharding.

A sharding is the name of the sharded dimension, or None where every rank has the whole. Sizes are global: bytes and
operations of all ranks together; a rank's part is that of its elements. The slowest rank counts:

    keep      nothing
    switch    one exchange; rank r sends a_r (1 - b_r) of the bytes, where a_r and b_r are its shares of both dims
    split     nothing
    gather    one exchange; rank r receives 1 - a_r
    local     the stage takes max(a_r) of its work, which covers uneven sizes and idle ranks
    ulysses   queries, keys, values and the output are switched to heads and back, 2 exchanges
    ring      keys and values go round, ranks - 1 exchanges, hidden behind attention as far as the hardware can; the
              kernel's cost of fetched rows and of steps is added
    copies    sharding None: every rank does all the work

On a grid (`seqpar.dsp.grid`), groups of `core` neighbouring ranks hold shares of one dimension throughout; a sharding
is the dimension that the ranks across groups shard and move among themselves as above. A stage that mixes the held
dimension has its attention shared inside the groups, and nothing else that it mixes is sharded.

Training repeats everything in backward: exchanges once (a ring twice), linear work twice, attention 2.5 times.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from seqpar.dsp.space import Sharding, shares
from seqpar.planner import Hardware
from seqpar.planner.hardware import BACKWARD

MODES = ("local", "ulysses", "ring", "copies")


@dataclass(frozen=True)
class Stage:
    """A part of a model that mixes some dimensions.

    whole: dimensions that it mixes, which are not sharded inside. bytes: tensors that cross its border on the way in,
    and again on the way out. flops, attention: operations of a forward in linear layers and in attended pairs. memory:
    bytes kept for backward. heads, kv_heads: attention over `whole` that ranks can share by heads, and if `ring` also
    in a ring; 0 if they cannot. filled: every rank needs a share. qkv: bytes of its queries, and of its keys and values
    together. rest: shardings that the code before the stage allows; None if there is no such code, so any will do.
    rest_filled: of these, only shardings in which every rank has a share; also at the end, after the last stage.

    Raises: ValueError for a figure below 0, heads without key heads, or an empty rest.
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
    rest: frozenset[Sharding] | None = None
    rest_filled: bool = False

    def __post_init__(self) -> None:
        """Accept any collection as a set, and check the figures."""
        object.__setattr__(self, "whole", frozenset([self.whole] if isinstance(self.whole, str) else self.whole))
        object.__setattr__(self, "qkv", tuple(self.qkv))
        if self.rest is not None:
            object.__setattr__(self, "rest", frozenset(self.rest))
        figures = (self.bytes, self.flops, self.attention, self.memory, self.heads, self.kv_heads, *self.qkv)
        if any(not n >= 0 for n in figures) or (self.heads and not self.kv_heads) or self.rest == frozenset():
            raise ValueError(
                f"a stage needs figures of at least 0, kv_heads with heads, and a rest that is not empty; got {self}"
            )


class StageChoice(NamedTuple):
    """How one stage runs: the sharding before it (in its rest) and inside, and the mode."""

    before: Sharding
    sharding: Sharding
    mode: str


class MoveCost(NamedTuple):
    """Seconds of a change of sharding, fixed and per global byte; or arrays of both, for several changes."""

    fixed: Any
    per_byte: Any

    def seconds(self, size: float) -> Any:
        """Seconds for tensors of this many global bytes."""
        return self.fixed + self.per_byte * size if size else 0.0 * self.fixed  # an array of zeros if there are several


@dataclass(frozen=True)
class Costs:
    """The cost of moves and stages on the ranks of a machine.

    core, held: the size of a grid's groups and the dimension that they hold; 1 and None without a grid.

    Raises: ValueError for groups that do not divide the ranks, or hold fewer elements than they have ranks.
    """

    dims: Mapping[str, int]
    ranks: int
    hardware: Hardware
    training: bool = True
    core: int = 1
    held: Sharding = None

    def __post_init__(self) -> None:
        """Raise ValueError unless every rank of a group has a share of the held dimension."""
        if self.ranks < 1 or self.core < 1 or self.ranks % self.core or (self.core > 1) != (self.held is not None):
            raise ValueError(f"groups of core={self.core} of {self.ranks} ranks cannot hold {self.held!r}")
        if self.held is not None and self.dims.get(self.held, 0) < self.core:
            raise ValueError(
                f"groups of core={self.core} ranks need an element of {self.held!r} each, got {dict(self.dims)}"
            )

    @property
    def groups(self) -> int:
        """The number of groups, which is also the number of ranks that move tensors among themselves."""
        return self.ranks // self.core

    @cached_property
    def shardings(self) -> tuple[Sharding, ...]:
        """All possible shardings, even of a dimension with one element, which one rank then has."""
        return (*self.dims, None)

    @cached_property
    def fractions(self) -> dict[Sharding, np.ndarray]:
        """Each rank's share under every sharding, as a fraction."""
        held = [1] if self.held is None else shares(self.dims[self.held], self.core)
        of_group = np.array(held) / sum(held)
        fractions: dict[Sharding, np.ndarray] = {None: np.tile(of_group, self.groups)}
        for dim, size in self.dims.items():
            if dim == self.held:
                split = np.array([shares(n, self.groups) for n in held])
                fractions[dim] = split.T.reshape(-1) / size
            else:
                fractions[dim] = np.outer(shares(size, self.groups), of_group).reshape(-1) / size
        return fractions

    @cached_property
    def largest(self) -> dict[Sharding, float]:
        """The largest share of any rank."""
        held = 1 if self.held is None else self.dims[self.held]
        own = -(-held // self.core)
        largest: dict[Sharding, float] = {None: own / held}
        for dim, size in self.dims.items():
            split = own if dim == self.held else size
            largest[dim] = -(-split // self.groups) / size * (1.0 if dim == self.held else own / held)
        return largest

    @cached_property
    def filled(self) -> frozenset[Sharding]:
        """Shardings in which every rank has a share."""
        return frozenset(sharding for sharding, parts in self.fractions.items() if parts.all())

    @cached_property
    def wires(self) -> tuple[MoveCost, ...]:
        """The cost of one exchange across groups, and inside them. Nodes are full, and both networks work at once."""
        machine, wires = self.hardware, []
        for ranks, node in ((self.groups, max(1, machine.node // self.core)), (self.core, machine.node)):
            near = 1.0 if ranks <= node else (node - 1) / (ranks - 1)
            latency = max(machine.inside.latency, machine.across.latency if near < 1 else 0.0)
            wires.append(MoveCost(latency, max(near / machine.inside.bandwidth, (1 - near) / machine.across.bandwidth)))
        return tuple(wires)

    @cached_property
    def moves(self) -> dict[tuple[Sharding, Sharding], MoveCost]:
        """The cost of every change of sharding."""
        moves = {}
        for src, dst in itertools.product(self.shardings, repeat=2):
            free = src in (None, dst) or self.groups == 1
            moves[src, dst] = MoveCost(0.0, 0.0) if free else self.exchange(float(self.sent(src, dst).max()), 1)
        return moves

    def sent(self, src: Sharding, dst: Sharding) -> np.ndarray:
        """For each global byte, the part that each rank sends or receives, whichever is more."""
        a, b, own = (self.fractions[sharding] for sharding in (src, dst, None))
        if src == dst or src is None:
            return np.zeros(self.ranks)
        if dst is None:
            return np.maximum((self.groups - 1) * a, own - a)
        return np.maximum(a * (1 - b / own), b * (1 - a / own))  # type: ignore[no-any-return]

    def gathered(self) -> np.ndarray:
        """As `sent`, for the gather of the held dimension at the end."""
        return np.maximum((self.core - 1) * self.fractions[None], 1 - self.fractions[None])

    @cached_property
    def gather(self) -> MoveCost:
        """The cost of gathering the held dimension at the end."""
        return self.exchange(float(self.gathered().max()), 1, inside=True) if self.core > 1 else MoveCost(0.0, 0.0)

    def exchange(self, part: float, times: float, *, inside: bool = False) -> MoveCost:
        """The cost of ``times`` exchanges that together move a part of every global byte; in training with backward."""
        passes, wire = 2 if self.training else 1, self.wires[inside]
        return MoveCost(passes * times * wire.fixed, passes * part * wire.per_byte)

    def modes(self, stage: Stage, sharding: Sharding) -> dict[str, float]:
        """Seconds of a stage under a sharding, for each mode in which it can run."""
        part, inside = self.largest[sharding], self.held in stage.whole
        attention = self.attention_seconds(stage)
        linear, attending = part * self.linear_seconds(stage), part * attention
        if not inside and sharding not in stage.whole:
            return {"copies" if sharding is None else "local": linear + attending}
        ranks = self.core if inside else self.groups
        if not stage.heads or (inside and sharding in stage.whole):
            return {}
        if stage.filled and sharding is not None and not inside and self.dims[sharding] < ranks:
            return {}
        # the fraction of all work that the sharing ranks have together
        common = part / self.largest[None] if inside else self.largest[None]
        queries, keys = stage.qkv
        copies = max(1.0, ranks / stage.kv_heads)  # copies of a key head, if ranks outnumber them
        to_heads = self.exchange(part * (1 - 1 / ranks), 2, inside=inside).seconds(2 * queries + copies * keys)
        heads = common * -(-stage.heads // ranks) / stage.heads * attention
        if ranks == 1:
            to_heads = 0.0
        seconds = {"ulysses": linear + heads + to_heads}
        if stage.ring:
            seconds["ring"] = linear + self._ring(stage, ranks, attending, common, inside=inside)
        return seconds

    def _ring(self, stage: Stage, ranks: int, attention: float, common: float, *, inside: bool) -> float:
        """Seconds of attention in a ring. attention: of one rank's part. common: the ring's fraction of all rows.

        Keys and values go round once; in backward twice, with their gradients. Fetched rows and steps cost a kernel as
        much as in `seqpar.planner`.
        """
        if ranks == 1:
            return attention
        rounds = 1.5 if self.training else 1  # rounds of exchanges, backward included
        fetched = common * (1 - 1 / ranks)
        around = self.exchange(rounds * fetched, rounds * (ranks - 1), inside=inside).seconds(stage.qkv[1])
        attention += fetched * self._pair_seconds(stage, self.hardware.attention.key_pairs)
        attention += (ranks - 1) * self.hardware.attention.stage * (2 if self.training else 1)
        return attention + max(around - attention, around * (1 - self.hardware.hidden))

    @cached_property
    def table(self) -> MoveCost:
        """All moves, [from, to], in the order of the shardings."""
        pairs = [[self.moves[src, dst] for dst in self.shardings] for src in self.shardings]
        return MoveCost(*np.array(pairs).transpose(2, 0, 1))

    def through(self, stage: Stage, inside: np.ndarray) -> np.ndarray:
        """Seconds of a stage with its moves, by shardings before, inside and after.

        inside: seconds by sharding, infinite where the stage cannot run.
        """
        moved = self.table.seconds(stage.bytes)
        return moved[:, :, None] + inside[None, :, None] + moved[None]  # type: ignore[no-any-return]

    def memory(self, stage: Stage, sharding: Sharding) -> float:
        """Bytes that the most loaded rank keeps for backward."""
        return self.largest[sharding] * stage.memory

    def linear_seconds(self, stage: Stage) -> float:
        """Seconds of a stage's linear layers, on one rank."""
        return stage.flops / self.hardware.linear_rate * (3 if self.training else 1)

    def attention_seconds(self, stage: Stage) -> float:
        """Seconds of a stage's attention: pairs and rows."""
        pairs = math.prod(self.dims[dim] for dim in stage.whole)
        return self._pair_seconds(stage, pairs + self.hardware.attention.query_pairs)

    def _pair_seconds(self, stage: Stage, pairs: float) -> float:
        """Seconds of this many pairs per row, at the stage's own cost per pair."""
        rates, per_pair = self.hardware.attention, stage.attention / math.prod(self.dims[dim] for dim in stage.whole)
        return pairs * per_pair * (1 / rates.rate + (BACKWARD / rates.backward_rate if self.training else 0.0))
