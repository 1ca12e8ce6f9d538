"""What a call promises beyond its numbers: bytes, buffers, order, and that nothing leaks from where it must not."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import seqpar
from seqpar.comm import Comm
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.ops.attention.call import Phase
from seqpar.plan import TRANSPORTS, Plan
from seqpar.testing import dense_attention, run_processes, run_threads
from tests.cases import Case, any_cases, cases, examples
from tests.ops.cases import HEADS, collect, inputs, poisoned
from tests.ops.recorded import DTYPES, assert_same_bits, counted, recorded, step


@examples(80)
@given(
    any_cases(8), st.sampled_from(HEADS), st.sampled_from([(8, 8), (3, 5)]), st.sampled_from(list(DTYPES)),
    st.booleans(), st.booleans(), st.booleans(),
)  # fmt: skip
def test_bytes_counted_equal_bytes_predicted(case, heads, dims, dtype, with_lse, kv_grads, direct) -> None:
    plan = case.plan()
    shape = dict(heads=heads[0], kv_heads=heads[1], dim=dims[0], v_dim=dims[1], dtype=dtype)
    shape |= dict(return_lse=with_lse, kv_grads=kv_grads)
    arguments = (plan, heads, dims, dtype, with_lse, kv_grads)
    for rank, sent in enumerate(run_threads(plan.ranks, counted, *arguments, direct=direct)):
        for backward in (False, True):
            got = {peer: n for peer, n in sorted(sent[backward].items()) if n}
            assert got == plan.traffic(rank, backward=backward, **shape), f"rank {rank}, backward={backward}"
            assert sum(got.values()) == plan.bytes(rank, backward=backward, **shape)


def test_each_key_and_each_gradient_crosses_nodes_once() -> None:
    """All of 8 ranks see all keys: each of two nodes gets the other's keys, and gives back as many sums."""
    n, heads, dims = 48, (2, 2), (4, 4)
    plan = Plan(Mask([n], causal=False), Layout.striped(n, 8), node=4)
    sent = run_threads(8, counted, plan, heads, dims, "bfloat16", False)
    crossing = [[sum(b for p, b in s[i].items() if p // 4 != r // 4) for r, s in enumerate(sent)] for i in (0, 1)]
    row = heads[1] * sum(dims)
    assert sum(crossing[0]) == n * row * 2
    assert sum(crossing[1]) == n * row * (2 + 4), "keys again, in bfloat16, and gradients, in float32"


@pytest.mark.parametrize(("ranks", "ulysses", "node"), [(4, 1, None), (4, 2, None), (6, 1, 3)])
@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag", "arbitrary"])
@pytest.mark.sampled(3)
def test_received_keys_take_two_stages_and_of_a_node_two_entries(layout, ranks, ulysses, node) -> None:
    heads, dims, rows = (4, 2), (4, 4), 3
    row_bytes = heads[1] // ulysses * sum(dims) * 8
    case = Case("full", layout, "fetch", ranks, ulysses, (61,), stage_bytes=rows * row_bytes + 5, node=node)
    for recorder in run_threads(ranks, recorded, case.plan(), heads, dims):
        assert len(recorder.posted(Phase.KEYS)) >= 8
        flat = [b for b in recorder.buffers if b.dim() == 1]
        # two forward and two backward, however many stages there are, each at most a stage large
        assert len(flat) <= (4 if node is None else 8)
        assert all(b.nbytes <= rows * row_bytes for b in flat)
        # one more for gradients, which only a larger one replaces
        arrivals = [len(b) for b in recorder.buffers if b.dim() == 3]
        assert ulysses > 1 or arrivals == sorted(set(arrivals))


SLOW = (
    *(
        Case(mask, layout, transport, 4, ulysses, (9, 2, 12), stage_bytes=6 * 4096, mixed=mixed)
        for (transport, mask, layout), (ulysses, mixed) in zip(
            itertools.product(TRANSPORTS, ("packed", "full"), ("striped", "contiguous")),
            itertools.cycle([(1, False), (2, False), (4, False), (2, True), (1, False), (1, True)]),
        )
    ),
    Case("full", "striped", "fetch", 4, 1, (9, 2, 12), stage_bytes=3 * 4096, node=2),
    Case("packed", "contiguous", "fetch", 6, 1, (9, 2, 12), stage_bytes=3 * 4096, node=3),
    Case("causal", "zigzag", "fetch", 8, 2, (29,), stage_bytes=2 * 4096, node=4),
    Case("packed", "arbitrary", "fetch", 8, 1, (14, 20), mixed=True, seed=5, stage_bytes=4096, node=4),
)


def delayed(comm: Comm, plan: Plan, naps: bool = False) -> list[Tensor]:
    if naps:
        time.sleep(0.02 * ((comm.rank * 5) % 4))
    return step(comm, plan, (5, 1), (4, 4), 3, torch.float32)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("case", SLOW, ids=str)
@pytest.mark.sampled(10)
def test_a_slow_transport_changes_no_bit(case, direct) -> None:
    run = partial(run_threads, case.ranks, delayed, case.plan())
    prompt = run(direct=direct)
    assert_same_bits(prompt, run(delay=0.02, direct=direct))
    assert_same_bits(prompt, run(True, direct=direct))


@examples(60)
@given(any_cases(8), st.sampled_from(HEADS))
def test_twice_gives_the_same_bits(case, heads) -> None:
    plan = case.plan()
    arguments = (plan, heads, (4, 6), 1, torch.float32)
    assert_same_bits(*(run_threads(plan.ranks, step, *arguments, delay=delay) for delay in (0.0, 1e-4)))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_processes_give_the_bits_of_threads(transport) -> None:
    plan = Case("packed", "striped", transport, 2, 1, (9, 30, 2), stage_bytes=4096, pads=True).plan()
    arguments = (plan, (4, 2), (8, 8), 0, torch.float32)
    first = run_processes(2, step, *arguments)
    assert_same_bits(first, run_processes(2, step, *arguments))
    assert_same_bits(first, run_threads(2, step, *arguments))


def skewed_backwards(comm: Comm, plan: Plan) -> Tensor:
    q, k, v, dout, _ = inputs(plan, (2, 1), (4, 4), 0)
    mine = [seqpar.shard(x, plan, comm.rank) for x in (q, k, v)]
    mine[0].requires_grad_()
    out = seqpar.attention(*mine, plan, comm)
    for turn in range(3):
        if comm.rank == turn:
            time.sleep(0.05)
        out.backward(seqpar.shard(dout, plan, comm.rank), retain_graph=True)
    return mine[0].grad


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_backward_passes_of_one_graph_do_not_meet(transport) -> None:
    """Rank 2 is in its second backward while rank 1 still waits in the first for rank 0."""
    plan = Plan(Mask([16], window=(3, 0)), Layout.contiguous(16, 4), transport=transport)
    q, k, v, dout, _ = inputs(plan, (2, 1), (4, 4), 0)
    out, _ = dense_attention(q.requires_grad_(), k, v, plan.mask)
    out.backward(3 * dout)
    torch.testing.assert_close(torch.cat(run_threads(4, skewed_backwards, plan)), q.grad, rtol=1e-10, atol=1e-10)


def autocast(comm: Comm, plan: Plan, dtype: torch.dtype, kernel: str, enabled: bool) -> list[Tensor]:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
        return step(comm, plan, (4, 2), (4, 4), 0, dtype, kernel=kernel)


@pytest.mark.parametrize("kernel", ["auto", "blockwise", "reference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_autocast_does_not_round_what_is_accumulated(dtype, kernel) -> None:
    plan = Case("packed", "striped", "ring", 2, 1, (9, 30, 2)).plan()
    assert_same_bits(
        run_threads(2, autocast, plan, dtype, kernel, True), run_threads(2, autocast, plan, dtype, kernel, False)
    )


def cast_and_attended(comm: Comm, plan: Plan, rows: list[Tensor], sinks: Tensor, by_hand: bool) -> list[Tensor]:
    leaves = [seqpar.shard(x, plan, comm.rank).requires_grad_() for x in rows]
    leaves.append(sinks.clone().requires_grad_())
    cast = [x.bfloat16() for x in leaves[:3]] if by_hand else leaves[:3]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not by_hand):
        out, lse = seqpar.attention(*cast, plan, comm, sinks=leaves[3], return_lse=True)
    (out.float().square().sum() + lse.sum()).backward()
    return [out.detach(), lse.detach(), *(x.grad for x in leaves)]


@pytest.mark.parametrize("dtypes", [("float32",) * 3, ("float32", "bfloat16", "float32"), ("float16",) * 3])
def test_autocast_casts_queries_keys_and_values_as_torch_does(dtypes) -> None:
    plan, g = Case("packed", "striped", "ring", 2, 1, (9, 30, 2)).plan(), torch.Generator().manual_seed(0)
    rows = [torch.randn(41, h, 4, generator=g).to(getattr(torch, t)) for h, t in zip((4, 2, 2), dtypes, strict=True)]
    sinks = torch.randn(4, generator=g)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        heads = (x.transpose(0, 1) for x in rows)
        expected = torch.nn.functional.scaled_dot_product_attention(*heads, enable_gqa=True).dtype
    got, by_hand = (run_threads(2, cast_and_attended, plan, rows, sinks, hand) for hand in (False, True))
    assert all(torch.equal(a, b) for mine, cast in zip(got, by_hand) for a, b in zip(mine, cast, strict=True))
    for out, lse, *grads in got:
        assert (out.dtype, lse.dtype) == (expected, torch.float32)
        assert [x.dtype for x in grads] == [*(x.dtype for x in rows), torch.float32]


SIDES = ("q", "k", "v", "dout")


def spiked(comm: Comm, plan: Plan, heads, dims, dtype, kernel, spike) -> list[Tensor]:
    """One rank's out, lse, dq, dk, dv where one element of a global tensor was replaced."""
    tensors = dict(zip(SIDES, inputs(plan, heads, dims, 5)[:4], strict=True))
    if spike is not None:
        name, row, head, value = spike
        tensors[name][row, head, -1] = value
    shards = {n: poisoned(x.to(dtype), plan, comm.rank, "kv" if n in "kv" else "q") for n, x in tensors.items()}
    dout = shards.pop("dout")
    leaves = [x.requires_grad_() for x in shards.values()]
    out, lse = seqpar.attention(*leaves, plan, comm, kernel=kernel, return_lse=True)
    out.backward(dout)
    return [out.detach(), lse.detach(), *(x.grad for x in leaves)]


def reached(plan: Plan, heads, spike) -> list[Tensor]:
    """[rows, heads] of out, lse, dq, dk, dv: what a NaN there reaches, by the formulas; all pairs seen weigh > 0."""
    name, row, head, _ = spike
    lo, hi = (torch.from_numpy(x)[:, None] for x in plan.mask.bounds(np.arange(plan.mask.tokens)))
    at = torch.arange(plan.mask.kv_tokens)
    sees = (at >= lo) & (at < hi)
    (h, kv), group = heads, heads[0] // heads[1]
    rows = torch.zeros(plan.mask.tokens, h, dtype=torch.bool)  # rows whose softmax, or whose delta, is spoilt
    if name in "kv":
        rows[:, head * group : (head + 1) * group] = sees[:, row, None]
    else:
        rows[row, head] = bool(sees[row].any())
    keys = (sees.t().double() @ rows.double()).view(-1, kv, group).sum(-1) > 0
    none, no_keys = torch.zeros_like(rows), torch.zeros_like(keys)
    return [
        none if name == "dout" else rows,
        rows if name in "qk" else none,
        rows,
        keys,
        no_keys if name == "v" else keys,
    ]


def check_spike(plan: Plan, heads, dims, dtype, kernel, spike, clean) -> None:
    got = collect(run_threads(plan.ranks, spiked, plan, heads, dims, dtype, kernel, spike), plan)
    name, row, head, value = spike
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    for what, x, expected, bad in zip(
        ("out", "lse", "dq", "dk", "dv"), got, clean, reached(plan, heads, spike), strict=True
    ):
        x, expected = (y if y.dim() == 3 else y[..., None] for y in (x, expected))
        good = ~bad
        close = (x == expected) | ((x - expected).abs() <= tolerance * (1 + expected.abs()))
        leaks = (~close).any(-1) & good
        assert not leaks.any(), f"{spike} leaked into {what} at {leaks.nonzero()[:5].tolist()}"
        if np.isnan(value):
            spoilt = (~torch.isfinite(x)).any(-1)
            if not (name == "v" and what == "dv"):
                missed = bad & ~spoilt
                assert not missed.any(), f"{spike} did not reach {what} at {missed.nonzero()[:5].tolist()}"
    if not np.isnan(value) and name != "dout":  # infinities: a score of -inf is an honest weight of zero
        tensors = dict(zip(SIDES, inputs(plan, heads, dims, 5)[:4], strict=True))
        tensors[name][row, head, -1] = value
        out, _ = dense_attention(tensors["q"], tensors["k"], tensors["v"], plan.mask)
        # the oracle multiplies unseen values by zero: believe it where the value is seen
        sane = torch.isfinite(out).all(-1) | ~reached(plan, heads, spike)[0]
        assert torch.equal(sane, torch.isfinite(got[0]).all(-1)), f"{spike}: out"


SPIKED = (
    Case("packed", "zigzag", "ring", 2, 1, (7, 20, 3), pads=True),
    Case("window", "striped", "fetch", 4, 2, (30,), stage_bytes=2 * 4096),
    Case("full", "contiguous", "gather", 2, 2, (17,)),
    Case("cross", "lopsided", "double_ring", 4, 1, (9, 14)),
    Case("bounds", "arbitrary", "fetch", 3, 1, (25,), pads=True),
)


@pytest.mark.parametrize("kernel", ["auto", "blockwise", "reference"])
@pytest.mark.parametrize("case", SPIKED, ids=str)
@pytest.mark.sampled(3)
def test_what_is_not_finite_reaches_just_what_sees_it(case, kernel) -> None:
    plan, heads, dims = case.plan(), (4, 2), (3, 3)
    dtypes = (torch.float64, torch.float32)
    clean = {d: collect(run_threads(plan.ranks, spiked, plan, heads, dims, d, kernel, None), plan) for d in dtypes}
    for n, (dtype, name) in enumerate(itertools.product(dtypes, SIDES)):
        rows = plan.mask.kv_tokens if name in "kv" else plan.mask.tokens
        heads_of = heads[1] if name in "kv" else heads[0]
        for m, value in enumerate((np.nan, np.inf, -np.inf)):
            spike = (name, (7 * n + 5 * m + 3) % rows, (n + m) % heads_of, value)
            check_spike(plan, heads, dims, dtype, kernel, spike, clean[dtype])


@pytest.mark.parametrize("kernel", ["auto", "blockwise", "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.sampled(6)
def test_what_is_not_finite_in_tiles_that_are_full(kernel, dtype, ranks) -> None:
    """More than two tiles of 512 rows, so that the value stands in full, partial and empty tiles."""
    tokens, heads, dims = 1100, (1, 1), (2, 2)
    plan = Plan(Mask([tokens]), Layout.contiguous(tokens, ranks))
    clean = collect(run_threads(ranks, spiked, plan, heads, dims, dtype, kernel, None), plan)
    for name, row, value in (
        ("k", 100, np.nan),
        ("v", 530, np.nan),
        ("q", 1050, np.nan),
        ("dout", 900, np.nan),
        ("k", 200, np.inf),
        ("v", 300, -np.inf),
        ("q", 700, -np.inf),
        ("dout", 1000, np.inf),
    ):
        check_spike(plan, heads, dims, dtype, kernel, (name, row, 0, value), clean)


def blind(comm: Comm, plan: Plan, kernel, sinks, dtype) -> list[Tensor]:
    q, k, v, dout, dlse = (x.to(dtype) for x in inputs(plan, (4, 2), (3, 3), 2))
    lo, hi = plan.mask.bounds(np.arange(plan.mask.tokens))
    nothing = torch.from_numpy(lo >= hi)
    for x in (q, dout, dlse):  # what rows that see nothing hold must not matter
        x[nothing] = torch.nan
    mine = [poisoned(x, plan, comm.rank, s).requires_grad_() for x, s in ((q, "q"), (k, "kv"), (v, "kv"))]
    sink = torch.linspace(-1, 1, 4, dtype=dtype).requires_grad_() if sinks else None
    out, lse = seqpar.attention(*mine, plan, comm, kernel=kernel, sinks=sink, return_lse=True)
    incoming = poisoned(dout, plan, comm.rank, "q"), poisoned(dlse, plan, comm.rank, "q").to(lse.dtype)
    torch.autograd.backward([out, lse], incoming)
    return [out.detach(), lse.detach(), *(x.grad for x in mine)]


@pytest.mark.parametrize("kernel", ["auto", "blockwise", "reference"])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        Case("bounds", "striped", "fetch", 3, 1, (31,), 4, pads=True),
        Case("bounds", "zigzag", "ring", 4, 2, (31,), 4, pads=True),
        Case("bounds", "contiguous", "gather", 2, 2, (13,), 1),
    ],
    ids=str,
)
@pytest.mark.sampled(3)
def test_rows_that_see_no_key(case, sinks, kernel) -> None:
    plan = case.plan()
    lo, hi = plan.mask.bounds(np.arange(plan.mask.tokens))
    nothing = torch.from_numpy(lo >= hi)
    assert nothing.any()
    for dtype in (torch.float64, torch.float32):
        out, lse, dq, dk, dv = collect(run_threads(plan.ranks, blind, plan, kernel, sinks, dtype), plan)
        expected = torch.linspace(-1, 1, 4, dtype=lse.dtype) if sinks else torch.full((4,), -torch.inf, dtype=lse.dtype)
        assert (out[nothing] == 0).all() and (dq[nothing] == 0).all()
        assert (lse[nothing] == expected).all()
        for x in (out, lse[~nothing], dq, dk, dv):
            assert torch.isfinite(x).all()


def sink_of_blind_rows(comm: Comm, plan: Plan, poison: float) -> list[Tensor]:
    q, k, v, dout, _ = inputs(plan, (4, 2), (3, 3), 2)
    lo, hi = plan.mask.bounds(np.arange(plan.mask.tokens))
    dout[torch.from_numpy(lo >= hi)] = poison
    mine = [poisoned(x, plan, comm.rank, s).requires_grad_() for x, s in ((q, "q"), (k, "kv"), (v, "kv"))]
    sink = torch.linspace(-1, 1, 4, dtype=torch.float64).requires_grad_()
    seqpar.attention(*mine, plan, comm, sinks=sink).backward(poisoned(dout, plan, comm.rank, "q"))
    return [sink.grad, *(x.grad for x in mine)]


@pytest.mark.parametrize("ulysses", [1, 2])
def test_the_gradient_of_a_sink_ignores_the_output_of_rows_that_see_no_key(ulysses) -> None:
    plan = Case("bounds", "striped", "fetch", 2, ulysses, (31,), 4, pads=True).plan()
    clean, spoilt = (run_threads(2, sink_of_blind_rows, plan, poison) for poison in (0.0, np.nan))
    for got, want in zip(spoilt, clean, strict=True):
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def without_sink(comm: Comm, plan: Plan, sinks) -> list[Tensor]:
    q, k, v, dout, dlse = inputs(plan, (4, 2), (3, 3), 2)
    mine = [seqpar.shard(x, plan, comm.rank).requires_grad_() for x in (q, k, v)]
    sink = None if sinks is None else sinks.clone().requires_grad_()
    out, lse = seqpar.attention(*mine, plan, comm, sinks=sink, return_lse=True)
    torch.autograd.backward([out, lse], [seqpar.shard(x, plan, comm.rank) for x in (dout, dlse)])
    assert sink is None or not sink.grad.any()
    return [out.detach(), lse.detach(), *(x.grad for x in mine)]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_sink_of_minus_infinity_is_no_sink(transport) -> None:
    """Also for rows that see no key, whose lse is then -inf too."""
    plan = Case("bounds", "striped", transport, 2, 1, (31,), 4).plan()
    sinks = torch.full((4,), -torch.inf, dtype=torch.float64)
    expected = run_threads(2, without_sink, plan, None)
    for got, want in zip(run_threads(2, without_sink, plan, sinks), expected, strict=True):
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@examples(40)
@given(
    cases(max_ranks=4),
    st.sampled_from(["auto", "blockwise", "reference"]),
    st.sampled_from(SIDES),
    st.integers(0, 10**6),
)
def test_a_nan_anywhere_in_any_plan(case, kernel, name, where) -> None:
    plan, heads = replace(case, pads=True).plan(), (4, 2)
    rows, of = (plan.mask.kv_tokens, heads[1]) if name in "kv" else (plan.mask.tokens, heads[0])
    clean = collect(run_threads(plan.ranks, spiked, plan, heads, (2, 2), torch.float64, kernel, None), plan)
    check_spike(plan, heads, (2, 2), torch.float64, kernel, (name, where % rows, where % of, np.nan), clean)


def test_a_rank_alone_keeps_its_bits_whether_lse_is_returned_or_not() -> None:
    """Where no rows come from other ranks, what a library makes of the output is left to it."""
    mask = Mask([64, 40, 3])  # two documents whose segments a library takes, and a short one
    plan = Plan(mask, Layout.contiguous(mask.tokens, 1))
    mine = inputs(plan, (4, 4), (8, 8), 0)
    found = []
    for return_lse in (False, True):
        leaves = [x.clone().requires_grad_() for x in mine[:3]]
        result = seqpar.attention(*leaves, plan, seqpar.LocalComm(), kernel="aten", return_lse=return_lse)
        ((result[0] if return_lse else result) * mine[3]).sum().backward()
        found.append([x.grad for x in leaves])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
