"""Planners for tests: ways that can be run, chosen at random or by hand."""

from __future__ import annotations

import random
from collections.abc import Callable

from seqpar.dsp import StagePlan
from seqpar.dsp.costs import Costs
from seqpar.dsp.plan import StageChoice
from tests.dsp.models import FREE

Planner = Callable[..., StagePlan]


def at_random(seed: int, core: int = 1, held: str | None = None) -> Planner:
    """A planner that takes any way that can be run, mostly one in which every stage moves its tensors on both sides."""

    def planner(stages, dims, ranks, *, end, training):
        rng, costs = random.Random(seed), Costs(dict(dims), ranks, FREE, training, core, held)
        filled = [at for at in costs.shardings if at in costs.filled]

        def taken(ways: list, wanted: Callable[..., bool]) -> object:
            return rng.choice([way for way in ways if wanted(way)] * 9 + ways)

        ways = [[(at, mode) for at in costs.shardings for mode in costs.modes(stage, at)] for stage in stages]
        inside = [
            taken(each, lambda way, stage=stage: way[0] is not None and way[0] not in stage.whole)
            for stage, each in zip(stages, ways, strict=True)
        ]
        befores = [
            costs.shardings
            if stage.rest is None
            else [at for at in filled if (held if at is None else at) in stage.rest]
            for stage in stages
        ]
        ends = [at for at in filled if (held if at is None else at) in end] if held is None or held in end else [None]
        edges = [None]
        for n, each in enumerate([*befores[1:], ends], 1):
            beside = {None, *(layout for layout, _ in inside[n - 1 : n + 1])}
            edges.append(taken(list(each), lambda at, beside=beside: at not in beside))
        choices = [StageChoice(at, layout, mode) for at, (layout, mode) in zip(edges, inside, strict=False)]
        return StagePlan(tuple(stages), tuple(choices), costs, None, edges[-1], 0.0, 0.0)

    return planner


def planned(stages, dims, ranks, training, choices: list[tuple[str | None, str | None, str]], end=None) -> StagePlan:
    """The plan of such choices: before and inside of each stage, and how it is computed. end: of the output."""
    costs = Costs(dict(dims), ranks, FREE, training)
    return StagePlan(tuple(stages), tuple(StageChoice(*each) for each in choices), costs, None, end, 0.0, 0.0)


def by_hand(stages, dims, ranks, *, end, training) -> StagePlan:
    """Between stages the batch is sharded, inside what they do not mix."""
    inside = ["w" if "h" in stage.whole else "h" for stage in stages]
    choices = [("b" if n else None, layout, "local") for n, layout in enumerate(inside)]
    return planned(stages, dims, ranks, training, choices, "b")


def by_batch(stages, dims, ranks, *, end, training) -> StagePlan:
    """Stages that share the batch, of which a rank may have nothing."""
    return planned(stages, dims, ranks, training, [(None, "b", "local")] * len(stages))


def on_every_rank(stages, dims, ranks, *, end, training) -> StagePlan:
    """A plan that shares nothing: every rank computes all rows."""
    return planned(stages, dims, ranks, training, [(None, None, "local")] * len(stages))


def by_heads(stages, dims, ranks, *, end, training) -> StagePlan:
    """Space sharded throughout, so that spatial attention is shared by heads, whatever the stages allow."""
    choices = [("s", "s", "ulysses" if "s" in stage.whole else "local") for stage in stages]
    return planned(stages, dims, ranks, training, choices, "s")
