"""Rings against their definition, key by key, and what deriving them looks at."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpar import Layout, Mask, Plan
from seqpar.plan import routes
from seqpar.plan.routes import Demand, StepRoute, ring
from seqpar.plan.steps import Rows, as_rows
from tests.cases import EVERY, Case, cases, divisors, examples
from tests.plan.lines import lines_of


def holder_at(owner: int, hop: int, groups: int, inner: int) -> int:
    """Who holds an owner's keys after so many hops, one by one: round the node, then to the next."""
    node, place = divmod(owner, inner)
    for n in range(1, hop + 1):
        node, place = ((node + 1) % (groups // inner), place) if n % inner == 0 else (node, (place + 1) % inner)
    return node * inner + place


def ring_by_keys(demand: Demand, home: int, own_keys: np.ndarray, inner: int) -> Iterator[StepRoute]:
    """The ring of the module's first lines, from the last hop of every key."""
    groups = demand.groups
    path = [[holder_at(owner, hop, groups, inner) for hop in range(groups)] for owner in range(groups)]
    when = [[path[owner].index(holder) for holder in range(groups)] for owner in range(groups)]
    reach = np.zeros(demand.owner.size, np.int64)
    for holder in range(groups):
        for key in demand.needs.positions(holder):
            reach[key] = max(reach[key], when[demand.owner[key]][holder])
    owner = [next(o for o in range(groups) if path[o][hop] == home) for hop in range(groups)]
    block, last = own_keys, int(reach.max(initial=0))
    for t in range(1, last + 1):
        pos = np.flatnonzero((demand.owner == owner[t]) & (reach >= t))
        grad_sends = {owner[t]: as_rows(np.flatnonzero(reach[pos] == t))}
        if t < last:
            grad_sends[path[owner[t]][t + 1]] = as_rows(np.flatnonzero(reach[pos] > t))
        yield StepRoute(
            pos=pos,
            sends={path[owner[t - 1]][t]: as_rows(np.flatnonzero(reach[block] >= t))},
            recvs={path[owner[t]][t - 1]: slice(0, pos.size)},
            grad_sends=grad_sends,
            grad_recvs={path[home][t]: as_rows(np.flatnonzero(reach[own_keys] == t))},
            carry=path[owner[t + 1]][t] if t < last else None,
        )
        block = pos


def same(one: Rows, other: Rows) -> bool:
    """Whether rows are equal and of one kind."""
    if isinstance(one, slice) or isinstance(other, slice):
        return isinstance(one, slice) and isinstance(other, slice) and one == other
    return one.dtype == other.dtype and np.array_equal(one, other)


@examples(100)
@given(cases(masks=EVERY), st.data())
def test_every_key_goes_as_far_as_it_is_seen(case: Case, data: st.DataObject) -> None:
    plan = case.plan()
    width = data.draw(st.sampled_from(sorted(set(plan.widths.tolist()))))
    demand = plan.demand(width)
    inner = data.draw(st.sampled_from(divisors(demand.groups)))
    for home in range(demand.groups):
        keys = next(s.part.keys for s in plan.steps(home * width) if s.part.width == width)
        found, expected = list(ring(demand, home, keys, inner)), list(ring_by_keys(demand, home, keys, inner))
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert same(one.pos, other.pos) and one.carry == other.carry
            for name in ("sends", "recvs", "grad_sends", "grad_recvs"):
                mine, theirs = getattr(one, name), getattr(other, name)
                assert mine.keys() == theirs.keys() and all(same(mine[peer], theirs[peer]) for peer in mine), name


@pytest.mark.parametrize("ranks", [65, 128, 130])
@pytest.mark.parametrize("reach", [1, 40, 64, 127])
def test_the_last_hop_of_any_key_is_found_among_many_ranks(ranks: int, reach: int) -> None:
    """Groups are looked at 64 at a time."""
    lo = np.arange(ranks)
    lo[-1] = max(0, ranks - 1 - reach)
    plan = Plan(Mask.from_bounds(lo, np.arange(ranks) + 1), Layout.contiguous(ranks, ranks), transport="ring")
    assert len(plan.steps(3)) == 1 + min(reach, ranks - 1)


@pytest.mark.parametrize("transport", ["ring", "double_ring"])
@pytest.mark.parametrize("layout", [Layout.zigzag, lambda lengths, ranks: Layout.contiguous(sum(lengths), ranks)])
def test_a_ring_lists_each_key_once_however_many_ranks_see_it(transport, layout, monkeypatch) -> None:
    """Every rank derives how far the keys of all ranks go, without looking at each key that each rank sees."""
    tokens, listed = 1 << 16, 0

    def counted(*args: np.ndarray) -> np.ndarray:
        nonlocal listed
        rows = expand(*args)
        listed += rows.size
        return rows

    expand = routes.expand
    monkeypatch.setattr(routes, "expand", counted)
    for ranks in (8, 64, 256):
        listed = 0
        steps = Plan(Mask([tokens]), layout([tokens], ranks), transport=transport, node=8).steps(3)
        assert len(steps) == ranks
        assert listed <= sum(s.pos.size for s in steps) + tokens // 8 <= 2 * tokens


def test_lines_of_a_ring_grow_with_hops_alone() -> None:
    def lines(ranks: int, tokens: int) -> int:
        plan = Plan(Mask([tokens]), Layout.zigzag([tokens], ranks), transport="ring")
        return lines_of(lambda: plan.steps(3))

    assert lines(64, 1 << 20) <= 1.1 * lines(64, 1 << 14) <= 150 * 64
