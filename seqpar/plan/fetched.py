"""The keys that a rank's own queries see, gathered in one buffer, and who sees which: for kernels of one's own.

Each rank gets exactly the keys that some query of its rows sees, in position order, and no head is traded. Two causal
documents of 4 and 3 tokens, where rank 1 holds the tokens 2, 3 and 5::

    positions    0  1  2  3  4  5        key 6 is seen by no query of the rank
    buffer row   0  1  2  3  4  5
    query 2      #  #  #                 lo, hi  0 3
    query 3      #  #  #  #                      0 4
    query 5                  #  #                4 6
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from seqpar.facts.mask import Mask
from seqpar.facts.value import Ints
from seqpar.plan.routes import Demand, by_owner, sends_of
from seqpar.plan.steps import Rows, as_rows, count


class FetchedBand(NamedTuple):
    """One band of a mask: lo, hi [rows] of the query rows in rows of the buffer, until [N] of the buffer's rows."""

    lo: Ints
    hi: Ints
    until: Ints


@dataclass(frozen=True, eq=False)
class Fetched:
    """The keys that a rank's own queries see, in one buffer in position order.

    Query row ``i`` sees buffer row ``j`` iff in one of the bands ``lo[i] <= j < hi[i]`` and ``at[i] < until[j]``.

    positions [N]: of the buffer's rows, ascending. at [rows]: key coordinates of the query rows, -1 for pads, which see
    nothing. bands: one for each band of the mask, disjoint. sends, recvs: peer -> local key rows that leave, and rows
    of the buffer that arrive, both in position order, the rank itself included.
    """

    positions: Ints
    at: Ints
    bands: tuple[FetchedBand, ...]
    sends: Mapping[int, Rows]
    recvs: Mapping[int, Rows]

    @classmethod
    def of(cls, mask: Mask, demand: Demand, rank: int, queries: Ints, keys: Ints) -> Fetched:
        """What a rank fetches. queries [rows], keys [tokens]: positions of its rows, -1 for pads among the queries."""
        needs = demand.needs
        positions, order = needs.positions(rank), np.argsort(keys)
        recvs = by_owner(demand.owner_of(positions), demand.groups)
        inside = sends_of(needs.group, np.zeros_like(needs.group), needs.lo, needs.hi, keys[order], rank, 1)[0]
        if rank in recvs:
            inside[rank] = np.searchsorted(keys[order], positions[recvs[rank]])
        bands = []
        for band in mask.bands:
            lo, hi = (np.searchsorted(positions, bound) for bound in band.bounds(queries))
            until = np.full_like(positions, mask.kv_tokens) if band.until is None else band.until.of(positions)
            bands.append(FetchedBand(lo, hi, until))
        sends = {peer: as_rows(order[rows]) for peer, rows in inside.items()}
        return cls(positions, mask.key_positions(queries), tuple(bands), sends, recvs)

    def seen(self) -> NDArray[np.bool_]:
        """Whether a query row sees a row of the buffer, [rows, N]."""
        rows = np.arange(self.positions.size)
        seen = np.zeros((self.at.size, rows.size), bool)
        for lo, hi, until in self.bands:
            seen |= (lo[:, None] <= rows) & (rows < hi[:, None]) & (self.at[:, None] < until)
        return seen

    def sent(self, rank: int, *, backward: bool) -> int:
        """Number of rows that leave a rank for others: keys, or in backward their gradients."""
        leaving = self.recvs if backward else self.sends
        return sum(count(rows) for peer, rows in leaving.items() if peer != rank)
