"""The routes of keys among the ranks that hold different tokens of one part: fetch, ring, double ring, gather.

Every rank derives all routes without a message from `NeededKeys`, the key positions that each group of ranks must see.
A group is the ranks that share heads; with width 1 it is one rank. ``home`` is the group of the deriving rank,
``own_keys`` are the positions of its keys.

fetch: an owner sends each group the keys that it sees, in stages. A group's stages run downwards from its own keys and
wrap around, so that at any time the owners serve different groups::

    keys that group 1 sees    |  2  |  1  | own keys |  4  |  3  |      numbers: the stage in which they come

ring: keys go round hop by hop. double_ring, here 4 groups in nodes of 2: a hop inside the node, then one to the same
place in the next node::

    keys of     0  1  2  3         0  1  2  3
    hop 1       1  2  3  0         1  0  3  2      who holds them after the hop
    hop 2       2  3  0  1         3  2  1  0
    hop 3       3  0  1  2         2  3  0  1
                ring               double_ring

gather: all keys of every owner from which the group sees any, in one step.

Sources: ring, Liu et al. 2023 (Ring Attention, section 3); double ring, Gu et al. 2024 (LoongTrain, section 4.4), here
as one path of inner hops with an outer hop after each round, so that two buffers suffice; gather, Llama 3 (section
3.3.2); fetching only needed keys, Zewei Tao et al. 2025 (MagiAttention).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from seqpar.facts.bands import meetings
from seqpar.facts.intervals import Holders, Intervals, Runs, cut, distinct, edges, expand, least_over, order_of, union
from seqpar.facts.mask import Mask
from seqpar.facts.value import Ints, Memo
from seqpar.plan.steps import Entry, Rows, as_rows, holder_at, hops_to, owner_at


class NeededKeys(NamedTuple):
    """Disjoint, ascending intervals of key positions that each group sees; group ``g`` has edge[g] to edge[g+1]."""

    group: Ints
    lo: Ints
    hi: Ints
    edge: Ints

    @classmethod
    def of_groups(cls, intervals: Intervals, groups: int) -> NeededKeys:
        """Intervals of groups numbered below ``groups``; a group may see nothing."""
        return cls(*intervals, np.searchsorted(intervals.group, np.arange(groups + 1)))

    @property
    def intervals(self) -> Intervals:
        """The intervals without the edges."""
        return Intervals(self.group, self.lo, self.hi)

    def positions(self, group: int) -> Ints:
        """Key positions that a group sees, ascending."""
        part = slice(self.edge[group], self.edge[group + 1])
        return expand(self.lo[part], self.hi[part] - self.lo[part])

    def of(self, groups: Ints) -> NeededKeys:
        """The needs of these groups alone, renumbered in the given order."""
        count = self.edge[groups + 1] - self.edge[groups]
        at = expand(self.edge[groups], count)
        return NeededKeys(np.repeat(np.arange(groups.size), count), self.lo[at], self.hi[at], edges(count))


class StepRoute(NamedTuple):
    """The messages of one step: sends and grad_recvs in rows of the inside keys, the others in rows of its buffer.

    entry: keys that travel with this step for the next one, which forwards them; see `Step`.
    """

    pos: Ints
    sends: dict[int, Rows]
    recvs: dict[int, Rows]
    grad_sends: dict[int, Rows]
    grad_recvs: dict[int, Rows]
    carry: int | None = None
    own: Rows | None = None
    entry: Entry | None = None


TAPERED = 8192  # stages of at least this many keys are worth two small ones at the end, with their launches

# the step in which a rank's queries attend to its own keys
LOCAL = StepRoute(np.zeros(0, np.int64), {}, {}, {}, {})
# a step of others, in which nothing comes or goes here
APART = StepRoute(np.zeros(0, np.int64), {}, {}, {}, {})


@dataclass(frozen=True, eq=False)
class Demand(Memo):
    """One part over its groups: the keys that each group sees, owns, and owns first."""

    needs: NeededKeys
    holders: Holders
    anchor: Ints
    groups: int
    _memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, mask: Mask, queries: Holders, keys: Holders, groups: int) -> Demand:
        """The demand of groups that hold these queries and these keys."""
        needs = needs_of(mask, queries.runs, queries.holder.astype(np.int64), groups)
        anchor = np.full(groups, mask.kv_tokens, np.int64)
        np.minimum.at(anchor, keys.holder, keys.runs.start)
        return cls(needs, keys, anchor, groups)

    @property
    def owner(self) -> NDArray[np.int32]:
        """The group of every key [kv_tokens], -1 for keys of other parts; cached, O(tokens)."""
        return self.holders.all()

    def owner_of(self, positions: Ints) -> NDArray[np.int32]:
        """The group of each of these keys, -1 for keys of other parts; O(tokens) memory only if runs stride."""
        return self.holders.of(positions)


def needs_of(mask: Mask, runs: Runs, group: Ints, groups: int) -> NeededKeys:
    """The keys that each group's queries see, from the runs of all groups' queries."""
    seen = []
    for band in mask.bands:
        piece, source = cut(runs, band.spans.start)
        met = meetings(band, piece, mask.key_positions(piece.start))
        at, lo, hi = met.intervals()
        seen.append((group[source[met.piece[at]]], lo, hi))
    owner, lo, hi = seen[0] if len(seen) == 1 else map(np.concatenate, zip(*seen, strict=True))
    return NeededKeys.of_groups(union(owner, lo, hi, groups, mask.kv_tokens), groups)


class Stages(NamedTuple):
    """The stages of the keys that each group sees.

    total: number of keys; before: those before the group's own first key; count: number of stages; tapered: whether the
    last two stages are small.
    """

    total: Ints
    before: Ints
    count: Ints  # type: ignore[assignment]  # tuple.count is not missed
    tapered: NDArray[np.bool_]

    @classmethod
    def of(cls, demand: Demand, stage_rows: int) -> Stages:
        """The fewest stages of at most ``stage_rows`` rows, and the small ones."""
        needs = demand.needs
        total = np.bincount(needs.group, needs.hi - needs.lo, demand.groups).astype(np.int64)
        below = np.clip(np.minimum(needs.hi, demand.anchor[needs.group]) - needs.lo, 0, None)
        before = np.bincount(needs.group, below, demand.groups).astype(np.int64)
        count = np.maximum(-(-total // stage_rows), 1)
        tapered = total >= TAPERED * count
        return cls(total, before, count + 2 * tapered, tapered)

    @property
    def edges(self) -> Ints:
        """The start of each stage, counted in keys, group after group."""
        group = np.repeat(np.arange(self.count.size), self.count)
        nth = np.arange(group.size) - (np.cumsum(self.count) - self.count)[group]
        equal = self.count - 2 * self.tapered
        last = self.tapered * self.total // (16 * equal)
        tail = self.tapered * self.total // (4 * equal) + last
        main = self.total - tail
        return np.where(nth <= equal[group], main[group] * nth // equal[group], (self.total - last)[group])


def fetch(demand: Demand, home: int, own_keys: Ints, stage_rows: int) -> Iterator[StepRoute]:
    """Each owner sends each group only the keys that the group sees, in stages of at most ``stage_rows`` rows.

    A stage is a slice of the receiver's keys in position order. There are as few stages as the limit allows and, if
    they are large, two small ones at the end: the gradients of the last do not overlap with computation.
    """
    if demand.groups == 1:
        return
    stages = demand.memo(("stages", stage_rows), lambda: Stages.of(demand, stage_rows))
    turns = int(stages.count.max())
    groups = _takers(demand, home, own_keys)
    if groups.size == 1 and _sees_its_own(demand, home, own_keys):
        yield from [APART] * turns
        return
    group, turn, lo, hi = slices_of(demand.needs.of(groups), Stages(*(facts[groups] for facts in stages)))
    group = groups[group]
    sends = sends_of(group, turn, lo, hi, own_keys, home, turns)
    own = group == home
    buffers, recvs = _recvs(demand, home, turn[own], lo[own], hi[own], turns)
    for t in range(turns):
        yield StepRoute(buffers[t], sends[t], recvs[t], recvs[t], sends[t])


def _sees_its_own(demand: Demand, home: int, own_keys: Ints) -> bool:
    """Whether home sees no other group's keys."""
    part = slice(demand.needs.edge[home], demand.needs.edge[home + 1])
    lo, hi = demand.needs.lo[part], demand.needs.hi[part]
    own = np.searchsorted(own_keys, hi) - np.searchsorted(own_keys, lo)
    return bool((own == hi - lo).all())


