"""Lines of Python that planning a batch takes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import seqpar

PACKAGE = str(Path(seqpar.__file__).parent)


def heavy_tailed(tokens: int, documents: int) -> np.ndarray:
    """Lengths of documents, a few of them long."""
    weights = np.random.default_rng(0).pareto(1.2, documents) + 0.05
    lengths = 1 + np.floor(weights / weights.sum() * (tokens - documents)).astype(np.int64)
    lengths[0] += tokens - lengths.sum()
    return lengths


def lines_of(make: Any) -> int:
    """Lines of seqpar's code that a call executes; a loop's body counts each time."""
    lines = 0

    def local(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return local

    before = sys.gettrace()
    sys.settrace(lambda frame, event, arg: local if frame.f_code.co_filename.startswith(PACKAGE) else None)
    try:
        make()
    finally:
        sys.settrace(before)
    return lines
