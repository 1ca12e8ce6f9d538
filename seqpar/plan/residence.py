"""Which ranks hold some of each document: the rows of all ranks, cut at documents.

Queries are side "q", keys side "kv". The two are the same where keys are held with their queries, the usual case::

    positions    0         5         9             16
    documents    |    0    |    1    |      2      |
    ranks        | 0  | 1  |   1     |  1  |   0   |
    pieces        0-2  3-4    5-8     9-11   12-15       rank and document of each
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqpar.facts.intervals import Runs, cut, distinct, interval_of, order_of
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.facts.value import Ints, Memo, cached, frozen


@dataclass(frozen=True, eq=False)
class Residence(Memo):
    """The documents of a mask, with their queries in one layout and their keys in the same or their own."""

    mask: Mask
    layout: Layout
    kv_layout: Layout
    _memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def one_side(self) -> bool:
        """Whether keys are held with the queries, document by document."""
        return self.kv_layout is self.layout and np.array_equal(self.mask.offsets, self.mask.kv_offsets)

    def layout_of(self, side: str) -> Layout:
        """The layout of a side's rows."""
        return self.layout if side == "q" else self.kv_layout

    def offsets_of(self, side: str) -> Ints:
        """The start of each document of a side, and the end of the last."""
        return self.mask.offsets if side == "q" else self.mask.kv_offsets

    @cached
    def pieces(self, side: str) -> tuple[Runs, Ints, Ints]:
        """The rows of all ranks in the order of their starts, cut at documents: runs, rank and document; cached."""
        if side == "kv" and self.one_side:
            return self.pieces("q")
        layout, starts = self.layout_of(side), self.offsets_of(side)[:-1]
        holders = layout.holders()
        piece, source = cut(holders.runs, starts)
        if (piece.start[1:] < piece.start[:-1]).any():
            order = order_of(piece.start, layout.total)
            piece, source = piece.pick(order), source[order]
        return piece, holders.holder[source].astype(np.int64), interval_of(piece.start, starts)

    @cached
    def pairs(self, side: str) -> Ints:
        """Every (document, rank that holds some of it) as ``document * ranks + rank``, ascending; cached."""
        if side == "kv" and self.one_side:
            return self.pairs("q")
        _, rank, document = self.pieces(side)
        pairs = document * self.layout.ranks + rank
        pairs = pairs[order_of(pairs, len(self.mask.lengths) * self.layout.ranks)]
        return pairs[np.append(True, np.diff(pairs) > 0)]

    @property
    def degrees(self) -> Ints:
        """Number of ranks that hold queries of each document, [documents]; cached."""
        count = len(self.mask.lengths)
        return self.memo("degrees", lambda: frozen(np.bincount(self.pairs("q") // self.layout.ranks, minlength=count)))

    @property
    def alone(self) -> NDArray[np.bool_]:
        """Whether one rank holds all queries and all keys of the document, [documents]."""
        if self.one_side:
            return self._unchanged()
        pairs = distinct(np.concatenate([self.pairs("q"), self.pairs("kv")]))
        return np.bincount(pairs // self.layout.ranks) == 1

    def _unchanged(self) -> NDArray[np.bool_]:
        """Documents of the queries inside which the rank does not change, [documents]."""
        holders = self.layout.holders()
        if holders.strided:
            return self.degrees == 1
        change = holders.runs.start[1:][holders.holder[1:] != holders.holder[:-1]]
        first, stop = self.mask.offsets[:-1], self.mask.offsets[1:]
        # a change at a document's first row is between documents
        return change.searchsorted(first, side="right") == change.searchsorted(stop)

    def groups(self, side: str, size: Ints) -> Ints:
        """As `pairs`, for groups of ``size`` ranks; size has one entry per document."""
        document, rank = np.divmod(self.pairs(side), self.layout.ranks)
        pairs = document * self.layout.ranks + rank // size[document]
        return pairs[np.append(True, np.diff(pairs) > 0)]
