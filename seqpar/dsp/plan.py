"""The sharded dimension of every stage, chosen by dynamic programming over the stages in order.

The state before a stage is the sharding of its input, one that the code before the stage allows. A stage moves its
tensors from that sharding to the one in which it runs, and on to the sharding of the next stage's input::

    start -> [stage 0] -> rest -> [stage 1] -> rest -> ... -> end

Seconds add up along the way, so the best way follows from the best ways through fewer stages (`seqpar.dsp.search`).

The search runs for every grid of ranks: each group size, holding each dimension whose mixing groups can share. A grid
is skipped if its stages alone, without moves, take longer than the best plan so far.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from seqpar.dsp.costs import Costs, Stage, StageChoice
from seqpar.dsp.search import Search, kinds_of
from seqpar.dsp.space import Sharding
from seqpar.facts.drawing import picture
from seqpar.facts.value import integer
from seqpar.planner import Hardware


@dataclass(frozen=True)
class StagePlan:
    """How every stage runs, and its cost.

    start, end: the shardings before the first stage and after the last. seconds: modelled, of a training step or of a
    forward. memory: bytes that the most loaded rank keeps for backward. gathers: a grid's groups gather the held
    dimension at the end. `costs` has the grid.
    """

    stages: tuple[Stage, ...]
    choices: tuple[StageChoice, ...]
    costs: Costs
    start: Sharding
    end: Sharding
    seconds: float
    memory: float
    gathers: bool = False

    def moves(self) -> list[tuple[str, Sharding, Sharding, float]]:
        """Changes of sharding in order: (stage after it, from, to, global bytes), without the gathers of groups."""
        moves, at, size = [], self.start, self.stages[0].bytes
        for stage, choice in zip(self.stages, self.choices, strict=True):
            for src, dst, moved in ((at, choice.before, size), (choice.before, choice.sharding, stage.bytes)):
                if src != dst:
                    moves.append((stage.name, src, dst, moved))
            at, size = choice.sharding, stage.bytes
        return moves + ([("end", at, self.end, size)] if at != self.end else [])

    @property
    def afters(self) -> list[Sharding]:
        """The sharding of each stage's output."""
        return [*(choice.before for choice in self.choices[1:]), self.end]

    @property
    def exchanges(self) -> int:
        """Exchanges of a forward for changes of sharding: switches and gathers."""
        return sum(src is not None for _, src, _, _ in self.moves()) + self.gathers

    def bytes(self) -> float:
        """Bytes of a forward's changes of sharding that the busiest rank sends or receives, whichever is more."""
        sent = sum(size * self.costs.sent(src, dst) for _, src, dst, size in self.moves())
        if self.gathers:
            sent = sent + self.stages[-1].bytes * self.costs.gathered()
        return float(np.max(sent))

    def describe(self) -> str:
        """The stages with their sharded dimension, equal neighbours together, and the totals."""
        costs = self.costs
        kind = "a step" if costs.training else "a forward"
        grid = f"a grid of {costs.groups} groups x {costs.core} of the " if costs.core > 1 else ""
        holding = f" ({costs.held} held in each group)" if costs.core > 1 else ""
        lines = [
            f"{len(self.stages)} stages of {dict(costs.dims)} on {grid}{costs.ranks} ranks of {costs.hardware.name}"
            f"{holding}: "
            f"{self.seconds * 1e3:.3g} ms {kind}, {self.exchanges} exchanges and {self.bytes() / 2**20:.3g} MiB "
            f"for changes of sharding in a forward, {self.memory / 2**20:.3g} MiB kept"
        ]
        unsharded = "whole" if costs.held is None else f"{costs.held} alone"
        for stage, choice in zip(self.stages, self.choices, strict=True):
            by = f" by way of {choice.before or unsharded}" if stage.rest is not None else ""
            waste = costs.largest[choice.sharding] * costs.ranks
            lines.append(
                f"  {stage.name}: {choice.sharding or unsharded}{by}, {choice.mode}; the most loaded rank "
                f"has {waste:.3g}x the average"
            )
        return "\n".join([*lines, f"  end: {'whole' if self.gathers else self.end or unsharded}"])

    def plot(self, path: str | Path) -> None:
        """Write the picture; the file's suffix decides its format. Raises: ImportError without matplotlib."""
        size = (max(6.0, min(24.0, 2 + 0.35 * len(self.stages))), 4.5)
        with picture("StagePlan.plot", path, size, {}) as figure:
            _draw(self, figure.subplots())


