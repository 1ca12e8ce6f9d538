"""The sharded dimension of every stage, chosen by dynamic programming over the stages in order.

The state after a stage is the layout in which its output lies. Between two stages the output moves to the layout of the
next one, directly or by way of a layout in which what stands between them can work::

    start -> stage 0 -> [rest] -> stage 1 -> ... -> end

Seconds add up along the way, so the best way to each layout is found from the best ways to all layouts one stage
earlier. Where memory binds, ways that are slower but keep less are carried along, and nothing is cut that could be part
of the best one.

So it is for every grid of ranks: each size of groups, holding each dimension whose mixing they can share. A grid whose
stages alone, moved for nothing, take longer than a plan that is known is left out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from seqpar.dsp.stage import MODES, Costs, Layout, Stage
from seqpar.planner import Hardware


class Choice(NamedTuple):
    """Of one stage: the layout that its input has before (its rest), the layout inside, and how the stage is run."""

    before: Layout
    layout: Layout
    mode: str


@dataclass(frozen=True)
class StagePlan:
    """How every stage is run, and what it takes.

    start, end: layouts that the model begins and ends in. seconds: modelled, of a step in training, else of a forward.
    memory: bytes that the fullest rank keeps for backward. gathers: the groups of a grid gather what they hold at the
    end. The grid is that of the costs.
    """

    stages: tuple[Stage, ...]
    choices: tuple[Choice, ...]
    costs: Costs
    start: Layout
    end: Layout
    seconds: float
    memory: float
    gathers: bool = False

    def moves(self) -> list[tuple[str, Layout, Layout, float]]:
        """Changes of layout in order: before which stage, from, to, global bytes; but for what the groups gather."""
        found, at, size = [], self.start, self.stages[0].bytes
        for stage, choice in zip(self.stages, self.choices, strict=True):
            for src, dst, moved in ((at, choice.before, size), (choice.before, choice.layout, stage.bytes)):
                if src != dst:
                    found.append((stage.name, src, dst, moved))
            at, size = choice.layout, stage.bytes
        return found + ([("end", at, self.end, size)] if at != self.end else [])

    @property
    def exchanges(self) -> int:
        """Exchanges of a forward for changes of layout: switches and gathers."""
        return sum(src is not None for _, src, _, _ in self.moves()) + self.gathers

    def bytes(self) -> float:
        """Bytes of a forward that the busiest rank sends, or receives if that is more, for changes of layout."""
        sent = sum(size * self.costs.sent(src, dst) for _, src, dst, size in self.moves())
        if self.gathers:
            sent = sent + self.stages[-1].bytes * self.costs.gathered()
        return float(np.max(sent))

    def describe(self) -> str:
        """The stages with what is sharded in each, equal neighbours together, and the totals."""
        costs = self.costs
        kind = "a step" if costs.training else "a forward"
        grid = f"a grid of {costs.groups} groups x {costs.core} of the " if costs.core > 1 else ""
        holding = f" ({costs.held} held in each group)" if costs.core > 1 else ""
        lines = [
            f"{len(self.stages)} stages of {dict(costs.dims)} on {grid}{costs.ranks} ranks of {costs.hardware.name}"
            f"{holding}: "
            f"{self.seconds * 1e3:.3g} ms {kind}, {self.exchanges} exchanges and {self.bytes() / 2**20:.3g} MiB for "
            f"changes of layout in a forward, {self.memory / 2**20:.3g} MiB kept"
        ]
        unsharded = "whole" if costs.held is None else f"{costs.held} alone"
        for stage, choice in zip(self.stages, self.choices, strict=True):
            by = f" by way of {choice.before or unsharded}" if stage.rest is not None else ""
            waste = costs.largest[choice.layout] * costs.ranks
            lines.append(
                f"  {stage.name}: {choice.layout or unsharded}{by}, {choice.mode}; the fullest rank has "
                f"{waste:.3g} of the mean"
            )
        return "\n".join([*lines, f"  end: {'whole' if self.gathers else self.end or unsharded}"])

    def plot(self, path: str | Path) -> None:
        """Write the picture; the file's suffix decides its format. Raises: ImportError without matplotlib."""
        from seqpar.dsp.plot import plot

        plot(self, path)


