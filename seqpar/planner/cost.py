"""The cost of a plan: seconds of every rank by phase, and bytes of its memory.

A piece of a document on a rank costs ``piece + pair * area + query * rows + key * fetched rows``, with no negative
term, so the least of these, summed over ranks, bounds every layout from below (see `bound`). Transfers hide behind
computation as `seqpar.ops.attention.schedule` orders them::

    computed      own keys    stage 1       stage 2       stage 3
    keys in       stage 1     stage 2       stage 3
    gradients out                           stage 1       stage 2      stage 3 (exposed)

A mask's further bands are further launches of every step, and a row that sees keys in several of them is read and
written once more for each, as if a further step had brought these keys.

All counts are integers, so that every rank decides identically on any processor: ticks of 1/1024 of the cost of an
attended pair. For a batch whose ticks exceed 64 bits, a tick is 2, 4, 8 ... times as long (see `scale`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from seqpar.facts.intervals import summed
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.facts.value import Ints
from seqpar.plan.counts import Tally, tally
from seqpar.plan.routes import TAPERED
from seqpar.planner.count import tallies
from seqpar.planner.place import Placement, layout_of
from seqpar.planner.weights import AttentionTicks, Weights

LARGEST = 4 * (1 << 63) // 5  # ticks of a batch without merging; `place` adds up to a quarter of a sum
Layers = Sequence[tuple[Mask, int]]  # masks, each with the number of its layers


PHASES = ("attention", "recurrent", "exposed", "linear", "head")


class Ticks(NamedTuple):
    """Ticks of a training step by rank, int64 [..., ranks].

    exposed: transfers that overlap with no computation. linear: linear layers. recurrent: recurrences and convolutions.
    """

    attention: Ints
    exposed: Ints
    linear: Ints
    head: Ints
    recurrent: Ints

    @property
    def total(self) -> Ints:
        """Ticks of each rank."""
        return self.attention + self.exposed + (self.linear + self.head + self.recurrent)

    def of(self, candidate: int, stage: int) -> Ticks:
        """The ticks of one candidate with one stage size."""
        return Ticks(
            self.attention[candidate, stage], self.exposed[candidate, stage], self.linear[candidate, 0],
            self.head[candidate, 0], self.recurrent[candidate, 0],
        )  # fmt: skip


class Times(NamedTuple):
    """Ticks of one layer by group, forward and backward, int64 [..., 2, groups]: computing, and waiting for keys."""

    busy: Ints
    waiting: Ints


def timeline(
    t: Tally, w: Weights, *, width: int | Ints, stage_bytes: int | Sequence[int], bands: int | Ints = 1
) -> Times:  # fmt: skip
    """Ticks of a layer for documents of one width, or of each group's width.

    stage_bytes: bytes of a stage's keys; a sequence adds a first axis. bands: of the mask, or of each group's.
    """
    shared: Ints = np.asarray(width)
    heads, kv_heads = -(-w.heads // shared), -(-w.kv_heads // shared)  # of the member with most heads
    both = AttentionTicks(*np.array([w.forward, w.backward]).T[:, :, None])
    # rounded up, so that the members of a group together take no less than the whole
    own = both.piece * t.pieces + both.query * (t.rows + t.again) + both.pair * w.begun(t.near)
    launch = both.stage * np.asarray(bands)
    near = launch - _portion(-own, heads, w.heads)
    moving = (t.keys > 0) | (t.sent > 0)
    if not moving.any():
        shape = (*np.shape(stage_bytes), *near.shape)
        return Times(np.broadcast_to(near, shape), np.zeros(shape, np.int64))
    rows = np.maximum(1, np.asarray(stage_bytes)[..., None, None] // (w.row_bytes // w.kv_heads * kv_heads))
    stages = -(-t.keys // rows)
    tapered = t.keys >= TAPERED * np.maximum(stages, 1)
    far_off = np.maximum(t.entering, t.leaving)
    latency = np.where(moving, np.where(far_off > 0, w.across.latency, w.inside.latency), 0)
    back = np.array([[0], [1]])

    def wire(kind: str) -> Ints:
        rows_near = np.maximum(t.keys - t.entering, t.sent - t.leaving)
        # one peer has about as many rows of the shared documents as this group
        near_by = rows_near * getattr(w.inside, kind)
        if w.inside.hop_key > w.inside.key:
            near_by = np.maximum(near_by, np.minimum(rows_near, t.merging) * getattr(w.inside, f"hop_{kind}"))
        return _portion(np.maximum(near_by, far_off * getattr(w.across, kind)), kv_heads, w.kv_heads)

    launched = stages + 2 * tapered
    fetched = both.pair * w.begun(t.far) + both.key * t.keys
    far = launch * launched - _portion(-fetched, heads, w.heads)
    far = far + _portion(both.merge * t.merging, (launched + 1) // 2 * heads, w.heads)
    waiting = _exposed(near, far, wire("key"), back * wire("grad"), latency, back * latency, stages, tapered)
    return Times(near + far, waiting)


def _portion(ticks: Ints, part: int | Ints, whole: int | Ints) -> Ints:
    """``ticks * part // whole``, even if the product exceeds 64 bits."""
    return ticks // whole * part + ticks % whole * part // whole


