"""`fetch`: exactly the keys that a rank's own queries see, and who sees which; gradients go home."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import seqpar
from seqpar.comm import Comm, LocalComm, shm
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.plan import Plan
from seqpar.testing import COMMS, dense_attention, run_processes, run_threads, seen_pairs
from tests.cases import ENDING, LAYOUTS, LENGTHS, MASKS, Case, cases, examples, make_layout
from tests.ops.cases import inputs, joined, poisoned
from tests.ops.test_verbs import DTYPES, adjoint, values


def of_bands(kind: str, ranks: int, tokens: int, seed: int, ending: bool) -> Plan:
    """A plan whose queries see two intervals of keys, in either half of the batch; their keys may end early."""
    rng = np.random.default_rng(seed)
    parts = []
    for first, stop in ((0, tokens // 2), (tokens // 2, tokens)):
        lo = rng.integers(first, stop + 1, tokens)
        until = rng.integers(0, tokens + 1, tokens) if ending else None
        parts.append(Mask.from_bounds(lo, np.minimum(stop, lo + rng.integers(0, 9, tokens)), until=until))
    layout = make_layout(kind, [tokens], ranks, rng)
    rows = [layout.tokens(rank) + int(rng.integers(0, 3)) for rank in range(ranks)]
    return Plan(parts[0] | parts[1], layout, rows=rows)


any_plans = st.one_of(
    st.builds(replace, cases(), mask=st.sampled_from(MASKS + ENDING)).map(Case.plan),
    st.builds(
        of_bands, st.sampled_from(LAYOUTS), st.sampled_from([1, 2, 3, 4]), st.integers(2, 40), st.integers(0, 999),
        st.booleans(),
    ),
)  # fmt: skip


def own_pairs(plan: Plan, rank: int) -> np.ndarray:
    """Whether each row of a rank sees each key, [rows, kv_tokens], by definition; pads see nothing."""
    at = plan.positions(rank)
    return seen_pairs(plan.mask)[at] & (at >= 0)[:, None]


@examples(100)
@given(any_plans)
def test_the_buffer_holds_what_own_rows_see_and_nothing_else(plan) -> None:
    for rank in range(plan.ranks):
        fetched, pairs = plan.fetched(rank), own_pairs(plan, rank)
        np.testing.assert_array_equal(fetched.positions, np.flatnonzero(pairs.any(0)))
        np.testing.assert_array_equal(fetched.seen(), pairs[:, fetched.positions])
        np.testing.assert_array_equal(fetched.at, plan.mask.key_positions(plan.positions(rank)))
        arrays = [fetched.positions, fetched.at, *(x for band in fetched.bands for x in band)]
        assert all(x.dtype == np.int64 for x in arrays)


def test_width_and_transport_make_no_difference() -> None:
    mask, layout = Mask([5, 9]), Layout.zigzag([5, 9], 4)
    plain = Plan(mask, layout)
    for plan in (
        Plan(mask, layout, ulysses=4),
        Plan(mask, layout, ulysses=[2, 4], transport="gather"),
        Plan(mask, layout, transport="ring", node=2),
    ):
        for rank in range(4):
            np.testing.assert_array_equal(plan.fetched(rank).positions, plain.fetched(rank).positions)


def test_a_rank_of_the_plan_and_whole_bytes() -> None:
    plan = Plan(Mask([4]), Layout.contiguous(4, 2))
    with pytest.raises(ValueError, match="rank 2 is not one of the plan's 2 ranks; give 0 to 1, or"):
        plan.fetched(2)
    with pytest.raises(ValueError, match="row_bytes must be an integer of at least 0, got 1.5"):
        plan.fetch_bytes(0, row_bytes=1.5)
    assert [plan.fetch_bytes(rank, row_bytes=10) for rank in (0, 1)] == [20, 0]
    assert [plan.fetch_bytes(rank, row_bytes=10, backward=True) for rank in (0, 1)] == [0, 20]


def taken(comm: Comm, plan: Plan, dtype: torch.dtype, tail: tuple[int, ...]) -> Tensor:
    """What a rank fetches of a global tensor; pads are NaN."""
    x = values([plan.mask.kv_tokens, *tail], dtype)
    mine = (
        poisoned(x, plan, comm.rank, "kv") if dtype.is_floating_point else seqpar.shard(x, plan, comm.rank, side="kv")
    )
    y = seqpar.fetch(mine, plan, comm)
    row = x[:1].nbytes
    assert comm.stats.bytes_sent == plan.fetch_bytes(comm.rank, row_bytes=row)
    foreign = np.setdiff1d(plan.fetched(comm.rank).positions, plan.positions(comm.rank, "kv"))
    assert comm.stats.bytes_received == foreign.size * row
    return y


@examples(60)
@given(any_plans, st.sampled_from(DTYPES), st.sampled_from([(), (3,), (2, 0), (2, 3)]), st.booleans())
def test_fetch_is_its_specification_and_moves_no_key_that_nobody_sees(plan, dtype, tail, direct) -> None:
    x = values([plan.mask.kv_tokens, *tail], dtype)
    for rank, got in enumerate(run_threads(plan.ranks, taken, plan, dtype, tail, direct=direct)):
        assert torch.equal(got, x[plan.fetched(rank).positions]) and got.dtype == dtype


def products(comm: Comm, plan: Plan) -> list[float]:
    x = values([plan.rows(comm.rank, "kv"), 2], torch.float64, comm.rank).requires_grad_()
    y = values([plan.fetched(comm.rank).positions.size, 2], torch.float64, 10 + comm.rank).requires_grad_()
    aty, found = adjoint(seqpar.fetch(x, plan, comm), x, y)
    pads = torch.from_numpy(plan.positions(comm.rank, "kv") < 0)
    assert not aty[pads].any()
    return found


@examples(30)
@given(any_plans, st.booleans())
def test_fetch_has_its_adjoint(plan, direct) -> None:
    ax_y, x_aty = np.sum(run_threads(plan.ranks, products, plan, direct=direct), axis=0)
    assert ax_y == x_aty


def attended(q: Tensor, k: Tensor, v: Tensor, seen: np.ndarray) -> Tensor:
    """Attention of rows to keys of a buffer, [rows, heads, dim], by definition; 0 for a row that sees nothing."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = torch.einsum("ihd,jhd->hij", q, k) * q.shape[2] ** -0.5
    s = s.masked_fill(~torch.from_numpy(seen), -torch.inf)
    blind = torch.from_numpy(~seen.any(1))
    p = s.masked_fill(blind[:, None], 0.0).softmax(-1).masked_fill(blind[:, None], 0.0)
    return torch.einsum("hij,jhd->ihd", p, v)


