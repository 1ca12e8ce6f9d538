"""Models with several sequence dimensions under `parallelize`, each without an edit: equal to one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from seqpar.comm import Comm
from seqpar.dsp import parallelize
from seqpar.testing import run_processes, run_threads
from tests.dsp.cases import case
from tests.dsp.models import SHARDED, compared, gradients


def on_a_rank(
    comm: Comm, name: str, batch: int, t: int = 5, s: int = 7
) -> tuple[dict[str, Tensor], list[tuple[str | None, str]]]:
    model, spec, given = case(name, batch, t, s)
    handle = parallelize(model, comm, spec, plan=SHARDED)
    found = gradients(model, given)
    (plan,) = handle.plans.values()
    return found, [(c.sharding, c.mode) for c in plan.choices]


def alone(name: str, batch: int, t: int = 5, s: int = 7) -> dict[str, Tensor]:
    model, spec, given = case(name, batch, t, s)
    if name == "verb":  # which needs a plan around it also on one rank
        return run_threads(1, on_a_rank, name, batch, t, s)[0][0]
    return gradients(model, given)


@pytest.mark.parametrize("ranks, batch", [(2, 1), (3, 2), (4, 1), (6, 2), (8, 1)])
@pytest.mark.parametrize("name", ["pairs", "weather", "core", "verb"])
@pytest.mark.sampled(3)
def test_forward_and_all_gradients_are_those_of_one_process(name, ranks, batch) -> None:
    found = run_threads(ranks, on_a_rank, name, batch)
    compared([rank for rank, _ in found], alone(name, batch))
    assert any(layout is not None for layout, _ in found[0][1])


@pytest.mark.parametrize("ranks, batch, t, s", [(2, 1, 1, 7), (3, 1, 1, 1), (4, 3, 2, 3), (6, 1, 1, 5), (8, 1, 3, 2)])
@pytest.mark.parametrize("name", ["pairs", "weather", "core", "verb"])
@pytest.mark.sampled(3)
def test_it_is_so_where_dimensions_are_shorter_than_the_ranks(name, ranks, batch, t, s) -> None:
    found = run_threads(ranks, on_a_rank, name, batch, t, s)
    compared([rank for rank, _ in found], alone(name, batch, t, s))


@pytest.mark.parametrize("name", ["pairs", "weather", "core", "verb"])
@pytest.mark.sampled(2)
def test_it_is_so_on_processes(name) -> None:
    compared([rank for rank, _ in run_processes(3, on_a_rank, name, 1)], alone(name, 1))


def test_the_verb_and_the_core_are_the_same_model() -> None:
    verb, core = alone("verb", 2), alone("core", 2)
    for name in core:
        torch.testing.assert_close(verb[name], core[name], rtol=1e-9, atol=1e-9)


def test_what_mixes_everything_is_shared_with_heads_or_channels() -> None:
    for name in ("pairs", "core", "verb"):
        _, choices = run_threads(4, on_a_rank, name, 1)[0]
        assert choices[0][1] in ("ulysses", "ring") and choices[0][0] is not None
