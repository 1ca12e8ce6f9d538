"""Counts of work and traffic under a mask and a layout, from runs, for all ranks at once.

They equal the counts of `Plan.steps` under "fetch" (a test compares them) but derive no steps: a layout over thousands
of ranks takes a few passes over its pieces. Groups are ranks that share heads; with width 1 a group is one rank.

The one tool is `Measure`: from the sorted ends of intervals it counts the covered positions below a point. The keys
that groups own and need are put on one line, with a stretch of all positions for each group, so that two sorted arrays
answer for every group at once::

    line          |----- group 0 -----|----- group 1 -----|
    own           |#####              |     ##########    |
    needs         |=============      |=============      |
    fetched       |     --------      |-----              |      needs without what own covers

Planners use `tally` and `counts_of`; reports use `load_of` and `fetched_between`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from seqpar.facts.bands import meetings
from seqpar.facts.intervals import Intervals, Runs, cut, edges, expand, interval_of, order_of, summed, union
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.facts.value import Ints, frozen
from seqpar.plan.derive import Derived
from seqpar.plan.routes import NeededKeys, needs_of


class Tally(NamedTuple):
    """Counts by group, int64 [groups]. Key rows are those of one layer's forward.

    rows: query rows. again: rows counted once more for every band after the first in which they see the group's own
    keys; merging: rows counted for every band in which they see fetched keys. pieces: stretches of documents. near,
    far: attended pairs with the group's own keys and with fetched ones. keys: fetched key rows. entering: fetched keys
    from other nodes; rows that enter a node once and are forwarded inside it are charged to its groups in proportion to
    their own needs. sent, leaving: the same for rows that the group sends. most: query rows of the group's largest
    member, for which the other members wait when tokens are traded for heads.
    """

    rows: Ints
    again: Ints
    merging: Ints
    pieces: Ints
    near: Ints
    far: Ints
    keys: Ints
    entering: Ints
    sent: Ints
    leaving: Ints
    most: Ints


class Measure:
    """Counts covered positions below a point; overlapping intervals count a position several times."""

    def __init__(self, lo: Ints, hi: Ints) -> None:
        self._lo, self._hi = np.sort(lo), np.sort(hi)
        self._below_lo = edges(self._lo)
        self._below_hi = edges(self._hi)

    def below(self, point: Ints) -> Ints:
        """For each point the covered positions below it, with multiplicity."""
        begun, ended = self._lo.searchsorted(point), self._hi.searchsorted(point)
        return (begun * point - self._below_lo[begun]) - (ended * point - self._below_hi[ended])

    def between(self, lo: Ints, hi: Ints) -> Ints:
        """Covered positions in each interval."""
        return self.below(hi) - self.below(lo)


def tally(
    mask: Mask, layout: Layout, *, width: int = 1, node: int = 1, forwarded: bool = False,
    documents: NDArray[np.bool_] | None = None,
) -> Tally:  # fmt: skip
    """The counts of all groups of ``width`` ranks, with ``node`` groups per node. forwarded: keys enter a node once.

    documents: the documents to count, by default all.
    """
    groups = layout.ranks // width
    runs, group, document = _pieces(mask, layout, width)
    if documents is not None:
        kept = documents[document]
        runs, group, document = runs.pick(kept), group[kept], document[kept]  # type: ignore[arg-type]
    node_of = np.arange(groups) // node if node < groups else None
    most = _most(mask, layout, width, documents) if width > 1 else None
    return counts_of(mask, runs, group, document, groups, node_of=node_of, forwarded=forwarded and node > 1, most=most)


def counts_of(
    mask: Mask, runs: Runs, group: Ints, document: Ints, groups: int, *, node_of: Ints | None, forwarded: bool,
    most: Ints | None,
) -> Tally:  # fmt: skip
    """The counts of stretches that one group holds each.

    node_of: the node of each group, or None if there are no nodes. most: `Tally.most`, None if each group is one rank.
    """
    areas = areas_of(mask, runs)
    area = areas.sum(0)
    rows, pieces = summed(group, runs.count, groups), np.bincount(group, minlength=groups)
    most = rows if most is None else most
    none = np.zeros(groups, np.int64)
    moving = _moving(mask, group, document)
    if not moving.size:
        again = summed(group, seen_again(runs, areas), groups)
        return Tally(rows, again, none, pieces, summed(group, area, groups), none, none, none, none, none, most)
    # the keys that groups of cut documents own, and those that they see
    part, holder = runs.pick(moving), group[moving]
    order = order_of(holder, groups)
    own = Intervals(holder[order], part.start[order], (part.start + part.count)[order])
    moved = FetchedKeys(needs_of(mask, part, holder, groups), own, groups, mask.kv_tokens)
    close = areas.copy()
    close[:, moving] = _near(mask, part, holder, own)
    near, merging = close.sum(0), (close < areas).sum(0) * runs.count
    entering = leaving = none
    if node_of is not None:
        entering = moved.entering(node_of)
        if not forwarded:
            leaving = moved.leaving(node_of)
        else:  # rows that enter a node are charged to its groups in proportion to their own needs
            once = moved.needed_by(node_of)
            wanted = summed(node_of, entering, int(node_of[-1]) + 1)
            entering = -(-entering * moved.entering_once(node_of, once)[node_of] // np.maximum(wanted[node_of], 1))
            leaving = moved.leaving_once(node_of, once)
    return Tally(
        rows=rows, again=summed(group, seen_again(runs, close), groups), merging=summed(group, merging, groups),
        pieces=pieces, near=summed(group, near, groups), far=summed(group, area - near, groups), keys=moved.fetched(),
        entering=entering, sent=moved.sent(), leaving=leaving, most=most,
    )  # fmt: skip


def _pieces(mask: Mask, layout: Layout, width: int) -> tuple[Runs, Ints, Ints]:
    """Ascending stretches of one group, document and span of the mask each; and their groups and documents."""
    lo, holder = layout.memo("stretches", lambda: _stretches(layout))
    group = holder // width
    first = np.flatnonzero(np.append(True, group[1:] != group[:-1]))
    lo, group = lo[first], group[first]
    whole = Runs(lo, np.diff(np.append(lo, mask.tokens)), np.ones_like(lo))
    piece, source = cut(whole, mask.breaks)
    return piece, group[source], interval_of(piece.start, mask.offsets[:-1])


def _most(mask: Mask, layout: Layout, width: int, documents: NDArray[np.bool_] | None) -> Ints:
    """`Tally.most` of groups of ``width`` ranks."""
    runs, rank, document = _pieces(mask, layout, 1)
    rows = runs.count if documents is None else runs.count * documents[document]
    return summed(rank, rows, layout.ranks).reshape(-1, width).max(1)


def _stretches(layout: Layout) -> tuple[Ints, Ints]:
    """The starts of all stretches of one rank's positions, ascending, and the rank of each."""
    lo, _, holder, _ = layout.holders().pieces(np.zeros(1, np.int64), np.full(1, layout.total))
    return frozen(lo), frozen(holder.astype(np.int64))