def plan_stages(
    stages: Sequence[Stage],
    dims: Mapping[str, int],
    ranks: int,
    *,
    hardware: str | Hardware = "h100",
    start: Sharding = None,
    end: Iterable[Sharding] | None = (None,),
    training: bool = True,
    memory: float | None = None,
    cores: Iterable[int] | None = None,
) -> StagePlan:
    """The fastest way to run stages in order, by the model in `seqpar.dsp.costs`; for one batch shape.

    dims: global sizes of the dimensions that may be sharded. start: the sharding of the input. end: shardings that the
    output may have; None allows any. memory: bytes that a rank can keep for backward, by default the hardware's. cores:
    group sizes of the grids to try, by default all divisors of the ranks; ``(1,)`` means no grid.

    Raises: ValueError for unknown dimensions, stages without a possible sharding, or a memory limit that no plan meets.
    """
    stages, hardware = tuple(stages), Hardware.of(hardware)
    costs = Costs(_sizes(dims), integer("plan_stages: ranks", ranks, 1), hardware, training)
    _check(stages, costs, start)
    wanted = set(costs.shardings if end is None else end)
    if not wanted <= set(costs.shardings):
        raise ValueError(f"end {end!r} is not among the dims {dict(dims)}; give a tuple of these or None")
    limit = memory if memory is not None and training else math.inf
    if memory is None and training:
        limit = float(hardware.memory - hardware.reserve)
    kinds = kinds_of(stages)
    grids = [Search(stages, grid, start, kinds=kinds) for grid in _grids(stages, costs, start, cores)]
    best: StagePlan | None = None
    # without a grid first, then the most promising grids
    for search in grids[:1] + sorted(grids[1:], key=lambda search: search.unmoved):
        if best is None or search.unmoved < best.seconds:
            ends, gathers = _ends(stages[-1], search.costs, wanted)
            plan = _planned(search, ends, limit, gathers=gathers)
            if plan is not None and (best is None or plan.seconds < best.seconds):
                best = plan
    if best is None:
        raise ValueError(
            f"no way to run {[stage.name for stage in stages][:8]} on {ranks} ranks from {start!r} to "
            f"{[at for at in costs.shardings if at in wanted]} fits {limit:.4g} bytes; a stage that needs all "
            "dimensions whole needs heads, or the memory of a copy"
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
    """Seconds of methods without a planner, each with its best dimension to hold; a method that cannot run is missing.

    All go from whole to whole, with no limit of memory. dsp: hold one dimension, and switch around each stage that
    mixes it. ulysses, ring: hold one dimension throughout. replicate: shard nothing.
    """
    costs = Costs(_sizes(dims), integer("rivals: ranks", ranks, 1), Hardware.of(hardware), training)
    stages = tuple(stages)
    _check(stages, costs, None)
    tried: dict[str, list[StagePlan | None]] = {}
    for dim in dims:
        held = stages[:1] + tuple(replace(stage, rest=frozenset([dim])) for stage in stages[1:])
        if all(stage.rest is None or dim in stage.rest for stage in stages):
            tried.setdefault("dsp", []).append(_planned(Search(held, costs, None, modes=("local",)), (None,)))
        for mode in ("ulysses", "ring"):
            search = Search(stages, costs, None, modes=("local", mode), shardings=(dim,))
            tried.setdefault(mode, []).append(_planned(search, (None,)))
    tried["replicate"] = [_planned(Search(stages, costs, None, shardings=(None,)), (None,))]
    ways = {name: [way for way in several if way is not None] for name, several in tried.items()}
    return {name: min(several, key=lambda way: way.seconds) for name, several in ways.items() if several}


def _planned(
    search: Search, ends: Sequence[Sharding], limit: float = math.inf, *, gathers: bool = False
) -> StagePlan | None:
    """The fastest plan that keeps at most `limit` bytes. gathers: the grid's groups gather at the end."""
    route, costs = search.best(ends, limit), search.costs
    if route is None:
        return None
    gathering = costs.gather.seconds(search.stages[-1].bytes) if gathers else 0.0
    return StagePlan(
        search.stages, route.choices, costs, search.start, route.end, route.seconds + gathering, route.memory, gathers
    )


def _sizes(dims: Mapping[str, int]) -> dict[str, int]:
    return {name: integer(f"plan_stages: the size of {name}", size, 1) for name, size in dims.items()}


def _check(stages: Sequence[Stage], costs: Costs, start: Sharding) -> None:
    if not stages:
        raise ValueError("plan_stages: expected at least one stage, got none")
    known = set(costs.shardings)
    for stage in stages:
        if unknown := (stage.whole | (stage.rest or set())) - known:
            raise ValueError(
                f"stage {stage.name} names {sorted(map(str, unknown))}, the dims are {dict(costs.dims)}; add their "
                "sizes to dims, or leave them out of the stage"
            )
    if start not in known:
        raise ValueError(f"start {start!r} is not among the dims {dict(costs.dims)}; give one of these, or None")


def _grids(stages: Sequence[Stage], costs: Costs, start: Sharding, cores: Iterable[int] | None) -> Iterator[Costs]:
    """Costs without a grid, and on each grid whose held dimension stages can share and code between them allows."""
    ranks, dims = costs.ranks, costs.dims
    if not isinstance(cores, Iterable | None):
        raise ValueError(f"cores must be group sizes, such as (1, 2), got {cores!r}")
    # one group of all ranks is Ulysses or ring without a grid
    tried = [n for n in range(1, ranks + 1) if ranks % n == 0 and (n == 1 or n < ranks)] if cores is None else cores
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


def _ends(last: Stage, costs: Costs, wanted: Collection[Sharding]) -> tuple[list[Sharding], bool]:
    """Shardings in which the last stage may end, and whether a grid's groups gather after it."""
    gathers = costs.held is not None and costs.held not in wanted
    if gathers:
        return [None] if None in wanted else [], True
    ends = [at for at in costs.shardings if (costs.held if at is None else at) in wanted]
    return [at for at in ends if at in costs.filled or not last.rest_filled], False


COLOURS = ("#2563a8", "#e07b28", "#3a8f4f", "#7d5ba6", "#8c6248", "#1f9aa8", "#a3962b", "#cf6fa5")
WHOLE, MOVES, MUTED = "#aeb6c2", "#b5443f", "#6b7280"


def _draw(plan: StagePlan, axis: Any) -> None:
    from matplotlib.patches import Patch

    costs = plan.costs
    colours = {dim: COLOURS[n % len(COLOURS)] for n, dim in enumerate(costs.dims)} | {None: WHOLE}
    for n, (stage, choice, after) in enumerate(zip(plan.stages, plan.choices, plan.afters, strict=True)):
        inside = costs.modes(stage, choice.sharding)[choice.mode]
        ways = (choice.before, choice.sharding), (choice.sharding, after)
        shown = sum(costs.moves[way].seconds(stage.bytes) for way in ways)
        axis.bar(n, inside * 1e3, color=colours[choice.sharding], hatch="" if choice.mode == "local" else "//")
        axis.bar(n, shown * 1e3, bottom=inside * 1e3, color=MOVES)
    names = [stage.name for stage in plan.stages]
    if plan.gathers:
        axis.bar(len(names), costs.gather.seconds(plan.stages[-1].bytes) * 1e3, color=MOVES)
        names.append("end")
    axis.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
    axis.set(ylabel="milliseconds", title=plan.describe().splitlines()[0].split(": ")[0])
    keys = [Patch(color=colour, label=f"{dim or 'nothing'} sharded") for dim, colour in colours.items()]
    axis.legend(handles=[*keys, Patch(color=MOVES, label="changes of sharding")], fontsize=8, ncols=3)
    axis.spines[["top", "right"]].set_visible(False)
