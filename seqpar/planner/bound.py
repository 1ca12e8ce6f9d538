"""Bounds on the ticks of a step under the cost model of `cost`: lower ones of any plan, and upper ones.

From upper ones follows the length of a batch's tick, the shortest with which no sum over the batch exceeds 64 bits: a
power of two times the finest one. The sums are counted in Python integers from facts that all ranks have, so all ranks
agree. The power is 0 up to about 10 million tokens in a document.
"""

from __future__ import annotations

from seqpar.facts.value import Ints
from seqpar.planner.cost import LARGEST, Layers
from seqpar.planner.count import again, areas
from seqpar.planner.hardware import Hardware
from seqpar.planner.shape import ModelShape
from seqpar.planner.weights import Weights


def document_ticks(layers: Layers, w: Weights) -> Ints:
    """Ticks of each document whole on one rank, int64 [documents]: the least that it costs anywhere.

    Every pair is computed once, and every row once in each band in which it sees keys; a document has at least one
    piece; if cut, it also costs fetched rows.
    """
    ticks, each = layers[0][0].lengths * w.per_row, w.both
    for mask, count in layers:
        pairs, rows = w.areas(areas(mask)), mask.lengths + again(mask)
        ticks = ticks + count * (each.pair * pairs + each.query * rows + each.piece)
    return ticks


def lower_bound(layers: Layers, w: Weights, ranks: int, *, least: Ints | None = None) -> int:
    """Ticks that the slowest of ``ranks`` ranks takes at least, however the batch is laid out.

    least: what `document_ticks` returns for the layers; counted if not given.

    The ranks share the least cost of all documents; every rank with a row starts its kernels once per band and layer;
    and some rank holds at least the mean of the rows, rounded up.
    """
    tokens = layers[0][0].tokens
    ticks = document_ticks(layers, w) if least is None else least
    start = w.both.stage * launches_in(layers)
    shared = -(-int(ticks.sum()) // ranks)
    rows = -(-tokens // ranks) * w.per_row
    return max(shared, rows) + (start if tokens >= ranks else 0)


def layers_in(layers: Layers) -> int:
    """The number of layers."""
    return sum(count for _, count in layers)


def launches_in(layers: Layers) -> int:
    """The number of layers, each counted once for every band of its mask: each step launches its kernels so often."""
    return sum(count * len(mask.bands) for mask, count in layers)


def weights_for(
    layers: Layers, shape: ModelShape, hardware: Hardware, *, stage_bytes: int = 0, rows: int = 0
) -> Weights:
    """The weights of a model on a machine, in the finest ticks that the batch allows.

    stage_bytes: bytes of the smallest stage, 0 if documents are only compared. rows: the most rows of a rank, to cover
    merging under any layout; without it, `cost` raises OverflowError for a layout that merges too much.
    """
    finest = Weights.of(shape, hardware)
    moved = moved_ticks(layers, finest, rows=rows, stage_bytes=stage_bytes) if stage_bytes else 0
    spent = whole_ticks(layers, finest) + moved
    # counting a layer's stages multiplies its ticks by five
    most = max(spent, 5 * (spent // max(1, layers_in(layers))))
    if most < LARGEST:
        return finest
    # a margin, since weights are rounded
    return Weights.of(shape, hardware, coarse=(most // LARGEST).bit_length() + 3)


def whole_ticks(layers: Layers, w: Weights) -> int:
    """Ticks of all documents, each whole on one rank."""
    mask, each = layers[0][0], w.both
    ticks = mask.tokens * w.per_row
    for mask, count in layers:
        rows = mask.tokens * len(mask.bands)
        ticks += count * (each.pair * mask.area() + each.query * rows + each.piece * len(mask.lengths))
    return ticks


def moved_ticks(layers: Layers, w: Weights, *, rows: int, stage_bytes: int) -> int:
    """An upper bound of a rank's ticks beyond its documents: fetched keys, stages, pieces, waiting, merged rows."""
    tokens = layers[0][0].tokens
    stages = tokens // max(1, stage_bytes // w.row_bytes) + 3
    links = (w.inside, w.across)
    row = w.both.key + sum(link.hop_key + link.hop_grad for link in links)
    row += 2 * (w.inside.hop_enter + w.inside.hop_leave)
    stage = w.both.stage + 2 * sum(link.latency for link in links)
    merged = min(2 * rows, tokens) * w.both.merge * stages
    ticks = 0 if w.recurrent is None else w.recurrent.most(tokens)
    for mask, count in layers:
        pieces = mask.breaks.size + 2 * len(mask.lengths) + 2
        ticks += count * (row * tokens + w.both.piece * pieces + len(mask.bands) * ((stages + 2) * stage + merged))
    return ticks
