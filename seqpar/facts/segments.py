"""One step as rectangles, contiguous on both sides, for kernels that know no positions.

For the second half of a causal document, on the keys of its first half and on its own::

    FULL       # # #     CAUSAL     #
               # # #                # #
               # # #                # # #

Where keys end, the keys that end together are cut out. For a prompt of 2 tokens with answers of 2 and 1 tokens::

    query   keys 0 1 2 3 4
      0          a              a    CAUSAL, the prompt on itself
      1          a a            b    FULL, all answers on the prompt
      2          b b c          c d  CAUSAL, each answer on itself
      3          b b c c
      4          b b     d
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from seqpar.facts.bands import Band, Until, meetings
from seqpar.facts.intervals import Runs, Spans, expand, linear_spans
from seqpar.facts.value import Ints


class Kind(IntEnum):
    """The keys that a segment's queries see: all; up to a diagonal that ends bottom-right; a band along it."""

    FULL = 0
    CAUSAL = 1
    WINDOW = 2


@dataclass(frozen=True, eq=False)
class Segments:
    """The step as rectangles, by query row and then by key row.

    Rows that fit none are in ``remainder``; of all others, each pair that is seen is in one segment. If no key ends, a
    query row is in one segment at most, so one variable-length call serves all of them. CAUSAL aligns the last query
    with the last key. left, right: keys seen on either side of the bottom-right diagonal if WINDOW, -1 for no limit.
    """

    q_row: Ints
    q_len: Ints
    k_row: Ints
    k_len: Ints
    kind: Ints
    left: Ints
    right: Ints
    remainder: Ints


def segments(lo: Ints, hi: Ints, key_pos: Ints, *, at: Ints | None = None, until: Ints | None = None) -> Segments:
    """Segments of queries with bounds ``lo, hi`` over keys at ascending ``key_pos``.

    until: of the keys, if some end; then with the queries' ascending positions ``at``.
    """
    first, stop = np.searchsorted(key_pos, lo), np.searchsorted(key_pos, hi)
    s = linear_spans(first, np.maximum(first, stop))
    q_len = np.diff(np.append(s.start, lo.size))
    if at is not None and until is not None:
        s, q_len = _cut_where_keys_end(s, q_len, np.searchsorted(at, until))
    last = s.hi + s.hi_step * (q_len - 1)
    k_len = last - s.lo
    kind = np.select([s.lo_step == 1, s.hi_step == 1], [Kind.WINDOW, Kind.CAUSAL], Kind.FULL)
    left = np.where(s.lo_step == 1, k_len - q_len, -1)
    right = np.where((s.lo_step == 1) & (s.hi_step == 1), 0, -1)
    sees = last > s.lo + s.lo_step * (q_len - 1)
    sees |= s.hi > s.lo
    fits = (s.lo_step == 0) | (left >= 0)
    kept, bad = sees & fits, sees & ~fits
    rest = np.unique(expand(s.start[bad], q_len[bad]))
    return Segments(s.start[kept], q_len[kept], s.lo[kept], k_len[kept], kind[kept], left[kept], right[kept], rest)


def _cut_where_keys_end(s: Spans, rows: Ints, seen_by: Ints) -> tuple[Spans, Ints]:
    """Spans of some rows each, cut to keys that end together. seen_by: how many rows, the first ones, see each key."""
    start = np.flatnonzero(np.append(True, seen_by[1:] != seen_by[:-1])[: seen_by.size])
    if not (start.size and s.start.size):
        return s, rows
    runs = Runs(s.start, rows, np.ones_like(rows))
    m = meetings(Band(s, Until(start, seen_by[start])), runs, s.start)
    low, high = m.low, np.minimum(m.high, seen_by.size)

    def reached(x: Ints, step: Ints, bound: Ints) -> Ints:
        """The first row of each span at which x is at the bound or beyond, or its number of rows."""
        return np.where(x >= bound, 0, np.where(step == 1, np.minimum(bound - x, m.rows), m.rows))

    # The rows from which hi is past low, stays at high, lo leaves low, and lo is past all keys. The first row that sees
    # all keys of the run is the last of a causal segment.
    sees, whole = reached(m.hi, m.hi_step, low + 1), reached(m.hi, m.hi_step, high)
    whole = np.where(whole > 0, np.minimum(whole + 1, m.rows), 0)
    slides, gone = reached(m.lo, m.lo_step, low), reached(m.lo, m.lo_step, high)
    cuts = np.sort([np.zeros_like(sees), sees, whole, slides, gone, m.rows], axis=0)
    first, stop = cuts[:-1], cuts[1:]
    lo, hi = m.lo + first * m.lo_step, m.hi + first * m.hi_step
    spans = Spans(
        s.start[m.piece] + first, np.maximum(lo, low), np.minimum(hi, high),
        np.where(first >= slides, m.lo_step, 0), np.where(first < whole, m.hi_step, 0),
    )  # fmt: skip
    count = stop - first
    kept = count > 0
    order = np.lexsort((spans.lo[kept], spans.start[kept]))
    return Spans(*(x[kept][order] for x in spans)), count[kept][order]
