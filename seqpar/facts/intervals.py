"""Integers in stretches: arrays with one entry per stretch, so that no loop visits a row.

Spans cut rows where the slope of a mask's bounds changes; here two causal documents of 4 and 3 tokens::

    row     0 1 2 3 4 5 6         start  lo  hi  lo_step  hi_step
    lo      0 0 0 0 4 4 4             0   0   1        0        1
    hi      1 2 3 4 5 6 7             4   4   5        0        1

Runs are arithmetic progressions of positions. `cut` splits them at breaks and returns the run of each piece::

    runs      |-------------|          |---------|
    breaks            |         |             |
    pieces    |-------|-----|          |------|--|        source 0 0 1 1

Intervals are ``[lo, hi)``, each of a group. Holders know which rank holds which position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from seqpar.facts.value import Ints, Memo, cached, frozen


class Spans(NamedTuple):
    """Maximal groups of rows with linear bounds: row ``start + t`` has ``[lo + t * lo_step, hi + t * hi_step)``."""

    start: Ints  # first row of each span
    lo: Ints
    hi: Ints
    lo_step: Ints  # 0 or 1
    hi_step: Ints  # 0 or 1

    def canonical(self, rows: int) -> tuple[Ints, ...]:
        """The bounds of all rows as arrays that depend on the bounds alone, not on the spans that store them."""
        count = np.diff(np.append(self.start, rows))
        return (
            self.lo[:1], *progressions(self.lo, self.lo_step, count),
            self.hi[:1], *progressions(self.hi, self.hi_step, count),
        )  # fmt: skip


def linear_spans(lo: Ints, hi: Ints, row: Ints | None = None) -> Spans:
    """The spans of two arrays of bounds: as few as the slopes 0 and 1 allow. No loop over rows.

    row: the rows of the bounds, ascending from 0 to the last row; bounds of rows between two of them are linear. By
    default the bounds are those of all rows.
    """
    count = len(lo)
    if count == 0:
        none = np.zeros(0, np.int64)
        return Spans(none, none, none, none, none)
    dlo, dhi = np.diff(lo), np.diff(hi)
    if row is None:
        row = np.arange(count)
    else:
        dlo, dhi = dlo // np.diff(row), dhi // np.diff(row)
    jump = (dlo < 0) | (dlo > 1) | (dhi < 0) | (dhi > 1)
    first = np.zeros(count, bool)
    first[0] = True
    first[1:] |= jump
    # A row where the slope changes starts a span, unless a jump follows it: then it ends the span before it.
    first[1:-1] |= ~jump[1:] & ((dlo[1:] != dlo[:-1]) | (dhi[1:] != dhi[:-1]))
    start = np.flatnonzero(first)
    single = np.diff(np.append(row[start], row[-1] + 1)) == 1
    at = np.minimum(start, max(count - 2, 0))
    lo_step = np.where(single, 0, dlo[at]) if count > 1 else np.zeros(1, np.int64)
    hi_step = np.where(single, 0, dhi[at]) if count > 1 else np.zeros(1, np.int64)
    return Spans(row[start], lo[start], hi[start], lo_step, hi_step)


def progressions(start: Ints, step: Ints, count: Ints) -> tuple[Ints, Ints]:
    """Differences between neighbouring elements of progressions laid end to end: (difference, how often).

    Neighbouring differences are unequal: equal sequences give equal results however they are cut into progressions.
    """
    gap = np.stack([step, np.append(start[1:] - (start + step * (count - 1))[:-1], 0)], axis=1).ravel()
    often = np.stack([count - 1, np.append(np.ones(max(len(start) - 1, 0), np.int64), 0)], axis=1).ravel()
    gap, often = gap[often > 0], often[often > 0]
    if gap.size == 0:
        return gap, often
    first = np.flatnonzero(np.append(True, gap[1:] != gap[:-1]))
    return gap[first], np.add.reduceat(often, first)


def edges(counts: Ints) -> Ints:
    """The start of each of consecutive stretches, and the end of the last; read-only."""
    edge = np.zeros(counts.size + 1, np.int64)
    counts.cumsum(out=edge[1:])
    return frozen(edge)


def summed(index: Ints, values: Ints, size: int) -> Ints:
    """For each index the sum of its values."""
    result = np.zeros(size, np.int64)
    np.add.at(result, index, values)
    return result


def distinct(values: Ints) -> Ints:
    """The distinct values, ascending. By sorting: a hash table of a few thousand values is slower."""
    values = np.sort(values)
    return values[np.concatenate([[True], values[1:] != values[:-1]])] if values.size else values


class Runs(NamedTuple):
    """Arithmetic progressions ``start + step * [0, count)``, in row order; all counts and steps at least 1."""

    start: Ints
    count: Ints  # type: ignore[assignment]  # tuple.count is not missed
    step: Ints

    @property
    def last(self) -> Ints:
        """The last position of each run."""
        return self.start + self.step * (self.count - 1)

    def pick(self, index: Ints) -> Runs:
        """The runs selected by an index or a mask."""
        return Runs(self.start[index], self.count[index], self.step[index])


class Intervals(NamedTuple):
    """Intervals ``[lo, hi)`` of positions, each with its group."""

    group: Ints
    lo: Ints
    hi: Ints

    def by(self, owner: Ints) -> Intervals:
        """The same intervals with the owner of each group as the group."""
        return Intervals(owner[self.group], self.lo, self.hi)


def union(group: Ints, lo: Ints, hi: Ints, groups: int, tokens: int) -> Intervals:
    """Intervals of each group, merged where they touch and sorted by group, then start; positions below ``tokens``."""
    kept = hi > lo
    if not kept.all():
        group, lo, hi = group[kept], lo[kept], hi[kept]
    order = order_of(group, groups)
    base = group[order] * (tokens + 1)  # all groups on one line, far enough apart that their intervals never touch
    lo, hi = lo[order] + base, hi[order] + base
    if (lo[1:] < lo[:-1]).any():
        order = np.argsort(lo, kind="stable")
        lo, hi = lo[order], hi[order]
    if lo.size:
        reach = np.maximum.accumulate(hi)
        first = np.flatnonzero(np.append(True, lo[1:] > reach[:-1]))
        lo, hi = lo[first], np.append(reach[first[1:] - 1], reach[-1])
    group = lo // (tokens + 1)
    base = group * (tokens + 1)
    return Intervals(group, lo - base, hi - base)


def minus(a: Intervals, b: Intervals, tokens: int) -> Intervals:
    """The intervals of each group without those of another list; both as `union` returns them."""
    base, other = a.group * (tokens + 1), b.group * (tokens + 1)
    breaks = np.stack([b.lo + other, b.hi + other], axis=1).ravel()
    runs, source = cut(Runs(a.lo + base, a.hi - a.lo, np.ones_like(a.lo)), breaks)
    left = np.searchsorted(breaks, runs.start, side="right") % 2 == 0
    lo, base = runs.start[left], base[source[left]]
    return Intervals(a.group[source[left]], lo - base, lo + runs.count[left] - base)


def least_over(first: Ints, stop: Ints, values: Ints, size: int, none: int) -> Ints:
    """For each place below ``size`` the least value of the intervals ``[first, stop)`` that cover it, or ``none``.

    values: at most ``none``. No interval is empty. Each is covered by two stretches of a power of two of places, and
    each such stretch by its halves: O(intervals + size * log(longest)), however much they overlap.
    """
    least = np.full(size, none, np.int64)
    power = np.frexp(stop - first)[1] - 1
    for p in range(int(power.max(initial=-1)), -1, -1):
        # so far an entry stands for the 2**(p + 1) places from its own on; now for half of them
        np.minimum(least[1 << p :], least[: -(1 << p)], out=least[1 << p :])
        at = np.flatnonzero(power == p)
        np.minimum.at(least, first[at], values[at])
        np.minimum.at(least, stop[at] - (1 << p), values[at])
    return least


def expand(start: Ints, count: Ints, step: Ints | int = 1) -> Ints:
    """All elements of arithmetic progressions, end to end."""
    steps = np.full_like(start, step) if isinstance(step, int) else np.broadcast_to(step, start.shape)
    if not count.all():
        start, steps, count = start[count > 0], steps[count > 0], count[count > 0]
    if count.size == 0:
        return np.zeros(0, np.int64)
    # The differences are summed in place: a large array costs the time of touching its pages, so there is only one.
    stop = np.cumsum(count)
    rows = np.full(stop[-1], steps[0]) if (steps == steps[0]).all() else np.repeat(steps, count)
    rows[0] = start[0]
    rows[stop[:-1]] = start[1:] - (start + steps * (count - 1))[:-1]
    return np.cumsum(rows, out=rows)


def cut(runs: Runs, breaks: Ints) -> tuple[Runs, Ints]:
    """Split the runs so that no break is strictly inside one; also the run of each piece.

    breaks: sorted positions at which a new piece begins.
    """
    if (runs.step == 1).all() and (runs.start[1:] > runs.last[:-1]).all():
        return _cut_ascending(runs, breaks)
    lower = np.searchsorted(breaks, runs.start, side="right")
    pieces = np.searchsorted(breaks, runs.last, side="right") - lower + 1
    crowded = pieces > runs.count  # these runs have fewer rows than breaks: each row is tried, instead of each break
    tried = np.minimum(pieces, runs.count)
    source, row = np.repeat(np.arange(tried.size), tried), expand(np.zeros_like(tried), tried)
    start, step = runs.start[source], runs.step[source]
    later = np.flatnonzero((row > 0) & ~crowded[source])
    at = breaks[lower[source[later]] + row[later] - 1]
    row[later] = -((start[later] - at) // step[later])  # first row at or after the break
    begins = np.append(True, (source[1:] != source[:-1]) | (row[1:] > row[:-1]))[: source.size]
    each = np.flatnonzero(crowded[source])
    passed = np.searchsorted(breaks, start[each] + step[each] * row[each], side="right")
    begins[each] = (row[each] == 0) | (np.diff(passed, prepend=-1) > 0)
    source, row, start, step = source[begins], row[begins], start[begins], step[begins]
    end = np.append(row[1:], 0)
    final = np.append(source[1:] != source[:-1], True)[: source.size]
    end[final] = runs.count[source[final]]
    return Runs(start + step * row, end - row, step), source


def _cut_ascending(runs: Runs, breaks: Ints) -> tuple[Runs, Ints]:
    """As `cut`, for disjoint ascending runs of consecutive positions. Searches the shorter of runs and breaks."""
    if runs.start.size < breaks.size:
        lower = np.searchsorted(breaks, runs.start, side="right")
        count = np.searchsorted(breaks, runs.last, side="right") - lower
        run, at = np.repeat(np.arange(count.size), count), breaks[expand(lower, count)]
    else:
        run = np.searchsorted(runs.start, breaks) - 1
        inside = np.flatnonzero((run >= 0) & (breaks <= runs.last[run]))
        run, at = run[inside], breaks[inside]
        count = np.bincount(run, minlength=runs.start.size)
    source = np.repeat(np.arange(count.size), count + 1)
    start, stop = runs.start[source], (runs.start + runs.count)[source]
    place = run + np.arange(run.size)
    start[place + 1], stop[place] = at, at
    if (stop == start).any():  # equal breaks
        kept = stop > start
        start, stop, source = start[kept], stop[kept], source[kept]
    return Runs(start, stop - start, np.ones_like(start)), source


def pieces_between(start: Ints, cuts: Sequence[Ints], total: int) -> Ints:
    """The starts of pieces of rows and of their parts. cuts: the rows of each piece before each further part."""
    count = np.diff(np.append(start, total))
    inside = [start[fits] + cut[fits] for cut in cuts for fits in ((cut > 0) & (cut < count),)]
    return distinct(np.concatenate([start, *inside]))


def interval_of(positions: Ints, starts: Ints) -> Ints:
    """The last interval that starts at or before each position, -1 if none does; fast for ascending positions.

    starts: where the intervals start, ascending.
    """
    if positions.size < starts.size or (positions[1:] < positions[:-1]).any():
        return np.searchsorted(starts, positions, side="right") - 1
    begun = np.bincount(np.searchsorted(positions, starts), minlength=positions.size + 1)
    return np.cumsum(begun[: positions.size]) - 1


def runs_of(positions: Ints) -> Runs:
    """The runs of positions, with the most common distance between neighbours as step. No loop over rows."""
    if positions.size == 0:
        return Runs(positions, positions, positions)
    gaps = np.diff(positions)
    ahead = gaps[gaps > 0]
    values, counts = np.unique(ahead, return_counts=True)
    step = int(values[np.argmax(counts)]) if values.size else 1
    first = np.flatnonzero(np.append(True, gaps != step))
    count = np.diff(np.append(first, positions.size))
    return Runs(positions[first], count, np.full(first.size, step, np.int64))


def order_of(keys: Ints | NDArray[np.int32], bound: int) -> Ints:
    """The stable order of integers ``0 <= key < bound``, in linear time: numpy sorts 16-bit keys by radix."""
    order = np.argsort(keys.astype(np.uint16), kind="stable")  # the low 16 bits
    shift = 16
    while bound > 1 << shift:
        order = order[np.argsort((keys[order] >> shift).astype(np.uint16), kind="stable")]
        shift += 16
    return order


@dataclass(frozen=True, eq=False)
class Holders(Memo):
    """The holder of each position: disjoint runs in the order of their starts, each with its holder; -1 elsewhere."""

    runs: Runs
    holder: NDArray[np.int32]
    total: int
    _memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    @cached
    def strided(self) -> bool:
        """Whether a run has a step above 1, so that other runs may fill its gaps."""
        return bool(((self.runs.step > 1) & (self.runs.count > 1)).any())

    def of(self, positions: Ints) -> NDArray[np.int32]:
        """The holder of each position; O(total) memory only if runs are strided."""
        if self.strided or self.holder.size == 0:
            return self.all()[positions]
        at = np.searchsorted(self.runs.start, positions, side="right") - 1
        held = (at >= 0) & (positions - self.runs.start[at] < self.runs.count[at])
        return np.where(held, self.holder[at], np.int32(-1))

    def pieces(self, lo: Ints, hi: Ints) -> tuple[Ints, Ints, NDArray[np.int32], Ints]:
        """Ascending intervals of held positions, cut where the holder changes: lo, hi, holder, interval of each."""
        if self.strided:
            at, source = expand(lo, hi - lo), np.repeat(np.arange(lo.size), hi - lo)
            holder = self.all()[at]
            first = np.flatnonzero(np.append(True, (np.diff(holder) != 0) | (np.diff(source) != 0))[: at.size])
            stop = at[np.append(first[1:], at.size)[: first.size] - 1] + 1
            return at[first], stop, holder[first], source[first]
        piece, source = cut(Runs(lo, hi - lo, np.ones_like(lo)), self.runs.start)
        return piece.start, piece.start + piece.count, self.of(piece.start), source

    def intervals(self) -> Intervals:
        """The intervals that each holder holds."""
        runs, holder = self.runs, self.holder.astype(np.int64)
        if (runs.step == 1).all():
            return Intervals(holder, runs.start, runs.start + runs.count)
        start, holder = expand(*runs), np.repeat(holder, runs.count)
        # adjacent runs are merged; where no run strides, they already are
        first = np.flatnonzero(np.append(True, (np.diff(start) != 1) | (np.diff(holder) != 0)))
        return Intervals(holder[first], start[first], start[first] + np.diff(np.append(first, start.size)))

    @cached
    def all(self) -> NDArray[np.int32]:
        """The holder of every position, int32 [total]; cached."""
        runs = self.runs
        if not self.strided and int(runs.count.sum()) == self.total:
            return frozen(np.repeat(self.holder, runs.count))
        owner = np.full(self.total, -1, np.int32)
        if len(self.holder) <= 4096:  # few long runs: strided writes beat listing every position
            for holder, first, last, step in zip(self.holder, runs.start, runs.last, runs.step, strict=True):
                owner[first : last + 1 : step] = holder
        else:
            owner[expand(*runs)] = np.repeat(self.holder, runs.count)
        return frozen(owner)
