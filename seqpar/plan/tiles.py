"""What one step asks of a kernel: tile tables and segments, derived from bounds and positions.

Keys of a step lie in position order, so the keys that a query sees are consecutive rows, and so are the key tiles
that a query tile visits.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from seqpar.layout import runs_of
from seqpar.mask import Ints, linear_spans


@dataclass(frozen=True, eq=False)
class Tiles:
    """Tile tables of a step for tiles of ``bm`` query rows and ``bn`` key rows.

    rows [tiles + 1]: first query row of each query tile. begin, end: key tiles that it visits. full_begin, full_end:
    those of them in which every query of the tile sees every key, so that no bound need be read. q_begin, q_end: the
    transposed table, query tiles that visit each key tile (a covering interval).
    """

    bm: int
    bn: int
    rows: Ints
    begin: Ints
    full_begin: Ints
    full_end: Ints
    end: Ints
    q_begin: Ints
    q_end: Ints


def tile_tables(lo: Ints, hi: Ints, query_pos: Ints, key_pos: Ints, bm: int, bn: int) -> Tiles:
    """Tile tables of queries with bounds ``lo, hi`` over keys at ascending ``key_pos``."""
    rows = _query_tiles(lo, hi, query_pos, bm)
    first = rows[:-1]
    seen = lo < hi
    far = np.iinfo(np.int64).max
    if first.size == 0 or key_pos.size == 0:
        none = np.zeros(first.size, np.int64)
        per_key = np.zeros(-(-key_pos.size // bn), np.int64)
        return Tiles(bm, bn, rows, none, none, none, none, per_key, per_key)
    min_lo = np.minimum.reduceat(np.where(seen, lo, far), first)
    max_hi = np.maximum.reduceat(np.where(seen, hi, -1), first)
    max_lo = np.maximum.reduceat(np.where(seen, lo, far), first)  # a row that sees nothing has no full tile
    min_hi = np.minimum.reduceat(np.where(seen, hi, -1), first)
    starts = np.arange(0, key_pos.size, bn)
    key_min = key_pos[starts]
    key_max = key_pos[np.minimum(starts + bn, key_pos.size) - 1]
    begin = np.searchsorted(key_max, min_lo)
    end = np.maximum(np.searchsorted(key_min, max_hi), begin)
    full_begin = np.clip(np.searchsorted(key_min, max_lo), begin, end)
    full_end = np.clip(np.searchsorted(key_max, min_hi), full_begin, end)
    q_begin, q_end = _transposed(begin, end, len(starts))
    return Tiles(bm, bn, rows, begin, full_begin, full_end, end, q_begin, q_end)


def _query_tiles(lo: Ints, hi: Ints, pos: Ints, bm: int) -> Ints:
    """First rows of the query tiles, and the number of rows. With a window a tile does not cross a run: the keys
    between the two runs' windows would be visited for nothing."""
    rows = pos.size
    # A document of one token also makes lo rise by one; of a window most rows do.
    rising = np.count_nonzero((lo[1:] - lo[:-1] == 1) & (hi[1:] > lo[1:]))
    if 2 * rising <= rows:
        return np.append(np.arange(0, rows, bm), rows)
    count = runs_of(pos).count
    tiles = -(-count // bm)
    nth = np.arange(tiles.sum()) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    return np.append(np.repeat(np.cumsum(count) - count, tiles) + nth * bm, rows)


def _transposed(begin: Ints, end: Ints, key_tiles: int) -> tuple[Ints, Ints]:
    """For each key tile the first query tile that visits it and one past the last."""
    q_begin = np.full(key_tiles, len(begin), np.int64)
    q_end = np.zeros(key_tiles, np.int64)
    visiting = np.flatnonzero(begin < end)
    b, e = begin[visiting], end[visiting]
    if (np.diff(b) >= 0).all() and (np.diff(e) >= 0).all():
        tile = np.arange(key_tiles)
        first, last = np.searchsorted(e, tile, side="right"), np.searchsorted(b, tile, side="right") - 1
        seen = first <= last
        q_begin[seen], q_end[seen] = visiting[first[seen]], visiting[last[seen]] + 1
        return np.minimum(q_begin, q_end), q_end
    for i in visiting[::-1]:
        q_begin[begin[i] : end[i]] = i
    for i in visiting:
        q_end[begin[i] : end[i]] = i + 1
    return np.minimum(q_begin, q_end), q_end


class Kind(IntEnum):
    """How the keys of a segment are seen: all; up to the diagonal that ends bottom-right; a band along it."""

    FULL = 0
    CAUSAL = 1
    WINDOW = 2


@dataclass(frozen=True, eq=False)
class Segments:
    """The step as rectangles, contiguous on both sides, for kernels that know no positions.

    Every query row that sees a key is in at most one segment, so one variable-length call serves all of them; rows
    that fit none are in ``remainder``. kind CAUSAL aligns the last query with the last key. left, right: keys seen to
    either side of the bottom-right diagonal if WINDOW, -1 for no limit.
    """

    q_row: Ints
    q_len: Ints
    k_row: Ints
    k_len: Ints
    kind: Ints
    left: Ints
    right: Ints
    remainder: Ints


def segments(lo: Ints, hi: Ints, key_pos: Ints) -> Segments:
    """Segments of queries with bounds ``lo, hi`` over keys at ascending ``key_pos``."""
    first, stop = np.searchsorted(key_pos, lo), np.searchsorted(key_pos, hi)
    s = linear_spans(first, np.maximum(first, stop))
    q_len = np.diff(np.append(s.start, lo.size))
    last = s.hi + s.hi_step * (q_len - 1)
    k_len = last - s.lo
    kind = np.select([s.lo_step == 1, s.hi_step == 1], [Kind.WINDOW, Kind.CAUSAL], Kind.FULL)
    left = np.where(s.lo_step == 1, k_len - q_len, -1)
    right = np.where((s.lo_step == 1) & (s.hi_step == 1), 0, -1)
    sees = last > s.lo + s.lo_step * (q_len - 1)
    sees |= s.hi > s.lo
    fits = (s.lo_step == 0) | (left >= 0)
    kept = sees & fits
    rest = np.flatnonzero(np.repeat(sees & ~fits, q_len))
    return Segments(s.start[kept], q_len[kept], s.lo[kept], k_len[kept], kind[kept], left[kept], right[kept], rest)
