"""Prints the time to plan on one core, for batches drawn anew from five published length distributions.

    python -m bench.planner.planning                   # about a minute
    taskset -c 1 python -m bench.planner.planning      # on a core of one's own

For each distribution, the median, least and most CPU milliseconds of `plan_batch` for 512 documents on 64 ranks, of the
same for 16,384 documents on 4,096 ranks, and of the first call for one rank's steps of the latter.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.lib import lengths as published
from seqpar import plan_batch

T = TypeVar("T")
SIZES = ((512, 64, 24, 10), (16384, 4096, 3, 400))  # documents, ranks, batches, and the milliseconds that are asked
STEPS = 20


def drawn(name: str, documents: int, seed: int) -> np.ndarray:
    """A number of documents of a distribution."""
    rng = np.random.default_rng(seed)
    if name == "megatron":
        return published.from_megatron(documents, rng)
    return published.from_histogram(*published.HISTOGRAMS[name], documents, rng)


def timed(what: Callable[[], T]) -> tuple[float, T]:
    """The CPU milliseconds of a call, and its result."""
    start = time.process_time()
    found = what()
    return (time.process_time() - start) * 1e3, found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    table = Table("distribution", "documents", "ranks", "what", "median", "least", "most", "asked", title="CPU ms")
    slow = 0
    for documents, ranks, batches, asked in SIZES:
        for name in published.NAMES:
            plan_batch(drawn(name, documents, batches), ranks)  # the first call also pays for set-up
            plans, steps = [], []
            for seed in range(batches):
                batch = drawn(name, documents, seed)
                milliseconds, plan = timed(partial(plan_batch, batch, ranks))
                plans.append(milliseconds)
                steps.append(timed(partial(plan.steps, ranks // 3))[0])
            rows = [("plan", plans, asked)] + [("steps of a rank", steps, STEPS)] * (ranks > 64)
            for what, times, limit in rows:
                middle = statistics.median(times)
                slow += middle > limit
                figures = (f"{x:.1f}" for x in (middle, min(times), max(times)))
                table.add_row(name, f"{documents:,}", f"{ranks:,}", what, *figures, str(limit))
    Console().print(table)
    return 1 if slow else 0


if __name__ == "__main__":
    raise SystemExit(main())
