"""Properties 1, 2, 3 and 7 of the specification, and where gradients go, by acting all ranks' steps out in numpy."""

from __future__ import annotations

import tracemalloc

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.plan import Plan, Step
from seqpar.plan.plan import NOMINAL_ROW_BYTES
from tests.cases import Case, cases, divisors
from tests.facts.test_tiles import check_tiles


def rounds(plan: Plan) -> list[list[Step | None]]:
    """Step number -> rank -> step."""
    by_rank = [{s.number: s for s in plan.steps(r)} for r in range(plan.ranks)]
    numbers = sorted({n for steps in by_rank for n in steps})
    return [[steps.get(n) for steps in by_rank] for n in numbers]


def act_out(plan: Plan) -> np.ndarray:
    """Runs the exchanges on token numbers; returns how often each (query, key) was computed, and checks buffers."""
    seen = np.zeros((plan.mask.tokens, plan.mask.kv_tokens), int)
    before: list[np.ndarray | None] = [None] * plan.ranks
    entered: list[np.ndarray | None] = [None] * plan.ranks  # with the round before
    for steps in rounds(plan):
        entries = [None if step is None or step.entry is None else enter(steps, r) for r, step in enumerate(steps)]
        buffers: list[np.ndarray | None] = [None] * plan.ranks
        for rank, step in enumerate(steps):
            if step is None:
                continue
            if step.local:
                buffers[rank] = step.part.keys
                continue
            buffer = np.full(step.pos.size, -7)
            if step.own is not None:
                buffer[step.own] = step.part.keys
            for peer, rows in step.recvs.items():
                theirs = steps[peer]
                assert theirs is not None, f"rank {peer} sends nothing that rank {rank} expects"
                source = before[peer] if theirs.relay else theirs.part.keys
                if theirs.relay and before[peer] is None:
                    source = theirs.part.keys
                if theirs.spread is not None:
                    source = entered[peer]
                buffer[rows] = source[theirs.sends[rank]]
            for peer in step.sends:
                assert rank in steps[peer].recvs, f"rank {peer} does not expect what rank {rank} sends"
            if step.spread is not None:
                assert (buffer[step.spread.place] == -7).all(), "what enters here comes from nobody else"
                buffer[step.spread.place] = entered[rank]
            buffers[rank] = buffer
        for rank, step in enumerate(steps):
            if step is None:
                continue
            assert (np.diff(step.pos) > 0).all()
            np.testing.assert_array_equal(buffers[rank], step.pos)
            first = np.searchsorted(step.pos, step.part.lo)
            stop = np.searchsorted(step.pos, step.part.hi)
            queries = inside_queries(plan, rank, step)
            for i, (a, b) in enumerate(zip(first, stop, strict=True)):
                if b > a and step.part.share == 0:
                    seen[queries[i], step.pos[a:b]] += 1
            before[rank] = step.pos
        entered = entries
    return seen


def enter(steps: list[Step | None], rank: int) -> np.ndarray:
    """The keys of a rank's entry."""
    entry = steps[rank].entry
    got = [np.zeros(0, int)]
    for peer, rows in entry.recvs.items():
        assert rows.start == sum(x.size for x in got), "consecutive, in this order"
        got.append(steps[peer].part.keys[steps[peer].entry.sends[rank]])
        assert got[-1].size == rows.stop - rows.start > 0
    for peer in entry.sends:
        assert rank in steps[peer].entry.recvs, f"rank {peer} does not expect what rank {rank} sends"
    return np.concatenate(got)


def inside_queries(plan: Plan, rank: int, step: Step) -> np.ndarray:
    """Global query numbers of the inside rows."""
    inside = np.full(step.part.q.rows, -1)
    for member, dest in step.part.q.dest.items():
        at = plan.layout.positions(member)
        width = plan.widths[plan.mask.documents(at)]
        inside[dest] = np.sort(at[width == step.part.width])
    return inside