def plan_stages(
    stages: Sequence[Stage],
    dims: Mapping[str, int],
    ranks: int,
    *,
    hardware: str | Hardware = "h100",
    start: Layout = None,
    end: Iterable[Layout] | None = (None,),
    training: bool = True,
    memory: float | None = None,
    cores: Iterable[int] | None = None,
) -> StagePlan:
    """The fastest way to run stages in order, by the model in `seqpar.dsp.stage`; for one batch shape.

    dims: global sizes of the dimensions that may be sharded. start: the layout of what comes in. end: layouts that what
    goes out may have, None for any. memory: bytes that a rank can keep for backward, by default what the hardware has.
    cores: sizes of the groups of a grid that are tried, by default all divisors of the ranks; ``(1,)`` for no grid.

    Raises: ValueError for unknown dimensions, stages that no layout serves, or a memory that no way fits.
    """
    stages, hardware = tuple(stages), Hardware.of(hardware)
    costs = Costs(dict(dims), ranks, hardware, training)
    _check(stages, costs, start)
    wanted = set(costs.layouts if end is None else end)
    if not wanted <= set(costs.layouts):
        raise ValueError(f"end {end!r} is not among the dims {dict(dims)}")
    limit = memory if memory is not None and training else math.inf
    if memory is None and training:
        limit = float(hardware.memory - hardware.reserve)
    kinds = _kinds(stages)
    grids = [_Search(stages, grid, start, kinds=kinds) for grid in _grids(stages, costs, start, cores)]
    best: StagePlan | None = None
    # without a grid first, then those that promise most
    for search in grids[:1] + sorted(grids[1:], key=lambda search: search.unmoved):
        if best is None or (search.unmoved < best.seconds and search.least < best.seconds):
            ends, gathers = _ends(stages[-1], search.costs, wanted)
            way = search.best(ends, math.inf, gathers=gathers)
            if way is not None and way.memory > limit:
                way = search.best(ends, limit, gathers=gathers)
            if way is not None and (best is None or way.seconds < best.seconds):
                best = way
    if best is None:
        raise ValueError(
            f"no way to run {[stage.name for stage in stages][:8]} on {ranks} ranks from {start!r} to "
            f"{[at for at in costs.layouts if at in wanted]} fits {limit:.4g} bytes; a stage that needs all dimensions "
            "whole needs heads, or the memory of a copy"
        )
    return best


def rivals(
    stages: Sequence[Stage],
    dims: Mapping[str, int],
    ranks: int,
    *,
    hardware: str | Hardware = "h100",
    training: bool = True,
) -> dict[str, StagePlan]:
    """What methods without a planner take, each with the best dimension to hold; those that cannot be run are absent.

    From whole to whole, memory apart. dsp: hold one dimension, and switch around each stage that mixes it. ulysses,
    ring: hold one dimension throughout. replicate: nothing is sharded.
    """
    costs = Costs(dict(dims), ranks, Hardware.of(hardware), training)
    stages = tuple(stages)
    _check(stages, costs, None)
    found: dict[str, list[StagePlan | None]] = {}
    for dim in dims:
        held = stages[:1] + tuple(replace(stage, rest=frozenset([dim])) for stage in stages[1:])
        if all(stage.rest is None or dim in stage.rest for stage in stages):
            by_hand = _Search(held, costs, None, modes=("local",))
            found.setdefault("dsp", []).append(by_hand.best((None,), math.inf))
        for mode in ("ulysses", "ring"):
            search = _Search(stages, costs, None, modes=("local", mode), layouts=(dim,))
            found.setdefault(mode, []).append(search.best((None,), math.inf))
    found["replicate"] = [_Search(stages, costs, None, layouts=(None,)).best((None,), math.inf)]
    ways = {name: [way for way in several if way is not None] for name, several in found.items()}
    return {name: min(several, key=lambda way: way.seconds) for name, several in ways.items() if several}


