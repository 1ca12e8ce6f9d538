"""Windows: how far to the left and to the right a query sees, and the bounds that follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from seqpar.facts.bands import Band
from seqpar.facts.intervals import Spans, distinct, pieces_between
from seqpar.facts.value import MOST, Ints, is_integer


def checked_window(window: Sequence[int | None], causal: bool) -> tuple[int | None, int | None]:
    """The window (left, right); ValueError if it is not one."""
    fits = isinstance(window, (tuple, list)) and len(window) == 2
    if not fits or any(w is not None and (not is_integer(w) or w < 0) for w in window):
        raise ValueError(f"window must be (left, right), each None or an integer of at least 0, got {window!r}")
    if any(w is not None and w > MOST for w in window):
        raise ValueError(f"window must be (left, right), each at most {MOST}, got {window!r}; give None for no limit")
    left, right = (None if w is None else int(w) for w in window)
    if causal and right not in (None, 0):
        raise ValueError(f"a causal mask sees no key to the right, got window={window!r}; give causal=False or right=0")
    return left, 0 if causal else right


def windowed(
    band: Band, left: int | None, right: int | None, offsets: Ints, key_positions: Callable[[Ints], Ints]
) -> Band:
    """A band without ends, limited to keys within a window of the query. offsets: where documents start and end."""

    def low(at: Ints) -> Ints:
        lo = band.bounds(at)[0]
        return lo if left is None else np.maximum(lo, key_positions(at) - left)

    def high(at: Ints) -> Ints:
        hi = band.bounds(at)[1]
        return hi if right is None else np.minimum(hi, key_positions(at) + right + 1)

    # A piece is cut where the window meets one of its bounds, and where it has passed a bound and nothing is seen.
    tokens = int(offsets[-1])
    start = distinct(np.concatenate([band.spans.start, offsets[:-1]]))
    start = start[start < tokens]  # documents at the end may have keys alone
    at, (lo, hi) = key_positions(start), band.bounds(start)
    cuts = [lo - at + x for x in (left,) if x is not None] + [hi - at - x - 1 for x in (right,) if x is not None]
    start = pieces_between(start, cuts, tokens)
    start = pieces_between(start, [np.abs(high(start) - low(start))], tokens)
    after = np.minimum(start + 1, np.append(start[1:], tokens) - 1)
    (lo, hi), (lo_after, hi_after) = ((low(x), np.maximum(low(x), high(x))) for x in (start, after))
    return Band(Spans(start, lo, hi, lo_after - lo, hi_after - hi))