def _takers(demand: Demand, home: int, own_keys: Ints) -> Ints:
    """Home and the groups that see any of its own keys; no other group's needs matter to home."""
    needs = demand.needs
    takes = np.zeros(demand.groups, bool)
    if own_keys.size:
        edge = np.flatnonzero(np.diff(own_keys) != 1) + 1
        start, stop = own_keys[np.append(0, edge)], own_keys[np.append(edge, own_keys.size) - 1] + 1
        begun, ended = np.searchsorted(start, needs.hi), np.searchsorted(stop, needs.lo, side="right")
        takes[needs.group[begun > ended]] = True
    takes[home] = True
    return np.flatnonzero(takes)


def _recvs(
    demand: Demand, home: int, turn: Ints, lo: Ints, hi: Ints, turns: int
) -> tuple[list[Ints], list[dict[int, Rows]]]:
    """For each turn, the positions of arriving keys and the rows of each sender, from the slices of home's need."""
    lo, hi, owner, source = demand.holders.pieces(lo, hi)
    foreign = np.flatnonzero(owner != home)
    piece = foreign[order_of(turn[source[foreign]], turns)]
    turn, lo, owner, length = turn[source[piece]], lo[piece], owner[piece], (hi - lo)[piece]
    row = edges(length)
    edge = row[np.searchsorted(turn, np.arange(turns + 1))]
    pos = expand(lo, length)
    first = row[:-1] - edge[turn]
    return np.split(pos, edge[1:-1]), _rows_by(turn, owner, first, first + length, turns)


