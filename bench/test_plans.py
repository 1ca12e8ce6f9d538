"""How long planning takes: all that one rank of 64 needs for 1,048,576 tokens in 2,000 heavy-tailed documents.

make bench ARGS="-k plans"
"""

from __future__ import annotations

import numpy as np
import pytest

from seqpar import Layout, Mask, Plan

TOKENS, DOCUMENTS, RANKS = 1 << 20, 2000, 64


def heavy_tailed(tokens: int, documents: int) -> np.ndarray:
    """Lengths of documents, a few of them long."""
    weights = np.random.default_rng(0).pareto(1.2, documents) + 0.05
    lengths = 1 + np.floor(weights / weights.sum() * (tokens - documents)).astype(np.int64)
    lengths[0] += tokens - lengths.sum()
    return lengths


LENGTHS = heavy_tailed(TOKENS, DOCUMENTS)
LAYOUTS = {
    "contiguous": lambda: Layout.contiguous(TOKENS, RANKS),
    "zigzag": lambda: Layout.zigzag(LENGTHS, RANKS),
    "striped": lambda: Layout.striped(TOKENS, RANKS),
}


def build(layout: str, rank: int, transport: str, window: int | None) -> Plan:
    """Mask, layout, plan, the rank's steps, their tile tables and the rank's rotary positions; nothing cached."""
    plan = Plan(Mask(LENGTHS, window=(window, None)), LAYOUTS[layout](), transport=transport)
    for step in plan.steps(rank):
        step.tiles(128, 128)
    plan.rope_positions(rank)
    return plan


@pytest.mark.parametrize("rank", [0, RANKS - 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fetch(benchmark, layout, rank) -> None:
    plan = benchmark.pedantic(build, (layout, rank, "fetch", None), rounds=7, warmup_rounds=1)
    benchmark.extra_info |= {"steps": len(plan.steps(rank)), "limit_ms": 50 if layout == "contiguous" else 250}


@pytest.mark.parametrize("window", [4096])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fetch_with_a_window(benchmark, layout, window) -> None:
    benchmark.pedantic(build, (layout, RANKS - 1, "fetch", window), rounds=5, warmup_rounds=1)


@pytest.mark.parametrize("transport", ["ring", "gather"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_transports(benchmark, layout, transport) -> None:
    benchmark.pedantic(build, (layout, RANKS - 1, transport, None), rounds=3, warmup_rounds=1)
