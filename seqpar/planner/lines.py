"""Documents end to end over the ranks, so that a row stays next to its neighbours.

Where a row sees the rows around it, as under windows, a cut anywhere in a document costs no more than the keys before
it, and even rows are almost even work. No document is spread, and none is dealt zigzag::

    rank 0   A A A A A
    rank 1   A A B B B
    rank 2   B B C D D
"""

from __future__ import annotations

import numpy as np

from seqpar.facts.intervals import distinct, edges, summed
from seqpar.facts.value import Ints
from seqpar.planner.cost import Layers
from seqpar.planner.count import areas
from seqpar.planner.place import Documents, Pieces, Placement


def near_sighted(layers: Layers) -> bool:
    """Whether rows see few keys in every layer: in the mean at most half of what causal rows see."""
    squares = int((layers[0][0].lengths ** 2).sum())
    return all(4 * int(areas(mask).sum()) <= squares for mask, _ in layers)


def in_line(batch: Documents, ranks: int, *, room: Ints) -> Placement:
    """The documents in their order, cut where ranks have equal ticks, as far as they have the room."""
    offsets, ticks = edges(batch.lengths), edges(batch.ticks)
    parts = np.arange(ranks + 1)
    wanted = int(ticks[-1]) // ranks * parts
    wanted[-1] = ticks[-1]
    at = np.minimum(ticks.searchsorted(wanted, side="right") - 1, batch.lengths.size - 1)
    each = np.maximum(batch.ticks // batch.lengths, 1)[at]  # of a row
    border = offsets[at] + np.minimum((wanted - ticks[at]) // each, batch.lengths[at])
    border = _within(border, room, int(offsets[-1]))
    breaks = distinct(np.concatenate([offsets, border]))
    start, count = breaks[:-1], np.diff(breaks)
    document = offsets.searchsorted(start, side="right") - 1
    rank = border[1:].searchsorted(start, side="right")
    busy = summed(rank, batch.ticks[document] // batch.lengths[document] * count, ranks)
    pieces = Pieces(document, start - offsets[document], count, rank)
    return Placement(pieces, np.ones_like(batch.lengths), int(busy.max()))


def _within(wanted: Ints, room: Ints, tokens: int) -> Ints:
    """The borders nearest to these, one after the other, that leave every rank the room for its rows."""
    least = tokens - edges(room[::-1])[-2::-1]  # before each next border: what later ranks cannot take
    border = [0]
    for at, most, low in zip(wanted[1:].tolist(), room.tolist(), least.tolist(), strict=True):
        border.append(min(max(at, low, border[-1]), border[-1] + most))
    return np.array(border, np.int64)
