"""What every rank computes and moves under a mask and a layout: counted from runs, for all ranks at once.

The counts are those of `Plan.steps` under "fetch" (a test compares them), but need no rank's steps: a layout over
thousands of ranks is counted in a few passes over its pieces. Groups are ranks that share heads; with width 1 a group
is a rank.

The one tool is `Measure`: from sorted ends of intervals it tells how many positions below a point they cover. What
groups have and what they need are put on one line, a stretch of all positions for each group, so that two sorted arrays
answer for every group at once::

    line          |----- group 0 -----|----- group 1 -----|
    own           |#####              |     ##########    |
    needs         |=============      |=============      |
    fetched       |     --------      |-----              |      needs without what own covers

Planners count by `tally` and `counts_of`; reports ask `load_of` and `fetched_between` of a plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from seqpar.facts.intervals import Holders, Intervals, Runs, cut, distinct, edges, expand, interval_of, order_of, union
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.facts.value import Ints, frozen
from seqpar.plan.derive import Derived
from seqpar.plan.routes import Needs, needs_of


class Tally(NamedTuple):
    """Counts by group, int64 [groups]. Rows of keys are of one layer's forward.

    rows: query rows; merging: those of them that see fetched keys. pieces: stretches of documents. near, far: attended
    pairs with the group's own keys and with fetched ones. keys: fetched key rows. entering: those that come from
    another node, counted once a node if they are forwarded inside it, and charged to the node's groups in proportion to
    what each of them fetches. sent, leaving: the same of what the group sends. most: query rows of the member that
    holds most, which the others wait for where tokens are traded for heads.
    """

    rows: Ints
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
    """How many covered positions lie below a point, where intervals may cover a position several times."""

    def __init__(self, lo: Ints, hi: Ints) -> None:
        self._lo, self._hi = np.sort(lo), np.sort(hi)
        self._below_lo = edges(self._lo)
        self._below_hi = edges(self._hi)

    def below(self, point: Ints) -> Ints:
        """For each point, the covered positions below it, each as often as it is covered."""
        begun, ended = self._lo.searchsorted(point), self._hi.searchsorted(point)
        return (begun * point - self._below_lo[begun]) - (ended * point - self._below_hi[ended])

    def between(self, lo: Ints, hi: Ints) -> Ints:
        """Covered positions in intervals."""
        return self.below(hi) - self.below(lo)


def tally(
    mask: Mask, layout: Layout, *, width: int = 1, node: int = 1, forwarded: bool = False,
    documents: NDArray[np.bool_] | None = None,
) -> Tally:  # fmt: skip
    """The counts of all groups of ``width`` ranks, ``node`` groups to a node; forwarded: keys enter a node once.

    documents: those that are counted, all by default.
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
    """The counts of stretches that one group holds each. node_of: the node of each group, None where nothing crosses
    from one to another. most: `Tally.most`, None where each group is a rank."""
    area = area_of(mask, runs)
    rows, pieces = summed(group, runs.count, groups), np.bincount(group, minlength=groups)
    most = rows if most is None else most
    none = np.zeros(groups, np.int64)
    moving = _moving(mask, group, document)
    if not moving.size:
        return Tally(rows, none, pieces, summed(group, area, groups), none, none, none, none, none, most)
    # what the groups of cut documents have, and what they see
    part, holder = runs.pick(moving), group[moving]
    order = order_of(holder, groups)
    own = Intervals(holder[order], part.start[order], (part.start + part.count)[order])
    moved = Moved(needs_of(mask, part, holder, groups), own, groups, mask.kv_tokens)
    near = area.copy()
    near[moving] = _near(mask, part, holder, own)
    entering = leaving = none
    if node_of is not None:
        entering = moved.entering(node_of)
        if not forwarded:
            leaving = moved.leaving(node_of)
        else:  # what enters a node is charged to its groups in proportion to what each of them takes
            once = moved.needed_by(node_of)
            wanted = summed(node_of, entering, int(node_of[-1]) + 1)
            entering = -(-entering * moved.entering_once(node_of, once)[node_of] // np.maximum(wanted[node_of], 1))
            leaving = moved.leaving_once(node_of, once)
    return Tally(
        rows=rows, merging=summed(group, np.where(near < area, runs.count, 0), groups), pieces=pieces,
        near=summed(group, near, groups), far=summed(group, area - near, groups),
        keys=moved.fetched(), entering=entering, sent=moved.sent(), leaving=leaving, most=most,
    )  # fmt: skip


def summed(index: Ints, values: Ints, size: int) -> Ints:
    """Sums of the values of each index."""
    result = np.zeros(size, np.int64)
    np.add.at(result, index, values)
    return result


def _pieces(mask: Mask, layout: Layout, width: int) -> tuple[Runs, Ints, Ints]:
    """Stretches of positions, ascending, that one group holds, one document has and one span of the mask bounds; the
    group and the document of each."""
    lo, holder = layout.memo("stretches", lambda: _stretches(layout))
    group = holder // width
    first = np.flatnonzero(np.append(True, group[1:] != group[:-1]))
    lo, group = lo[first], group[first]
    whole = Runs(lo, np.diff(np.append(lo, mask.tokens)), np.ones_like(lo))
    piece, source = cut(whole, breaks_of(mask))
    return piece, group[source], interval_of(piece.start, mask.offsets[:-1])


def _most(mask: Mask, layout: Layout, width: int, documents: NDArray[np.bool_] | None) -> Ints:
    """`Tally.most` of groups of ``width`` ranks."""
    runs, rank, document = _pieces(mask, layout, 1)
    rows = runs.count if documents is None else runs.count * documents[document]
    return summed(rank, rows, layout.ranks).reshape(-1, width).max(1)


def _stretches(layout: Layout) -> tuple[Ints, Ints]:
    """Where stretches of one rank's positions begin, ascending, and the rank of each."""
    lo, _, holder, _ = layout.holders().pieces(np.zeros(1, np.int64), np.full(1, layout.total))
    return frozen(lo), frozen(holder.astype(np.int64))


def breaks_of(mask: Mask) -> Ints:
    """Where documents and spans of the mask start, ascending."""
    return mask.memo("breaks", lambda: frozen(distinct(np.concatenate([mask.spans.start, mask.offsets[:-1]]))))


def _moving(mask: Mask, group: Ints, document: Ints) -> Ints:
    """The stretches of documents that are cut: their groups may see keys of others, or have keys that others see."""
    if not mask.within_documents:
        return np.arange(group.size)
    torn = (document[1:] == document[:-1]) & (group[1:] != group[:-1])
    cut_up = np.zeros(mask.lengths.size, bool)
    cut_up[document[1:][torn]] = True
    return np.flatnonzero(cut_up[document])


class Moved:
    """The keys that groups fetch from each other, from what each needs and what it has of its own; rows of keys.

    Lines of positions lie one after the other, one for each group or node, so that one sorted array counts for all.
    """

    def __init__(self, needs: Needs, own: Intervals, groups: int, tokens: int) -> None:
        self.needs, self.own, self.groups, self.line = needs.intervals, own, groups, tokens + 1

    def _overlap(self, covered: Intervals, asked: Intervals) -> Ints:
        """Positions of each asked interval that intervals of the same group cover, each as often as they do."""
        a, b = covered.group * self.line, asked.group * self.line
        return Measure(covered.lo + a, covered.hi + a).between(asked.lo + b, asked.hi + b)

    @cached_property
    def _seen(self) -> Ints:
        """Positions of each own interval that any group needs, each as often as one does."""
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
        """What the groups of each node need together."""
        return union(node_of[self.needs.group], self.needs.lo, self.needs.hi, int(node_of[-1]) + 1, self.line - 1)

    def entering_once(self, node_of: Ints, once: Intervals) -> Ints:
        """Rows that enter each node, [nodes], if a key enters it once and is passed on inside; once: `needed_by`."""
        return summed(once.group, once.hi - once.lo - self._overlap(self.own.by(node_of), once), int(node_of[-1]) + 1)

    def leaving_once(self, node_of: Ints, once: Intervals) -> Ints:
        """Rows that each group sends to other nodes, if a key enters a node once."""
        asked = Measure(once.lo, once.hi).between(self.own.lo, self.own.hi)
        return summed(self.own.group, asked - self._overlap(once, self.own.by(node_of)), self.groups)


def _near(mask: Mask, runs: Runs, group: Ints, own: Intervals) -> Ints:
    """Attended pairs of each run with the keys that its own group has; runs lie in one span of the mask each."""
    line = mask.kv_tokens + 1
    lo, hi, lo_step, hi_step = _linear(mask, runs)
    n, base = runs.count, group * line
    start, stop = own.lo + own.group * line, own.hi + own.group * line
    first = stop.searchsorted(lo + base, side="right")
    last = np.maximum(hi + hi_step * (n - 1), lo)
    met = np.maximum(start.searchsorted(last + base) - first, 0)
    run = np.repeat(np.arange(n.size), met)
    at = expand(first, met)
    low, high = own.lo[at], own.hi[at]
    seen = _clamped(hi[run], hi_step[run], n[run], low, high) - _clamped(lo[run], lo_step[run], n[run], low, high)
    return summed(run, seen, n.size)


def whole_runs(mask: Mask) -> tuple[Runs, Ints]:
    """All queries as runs that neither a document's border nor a kink of the bounds cuts, and their documents."""
    start = breaks_of(mask)
    runs = Runs(start, np.diff(np.append(start, mask.tokens)), np.ones_like(start))
    return runs, np.searchsorted(mask.offsets, start, side="right") - 1


def _linear(mask: Mask, runs: Runs) -> tuple[Ints, Ints, Ints, Ints]:
    """First bounds of runs that lie in one span each, and how they rise: lo, hi, lo_step, hi_step."""
    s = mask.spans
    span = s.start.searchsorted(runs.start, side="right") - 1
    t = runs.start - s.start[span]
    return s.lo[span] + t * s.lo_step[span], s.hi[span] + t * s.hi_step[span], s.lo_step[span], s.hi_step[span]


def area_of(mask: Mask, runs: Runs) -> Ints:
    """Attended pairs of runs that lie in one span of the mask each."""
    lo, hi, lo_step, hi_step = _linear(mask, runs)
    n = runs.count
    return n * (hi - lo) + (hi_step - lo_step) * runs.step * (n * (n - 1) // 2)


def _clamped(x: Ints, step: Ints, n: Ints, low: Ints, high: Ints) -> Ints:
    """Sum of ``clip(x + step * t, low, high)`` over ``0 <= t < n``, for steps of 0 and 1."""
    under, over = np.minimum(np.maximum(low - x, 0), n), np.minimum(np.maximum(x + n - high, 0), n)
    inner = n - under - over
    rising = low * under + high * over + inner * (x + under) + inner * (inner - 1) // 2
    return np.where(step == 1, rising, n * np.minimum(np.maximum(x, low), high))


Floats = NDArray[np.float64]


class Load(NamedTuple):
    """By rank. rows: query rows without pads; area: attended pairs, of all heads; pieces: stretches of documents.

    keys: rows of keys received in one forward; crossing: those of them that come from another node. Both are None
    unless the transport is "fetch", and crossing where no node is known.
    """

    rows: Ints
    area: Floats
    pieces: Ints
    keys: Ints | None
    crossing: Ints | None


def load_of(plan: Derived) -> Load:
    """What every rank of a plan computes and fetches."""
    runs, rank, document = plan.residence.pieces("q")
    width = plan.widths[document]
    inner, source = cut(runs, plan.mask.spans.start)
    area = area_of(plan.mask, inner)
    by_rank, node = np.zeros(plan.ranks), node_of(plan)
    for w in np.unique(plan.widths).tolist():
        # inside a head trade each member computes its share of the heads of the whole group's area
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


def _entering(moved: Moved, inner: int, *, once: bool) -> Ints:
    """Rows that come to each group from another node of ``inner`` groups; once: they all come to the node's first."""
    at = np.arange(moved.groups) // inner
    if not once:
        return moved.entering(at)
    entering = np.zeros(moved.groups, np.int64)
    entering[::inner] = moved.entering_once(at, moved.needed_by(at))
    return entering


def node_of(plan: Derived) -> int | None:
    """Consecutive ranks of a node, as the plan has them or else the machine that it was made for."""
    return plan.node if plan.node is not None or plan.forecast is None else plan.forecast.node


def _moved_by_width(plan: Derived) -> Iterator[tuple[int, Moved]]:
    """The keys that the groups of each width fetch."""
    for width in np.unique(plan.widths).tolist():
        demand = plan.demand(width)
        yield width, Moved(demand.needs, _held(demand.holders), demand.groups, demand.holders.total)


def _held(holders: Holders) -> Intervals:
    """Who holds which keys, as intervals."""
    runs, group = holders.runs, holders.holder.astype(np.int64)
    if (runs.step == 1).all():
        return Intervals(group, runs.start, runs.start + runs.count)
    start, group = expand(*runs), np.repeat(group, runs.count)
    # neighbours are one run, as they are where no run strides
    first = np.flatnonzero(np.append(True, (np.diff(start) != 1) | (np.diff(group) != 0)))
    return Intervals(group[first], start[first], start[first] + np.diff(np.append(first, start.size)))


def fetched_between(plan: Derived, block: int) -> Floats:
    """Rows of keys, with all their heads, that blocks of ranks fetch: [receiver, sender]; for the transport "fetch".

    block: consecutive ranks, a multiple of the plan's node and of every width. Ranks of a block fetch from each other
    what the diagonal says, forwarded rows included.
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
