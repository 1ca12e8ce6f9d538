"""Few documents on few ranks do not take longer to plan than many on many, as they once did."""

from __future__ import annotations

import time
from statistics import median

import numpy as np

from seqpar import plan_batch


def seconds(documents: int, ranks: int) -> float:
    """Of the CPU, for a batch, the median of several after a first one."""
    batches = [np.random.default_rng(seed).lognormal(6, 1.2, documents).astype(int) + 16 for seed in range(9)]
    taken = []
    for lengths in batches[:1] + batches:
        start = time.process_time()
        plan_batch(lengths, ranks)
        taken.append(time.process_time() - start)
    return median(taken[1:])


def test_a_few_documents_are_planned_in_about_the_time_of_many() -> None:
    many = seconds(512, 64)
    for documents in (8, 64):
        assert seconds(documents, 8) < 2.5 * many
