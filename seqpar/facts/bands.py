"""The bands of a mask: one interval of keys per query, and one bound of queries per key.

Query ``i`` sees key ``j`` iff ``lo[i] <= j < hi[i]`` and ``i < until[j]``, with ``i`` in key coordinates. Without
``until`` a band is one interval per query. With it a band may be a tree: in depth-first order every subtree is one
range, so ``lo`` is the root, ``hi = i + 1``, and ``until[j]`` the end of the subtree of j. A prompt of 2 tokens with
answers of 2 and 1 tokens::

    query   keys 0 1 2 3 4      lo  hi
      0          #               0   1
      1          # #             0   2
      2          # # #           0   3
      3          # # # #         0   4
      4          # #     #       0   5     keys 2 and 3 ended before it
    until        5 5 4 4 5

Bounds are linear on spans of queries, and ``until`` is constant on runs of keys. `meetings` joins the two: pieces of
queries and runs of keys that any of their queries see. All counts of pairs and of needed keys follow from it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from seqpar.facts.intervals import Runs, Spans, edges, expand, interval_of
from seqpar.facts.value import Ints, frozen


class Until(NamedTuple):
    """Runs of keys, from key 0 on: the keys from ``start`` on are seen by queries ``i < end``, in key coordinates."""

    start: Ints
    end: Ints

    def of(self, keys: Ints) -> Ints:
        """The bound of each of these keys."""
        return self.end[interval_of(keys, self.start)]

    def joined(self) -> Until:
        """The same bounds in as few runs as possible."""
        first = np.flatnonzero(np.append(True, self.end[1:] != self.end[:-1]))
        return Until(self.start[first], self.end[first])


class Band(NamedTuple):
    """The bounds of all queries, and the bounds of all keys; ``until`` is None if it hides no pair."""

    spans: Spans
    until: Until | None = None

    def bounds(self, at: Ints) -> tuple[Ints, Ints]:
        """``lo, hi`` of these queries; an empty interval for a pad row, position -1."""
        span = np.searchsorted(self.spans.start, at, side="right") - 1
        lo, hi, _, _ = self.linear(at, span)
        pad = at < 0
        return np.where(pad, 0, lo), np.where(pad, 0, hi)

    def linear(self, at: Ints, span: Ints | None = None) -> tuple[Ints, Ints, Ints, Ints]:
        """The bounds of these queries and the slopes of their spans: lo, hi, lo_step, hi_step."""
        s = self.spans
        span = interval_of(at, s.start) if span is None else span
        t, lo_step, hi_step = at - s.start[span], s.lo_step[span], s.hi_step[span]
        return s.lo[span] + t * lo_step, s.hi[span] + t * hi_step, lo_step, hi_step

    def frozen(self) -> Band:
        """This band, read-only."""
        for array in (*self.spans, *(self.until or ())):
            frozen(array)
        return self

    def canonical(self, tokens: int, keys: int) -> Band:
        """This band without ends that hide no pair: such keys end with the last one, and runs of one end are joined.

        keys: their number; the last key is aligned with the last of ``tokens`` queries.
        """
        if self.until is None:
            return self
        start, end = self.until
        s = self.spans
        top = s.hi + s.hi_step * (np.append(s.start[1:], tokens) - 1 - s.start)
        first = np.clip(end - (keys - tokens), 0, tokens - 1)  # the first query that the end would hide
        lo = self.linear(first)[0]
        later = interval_of(first, s.start) + 1
        low = np.minimum(lo, np.append(np.minimum.accumulate(s.lo[::-1])[::-1], keys)[later])
        high = np.append(np.maximum.accumulate(top[::-1])[::-1], 0)[later - 1]
        hides = (end < keys) & (low < np.append(start[1:], keys)) & (high > start)
        return Band(s, Until(start, np.where(hides, end, keys)).joined() if hides.any() else None)


def filled(bands: tuple[Band, ...]) -> tuple[Band, ...]:
    """The bands that show any key, or the first."""

    def shows(s: Spans) -> bool:
        return bool(((s.lo < s.hi) | (s.hi_step > s.lo_step)).any())

    return tuple(band for band in bands if shows(band.spans)) or bands[:1]


class Meetings(NamedTuple):
    """Pieces of queries with runs of keys; some query of the piece sees some key of the run.

    piece: of queries, each inside one span. Its row t sees the keys ``[lo + t * lo_step, hi + t * hi_step)`` between
    ``low`` and ``high`` if ``t < rows``; steps count rows of the piece.
    """

    piece: Ints
    low: Ints
    high: Ints
    rows: Ints
    lo: Ints
    hi: Ints
    lo_step: Ints
    hi_step: Ints

    def pick(self, index: Ints) -> Meetings:
        """The meetings at these places."""
        return Meetings(*(x[index] for x in self))

    def areas(self) -> Ints:
        """Attended pairs of each."""
        upper = _clamped(self.hi, self.hi_step, self.rows, self.low, self.high)
        return upper - _clamped(self.lo, self.lo_step, self.rows, self.low, self.high)

    def intervals(self) -> tuple[Ints, Ints, Ints]:
        """The keys that any query of a meeting sees, as intervals: meeting, lo, hi; they may overlap or be empty."""
        last = self.rows - 1
        # The rows see one interval together, unless the lower bound jumps past the keys of the row before: then each
        # row has its own.
        leaps = np.flatnonzero((last > 0) & (self.lo_step > 0))
        width = (self.hi - self.lo)[leaps] + np.minimum(0, (last[leaps] - 1) * (self.hi_step - self.lo_step)[leaps])
        leaps = leaps[width < self.lo_step[leaps]]
        at, lo, hi = np.arange(self.lo.size), self.lo, self.hi + last * self.hi_step
        if leaps.size:
            rest, rows = np.delete(at, leaps), self.rows[leaps]
            lo = np.concatenate([lo[rest], expand(lo[leaps], rows, self.lo_step[leaps])])
            hi = np.concatenate([hi[rest], expand(self.hi[leaps], rows, self.hi_step[leaps])])
            at = np.concatenate([rest, np.repeat(leaps, rows)])
        return at, np.maximum(lo, self.low[at]), np.minimum(hi, self.high[at])


def meetings(band: Band, pieces: Runs, first: Ints) -> Meetings:
    """The runs of keys that pieces of queries see. first: the first query of each piece in key coordinates.

    Each piece lies in one span. Of the keys before ``hi`` of its first query only the runs are visited that this query
    may see, so closed subtrees cost nothing.
    """
    lo, hi, lo_step, hi_step = band.linear(pieces.start)
    lo_step, hi_step = lo_step * pieces.step, hi_step * pieces.step
    stop = hi + (pieces.count - 1) * hi_step
    if band.until is None:
        return Meetings(np.arange(lo.size), lo, stop, pieces.count, lo, hi, lo_step, hi_step)
    start, end = band.until
    edge = np.append(start[1:], np.iinfo(np.int64).max)
    # runs that begin before the keys of the first query end: only those that are open at the first query
    piece, run = _open_runs(band.until, lo, hi, first)
    # runs that begin later: all of them
    begin = np.where(lo < hi, np.searchsorted(start, hi), interval_of(hi, start))
    past = np.searchsorted(start, stop)
    count = np.maximum(past - begin, 0)
    piece = np.concatenate([piece, np.repeat(np.arange(lo.size), count)])
    run = np.concatenate([run, expand(begin, count)])
    step = pieces.step[piece]
    rows = np.minimum(-(-(end[run] - first[piece]) // step), pieces.count[piece])
    kept = rows > 0
    piece, run, rows = piece[kept], run[kept], rows[kept]
    return Meetings(
        piece, start[run], edge[run], rows, lo[piece], hi[piece], lo_step[piece], hi_step[piece],
    )  # fmt: skip


def sees_any(until: Until, lo: Ints, hi: Ints, at: Ints) -> NDArray[np.bool_]:
    """Whether queries at key coordinates ``at`` see any key of ``[lo, hi)``."""
    before = _before(until)
    run = np.where(lo < hi, interval_of(hi - 1, until.start), -1)
    least = interval_of(lo, until.start)
    while True:
        closed = (run >= least) & (until.end[run] <= at)
        if not closed.any():
            return run >= least
        run = np.where(closed, before[run], run)


def closed_pairs(first: Ints, stop: Ints, at: Ints, until: Ints) -> int:
    """The number of pairs of a query and a key ``first[i] <= j < stop[i]`` with ``until[j] <= at[i]``."""
    order = np.argsort(until, kind="stable")
    closed = np.searchsorted(until[order], at, side="right")  # so many keys, the first in this order, are closed
    stop = np.maximum(first, stop)
    return int(_number_below(order, closed, stop).sum() - _number_below(order, closed, first).sum())


def _number_below(values: Ints, count: Ints, bound: Ints) -> Ints:
    """How many of the first ``count`` values are less than ``bound``, for many counts and bounds at once.

    values: distinct, below their number. Source: the wavelet matrix, Claude and Navarro 2012, section 3.
    """
    number = np.zeros_like(count)
    low, high = np.zeros_like(count), count
    for bit in range(int(values.size).bit_length() - 1, -1, -1):
        zero = values >> bit & 1 == 0
        zeros = edges(zero.astype(np.int64))
        below = zeros[high] - zeros[low]
        up = bound >> bit & 1 == 1
        number += np.where(up, below, 0)
        low, high = (np.where(up, zeros[-1] + x - zeros[x], zeros[x]) for x in (low, high))
        values = np.concatenate([values[zero], values[~zero]])
    return number


def _open_runs(until: Until, lo: Ints, hi: Ints, first: Ints) -> tuple[Ints, Ints]:
    """The runs that reach into ``[lo, hi)`` and are open at query ``first``: index of the interval, run."""
    before = _before(until)
    at = np.flatnonzero(lo < hi)
    run, least = interval_of(hi[at] - 1, until.start), interval_of(lo[at], until.start)
    found: list[tuple[Ints, Ints]] = []
    while at.size:
        is_open = until.end[run] > first[at]
        found.append((at[is_open], run[is_open]))
        run = np.where(is_open, run - 1, before[run])
        left = run >= least
        at, run, least = at[left], run[left], least[left]
    none = np.zeros(0, np.int64)
    return tuple(np.concatenate([none, *x]) for x in zip(*found, strict=True)) if found else (none, none)  # type: ignore[return-value]


def _before(until: Until) -> Ints:
    """For each run the nearest run before it with a later end, or -1."""
    before = np.full(until.end.size, -1, np.int64)
    stack: list[tuple[int, int]] = []
    for n, end in enumerate(until.end.tolist()):
        while stack and stack[-1][1] <= end:
            stack.pop()
        if stack:
            before[n] = stack[-1][0]
        stack.append((n, end))
    return before


def _clamped(x: Ints, step: Ints, n: Ints, low: Ints, high: Ints) -> Ints:
    """Sum of ``clip(x + step * t, low, high)`` over ``0 <= t < n``, for steps of at least 0."""
    flat = n * np.minimum(np.maximum(x, low), high)
    by = np.maximum(step, 1)
    under = np.clip(-(-(low - x) // by), 0, n)
    over = np.clip(n + (x - high) // by, 0, n - under)
    inner = n - under - over
    rising = low * under + high * over + inner * (x + under * by) + by * (inner * (inner - 1) // 2)
    return np.where(step > 0, rising, flat)


def area_of(band: Band, keys: int, queries: int, key_positions: Callable[[Ints], Ints]) -> int:
    """Number of pairs of a query and a key in a band."""
    s = band.spans
    rows = np.diff(np.append(s.start, queries))
    if band.until is not None:
        pieces = Runs(s.start, rows, np.ones_like(rows))
        return int(meetings(band, pieces, key_positions(s.start)).areas().sum())
    pairs, slope = s.hi - s.lo, s.hi_step - s.lo_step
    if queries * keys >= 1 << 62:  # beyond int64: Python's integers
        rows, pairs, slope = (x.astype(object) for x in (rows, pairs, slope))
    return int((rows * pairs + slope * (rows * (rows - 1) // 2)).sum())
