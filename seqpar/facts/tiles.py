"""The tile tables of one step for a kernel, derived from bounds and positions.

The keys of a step are in position order, so a query sees consecutive key rows, and a query tile visits consecutive key
tiles. For a causal document, with full tiles (F) and partial ones whose bounds must be read (P)::

    query tile   key tile 0 1 2 3     begin  full_begin  full_end  end
        0                 P             0         0          0      1
        1                 F P           0         0          1      2
        2                 F F P         0         0          2      3
        3                 F F F P       0         0          3      4

    transposed   q_begin        0 1 2 3
                 q_full_begin   1 2 3 3
                 q_full_end     4 4 4 3
                 q_end          4 4 4 4

Where keys end before the last query, as in trees, a query tile visits a list of stretches of key tiles instead, see
`seqpar.facts.stretches`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from seqpar.facts.stretches import Ends, Stretches, stretches
from seqpar.facts.value import Ints


@dataclass(frozen=True, eq=False)
class Tiles:
    """Tile tables of a step for tiles of ``bm`` query rows and ``bn`` key rows.

    rows [tiles + 1]: first query row of each query tile; uniform: ``rows[i] == i * bm`` for all i. begin, end: the key
    tiles that it visits. full_begin, full_end: those among them in which every query sees every key, so that no bound
    needs to be read.

    q_begin, q_end: the transposed table, an interval of query tiles that covers those that visit each key tile;
    q_exact: every query tile in these intervals visits the key tile, so none needs to be checked. q_full_begin,
    q_full_end: consecutive query tiles among them for which the pair is full; all such tiles, if they are consecutive.

    order, q_order: query and key tiles by falling number of visits, ties in row order: light tiles fill the tail of a
    launch.

    stretches: None unless keys end. Then they are the key tiles that each query tile visits, ``begin`` and ``end`` are
    the first of them and one past the last, and ``full_begin == full_end == begin``.
    """

    bm: int
    bn: int
    rows: Ints
    begin: Ints
    full_begin: Ints
    full_end: Ints
    end: Ints
    q_begin: Ints
    q_full_begin: Ints
    q_full_end: Ints
    q_end: Ints
    order: Ints
    q_order: Ints
    uniform: bool
    q_exact: bool
    stretches: Stretches | None = None

    @property
    def visits(self) -> int:
        """Number of (query tile, key tile) pairs that a kernel computes."""
        by = self if self.stretches is None else self.stretches
        return int((by.end - by.begin).sum())

    def cover(self, area: int) -> float:
        """The attended fraction of what a GPU computes: ``area`` pairs of the step over ``bm * bn`` pairs per visit.

        A tile counts in full however few rows or keys it has, since the matrix unit computes all of it. 1 without
        visits.
        """
        return area / (self.visits * self.bm * self.bn) if self.visits else 1.0


class _Sight(NamedTuple):
    """What queries see: lowest and highest key position of each key tile; the bounds of rows, and where keys end.

    low, high [M]: rows that see nothing have ``high < low``. ends: positions of rows [M], earliest and latest end of
    keys in each key tile; None if no key ends.
    """

    key_low: Ints
    key_high: Ints
    low: Ints
    high: Ints
    ends: tuple[Ints, Ints, Ints] | None

    def cut(self, rows: Ints) -> _Cut:
        """The key tiles that query tiles with these first rows visit."""
        first = rows[:-1]
        begin = np.searchsorted(self.key_high, np.minimum.reduceat(self.low, first))
        end = np.maximum(np.searchsorted(self.key_low, np.maximum.reduceat(self.high, first)), begin)
        if self.ends is None:
            return _Cut(rows, begin, end, end - begin)
        at, least, most = self.ends
        ends = Ends(at[first], at[rows[1:] - 1], least, most)
        found = stretches(begin, *self.full(rows, begin, end), end, ends)
        return _Cut(rows, begin, end, found.visits, ends, found)

    def full(self, rows: Ints, begin: Ints, end: Ints) -> tuple[Ints, Ints]:
        """``full_begin, full_end`` by the bounds; a row that sees nothing has no full tile."""
        full_begin = np.clip(np.searchsorted(self.key_low, np.maximum.reduceat(self.low, rows[:-1])), begin, end)
        full_end = np.searchsorted(self.key_high, np.minimum.reduceat(self.high, rows[:-1]))
        return full_begin, np.clip(full_end, full_begin, end)


class _Cut(NamedTuple):
    """Query tiles. begin, end: key tiles that their bounds admit. visits: of each; fewer where keys end."""

    rows: Ints
    begin: Ints
    end: Ints
    visits: Ints
    ends: Ends | None = None
    stretches: Stretches | None = None

    @property
    def cost(self) -> int:
        """One more query tile costs about as much as one more visit."""
        return int(self.visits.sum()) + self.rows.size


def tile_tables(
    lo: Ints, hi: Ints, key_pos: Ints, bm: int, bn: int, *, at: Ints | None = None, until: Ints | None = None
) -> Tiles:
    """Tile tables of queries with bounds ``lo, hi`` over keys at ascending ``key_pos``.

    until: of the keys, if some end; then with the queries' ascending positions ``at``.
    """
    starts = np.arange(0, key_pos.size, bn)
    seen = lo < hi
    low, high = np.where(seen, lo, np.iinfo(np.int64).max), np.where(seen, hi, -1)
    ends = None
    if at is not None and until is not None:
        ends = at, np.minimum.reduceat(until, starts), np.maximum.reduceat(until, starts)
    sight = _Sight(key_pos[starts], key_pos[np.minimum(starts + bn, key_pos.size) - 1], low, high, ends)
    cut = sight.cut(np.append(np.arange(0, lo.size, bm), lo.size))
    jumps = _jumps(lo, hi, key_pos, bm, bn)
    if jumps.size:
        anew = sight.cut(_tiles_from(jumps, lo.size, bm))
        if anew.cost * 100 < cut.cost * 99:  # equal tiles have simpler addresses, worth 1 %
            cut = anew
    rows, begin, end, visits, close, found = cut
    full_begin, full_end = sight.full(rows, begin, end)
    q_begin, q_end = _transposed(begin, end, starts.size)
    q_full_begin, q_full_end = _transposed_full(full_begin, full_end, q_begin)
    if close is not None and found is not None:
        q_end = np.minimum(q_end, close.open_before)
        q_begin = np.minimum(q_begin, q_end)
        q_full_end = np.minimum(q_full_end, close.full_before)
        q_full_begin, q_full_end = (np.where(q_full_begin < q_full_end, x, q_begin) for x in (q_full_begin, q_full_end))
        begin, end = found.hull(begin)
        full_begin = full_end = begin
    return Tiles(
        bm, bn, rows, begin, full_begin, full_end, end, q_begin, q_full_begin, q_full_end, q_end,
        order=np.argsort(-visits, kind="stable"),
        q_order=np.argsort(q_begin - q_end, kind="stable"),
        uniform=bool((rows[:-1] == np.arange(rows.size - 1) * bm).all()),
        q_exact=bool((q_end - q_begin).sum() == visits.sum()),
        stretches=found,
    )  # fmt: skip


def _jumps(lo: Ints, hi: Ints, key_pos: Ints, bm: int, bn: int) -> Ints:
    """Rows whose keys begin or end at least two key tiles from the previous row's.

    Query tiles that restart there may visit fewer key tiles. Empty if there are too many for that to be worthwhile.
    """
    far = 2 * bn
    # Positions are at least as far apart as their rows.
    at = np.flatnonzero((np.abs(lo[1:] - lo[:-1]) >= far) | (np.abs(hi[1:] - hi[:-1]) >= far)) + 1
    if at.size * bm > 4 * lo.size:
        return at[:0]
    low, high = (np.searchsorted(key_pos, x[at]) - np.searchsorted(key_pos, x[at - 1]) for x in (lo, hi))
    return at[(np.abs(low) >= far) | (np.abs(high) >= far)]


def _tiles_from(at: Ints, rows: int, bm: int) -> Ints:
    """First rows of query tiles that restart at the rows ``at``, and the number of rows."""
    edge = np.concatenate([[0], at, [rows]])
    tiles = -(-np.diff(edge) // bm)
    nth = np.arange(tiles.sum()) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    return np.append(np.repeat(edge[:-1], tiles) + nth * bm, rows)


def _holders(begin: Ints, end: Ints, key_tiles: int) -> tuple[Ints, Ints, Ints] | None:
    """The non-empty intervals, and for each key tile the first of them that holds it and one past the last.

    None if the intervals' ends do not ascend: the intervals that hold a tile then need not be consecutive.
    """
    filled = np.flatnonzero(begin < end)
    b, e = begin[filled], end[filled]
    if (b[1:] < b[:-1]).any() or (e[1:] < e[:-1]).any():
        return None
    tile = np.arange(key_tiles)
    return filled, np.searchsorted(e, tile, side="right"), np.searchsorted(b, tile, side="right")


def _transposed(begin: Ints, end: Ints, key_tiles: int) -> tuple[Ints, Ints]:
    """For each key tile the first query tile that visits it, and one past the last."""
    q_begin = np.full(key_tiles, len(begin), np.int64)
    q_end = np.zeros(key_tiles, np.int64)
    holders = _holders(begin, end, key_tiles)
    if holders:
        filled, first, stop = holders
        seen = first < stop
        q_begin[seen], q_end[seen] = filled[first[seen]], filled[stop[seen] - 1] + 1
        return np.minimum(q_begin, q_end), q_end
    visiting = np.flatnonzero(begin < end)
    for i in visiting[::-1]:
        q_begin[begin[i] : end[i]] = i
    for i in visiting:
        q_end[begin[i] : end[i]] = i + 1
    return np.minimum(q_begin, q_end), q_end


def _transposed_full(begin: Ints, end: Ints, q_begin: Ints) -> tuple[Ints, Ints]:
    """For each key tile, consecutive query tiles that have it in ``[begin, end)``; empty at ``q_begin`` if none has.

    If other query tiles are between them, the longer of the first and the last stretch. None if the ends do not ascend.
    """
    holders = _holders(begin, end, q_begin.size)
    if not holders:
        return q_begin, q_begin
    filled, first, stop = holders
    full = first < stop
    first, stop = first[full], stop[full]
    run = filled - np.arange(filled.size)  # equal along consecutive query tiles
    head = np.minimum(np.searchsorted(run, run[first], side="right"), stop)
    tail = np.maximum(np.searchsorted(run, run[stop - 1]), first)
    longer = head - first >= stop - tail
    full_begin, full_end = q_begin.copy(), q_begin.copy()
    full_begin[full] = filled[np.where(longer, first, tail)]
    full_end[full] = filled[np.where(longer, head, stop) - 1] + 1
    return full_begin, full_end
