"""Unions of bands: what several masks show together, as few disjoint bands of one interval per query each.

Bands without ends of keys are joined query by query: the k-th interval of a query, in key order, is its interval in
band k. So a union does not depend on the order of its parts, pairs in several parts count once, and parts that touch
are one. Documents of 8 tokens with a window of 2 and 2 sink tokens::

    query   keys 0 1 2 3 4 5 6 7      band 0   band 1
      2          # # #                [0, 3)     -
      3          # # # #              [0, 4)     -
      4          # # # # #            [0, 5)     -
      5          # #   # # #          [0, 2)   [3, 6)
      6          # #     # # #        [0, 2)   [4, 7)

Bounds are linear on pieces of queries. Pieces are cut where two bounds meet, so that their order is the same for all
queries of a piece. A band whose keys may end keeps what no band without ends shows; two bands of the same ends are
joined like those without, and two of other ends must not overlap.

Sources: the sink tokens, Xiao et al. 2024 (StreamingLLM, section 3.2); slices, Zewei Tao et al. 2025 (MagiAttention).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from seqpar.facts.bands import Band, Until
from seqpar.facts.intervals import Spans, distinct, pieces_between
from seqpar.facts.value import Ints, int64_of

MOST_BANDS = 32
KINDS = ("full", "causal", "inv_causal", "bi_causal")


class Bound(NamedTuple):
    """One bound of all pieces: its value at the first query of each and its slope, [pieces]."""

    at: Ints
    step: Ints

    def where(self, chosen: NDArray[np.bool_], other: Bound) -> Bound:
        """This bound where chosen, the other elsewhere."""
        return Bound(np.where(chosen, self.at, other.at), np.where(chosen, self.step, other.step))


Interval = tuple[Bound, Bound]


def united(bands: Sequence[Band], tokens: int, keys: int) -> tuple[Band, ...]:
    """Disjoint bands that show what any of these shows. tokens: queries; keys: their number.

    Raises: NotImplementedError for bands of different ends that overlap, and for more than 32 bands.
    """
    groups: list[tuple[Until | None, list[Spans]]] = [(None, [])]
    for band in bands:
        for until, spans in groups:
            if _same(until, band.until):
                spans.append(band.spans)
                break
        else:
            groups.append((band.until, [band.spans]))
    start = _meeting_points([band.spans for band in bands], tokens)
    found: list[tuple[Until | None, list[Interval]]] = []
    for until, several in groups:
        joined = _joined([_at(spans, start) for spans in several])
        for other, shown in found:
            if other is None:
                joined = [part for interval in joined for part in _without(interval, shown)]
            elif any(_overlap(a, b).any() for a in joined for b in shown):
                raise NotImplementedError(
                    "both parts of the union have keys that end early, and they overlap; give disjoint parts, or one "
                    "mask by from_bounds"
                )
        found.append((until, _joined(joined)))
    count = np.diff(np.append(start, tokens))
    result = []
    for until, intervals in found:
        result += [Band(_spans(start, count, *interval), until).canonical(tokens, keys) for interval in intervals]
    none = np.zeros(1, np.int64)
    return few(tuple(result) or (Band(Spans(none, none, none, none, none)),))


def few(bands: tuple[Band, ...]) -> tuple[Band, ...]:
    """The bands, if a step can compute them one after another. Raises: NotImplementedError for too many."""
    if len(bands) > MOST_BANDS:
        raise NotImplementedError(
            f"the mask has {len(bands)} bands, as some query sees so many intervals of keys, and attention computes at "
            f"most {MOST_BANDS}; bring the keys with seqpar.fetch, and use a block-sparse kernel of your own"
        )
    return bands


def with_sinks(bands: Sequence[Band], whole: Spans, offsets: Ints, kv_offsets: Ints, sinks: int) -> tuple[Band, ...]:
    """The bands, and the first keys of each document. whole: the bounds of a mask without a window."""
    tokens, keys = int(offsets[-1]), int(kv_offsets[-1])
    start = distinct(np.concatenate([whole.start, offsets[:-1]]))
    document = np.searchsorted(offsets, start, side="right") - 1
    most = np.minimum(kv_offsets[document] + sinks, kv_offsets[document + 1])
    lo, hi = _at(whole, start)
    start = pieces_between(start, [most - hi.at, most - lo.at], tokens)
    document = np.searchsorted(offsets, start, side="right") - 1
    most = np.minimum(kv_offsets[document] + sinks, kv_offsets[document + 1])
    lo, hi = _at(whole, start)
    hi = hi.where(hi.at < most, Bound(most, np.zeros_like(most)))
    seen = lo.at < hi.at
    seen |= (lo.at == hi.at) & (hi.step > lo.step)
    none = Bound(np.zeros_like(most), np.zeros_like(most))
    count = np.diff(np.append(start, tokens))
    band = Band(_spans(start, count, lo.where(seen, none), hi.where(seen, none)))
    return united([*bands, band], tokens, keys)


def slices(q_ranges: ArrayLike, k_ranges: ArrayLike, kinds: Sequence[str], tokens: int | None, keys: int | None) -> Any:
    """Bands of slices, and the numbers of queries and keys. See `Mask.from_slices`."""
    q, k = _ranges("q_ranges", q_ranges), _ranges("k_ranges", k_ranges)
    kinds = list(kinds)
    if not len(q) == len(k) == len(kinds):
        raise ValueError(
            f"got {len(q)} q_ranges, {len(k)} k_ranges and {len(kinds)} kinds; give one of each for every slice"
        )
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ValueError(f"kinds must be of {', '.join(KINDS)}, got {unknown[0]!r}")
    if tokens is None:
        tokens = int(q[:, 1].max() if keys is not None else max(q[:, 1].max(), k[:, 1].max()))
    keys = tokens if keys is None else keys
    for name, ranges, most in (("q_ranges", q, tokens), ("k_ranges", k, keys)):
        if ranges.max() > most:
            raise ValueError(
                f"{name} end at {ranges.max()}, beyond the {most} {'queries' if name[0] == 'q' else 'keys'}"
            )
    order = np.argsort(q[:, 0], kind="stable")
    free: list[int] = []  # where each band ends so far
    members: list[list[int]] = []
    for n in order.tolist():
        if q[n, 0] == q[n, 1] or k[n, 0] == k[n, 1]:
            continue
        place = next((i for i, end in enumerate(free) if end <= q[n, 0]), len(free))
        if place == len(free):
            free.append(0)
            members.append([])
        free[place] = int(q[n, 1])
        members[place].append(n)
    empty = Band(_placed([], tokens))
    bands = [Band(_placed([_slice(q[n], k[n], kinds[n]) for n in band], tokens)) for band in members]
    return united(bands or [empty], tokens, keys), tokens, keys


def _slice(q: Ints, k: Ints, kind: str) -> list[tuple[int, int, int, int, int]]:
    """Pieces of a slice: first query, lo, hi, lo_step, hi_step; and its end, which sees nothing."""
    (first, stop), (low, high) = q.tolist(), k.tolist()
    rows, columns = stop - first, high - low
    hi_step, lo_step = int(kind in ("causal", "bi_causal")), int(kind in ("inv_causal", "bi_causal"))
    begin = max(0, rows - columns) if hi_step else 0  # rows that see a key
    end = min(rows, columns) if lo_step else rows
    if hi_step and lo_step and columns < rows:
        begin = end = 0
    pieces = [(first, low, low, 0, 0)] if begin else []
    if begin < end:
        hi = high - (rows - 1 - begin) if hi_step else high
        pieces.append((first + begin, low + begin * lo_step, hi, lo_step, hi_step))
    return [*pieces, (first + max(begin, end), high, high, 0, 0)] if end < rows else [*pieces, (stop, 0, 0, 0, 0)]


def _placed(several: Sequence[list[tuple[int, int, int, int, int]]], tokens: int) -> Spans:
    """The spans of a band of slices with disjoint queries, in order; other queries see nothing."""
    pieces: list[tuple[int, int, int, int, int]] = [(0, 0, 0, 0, 0)]
    for part in several:
        pieces += part
    # of pieces that begin at one query, the last counts: an earlier one is empty
    kept = [piece for piece, after in zip(pieces, [*pieces[1:], (tokens,)], strict=True) if piece[0] < after[0]]
    start, lo, hi, lo_step, hi_step = np.array(kept, np.int64).T
    several_rows = np.diff(np.append(start, tokens)) > 1
    return Spans(start, lo, hi, lo_step * several_rows, hi_step * several_rows)


def blocks(table: ArrayLike, block: int | tuple[int, int], tokens: int | None, keys: int | None) -> Any:
    """Bands of a table of blocks, and the numbers of queries and keys. See `Mask.blocks`."""
    shown = np.asarray(table)
    if shown.ndim != 2 or shown.dtype != bool or not shown.size:
        raise ValueError(f"table must be booleans [query blocks, key blocks], got {shown.dtype}{list(shown.shape)}")
    rows, columns = (block, block) if isinstance(block, (int, np.integer)) else block
    if min(rows, columns) < 1:
        raise ValueError(f"block must be a size, or (queries, keys), of at least 1, got {block!r}")
    held = shown.shape[0] * rows, shown.shape[1] * columns
    tokens = held[0] if tokens is None else tokens
    if keys is None:
        keys = tokens if held[0] == held[1] else held[1]
    for name, most, size, count in (("queries", tokens, rows, shown.shape[0]), ("keys", keys, columns, shown.shape[1])):
        if not (count - 1) * size < most <= count * size:
            raise ValueError(f"{count} blocks of {size} {name} do not hold {most}; give a table with a block for each")
    edge = np.diff(np.pad(shown, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    (row, begin), (_, end) = np.nonzero(edge == 1), np.nonzero(edge == -1)
    nth = np.arange(row.size) - np.searchsorted(row, row)
    start, zeros = np.arange(shown.shape[0]) * rows, np.zeros(shown.shape[0], np.int64)
    bands = []
    for band in range(int(nth.max(initial=0)) + 1):
        lo, hi, own = zeros.copy(), zeros.copy(), nth == band
        lo[row[own]] = begin[own] * columns
        hi[row[own]] = np.minimum(end[own] * columns, keys)
        bands.append(Band(Spans(start, lo, hi, zeros, zeros)))
    return few(tuple(bands)), tokens, keys


def _ranges(name: str, values: ArrayLike) -> Ints:
    pairs = np.asarray(values)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or not pairs.size or pairs.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers [slices, 2], as [[start, end], ...], got {values!r:.200}")
    pairs = int64_of(name, pairs)
    bad = (pairs[:, 0] < 0) | (pairs[:, 1] < pairs[:, 0])
    if bad.any():
        n = int(np.flatnonzero(bad)[0])
        raise ValueError(f"{name} of slice {n} is {pairs[n].tolist()}, expected 0 <= start <= end")
    return pairs


def _same(a: Until | None, b: Until | None) -> bool:
    if a is None or b is None:
        return a is b
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def _at(spans: Spans, start: Ints) -> Interval:
    """Both bounds of spans on pieces that lie in one span each."""
    lo, hi, lo_step, hi_step = Band(spans).linear(start)
    return Bound(lo, lo_step), Bound(hi, hi_step)


def _meeting_points(several: Sequence[Spans], tokens: int) -> Ints:
    """Starts of pieces on which any two bounds are in one order: always below, always equal, or always above."""
    start = distinct(np.concatenate([spans.start for spans in several]))
    bounds = [bound for spans in several for bound in _at(spans, start)]
    cuts: list[Ints] = []
    for n, a in enumerate(bounds):
        for b in bounds[:n]:
            # they meet after so many rows if one rises to the other
            rows = np.where(a.step < b.step, a.at - b.at, np.where(a.step > b.step, b.at - a.at, -2))
            cuts += [rows, rows + 1]
    return pieces_between(start, cuts, tokens)


def _joined(intervals: Sequence[Interval]) -> list[Interval]:
    """The maximal intervals of every piece, in order; without those that are empty everywhere."""
    if not intervals:
        return []
    lo, hi = (np.stack([pair[side].at for pair in intervals]) for side in (0, 1))
    steps = [np.stack([pair[side].step for pair in intervals]) for side in (0, 1)]
    empty = (lo > hi) | ((lo == hi) & (steps[1] <= steps[0]))
    order = np.argsort(np.where(empty, np.iinfo(np.int64).max, lo), axis=0, kind="stable")
    lo, hi, empty, *steps = (np.take_along_axis(x, order, 0) for x in (lo, hi, empty, *steps))
    pieces = np.arange(lo.shape[1])
    number = np.full(lo.shape[1], -1)  # of the interval that is being joined
    zeros = np.zeros(lo.shape, np.int64)
    low, high, low_step, high_step = zeros.copy(), zeros.copy(), zeros.copy(), zeros.copy()
    for n in range(len(intervals)):
        at = np.maximum(number, 0)
        fresh = ~empty[n] & ((number < 0) | (lo[n] > high[at, pieces]))
        longer = ~empty[n] & ~fresh & (hi[n] > high[at, pieces])
        number = number + fresh
        for target, value in ((low, lo[n]), (low_step, steps[0][n])):
            target[number[fresh], pieces[fresh]] = value[fresh]
        for target, value in ((high, hi[n]), (high_step, steps[1][n])):
            target[number[fresh | longer], pieces[fresh | longer]] = value[fresh | longer]
    count = int(number.max(initial=-1)) + 1
    return [(Bound(low[n], low_step[n]), Bound(high[n], high_step[n])) for n in range(count)]


def _without(interval: Interval, shown: Sequence[Interval]) -> list[Interval]:
    """What others, in key order, leave of an interval, query by query."""
    lo, hi = interval
    none = Bound(np.zeros_like(lo.at), np.zeros_like(lo.at))
    parts: list[Interval] = []
    for other in shown:
        meets = _overlap((lo, hi), other)
        parts.append((lo.where(meets, none), other[0].where(meets, none)))
        lo = other[1].where(meets, lo)
    return [*parts, (lo, hi)]


def _overlap(a: Interval, b: Interval) -> NDArray[np.bool_]:
    """The pieces in which two intervals share a key."""
    filled = [(lo.at < hi.at) | ((lo.at == hi.at) & (hi.step > lo.step)) for lo, hi in (a, b)]
    return filled[0] & filled[1] & (a[0].at < b[1].at) & (b[0].at < a[1].at)


def _spans(start: Ints, count: Ints, lo: Bound, hi: Bound) -> Spans:
    """Spans of pieces, joined where one continues another."""
    rises = count > 1
    lo_step, hi_step = lo.step * rises, hi.step * rises
    goes_on = (lo.at + lo_step * count)[:-1] == lo.at[1:]
    goes_on &= (hi.at + hi_step * count)[:-1] == hi.at[1:]
    alike = (lo_step[1:] == lo_step[:-1]) & (hi_step[1:] == hi_step[:-1])
    first = np.flatnonzero(np.append(True, ~(goes_on & (alike | (count[1:] == 1)) & (count[:-1] > 1))))
    return Spans(start[first], lo.at[first], hi.at[first], lo_step[first], hi_step[first])
