"""`switch`, `relayout`, `shard`, `unshard`, `merge`: their specification over all ranks, and their adjoints."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad

import seqpar
from seqpar.comm import Comm, PeerError, shm
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.ops.core.handles import handles
from seqpar.plan import TRANSPORTS, Plan
from seqpar.testing import COMMS, dense_attention, run_processes, run_threads
from tests.cases import LAYOUTS, cases, examples, make_layout
from tests.ops.cases import inputs

DTYPES = (torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64)


def values(shape: list[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """The same tensor on every rank."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 100, shape, generator=g).to(dtype)


def adjoint(ax: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, list[float]]:
    """A^T y by autograd, whose own adjoint takes x to Ax; and this rank's <Ax, y> and <x, A^T y>."""
    (aty,) = torch.autograd.grad(ax, x, y, create_graph=True)
    (twice,) = torch.autograd.grad(aty, y, x.detach())
    assert torch.equal(twice, ax)
    return aty, [(ax * y).sum().item(), (x * aty).sum().item()]


@dataclass(frozen=True)
class Switch:
    """A switch between two dims of a tensor of `shape` whose shares are `split` and `concat`."""

    shape: tuple[int, ...]
    dims: tuple[int, int]  # split, concat; negative ones too
    split: tuple[int, ...]
    concat: tuple[int, ...]


@st.composite
def switches(draw: st.DrawFn) -> Switch:
    ranks = draw(st.sampled_from([1, 2, 3, 4, 6]))
    rank_of = draw(st.integers(2, 4))
    a, b = draw(st.permutations(range(rank_of)))[:2]
    shares = st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks)
    split, concat = draw(shares), draw(shares)
    shape = [draw(st.integers(0, 3)) for _ in range(rank_of)]
    shape[a], shape[b] = sum(split), sum(concat)
    signs = draw(st.tuples(st.booleans(), st.booleans()))
    dims = tuple(d - rank_of if negative else d for d, negative in zip((a, b), signs, strict=True))
    return Switch(tuple(shape), dims, tuple(split), tuple(concat))


def switched(comm: Comm, s: Switch, dtype: torch.dtype) -> Tensor:
    x = values(list(s.shape), dtype).split(s.concat, s.dims[1])[comm.rank]
    return seqpar.switch(x, comm, split_dim=s.dims[0], concat_dim=s.dims[1], sizes=(s.split, s.concat))


@examples(60)
@given(switches(), st.sampled_from(DTYPES), st.booleans())
def test_switch_is_its_specification(s, dtype, direct) -> None:
    expected = values(list(s.shape), dtype).split(s.split, s.dims[0])
    for got, want in zip(run_threads(len(s.split), switched, s, dtype, direct=direct), expected, strict=True):
        assert torch.equal(got, want)
        assert got.dtype == dtype


def by_op(comm: Comm, x: Tensor, s: Switch) -> Tensor:
    """The switch as a graph makes it."""
    a, b = (d % len(s.shape) for d in s.dims)
    ys, _ = torch.ops.seqpar.switch([x], handles(comm), [a], [b], s.split, s.concat, comm.rank, [True])
    return ys[0]


def switch_products(comm: Comm, s: Switch, op: bool) -> list[float]:
    """This rank's products, the adjoint by autograd being the verb with the roles swapped."""
    x = values(list(s.shape), torch.float64, 1).split(s.concat, s.dims[1])[comm.rank].clone().requires_grad_()
    y = values(list(s.shape), torch.float64, 2).split(s.split, s.dims[0])[comm.rank].clone().requires_grad_()
    sizes = s.split, s.concat
    ax = by_op(comm, x, s) if op else seqpar.switch(x, comm, split_dim=s.dims[0], concat_dim=s.dims[1], sizes=sizes)
    aty, products = adjoint(ax, x, y)
    verb = seqpar.switch(y, comm, split_dim=s.dims[1], concat_dim=s.dims[0], sizes=(s.concat, s.split))
    assert torch.equal(aty, verb)
    return products


