"""Whatever a planner chooses, the numbers are those of one process: random layouts, rests and modes."""

from __future__ import annotations

import pytest
from torch import Tensor

from seqpar.comm import Comm
from seqpar.dsp import parallelize
from seqpar.testing import run_processes, run_threads
from tests.dsp.cases import small
from tests.dsp.models import compared, gradients
from tests.dsp.planners import Planner, at_random


def on_a_rank(comm: Comm, name: str, planner: Planner) -> dict[str, Tensor]:
    model, spec, given = small(name)
    if comm.size > 1 or name == "verb":  # which calls attention with a plan
        parallelize(model, comm, spec, plan=planner)
    return gradients(model, given)


# model, ranks, how many of them share attention inside a stage, and what is sharded meanwhile
SHAPES = [
    ("pairs", 2, 1, None), ("pairs", 4, 1, None), ("pairs", 8, 1, None), ("pairs", 6, 3, "b"),
    ("weather", 2, 1, None), ("weather", 3, 1, None), ("weather", 4, 1, None), ("weather", 6, 2, "b"),
    ("latte", 2, 1, None), ("latte", 3, 1, None), ("latte", 8, 2, "s"), ("latte checkpointed", 4, 1, None),
    ("core", 3, 1, None), ("core", 4, 2, "t"), ("core", 6, 2, "s"),
]  # fmt: skip


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name, ranks, core, held", SHAPES)
@pytest.mark.sampled(7)
def test_random_plans_and_grids(name, ranks, core, held, seed) -> None:
    planner = at_random(seed, core, held)
    (want,) = run_threads(1, on_a_rank, name, planner)
    compared(run_threads(ranks, on_a_rank, name, planner), want)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", ["pairs", "weather", "core", "verb"])
@pytest.mark.sampled(7)
def test_random_plans_on_more_ranks(name, seed) -> None:
    planner = at_random(seed)
    (want,) = run_threads(1, on_a_rank, name, planner)
    compared(run_threads(2 + seed % 4, on_a_rank, name, planner), want)


def by_seed(comm: Comm, name: str) -> dict[str, Tensor]:
    return on_a_rank(comm, name, at_random(1))


@pytest.mark.parametrize("comm", ["gloo", "shm"])
@pytest.mark.sampled(2)
def test_processes(comm) -> None:
    for name in ("weather", "core"):
        (want,) = run_threads(1, by_seed, name)
        compared(run_processes(3, by_seed, name, comm=comm), want)