def _moving(mask: Mask, group: Ints, document: Ints) -> Ints:
    """The stretches of documents cut across groups; the keys of all others stay where they are."""
    if not mask.within_documents:
        return np.arange(group.size)
    torn = (document[1:] == document[:-1]) & (group[1:] != group[:-1])
    cut_up = np.zeros(mask.lengths.size, bool)
    cut_up[document[1:][torn]] = True
    return np.flatnonzero(cut_up[document])


class FetchedKeys:
    """The key rows that groups fetch from each other, from the keys that each needs and owns.

    Groups, or nodes, lie on one line of positions one after the other, so that one sorted array counts for all.
    """

    def __init__(self, needs: NeededKeys, own: Intervals, groups: int, tokens: int) -> None:
        self.needs, self.own, self.groups, self.line = needs.intervals, own, groups, tokens + 1

    def _overlap(self, covered: Intervals, asked: Intervals) -> Ints:
        """Positions of each asked interval that intervals of the same group cover, with multiplicity."""
        a, b = covered.group * self.line, asked.group * self.line
        return Measure(covered.lo + a, covered.hi + a).between(asked.lo + b, asked.hi + b)

    @cached_property
    def _seen(self) -> Ints:
        """Positions of each own interval that groups need, once per group."""
        return Measure(self.needs.lo, self.needs.hi).between(self.own.lo, self.own.hi)

    def fetched(self) -> Ints:
        """Rows that each group fetches."""
        needs = self.needs
        return summed(needs.group, needs.hi - needs.lo - self._overlap(self.own, needs), self.groups)

    def sent(self) -> Ints:
        """Rows that each group sends."""
        return summed(self.own.group, self._seen - self._overlap(self.needs, self.own), self.groups)

    def entering(self, node_of: Ints) -> Ints:
        """Rows that each group fetches from another node; node_of: the node of each group."""
        needs = self.needs
        foreign = needs.hi - needs.lo - self._overlap(self.own.by(node_of), needs.by(node_of))
        return summed(needs.group, foreign, self.groups)

    def leaving(self, node_of: Ints) -> Ints:
        """Rows that each group sends to another node."""
        stays = self._overlap(self.needs.by(node_of), self.own.by(node_of))
        return summed(self.own.group, self._seen - stays, self.groups)

    def needed_by(self, node_of: Ints) -> Intervals:
        """The keys that the groups of each node need, together."""
        return union(node_of[self.needs.group], self.needs.lo, self.needs.hi, int(node_of[-1]) + 1, self.line - 1)

    def entering_once(self, node_of: Ints, once: Intervals) -> Ints:
        """Rows that enter each node, [nodes], if a key enters it once and is forwarded inside. once: `needed_by`."""
        return summed(once.group, once.hi - once.lo - self._overlap(self.own.by(node_of), once), int(node_of[-1]) + 1)

    def leaving_once(self, node_of: Ints, once: Intervals) -> Ints:
        """Rows that each group sends to other nodes, if a key enters a node once."""
        asked = Measure(once.lo, once.hi).between(self.own.lo, self.own.hi)
        return summed(self.own.group, asked - self._overlap(once, self.own.by(node_of)), self.groups)