def _exposed(
    near: Ints, far: Ints, keys: Ints, grads: Ints, latency: Ints, grad_latency: Ints, stages: Ints,
    tapered: NDArray[np.bool_],
) -> Ints:  # fmt: skip
    """Ticks of transfers that do not overlap with computation.

    While a stage is computed, the next stage's keys arrive and the previous stage's gradients leave. There are `stages`
    equal stages; if tapered, two more of a quarter and a 16th of the size that equal stages alone would have.
    """
    k = np.maximum(stages, 1)

    def each(ticks: Ints, more: Ints | int = 0) -> tuple[Ints, Ints, Ints]:
        main = (ticks + -5 * tapered * ticks // (16 * k)) // k
        return main + more, ticks // (4 * k) + more, ticks // (16 * k) + more

    (c, c_small, c_last), (x, x_small, x_last) = each(far), each(keys, latency)
    g, g_small, g_last = each(grads, grad_latency)
    result = np.maximum(x - near, 0) + (k - 1) * np.maximum(x + g - c, 0)
    small = np.maximum(x_small + g - c, 0) + np.maximum(x_last + g - c_small, 0) + np.maximum(g_small - c_last, 0)
    return result + np.where(tapered, small + g_last, (k > 1) * np.maximum(g - c, 0) + g)


def trades(most: Ints, w: Weights, width: int | Ints) -> Ints:
    """Ticks of a group's head trade, [2, groups] each: on the way in, and out; zero without tokens.

    most: rows of the group's largest member, which sends the most; no member receives more.
    """
    link, latency = w.inside, w.inside.latency * (most > 0)
    pairs = (link.enter, link.hop_enter), (link.leave, link.hop_leave)
    enter, leave = (
        latency
        + np.maximum(
            _portion(most * all_peers, width - 1, width), _portion(most * peer, np.minimum(width - 1, 1), width)
        )
        for all_peers, peer in pairs
    )
    return np.array([[enter, leave], [leave, enter]])


class WidthGroup(NamedTuple):
    """The documents of one width in the layers of one mask."""

    layers: int
    bands: int
    width: int
    tally: Tally
    shared_node: bool  # whether a node has several groups


class LayoutCounts(NamedTuple):
    """A layout's counts of every rank's work and traffic: by mask, then by rising width."""

    masks: list[list[WidthGroup]]
    rows: Ints

    @property
    def moved(self) -> int:
        """Key rows that all ranks fetch."""
        return sum(part.layers * int(part.tally.keys.sum()) for parts in self.masks for part in parts)

    @property
    def traded(self) -> int:
        """Rows traded for heads."""
        return sum(p.layers * int(p.tally.rows.sum()) for parts in self.masks for p in parts if p.width > 1)

    @property
    def crossing(self) -> int:
        """Key rows from other nodes, with those that several groups of a node fetch counted for each."""
        return sum(p.layers * int(p.tally.entering.sum()) for parts in self.masks for p in parts if p.shared_node)


def counted(layers: Layers, layout: Layout, *, widths: Ints, node: int, forwarded: bool) -> LayoutCounts:
    """The counts of `fetch`. widths: Ulysses width of each document; forwarded: keys enter a node once."""
    masks = []
    for mask, count in layers:
        parts = []
        for width in sorted(set(widths.tolist())):
            chosen = None if (widths == width).all() else widths == width
            near_by = max(1, node // width)
            t = tally(mask, layout, width=width, node=near_by, forwarded=forwarded, documents=chosen)
            parts.append(WidthGroup(count, len(mask.bands), width, t, near_by > 1))
        masks.append(parts)
    return LayoutCounts(masks, layout.sizes())


def counted_each(layers: Layers, placed: Sequence[Placement], *, ranks: int, node: int) -> list[LayoutCounts]:
    """The counts of `fetch` for several candidates. Keys may enter a node more than once; widths divide the node."""
    first = layers[0][0]
    if not all(mask.within_documents for mask, _ in layers):
        layouts = [layout_of(first, p.pieces, ranks) for p in placed]
        return [
            counted(layers, layout, widths=p.widths, node=node, forwarded=False)
            for layout, p in zip(layouts, placed, strict=True)
        ]
    masks: list[list[list[WidthGroup]]] = [[] for _ in placed]
    for mask, count in layers:
        for own, tally_of in zip(masks, tallies(mask, placed, ranks=ranks, node=node), strict=True):
            bands = len(mask.bands)
            own.append([WidthGroup(count, bands, width, t, node // width > 1) for width, t in tally_of.items()])
    rows = [summed(p.pieces.rank, p.pieces.count, ranks) for p in placed]
    return [LayoutCounts(*each) for each in zip(masks, rows, strict=True)]


def ticks(counts: LayoutCounts, w: Weights, *, stage_bytes: int) -> Ticks:
    """Ticks of a step by rank, without recurrent layers.

    Documents are computed by rising width in forward, and by falling width in backward. Tokens enter a head trade
    while documents before theirs are computed, and leave it while those after them are. Nothing hides the way out of
    the widest in forward, nor their way in in backward.
    """
    return ticks_of_each([counts], w, stage_bytes=(stage_bytes,)).of(0, 0)


def ticks_of_each(candidates: Sequence[LayoutCounts], w: Weights, *, stage_bytes: Sequence[int]) -> Ticks:
    """As `ticks` for several layouts on the same ranks and several stage sizes: [candidates, stages, ranks].

    Raises: OverflowError if 64 bits are not enough; use a longer tick.
    """
    layers = [own for counts in candidates for own in counts.masks]
    parts = [part for own in layers for part in own]
    many = Tally(*map(np.concatenate, zip(*(part.tally for part in parts), strict=True)))
    _check_merged(candidates, many, w, stage_bytes)
    groups_of = [part.tally.rows.size for part in parts]
    width, bands = (np.repeat([getattr(part, name) for part in parts], groups_of) for name in ("width", "bands"))
    busy, waiting = timeline(many, w, width=width, stage_bytes=stage_bytes, bands=bands)
    enter, leave = trades(many.most, w, width)
    groups, at = width.size, _groups_of_ranks(layers, candidates[0].rows.size)
    columns: list[Ints] = [busy, waiting, enter * (width > 1), leave * (width > 1)]
    if int(at.max()) == groups:
        columns = [np.concatenate([x, np.zeros((*x.shape[:-1], 1), np.int64)], -1) for x in columns]
    busy, waiting, enter, leave = (x[..., at] for x in columns)
    spent = exposed = late = np.zeros((*busy.shape[:2], *at.shape[1:]), np.int64)
    way = np.arange(2)
    for turn in range(len(at)):
        now = np.array([turn, -1 - turn])  # the turn of each way
        exposed = exposed + np.maximum(enter[way, now] - spent, 0) + waiting[:, way, now]
        late = np.maximum(late - busy[:, way, now], 0) + leave[way, now]
        spent = spent + busy[:, way, now]
    count = np.array([own[0].layers for own in layers])[:, None]
    shape = (len(stage_bytes), len(candidates), -1, at.shape[-1])
    attention, waited = ((count * x.sum(1)).reshape(shape).sum(2).swapaxes(0, 1) for x in (spent, exposed + late))
    rows = np.array([counts.rows for counts in candidates])[:, None]
    return Ticks(attention, waited, rows * w.row, rows * w.label, np.zeros_like(rows))


def _groups_of_ranks(layers: Sequence[Sequence[WidthGroup]], ranks: int) -> Ints:
    """The group of each rank, width after width: [turns, layers, ranks] into all groups laid end to end.

    Layers with fewer widths point to one more group without work.
    """
    groups = sum(ranks // part.width for own in layers for part in own)
    at = np.full((max(map(len, layers)), len(layers), ranks), groups)
    member, first = np.arange(ranks), 0
    for nth, own in enumerate(layers):
        for turn, part in enumerate(own):
            at[turn, nth] = first + member // part.width
            first += ranks // part.width
    return at


def _check_merged(candidates: Sequence[LayoutCounts], many: Tally, w: Weights, stage_bytes: Sequence[int]) -> None:
    """Raise OverflowError if a candidate's merging might not fit the rest of 64 bits."""
    most = max(sum(part.layers for own in counts.masks for part in own) for counts in candidates)
    if most * _most_merged(many, w, width=1, stage_bytes=stage_bytes) <= LARGEST // 4:
        return
    for counts in candidates:
        parts = [part for own in counts.masks for part in own]
        merged = sum(p.layers * _most_merged(p.tally, w, width=p.width, stage_bytes=stage_bytes) for p in parts)
        if merged > LARGEST // 4:
            raise OverflowError(f"up to {merged} ticks of merging")


def _most_merged(t: Tally, w: Weights, *, width: int, stage_bytes: Sequence[int]) -> int:
    """An upper bound of any group's ticks for merging in a layer."""
    heads, kv_heads = -(-w.heads // width), -(-w.kv_heads // width)
    rows = max(1, min(stage_bytes) // (w.row_bytes // w.kv_heads * kv_heads))
    return w.both.merge * int(t.merging.max()) * (int(t.keys.max()) // rows + 4) * heads // (2 * w.heads) + 1
