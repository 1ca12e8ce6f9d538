"""What every rank computes and moves under a mask and a layout: counted from runs, for all ranks at once.

The counts are those of `Plan.steps` under "fetch" (a test compares them), made without a rank's steps: a layout over
thousands of ranks is counted in a few passes over its pieces. Groups are ranks that share heads; with width 1 a group
is a rank.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from seqpar.facts.intervals import Runs, cut, distinct, edges, expand, interval_of, order_of
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.facts.value import Ints, frozen
from seqpar.plan.routes import Needs, needs_of, union


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


class Stretches(NamedTuple):
    """Consecutive positions by owner: sorted by owner, then start; those of no owner overlap."""

    owner: Ints
    start: Ints
    stop: Ints


class Measure:
    """How many covered positions lie below a point, where intervals may cover a position several times."""

    def __init__(self, lo: Ints, hi: Ints) -> None:
        self._lo, self._hi = np.sort(lo), np.sort(hi)
        self._below_lo = edges(self._lo)
        self._below_hi = edges(self._hi)

    def below(self, point: Ints) -> Ints:
        """For each point, the covered positions below it, each as often as it is covered."""
        begun, ended = np.searchsorted(self._lo, point), np.searchsorted(self._hi, point)
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
    near = area.copy()
    moved = _Moved(mask, runs.pick(moving), group[moving], groups)
    near[moving] = moved.near(mask)
    entering = leaving = none
    if node_of is not None:
        entering, leaving = moved.crossing_once(node_of) if forwarded else moved.crossing(node_of)
    keys, sent = moved.keys()
    return Tally(
        rows=rows, merging=summed(group, np.where(near < area, runs.count, 0), groups), pieces=pieces,
        near=summed(group, near, groups), far=summed(group, area - near, groups),
        keys=keys, entering=entering, sent=sent, leaving=leaving, most=most,
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


def expanded(runs: Runs, owner: Ints) -> tuple[Runs, Ints]:
    """The same positions as runs of step 1, and the owner of each."""
    if (runs.step == 1).all():
        return runs, owner
    start, owner = expand(*runs), np.repeat(owner, runs.count)
    # neighbours are one run, as they are where no run strides
    first = np.flatnonzero(np.append(True, (np.diff(start) != 1) | (np.diff(owner) != 0)))
    return Runs(start[first], np.diff(np.append(first, start.size)), np.ones_like(first)), owner[first]


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


class _Moved:
    """What groups see and hold of the documents that several of them hold. Lines of positions lie one after the other,
    one for each group or node."""

    def __init__(self, mask: Mask, runs: Runs, group: Ints, groups: int) -> None:
        self.runs, self.group, self.groups = runs, group, groups
        self.line = mask.kv_tokens + 1
        self.needs = needs_of(mask, runs, group, self.groups)
        order = order_of(group, self.groups)
        owner, start = group[order], runs.start[order]
        self.own = Stretches(owner, start, start + runs.count[order])
        self.seen = Measure(self.needs.lo, self.needs.hi).between(self.own.start, self.own.stop)  # by any group

    def _on_line(self, which: Ints, lo: Ints, hi: Ints) -> tuple[Ints, Ints]:
        return lo + which * self.line, hi + which * self.line

    def _at_group(self, covered: Stretches | Needs, asked: Stretches | Needs) -> Ints:
        (a, *x), (b, *y) = _intervals(covered), _intervals(asked)
        return Measure(*self._on_line(a, *x)).between(*self._on_line(b, *y))

    def _at_node(self, node_of: Ints, covered: Stretches | Needs, asked: Stretches | Needs) -> Ints:
        (a, *x), (b, *y) = _intervals(covered), _intervals(asked)
        return Measure(*self._on_line(node_of[a], *x)).between(*self._on_line(node_of[b], *y))

    def keys(self) -> tuple[Ints, Ints]:
        """Key rows that each group fetches, and sends."""
        needs, own = self.needs, self.own
        fetched = needs.hi - needs.lo - self._at_group(own, needs)
        asked = self.seen - self._at_group(needs, own)
        return summed(needs.group, fetched, self.groups), summed(own.owner, asked, self.groups)

    def crossing(self, node_of: Ints) -> tuple[Ints, Ints]:
        """Of these the rows that come from another node, and that go to one."""
        needs, own = self.needs, self.own
        foreign = needs.hi - needs.lo - self._at_node(node_of, own, needs)
        asked = self.seen - self._at_node(node_of, needs, own)
        return summed(needs.group, foreign, self.groups), summed(own.owner, asked, self.groups)

    def crossing_once(self, at: Ints) -> tuple[Ints, Ints]:
        """The same if a key enters a node once. at: the node of each group."""
        needs, own = self.needs, self.own
        nodes = int(at[-1]) + 1
        once = union(at[needs.group], needs.lo, needs.hi, nodes, self.line - 1)
        home = own._replace(owner=at[own.owner])
        border = summed(once.group, once.hi - once.lo - self._at_group(home, once), nodes)
        entering, _ = self.crossing(at)
        wanted = summed(at, entering, nodes)
        asked = Measure(once.lo, once.hi).between(own.start, own.stop) - self._at_group(once, home)
        return -(-entering * border[at] // np.maximum(wanted[at], 1)), summed(own.owner, asked, self.groups)

    def near(self, mask: Mask) -> Ints:
        """Attended pairs of each stretch with the keys of its own group."""
        lo, hi, lo_step, hi_step = _linear(mask, self.runs)
        n, base = self.runs.count, self.group * self.line
        start, stop = self._on_line(self.own.owner, self.own.start, self.own.stop)
        first = np.searchsorted(stop, lo + base, side="right")
        last = np.maximum(hi + hi_step * (n - 1), lo)
        met = np.maximum(np.searchsorted(start, last + base) - first, 0)
        run = np.repeat(np.arange(n.size), met)
        at = expand(first, met)
        low, high = self.own.start[at], self.own.stop[at]
        seen = _clamped(hi[run], hi_step[run], n[run], low, high) - _clamped(lo[run], lo_step[run], n[run], low, high)
        return summed(run, seen, n.size)


def _intervals(x: Stretches | Needs) -> tuple[Ints, Ints, Ints]:
    """The owner or group of intervals, their starts and stops."""
    return (x.group, x.lo, x.hi) if isinstance(x, Needs) else (x.owner, x.start, x.stop)


def whole_runs(mask: Mask) -> tuple[Runs, Ints]:
    """All queries as runs that neither a document's border nor a kink of the bounds cuts, and their documents."""
    start = breaks_of(mask)
    runs = Runs(start, np.diff(np.append(start, mask.tokens)), np.ones_like(start))
    return runs, np.searchsorted(mask.offsets, start, side="right") - 1


