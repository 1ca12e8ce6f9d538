"""The sharded dimension of every stage, chosen by dynamic programming over the stages in order.

The state after a stage is the layout in which its output lies. Between two stages the output moves to the layout of the
next one, directly or by way of a layout in which what stands between them can work::

    start -> stage 0 -> [rest] -> stage 1 -> ... -> end

Seconds add up along the way, so the best way to each layout is found from the best ways to all layouts one stage
earlier. Where memory binds, ways that are slower but keep less are carried along, and nothing is cut that could be part
of the best one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

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
    memory: bytes that the fullest rank keeps for backward.
    """

    stages: tuple[Stage, ...]
    choices: tuple[Choice, ...]
    costs: Costs
    start: Layout
    end: Layout
    seconds: float
    memory: float

    def moves(self) -> list[tuple[str, Layout, Layout, float]]:
        """Changes of layout in order: before which stage, from, to, global bytes."""
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
        return sum(src is not None for _, src, _, _ in self.moves())

    def bytes(self) -> float:
        """Bytes of a forward that the busiest rank sends, or receives if that is more, for changes of layout."""
        sent = [0.0] * self.costs.ranks
        for _, src, dst, size in self.moves():
            sent = [one + size * part for one, part in zip(sent, self.costs.sent(src, dst), strict=True)]
        return max(sent)

    def describe(self) -> str:
        """The stages with what is sharded in each, equal neighbours together, and the totals."""
        costs = self.costs
        kind = "a step" if costs.training else "a forward"
        lines = [
            f"{len(self.stages)} stages of {dict(costs.dims)} on {costs.ranks} ranks of {costs.hardware.name}: "
            f"{self.seconds * 1e3:.3g} ms {kind}, {self.exchanges} exchanges and {self.bytes() / 2**20:.3g} MiB for "
            f"changes of layout in a forward, {self.memory / 2**20:.3g} MiB kept"
        ]
        for stage, choice in zip(self.stages, self.choices, strict=True):
            by = f" by way of {choice.before or 'whole'}" if stage.rest is not None else ""
            waste = costs.largest[choice.layout] * costs.ranks if choice.layout is not None else costs.ranks
            lines.append(
                f"  {stage.name}: {choice.layout or 'whole'}{by}, {choice.mode}; the fullest rank has "
                f"{waste:.3g} of the mean"
            )
        return "\n".join([*lines, f"  end: {self.end or 'whole'}"])

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
) -> StagePlan:
    """The fastest way to run stages in order, by the model in `seqpar.dsp.stage`; for one batch shape.

    dims: global sizes of the dimensions that may be sharded. start: the layout of what comes in. end: layouts that what
    goes out may have, None for any. memory: bytes that a rank can keep for backward, by default what the hardware has.

    Raises: ValueError for unknown dimensions, stages that no layout serves, or a memory that no way fits.
    """
    costs = Costs(dict(dims), ranks, Hardware.of(hardware), training)
    stages = tuple(stages)
    _check(stages, costs, start)
    if not set(() if end is None else end) <= set(costs.layouts):
        raise ValueError(f"end {end!r} is not among the dims {dict(dims)}")
    limit = memory if memory is not None else float(costs.hardware.memory - costs.hardware.reserve)
    wanted = set(costs.layouts if end is None else end)
    ends = [at for at in costs.layouts if at in wanted]
    best = _best(stages, costs, start, ends, math.inf)
    if best is not None and training and best.memory > limit:
        best = _best(stages, costs, start, ends, limit)
    if best is None:
        raise ValueError(
            f"no way to run {[stage.name for stage in stages][:8]} on {ranks} ranks from {start!r} to {ends} fits "
            f"{limit:.4g} bytes; a stage that needs all dimensions whole needs heads, or the memory of a copy"
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
        held = tuple(_at_rest(stage, dim, first=n == 0) for n, stage in enumerate(stages))
        if all(stage.rest is None or dim in stage.rest for stage in stages):
            found.setdefault("dsp", []).append(_best(held, costs, None, (None,), math.inf, modes=("local",)))
        for mode in ("ulysses", "ring"):
            way = _best(stages, costs, None, (None,), math.inf, modes=("local", mode), layouts=(dim,))
            found.setdefault(mode, []).append(way)
    found["replicate"] = [_best(stages, costs, None, (None,), math.inf, layouts=(None,))]
    ways = {name: [way for way in several if way is not None] for name, several in found.items()}
    return {name: min(several, key=lambda way: way.seconds) for name, several in ways.items() if several}


def _at_rest(stage: Stage, dim: str, *, first: bool) -> Stage:
    return Stage(**{**stage.__dict__, "rest": None if first else frozenset([dim])})


def _check(stages: Sequence[Stage], costs: Costs, start: Layout) -> None:
    if not stages or costs.ranks < 1:
        raise ValueError(f"plan_stages takes stages and at least one rank, got {len(stages)} and {costs.ranks}")
    known = set(costs.layouts)
    for stage in stages:
        if unknown := (stage.whole | (stage.rest or set())) - known:
            raise ValueError(f"stage {stage.name} names {sorted(map(str, unknown))}, the dims are {dict(costs.dims)}")
    if start not in known:
        raise ValueError(f"start {start!r} is not among the dims {dict(costs.dims)}")


class _Way(NamedTuple):
    """One way up to a layout: seconds, memory, the last choice and the way before it."""

    seconds: float
    memory: float
    choice: Choice | None
    before: _Way | None


def _best(
    stages: Sequence[Stage], costs: Costs, start: Layout, ends: Sequence[Layout], limit: float, *,
    modes: Sequence[str] = MODES, layouts: Sequence[Layout] | None = None,
) -> StagePlan | None:  # fmt: skip
    """The fastest way that keeps at most `limit`; modes and layouts: those that may be used."""
    ways: dict[Layout, list[_Way]] = {start: [_Way(0.0, 0.0, None, None)]}
    size = stages[0].bytes
    for stage in stages:
        reached: dict[Layout, list[_Way]] = {}
        for layout in costs.layouts if layouts is None else layouts:
            options = {mode: took for mode, took in costs.modes(stage, layout).items() if mode in modes}
            if options:
                mode = min(options, key=options.__getitem__)
                kept = costs.memory(stage, layout)
                arrived = _arrivals(ways, stage, layout, size, costs, options[mode], kept, mode, limit)
                if front := _front(arrived, limit):
                    reached[layout] = front
        ways, size = reached, stage.bytes
    last = [
        (way.seconds + costs.moves[at, end].seconds(size), way, end)
        for at, several in ways.items() for way in several for end in ends
    ]  # fmt: skip
    if not last:
        return None
    seconds, way, end = min(last, key=lambda each: each[0])
    choices, at = [], way
    while at.choice is not None and at.before is not None:
        choices.append(at.choice)
        at = at.before
    return StagePlan(tuple(stages), tuple(reversed(choices)), costs, start, end, seconds, way.memory)


def _arrivals(
    ways: Mapping[Layout, Sequence[_Way]], stage: Stage, layout: Layout, size: float, costs: Costs, took: float,
    kept: float, mode: str, limit: float,
) -> list[_Way]:  # fmt: skip
    """Every way to run a stage in a layout; size: bytes of what comes out of the stage before."""
    moves, found = costs.moves, []
    # in the order of the layouts: that of a set differs from process to process, and equal ways must be cut alike
    for rest in (layout,) if stage.rest is None else [at for at in costs.layouts if at in stage.rest]:
        entry = moves[rest, layout].seconds(stage.bytes) + took
        choice = Choice(rest, layout, mode)
        for at, several in ways.items():
            step = entry + moves[at, rest].seconds(size)
            for way in several:
                if way.memory + kept <= limit:
                    found.append(_Way(way.seconds + step, way.memory + kept, choice, way))
    return found


def _front(ways: list[_Way], limit: float) -> list[_Way]:
    """Those that no other one beats, in seconds and, where memory binds, in memory."""
    if limit == math.inf:
        return [min(ways)] if len(ways) == 1 else [min(ways, key=lambda way: way.seconds)] if ways else []
    front: list[_Way] = []
    for way in sorted(ways, key=lambda way: way[:2]):
        if not front or way.memory < front[-1].memory:
            front.append(way)
    return front
