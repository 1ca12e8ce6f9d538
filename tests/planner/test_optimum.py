"""The exact program finds what trying everything finds, and lies between the bound and the planner's plans."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpar import Layout, Mask
from seqpar.planner import Attention, Hardware, Link, ModelShape, plan_batch
from seqpar.planner.cost import Weights, counted, ticks
from seqpar.planner.problem import Problem, layers_of
from tests.cases import examples

if TYPE_CHECKING:
    from bench.planner.optimum import Optimum

MODEL = dataclasses.replace(ModelShape.preset("llama-8b"), layers=2)
WINDOWS = dataclasses.replace(MODEL, layers=3, windows=(2, None))
FREE = Link(0.0, 1e30)
# Transfers are free, and the attention of a token weighs what that of thousands does elsewhere.
COARSE = dataclasses.replace(
    Hardware.preset("h100"), inside=FREE, across=FREE, memory=1 << 50,
    attention=Attention(2e11, 1.5e11, piece=1e-9, query_pairs=0.3, key_pairs=0.1, stage=1e-9),
)  # fmt: skip
LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=6)


pytest.importorskip("scipy")


def optimum(lengths: Sequence[int], ranks: int, *, block: int = 1, seconds: float = 60.0, **options: Any) -> Optimum:
    """The best plan on this machine."""
    from bench.planner.optimum import optimum

    return optimum(Problem.of(lengths, ranks, hardware=COARSE, **options), block=block, seconds=seconds)


def computed(masks: list[Mask] | None, model: ModelShape, layout: Layout, lengths: Sequence[int]) -> int:
    """Ticks that the slowest rank computes."""
    layers = layers_of(np.array(lengths), masks, model)
    found = counted(layers, layout, widths=np.ones(len(lengths), int), node=1, forwarded=False)
    t = ticks(found, Weights.of(model, COARSE), stage_bytes=64 << 20)
    return int((t.total - t.exposed).max())


def layout_of(rank: tuple[int, ...], ranks: int) -> Layout:
    """Token by token on these ranks."""
    order = np.argsort(rank, kind="stable")
    return Layout.from_pieces(order, np.ones_like(order), np.array(rank)[order], ranks)


@examples(25)
@given(st.sampled_from([(1,), (6,), (2, 3), (4, 1), (5, 1), (2, 2, 2), (1, 1, 4)]), st.integers(1, 3), st.booleans())
@pytest.mark.exhaustive
def test_the_optimum_is_the_best_of_all_layouts(lengths: tuple[int, ...], ranks: int, full: bool) -> None:
    tokens, masks = sum(lengths), [Mask(lengths, causal=not full)] * 2
    best = min(
        computed(masks, MODEL, layout_of(rank, ranks), lengths)
        for rank in itertools.product(range(ranks), repeat=tokens)
        if np.bincount(rank).max() <= tokens // ranks + 1
    )
    found = optimum(lengths, ranks, masks=masks, model=MODEL)
    assert best == computed(masks, MODEL, found.plan.layout, lengths) == found.plan.forecast.ticks.total.max()
    assert best - 2 - 3e-6 * best <= found.least <= best


@examples(25)
@given(LENGTHS, st.integers(1, 4), st.sampled_from([MODEL, WINDOWS]))
@pytest.mark.exhaustive
def test_the_optimum_lies_between_the_bound_and_a_plan(lengths: list[int], ranks: int, model: ModelShape) -> None:
    found = optimum(lengths, ranks, model=model, seconds=2)
    plan = plan_batch(lengths, ranks, model=model, hardware=COARSE, node=1)
    assert plan.forecast.bound == found.plan.forecast.bound <= found.least
    assert found.least <= found.plan.forecast.ticks.total.max()
    assert found.least <= plan.forecast.ticks.total.max()
    rows = [found.plan.layout.tokens(rank) for rank in range(ranks)]
    assert max(rows) <= sum(lengths) // ranks + 1


def test_blocks_stay_whole() -> None:
    found = optimum([10, 7, 4], 3, model=MODEL, block=4, token_slack=0.3)
    owner = found.plan.layout.owner()
    for start, stop in ((0, 4), (4, 8), (8, 10), (10, 14), (14, 17), (17, 21)):
        assert len(set(owner[start:stop].tolist())) == 1


def test_blocks_that_no_rank_can_take_say_what_helps() -> None:
    with pytest.raises(ValueError, match="no plan of 1 blocks on 2 ranks of at most 6 rows.* smaller blocks"):
        optimum([10], 2, model=MODEL, block=10)
    with pytest.raises(ValueError, match="at least 4 ranks"):
        optimum([10, 5], 3, model=MODEL, max_tokens_per_rank=4)


@pytest.mark.exhaustive
def test_the_benchmark_writes_its_table(tmp_path: Path) -> None:
    root, target = Path(__file__).resolve().parents[2], tmp_path / "new" / "exact.json"
    command = [sys.executable, "-m", "bench.planner.exact", "--ranks", 2, 3, "--documents", 4, "--seeds", 1]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))}
    done = subprocess.run(
        [str(word) for word in [*command, "--seconds", 2, "--json", target]],
        env=env, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(target.read_text())["rows"]
    assert [row["ranks"] for row in rows] == [2, 3]
    assert all(0 <= row["least"] <= min(row["exact"], row["plan"]) for row in rows)
    assert "mean above the bound" in done.stdout