def _linear(mask: Mask, runs: Runs) -> tuple[Ints, Ints, Ints, Ints]:
    """First bounds of runs that lie in one span each, and how they rise: lo, hi, lo_step, hi_step."""
    s = mask.spans
    span = np.searchsorted(s.start, runs.start, side="right") - 1
    t = runs.start - s.start[span]
    return s.lo[span] + t * s.lo_step[span], s.hi[span] + t * s.hi_step[span], s.lo_step[span], s.hi_step[span]


def area_of(mask: Mask, runs: Runs) -> Ints:
    """Attended pairs of runs that lie in one span of the mask each."""
    lo, hi, lo_step, hi_step = _linear(mask, runs)
    n = runs.count
    return n * (hi - lo) + (hi_step - lo_step) * runs.step * (n * (n - 1) // 2)


def _clamped(x: Ints, step: Ints, n: Ints, low: Ints, high: Ints) -> Ints:
    """Sum of ``clip(x + step * t, low, high)`` over ``0 <= t < n``, for steps of 0 and 1."""
    under, over = np.clip(low - x, 0, n), np.clip(x + n - high, 0, n)
    inner = n - under - over
    rising = low * under + high * over + inner * (x + under) + inner * (inner - 1) // 2
    return np.where(step == 1, rising, n * np.clip(x, low, high))
