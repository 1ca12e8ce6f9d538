"""The placement of every document: long ones are spread, short ones stay whole, the shortest fill the remaining rows.

Rows per rank are almost equal, as linear layers want them. A document's *surplus* is its cost beyond that of as many
filling rows; the surplus is balanced (or, where ranks have room for unequal rows, the whole cost)::

    spread   documents with more surplus than a rank's fair share of that of whole documents, or more rows than fit a
             rank. Either they go to groups of ranks that share heads: whole to the least loaded group, and only the
             excess of one group is levelled over several. Or they lie end to end along the ranks, by tiers of similar
             length, so that every rank gets the same surplus and about the same rows of each tier
    whole    all other long documents, largest surplus first, each on the least loaded rank with enough rows
    fill     the shortest documents, end to end over the ranks, each rank taking the rows at which all ranks finish
             together; a border between ranks cuts a document, unless a document's border nearby does as well

A spread document is dealt zigzag (Llama 3, section 3.3.2) in unequal parts: of a causal document, a rank that holds
tokens [a, b) and their mirror image [L - b, L - a) has exactly its share of rows and of area. Largest first onto the
least loaded: Graham 1969 (Bounds on multiprocessing timing anomalies). All decisions use integers; ties go by index.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace
from typing import NamedTuple

import numpy as np

from seqpar.facts.intervals import distinct, edges, summed
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.facts.value import Ints
from seqpar.planner.groups import Fetching, RankShares, beyond, borders, grouped, least_loaded

FEW = 64  # fewer rows on a rank do not pay for their fetched keys


class Documents(NamedTuple):
    """Documents to place: tokens, and ticks of each whole on one rank, int64 [documents].

    row: ticks of a row in addition to its attended pairs. fetch: what cut documents cost on a rank.
    """

    lengths: Ints
    ticks: Ints
    row: int
    fetch: Fetching


class Knobs(NamedTuple):
    """Settings of a candidate.

    whole: the most surplus of a whole document, in 64ths of a rank's mean surplus of whole documents. spread: the most
    tokens in spread documents, in 64ths of all; beyond it only documents that fit no rank are spread. fill: tokens of
    the shortest documents, in 64ths of all. octaves: lengths of a tier differ by at most a factor of 2 to this power; 0
    means groups and no tiers. width: consecutive ranks that share the heads of a spread document; divides the ranks.
    trade: the cost of a head trade per row, in 64ths of the row's ticks. wait: that of a key row on its way, in
    quarters of a fetched row's ticks.
    """

    whole: int
    spread: int
    fill: int
    octaves: int
    width: int
    trade: int = 0
    wait: int = 0


class Pieces(NamedTuple):
    """Consecutive tokens of documents on ranks, in any order: document, first token inside it, tokens, rank."""

    document: Ints
    start: Ints
    count: Ints  # type: ignore[assignment]  # tuple.count is not missed
    rank: Ints


class Placement(NamedTuple):
    """The pieces of all documents, and the Ulysses width of each. level: about the ticks of the slowest rank."""

    pieces: Pieces
    widths: Ints
    level: int


def place(batch: Documents, ranks: int, *, room: Ints, knobs: Knobs) -> Placement:
    """The placement of the documents. room: rows that each rank may take, in total at least the tokens."""
    return placements(batch, ranks, room=room, knobs=[knobs])[0]


def placements(batch: Documents, ranks: int, *, room: Ints, knobs: Sequence[Knobs]) -> list[Placement]:
    """The placement for each setting; settings that lead to the same placement share one object."""
    order = batch.lengths.argsort(kind="stable")
    so_far = batch.lengths[order].cumsum()
    parts: dict[tuple[int, int, int], _Parts] = {}
    by_key: dict[tuple[object, ...], Placement] = {}
    result = []
    for knob in knobs:
        if knob[:3] not in parts:
            parts[knob[:3]] = _parts(batch, ranks, room, order, so_far, knob)
        part = parts[knob[:3]]
        tiers = _tiers(batch.lengths[part.long], knob.octaves)
        borders = (part.filling.size, part.rest.size)  # in one fixed order, so that equal borders mean equal parts
        key: tuple[object, ...] = (*borders, knob.width, knob.trade, knob.wait, *tiers)
        if knob.width == ranks:  # a single group gets all long documents, however they are dealt
            key = (*borders, ranks)
        # without long documents the width matters only for documents that fit no rank
        if not part.long.size:
            key = borders if borders in by_key else (*borders, knob.width)
        if key not in by_key:
            board = _Board(batch, ranks, room, knob, part)
            by_key[key] = _placed(board, tiers)
            if not part.long.size and not board.crowded:
                by_key[borders] = by_key[key]
        result.append(by_key[key])
    return result


class _Parts(NamedTuple):
    """Documents to fill with, by rising length; to keep whole and to spread, by falling surplus.

    per_row: mean ticks of a filling row. surplus: of each document. loose: whether ranks may have unequal rows.
    """

    filling: Ints
    rest: Ints
    long: Ints
    per_row: int
    surplus: Ints
    loose: bool


def _parts(batch: Documents, ranks: int, room: Ints, order: Ints, so_far: Ints, knobs: Knobs) -> _Parts:
    """The documents by their use. order: by rising length; so_far: the tokens up to each in this order."""
    lengths, ticks, most, tokens = batch.lengths, batch.ticks, int(room.max()), int(so_far[-1])
    fills = int(np.count_nonzero((so_far * 64 <= tokens * knobs.fill) & (lengths[order] * 8 <= most)))
    filling, rest = order[:fills], order[fills:]
    filled = int(so_far[fills - 1]) if fills else 0
    per_row = max(1, int(ticks[filling].sum()) // filled if fills else batch.row)
    # if ranks may have unequal rows, a document's whole cost is balanced
    loose = int(room.sum()) * 16 > tokens * 17 + 16 * ranks
    surplus = ticks if loose else np.maximum(beyond(ticks, per_row, lengths), 0)
    rest = rest[surplus[rest].argsort(kind="stable")]
    extra, rows = surplus[rest], lengths[rest]
    kept, brought = rows.cumsum(), extra.cumsum() // ranks
    fair = extra <= brought // 64 * knobs.whole + brought % 64 * knobs.whole // 64
    fair |= (kept + filled) * 64 <= tokens * (64 - knobs.spread)
    # a whole document must fit the rows that spread ones leave
    fair &= rows <= most - (tokens - filled - kept) // ranks
    last = fair[::-1].argmax() if fair.size else 0  # counted from the end
    wholes = int(fair.size - last) if fair.size and fair[-1 - last] else 0
    return _Parts(filling, rest[:wholes][::-1], rest[wholes:][::-1], per_row, surplus, loose)


def _tiers(lengths: Ints, octaves: int) -> list[int]:
    """The tier of each spread document, 0 for the shortest; empty if there are groups instead."""
    if not octaves:
        return []
    level = [int(n).bit_length() // octaves for n in lengths]
    nth = {key: tier for tier, key in enumerate(sorted(set(level)))}
    return [nth[key] for key in level]


def _placed(board: _Board, tiers: list[int]) -> Placement:
    board.spread(np.array(tiers, np.int64))
    board.whole()
    board.fill()
    widths = np.ones(board.batch.lengths.size, np.int64)
    widths[board.long] = board.knobs.width
    pieces = Pieces(*(np.concatenate(parts) for parts in zip(*board.pieces, strict=True)))
    held = pieces.count > 0
    if not held.all():
        pieces = Pieces(*(part[held] for part in pieces))
    return Placement(pieces, widths, int(board.base.max()))


class _Board:
    """The ranks while documents are placed: their surplus (load) and ticks (base) so far, and free rows (left)."""

    def __init__(self, batch: Documents, ranks: int, room: Ints, knobs: Knobs, parts: _Parts) -> None:
        self.batch, self.ranks, self.knobs = batch, ranks, knobs
        self.left = room.astype(np.int64)
        self.trade = batch.row * knobs.trade // 64
        self.fetch = batch.fetch._replace(wait=batch.fetch.key * knobs.wait // 4, width=knobs.width)
        self.load, self.base = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
        self.dealt = np.zeros(ranks // knobs.width, np.int64)
        self.pieces: list[Pieces] = []
        self.filling, self.rest, self.long, self.per_row, self.surplus, self.loose = parts
        self.base_row = 0 if self.loose else self.per_row  # ticks of a row that balancing leaves out
        self.crowded = False  # whether some document to keep whole fits no rank

    def spread(self, tiers: Ints) -> None:
        """Give the long documents to groups, or lay them along the ranks, every second tier in reverse."""
        if not self.long.size:
            return
        if not self.knobs.octaves:
            self._deal([self._grouped()])
            return
        levels = range(int(tiers.max()), -1, -1)
        self._deal([self._laid(self.long[tiers == n], backwards=turn % 2 == 1) for turn, n in enumerate(levels)])

    def _grouped(self) -> RankShares:
        """The long documents on groups, balanced by their ticks beyond the mean of the others, which fill the rows.

        Half of the whole documents' surplus counts as able to even out the groups.
        """
        lengths, ticks = self.batch.lengths[self.long], self.batch.ticks[self.long]
        others = np.concatenate([self.rest, self.filling])
        rows = 0 if self.loose else int(self.batch.lengths[others].sum())
        mean = int(self.batch.ticks[others].sum()) // rows if rows else 0
        surplus = np.maximum(beyond(ticks, mean - self.trade, lengths), 1)
        groups = self.ranks // self.knobs.width
        part = (2 * int(surplus.sum()) + int(self.surplus[self.rest].sum())) // (2 * groups)
        room = np.maximum(self.left.reshape(groups, -1), 0).sum(1)
        shares = grouped(lengths, surplus, fetch=self.fetch, room=room, part=part)
        return shares._replace(document=self.long[shares.document])

    def _laid(self, documents: Ints, *, backwards: bool) -> RankShares:
        """Documents end to end on a line, cut into parts of equal surplus, one per group of ranks."""
        groups = self.ranks // self.knobs.width
        surplus = np.maximum(self.surplus[documents], 1)
        shift = max(0, int(surplus.sum()).bit_length() - 31)  # keeps products with lengths below 2^62
        surplus = np.maximum(surplus >> shift, 1)
        edge = edges(surplus)
        border = borders(edge, groups)
        breaks = distinct(np.concatenate([edge, border]))
        at = edge.searchsorted(breaks[:-1], side="right") - 1
        group = border[1:].searchsorted(breaks[:-1], side="right")
        document = documents[at]
        length, whole = self.batch.lengths[document], surplus[at]
        first, stop = (length * (x - edge[at]) // whole for x in (breaks[:-1], breaks[1:]))
        return RankShares(document, first, stop, groups - 1 - group if backwards else group)

    def _deal(self, tiers: Sequence[RankShares]) -> None:
        """Give groups their parts, half of the rows from the front of the document and half from its end."""
        document, first, stop, group = tiers[0] if len(tiers) == 1 else map(np.concatenate, zip(*tiers, strict=True))
        groups, width = self.ranks // self.knobs.width, self.knobs.width
        length, held = self.batch.lengths[document], stop - first
        # the last part of a document is in the middle, where its two halves meet
        front, ends = first // 2, stop == length
        back_stop = length - first + front
        front_stop, back = np.where(ends, front, stop // 2), np.where(ends, front, length - stop + stop // 2)
        start, count = np.concatenate([front, back]), np.concatenate([front_stop - front, back_stop - back])
        both: Ints = np.arange(start.size)
        if len(tiers) > 1:  # by tier, and in each tier the fronts before the ends
            tier = np.arange(len(tiers)).repeat([shares.group.size for shares in tiers])
            both = np.concatenate([2 * tier, 2 * tier + 1]).argsort(kind="stable")
        twice = both % document.size
        rows = np.empty((both.size, width), np.int64)
        rows[both] = self._share(document[twice], group[twice], start[both], count[both])
        rows = rows.reshape(2, -1, width).sum(0)
        np.subtract.at(self.left.reshape(groups, width), group, rows)
        area = self.batch.ticks[document] - self.batch.row * length
        ticks = (area // length * held)[:, None] // width + self.batch.row * rows
        np.add.at(self.base.reshape(groups, width), group, ticks)
        ticks += self.trade * rows
        np.add.at(self.load.reshape(groups, width), group, np.maximum(ticks - self.base_row * rows, 0))
        cut = held < length
        if cut.any():
            counts = self.fetch.of_part(length[cut], first[cut], held[cut])
            keys, merging, sent = (summed(group[cut], count, groups) for count in counts)
            fetched = self.fetch.busy(keys, merging)
            self.base += fetched.repeat(width)
            self.load += (fetched + self.fetch.waiting(keys, sent)).repeat(width)

    def _share(self, document: Ints, group: Ints, start: Ints, count: Ints) -> Ints:
        """Deal stretches to the ranks of their groups in equal parts; rows of each, [stretches, width]."""
        width = self.knobs.width
        # cumulative over the group's stretches, so that rounding errors do not add up
        before = self._dealt(group, count)[:, None]
        member = np.arange(width + 1)
        edge = member * (before + count[:, None]) // width - member * before // width
        edge = np.minimum(np.maximum.accumulate(edge, axis=1), count[:, None])
        rows = edge[:, 1:] - edge[:, :-1]
        rank = group[:, None] * width + member[:-1]
        self.pieces.append(
            Pieces(document.repeat(width), (start[:, None] + edge[:, :-1]).ravel(), rows.ravel(), rank.ravel())
        )
        return rows

    def _dealt(self, group: Ints, count: Ints) -> Ints:
        """Rows dealt to each stretch's group before the stretch."""
        order = group.argsort(kind="stable")
        ordered = group[order]
        so_far = edges(count[order])
        before = np.empty_like(count)
        before[order] = so_far[:-1] - so_far[ordered.searchsorted(ordered)] + self.dealt[ordered]
        np.add.at(self.dealt, group, count)
        return before

    def whole(self) -> None:
        """Place whole documents; those that fit no rank are shared or added to the filling."""
        documents = self.rest
        if not documents.size:
            return
        left = self.left.tolist()
        target = least_loaded(self.batch.lengths[documents], self.surplus[documents], self.load.tolist(), left)
        put = target >= 0
        self.crowded = not put.all()
        document, chosen_rank = (documents[put], target[put]) if self.crowded else (documents, target)
        self.pieces.append(Pieces(document, np.zeros_like(document), self.batch.lengths[document], chosen_rank))
        self.left = np.array(left, np.int64)
        np.add.at(self.base, chosen_rank, self.batch.ticks[document])
        if self.crowded:
            self._share_out(documents[~put])

    def _share_out(self, documents: Ints) -> None:
        """Give documents that fit no rank to groups of ranks with enough rows; the rest is added to the filling."""
        width = self.knobs.width
        left = self.left.reshape(-1, width)
        heap = [(-room, group) for group, room in enumerate(np.maximum(left, 0).sum(1).tolist())]
        heapify(heap)
        kept, shared = [], []
        for document in documents.tolist():
            length, (room, group) = int(self.batch.lengths[document]), heap[0]
            if width == 1 or length > -room:
                kept.append(document)
                continue
            shared.append(document)
            heapreplace(heap, (room + length, group))
            so_far = edges(np.maximum(left[group], 0))
            edge = length * so_far // int(so_far[-1])
            rows = np.diff(edge)
            rank = group * width + np.arange(width)
            self.pieces.append(Pieces(np.full(width, document), edge[:-1], rows, rank))
            left[group] -= rows
            area = int(self.batch.ticks[document]) - self.batch.row * length
            self.base[rank] += area // width + self.batch.row * rows
        self.long = np.append(self.long, np.array(shared, np.int64))
        self.filling = np.append(np.array(kept, np.int64), self.filling)

    def fill(self) -> None:
        """Lay the remaining documents end to end over the ranks, cut where a rank is full."""
        laid = self._mixed(self.filling)
        document, offset, count = laid, np.zeros_like(laid), self.batch.lengths[laid]
        per_row = np.full(laid.size, self.per_row)
        if (self.left < 0).any():
            trimmed = self._trimmed()
            columns = (trimmed.document, trimmed.start, trimmed.count, self._each(trimmed.document))
            document, offset, count, per_row = (
                np.concatenate(pair) for pair in zip((document, offset, count, per_row), columns, strict=True)
            )
        if not document.size:
            return
        edge = edges(count)
        rows, level = self._level(int(edge[-1]))
        border = self._snapped(rows, edge, level)
        breaks = distinct(np.concatenate([edge, border]))
        start, count = breaks[:-1], breaks[1:] - breaks[:-1]
        at = edge.searchsorted(start, side="right") - 1
        rank = border[1:].searchsorted(start, side="right")
        self.pieces.append(Pieces(document[at], offset[at] + start - edge[at], count, rank))
        np.add.at(self.base, rank, per_row[at] * count)

    def _each(self, document: Ints) -> Ints:
        """Mean ticks of a row of each document."""
        return self.batch.ticks[document] // self.batch.lengths[document]

    def _trimmed(self) -> Pieces:
        """The rows that spreading gave a rank beyond its room, taken from its last stretches."""
        document, start, count, rank = (np.concatenate(parts) for parts in zip(*self.pieces, strict=True))
        order = np.argsort(-rank, kind="stable")[::-1]  # by rank, last stretch first
        held = np.cumsum(count[order])
        first = np.searchsorted(rank[order], rank[order])
        before = held - count[order] - np.append(0, held)[first]
        taken = np.empty_like(count)
        taken[order] = np.clip(-self.left[rank[order]] - before, 0, count[order])
        self.pieces = [Pieces(document, start, count - taken, rank)]
        np.add.at(self.left, rank, taken)
        np.subtract.at(self.base, rank, taken * self._each(document))
        some = taken > 0
        return Pieces(document[some], (start + count - taken)[some], taken[some], rank[some])

    def _mixed(self, documents: Ints) -> Ints:
        """The documents in an order in which every stretch has both long and short ones."""
        if not documents.size:
            return documents
        order = documents[np.lexsort((documents, -self.batch.lengths[documents]))]
        turn = np.arange(order.size) % self.ranks
        return order[turn.argsort(kind="stable")]

    def _level(self, tokens: int) -> tuple[Ints, int]:
        """The rows that each rank takes of these tokens, and the ticks at which all ranks with room finish."""
        least = int(self.base.min())
        begin = -((least - self.base) // self.per_row)  # the levels at which a rank takes its first and its last row
        ends = np.concatenate([begin, begin + self.left])
        order = ends.argsort(kind="stable")
        at, ranks = ends[order], np.where(order < self.ranks, 1, -1).cumsum()
        taken = edges(ranks[:-1] * np.minimum(at[1:] - at[:-1], tokens))
        last = int(taken.searchsorted(tokens)) - 1
        level = int(at[last]) - (int(taken[last]) - tokens) // int(ranks[last])
        rows = np.minimum(np.maximum(level - begin, 0), self.left)
        # the excess is less than one row for each rank that takes any
        for rank in np.flatnonzero(rows)[::-1][: int(rows.sum()) - tokens]:
            rows[rank] -= 1
        return self._without_slivers(rows), least + level * self.per_row

    def _without_slivers(self, rows: Ints) -> Ints:
        """The rows, except that a rank that would take only a few takes none, as far as others have room for them.

        A few rows of a document cost the fetch of all keys that they see.
        """
        few = np.flatnonzero((rows > 0) & (rows < FEW))
        if not few.size:
            return rows
        few = few[rows[few].argsort(kind="stable")]
        spare = np.where(rows >= FEW, self.left - rows, 0)
        moved = rows[few].cumsum()
        few = few[moved <= int(spare.sum())]
        many = int(rows[few].sum())
        before = spare.cumsum() - spare
        rows = rows + np.minimum(np.maximum(many - before, 0), spare)
        rows[few] = 0
        return rows

    def _snapped(self, rows: Ints, edge: Ints, level: int) -> Ints:
        """Borders between ranks, moved to a document's border where that costs next to nothing."""
        spare = level // 256 // self.per_row
        wanted = rows.cumsum()
        below, above = edge[edge.searchsorted(wanted, side="right") - 1], edge[edge.searchsorted(wanted)]
        nearer = above - wanted < wanted - below
        near_by = np.stack([np.where(nearer, above, below), np.where(nearer, below, above)])
        near_by[np.abs(near_by - wanted) > spare] = -1  # no border nearby
        total, room = int(edge[-1]), np.where(rows > 0, self.left, 0)
        most = np.minimum(room, rows + spare)
        behind = total - (edges(room[::-1])[-2::-1])  # at least this many rows must go to earlier ranks
        border, last = [0], 0
        each = zip(wanted.tolist(), *near_by.tolist(), most.tolist(), behind.tolist(), strict=True)
        for at, first, second, more, low in each:
            low, high = max(last, low), last + more
            if low <= first <= high:
                last = first
            elif low <= second <= high:
                last = second
            else:
                last = min(max(at, low), max(high, low))
            border.append(last)
        border[-1] = total
        return np.array(border, np.int64)


def layout_of(mask: Mask, pieces: Pieces, ranks: int) -> Layout:
    """The layout in which each rank has its pieces in position order."""
    start = mask.offsets[pieces.document] + pieces.start
    return Layout.ascending(start, pieces.count, pieces.rank, ranks)
