"""What all ranks of a plan compute and fetch, counted from its pieces in one go: also for thousands of ranks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from seqpar.facts.intervals import Holders, cut
from seqpar.facts.value import Ints
from seqpar.plan.counts import Measure, Stretches, area_of, expanded
from seqpar.plan.routes import Demand, union

if TYPE_CHECKING:
    from seqpar.plan.plan import Plan

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


def load_of(plan: Plan) -> Load:
    """The load of every rank."""
    runs, rank, document = plan._pieces("q")
    width = plan.widths[document]
    inner, source = cut(runs, plan.mask.spans.start)
    area = area_of(plan.mask, inner)
    by_rank, node = np.zeros(plan.ranks), node_of(plan)
    for w in np.unique(plan.widths).tolist():
        # inside a head trade each member computes its share of the heads of the whole group's area
        chosen = width[source] == w
        groups = np.bincount(rank[source][chosen] // w, weights=area[chosen], minlength=plan.ranks // w)
        by_rank += np.repeat(groups / w, w)
    pieces = np.bincount(rank, minlength=plan.ranks)
    if plan.transport != "fetch":
        return Load(plan.layout.sizes(), by_rank, pieces, None, None)
    keys, crossing = np.zeros(plan.ranks, np.int64), np.zeros(plan.ranks, np.int64)
    for w, demand in _demands(plan):
        fetched, entering = _fetched(demand, w, plan.ranks if node is None else node, plan.node is not None)
        keys += np.repeat(fetched, w)
        crossing += np.repeat(entering, w)
    return Load(plan.layout.sizes(), by_rank, pieces, keys, None if node is None else crossing)


def node_of(plan: Plan) -> int | None:
    """Consecutive ranks of a node, as the plan has them or else the machine that it was made for."""
    return plan.node if plan.node is not None or plan.forecast is None else plan.forecast.node


def _demands(plan: Plan) -> list[tuple[int, Demand]]:
    widths = np.unique(plan.widths).tolist()
    return [(w, plan.memo(("demand", w), partial(plan._demand, w))) for w in widths]


def _own(holders: Holders) -> Stretches:
    """Who holds which keys, as stretches."""
    runs, owner = expanded(holders.runs, holders.holder.astype(np.int64))
    return Stretches(owner, runs.start, runs.start + runs.count)


def _fetched(demand: Demand, width: int, node: int, forwarded: bool) -> tuple[Ints, Ints]:
    """Key rows that each group fetches, and those that enter its node: forwarded ones all at the node's first group."""
    needs, own, groups = demand.needs, _own(demand.holders), demand.groups
    line = demand.holders.total + 1  # a line of positions for each group, or node, one after the other
    inner = max(1, node // width)

    def held(owner: Ints, group: Ints, lo: Ints, hi: Ints) -> Ints:
        return Measure(own.start + owner * line, own.stop + owner * line).between(lo + group * line, hi + group * line)

    def summed(group: Ints, values: Ints) -> Ints:
        return np.bincount(group, weights=values, minlength=groups).astype(np.int64)

    want = needs.hi - needs.lo
    fetched = summed(needs.group, want - held(own.owner, needs.group, needs.lo, needs.hi))
    at = needs.group // inner
    if not forwarded:
        return fetched, summed(needs.group, want - held(own.owner // inner, at, needs.lo, needs.hi))
    once = union(at, needs.lo, needs.hi, -(-groups // inner), line - 1)
    enter = once.hi - once.lo - held(own.owner // inner, once.group, once.lo, once.hi)
    return fetched, summed(once.group * inner, enter)


def fetched_between(plan: Plan, block: int) -> Floats:
    """Rows of keys, with all their heads, that blocks of ranks fetch: [receiver, sender]; for the transport "fetch".

    block: consecutive ranks, a multiple of the plan's node and of every width. Ranks of a block fetch from each other
    what the diagonal says, forwarded rows included.
    """
    blocks = -(-plan.ranks // block)
    moved = np.zeros((blocks, blocks))
    for width, demand in _demands(plan):
        own, groups = _own(demand.holders), demand.groups
        inner, node = block // width, (plan.node or width) // width
        once = union(demand.needs.group // node, *demand.needs[1:3], -(-groups // node), demand.holders.total)
        part = np.zeros((blocks, blocks))
        for sender in range(blocks):
            mine = own.owner // inner == sender
            rows = Measure(own.start[mine], own.stop[mine]).between(once.lo, once.hi)
            part[:, sender] = np.bincount(once.group * node // inner, weights=rows, minlength=blocks)
        np.fill_diagonal(part, 0)
        fetched = _fetched(demand, width, plan.ranks, forwarded=False)[0]
        inside = np.bincount(np.arange(groups) // inner, weights=fetched, minlength=blocks)
        np.fill_diagonal(part, inside - part.sum(1))
        moved += part
    return moved