def _near(mask: Mask, runs: Runs, group: Ints, own: Intervals) -> Ints:
    """Attended pairs of each run with its own group's keys, [bands, runs]; no bound bends inside a run."""
    line, result = mask.kv_tokens + 1, np.zeros((len(mask.bands), group.size), np.int64)
    start, stop = own.lo + own.group * line, own.hi + own.group * line
    for total, band in zip(result, mask.bands, strict=True):
        met = meetings(band, runs, mask.key_positions(runs.start))
        base = group[met.piece] * line
        first = stop.searchsorted(np.maximum(met.lo, met.low) + base, side="right")
        last = np.minimum(met.hi + met.hi_step * (met.rows - 1), met.high)
        count = np.maximum(start.searchsorted(np.maximum(last, met.lo) + base) - first, 0)
        at, owned = np.repeat(np.arange(count.size), count), expand(first, count)
        low, high = np.maximum(own.lo[owned], met.low[at]), np.minimum(own.hi[owned], met.high[at])
        total += summed(met.piece[at], met.pick(at)._replace(low=low, high=np.maximum(low, high)).areas(), group.size)
    return result


def whole_runs(mask: Mask) -> tuple[Runs, Ints]:
    """All queries as runs, cut at document borders and at kinks of the bounds, and the document of each run."""
    start = mask.breaks
    runs = Runs(start, np.diff(np.append(start, mask.tokens)), np.ones_like(start))
    return runs, np.searchsorted(mask.offsets, start, side="right") - 1