def dense(plan: Plan) -> np.ndarray:
    """How often each pair should be computed: once if attended."""
    lo, hi = plan.mask.bounds(np.arange(plan.mask.tokens))
    keys = np.arange(plan.mask.kv_tokens)
    return ((keys >= lo[:, None]) & (keys < hi[:, None])).astype(int)


@settings(max_examples=150)
@given(cases())
def test_each_attended_pair_is_computed_once(case: Case) -> None:
    plan = case.plan()
    np.testing.assert_array_equal(act_out(plan), dense(plan))


@st.composite
def placed(draw: st.DrawFn) -> Plan:
    """Documents cut into pieces that lie anywhere, fetched, with a Ulysses width each."""
    ranks = draw(st.sampled_from([1, 2, 3, 4, 6]))
    count = draw(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=5), min_size=1, max_size=5))
    pieces = np.concatenate(count)
    order = np.array(draw(st.permutations(range(pieces.size))))
    rank = np.array(draw(st.lists(st.integers(0, ranks - 1), min_size=pieces.size, max_size=pieces.size)))
    layout = Layout.from_pieces((np.cumsum(pieces) - pieces)[order], pieces[order], rank, ranks)
    width = draw(st.lists(st.sampled_from(divisors(ranks)), min_size=len(count), max_size=len(count)))
    mask = Mask([sum(c) for c in count], window=(draw(st.sampled_from([None, 3])), None))
    return Plan(mask, layout, ulysses=width, stage_bytes=draw(st.integers(1, 7)) * NOMINAL_ROW_BYTES)


@settings(max_examples=150)
@given(placed())
def test_each_pair_of_placed_pieces_is_computed_once(plan: Plan) -> None:
    np.testing.assert_array_equal(act_out(plan), dense(plan))
    stage_rows = plan.stage_bytes // NOMINAL_ROW_BYTES
    assert all(s.local or s.pos.size <= stage_rows for r in range(plan.ranks) for s in plan.steps(r))


