"""The fastest way through stages on one grid of ranks, from the input's sharding to one of the allowed end shardings.

A way through a stage leads from the sharding of its input to that of its output, which is the next stage's input. The
least seconds between all pairs of shardings form a table, which equal stages share. Stage by stage, the least seconds
up to each sharding follow from those up to the shardings before it.

If memory binds, slower ways that keep less are carried along, and no way is cut that could be part of the best one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from seqpar.dsp.costs import MODES, Costs, Stage, StageChoice
from seqpar.dsp.space import Sharding


class Route(NamedTuple):
    """A way through all stages. memory: bytes that the most loaded rank keeps."""

    seconds: float
    memory: float
    choices: tuple[StageChoice, ...]
    end: Sharding


class Search:
    """Ways through stages from a sharding, on one grid.

    modes, shardings: the allowed ones. kinds: a number per stage, equal for stages of equal cost.
    """

    def __init__(
        self, stages: Sequence[Stage], costs: Costs, start: Sharding, *, modes: Sequence[str] = MODES,
        shardings: Sequence[Sharding] | None = None, kinds: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.stages, self.costs, self.start = tuple(stages), costs, start
        self.modes = modes
        self.shardings = costs.shardings if shardings is None else shardings
        self.kinds = kinds_of(stages) if kinds is None else kinds
        self._ways: dict[int, _StageWays] = {}

    def ways(self, n: int) -> _StageWays:
        """The ways through stage number ``n``."""
        kind = self.kinds[n]
        if kind not in self._ways:
            self._ways[kind] = _StageWays(self.stages[n], self.costs, self.modes, self.shardings)
        return self._ways[kind]

    @cached_property
    def unmoved(self) -> float:
        """A lower bound in seconds: each stage in its best sharding, without moves."""
        first = {kind: n for n, kind in reversed(list(enumerate(self.kinds)))}
        return sum(count * min(self.ways(first[kind]).inside) for kind, count in Counter(self.kinds).items())

    def best(self, ends: Sequence[Sharding], limit: float) -> Route | None:
        """The fastest way to one of the end shardings that keeps at most `limit` bytes."""
        route = self._fastest(ends)
        return route if route is None or route.memory <= limit else self._fitting(ends, limit)

    def _befores(self, n: int) -> Sequence[Sharding]:
        """The possible shardings of a stage's input."""
        stage = self.stages[n]
        if stage.rest is None:
            return self.shardings if n else [self.start]
        # in the order of the shardings: a set's order varies between processes, and ties must be cut alike
        return [at for at in self.costs.shardings if _rests(at, stage, self.costs)]

    def _steps(self, ends: Sequence[Sharding]) -> Iterator[tuple[_StageWays, Sequence[Sharding], Sequence[Sharding]]]:
        """Every stage's ways, with the shardings that they may start from and end in."""
        befores = self._befores(0)
        for n in range(len(self.stages)):
            afters = self._befores(n + 1) if n + 1 < len(self.stages) else ends
            yield self.ways(n), befores, afters
            befores = afters

    def _entry(self) -> dict[Sharding, float]:
        """Seconds to reach each sharding before the first stage."""
        moves, size = self.costs.moves, self.stages[0].bytes
        return {at: moves[self.start, at].seconds(size) for at in self._befores(0)}

    def _fastest(self, ends: Sequence[Sharding]) -> Route | None:
        shardings = self.costs.shardings
        at, entry = {sharding: n for n, sharding in enumerate(shardings)}, self._entry()
        reached = np.array([entry.get(sharding, math.inf) for sharding in shardings])
        passed: list[tuple[_StageWays, np.ndarray]] = []  # with the best sharding before each one after
        for ways, befores, afters in self._steps(ends):
            allowed = np.ix_([at[before] for before in befores], [at[after] for after in afters])
            table = np.full((len(at), len(at)), math.inf)
            table[allowed] = ways.fastest[allowed]
            total = reached[:, None] + table
            passed.append((ways, total.argmin(0)))
            reached = total.min(0)
        last = after = int(reached.argmin())
        if reached[last] == math.inf:
            return None
        chosen: list[tuple[StageChoice, float]] = []
        for ways, befores_of in reversed(passed):
            before = int(befores_of[after])
            inside = int(ways.sharding[before, after])
            chosen.append((ways.choice(before, inside), ways.kept[inside]))
            after = before
        choices, kept = zip(*reversed(chosen), strict=True)
        return Route(float(reached[last]), sum(kept), choices, shardings[last])

    def _fitting(self, ends: Sequence[Sharding], limit: float) -> Route | None:
        at = {sharding: n for n, sharding in enumerate(self.costs.shardings)}
        fronts: dict[Sharding, list[_Way]] = {
            sharding: [(seconds, 0.0, None, None)] for sharding, seconds in self._entry().items()
        }
        for ways, befores, afters in self._steps(ends):
            arrived: dict[Sharding, list[_Way]] = {}
            for before, after in ((b, a) for b in befores for a in afters):
                for n, seconds in enumerate(ways.through[at[before], :, at[after]].tolist()):
                    for way in fronts.get(before, ()):
                        memory = way[1] + ways.kept[n]
                        if seconds < math.inf and memory <= limit:
                            choice = ways.choice(at[before], n)
                            arrived.setdefault(after, []).append((way[0] + seconds, memory, choice, way))
            fronts = {after: _front(several) for after, several in arrived.items()}
        done = [(way, end) for end, several in fronts.items() for way in several]
        if not done:
            return None
        way, end = min(done, key=lambda route: route[0][0])
        seconds, memory, choices = way[0], way[1], []
        while way[2] is not None:
            choices.append(way[2])
            way = way[3]
        return Route(seconds, memory, tuple(reversed(choices)), end)


