"""How much of what a GPU computes is attended, on documents as they come: tiles of 128 queries by 128 keys, causal.

Published length distributions, packed to 32,768 tokens; the mean of eight packs each.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from bench.lib.lengths import NAMES, packed
from seqpar import Layout, Mask, Plan

TOKENS, SIDE, PACKS = 32768, 128, 8
ONE_RANK = {"magi": 0.931, "wikipedia": 0.924, "wlb": 0.930, "prolong": 0.926, "megatron": 0.879}
# Over all ranks and steps, whose mean would be 0.689 with SIDE rows throughout; and query tiles for one of such a cut.
ZIGZAG_8 = {
    "magi": (0.763, 1.041),
    "wikipedia": (0.740, 1.053),
    "wlb": (0.754, 1.047),
    "prolong": (0.751, 1.049),
    "megatron": (0.612, 1.059),
}


@cache
def cover(name: str, ranks: int) -> tuple[float, float]:
    """Mean cover of the packs, and query tiles for one of a cut into SIDE rows throughout."""
    covers, tiles, plain = [], 0, 0
    for seed in range(PACKS):
        lengths = packed(name, TOKENS, seed)
        plan = Plan(Mask(lengths), Layout.zigzag(lengths, ranks))
        steps = [s for rank in range(ranks) for s in plan.steps(rank)]
        tables = [s.bands[0].tiles(SIDE, SIDE) for s in steps]
        covers.append(plan.mask.area() / sum(s.area / t.cover(s.area) for s, t in zip(steps, tables)))
        tiles += sum(len(t.begin) for t in tables)
        plain += sum(-(-s.part.pos.size // SIDE) for s in steps)
    return float(np.mean(covers)), tiles / plain


@pytest.mark.parametrize("name", NAMES)
def test_one_rank(name) -> None:
    assert cover(name, 1) == (pytest.approx(ONE_RANK[name], abs=6e-4), 1)


def test_one_rank_on_average() -> None:
    assert np.mean([cover(name, 1)[0] for name in NAMES]) >= 0.88


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled(2)
def test_eight_ranks(name) -> None:
    assert cover(name, 8) == pytest.approx(ZIGZAG_8[name], abs=6e-4)


@pytest.mark.parametrize("answers", [[1024] * 8, [8192] * 8, [1024, 1500, 2222, 3000, 4097, 5555, 7000, 8192]])
@pytest.mark.parametrize("ranks", [1, 8])
def test_answers_to_a_prompt(answers, ranks) -> None:
    """Of a prompt of 2,048 tokens; one interval of key tiles for a query tile would give 0.18 to 0.43."""
    mask = Mask.shared_prefix([(2048, answers)])
    assert of_bands(Plan(mask, Layout.zigzag([mask.tokens], ranks))) >= 0.94


@pytest.mark.parametrize("ranks", [1, 8])
def test_a_window_with_sinks(ranks) -> None:
    """The band of sinks adds a visit to 33 of the window, and computes 4 of its 128 columns."""
    mask = Mask([131072], window=(4095, 0), sink_tokens=4)
    assert of_bands(Plan(mask, Layout.zigzag([131072], ranks))) >= 0.93


def of_bands(plan: Plan) -> float:
    """The cover over all ranks, steps and bands; no loop runs over a tile that it skips, forward or backward."""
    tables = [band.tiles(SIDE, SIDE) for rank in range(plan.ranks) for s in plan.steps(rank) for band in s.bands]
    visits = sum(t.visits for t in tables)
    assert sum(int((t.q_end - t.q_begin).sum()) for t in tables) <= 1.1 * visits
    return plan.mask.area() / (visits * SIDE * SIDE)