@examples(40)
@given(switches(), st.booleans(), st.booleans())
def test_switch_has_its_adjoint(s, op, direct) -> None:
    ax_y, x_aty = np.sum(run_threads(len(s.split), switch_products, s, op, direct=direct), axis=0)
    assert ax_y == x_aty


def equal_shares(comm: Comm) -> Tensor:
    x = torch.arange(24.0).view(4, 6)[2 * comm.rank : 2 * comm.rank + 2]
    return seqpar.switch(x.t().contiguous().t(), comm, split_dim=-1, concat_dim=0)


def test_switch_takes_equal_shares_by_default_and_any_strides() -> None:
    expected = torch.arange(24.0).view(4, 6).split(3, 1)
    for got, want in zip(run_threads(2, equal_shares), expected, strict=True):
        assert torch.equal(got, want)


def two_layouts(kinds: tuple[str, str], ranks: int, seed: int) -> tuple[Layout, Layout]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, 4).tolist()
    return tuple(make_layout(kind, lengths, ranks, rng) for kind in kinds)  # type: ignore[return-value]


def moved(comm: Comm, src: Layout, dst: Layout, dtype: torch.dtype, tail: tuple[int, ...]) -> tuple[Tensor, int]:
    x = values([src.total, *tail], dtype)[src.positions(comm.rank)]
    return seqpar.relayout(x, comm, src=src, dst=dst), comm.stats.bytes_received


@examples(60)
@given(
    st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS)),
    st.sampled_from([1, 2, 3, 4, 7]),
    st.integers(0, 999),
    st.sampled_from(DTYPES),
    st.sampled_from([(), (3,), (2, 0), (2, 3)]),
    st.booleans(),
)
def test_relayout_is_its_specification_and_moves_each_row_once(kinds, ranks, seed, dtype, tail, direct) -> None:
    src, dst = two_layouts(kinds, ranks, seed)
    x = values([src.total, *tail], dtype)
    row = x[:1].nbytes
    for rank, (got, received) in enumerate(run_threads(ranks, moved, src, dst, dtype, tail, direct=direct)):
        assert torch.equal(got, x[dst.positions(rank)]) and got.dtype == dtype
        new = np.setdiff1d(dst.positions(rank), src.positions(rank))
        assert received == new.size * row


def relayout_products(comm: Comm, src: Layout, dst: Layout) -> list[float]:
    x = values([src.total, 2], torch.float64, 1)[src.positions(comm.rank)].requires_grad_()
    y = values([src.total, 2], torch.float64, 2)[dst.positions(comm.rank)].requires_grad_()
    aty, products = adjoint(seqpar.relayout(x, comm, src=src, dst=dst), x, y)
    assert torch.equal(aty, seqpar.relayout(y, comm, src=dst, dst=src))
    return products


@examples(30)
@given(st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS)), st.sampled_from([1, 2, 4]), st.integers(0, 999))
def test_relayout_has_its_adjoint(kinds, ranks, seed) -> None:
    ax_y, x_aty = np.sum(run_threads(ranks, relayout_products, *two_layouts(kinds, ranks, seed)), axis=0)
    assert ax_y == x_aty


