"""The cost of planning in lines of Python executed: loops run over messages and stages, not over tokens or runs.

Unlike times, a count says the same on a loaded machine.
"""

from __future__ import annotations

import numpy as np
import pytest

from seqpar import Layout, Mask, Plan
from tests.plan.lines import heavy_tailed, lines_of

LAYOUTS = ("contiguous", "zigzag", "striped")


def build(lengths: np.ndarray, layout: str, ranks: int, rank: int) -> Plan:
    """All that one rank needs of a batch."""
    mask, tokens = Mask(lengths), int(lengths.sum())
    made = {
        "contiguous": lambda: Layout.contiguous(tokens, ranks),
        "zigzag": lambda: Layout.zigzag(lengths, ranks),
        "striped": lambda: Layout.striped(tokens, ranks),
    }[layout]()
    plan = Plan(mask, made)
    for step in plan.steps(rank):
        step.bands[0].tiles(128, 128)
    plan.rope_positions(rank)
    return plan


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rank", [0, 15])
def test_documents_cost_no_python(layout, rank) -> None:
    few, many = (lines_of(lambda n=n: build(heavy_tailed(1 << 17, n), layout, 16, rank)) for n in (200, 2000))
    assert many <= 1.1 * few


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_cost_python_for_messages_only(layout) -> None:
    few, many = (lines_of(lambda n=n: build(heavy_tailed(n, 200), layout, 16, 3)) for n in (1 << 15, 1 << 18))
    assert many <= few + 12 * 16 * 32, "messages: up to 16 peers in each of 16 stages, both ways"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.sampled(3)
def test_a_large_batch_takes_few_lines(layout) -> None:
    """The batch of the acceptance: 1,048,576 tokens, 64 ranks, 2,000 documents."""
    lengths = heavy_tailed(1 << 20, 2000)
    assert lengths.sum() == 1 << 20 and lengths.min() > 0 and lengths.max() > 20 * lengths.mean()
    messages = sum(1 + len(s.sends) + len(s.recvs) for s in build(lengths, layout, 64, 63).steps(63))
    assert messages <= 2 * 64 * 64
    assert lines_of(lambda: build(lengths, layout, 64, 63)) <= 5_000 + 12 * messages