def areas_of(mask: Mask, runs: Runs) -> Ints:
    """Attended pairs of each run in each band of the mask, [bands, runs]; no bound bends inside a run."""
    result = np.zeros((len(mask.bands), runs.count.size), np.int64)
    for total, band in zip(result, mask.bands, strict=True):
        if band.until is None:
            lo, hi, lo_step, hi_step = band.linear(runs.start)
            n = runs.count
            total += n * (hi - lo) + (hi_step - lo_step) * runs.step * (n * (n - 1) // 2)
        else:
            met = meetings(band, runs, mask.key_positions(runs.start))
            total += summed(met.piece, met.areas(), total.size)
    return result


def seen_again(runs: Runs, areas: Ints) -> Ints:
    """Rows of each run, once for every band after the first in which it has pairs. areas: [bands, runs]."""
    return np.maximum((areas > 0).sum(0) - 1, 0) * runs.count


Floats = NDArray[np.float64]


class Load(NamedTuple):
    """By rank. rows: query rows without pads; area: attended pairs, of all heads; pieces: stretches of documents.

    keys: key rows received in one forward; crossing: those among them from another node. Both are None unless the
    transport is "fetch"; crossing is also None if the node size is unknown.
    """

    rows: Ints
    area: Floats
    pieces: Ints
    keys: Ints | None
    crossing: Ints | None


def load_of(plan: Derived) -> Load:
    """The work of every rank of a plan, and the keys that it fetches."""
    runs, rank, document = plan.residence.pieces("q")
    width = plan.widths[document]
    inner, source = cut(runs, plan.mask.breaks)
    area = areas_of(plan.mask, inner).sum(0)
    by_rank, node = np.zeros(plan.ranks), node_of(plan)
    for w in np.unique(plan.widths).tolist():
        # inside a head trade each member computes the whole group's area for its share of the heads
        chosen = width[source] == w
        groups = np.bincount(rank[source][chosen] // w, weights=area[chosen], minlength=plan.ranks // w)
        by_rank += np.repeat(groups / w, w)
    rows, pieces = plan.layout.sizes(), np.bincount(rank, minlength=plan.ranks)
    if plan.transport != "fetch":
        return Load(rows, by_rank, pieces, None, None)
    keys, crossing = np.zeros(plan.ranks, np.int64), np.zeros(plan.ranks, np.int64)
    for w, moved in _moved_by_width(plan):
        keys += np.repeat(moved.fetched(), w)
        if node is not None:
            crossing += np.repeat(_entering(moved, max(1, node // w), once=plan.node is not None), w)
    return Load(rows, by_rank, pieces, keys, None if node is None else crossing)


def _entering(moved: FetchedKeys, inner: int, *, once: bool) -> Ints:
    """Rows that each group receives from other nodes of ``inner`` groups. once: all go to the node's first group."""
    at = np.arange(moved.groups) // inner
    if not once:
        return moved.entering(at)
    entering = np.zeros(moved.groups, np.int64)
    entering[::inner] = moved.entering_once(at, moved.needed_by(at))
    return entering


def node_of(plan: Derived) -> int | None:
    """Ranks per node: the plan's, else those of the machine that it was planned for, else None."""
    return plan.node if plan.node is not None or plan.forecast is None else plan.forecast.node


def _moved_by_width(plan: Derived) -> Iterator[tuple[int, FetchedKeys]]:
    """For each width, the keys that its groups fetch."""
    for width in np.unique(plan.widths).tolist():
        demand = plan.demand(width)
        yield width, FetchedKeys(demand.needs, demand.holders.intervals(), demand.groups, demand.holders.total)


def fetched_between(plan: Derived, block: int) -> Floats:
    """Key rows, with all heads, that blocks of ranks fetch: [receiver, sender]; for the transport "fetch".

    block: consecutive ranks, a multiple of the plan's node and of every width. The diagonal counts rows fetched inside
    a block, forwarded rows included.
    """
    blocks = -(-plan.ranks // block)
    rows_between = np.zeros((blocks, blocks))
    for width, moved in _moved_by_width(plan):
        inner, node = block // width, (plan.node or width) // width
        own, at = moved.own, np.arange(moved.groups)
        once = moved.needed_by(at // node)
        part = np.zeros((blocks, blocks))
        for sender in range(blocks):
            held = own.group // inner == sender
            rows = Measure(own.lo[held], own.hi[held]).between(once.lo, once.hi)
            part[:, sender] = np.bincount(once.group * node // inner, weights=rows, minlength=blocks)
        np.fill_diagonal(part, 0)
        inside = np.bincount(at // inner, weights=moved.fetched(), minlength=blocks)
        np.fill_diagonal(part, inside - part.sum(1))
        rows_between += part
    return rows_between