def _rows_by(turn: Ints, peer: Ints | NDArray[np.int32], first: Ints, stop: Ints, turns: int) -> list[dict[int, Rows]]:
    """For each turn, the rows of every peer: those of its pieces ``[first, stop)``, in the given order."""
    result: list[dict[int, Rows]] = [{} for _ in range(turns)]
    if turn.size == 0:
        return result
    span = int(peer.max()) + 1
    key = turn * span + peer
    order = order_of(key, turns * span)
    key, first, stop = key[order], first[order], stop[order]
    head = np.flatnonzero(np.append(True, (key[1:] != key[:-1]) | (first[1:] != stop[:-1])))
    key, first, stop = key[head], first[head], stop[np.append(head[1:], key.size) - 1]
    message = np.flatnonzero(np.append(True, key[1:] != key[:-1]))
    turn_of, peer_of = (x.tolist() for x in np.divmod(key[message], span))
    for t, p, a, b in zip(turn_of, peer_of, first[message].tolist(), stop[message].tolist(), strict=True):
        result[t][p] = slice(a, b)
    # a message of several pieces is not a slice: its rows are listed
    count = np.diff(np.append(message, key.size))
    several = np.flatnonzero(count > 1)
    piece = expand(message[several], count[several])
    length = (stop - first)[piece]
    edge = edges(length)[edges(count[several])]
    rows = expand(first[piece], length)
    for i, a, b in zip(several.tolist(), edge[:-1].tolist(), edge[1:].tolist(), strict=True):
        result[turn_of[i]][peer_of[i]] = rows[a:b]
    return result


def by_owner(owner: Ints | NDArray[np.int32], groups: int) -> dict[int, Rows]:
    """For each owner, the indices of its entries in ``owner``, as rows."""
    count = np.bincount(owner, minlength=groups)
    owners = np.flatnonzero(count)
    split = np.split(order_of(owner, groups), np.cumsum(count[owners])[:-1])  # one empty part without owners
    return {o: as_rows(rows) for o, rows in zip(owners.tolist(), split, strict=False)}


def slices_of(needs: NeededKeys, stages: Stages) -> tuple[Ints, Ints, Ints, Ints]:
    """Every group's need, cut into its stages: group, stage, lo, hi of each piece."""
    length = needs.hi - needs.lo
    if (stages.count == 1).all():
        return needs.group, np.zeros_like(needs.group), needs.lo, needs.hi
    rank = np.cumsum(length) - length  # the place of each interval among all groups' needs, end to end
    base, first = np.cumsum(stages.total) - stages.total, np.cumsum(stages.count) - stages.count
    group = np.repeat(np.arange(stages.count.size), stages.count)
    edges, modulus = stages.edges, np.maximum(stages.total, 1)
    # a stage's start is counted downwards from the group's own first key, and wraps around
    breaks = base[group] + (stages.before[group] - edges) % modulus[group]
    piece, source = cut(Runs(rank, length, np.ones_like(rank)), np.sort(np.concatenate([breaks, base])))
    lo, owner = needs.lo[source] + piece.start - rank[source], needs.group[source]
    down = (stages.before[owner] - 1 - (piece.start - base[owner])) % modulus[owner]
    stage = np.searchsorted(edges + base[group], down + base[owner], side="right") - 1 - first[owner]
    return owner, stage, lo, lo + piece.count