def attention_on_a_rank(comm: Comm, plan: Plan) -> list[Tensor]:
    """This rank's out, dq, dk, dv by attention over fetched keys and values."""
    q, k, v, dout, _ = inputs(plan, (4, 2), (4, 6), 0)
    q, dout = (seqpar.shard(x, plan, comm.rank) for x in (q, dout))
    k, v = (poisoned(x, plan, comm.rank, "kv") for x in (k, v))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    keys, vals = seqpar.fetch_all(leaves[1:], plan, comm)
    out = attended(leaves[0], keys, vals, plan.fetched(comm.rank).seen())
    before = comm.stats.bytes_sent
    out.backward(dout)
    row_bytes = 2 * (4 + 6) * 8
    assert before == plan.fetch_bytes(comm.rank, row_bytes=row_bytes)
    assert comm.stats.bytes_sent - before == plan.fetch_bytes(comm.rank, row_bytes=row_bytes, backward=True)
    assert comm.stats.staged_bytes == 0, "what a verb receives is memory that peers can write"
    return [out.detach(), *(x.grad for x in leaves)]


def check_attention(plan: Plan, run=run_threads, **options: object) -> None:
    q, k, v, dout, _ = inputs(plan, (4, 2), (4, 6), 0)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, _ = dense_attention(*leaves, plan.mask)
    expected = [out, *torch.autograd.grad(out, leaves, dout)]
    results = zip(*run(plan.ranks, attention_on_a_rank, plan, **options), strict=True)
    sides = plan.layout, plan.layout, plan.kv_layout, plan.kv_layout
    for shards, layout, want in zip(results, sides, expected, strict=True):
        torch.testing.assert_close(joined(shards, layout), want, rtol=0, atol=1e-10)


PRODUCT = [
    Case(mask, layout, "fetch", ranks, 1, LENGTHS[n % 3], n, pads=n % 2 == 0)
    for n, (ranks, mask, layout) in enumerate(product((1, 2, 3, 4, 8), MASKS + ENDING, LAYOUTS))
]


@pytest.mark.parametrize("case", PRODUCT, ids=str)
@pytest.mark.sampled(21)
def test_attention_over_fetched_keys_is_that_of_one_process(case) -> None:
    check_attention(case.plan())


