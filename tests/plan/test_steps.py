"""Properties 1, 2, 3 and 7 of the specification, and where gradients go, by acting all ranks' steps out in numpy."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.plan import Plan, Step
from seqpar.plan.derive import NOMINAL_ROW_BYTES
from tests.cases import ENDING, EVERY, Case, cases, divisors, examples
from tests.facts.tables import check_stretches, check_tiles
from tests.plan.acted import act_out, check_gradients, dense, inside_queries


@examples(150)
@given(cases(masks=EVERY))
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


@examples(150)
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


@examples(100)
@given(cases(masks=EVERY))
def test_areas_of_all_steps_sum_to_the_area_of_the_mask(case: Case) -> None:
    plan = case.plan()
    total = sum(s.area for r in range(plan.ranks) for s in plan.steps(r) if s.part.share == 0)
    assert total == plan.mask.area()


@examples(150)
@given(cases(masks=EVERY))
def test_every_gradient_comes_home_once(case: Case) -> None:
    check_gradients(case.plan())


@examples(100)
@given(cases(masks=EVERY))
def test_fetch_moves_no_key_that_no_query_attends(case: Case) -> None:
    plan = Case(**{**case.__dict__, "transport": "fetch"}).plan()
    attended = dense(plan)
    for rank in range(plan.ranks):
        for step in plan.steps(rank):
            if not step.local:
                mine = attended[inside_queries(plan, rank, step)]
                assert mine.any(axis=0)[step.pos].all()


@examples(100)
@given(cases())
def test_rows_of_messages_and_tables_stay_inside_buffers(case: Case) -> None:
    plan = case.plan()
    for rank in range(plan.ranks):
        for step in plan.steps(rank):
            (band,) = step.bands
            for bm, bn in ((4, 4), (5, 3)):
                visible = (step.pos >= band.lo[:, None]) & (step.pos < band.hi[:, None])
                check_tiles(band.tiles(bm, bn), visible)
            check_segments(step, visible)


@examples(60)
@given(cases(), st.sampled_from(ENDING))
def test_tables_of_steps_whose_keys_end(case: Case, mask: str) -> None:
    plan = replace(case, mask=mask).plan()
    for rank in range(plan.ranks):
        for band in (band for step in plan.steps(rank) for band in step.bands if band.until is not None):
            check_stretches(band.tiles(5, 3), band.lo, band.hi, band.at, band.pos, band.until)


def check_segments(step: Step, visible: np.ndarray) -> None:
    """Segments and the remainder cover every visible pair exactly once."""
    s = step.bands[0].segments
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
