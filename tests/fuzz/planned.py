"""Whether a plan of the planner is one, and whether an error is one of ours."""

from __future__ import annotations

import linecache
import math
from pathlib import Path

import numpy as np

import seqpar
from seqpar import Plan
from seqpar.plan.counts import load_of

PACKAGE = Path(seqpar.__file__).parent


def refused(error: Exception) -> str:
    """What an error says; raises AssertionError unless a statement of this package raised it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    assert trace is not None
    path = trace.tb_frame.f_code.co_filename
    line = linecache.getline(path, trace.tb_lineno).strip()
    raised = Path(path).is_relative_to(PACKAGE) and line.startswith("raise")
    assert raised and len(str(error)) > 10, f"{type(error).__name__}: {error} at {path}:{trace.tb_lineno}"
    return f"refused: {error}"


def assert_planned(plan: Plan, lengths: np.ndarray, ranks: int, *, rows: int | None = None) -> None:
    """Assert that a plan shares all tokens within the rows of a rank, and that its forecast can be believed."""
    runs, rank = plan.layout.all_runs()
    order = np.argsort(runs.start, kind="stable")
    stop = (runs.start + runs.count)[order]
    tokens = int(lengths.sum())
    assert runs.start[order].tolist() == [0, *stop[:-1].tolist()] and stop[-1] == tokens, "each token once"
    sizes = np.bincount(rank, runs.count, ranks)
    assert plan.ranks == ranks and (plan.layout.sizes() == sizes).all() and np.array_equal(plan.mask.lengths, lengths)
    f = plan.forecast
    assert rows is None or sizes.max() <= rows, "rows within what was given"
    assert f.bytes <= f.memory.usable, "rows within the memory"
    assert 0 < f.least <= f.seconds < math.inf and 0 <= f.imbalance <= f.gap < math.inf, f.headline
    assert all((seconds >= 0).all() and np.isfinite(seconds).all() for seconds in f.phases.values())
    area = load_of(plan).area
    assert (area >= 0).all() and math.isclose(float(area.sum()), plan.mask.area(), rel_tol=1e-9)
    assert f"{f.seconds:.4g}"[:3] in str(f) or f.seconds < 1
    if ranks > 64 or tokens <= 10_000:
        assert plan.describe().endswith(str(f))
