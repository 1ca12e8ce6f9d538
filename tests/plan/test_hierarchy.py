"""`fetch` over nodes: what enters a node, how often, through whom, and what it costs the ranks inside."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given

from seqpar import Layout, Mask, Plan
from seqpar.plan import Step
from seqpar.plan.steps import count
from tests.cases import EVERY, Case, cases, examples, make_layout, node_cases
from tests.plan.acted import act_out, check_gradients, dense, inside_queries
from tests.plan.compared import compare
from tests.plan.lines import heavy_tailed, lines_of


def entering(plan: Plan, rank: int, step: Step, *, outside: bool) -> list[int]:
    """Keys that a rank receives with a step, those of its entry among them; if ``outside``, from other nodes only."""
    found: list[int] = []
    for peer, rows in step.recvs.items():
        if not (outside and peer // plan.node == rank // plan.node):
            found += step.pos[rows].tolist()
    for peer in step.entry.recvs if step.entry else ():
        assert peer // plan.node != rank // plan.node
        theirs = next(s for s in plan.steps(peer) if s.number == step.number)
        found += theirs.part.keys[theirs.entry.sends[rank]].tolist()
    return found


def needs(plan: Plan, rank: int, width: int) -> set[int]:
    """Keys that the queries inside a rank's part see."""
    step = next(s for s in plan.steps(rank) if s.part.width == width)
    return set(np.flatnonzero(dense(plan)[inside_queries(plan, rank, step)].any(0)).tolist())


def held(plan: Plan, ranks: range, width: int) -> set[int]:
    """Keys that ranks own in the parts of one width."""
    return {k for r in ranks for s in plan.steps(r) if s.first and s.part.width == width for k in s.part.keys.tolist()}


@examples(80)
@given(node_cases(masks=EVERY))
def test_each_attended_pair_is_computed_once_and_its_gradients_come_home_once(case: Case) -> None:
    plan = case.plan()
    np.testing.assert_array_equal(act_out(plan), dense(plan))
    check_gradients(plan)


@examples(80)
@given(node_cases())
def test_a_key_enters_a_node_once_and_a_rank_receives_what_it_needs_once(case: Case) -> None:
    """The least that can cross: of every node the union of its ranks' needs, without what the node has."""
    plan = case.plan()
    for width in np.unique(plan.widths).tolist():
        for first in range(0, plan.ranks, plan.node):
            node = range(first, first + plan.node)
            for share in range(width):
                crossed, union = [], set()
                for rank in node[share::width]:
                    steps = [s for s in plan.steps(rank) if s.part.width == width]
                    mine = needs(plan, rank, width)
                    got = [k for s in steps for k in entering(plan, rank, s, outside=False)]
                    assert sorted(got) == sorted(mine - set(steps[0].part.keys.tolist()))
                    crossed += [k for s in steps for k in entering(plan, rank, s, outside=True)]
                    union |= mine
                assert sorted(crossed) == sorted(union - held(plan, node, width))


@examples(60)
@given(node_cases())
def test_what_enters_is_spread_a_step_later_and_fits_a_stage(case: Case) -> None:
    plan = case.plan()
    rows = max(1, case.stage_bytes // 4096)
    for rank in range(plan.ranks):
        entry = None
        for step in plan.steps(rank):
            assert step.spread is (None if step.first else entry)
            entry = step.entry
            assert step.local or step.pos.size <= rows
            if step.local:
                assert entry is None, "the first exchange is hidden behind the rank's own keys"
            if entry is not None:
                assert not step.ends and entry.rows == sum(map(count, entry.recvs.values())) <= rows
            if step.spread is not None:
                assert {p // plan.node for p in (*step.sends, *step.recvs)} <= {rank // plan.node}
                assert step.grad_sends == step.recvs and step.grad_recvs == step.sends


@examples(60)
@given(cases())
def test_one_node_and_nodes_of_one_group_are_plain_fetch(case: Case) -> None:
    case = replace(case, transport="fetch", mixed=False, node=None)
    plain = case.plan()
    for node in (case.ranks, case.ulysses):
        plan = replace(case, node=node).plan()
        for rank in range(plan.ranks):
            for a, b in zip(plain.steps(rank), plan.steps(rank), strict=True):
                compare(a, b)


def test_documents_inside_nodes_are_plain_fetch() -> None:
    """Two documents of 20 and 12 tokens over four ranks each, one of which is empty."""
    edges = [0, 5, 10, 15, 20, 24, 26, 32, 32]
    layout = Layout([range(a, b) for a, b in pairwise(edges)])
    plain, plan = Plan(Mask([20, 12]), layout), Plan(Mask([20, 12]), layout, node=4)
    for rank in range(8):
        for a, b in zip(plain.steps(rank), plan.steps(rank), strict=True):
            compare(a, b)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "blocks"])
@pytest.mark.parametrize("stage_rows", [16, 1 << 20])
@pytest.mark.sampled(2)
def test_what_all_need_enters_through_all_alike(layout: str, stage_rows: int) -> None:
    n, ranks, node = 480, 12, 4
    made = make_layout(layout, [n], ranks, np.random.default_rng(1))
    plan = Plan(Mask([n], causal=False), made, node=node, stage_bytes=stage_rows * 4096)
    for first in range(0, ranks, node):
        entered = [sum(s.entry.rows for s in plan.steps(r) if s.entry) for r in range(first, first + node)]
        assert sum(entered) == n - sum(made.tokens(r) for r in range(first, first + node))
        pieces = sum(s.entry is not None for s in plan.steps(first)) + 2 * node
        assert max(entered) - min(entered) <= pieces


def test_less_crosses_than_without_nodes() -> None:
    """Causal attention over a zigzag of 32 chunks by 16 ranks: chunks cross once where they did 8 times."""
    chunk = 512
    plain = Plan(Mask([32 * chunk]), Layout.zigzag([32 * chunk], 16))
    plan = Plan(plain.mask, plain.layout, node=8)
    # The first node holds the outer chunks and needs the 16 inner ones, the second needs the first 8.
    keys = {plain: 8 * (16 + 8) * chunk, plan: (16 + 8) * chunk}
    row = 8 * 2 * 64
    for x, number in keys.items():
        for backward, size in ((False, 2), (True, 2 + 4)):
            sent = [x.traffic(r, heads=8, kv_heads=8, dim=64, backward=backward) for r in range(16)]
            crossing = sum(n for r, to in enumerate(sent) for p, n in to.items() if p // 8 != r // 8)
            assert crossing == number * row * size
    line = f"nodes of 8 ranks: {keys[plan]:,} keys cross between them, {keys[plain]:,} would without nodes"
    assert line in plan.describe().splitlines()
    total = [sum(x.bytes(r, heads=8, kv_heads=8, dim=64, backward=True) for r in range(16)) for x in keys]
    assert total[0] == total[1]


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_documents_over_nodes_cost_python_for_messages_only(layout: str) -> None:
    lines, messages = [], []
    for documents in (200, 2000):
        lengths = heavy_tailed(1 << 17, documents).tolist()
        plan = Plan(Mask(lengths), make_layout(layout, lengths, 16, np.random.default_rng(0)), node=4)
        lines.append(lines_of(lambda plan=plan: plan.steps(9)))
        steps = plan.steps(9)
        entries = [s.entry for s in steps if s.entry]
        messages.append(sum(len(x.sends) + len(x.recvs) for x in (*steps, *entries)))
        assert any(e.rows for e in entries)
    assert lines[1] <= 1.1 * lines[0] + 12 * max(0, messages[1] - messages[0])
