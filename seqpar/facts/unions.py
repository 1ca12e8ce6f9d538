"""Unions: what several bands show together, as few disjoint bands.

The k-th interval of a query, in key order, is its interval in band k. So a union depends neither on the order of its
parts nor on how they were cut: pairs in several parts count once, and parts that touch are one. A document of 7 tokens
with 2 keys to the left and the first 2 keys::

    query   keys 0 1 2 3 4 5 6      band 0   band 1
      3          # # # #            [0, 4)     -
      4          # # # # #          [0, 5)     -
      5          # #   # # #        [0, 2)   [3, 6)
      6          # #     # # #      [0, 2)   [4, 7)

Queries are cut into pieces where a band's spans begin and where two bounds meet, so that the order of all bounds is the
same for all queries of a piece. The sets of keys of its first and its last query then have one shape, and the bounds
between the two are linear.

Bands with other ends of keys are apart: one of them loses the keys that another shows to no fewer queries. Bands
without ends show their keys to all, so they always take precedence.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from seqpar.facts.bands import Band, Until, meetings
from seqpar.facts.intervals import (
    Intervals,
    Runs,
    Spans,
    cut,
    distinct,
    edges,
    expand,
    interval_of,
    linear_spans,
    minus,
    union,
)  # fmt: skip
from seqpar.facts.value import Ints

MOST_BANDS = 32


class Strips(NamedTuple):
    """Stretches of ``rows`` queries: query ``start + t`` sees the keys ``[lo + t * lo_step, hi + t * hi_step)``.

    A query may be in several strips or in none, and an interval whose end is not above its start is empty.
    """

    start: Ints
    rows: Ints
    lo: Ints
    hi: Ints
    lo_step: Ints
    hi_step: Ints

    @classmethod
    def of(cls, spans: Spans, tokens: int) -> Strips:
        """The spans of a band of ``tokens`` queries."""
        return cls(spans.start, np.diff(np.append(spans.start, tokens)), *spans[1:])

    @classmethod
    def together(cls, several: Sequence[Strips]) -> Strips:
        """Several, one after another."""
        return cls(*(np.concatenate(x) for x in zip(*several, strict=True)))

    def part(self, strip: Ints, start: Ints, rows: Ints) -> Strips:
        """Parts of some strips, with these first queries and numbers of queries."""
        t, lo_step, hi_step = start - self.start[strip], self.lo_step[strip], self.hi_step[strip]
        return Strips(start, rows, self.lo[strip] + t * lo_step, self.hi[strip] + t * hi_step, lo_step, hi_step)

    def filled(self) -> tuple[Strips, Ints]:
        """The parts in which every query sees a key, and the strip of each."""
        keys, slope = self.hi - self.lo, self.hi_step - self.lo_step
        first = np.where((slope > 0) & (keys <= 0), 1 - keys, 0)
        stop = np.where(slope < 0, np.minimum(keys, self.rows), np.where((slope == 0) & (keys <= 0), 0, self.rows))
        strip = np.flatnonzero(first < stop)
        return self.part(strip, (self.start + first)[strip], (stop - first)[strip]), strip

    def cut(self, breaks: Ints) -> tuple[Strips, Ints]:
        """The strips, cut at these queries, and the strip of each part."""
        runs, strip = cut(Runs(self.start, self.rows, np.ones_like(self.start)), distinct(breaks))
        return self.part(strip, runs.start, runs.count), strip

    def meetings(self) -> Ints:
        """The queries at which a bound meets another, and those after them; strips overlap whole or not at all."""
        piece = np.concatenate([self.start, self.start])
        value, step = np.concatenate([self.lo, self.hi]), np.concatenate([self.lo_step, self.hi_step])
        flat, rising = step == 0, step > 0
        levels, pieces = distinct(value[flat]), distinct(self.start)
        line = levels.size + 1
        base = np.searchsorted(pieces, piece) * line
        flats = distinct(base[flat] + np.searchsorted(levels, value[flat]))
        low, rows = value[rising], np.concatenate([self.rows, self.rows])[rising]
        first = np.searchsorted(flats, base[rising] + np.searchsorted(levels, low))
        stop = np.searchsorted(flats, base[rising] + np.searchsorted(levels, low + rows))
        met = levels[flats[expand(first, stop - first)] % line]
        at = np.repeat(piece[rising] - low, stop - first) + met
        return np.concatenate([at, at + 1])


def united(bands: Sequence[Band], offsets: Ints, kv_offsets: Ints) -> tuple[Band, ...]:
    """Disjoint bands that show what any of these shows. offsets: the starts of documents, and the last end.

    Raises: NotImplementedError if keys end at other queries in two bands, and neither shows all that the other does
    where they overlap; and for more than 32 bands.
    """
    tokens, keys = int(offsets[-1]), int(kv_offsets[-1])
    groups = _by_ends(bands, tokens, keys)
    strips = [Strips.together([Strips.of(band.spans, tokens) for band in group]) for group in groups]
    disjoint = _disjoint(strips, [group[0].until for group in groups], offsets, kv_offsets)
    found = [_with_ends(until, spans, tokens, keys) for until, spans in disjoint]
    open_groups = sum(group[0].until is None for group in found)
    result = [band for group in found for band in group]
    # where no end hides a pair any more, several groups show their keys to all
    return united(result, offsets, kv_offsets) if open_groups > 1 else tuple(result)


def bands_of(strips: Strips, offsets: Ints, kv_offsets: Ints) -> tuple[Band, ...]:
    """Disjoint bands that show what any of the strips shows; as `united`, with keys that do not end."""
    ((_, spans),) = _disjoint([strips], [None], offsets, kv_offsets)
    return tuple(map(Band, spans))


def sink_strips(queries: Ints, keys: Ints, sinks: int, causal: bool) -> Strips:
    """The first ``sinks`` keys of each document, shown to all its queries, if causal up to their own key.

    queries, keys: of each document; the last query is aligned with the last key.
    """
    start, first_key, zero = edges(queries)[:-1], edges(keys)[:-1], np.zeros_like(queries)
    shown, shift = np.minimum(sinks, keys), keys - queries
    if not causal:
        return Strips(start, queries, first_key, first_key + shown, zero, zero)
    rising = np.clip(shown - shift, 0, queries)  # queries up to the one that stands at the last sink
    stop = first_key + shift + 1
    below = Strips(start, rising, first_key, stop, zero, zero + 1)
    above = Strips(start + rising, queries - rising, first_key, first_key + shown, zero, zero)
    return Strips.together([below, above])


class _Row(NamedTuple):
    """The keys that one query of every piece sees, by the ends of the keys; numbers stand for key positions."""

    position: Ints
    seen: list[Intervals]

    @classmethod
    def of(cls, piece: Ints, pieces: int, lo: Ints, hi: Ints, group: Ints, groups: int) -> _Row:
        position = distinct(np.concatenate([lo, hi]))
        lo, hi = np.searchsorted(position, lo), np.searchsorted(position, hi)
        chosen = [group == n for n in range(groups)]
        return cls(position, [union(piece[c], lo[c], hi[c], pieces, position.size) for c in chosen])

    def common(self, a: int, b: int) -> Intervals:
        """What both groups show."""
        return minus(self.seen[a], minus(self.seen[a], self.seen[b], self.position.size), self.position.size)

    def without(self, a: int, b: int) -> None:
        """Let group ``a`` lose what group ``b`` shows."""
        self.seen[a] = minus(self.seen[a], self.seen[b], self.position.size)


def _disjoint(
    groups: Sequence[Strips], untils: Sequence[Until | None], offsets: Ints, kv_offsets: Ints
) -> list[tuple[Until | None, list[Spans]]]:
    """The spans of the bands of each group that shows any key; of the first, without a key, if none does."""
    tokens, keys = int(offsets[-1]), int(kv_offsets[-1])
    group = np.repeat(np.arange(len(groups)), [strips.start.size for strips in groups])
    strips, kept = Strips.together(groups).filled()
    group = group[kept]
    strips, kept = strips.cut(np.concatenate([offsets, strips.start, strips.start + strips.rows]))
    group = group[kept]
    strips, kept = strips.cut(strips.meetings())
    group = group[kept]
    start = distinct(np.concatenate([offsets, strips.start, strips.start + strips.rows]))[:-1]
    rows = np.diff(np.append(start, tokens))
    piece = np.searchsorted(start, strips.start)
    first, last = (
        _Row.of(
            piece, start.size, strips.lo + t * strips.lo_step, strips.hi + t * strips.hi_step, group, len(groups)
        )
        for t in (np.zeros_like(strips.rows), strips.rows - 1)
    )  # fmt: skip
    for pair in combinations(range(len(groups)), 2):
        lo, hi = first.position[first.common(*pair).lo], last.position[last.common(*pair).hi]
        for a, b in (pair[::-1], pair):
            if not _fewer(untils[b], untils[a], lo, hi, keys):
                first.without(a, b)
                last.without(a, b)
                break
        else:
            raise NotImplementedError(
                "the parts of the union share keys that end at one query in one part and at another in the other; give "
                "parts that share no pair, or one mask by Mask.from_bounds with until"
            )
    nth = [np.arange(x.group.size) - np.searchsorted(x.group, x.group) for x in first.seen]
    count = [int(x.max(initial=-1)) + 1 for x in nth]
    if sum(count) > MOST_BANDS:
        raise NotImplementedError(
            f"the mask needs {sum(count)} bands, because some query sees so many intervals of keys, and attention "
            f"computes at most {MOST_BANDS}; fetch the keys by seqpar.fetch and use a block-sparse kernel of your own"
        )
    row, nothing = np.stack([start, start + rows - 1], 1), kv_offsets[interval_of(start, offsets[:-1])]
    sampled = np.stack([rows > 0, rows > 1], 1)

    def spans(n: int, k: int) -> Spans:
        lo, hi = np.stack([nothing, nothing], 1), np.stack([nothing, nothing], 1)
        for column, (position, seen) in enumerate((first, last)):
            group, low, high = (x[nth[n] == k] for x in seen[n])
            lo[group, column], hi[group, column] = position[low], position[high]
        return linear_spans(lo[sampled], hi[sampled], row[sampled])

    count[0] = max(count[0], not any(count))
    return [(untils[n], [spans(n, k) for k in range(count[n])]) for n in range(len(groups)) if count[n]]


def _by_ends(bands: Sequence[Band], tokens: int, keys: int) -> list[list[Band]]:
    """The bands in groups of equal ends, those without ends first.

    A band keeps the ends that hide a pair of its own. So two bands also have equal ends if both keep their pairs when
    each key ends where it ends first.
    """
    groups: list[list[Band]] = []
    for band in sorted(bands, key=lambda band: [x.tobytes() for x in band.until or ()]):
        for n, group in enumerate(groups):
            if band.until is None or group[0].until is None:
                alike = [band, *group] if band.until is group[0].until else []
            else:
                until = _earlier([band.until, group[0].until])
                alike = [Band(x.spans, until) for x in (band, *group)]
                if any(_pairs(x, tokens, keys) < _pairs(y, tokens, keys) for x, y in zip(alike, (band, *group))):
                    alike = []
            if alike:
                groups[n] = alike
                break
        else:
            groups.append([band])
    return groups


def _earlier(several: Sequence[Until]) -> Until:
    """For each key the first of its ends."""
    start = distinct(np.concatenate([until.start for until in several]))
    return Until(start, np.min([until.of(start) for until in several], axis=0)).joined()


def _pairs(band: Band, tokens: int, keys: int) -> int:
    """The number of pairs of a band whose keys end."""
    s = band.spans
    rows = np.diff(np.append(s.start, tokens))
    return int(meetings(band, Runs(s.start, rows, np.ones_like(rows)), s.start + keys - tokens).areas().sum())


def _fewer(b: Until | None, a: Until | None, lo: Ints, hi: Ints, keys: int) -> bool:
    """Whether some key of the intervals is seen by fewer queries with the ends ``b`` than with ``a``."""
    if b is None or lo.size == 0:
        return False
    start = distinct(np.concatenate([b.start] + ([] if a is None else [a.start])))
    fewer = b.of(start) < (keys if a is None else a.of(start))
    before = edges(np.diff(np.append(start, keys)) * fewer)

    def below(key: Ints) -> Ints:
        run = interval_of(key, start)
        return before[run] + fewer[run] * (key - start[run])

    return bool((below(lo) < below(hi)).any())


def _with_ends(until: Until | None, several: Sequence[Spans], tokens: int, keys: int) -> list[Band]:
    """Bands of these spans, with the ends that hide a pair in any of them."""
    if until is None:
        return [Band(spans) for spans in several]
    ends = [end for spans in several if (end := Band(spans, until).canonical(tokens, keys).until)]
    return [Band(spans, _earlier(ends) if ends else None) for spans in several]
