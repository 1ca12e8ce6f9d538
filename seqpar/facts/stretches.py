"""The key tiles that query tiles visit where keys end: several stretches each, since closed keys lie between open ones.

A prompt of one tile with answers of two tiles each; a query tile skips the answers before its own. Full tiles (F),
partial ones whose bounds and ends must be read (P), closed ones (.)::

    query tile   key tile 0 1 2 3 4 5 6     stretches
        0                 P                 [0, 1)
        1                 F P               [0, 1) full, [1, 2)
        2                 F F P             [0, 2) full, [2, 3)
        3                 F . . P           [0, 1) full, [3, 4)
        4                 F . . F P         [0, 1) full, [3, 4) full, [4, 5)
        5                 F . . . . P       [0, 1) full, [5, 6)
        6                 F . . . . F P     [0, 1) full, [5, 6) full, [6, 7)
    open before           7 3 3 5 5 7 7

Positions ascend along the query tiles, so each key tile is open for the query tiles before some number, and full, as
far as ends go, before another one. Where these numbers differ between neighbouring key tiles, a stretch of the query
tiles between them begins or ends: no loop visits a pair of tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from seqpar.facts.intervals import edges, expand, order_of
from seqpar.facts.value import Ints


@dataclass(frozen=True, eq=False)
class Stretches:
    """Key tiles by query tile: stretches ``edge[i]`` to ``edge[i + 1]`` are those of query tile ``i``.

    edge [tiles + 1]. begin, end, full [stretches]: disjoint, ascending intervals of key tiles. full: every query of the
    tile sees every key, so that neither bounds nor ends need to be read; neighbours that touch differ in it.

    at [tiles]: position of the first query. until [key tiles]: the latest end of a key. Query tile ``i`` visits key
    tile ``n`` iff ``Tiles.begin[i] <= n < Tiles.end[i]`` and ``at[i] < until[n]``.
    """

    edge: Ints
    begin: Ints
    end: Ints
    full: NDArray[np.bool_]
    at: Ints
    until: Ints

    @property
    def visits(self) -> Ints:
        """The number of key tiles that each query tile visits."""
        total = edges(self.end - self.begin)
        return total[self.edge[1:]] - total[self.edge[:-1]]

    def hull(self, empty: Ints) -> tuple[Ints, Ints]:
        """First key tile of each query tile, and one past the last; ``empty`` twice where there is none."""
        begin, end = empty.copy(), empty.copy()
        some = self.edge[:-1] < self.edge[1:]
        begin[some], end[some] = self.begin[self.edge[:-1][some]], self.end[self.edge[1:][some] - 1]
        return begin, end


class Ends(NamedTuple):
    """When tiles close. first, last [tiles]: of the positions of queries; least, most [key tiles]: of keys' ends."""

    first: Ints
    last: Ints
    least: Ints
    most: Ints

    @property
    def open_before(self) -> Ints:
        """For each key tile the number of query tiles, the first ones, that may see one of its keys."""
        return np.searchsorted(self.first, self.most)

    @property
    def full_before(self) -> Ints:
        """For each key tile the number of query tiles, the first ones, that see all of its keys as far as ends go."""
        return np.searchsorted(self.last, self.least)


def stretches(begin: Ints, full_begin: Ints, full_end: Ints, end: Ints, ends: Ends) -> Stretches:
    """The stretches of query tiles whose bounds admit key tiles ``[begin, end)``, fully ``[full_begin, full_end)``."""
    filled = np.flatnonzero(begin < end)
    b, e = begin[filled], end[filled]
    reach, least = np.maximum.accumulate(e), np.minimum.accumulate(b[::-1])[::-1]
    width = ends.most.size + 1
    cuts = [filled * width + x[filled] for x in (begin, full_begin, full_end, end)]
    (o1, o2), (f1, f2) = (np.sort([x[:-1], x[1:]], axis=0) for x in (ends.open_before, ends.full_before))
    for low, high in ((o1, o2), (f1, np.minimum(f2, o1)), (np.maximum(f1, o2), f2)):
        differs = np.flatnonzero(low < high)
        n = differs + 1
        # of these query tiles, those from the first that reaches beyond key tile n to the last that begins before it
        low = np.maximum(np.searchsorted(filled, low[differs]), np.searchsorted(reach, n, side="right"))
        high = np.minimum(np.searchsorted(filled, high[differs]), np.searchsorted(least, n))
        count = np.maximum(high - low, 0)
        i, n = expand(low, count), np.repeat(n, count)
        inside = (b[i] < n) & (n < e[i])
        cuts.append(filled[i[inside]] * width + n[inside])
    at = np.concatenate(cuts)
    at = at[order_of(at, begin.size * width)]
    i = at // width
    n = at - i * width
    key = np.minimum(n, width - 2)
    is_open = (n < end[i]) & (ends.first[i] < ends.most[key])
    full = is_open & (full_begin[i] <= n) & (n < full_end[i]) & (ends.last[i] < ends.least[key])
    state = is_open.astype(np.int8) + full
    # a cut that changes nothing, as a second one in the same place, parts nothing
    changes = np.flatnonzero(np.append(True, (state[1:] != state[:-1]) | (i[1:] != i[:-1]))[: i.size])
    i, n, state = i[changes], n[changes], state[changes]
    used = np.flatnonzero(state)  # the last cut of a query tile is its end, so each stretch is followed by a cut
    edge = edges(np.bincount(i[used], minlength=begin.size))
    return Stretches(edge, n[used], n[used + 1], state[used] == 2, ends.first, ends.most)
