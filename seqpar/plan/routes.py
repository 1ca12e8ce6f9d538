"""How keys travel among the ranks that hold different tokens of one part: fetch, ring, double ring, gather.

Everything here is derived from `Needs`, the key positions that each group of ranks must see, by every rank alike and
without a message. A group is the ranks that share heads; with width 1 it is one rank.

Sources: ring, Liu et al. 2023 (Ring Attention, section 3); double ring, Gu et al. 2024 (LoongTrain, section 4.4), here
as one path of inner hops with an outer hop after every round, so that two buffers suffice; gather, Llama 3 (section
3.3.2); fetching only what is needed, Zewei Tao et al. 2025 (MagiAttention).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from seqpar.layout import Runs, cut, expand
from seqpar.mask import Ints, Mask, Memo
from seqpar.plan.steps import Rows, as_rows


class Needs(NamedTuple):
    """Disjoint, ascending intervals of key positions that each group sees; those of group ``g`` are ``edge[g:g+2]``."""

    group: Ints
    lo: Ints
    hi: Ints
    edge: Ints

    def positions(self, group: int) -> Ints:
        """Key positions that a group sees, ascending."""
        mine = slice(self.edge[group], self.edge[group + 1])
        return expand(self.lo[mine], self.hi[mine] - self.lo[mine])


class Route(NamedTuple):
    """What one step moves, in rows of the inside keys (sends, grad_recvs) and of the step's buffer (the others)."""

    pos: Ints
    sends: dict[int, Rows]
    recvs: dict[int, Rows]
    grad_sends: dict[int, Rows]
    grad_recvs: dict[int, Rows]
    carry: int | None = None
    own: Rows | None = None


Group = TypeVar("Group", int, Ints)

# the step in which a rank's queries meet its own keys
LOCAL = Route(np.zeros(0, np.int64), {}, {}, {}, {})


@dataclass(frozen=True, eq=False)
class Demand(Memo):
    """One part over its groups: who sees which keys, who has them, and the first key that each group has.

    owner [kv_tokens]: the group of each key, -1 for keys of other parts.
    """

    needs: Needs
    owner: NDArray[np.int32]
    anchor: Ints
    groups: int
    _memo: dict[Any, Any] = field(default_factory=dict, repr=False)


def needs_of(mask: Mask, runs: Runs, group: Ints, groups: int) -> Needs:
    """The keys that each group's queries see, from the runs of all groups' queries."""
    piece, source = cut(runs, mask.spans.start)
    owner = group[source]
    span = np.searchsorted(mask.spans.start, piece.start, side="right") - 1
    t = piece.start - mask.spans.start[span]
    lo_step, hi_step = piece.step * mask.spans.lo_step[span], piece.step * mask.spans.hi_step[span]
    lo = mask.spans.lo[span] + t * mask.spans.lo_step[span]
    hi = mask.spans.hi[span] + t * mask.spans.hi_step[span]
    last = piece.count - 1
    # The rows of a piece see one interval together unless the lower end leaps over what the row before saw.
    width = np.minimum(hi - lo, hi - lo + (last - 1) * (hi_step - lo_step))
    torn = (last > 0) & (lo_step > 0) & (width < lo_step)
    whole = ~torn
    first = [lo[whole]]
    stop = [hi[whole] + last[whole] * hi_step[whole]]
    owners = [owner[whole]]
    if torn.any():
        rows = piece.count[torn]
        first.append(expand(lo[torn], rows, lo_step[torn]))
        stop.append(_progression(hi[torn], rows, hi_step[torn]))
        owners.append(np.repeat(owner[torn], rows))
    return _union(np.concatenate(owners), np.concatenate(first), np.concatenate(stop), groups, mask.kv_tokens)


def _progression(start: Ints, count: Ints, step: Ints) -> Ints:
    nth = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    return np.repeat(start, count) + np.repeat(step, count) * nth


def _union(group: Ints, lo: Ints, hi: Ints, groups: int, tokens: int) -> Needs:
    """Intervals of each group merged where they touch."""
    kept = hi > lo
    base = group[kept] * (tokens + 1)
    lo, hi = lo[kept] + base, hi[kept] + base
    order = np.argsort(lo, kind="stable")
    lo, hi = lo[order], hi[order]
    if lo.size:
        reach = np.maximum.accumulate(hi)
        first = np.flatnonzero(np.append(True, lo[1:] > reach[:-1]))
        lo, hi = lo[first], np.append(reach[first[1:] - 1], reach[-1])
    owner = lo // (tokens + 1)
    return Needs(
        owner, lo - owner * (tokens + 1), hi - owner * (tokens + 1), np.searchsorted(owner, np.arange(groups + 1))
    )