# One way up to a sharding: seconds, memory, the last choice, and the way before it.
_Way = tuple[float, float, "StageChoice | None", Any]


def _front(ways: list[_Way]) -> list[_Way]:
    """The ways that no other way beats in both seconds and memory."""
    front: list[_Way] = []
    for way in sorted(ways, key=itemgetter(0, 1)):
        if not front or way[1] < front[-1][1]:
            front.append(way)
    return front


class _StageWays:
    """The ways through a stage, by numbers of the shardings before, inside and after it."""

    def __init__(self, stage: Stage, costs: Costs, modes: Sequence[str], shardings: Sequence[Sharding]) -> None:
        self.stage, self.costs, self.shardings = stage, costs, costs.shardings
        options = [
            {mode: took for mode, took in costs.modes(stage, at).items() if mode in modes and at in shardings}
            for at in self.shardings
        ]
        self.modes = [min(seconds, key=seconds.__getitem__) if seconds else "" for seconds in options]
        self.inside = [min(seconds.values(), default=math.inf) for seconds in options]
        self.kept = [costs.memory(stage, at) for at in self.shardings]

    @cached_property
    def through(self) -> np.ndarray:
        """Seconds with all moves, by shardings before, inside and after."""
        return self.costs.through(self.stage, np.array(self.inside))

    @cached_property
    def sharding(self) -> np.ndarray:
        """The best sharding inside, by shardings before and after."""
        return self.through.argmin(1)  # type: ignore[no-any-return]

    @cached_property
    def fastest(self) -> np.ndarray:
        """Seconds with the best sharding inside, by shardings before and after."""
        return self.through.min(1)  # type: ignore[no-any-return]

    def choice(self, before: int, inside: int) -> StageChoice:
        """The choice for these numbers of shardings."""
        return StageChoice(self.shardings[before], self.shardings[inside], self.modes[inside])


def kinds_of(stages: Sequence[Stage]) -> list[int]:
    """A number for every stage; stages of equal cost, such as layers, share one."""
    numbers: dict[object, int] = {}
    return [numbers.setdefault(tuple(stage.__dict__.values())[1:], len(numbers)) for stage in stages]


def _rests(at: Sharding, stage: Stage, costs: Costs) -> bool:
    """Whether the code before a stage allows a sharding. Under None, a grid's ranks have their group's shares."""
    assert stage.rest is not None
    return (costs.held if at is None else at) in stage.rest and (at in costs.filled or not stage.rest_filled)
