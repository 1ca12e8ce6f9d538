"""Fetch over nodes: a key that several groups of a node see, and none of them has, enters the node once.

One of the groups that see it is its gateway: it receives the key an exchange earlier, in its entry, keeps it for its
own step and passes it on to the rest. So no key crosses to a node twice, and none goes to a group that has no use for
it; as without nodes, every group receives each key that it sees and lacks exactly once::

    exchange n        owner ->          entry of the gateway
    exchange n + 1                      entry of the gateway  ->  step n + 1 of the others    (and the next keys enter)

    gradients n + 1   owner             sum at the gateway    <-  step n + 1 of the others
    gradients n + 2   owner <-          sum at the gateway

All other keys, of the own node or seen by one group of the node alone, are fetched from their owners.

Every rank derives all of it alike from `Demand`. Gateways share what enters evenly, as many bytes over the link of each
as the others' needs allow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from seqpar.facts.intervals import Intervals, expand, order_of
from seqpar.facts.value import Ints
from seqpar.plan.routes import Demand, Needs, Stages, StepRoute, by_owner, fetch, sends_of, slices_of
from seqpar.plan.steps import Entry, Rows, as_rows


@dataclass(frozen=True, eq=False)
class NodeShares:
    """Keys that enter nodes, in pieces that one set of groups sees; each is cut into a share for each of these groups.

    A share is a row: gateway, the group that it enters at; lo, hi, its key positions, maybe none; piece, to which it
    belongs; turn, in which of ``turns`` it is spread. Sorted by node, position, gateway, so that the rows of one piece
    are consecutive. node_edge: rows of node ``j`` are ``node_edge[j:j+2]``. rest: the keys that are fetched.
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
    """`fetch`, where ``inner`` consecutive groups are a node; equal to it if no two groups of a node see a key of
    another node.

    A turn spreads a slice of what all groups of a node must let in, at most ``stage_rows`` rows, so that every group
    sees a key in the turn for which it enters.
    """
    shares = None
    if 1 < inner < demand.groups:
        shares = demand.memo(("shares", inner, stage_rows), partial(_shares, demand, inner, stage_rows))
    if shares is None:
        yield from fetch(demand, home, own_keys, stage_rows)
        return
    first, *rest = fetch(shares.rest, home, own_keys, stage_rows)
    turns = list(_turns(demand, shares, home, own_keys, inner))
    # The first keys enter while fetched ones are computed, and the last gradients leave beside those of fetched ones.
    yield first._replace(entry=turns[0][0])
    for n, (_, route) in enumerate(turns):
        yield route._replace(entry=turns[n + 1][0] if n + 1 < len(turns) else None)
    yield from rest


def _shares(demand: Demand, inner: int, stage_rows: int) -> NodeShares | None:
    """The shares of all nodes; None if nothing is to be passed on."""
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
    rest = _without(demand.needs, gateway, lo[piece], hi[piece])
    return NodeShares(
        gateway, start, stop, piece, turn[piece], edge, int(stages.count.max()), replace(demand, needs=rest, _memo={})
    )


def _entering(demand: Demand, inner: int) -> Needs:
    """What several groups of a node see and none has: intervals of each node, cut where the set of groups changes."""
    needs, nodes, span = demand.needs, demand.groups // inner, demand.holders.total + 1
    base = needs.group // inner * span
    node, first, stop = _held(demand, inner)
    first, stop = node * span + first, node * span + stop
    # On the line of all nodes' positions: how many groups see a key, and far below zero where the node has it.
    edges, at = np.unique(np.concatenate([base + needs.lo, base + needs.hi, first, stop]), return_inverse=True)
    change = np.repeat([1, -1, -inner - 1, inner + 1], [base.size, base.size, first.size, stop.size])
    seen = np.cumsum(np.bincount(at.reshape(-1), change, edges.size).astype(np.int64))
    several = np.flatnonzero(seen >= 2)
    node = edges[several] // span
    lo, hi = edges[several] - node * span, edges[several + 1] - node * span
    return Needs.of_groups(Intervals(node, lo, hi), nodes)


def _held(demand: Demand, inner: int) -> tuple[Ints, Ints, Ints]:
    """Intervals of the keys that a node has: the node, first and stop of each."""
    holders = demand.holders
    if not holders.strided:
        node, first = holders.holder.astype(np.int64) // inner, holders.runs.start
        return node, first, first + holders.runs.count
    node = demand.owner // np.int32(inner)
    edge = np.append(np.flatnonzero(np.append(True, node[1:] != node[:-1])), node.size)
    kept = np.flatnonzero(node[edge[:-1]] >= 0)
    return node[edge[kept]].astype(np.int64), edge[kept], edge[kept + 1]


def _seen_by(needs: Needs, node: Ints, lo: Ints, inner: int) -> tuple[Ints, Ints]:
    """Every pair of a piece and a group of its node that sees it, by piece, then group; pieces start at ``lo``."""
    span = int(max(needs.hi.max(), lo.max())) + 1
    at, base = node * span + lo, needs.group // inner * span
    first, stop = np.searchsorted(at, base + needs.lo), np.searchsorted(at, base + needs.hi)
    piece, group = expand(first, stop - first), np.repeat(needs.group, stop - first)
    order = order_of(piece, lo.size)
    return piece[order], group[order]


def _cut_evenly(piece: Ints, lo: Ints, hi: Ints) -> tuple[Ints, Ints]:
    """The share ``start, stop`` of every row of a piece; what does not divide goes to each in turn."""
    groups = np.bincount(piece, minlength=lo.size)
    nth = np.arange(piece.size) - np.repeat(np.cumsum(groups) - groups, groups)
    length = hi - lo
    turn = (np.cumsum(length) - length) % groups
    cuts = [lo[piece] + (length[piece] * n + turn[piece]) // groups[piece] for n in (nth, nth + 1)]
    return cuts[0], cuts[1]


def _without(needs: Needs, group: Ints, lo: Ints, hi: Ints) -> Needs:
    """Needs without intervals of each group, which lie inside them and are disjoint."""
    span = int(needs.hi.max()) + 1
    first = np.sort(np.concatenate([needs.group * span + needs.lo, group * span + hi]))
    stop = np.sort(np.concatenate([needs.group * span + needs.hi, group * span + lo]))
    first, stop = first[stop > first], stop[stop > first]
    owner = first // span
    return Needs.of_groups(Intervals(owner, first - owner * span, stop - owner * span), needs.edge.size - 1)


def _turns(
    demand: Demand, shares: NodeShares, home: int, own_keys: Ints, inner: int
) -> Iterator[tuple[Entry, StepRoute]]:
    """For each turn what enters an exchange before it, and what is spread in it."""
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
        entry = Entry(entering[t], by_owner(owner, demand.groups), _rows(kept[order]))
        sends = _passed_on(gateway[rows], own[piece[rows]], length, order, home, demand.groups)
        yield entry, StepRoute(pos, sends, recvs, recvs, sends)


def _passed_on(group: Ints, share: Ints, length: Ints, order: Ints, home: int, groups: int) -> dict[int, Rows]:
    """Rows of home's entry that each group gets: all of ``share``, home's share of a piece that the group sees.

    order: which key, in position order, each row of the entry has.
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
    return {g: _rows(rows[at]) for g, at in takers.items()}


def _rows(index: Ints) -> Rows:
    """Row numbers in any order, as a slice if they are consecutive."""
    return as_rows(index) if (np.diff(index) > 0).all() else index
