"""Lower bounds on the ticks of a step of any plan under the cost model of `cost`."""

from __future__ import annotations

from seqpar.facts.value import Ints
from seqpar.planner.cost import Layers, Weights
from seqpar.planner.count import again, areas


def document_ticks(layers: Layers, w: Weights) -> Ints:
    """Ticks of each document whole on one rank, int64 [documents]: the least that it costs anywhere.

    Every pair is computed once, and every row once in each band in which it sees keys; a document has at least one
    piece; if cut, it also costs fetched rows.
    """
    ticks = layers[0][0].lengths * (w.per_row)
    for mask, count in layers:
        ticks = ticks + count * (w.pair * w.areas(areas(mask)) + w.query * (mask.lengths + again(mask)) + w.piece)
    return ticks


def lower_bound(layers: Layers, w: Weights, ranks: int, *, least: Ints | None = None) -> int:
    """Ticks that the slowest of ``ranks`` ranks takes at least, however the batch is laid out.

    least: what `document_ticks` returns for the layers; counted if not given.

    The ranks share the least cost of all documents; every rank with a row starts its kernels once per band and layer;
    and some rank holds at least the mean of the rows, rounded up.
    """
    tokens = layers[0][0].tokens
    ticks = document_ticks(layers, w) if least is None else least
    start = (w.forward.stage + w.backward.stage) * launches_in(layers)
    shared = -(-int(ticks.sum()) // ranks)
    rows = -(-tokens // ranks) * (w.per_row)
    return max(shared, rows) + (start if tokens >= ranks else 0)


def layers_in(layers: Layers) -> int:
    """The number of layers."""
    return sum(count for _, count in layers)


def launches_in(layers: Layers) -> int:
    """The number of layers, each counted once for every band of its mask: each step launches its kernels so often."""
    return sum(count * len(mask.bands) for mask, count in layers)
