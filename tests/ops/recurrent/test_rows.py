"""`shift`, `halo` and `causal_conv1d` beside one process, under any layout."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import conv1d, silu

import seqpar
from seqpar import recurrent
from seqpar.comm import Comm, LocalComm
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.plan import Plan
from seqpar.testing import COMMS, run_processes, run_threads
from tests.cases import LAYOUTS, examples, make_layout, random_tree
from tests.ops.recurrent.cases import plan_of, plans, poisoned, put


def shift_matrix(plan: Plan, by: int) -> Tensor:
    """The matrix of a shift by so many rows inside documents."""
    rows = np.arange(plan.mask.tokens)
    documents = plan.mask.documents(rows)
    source = rows - by
    inside = (source >= 0) & (source < rows.size)
    inside[inside] &= documents[rows[inside]] == documents[source[inside]]
    matrix = torch.zeros(rows.size, rows.size, dtype=torch.float64)
    matrix[torch.from_numpy(rows[inside]), torch.from_numpy(source[inside])] = 1.0
    return matrix


def shifted(comm: Comm, plan: Plan, x: Tensor, dy: Tensor, by: int) -> list[Tensor]:
    """A rank's shift, its gradient, and what the gradient's gradient is."""
    mine, grad = poisoned(x, plan, comm.rank), seqpar.shard(dy, plan, comm.rank).requires_grad_()
    y = recurrent.shift(mine, plan, comm, by=by)
    (dx,) = torch.autograd.grad(y, mine, grad, create_graph=True)
    (twice,) = torch.autograd.grad(dx, grad, torch.nan_to_num(mine.detach()))
    assert torch.equal(twice, y)
    return [y.detach(), dx.detach()]


@examples(40)
@given(plans(), st.sampled_from([1, 2, -1, -3, 20]))
def test_shift_is_its_specification(plan, by) -> None:
    g = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(plan.mask.tokens, 2, dtype=torch.float64, generator=g) for _ in range(2))
    y, dx = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    for rank, (mine, grad) in enumerate(run_threads(plan.ranks, shifted, plan, x, dy, by)):
        put(y, mine, plan, rank)
        put(dx, grad, plan, rank)
    matrix = shift_matrix(plan, by)
    assert torch.equal(y, matrix @ x) and torch.equal(dx, matrix.T @ dy)


@examples(40)
@given(
    st.sampled_from(LAYOUTS), st.integers(1, 6), st.integers(1, 50), st.sampled_from([1, 2, 5]), st.integers(0, 2**16)
)
def test_shift_in_a_tree_goes_up_the_path(layout, ranks, tokens, by, seed) -> None:
    rng = np.random.default_rng(seed)
    lo, hi, until, seen = random_tree(tokens, rng)
    lengths = np.unique(lo, return_counts=True)[1].tolist()
    mask = Mask.from_bounds(lo, hi, until=until, lengths=lengths)
    plan = Plan(mask, make_layout(layout, lengths, ranks, rng))
    matrix = torch.zeros(tokens, tokens, dtype=torch.float64)
    for row, path in enumerate(seen):
        above = np.flatnonzero(path)
        if above.size > by:
            matrix[row, above[-1 - by]] = 1.0
    x, dy = (torch.from_numpy(rng.standard_normal((tokens, 2))) for _ in range(2))
    y, dx = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    for rank, (mine, grad) in enumerate(run_threads(ranks, shifted, plan, x, dy, by)):
        put(y, mine, plan, rank)
        put(dx, grad, plan, rank)
    torch.testing.assert_close(y, matrix @ x, rtol=0, atol=0)
    torch.testing.assert_close(dx, matrix.T @ dy, rtol=1e-14, atol=1e-14)


def refused_on_a_tree(comm: Comm, plan: Plan) -> list[str]:
    x, said = torch.zeros(plan.rows(comm.rank), 2), []
    for call in (lambda: recurrent.shift(x, plan, comm, by=-1), lambda: recurrent.halo(x, plan, comm, reach=2)):
        with pytest.raises(NotImplementedError) as error:
            call()
        said.append(str(error.value))
    return said


def test_later_rows_and_halos_of_a_tree_are_refused() -> None:
    plan = Plan(Mask.shared_prefix([(4, [2, 3])]), Layout.contiguous(9, 2))
    for later, before in run_threads(2, refused_on_a_tree, plan):
        assert later.startswith("shift: a token of a tree has one token before it") and before.startswith("halo: ")


def next_labels(comm: Comm, plan: Plan, labels: Tensor) -> Tensor:
    return recurrent.shift(seqpar.shard(labels, plan, comm.rank), plan, comm, by=-2)


def test_labels_of_the_token_after_the_next() -> None:
    plan, labels = plan_of("zigzag", (5, 8), 2, seed=3), torch.arange(100, 113)
    got = torch.zeros_like(labels)
    for rank, mine in enumerate(run_threads(2, next_labels, plan, labels)):
        put(got, mine, plan, rank)
    assert got.tolist() == [102, 103, 104, 0, 0, 107, 108, 109, 110, 111, 112, 0, 0]


def haloed(comm: Comm, plan: Plan, x: Tensor, reach: int) -> tuple[Tensor, Tensor, Tensor, int]:
    mine = poisoned(x, plan, comm.rank)
    before = comm.stats.bytes_sent
    rows = recurrent.halo(mine, plan, comm, reach=reach)
    sent = comm.stats.bytes_sent - before
    weight = torch.randn(rows.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(comm.rank))
    (dx,) = torch.autograd.grad(rows, mine, weight)
    return rows.detach(), weight, dx, sent


@examples(40)
@given(plans(), st.integers(1, 5))
def test_halo_has_the_rows_before_each_run_and_moves_no_other(plan, reach) -> None:
    x = torch.randn(plan.mask.tokens, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    owner, offsets = plan.layout.owner(), plan.mask.offsets
    dx, expected = torch.zeros_like(x), torch.zeros_like(x)
    needed, sent = 0, 0
    for rank, (rows, weight, grad, bytes_sent) in enumerate(run_threads(plan.ranks, haloed, plan, x, reach)):
        own = recurrent.runs(plan, rank)
        lacking = set()
        starts = own.positions[own.starts[:-1]]
        assert len(rows) == own.counts.size and own.counts.sum() == plan.layout.tokens(rank)
        for n, (start, document) in enumerate(zip(starts.tolist(), own.documents.tolist(), strict=True)):
            for place in range(reach):
                position = start - reach + place
                if position < offsets[document]:
                    assert not rows[n, place].any()
                    continue
                assert torch.equal(rows[n, place], x[position])
                expected[position] += weight[n, place]
                lacking |= {position} if owner[position] != rank else set()
        needed, sent = needed + len(lacking), sent + bytes_sent
        put(dx, grad, plan, rank)
    assert sent == needed * 2 * 8
    torch.testing.assert_close(dx, expected, rtol=1e-12, atol=1e-12)


def convolved(
    comm: Comm, plan: Plan, x: Tensor, weight: Tensor, bias: Tensor | None, dy: Tensor, activation: str | None
) -> list[Tensor | None]:
    mine, weight = poisoned(x, plan, comm.rank), weight.clone().requires_grad_()
    bias = None if bias is None else bias.clone().requires_grad_()
    y = recurrent.causal_conv1d(mine, weight, bias, plan, comm, activation=activation)
    y.backward(seqpar.shard(dy, plan, comm.rank))
    return [y.detach(), mine.grad, weight.grad, None if bias is None else bias.grad]


def convolution_agrees(plan: Plan, taps: int, biased: bool, activation: str | None, run) -> None:
    g = torch.Generator().manual_seed(taps)
    x, dy, weight = (
        torch.randn(*s, dtype=torch.float64, generator=g) for s in ([plan.mask.tokens, 3],) * 2 + ([3, taps],)
    )
    bias = torch.randn(3, dtype=torch.float64, generator=g) if biased else None
    leaves = [t.clone().requires_grad_() for t in (x, weight, *([bias] if biased else []))]
    outs = []
    for document in leaves[0].split(plan.mask.lengths.tolist()):
        padded = torch.cat([document.new_zeros(taps - 1, 3), document]).T[None]
        outs.append(conv1d(padded, leaves[1][:, None], leaves[2] if biased else None, groups=3)[0].T)
    expected = silu(torch.cat(outs)) if activation else torch.cat(outs)
    dx, dweight, *dbias = torch.autograd.grad(expected, leaves, dy)
    y, got = torch.zeros_like(x), torch.zeros_like(x)
    results = run(plan.ranks, convolved, plan, x, weight, bias, dy, activation)
    for rank, (part, grad, *_) in enumerate(results):
        put(y, part, plan, rank)
        put(got, grad, plan, rank)
    sums = [sum(r[2] for r in results), *([sum(r[3] for r in results)] if biased else [])]
    for a, b in zip((y, got, *sums), (expected.detach(), dx, dweight, *dbias), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@examples(40)
@given(plans(), st.integers(1, 5), st.booleans(), st.sampled_from([None, "silu"]))
def test_convolution_is_that_of_one_process(plan, taps, biased, activation) -> None:
    convolution_agrees(plan, taps, biased, activation, run_threads)


def test_late_messages() -> None:
    """Posts are delayed: rows that are read before they arrive would show."""
    plan = plan_of("zigzag", (5, 2, 9), 3)
    convolution_agrees(plan, 4, True, "silu", partial(run_threads, delay=0.002))
    x, dy = (torch.arange(32, dtype=torch.float64).view(16, 2) * sign for sign in (1, -1))
    soon, late = (run_threads(3, shifted, plan, x, dy, 2, delay=delay) for delay in (0.0, 0.002))
    assert all(
        torch.equal(a, b) for one, other in zip(soon, late, strict=True) for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("comm", COMMS)
def test_convolution_over_processes(comm) -> None:
    def run(ranks, *arguments):
        return run_processes(ranks, *arguments, comm=comm)

    convolution_agrees(plan_of("zigzag", (5, 2, 9), 3), 4, True, "silu", run)


def refused(comm: Comm, plan: Plan, change: str) -> str:
    rows = plan.rows(comm.rank)
    x, weight, bias, options = torch.zeros(rows, 3), torch.zeros(3, 4), torch.zeros(3), {}
    if comm.rank == 1:
        x = torch.zeros(rows + 1, 3) if change == "rows" else x
        weight = {"taps": torch.zeros(3, 0), "channels": torch.zeros(2, 4), "dtype": weight.double()}.get(
            change, weight
        )
        bias = torch.zeros(4) if change == "bias" else bias
        options = {"activation": "gelu"} if change == "activation" else {}
    with pytest.raises(ValueError) as error:
        recurrent.causal_conv1d(x, weight, bias, plan, comm, **options)
    assert comm.stats.bytes_sent == 0
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("rows", "must have 7 rows"), ("taps", "no taps; give at least 1"), ("channels", "weight must be [3, taps]"),
        ("dtype", "give both one dtype"), ("bias", "bias must be [3]"), ("activation", 'must be None or "silu"'),
    ],
)  # fmt: skip
def test_a_rank_s_wrong_call_is_an_error_on_all(change, text) -> None:
    plan = Plan(seqpar.Mask([14]), seqpar.Layout.contiguous(14, 2))
    assert all(text in error for error in run_threads(2, refused, plan, change))


def planless(comm: Comm, plan: Plan) -> str:
    with pytest.raises(ValueError) as error:
        recurrent.shift(torch.zeros(plan.rows(comm.rank), 3), plan if comm.rank else None, comm)
    assert comm.stats.bytes_sent == 0
    return str(error.value)


def test_a_rank_without_a_plan_is_an_error_on_all() -> None:
    errors = run_threads(2, planless, plan_of("contiguous", (14,), 2))
    assert all("expected a plan and a comm, or their handle alone, got None with a comm" in error for error in errors)


def reaches(comm: Comm, plan: Plan, verb: str, value: object) -> str:
    x = torch.zeros(plan.rows(comm.rank), 3)
    with pytest.raises(ValueError) as error:
        recurrent.shift(x, plan, comm, by=value) if verb == "by" else recurrent.halo(x, plan, comm, reach=value)
    assert comm.stats.bytes_sent == 0
    return str(error.value)


@pytest.mark.parametrize(("verb", "value"), [("by", 0), ("by", 1.5), ("by", 2**63), ("reach", 0), ("reach", -1)])
def test_reaches_that_say_nothing_are_refused(verb, value) -> None:
    plan = plan_of("contiguous", (14,), 2)
    assert all(f"{verb} must be an integer" in error for error in run_threads(2, reaches, plan, verb, value))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.bool, torch.float8_e4m3fn])
def test_rows_of_every_dtype_move(dtype: torch.dtype) -> None:
    plan = Plan(Mask([5]), Layout.striped(5, 2, 1))
    whole = torch.tensor([[1, 0], [1, 1], [0, 1], [1, 0], [0, 0]])

    def rank(comm: Comm) -> Tensor:
        rows = whole[plan.layout.positions(comm.rank)].to(dtype)
        return recurrent.shift(rows, plan, comm).to(torch.int64)

    found = torch.full_like(whole, -1)
    for r, rows in enumerate(run_threads(2, rank)):
        found[plan.layout.positions(r)] = rows
    assert torch.equal(found, torch.cat([torch.zeros(1, 2).long(), whole[:-1]]))


def test_gradients_of_complex_rows_are_complex() -> None:
    plan = Plan(Mask([4]), Layout.striped(4, 2, 1))

    def rank(comm: Comm) -> list[Tensor]:
        found = []
        for move in (lambda x: recurrent.shift(x, plan, comm), lambda x: recurrent.halo(x, plan, comm, reach=1)):
            x = torch.ones(2, dtype=torch.complex64, requires_grad=True)
            y = move(x)
            y.backward(torch.full_like(y, 1 + 2j))
            found.append(x.grad)
        return found

    first, second = run_threads(2, rank)
    for grad in first:
        assert torch.equal(grad, torch.tensor([1 + 2j, 1 + 2j]))
    for grad in second:
        assert torch.equal(grad, torch.tensor([1 + 2j, 0]))


@pytest.mark.parametrize("verb", [recurrent.shift, partial(recurrent.halo, reach=1)])
def test_errors_name_the_verb(verb) -> None:
    plan, x = Plan(Mask([4]), Layout.contiguous(4, 1)), torch.ones(4, 2)
    with (
        forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match="^(shift|halo) has no forward-mode") as error,
    ):
        verb(forward_ad.make_dual(x, x), plan, LocalComm())
    assert str(error.value).startswith(getattr(verb, "func", verb).__name__)


def test_runs_that_a_layer_writes_to_are_its_own() -> None:
    plan = Plan(Mask([5, 6]), Layout.striped(11, 2))
    want, mine = recurrent.runs(plan, 0), recurrent.runs(plan, 0)
    for array in (mine.positions, mine.counts, mine.documents, mine.numbers):
        array += 1 << 40
    again = recurrent.runs(plan, 0)
    assert np.array_equal(again.positions, want.positions) and np.array_equal(again.counts, want.counts)