def _check(stages: Sequence[Stage], costs: Costs, start: Layout) -> None:
    if not stages or costs.ranks < 1:
        raise ValueError(f"plan_stages takes stages and at least one rank, got {len(stages)} and {costs.ranks}")
    known = set(costs.layouts)
    for stage in stages:
        if unknown := (stage.whole | (stage.rest or set())) - known:
            raise ValueError(f"stage {stage.name} names {sorted(map(str, unknown))}, the dims are {dict(costs.dims)}")
    if start not in known:
        raise ValueError(f"start {start!r} is not among the dims {dict(costs.dims)}")


def _grids(stages: Sequence[Stage], costs: Costs, start: Layout, cores: Iterable[int] | None) -> Iterator[Costs]:
    """Costs without a grid, and on each grid whose held dimension everything between allows, and stages can share."""
    ranks, dims = costs.ranks, costs.dims
    # one group of all ranks is what Ulysses and ring are without a grid
    tried = [n for n in range(1, ranks + 1) if ranks % n == 0 and n in (1, *range(ranks))] if cores is None else cores
    for core in sorted(set(tried)):
        if core == 1:
            yield costs
        elif type(core) is not int or core < 1 or ranks % core:
            raise ValueError(f"groups of {core!r} do not divide {ranks} ranks; cores was {cores!r}")
        elif start is None:
            for dim, size in dims.items():
                rests = all(stage.rest is None or dim in stage.rest for stage in stages)
                if rests and size >= core and all(stage.heads for stage in stages if dim in stage.whole):
                    yield replace(costs, core=core, held=dim)


def _ends(last: Stage, costs: Costs, wanted: Collection[Layout]) -> tuple[list[Layout], bool]:
    """Layouts in which the last stage may leave off, and whether the groups of a grid gather after it."""
    gathers = costs.held is not None and costs.held not in wanted
    if gathers:
        return [None] if None in wanted else [], True
    ends = [at for at in costs.layouts if (costs.held if at is None else at) in wanted]
    return [at for at in ends if at in costs.filled or not last.rest_filled], False


# One way up to a layout: seconds, memory, the last choice and the way before it.
_Way = tuple[float, float, Choice | None, Any]


class _Steps(NamedTuple):
    """Ways to run a stage in one layout: its seconds, what it keeps, and from each layout before, all with the move."""

    inside: float
    kept: float
    coming: dict[Layout, tuple[float, Choice]]


