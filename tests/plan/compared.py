"""Steps of two plans compared array by array."""

from __future__ import annotations

import numpy as np

from seqpar.plan import Step
from tests.cases import Case

CASE = Case("packed", "zigzag", "ring", 4, 2, (5, 9, 1, 14), seed=3, pads=True)


def plain(value: object) -> object:
    """A step as something that compares."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return [(k, plain(v)) for k, v in value.items()]  # the order of peers counts
    if hasattr(value, "__dataclass_fields__"):
        return [(f, plain(getattr(value, f))) for f in value.__dataclass_fields__ if f != "_memo"]
    if isinstance(value, tuple):
        return [plain(v) for v in value]
    return value


def compare(a: Step, b: Step) -> None:
    assert plain(a) == plain(b)
    assert all(
        plain(x.tiles(4, 4)) == plain(y.tiles(4, 4)) and plain(x.segments) == plain(y.segments)
        for x, y in zip(a.bands, b.bands, strict=True)
    )