@pytest.mark.parametrize("ending", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_of_several_bands_over_fetched_keys(layout, ending) -> None:
    plan = of_bands(layout, 3, 31, 0, ending)
    assert len(plan.mask.bands) > 1 and plan.mask.has_until == ending
    check_attention(plan)


def test_keys_laid_out_apart() -> None:
    mask, rng = Mask([9, 5]), np.random.default_rng(0)
    keys = Layout(np.split(rng.permutation(14), [0, 6, 6]))  # two ranks have no key
    check_attention(Plan(mask, Layout.zigzag([9, 5], 4), kv_layout=keys))


@pytest.mark.parametrize("comm", COMMS)
def test_attention_over_fetched_keys_on_processes(comm) -> None:
    if comm == "shm" and shm.missing():
        pytest.skip(shm.missing())
    check_attention(Case("tree", "zigzag", "fetch", 2, 2, LENGTHS[1], pads=True).plan(), run_processes, comm=comm)


def several(comm: Comm, plan: Plan) -> tuple[int, list[Tensor]]:
    xs = [
        seqpar.shard(values([14, *tail], d), plan, comm.rank) for tail, d in (((3,), torch.float32), ((), torch.int64))
    ]
    xs[0].requires_grad_()
    ys = seqpar.fetch_all(xs, plan, comm)
    assert ys[0].requires_grad and not ys[1].requires_grad
    ys[0].sum().backward()
    return comm.stats.exchanges, [*ys, xs[0].grad]


def test_several_tensors_go_in_one_exchange() -> None:
    plan = Plan(Mask([14], causal=False), Layout.striped(14, 2))
    for rank, (exchanges, (x, number, dx)) in enumerate(run_threads(2, several, plan)):
        assert exchanges == 2, "one forward, one back"
        assert torch.equal(x, values([14, 3], torch.float32)) and torch.equal(number, values([14], torch.int64))
        assert (dx == 2).all(), rank


def test_a_plan_alone_and_no_comm_are_named() -> None:
    plan, x = Plan(Mask([4]), Layout.contiguous(4, 1)), torch.ones(4, 2)
    with pytest.raises(ValueError, match="fetch: expected a plan and a comm, or their handle alone, got Plan"):
        seqpar.fetch(x, plan)
    with pytest.raises(TypeError, match="fetch got 'x' for its comm; give it"):
        seqpar.fetch(x, plan, "x")


def fetched(x: Tensor, handle: Tensor, rows: int) -> Tensor:
    return seqpar.fetch(x.sin(), handle, rows=rows).exp()


def compiled_on_a_rank(comm: Comm) -> int:
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(fetched, backend=counter, fullgraph=True)
    for n in range(5):
        plan = Plan(Mask([9 + n, 5]), Layout.zigzag([9 + n, 5], comm.size))
        rows, results = plan.fetched(comm.rank).positions.size, []
        for function in (run, fetched):
            x = seqpar.shard(values([14 + n, 4], torch.float64), plan, comm.rank).requires_grad_()
            y = function(x, seqpar.bind(plan, comm), rows)
            y.square().sum().backward()
            results.append((y.detach(), x.grad))
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(ours, theirs)
    return counter.frame_count


@pytest.mark.usefixtures("no_graphs")
@pytest.mark.exhaustive
def test_fetch_compiles_once_for_all_plans() -> None:
    assert max(run_processes(2, compiled_on_a_rank)) <= 3  # numbers of rows that are equal once are first taken for one


@pytest.mark.usefixtures("no_graphs")
def test_a_graph_takes_the_plan_and_needs_the_rows() -> None:
    plan, comm, x = Plan(Mask([5, 9]), Layout([list(range(13, -1, -1))])), LocalComm(), torch.randn(14, 3)
    seqpar.bind(plan, comm)
    run = torch.compile(lambda x, rows: seqpar.fetch(x, plan, comm, rows=rows), backend="aot_eager", fullgraph=True)
    assert torch.equal(run(x, 14), x.flip(0))
    with pytest.raises(Exception, match=r"a compiled model needs rows=len\(plan.fetched\(rank\).positions\)"):
        run(x, None)
    with pytest.raises(ValueError, match="rows=13, but rank 0 gets 14"):
        run(x, 13)


def test_fake_tensors_have_shapes_and_need_the_rows() -> None:
    plan, comm = Plan(Mask([5, 9]), Layout.contiguous(14, 1)), LocalComm()
    with FakeTensorMode():
        x = torch.randn(14, 3, requires_grad=True)
        y = seqpar.fetch(x, plan, comm, rows=14)
        y.sum().backward()
        assert y.shape == x.grad.shape == (14, 3)
        with pytest.raises(ValueError, match="a compiled model needs rows="):
            seqpar.fetch(x, plan, comm)


def test_fetch_is_a_proper_op() -> None:
    plan, comm = Plan(Mask([5, 9]), Layout([list(range(13, -1, -1))])), LocalComm()
    x, handle = torch.randn(14, 3, dtype=torch.float64, requires_grad=True), seqpar.bind(plan, comm)
    opcheck(torch.ops.seqpar.fetch, ([x], [handle], 14, [True]))


def test_what_a_kernel_writes_to_is_its_own() -> None:
    plan = Plan(Mask([7, 9]), Layout.zigzag([7, 9], 2))
    want = plan.fetched(1)
    mine = plan.fetched(1)
    for array in (mine.positions, mine.at, *(x for band in mine.bands for x in band)):
        array += 5
    again = plan.fetched(1)
    assert np.array_equal(again.seen(), want.seen()) and np.array_equal(again.positions, want.positions)
    assert not np.array_equal(mine.positions, want.positions)