def _split(keys: NDArray[np.int32], values: Ints, groups: int) -> list[Ints]:
    """``values`` by key 0..groups-1, each in the order given."""
    order = np.argsort(keys.astype(np.int16 if groups < 2**15 else np.int32), kind="stable")
    edge = np.cumsum(np.bincount(keys, minlength=groups))
    return np.split(values[order], edge[:-1])


def fetch(demand: Demand, me: int, mine: Ints, stage_rows: int) -> Iterator[Route]:
    """Each owner sends each group just the keys that it sees, in the fewest stages of at most ``stage_rows`` rows.

    A stage is a slice of the receiver's need in position order. It starts with the slice around its own first token
    and goes down from there in a cycle, so that at any time the owners serve different groups.
    """
    needs, groups = demand.needs, demand.groups
    if groups == 1:
        return
    length = needs.hi - needs.lo
    total = np.bincount(needs.group, length, groups).astype(np.int64)
    stages = np.maximum(-(-total // stage_rows), 1)
    first = _first_slice(demand, stages, total)
    out_groups, out_stage, out_lo, out_hi = _slices(needs, total, stages)
    turn = (first[out_groups] - out_stage) % stages[out_groups]
    sends = _sends(out_groups, turn, out_lo, out_hi, mine, me, int(stages.max()))
    wanted = needs.positions(me)
    for t in range(int(stages.max())):
        j = (first[me] - t) % stages[me] if t < stages[me] else None
        part = wanted[:0] if j is None else wanted[total[me] * j // stages[me] : total[me] * (j + 1) // stages[me]]
        owner = demand.owner[part]
        part, owner = part[owner != me], owner[owner != me]
        recvs = _by_owner(owner, groups)
        yield Route(part, sends[t], recvs, recvs, sends[t])


def _by_owner(owner: NDArray[np.int32], groups: int) -> dict[int, Rows]:
    if owner.size == 0:
        return {}
    split = _split(owner, np.arange(owner.size), groups)
    return {o: as_rows(rows) for o, rows in enumerate(split) if rows.size}


def _first_slice(demand: Demand, stages: Ints, total: Ints) -> Ints:
    """For each group the slice of its need that holds its own first key, or the last slice before it."""
    if (stages == 1).all():
        return np.zeros_like(stages)
    needs = demand.needs
    below = np.clip(np.minimum(needs.hi, demand.anchor[needs.group]) - needs.lo, 0, None)
    before = np.bincount(needs.group, below, demand.groups).astype(np.int64)
    # Slice j holds union rows [total * j // stages, total * (j + 1) // stages).
    return np.clip((before * stages + stages - 1) // np.maximum(total, 1), 0, stages - 1)


def _slices(needs: Needs, total: Ints, stages: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Every group's need cut at the borders of its stages: group, stage, lo, hi of each piece."""
    length = needs.hi - needs.lo
    if (stages == 1).all():
        return needs.group, np.zeros_like(needs.group), needs.lo, needs.hi
    rank = np.cumsum(length) - length  # place of each interval in the concatenation of all groups' needs
    base = np.cumsum(total) - total
    group = np.repeat(np.arange(len(stages)), stages)
    nth = np.arange(group.size) - np.repeat(np.cumsum(stages) - stages, stages)
    breaks = base[group] + total[group] * nth // stages[group]
    piece, source = cut(Runs(rank, length, np.ones_like(rank)), breaks)
    lo = needs.lo[source] + piece.start - rank[source]
    owner = needs.group[source]
    stage = np.searchsorted(breaks, piece.start, side="right") - 1 - (np.cumsum(stages) - stages)[owner]
    return owner, stage, lo, lo + piece.count


def _sends(group: Ints, stage: Ints, lo: Ints, hi: Ints, mine: Ints, me: int, stages: int) -> list[dict[int, Rows]]:
    """Which of my keys each group gets at each stage: stage -> group -> rows."""
    first, stop = np.searchsorted(mine, lo), np.searchsorted(mine, hi)
    kept = (stop > first) & (group != me)
    group, stage, first, stop = group[kept], stage[kept], first[kept], stop[kept]
    result: list[dict[int, Rows]] = [{} for _ in range(stages)]
    if group.size == 0:
        return result
    key = stage * (int(group.max()) + 1) + group
    order = np.argsort(key, kind="stable")
    key, first, length = key[order], first[order], (stop - first)[order]
    edge = np.flatnonzero(np.append(True, key[1:] != key[:-1]))
    rows = expand(first, length)
    ends = np.cumsum(np.add.reduceat(length, edge))
    for i, piece in zip(edge, np.split(rows, ends[:-1]), strict=True):
        result[stage[order[i]]][int(group[order[i]])] = as_rows(piece)
    return result


def gather(demand: Demand, me: int, mine: Ints) -> Iterator[Route]:
    """All keys of every owner of which a group sees any, in one stage, own keys among them."""
    needs, groups = demand.needs, demand.groups
    first, stop = np.searchsorted(mine, needs.lo), np.searchsorted(mine, needs.hi)
    takers = np.unique(needs.group[(stop > first) & (needs.group != me)])
    sends: dict[int, Rows] = {int(g): slice(0, mine.size) for g in takers}
    sources = np.zeros(groups + 1, bool)  # the last entry stands for keys of other parts
    sources[demand.owner[needs.positions(me)]] = True
    sources[me], sources[groups] = True, False
    pos = np.flatnonzero(sources[demand.owner])
    recvs = _by_owner(demand.owner[pos], groups)
    own = recvs.pop(me, slice(0, 0))
    yield Route(pos, sends, recvs, recvs, sends, own=own)


def ring(demand: Demand, me: int, inner: int) -> Iterator[Route]:
    """Keys go round hop by hop, and on only as far as somebody downstream sees them.

    Hop ``t`` brings the keys of `_owner_at` (me, t). A row stays in the block up to the last hop at which its holder
    sees it. Its gradient is summed along the way and goes home from there.
    """
    groups = demand.groups
    reach, last, by_owner = demand.memo(("ring", inner), lambda: _ring_facts(demand, inner))
    mine = by_owner[me]
    block = mine
    for t in range(1, last + 1):
        here = by_owner[_owner_at(me, t, groups, inner)]
        pos = here[reach[here] >= t]
        onward = as_rows(np.flatnonzero(reach[block] >= t))
        leave = reach[pos]
        sends = {_holder_at(_owner_at(me, t - 1, groups, inner), t, groups, inner): onward}
        recvs: dict[int, Rows] = {_holder_at(_owner_at(me, t, groups, inner), t - 1, groups, inner): slice(0, pos.size)}
        grad_sends = {_owner_at(me, t, groups, inner): as_rows(np.flatnonzero(leave == t))}
        carry = None
        if t < last:
            grad_sends[_holder_at(_owner_at(me, t, groups, inner), t + 1, groups, inner)] = as_rows(
                np.flatnonzero(leave > t)
            )
            carry = _holder_at(_owner_at(me, t + 1, groups, inner), t, groups, inner)
        grad_recvs = {_holder_at(me, t, groups, inner): as_rows(np.flatnonzero(reach[mine] == t))}
        yield Route(pos, sends, recvs, grad_sends, grad_recvs, carry)
        block = pos


def _holder_at(owner: Group, hop: int, groups: int, inner: int) -> Group:
    """Who holds a group's keys after so many hops: ``inner - 1`` hops round the node, then one to the next node.

    The hop between nodes keeps the place inside the node, so that every rank uses its own link.
    """
    node, place = divmod(owner, inner)
    outer, turn = divmod(hop, inner)
    return (node + outer) % (groups // inner) * inner + (place + turn - outer) % inner


def _owner_at(holder: int, hop: int, groups: int, inner: int) -> int:
    """Whose keys a group holds after so many hops: the inverse of `_holder_at`."""
    node, place = divmod(holder, inner)
    outer, turn = divmod(hop, inner)
    return (node - outer) % (groups // inner) * inner + (place - turn + outer) % inner


def _ring_facts(demand: Demand, inner: int) -> tuple[NDArray[np.int32], int, list[Ints]]:
    """What all ranks' rings share: how far each key goes, the last hop of any, and the keys of each group."""
    groups = demand.groups
    reach = hops(demand, inner)
    keys = np.where(demand.owner < 0, groups, demand.owner)
    return reach, int(reach.max(initial=0)), _split(keys, np.arange(len(keys)), groups + 1)


def hops(demand: Demand, inner: int) -> NDArray[np.int32]:
    """For each key the last hop at which its holder sees it, 0 if only its owner does; int32 [kv_tokens]."""
    groups = demand.groups
    distance = np.zeros((groups, groups), np.int32)  # [owner, holder] -> hop
    every = np.arange(groups)
    for hop in range(groups):
        distance[every, _holder_at(every, hop, groups, inner)] = hop
    reach = np.zeros(len(demand.owner), np.int32)
    for group in range(groups):
        seen = demand.needs.positions(group)
        reach[seen] = np.maximum(reach[seen], distance[demand.owner[seen], group])
    return reach
