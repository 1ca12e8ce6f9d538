"""Models on grids of ranks: groups share what mixes the dimension that they hold, and the ranks across switch."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from seqpar.comm import Comm
from seqpar.dsp import Space, StagePlan, parallelize, plan_stages
from seqpar.dsp.costs import Costs
from seqpar.dsp.grid import Grid
from seqpar.dsp.plan import StageChoice
from seqpar.testing import run_processes, run_threads
from tests.dsp.cases import Case, case, rand
from tests.dsp.models import FREE, compared, gradients


def on_grid(core: int, held: str, seed: int) -> Callable[..., StagePlan]:
    """A planner that takes any way that can be run on a grid."""

    def planner(stages, dims, ranks, *, end, training):
        rng, costs = random.Random(seed), Costs(dict(dims), ranks, FREE, training, core, held)
        choices = []
        for stage in stages:
            ways = [(layout, mode) for layout in costs.shardings for mode in costs.modes(stage, layout)]
            layout, mode = rng.choice(ways)
            rests = [layout] if stage.rest is None else [at for at in filled(costs) if (at or held) in stage.rest]
            choices.append(StageChoice(rng.choice(rests), layout, mode))
        ends = [at for at in filled(costs) if (at or held) in end] if held in end else [None]
        return StagePlan(tuple(stages), tuple(choices), costs, None, rng.choice(ends), 0.0, 0.0)

    return planner


def filled(costs: Costs) -> list[str | None]:
    """Layouts in which every rank has rows, in an order that every process has."""
    return [at for at in costs.shardings if at in costs.filled]


def small(name: str) -> Case:
    return case(name, 2, 3, 6) if name.startswith("latte") else case(name, 5)


def on_a_rank(comm: Comm, name: str, planner: Callable[..., StagePlan] | None) -> tuple[dict[str, Tensor], str]:
    model, spec, given = small(name)
    handle = parallelize(model, comm, spec, plan=planner or partial(plan_stages, hardware=FREE))
    return gradients(model, given), handle.describe()


def alone(name: str) -> dict[str, Tensor]:
    if name == "verb":  # which needs a plan around it also on one rank
        return run_threads(1, on_a_rank, name, None)[0][0]
    model, _, given = small(name)
    return gradients(model, given)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    "name, ranks, core, held",
    [("pairs", 4, 2, "b"), ("pairs", 6, 3, "b"), ("weather", 4, 2, "b"), ("weather", 8, 4, "b"),
     ("latte", 4, 2, "s"), ("latte", 6, 3, "s"), ("latte", 8, 2, "s"), ("latte checkpointed", 8, 2, "s"),
     ("core", 4, 2, "s"), ("core", 6, 3, "t"), ("core", 8, 4, "b"),
     ("verb", 4, 2, "s"), ("verb", 6, 3, "t"), ("verb", 8, 4, "b")],
)  # fmt: skip
@pytest.mark.sampled(5)
def test_forward_and_all_gradients_are_those_of_one_process(name, ranks, core, held, seed) -> None:
    found = run_threads(ranks, on_a_rank, name, on_grid(core, held, seed))
    compared([numbers for numbers, _ in found], alone(name))
    assert f"a grid of {ranks // core} groups x {core} of the {ranks} ranks" in found[0][1]
    assert f"({held} held in each group)" in found[0][1]


def test_it_is_so_on_processes() -> None:
    compared([numbers for numbers, _ in run_processes(4, processed)], alone("core"))


def processed(comm: Comm) -> tuple[dict[str, Tensor], str]:
    return on_a_rank(comm, "core", on_grid(2, "s", 0))


def planned(comm: Comm) -> tuple[dict[str, Tensor], str]:
    return on_a_rank(comm, "latte", partial(plan_stages, hardware=FREE, cores=(2, 3)))


def test_a_planned_grid() -> None:
    found = run_threads(6, planned)
    assert " on a grid of " in found[0][1] and "(s held in each group)" in found[0][1]
    compared([numbers for numbers, _ in found], alone("latte"))


def places(comm: Comm) -> None:
    """Tensors in every place of a grid: the share of a table is the share of rows, and gathers give the whole."""
    form, grid = "b t s c", Grid(Space({"b": 2, "t": 3, "s": 5}, comm), 2, "s")
    x = rand(2, 3, 5, 4)
    at, (here,) = (None, None), [x]
    for layout in ("t", "s", None, "b", "s", "t"):
        (here,) = grid.move([here], [form], at, (layout, "s"))
        at = layout, "s"
        grid.check(here, form, at, "x")
        assert torch.equal(here, grid.share_of(x, form, layout, "x"))
        table = grid.share_of(x[:1, :1], "1 1 s c", layout, "a table")
        assert table.shape[2] == here.shape[2]
        assert torch.equal(grid.gather(here, form, layout, ("b", "t", "s")), x)
        assert grid.gather(here, form, layout, ("s",)).shape[2] == 5
    (back,) = grid.move([here], [form], at, (None, None))
    assert torch.equal(back, x)
    with pytest.raises(ValueError, match="does not fit the form|must have"):
        grid.check(x, form, at, "x")


def test_places_of_a_grid() -> None:
    run_threads(4, places)