def sends_of(
    group: Ints, turn: Ints, lo: Ints, hi: Ints, own_keys: Ints, home: int, turns: int
) -> list[dict[int, Rows]]:
    """For each turn, the own keys that each group gets, from the pieces ``[lo, hi)`` that it then sees."""
    first, stop = np.searchsorted(own_keys, lo), np.searchsorted(own_keys, hi)
    kept = np.flatnonzero((stop > first) & (group != home))
    return _rows_by(turn[kept], group[kept], first[kept], stop[kept], turns)


def gather(demand: Demand, home: int, own_keys: Ints) -> Iterator[StepRoute]:
    """All keys of every owner from which the group sees any, in one stage with the own keys."""
    needs, groups = demand.needs, demand.groups
    first, stop = np.searchsorted(own_keys, needs.lo), np.searchsorted(own_keys, needs.hi)
    takers = np.unique(needs.group[(stop > first) & (needs.group != home)])
    sends: dict[int, Rows] = {int(g): slice(0, own_keys.size) for g in takers}
    sources = np.zeros(groups + 1, bool)  # the last entry is for keys of other parts
    sources[demand.owner[needs.positions(home)]] = True
    sources[home], sources[groups] = True, False
    pos = np.flatnonzero(sources[demand.owner])
    recvs = by_owner(demand.owner[pos], groups)
    own = recvs.pop(home, slice(0, 0))
    yield StepRoute(pos, sends, recvs, recvs, sends, own=own)


def ring(demand: Demand, home: int, own_keys: Ints, inner: int) -> Iterator[StepRoute]:
    """Keys go round hop by hop, each only as far as a group downstream sees it.

    A row stays in the block up to the last hop at which its holder sees it. Its gradient is summed along the way and
    returns from that holder to the owner.
    """
    groups = demand.groups
    seen = demand.memo("seen", lambda: SeenKeys.of(demand))
    last = demand.memo(("last hop", inner), lambda: _last_hop(demand, seen, inner))
    if last == 0:
        return

    def owner(hop: int) -> int:
        """The group whose keys home holds after this many hops."""
        return owner_at(home, hop, groups, inner)

    def holder(group: int, hop: int) -> int:
        return holder_at(group, hop, groups, inner)

    reach, arrives, goes_on = _downstream(demand, seen, home, inner)
    own = slice(seen.edge[home], seen.edge[home + 1])
    first = np.searchsorted(own_keys, seen.lo[own])
    stop = first + seen.hi[own] - seen.lo[own]
    onward = _rows_of(first, stop, goes_on[own])
    for t in range(1, last + 1):
        piece = np.arange(seen.edge[owner(t)], seen.edge[owner(t) + 1])
        piece = piece[arrives[piece]]
        length = seen.hi[piece] - seen.lo[piece]
        pos, row, further = expand(seen.lo[piece], length), edges(length), goes_on[piece]
        sends = {holder(owner(t - 1), t): onward}
        recvs: dict[int, Rows] = {holder(owner(t), t - 1): slice(0, pos.size)}
        grad_sends = {owner(t): _rows_of(row[:-1], row[1:], ~further)}
        onward, carry = _rows_of(row[:-1], row[1:], further), None
        if t < last:
            grad_sends[holder(owner(t), t + 1)] = onward
            carry = holder(owner(t + 1), t)
        grad_recvs = {holder(home, t): _rows_of(first, stop, reach == t)}
        yield StepRoute(pos, sends, recvs, grad_sends, grad_recvs, carry)