class _Search:
    """Ways to run stages from a layout on one grid; modes and layouts: those that may be used; kinds: of the stages."""

    def __init__(
        self, stages: Sequence[Stage], costs: Costs, start: Layout, *, modes: Sequence[str] = MODES,
        layouts: Sequence[Layout] | None = None, kinds: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.stages, self.costs, self.start, self.modes = tuple(stages), costs, start, modes
        self.layouts = costs.layouts if layouts is None else layouts
        self.kinds = _kinds(stages) if kinds is None else kinds
        self.pairs = list(zip([-1, *self.kinds], self.kinds))

    @cached_property
    def steps(self) -> dict[tuple[int, int], dict[Layout, _Steps]]:
        """Ways to run a stage of one kind after one of another."""
        found: dict[tuple[int, int], dict[Layout, _Steps]] = {}
        for n, (pair, stage) in enumerate(zip(self.pairs, self.stages, strict=True)):
            if pair not in found:
                found[pair] = self._steps(stage, self.stages[max(0, n - 1)].bytes)
        return found

    @cached_property
    def unmoved(self) -> float:
        """Seconds that no way undercuts: each stage in its best layout, moved for nothing."""
        least: dict[int, float] = {}
        for kind, stage in zip(self.kinds, self.stages, strict=True):
            if kind not in least:
                options = [took for at in self.layouts for took in self.costs.modes(stage, at).values()]
                least[kind] = min(options, default=math.inf)
        return sum(least[kind] for kind in self.kinds)

    def _steps(self, stage: Stage, size: float) -> dict[Layout, _Steps]:
        """Every layout in which a stage can be run; size: bytes of what comes out of the stage before."""
        costs, found = self.costs, {}
        first = {pair: move.seconds(size) for pair, move in costs.moves.items()}
        for layout in self.layouts:
            options = {mode: took for mode, took in costs.modes(stage, layout).items() if mode in self.modes}
            if options:
                mode = min(options, key=options.__getitem__)
                inside = options[mode]
                choice = Choice(layout, layout, mode)
                coming = {at: (first[at, layout] + inside, choice) for at in costs.layouts}
                if stage.rest is not None:
                    coming = self._by_way_of(stage, first, choice, inside)
                if coming:
                    found[layout] = _Steps(inside, costs.memory(stage, layout), coming)
        return found

    def _by_way_of(
        self, stage: Stage, first: Mapping[tuple[Layout, Layout], float], choice: Choice, inside: float
    ) -> dict[Layout, tuple[float, Choice]]:
        """The best of the layouts that what stands before a stage allows, from each layout before that."""
        costs, layout = self.costs, choice.layout
        # in the order of the layouts: sets differ from process to process, and equal ways are cut alike
        ways = [
            (rest, costs.moves[rest, layout].seconds(stage.bytes) + inside, choice._replace(before=rest))
            for rest in costs.layouts if _rests(rest, stage, costs)
        ]  # fmt: skip
        return {
            at: min([(first[at, rest] + second, choice) for rest, second, choice in ways], key=itemgetter(0))
            for at in costs.layouts if ways
        }  # fmt: skip

    @cached_property
    def least(self) -> float:
        """The same, closer: each stage's time is halved between the two moves beside it."""
        known: dict[tuple[int, int], float] = {}
        before: dict[Layout, _Steps] = {}
        total = 0.0
        for pair in self.pairs:
            steps = self.steps[pair]
            if pair not in known:
                halves = {at: each.inside / 2 for at, each in before.items()} or {self.start: 0.0}
                known[pair] = min(
                    (
                        half + each.coming[at][0] - each.inside / 2
                        for each in steps.values()
                        for at, half in halves.items()
                    ),
                    default=math.inf,
                )
            total, before = total + known[pair], steps
        return total + min((each.inside / 2 for each in before.values()), default=math.inf)

    def best(self, ends: Sequence[Layout], limit: float, *, gathers: bool = False) -> StagePlan | None:
        """The fastest way that keeps at most `limit`; gathers: the groups do, at the end."""
        ways: dict[Layout, list[_Way]] = {self.start: [(0.0, 0.0, None, None)]}
        for pair in self.pairs:
            reached: dict[Layout, list[_Way]] = {}
            for layout, (_, kept, coming) in self.steps[pair].items():
                arrived = [
                    (way[0] + coming[at][0], way[1] + kept, coming[at][1], way)
                    for at, several in ways.items() for way in several if way[1] + kept <= limit
                ]  # fmt: skip
                if front := _front(arrived, limit):
                    reached[layout] = front
            ways = reached
        costs, size = self.costs, self.stages[-1].bytes
        left = costs.gather.seconds(size) if gathers else 0.0
        last = [
            (way[0] + costs.moves[at, end].seconds(size) + left, way, end)
            for at, several in ways.items() for way in several for end in ends
        ]  # fmt: skip
        if not last:
            return None
        seconds, way, end = min(last, key=itemgetter(0))
        choices, memory = [], way[1]
        while (choice := way[2]) is not None:
            choices.append(choice)
            way = way[3]
        choices.reverse()
        return StagePlan(self.stages, tuple(choices), costs, self.start, end, seconds, memory, gathers)


def _kinds(stages: Sequence[Stage]) -> list[int]:
    """A number for every stage; those that cost the same, as layers do, have the same one."""
    numbers: dict[object, int] = {}
    return [numbers.setdefault(tuple(stage.__dict__.values())[1:], len(numbers)) for stage in stages]


def _rests(at: Layout, stage: Stage, costs: Costs) -> bool:
    """Whether what stands before a stage allows a layout; under None a grid's ranks have what their group holds."""
    assert stage.rest is not None
    return (costs.held if at is None else at) in stage.rest and (at in costs.filled or not stage.rest_filled)


def _front(ways: list[_Way], limit: float) -> list[_Way]:
    """Those that no other one beats, in seconds and, where memory binds, in memory."""
    if limit == math.inf:
        return [min(ways, key=itemgetter(0))] if ways else []
    front: list[_Way] = []
    for way in sorted(ways, key=itemgetter(0, 1)):
        if not front or way[1] < front[-1][1]:
            front.append(way)
    return front
