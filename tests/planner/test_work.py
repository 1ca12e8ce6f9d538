"""Few documents on few ranks are no more work to plan than many on many, as they once were; counted, not timed."""

from __future__ import annotations

from cProfile import Profile
from pstats import Stats
from statistics import median

import numpy as np
import pytest

from seqpar import plan_batch


def calls(documents: int, ranks: int) -> float:
    """Of functions while a batch is planned, the median of several."""
    counts = []
    for seed in range(3):
        lengths = np.random.default_rng(seed).lognormal(6, 1.2, documents).astype(int) + 16
        with Profile() as profile:
            plan_batch(lengths, ranks)
        counts.append(Stats(profile).total_calls)  # type: ignore[attr-defined]
    return median(counts)


@pytest.mark.parametrize("documents", [8, 64, 512])
def test_few_documents_on_few_ranks_are_no_more_work_than_many_on_many(documents: int) -> None:
    assert calls(documents, 8) < 1.5 * calls(512, 64)


def test_a_document_alone_and_many_whole_ones_are_planned_at_once() -> None:
    many = calls(512, 64)
    assert calls(1, 8) < many / 4 and calls(512, 8) < many / 2
