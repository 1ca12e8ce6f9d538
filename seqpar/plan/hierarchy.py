"""Fetch across nodes: a key that several groups of a node see, and none of them owns, enters the node once.

One of these groups is the key's gateway. It receives the key one exchange early, in its entry, keeps it for its own
step and forwards it to the others. So no key crosses to a node twice, and none goes to a group that does not see it; as
without nodes, every group receives each key that it sees and does not own exactly once::

    exchange n        owner ->          entry of the gateway
    exchange n + 1                      entry of the gateway  ->  step n + 1 of the others    (and the next keys enter)

    gradients n + 1   owner             sum at the gateway    <-  step n + 1 of the others
    gradients n + 2   owner <-          sum at the gateway

All other keys, from the same node or seen by one group of the node only, are fetched from their owners.

Every rank derives the same routes from `Demand`. Gateways share the entering keys evenly, in bytes per link, as far as
the groups' needs allow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from seqpar.facts.intervals import Intervals, expand, minus, order_of, union
from seqpar.facts.value import Ints
from seqpar.plan.routes import Demand, NeededKeys, Stages, StepRoute, by_owner, fetch, sends_of, slices_of
from seqpar.plan.steps import Entry, Rows, as_rows


@dataclass(frozen=True, eq=False)
class NodeShares:
    """Keys that enter nodes, in pieces that one set of groups sees; each piece is cut into a share for every group.

    One row per share. gateway: the group where it enters; lo, hi: its key positions, maybe none; piece: its piece;
    turn: the one of ``turns`` in which it is forwarded. Sorted by node, position and gateway, so that the rows of a
    piece are consecutive. node_edge: node ``j`` has the rows ``node_edge[j]`` to ``node_edge[j+1]``. rest: keys fetched
    directly.
    """

    gateway: Ints
    lo: Ints
    hi: Ints
    piece: Ints
    turn: Ints
    node_edge: Ints
    turns: int
    rest: Demand


def fetch_by_node(demand: Demand, home: int, own_keys: Ints, stage_rows: int, inner: int) -> Iterator[StepRoute]:
    """`fetch` with nodes of ``inner`` consecutive groups.

    It equals `fetch` if no two groups of a node see the same key of another node.

    A turn forwards a slice of the keys that enter a node, at most ``stage_rows`` rows; all groups see a key in the turn
    for which it enters.
    """
    shares = None
    if 1 < inner < demand.groups:
        shares = demand.memo(("shares", inner, stage_rows), partial(_shares, demand, inner, stage_rows))
    if shares is None:
        yield from fetch(demand, home, own_keys, stage_rows)
        return
    first, *rest = fetch(shares.rest, home, own_keys, stage_rows)
    turns = list(_turns(demand, shares, home, own_keys, inner))
    # The first keys enter while fetched keys are computed; the last gradients leave with those of fetched keys.
    yield first._replace(entry=turns[0][0])
    for n, (_, route) in enumerate(turns):
        yield route._replace(entry=turns[n + 1][0] if n + 1 < len(turns) else None)
    yield from rest


def _shares(demand: Demand, inner: int, stage_rows: int) -> NodeShares | None:
    """The shares of all nodes; None if no key is forwarded."""
    nodes = demand.groups // inner
    entering = _entering(demand, inner)
    if not entering.group.size:
        return None
    anchor = demand.anchor.reshape(nodes, inner).min(1)
    stages = Stages.of(Demand(entering, demand.holders, anchor, nodes), stage_rows)
    node, turn, lo, hi = slices_of(entering, stages)
    piece, gateway = _seen_by(demand.needs, node, lo, inner)
    start, stop = _cut_evenly(piece, lo, hi)
    edge = np.searchsorted(node[piece], np.arange(nodes + 1))
    through = union(gateway, lo[piece], hi[piece], demand.groups, demand.holders.total)
    direct = NeededKeys.of_groups(minus(demand.needs.intervals, through, demand.holders.total), demand.groups)
    rest = replace(demand, needs=direct, _memo={})
    return NodeShares(gateway, start, stop, piece, turn[piece], edge, int(stages.count.max()), rest)


def _entering(demand: Demand, inner: int) -> NeededKeys:
    """The keys that several groups of a node see and none owns: intervals by node, each of one set of groups."""
    needs, nodes, span = demand.needs, demand.groups // inner, demand.holders.total + 1
    base = needs.group // inner * span
    held = demand.holders.intervals()
    owned = held.group // inner * span
    first, stop = owned + held.lo, owned + held.hi
    # All nodes' positions on one line: the number of groups that see a key, far below zero where the node owns it.
    edges, at = np.unique(np.concatenate([base + needs.lo, base + needs.hi, first, stop]), return_inverse=True)
    change = np.repeat([1, -1, -inner - 1, inner + 1], [base.size, base.size, first.size, stop.size])
    seen = np.cumsum(np.bincount(at.reshape(-1), change, edges.size).astype(np.int64))
    several = np.flatnonzero(seen >= 2)
    node = edges[several] // span
    lo, hi = edges[several] - node * span, edges[several + 1] - node * span
    return NeededKeys.of_groups(Intervals(node, lo, hi), nodes)


def _seen_by(needs: NeededKeys, node: Ints, lo: Ints, inner: int) -> tuple[Ints, Ints]:
    """All pairs of a piece and a group of its node that sees it, by piece, then group. lo: the starts of the pieces."""
    span = int(max(needs.hi.max(), lo.max())) + 1
    at, base = node * span + lo, needs.group // inner * span
    first, stop = np.searchsorted(at, base + needs.lo), np.searchsorted(at, base + needs.hi)
    piece, group = expand(first, stop - first), np.repeat(needs.group, stop - first)
    order = order_of(piece, lo.size)
    return piece[order], group[order]


def _cut_evenly(piece: Ints, lo: Ints, hi: Ints) -> tuple[Ints, Ints]:
    """The share ``start, stop`` of every row of a piece; remainders go to the rows in turns."""
    groups = np.bincount(piece, minlength=lo.size)
    nth = np.arange(piece.size) - np.repeat(np.cumsum(groups) - groups, groups)
    length = hi - lo
    turn = (np.cumsum(length) - length) % groups
    cuts = [lo[piece] + (length[piece] * n + turn[piece]) // groups[piece] for n in (nth, nth + 1)]
    return cuts[0], cuts[1]


def _turns(
    demand: Demand, shares: NodeShares, home: int, own_keys: Ints, inner: int
) -> Iterator[tuple[Entry, StepRoute]]:
    """For each turn the keys that enter one exchange before it, and the keys that are forwarded in it."""
    entering = sends_of(shares.gateway, shares.turn, shares.lo, shares.hi, own_keys, home, shares.turns)
    span = slice(*shares.node_edge[home // inner :][:2])
    gateway, lo, hi, piece, turn = (x[span] for x in (shares.gateway, shares.lo, shares.hi, shares.piece, shares.turn))
    piece, length = piece - piece[:1], hi - lo
    own = np.full(piece.max(initial=-1) + 1, -1)  # home's share of each piece that it sees
    own[piece[gateway == home]] = np.flatnonzero(gateway == home)
    seen = np.flatnonzero(own[piece] >= 0)
    seen = seen[order_of(turn[seen], shares.turns)]
    edge = np.searchsorted(turn[seen], np.arange(shares.turns + 1))
    for t in range(shares.turns):
        rows = seen[edge[t] : edge[t + 1]]
        pos, via = expand(lo[rows], length[rows]), np.repeat(gateway[rows], length[rows])
        recvs = by_owner(via, demand.groups)
        recvs.pop(home, None)
        kept = np.flatnonzero(via == home)
        owner = demand.owner_of(pos[kept])
        order = order_of(owner, demand.groups)
        owner = owner[order]
        entry = Entry(entering[t], by_owner(owner, demand.groups), as_rows(kept[order]))
        sends = _passed_on(gateway[rows], own[piece[rows]], length, order, home, demand.groups)
        yield entry, StepRoute(pos, sends, recvs, recvs, sends)


def _passed_on(group: Ints, share: Ints, length: Ints, order: Ints, home: int, groups: int) -> dict[int, Rows]:
    """Rows of home's entry that each group gets: all of ``share``, home's share of a piece that the group sees.

    order: by row of the entry, the place of its key in position order.
    """
    row = np.empty_like(order)
    row[order] = np.arange(order.size)
    own = share[group == home]
    first = np.zeros_like(length)
    first[own] = np.cumsum(length[own]) - length[own]
    foreign = group != home
    group, share = group[foreign], share[foreign]
    rows = row[expand(first[share], length[share])]
    takers = by_owner(np.repeat(group, length[share]), groups)
    return {g: as_rows(rows[at]) for g, at in takers.items()}
