"""What is counted for all ranks at once is what the ranks' own steps say, and describe says it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpar import Hardware, Layout, Mask, Plan, plan_batch
from seqpar.plan.counts import fetched_between, load_of, node_of
from seqpar.plan.report import _by_rank, _most_met, _unlike, shows_each_rank
from seqpar.plan.steps import count
from tests.cases import EVERY, Case, cases, examples, node_cases


@examples(60)
@given(st.one_of(cases(), node_cases()))
def test_loads_are_those_of_the_steps(case: Case) -> None:
    plan = case.plan()
    load = load_of(plan)
    steps = [plan.steps(rank) for rank in range(plan.ranks)]
    area = [sum(s.area / s.part.width for s in mine) for mine in steps]
    np.testing.assert_allclose(load.area, area)
    assert load.rows.tolist() == [plan.layout.tokens(rank) for rank in range(plan.ranks)]
    if plan.transport != "fetch":
        assert load.keys is load.crossing is None
        return
    keys = [sum(sum(map(count, s.recvs.values())) + (s.entry.rows if s.entry else 0) for s in mine) for mine in steps]
    assert load.keys.tolist() == keys
    assert (load.crossing is None) == (plan.node is None)
    if plan.node is not None:
        crossing = 0
        for rank, mine in enumerate(steps):
            for s in mine:
                crossing += s.entry.rows if s.entry else 0
                crossing += sum(count(rows) for p, rows in s.recvs.items() if p // plan.node != rank // plan.node)
        assert load.crossing.sum() == crossing


@examples(40)
@given(st.one_of(cases(), node_cases()).filter(lambda case: case.transport == "fetch"), st.integers(1, 3))
def test_keys_between_blocks_are_the_bytes_of_the_plan(case: Case, factor: int) -> None:
    plan = case.plan()
    block = int(np.lcm.reduce([plan.node or 1, *plan.widths.tolist()])) * factor
    blocks = -(-plan.ranks // block)
    expected = np.zeros((blocks, blocks))
    for rank in range(plan.ranks):
        for step in plan.steps(rank):
            messages = [(p, count(rows)) for p, rows in step.recvs.items()]
            messages += [(p, count(rows)) for p, rows in step.entry.recvs.items()] if step.entry else []
            for peer, rows in messages:
                expected[rank // block, peer // block] += rows / step.part.width
    np.testing.assert_allclose(fetched_between(plan, block), expected)


def test_describe_of_few_ranks_has_a_line_for_each_and_the_forecast() -> None:
    plan = plan_batch([9000, 700, 50, 4000, 20, 33], 4, model="tiny", hardware="cpu")
    lines = plan.describe().splitlines()
    head = lines.index(next(line for line in lines if line.split()[:2] == ["rank", "rows"]))
    assert [line.split()[0] for line in lines[head + 1 : head + 5]] == ["0", "1", "2", "3"]
    assert "\n".join(lines[head + 5 :]) == str(plan.forecast)
    assert f"gap {plan.forecast.gap:.2%}" in lines[-5] and "imbalance" in lines[-5]
    assert node_of(plan) == plan.forecast.node == min(4, Hardware.preset("cpu").node)


@examples(60)
@given(st.one_of(cases(masks=EVERY), node_cases(masks=EVERY)))
def test_lines_of_ranks_are_those_of_their_steps_row_by_row(case: Case) -> None:
    plan = case.plan()
    load, steps = load_of(plan), [plan.steps(rank) for rank in range(plan.ranks)]
    # Inside a head trade each member computes the group's whole area for its share of the heads.
    area = np.array([sum(s.area / s.part.width for s in mine) for mine in steps])
    if (plan.widths % 3 == 0).any():  # thirds are not exact, so a half may be rounded up or down
        np.testing.assert_allclose(load.area, area)
        area = load.area
    assert _by_rank(plan, load) == _by_rank(plan, load._replace(area=area))
    for part in (s.part for mine in steps for s in mine if s.first):
        keys = [s.pos for mine in steps for s in mine if s.part is part]
        met = np.zeros(part.pos.size, int)
        for at in keys:
            met += np.any([(lo[:, None] <= at) & (at < hi[:, None]) for lo, hi, _ in part.bands], axis=(0, 2))
        assert _most_met(part, keys) == met.max(initial=0)


@pytest.mark.parametrize("documents", [1, 64])
def test_describe_looks_at_few_rows_in_every_step(documents: int) -> None:
    for tokens in (1 << 14, 1 << 17):
        plan = Plan(Mask([tokens // documents] * documents), Layout.contiguous(tokens, 8), stage_bytes=tokens << 4)
        assert "steps are counted for" in plan.describe()
        for rank in range(8):
            steps = plan.steps(rank)
            assert not any("bands" in vars(step) for step in steps), "no step's pairs are counted"
            assert len(_unlike(steps[0].part, [s.pos for s in steps])) <= 2 * len(steps) + 2 * documents


@pytest.mark.parametrize("transport", ["fetch", "ring", "gather"])
def test_describe_of_many_ranks_is_short(transport: str) -> None:
    lengths = [3000, 100, 12, 700] * 80
    plan = Plan(Mask(lengths), Layout.contiguous(sum(lengths), 4096), node=8, transport=transport)
    text = plan.describe()
    assert len(text.splitlines()) < 15
    rows = next(line for line in text.splitlines() if line.startswith("rows")).split()
    sizes = np.array([plan.layout.tokens(rank) for rank in range(4096)])
    assert rows[1:6:4] == [str(sizes.min()), str(sizes.max())] and rows[6] == f"{sizes.mean():.0f}"
    assert f"cuts: {(plan.degrees > 1).sum()} of 320 documents" in text
    assert ("keys fetched" in text) == (transport == "fetch")


def test_many_degrees_are_told_by_powers_of_two() -> None:
    lengths = [100 * n for n in range(1, 40)]
    plan = Plan(Mask(lengths), Layout.contiguous(sum(lengths), 780))
    told = plan.describe().split("documents by degree: ")[1].splitlines()[0]
    counts = [int(part.split(" on ")[0]) for part in told.split(", ")]
    assert sum(counts) == 39 and len(counts) <= 6
    assert told.endswith(f"to {plan.degrees.max()}")


@pytest.mark.parametrize("transport", ["fetch", "ring", "gather"])
def test_ranks_of_huge_batches_have_no_line_each(transport: str) -> None:
    """For which gigabytes of rows would be looked at one by one, for minutes."""
    tokens = 2**31 - 1
    for layout in (Layout.contiguous(tokens, 8), Layout.zigzag([tokens], 8)):
        plan = Plan(Mask([tokens]), layout, transport=transport)
        assert not shows_each_rank(plan) and "steps are counted for" not in plan.describe()
    for tokens, layout in ((10**6, Layout.striped(10**6, 8)), (10**7, Layout.contiguous(10**7, 8))):
        assert shows_each_rank(Plan(Mask([tokens]), layout))
    assert not shows_each_rank(Plan(Mask([10**7]), Layout.striped(10**7, 8)))