def test_fetch_takes_memory_by_the_rows_of_a_rank_not_by_all() -> None:
    """4 bytes for each of the tokens would be 200 MB."""
    tokens, ranks = 50_000_000, 8192
    plan = Plan(Mask([tokens], window=(20_000, None)), Layout.zigzag([tokens], ranks))
    tracemalloc.start()
    try:
        steps = plan.steps(ranks // 2)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(s.pos.size for s in steps if not s.local) == 2 * 20_000
    assert peak < 20e6


@settings(max_examples=100)
@given(cases())
def test_areas_of_all_steps_sum_to_the_area_of_the_mask(case: Case) -> None:
    plan = case.plan()
    total = sum(s.area for r in range(plan.ranks) for s in plan.steps(r) if s.part.share == 0)
    assert total == plan.mask.area()


@settings(max_examples=150)
@given(cases())
def test_every_gradient_comes_home_once(case: Case) -> None:
    check_gradients(case.plan())


def check_gradients(plan: Plan) -> None:
    """Each rank adds 1 to the gradient of every key row it holds; the owner must end up with the number of holders."""
    home = {}
    wanted = {}
    carried: dict[int, np.ndarray] = {}
    for steps in rounds(plan):
        grads = {}
        sums = {}
        for rank, step in enumerate(steps):
            if step is None:
                continue
            key = (rank, step.part.width)
            home.setdefault(key, np.zeros(step.part.keys.size, int))
            held = wanted.setdefault((step.part.width, step.part.share), np.zeros(plan.mask.kv_tokens, int))
            held[step.pos] += 1
            grad = np.ones(step.pos.size, int)
            if step.local:
                home[key] += grad
            else:
                grad += carried.pop(rank, 0)
                if step.own is not None:
                    home[key] += grad[step.own]
                grads[rank] = grad
        for rank, step in enumerate(steps):
            if step is None or step.local:
                continue
            target = home[rank, step.part.width]
            if step.spread is not None:
                target = sums[rank] = grads[rank][step.spread.place].copy()
            for peer, rows in step.grad_recvs.items():
                target[rows] += grads[peer][steps[peer].grad_sends[rank]]
            for peer in step.grad_sends:
                assert rank in steps[peer].grad_recvs or steps[peer].carry == rank
            if step.carry is not None:
                sent = steps[step.carry].grad_sends.get(rank)
                if sent is not None:
                    carried[rank] = grads[step.carry][sent]
        for rank, step in enumerate(steps):
            if step is not None and step.spread is not None:
                for peer, rows in step.spread.sends.items():
                    theirs = steps[peer].spread.recvs[rank]
                    home[rank, step.part.width][rows] += sums[peer][theirs]
    for (rank, width), got in home.items():
        part = next(s.part for s in plan.steps(rank) if s.part.width == width)
        np.testing.assert_array_equal(got, wanted[width, part.share][part.keys])


@settings(max_examples=100)
@given(cases())
def test_fetch_moves_no_key_that_no_query_attends(case: Case) -> None:
    plan = Case(**{**case.__dict__, "transport": "fetch"}).plan()
    attended = dense(plan)
    for rank in range(plan.ranks):
        for step in plan.steps(rank):
            if not step.local:
                mine = attended[inside_queries(plan, rank, step)]
                assert mine.any(axis=0)[step.pos].all()


@settings(max_examples=100)
@given(cases())
def test_rows_of_messages_and_tables_stay_inside_buffers(case: Case) -> None:
    plan = case.plan()
    for rank in range(plan.ranks):
        for step in plan.steps(rank):
            lo, hi = step.part.lo, step.part.hi
            for bm, bn in ((4, 4), (5, 3)):
                visible = (step.pos >= lo[:, None]) & (step.pos < hi[:, None])
                check_tiles(step.tiles(bm, bn), visible)
            check_segments(step, visible)


def check_segments(step: Step, visible: np.ndarray) -> None:
    """Segments and the remainder cover every visible pair exactly once."""
    s = step.segments
    got = np.zeros(visible.shape, int)
    for q, n, k, m, kind, left, right in zip(s.q_row, s.q_len, s.k_row, s.k_len, s.kind, s.left, s.right, strict=True):
        i, j = np.arange(n)[:, None] + m - n, np.arange(m)
        sees = np.ones((n, m), bool)
        if kind == 1:
            sees = j <= i
        if kind == 2:
            sees = (j >= i - left) & ((j <= i + right) if right >= 0 else True)
        got[q : q + n, k : k + m] += sees
    for row in s.remainder:
        assert not got[row].any()
        got[row] = visible[row]
    np.testing.assert_array_equal(got, visible.astype(int))


@given(case=cases())
def test_plans_say_whether_partial_results_are_merged(case: Case) -> None:
    """One step with keys per part and rank where they say no; said without the steps, so documents decide."""
    plan = case.plan()
    most = max(
        sum(bool(s.area) for s in plan.steps(r) if s.part is p) for r in range(plan.ranks) for p in parts(plan, r)
    )
    assert plan.merges or most <= 1
    if plan.transport == "gather" or plan.ulysses == plan.ranks or plan.ranks == 1:
        assert not plan.merges


def parts(plan: Plan, rank: int) -> list[object]:
    return [s.part for s in plan.steps(rank) if s.first]


def test_plans_say_whether_key_gradients_are_sums_over_ranks() -> None:
    mask = Mask([40, 24])
    alone = Plan(mask, Layout([np.arange(40), np.arange(40, 64)]))
    assert not alone.sums_key_gradients(4, 2)
    assert Plan(mask, alone.layout, transport="gather").sums_key_gradients(4, 2)
    assert Plan(mask, Layout.zigzag([40, 24], 2)).sums_key_gradients(4, 2)
    assert not Plan(mask, alone.layout, ulysses=2).sums_key_gradients(4, 2)
    assert Plan(mask, alone.layout, ulysses=2).sums_key_gradients(4, 1), "both shares read the one key head"
