"""Whatever a planner chooses, the numbers are those of one process: random layouts, rests and modes, and grids.

On a grid groups share what mixes the dimension that they hold, and the ranks across switch.
"""

from __future__ import annotations

from functools import partial

import pytest
from torch import Tensor

from seqpar.comm import Comm
from seqpar.dsp import Space, parallelize, plan_stages
from seqpar.dsp.grid import Grid
from seqpar.testing import run_processes, run_threads
from tests.dsp.cases import rand, small
from tests.dsp.models import FREE, compared, gradients
from tests.dsp.planners import Planner, at_random


def on_a_rank(comm: Comm, name: str, planner: Planner) -> tuple[dict[str, Tensor], str]:
    """Output and gradients, and what the plan says of itself."""
    model, spec, given = small(name)
    if comm.size == 1 and name != "verb":  # which calls attention with a plan
        return gradients(model, given), ""
    handle = parallelize(model, comm, spec, plan=planner if comm.size > 1 else partial(plan_stages, hardware=FREE))
    return gradients(model, given), handle.describe()


def check(found: list[tuple[dict[str, Tensor], str]], name: str, planner: Planner) -> None:
    ((want, _),) = run_threads(1, on_a_rank, name, planner)
    compared([numbers for numbers, _ in found], want)


# model, ranks, how many of them share attention inside a stage, and what is sharded meanwhile
SHAPES = [
    ("pairs", 2, 1, None), ("pairs", 4, 1, None), ("pairs", 8, 1, None), ("pairs", 6, 3, "b"), ("pairs", 4, 2, "b"),
    ("weather", 2, 1, None), ("weather", 3, 1, None), ("weather", 4, 1, None), ("weather", 6, 2, "b"),
    ("weather", 8, 4, "b"), ("latte", 2, 1, None), ("latte", 3, 1, None), ("latte", 8, 2, "s"), ("latte", 6, 3, "s"),
    ("latte checkpointed", 4, 1, None), ("latte checkpointed", 8, 2, "s"),
    ("core", 3, 1, None), ("core", 4, 2, "t"), ("core", 6, 2, "s"), ("core", 8, 4, "b"),
    ("verb", 4, 2, "s"), ("verb", 6, 3, "t"), ("verb", 8, 4, "b"),
]  # fmt: skip


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name, ranks, core, held", SHAPES)
@pytest.mark.sampled(5)
def test_random_plans_and_grids(name, ranks, core, held, seed) -> None:
    planner = at_random(seed, core, held)
    found = run_threads(ranks, on_a_rank, name, planner)
    check(found, name, planner)
    if held is not None:
        assert f"a grid of {ranks // core} groups x {core} of the {ranks} ranks" in found[0][1]
        assert f"({held} held in each group)" in found[0][1]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", ["pairs", "weather", "core", "verb"])
@pytest.mark.sampled(7)
def test_random_plans_on_more_ranks(name, seed) -> None:
    check(run_threads(2 + seed % 4, on_a_rank, name, at_random(seed)), name, at_random(seed))


def by_seed(comm: Comm, name: str, *grid: object) -> tuple[dict[str, Tensor], str]:
    return on_a_rank(comm, name, at_random(1, *grid))


@pytest.mark.parametrize("comm", ["gloo", "shm"])
@pytest.mark.sampled(2)
def test_processes(comm) -> None:
    check(run_processes(3, by_seed, "weather", comm=comm), "weather", at_random(1))
    check(run_processes(4, by_seed, "core", 2, "s", comm=comm), "core", at_random(1))


def test_a_planned_grid() -> None:
    planner = partial(plan_stages, hardware=FREE, cores=(2, 3))
    found = run_threads(6, on_a_rank, "latte", planner)
    assert " on a grid of " in found[0][1] and "(s held in each group)" in found[0][1]
    check(found, "latte", planner)


def places(comm: Comm) -> None:
    """Tensors in every place of a grid: the share of a table is the share of rows, and gathers give the whole."""
    form, grid = "b t s c", Grid(Space({"b": 2, "t": 3, "s": 5}, comm), 2, "s")
    x = rand(2, 3, 5, 4)
    at, (here,) = (None, None), [x]
    for layout in ("t", "s", None, "b", "s", "t"):
        (here,) = grid.move([here], [form], at, (layout, "s"))
        at = layout, "s"
        grid.check(here, form, at, "x")
        assert here.equal(grid.share_of(x, form, layout, "x"))
        table = grid.share_of(x[:1, :1], "1 1 s c", layout, "a table")
        assert table.shape[2] == here.shape[2]
        assert grid.gather(here, form, layout, ("b", "t", "s")).equal(x)
        assert grid.gather(here, form, layout, ("s",)).shape[2] == 5
    (back,) = grid.move([here], [form], at, (None, None))
    assert back.equal(x)
    with pytest.raises(ValueError, match="does not fit the form|must have"):
        grid.check(x, form, at, "x")


def test_places_of_a_grid() -> None:
    run_threads(4, places)
