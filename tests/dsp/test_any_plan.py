"""Whatever a planner chooses, the numbers are those of one process: random layouts, rests and modes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from torch import Tensor

from seqpar.comm import Comm
from seqpar.dsp import StagePlan, parallelize
from seqpar.dsp.costs import Costs
from seqpar.dsp.plan import StageChoice
from seqpar.testing import run_threads
from tests.dsp.cases import case
from tests.dsp.models import FREE, compared, gradients


def at_random(seed: int) -> Callable[..., StagePlan]:
    """A planner that takes any way that can be run."""

    def planner(stages, dims, ranks, *, end, training):
        rng, costs = random.Random(seed), Costs(dict(dims), ranks, FREE, training)
        choices, filled = [], [at for at in costs.shardings if at in costs.filled]
        for stage in stages:
            ways = [(layout, mode) for layout in costs.shardings for mode in costs.modes(stage, layout)]
            layout, mode = rng.choice(ways)
            rests = [layout] if stage.rest is None else [at for at in filled if at in stage.rest]
            choices.append(StageChoice(rng.choice(rests), layout, mode))
        return StagePlan(
            tuple(stages), tuple(choices), costs, None, rng.choice([at for at in filled if at in end]), 0.0, 0.0
        )

    return planner


def on_a_rank(comm: Comm, name: str, seed: int) -> dict[str, Tensor]:
    model, spec, given = case(name)
    parallelize(model, comm, spec, plan=at_random(seed))
    return gradients(model, given)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", ["pairs", "weather", "core", "verb"])
def test_any_plan_gives_the_numbers_of_one_process(name, seed) -> None:
    if name == "verb":
        (want,) = run_threads(1, on_a_rank, name, seed)
    else:
        model, _, given = case(name)
        want = gradients(model, given)
    compared(run_threads(2 + seed % 4, on_a_rank, name, seed), want)