def round_trip(comm: Comm, plan: Plan, dim: int, side: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = [2, 3, 2]
    shape[dim] = plan.mask.tokens if side == "q" else plan.mask.kv_tokens
    mine = seqpar.shard(values(shape, dtype), plan, comm.rank, dim=dim, side=side)
    pads = torch.from_numpy(plan.positions(comm.rank, side) < 0)
    assert mine.shape[dim] == plan.rows(comm.rank, side)
    assert not mine.movedim(dim, 0)[pads].any()
    if dtype.is_floating_point:
        mine.movedim(dim, 0)[pads] = torch.nan
    return mine, seqpar.unshard(mine, plan, comm, dim=dim, side=side)


@examples(60)
@given(
    cases(), st.sampled_from([0, 1, 2, -1, -2, -3]), st.sampled_from(["q", "kv"]), st.sampled_from(DTYPES),
    st.booleans(),
)  # fmt: skip
def test_unshard_undoes_shard(case, dim, side, dtype, direct) -> None:
    plan = case.plan()
    shape = [2, 3, 2]
    shape[dim] = plan.mask.tokens if side == "q" else plan.mask.kv_tokens
    x = values(shape, dtype)
    layout = plan.layout if side == "q" else plan.kv_layout
    for rank, (mine, back) in enumerate(run_threads(plan.ranks, round_trip, plan, dim, side, dtype, direct=direct)):
        held = torch.from_numpy(layout.positions(rank))
        assert torch.equal(mine.narrow(dim, 0, len(held)), x.index_select(dim, held))
        assert torch.equal(back, x)


def unshard_products(comm: Comm, plan: Plan, dim: int) -> list[float]:
    rows = [2, 2]
    rows[dim] = plan.rows(comm.rank)
    whole = [2, 2]
    whole[dim] = plan.mask.tokens
    x = values(rows, torch.float64, comm.rank).requires_grad_()
    y = values(whole, torch.float64, 10 + comm.rank).requires_grad_()
    aty, products = adjoint(seqpar.unshard(x, plan, comm, dim=dim), x, y)
    pads = torch.from_numpy(plan.positions(comm.rank) < 0)
    assert not aty.movedim(dim, 0)[pads].any()
    z = values(whole, torch.float64, 99).requires_grad_()  # shard, on this rank alone
    (atx,) = torch.autograd.grad(seqpar.shard(z, plan, comm.rank, dim=dim), z, x.detach())
    assert torch.equal((seqpar.shard(z, plan, comm.rank, dim=dim) * x).sum(), (z * atx).sum())
    return products


@examples(30)
@given(cases(), st.sampled_from([0, 1, -1, -2]), st.booleans())
def test_unshard_and_shard_have_their_adjoints(case, dim, direct) -> None:
    plan = case.plan()
    ax_y, x_aty = np.sum(run_threads(plan.ranks, unshard_products, plan, dim, direct=direct), axis=0)
    assert ax_y == x_aty


def low_precision(comm: Comm, plan: Plan, verb: str) -> Tensor:
    x = torch.zeros(plan.rows(comm.rank), dtype=torch.bfloat16, requires_grad=True)
    y = torch.full((plan.mask.tokens,), 256.0 if comm.rank == 0 else 0.75, dtype=torch.bfloat16)
    getattr(seqpar, verb)(x, plan, comm).backward(y)
    return x.grad


@pytest.mark.parametrize("verb", ["unshard", "fetch"])
def test_unshard_sums_gradients_in_float32(verb) -> None:
    plan = Plan(Mask([8], causal=False), Layout.contiguous(8, 8))
    for got in run_threads(8, low_precision, plan, verb):
        assert got.tolist() == [262.0]  # 256 + 7 * 0.75 rounded once; bf16 sums would stay at 256


def parts(seed: int, count: int, blind: list[bool]) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(seed)
    found = []
    for n in range(count):
        out, lse = (
            torch.randn(3, 2, dtype=torch.float64, generator=g),
            20 * torch.randn(3, dtype=torch.float64, generator=g),
        )
        if blind[n]:
            out[n % 3], lse[n % 3] = torch.nan, -torch.inf
        found.append((out, lse))
    return found


def assert_alike(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@given(st.integers(0, 9999), st.lists(st.booleans(), min_size=3, max_size=3))
def test_merge_is_a_commutative_monoid(seed, blind) -> None:
    a, b, c = parts(seed, 3, blind)
    assert_alike(seqpar.merge(*a, *b), seqpar.merge(*b, *a))
    assert_alike(seqpar.merge(*seqpar.merge(*a, *b), *c), seqpar.merge(*a, *seqpar.merge(*b, *c)))
    nothing = torch.full((3, 2), torch.nan, dtype=torch.float64), torch.full((3,), -torch.inf, dtype=torch.float64)
    clean = a[0].masked_fill((a[1] == -torch.inf)[:, None], 0.0), a[1]
    assert_alike(seqpar.merge(*a, *nothing), clean)
    assert_alike(seqpar.merge(*nothing, *a), clean)


@given(st.integers(0, 9999), st.integers(1, 8))
def test_merge_is_attention_over_the_union(seed, cut) -> None:
    g = torch.Generator().manual_seed(seed)
    s, v = (torch.randn(4, n, dtype=torch.float64, generator=g) for n in (9, 9))
    v = v[:1].expand(9, 9)[:, :3] * torch.arange(9.0, dtype=torch.float64)[:, None]

    def attend(a: int, b: int) -> tuple[Tensor, Tensor]:
        return torch.softmax(s[:, a:b], -1) @ v[a:b], s[:, a:b].logsumexp(-1)

    assert_alike(seqpar.merge(*attend(0, cut), *attend(cut, 9)), attend(0, 9))


def test_merge_has_gradients_also_of_rows_that_see_nothing() -> None:
    a, b, _ = parts(0, 3, [False, False, False])
    leaves = [x.requires_grad_() for x in (*a, *b)]
    assert torch.autograd.gradcheck(seqpar.merge, leaves)
    c, d, _ = parts(0, 3, [True, True, False])  # row 0 of c and row 1 of d
    for dead in (0, 1):
        c[1].data[dead] = d[1].data[dead] = -torch.inf
    leaves = [x.requires_grad_() for x in (*c, *d)]
    out, lse = seqpar.merge(*leaves)
    grads = torch.autograd.grad(out.sum() + lse[2], leaves)
    assert all(torch.isfinite(x).all() for x in grads)


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ((torch.zeros(4, 2, 3, dtype=torch.complex64), torch.zeros(4, 2)), TypeError, "out must be a floating tensor"),
        ((torch.zeros(4, 2, 3), [0.0]), TypeError, "lse must be a floating tensor, got .0.0."),
        ((torch.zeros(4, 2, 3), torch.zeros(2)), ValueError, r"expected out and part \[\.\.\., D\].*lse \[2\]"),
    ],
)
def test_merge_refuses_other_kinds_and_shapes(given: tuple[Any, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        seqpar.merge(*given, *given)


def two_by_two(comm: Comm, plans: list[Plan], strided: bool) -> list[Tensor]:
    """Two replicas of two ranks, each with a batch of its own; then the other axis sums what they share."""
    replica, place = (comm.rank % 2, comm.rank // 2) if strided else divmod(comm.rank, 2)
    members = [r for r in range(4) if ((r % 2) if strided else r // 2) == replica]
    across = [r for r in range(4) if ((r // 2) if strided else r % 2) == place]
    cp, dp = comm.sub(members), comm.sub(across)
    plan = plans[replica]
    q, k, v, dout, _ = inputs(plan, (4, 2), (4, 4), replica)
    mine = [seqpar.shard(x, plan, cp.rank).requires_grad_() for x in (q, k, v)]
    if comm.rank == 1:
        time.sleep(0.02)
    out = seqpar.attention(*mine, plan, cp)
    total = seqpar.switch(torch.full((2, 1), float(comm.rank)), dp, split_dim=0, concat_dim=1)
    out.backward(seqpar.shard(dout, plan, cp.rank))
    again = seqpar.unshard(seqpar.attention(*(x.detach() for x in mine), plan, comm.sub(members)), plan, cp)
    assert total.tolist() == [[float(r) for r in across]]
    return [out.detach(), *(x.grad for x in mine), again]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("ulysses", [1, 2])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.sampled(3)
def test_two_replicas_of_two_ranks(transport, ulysses, strided, run=run_threads) -> None:
    plans = [
        Plan(Mask([5, 12]), Layout.zigzag([5, 12], 2), transport=transport, ulysses=ulysses),
        Plan(Mask([9], causal=False), Layout.striped(9, 2), transport=transport, ulysses=ulysses),
    ]
    results = run(4, two_by_two, plans, strided)
    for replica, plan in enumerate(plans):
        q, k, v, dout, _ = inputs(plan, (4, 2), (4, 4), replica)
        out, _ = dense_attention(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), plan.mask)
        expected = [out, *torch.autograd.grad(out, [q, k, v], dout)]
        members = [r for r in range(4) if ((r % 2) if strided else r // 2) == replica]
        for place, rank in enumerate(members):
            for got, want in zip(results[rank][:4], expected, strict=True):
                torch.testing.assert_close(got, want[plan.layout.positions(place)], rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(results[rank][4], out, rtol=1e-10, atol=1e-10)


def test_two_replicas_of_two_processes() -> None:
    test_two_replicas_of_two_ranks("ring", 1, True, run=run_processes)


def every_verb(comm: Comm, plan: Plan, dst: Layout) -> list[Tensor]:
    result = each_verb(comm, plan, dst)
    assert comm.stats.staged_bytes == 0, "what a verb receives is memory that peers can write"
    return result


def each_verb(comm: Comm, plan: Plan, dst: Layout) -> list[Tensor]:
    x = values([plan.mask.tokens, 4], torch.float64)
    mine = seqpar.shard(x, plan, comm.rank).requires_grad_()
    there = seqpar.relayout(mine, comm, src=plan.layout, dst=dst)
    whole = seqpar.unshard(mine, plan, comm)
    s = Switch((3, 5), (-1, 0), (2, 3), (3, 0))
    (whole.sum() + there.sum()).backward()
    return [there.detach(), whole.detach(), mine.grad, switched(comm, s, torch.int64)]


@pytest.mark.parametrize("comm", COMMS)
def test_every_verb_over_processes(comm) -> None:
    if comm == "shm" and shm.missing():
        pytest.skip(shm.missing())
    plan, dst = Plan(Mask([7]), Layout.striped(7, 2)), Layout([[], [6, 5, 4, 3, 2, 1, 0]])
    threads, processes = run_threads(2, every_verb, plan, dst), run_processes(2, every_verb, plan, dst, comm=comm)
    for ours, theirs in zip(threads, processes, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert (ours[2] == 3).all()  # twice by unshard, once by relayout


@pytest.mark.parametrize("verb", ["switch", "relayout"])
def test_a_tangent_is_refused_and_not_lost(verb) -> None:
    comm, layout = seqpar.LocalComm(), Layout.contiguous(4, 1)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=f"{verb} has no forward-mode derivative"):
        x = forward_ad.make_dual(torch.ones(4, 3), torch.ones(4, 3))
        if verb == "switch":
            seqpar.switch(x, comm, split_dim=0, concat_dim=1)
        else:
            seqpar.relayout(x, comm, src=layout, dst=layout)


def tangent_on_a_rank(comm: Comm, batches: Tensor) -> list[str]:
    """What a rank's three calls come to; rank 0 gives a tangent to the second, and goes on."""
    plan, found = Plan(Mask([8]), Layout.contiguous(8, comm.size)), []
    for number, x in enumerate(batches):
        q = seqpar.shard(x, plan, comm.rank)
        try:
            with forward_ad.dual_level():
                given = forward_ad.make_dual(q, torch.ones_like(q)) if (number, comm.rank) == (1, 0) else q
                out = seqpar.attention(given, q, q, plan, comm)
            expected = seqpar.shard(dense_attention(x, x, x, Mask([8]))[0], plan, comm.rank)
            found.append("right" if torch.allclose(out, expected) else "wrong")
        except (NotImplementedError, ValueError, PeerError) as error:
            found.append(type(error).__name__)
    return found


def test_a_tangent_on_one_rank_lets_no_other_meet_its_next_call() -> None:
    batches = torch.randn(3, 8, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    first, second = run_processes(2, tangent_on_a_rank, batches)
    assert first[:2] == ["right", "NotImplementedError"] and "wrong" not in first + second
    assert second[0] == "right" and second[1] in ("ValueError", "PeerError")


@pytest.mark.parametrize("option", ["none", "alibi_slopes", "sinks", "dropout_p"])
def test_the_oracle_is_computed_on_any_device(option) -> None:
    q, k, slopes = (torch.empty(shape, device="meta") for shape in ((14, 4, 8), (14, 2, 8), (4,)))
    options = {"none": {}, "dropout_p": {"dropout_p": 0.2}}.get(option, {option: slopes})
    out, lse = dense_attention(q, k, k, Mask([5, 9], causal=True), **options)
    assert out.shape == q.shape and out.device == lse.device == q.device
