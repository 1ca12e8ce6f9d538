"""Whatever a planner chooses, the numbers are those of one process: random layouts, rests and modes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from seqpar.comm import Comm
from seqpar.dsp import Spec, StagePlan, parallelize
from seqpar.dsp.planner import Choice
from seqpar.dsp.stage import Costs
from seqpar.testing import run_threads
from tests.dsp.models import FREE, PAIRS, WEATHER, DiT, PairStack, Weather, compared, dit, gradients, made


def at_random(seed: int) -> Callable[..., StagePlan]:
    """A planner that takes any way that can be run."""

    def planner(stages, dims, ranks, *, end, training):
        rng, costs = random.Random(seed), Costs(dict(dims), ranks, FREE, training)
        choices, filled = [], [at for at in costs.layouts if at in costs.filled]
        for stage in stages:
            ways = [(layout, mode) for layout in costs.layouts for mode in costs.modes(stage, layout)]
            layout, mode = rng.choice(ways)
            rests = [layout] if stage.rest is None else [at for at in filled if at in stage.rest]
            choices.append(Choice(rng.choice(rests), layout, mode))
        return StagePlan(
            tuple(stages), tuple(choices), costs, None, rng.choice([at for at in filled if at in end]), 0.0, 0.0
        )

    return planner


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def case(name: str) -> tuple[nn.Module, Spec, dict[str, Tensor]]:
    if name == "pairs":
        return made(PairStack), PAIRS, {"z": rand(2, 5, 5, 5), "mask": (rand(2, 5, 5, 1) > -1).double()}
    if name == "weather":
        return made(Weather), WEATHER, {"x": rand(2, 5, 7, 3)}
    return made(DiT, name == "verb"), dit(name == "verb"), {"x": rand(2, 3, 5, 3), "t": rand(2, 1)}


def on_a_rank(comm: Comm, name: str, seed: int) -> dict[str, Tensor]:
    model, spec, given = case(name)
    parallelize(model, comm, spec, planner=at_random(seed))
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