def _rows_of(first: Ints, stop: Ints, chosen: NDArray[np.bool_]) -> Rows:
    """The rows of the chosen among ascending pieces ``[first, stop)``."""
    first, stop = first[chosen], stop[chosen]
    if first.size == 0:
        return slice(0, 0)
    count = stop - first
    if stop[-1] - first[0] == count.sum():
        return slice(int(first[0]), int(stop[-1]))
    return expand(first, count)


class SeenKeys(NamedTuple):
    """The keys that any group sees, in stretches that the same groups see, and these in pieces of one owner.

    first, stop: the stretches of each interval of the needs; count: a bound of their numbers. lo, hi, stretch: of each
    piece; the pieces of owner ``o`` are edge[o] to edge[o+1], in position order.
    """

    first: Ints
    stop: Ints
    count: int  # type: ignore[assignment]  # tuple.count is not missed
    lo: Ints
    hi: Ints
    stretch: Ints
    edge: Ints

    @classmethod
    def of(cls, demand: Demand) -> SeenKeys:
        """The keys of one part."""
        needs = demand.needs
        breaks = distinct(np.concatenate([needs.lo, needs.hi]))
        first, stop = np.searchsorted(breaks, needs.lo), np.searchsorted(breaks, needs.hi)
        size = breaks.size
        seen = np.flatnonzero(np.cumsum(np.bincount(first, minlength=size) - np.bincount(stop, minlength=size)))
        lo, hi, owner, source = demand.holders.pieces(breaks[seen], breaks[seen + 1])
        order = order_of(owner, demand.groups)
        edge = np.searchsorted(owner[order], np.arange(demand.groups + 1))
        return cls(first, stop, size, lo[order], hi[order], seen[source[order]], edge)

    def least(self, chosen: NDArray[np.bool_], values: Ints, none: int) -> Ints:
        """For each stretch the least value of the chosen needs that cover it, ``none`` if none does."""
        return least_over(self.first[chosen], self.stop[chosen], values[chosen], self.count, none)


def _downstream(
    demand: Demand, seen: SeenKeys, home: int, inner: int
) -> tuple[Ints, NDArray[np.bool_], NDArray[np.bool_]]:
    """How far home's own pieces go; and of every piece, whether home gets it, and whether home passes it on.

    From home keys go round the rest of its node, and then to the nodes before their owner's. So a piece is passed on if
    the next place in home's node, or the next node, that sees it comes early enough.
    """
    groups, group = demand.groups, demand.needs.group
    nodes, hop = groups // inner, hops_to(group, home, groups, inner)
    node, place = (group // inner - home // inner) % nodes, (group - home) % inner
    here, near = group == home, node == 0
    beside = seen.least(near & ~here, place, inner)[seen.stretch]
    beyond = seen.least(~near, node, nodes)[seen.stretch]
    met = seen.least(here, place, inner)[seen.stretch] == 0
    at_home = hops_to(home, np.arange(groups), groups, inner)  # when home holds the keys of each owner
    outer, turn = np.divmod(np.repeat(at_home, np.diff(seen.edge)), inner)
    goes_on = (beside < inner - turn) | (beyond < nodes - outer)
    reach = -seen.least(hop > 0, -hop, 0)[seen.stretch[seen.edge[home] : seen.edge[home + 1]]]
    return reach, met | goes_on, goes_on


def _last_hop(demand: Demand, seen: SeenKeys, inner: int) -> int:
    """The last hop at which any holder sees a key.

    64 groups at a time are bits of a word: which of them see a stretch, and then which see any key of an owner.
    """
    needs, groups, last = demand.needs, demand.groups, 0
    owners, bit_of = np.flatnonzero(np.diff(seen.edge)), np.arange(64, dtype=np.uint64)
    for base in range(0, groups, 64):
        part = slice(needs.edge[base], needs.edge[min(base + 64, groups)])
        bit = np.uint64(1) << (needs.group[part] - base).astype(np.uint64)
        bits = np.zeros(seen.count, np.uint64)
        np.add.at(bits, seen.first[part], bit)
        np.subtract.at(bits, seen.stop[part], bit)
        sees = np.bitwise_or.reduceat(np.cumsum(bits, out=bits)[seen.stretch], seen.edge[owners])
        owner, group = np.nonzero(sees[:, None] >> bit_of & np.uint64(1))
        last = max(last, int(hops_to(base + group, owners[owner], groups, inner).max(initial=0)))
        if last == groups - 1:
            break
    return last
