"""Property 5: `merge` is a commutative monoid with identity ``(0, -inf)``, to rounding; and it differentiates."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import seqpar
from seqpar import merge
from seqpar.kernels import softmax
from tests.cases import examples
from tests.kernels.versions import VERSIONS, version

Part = tuple[Tensor, Tensor]
logs = st.one_of(st.just(-torch.inf), st.floats(-800, 800))


@st.composite
def parts(draw: st.DrawFn) -> Part:
    """Attention of 3 rows over some keys; a row that saw none holds (0, -inf)."""
    lse = torch.tensor(draw(st.lists(logs, min_size=3, max_size=3)), dtype=torch.float64)
    out = torch.randn(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    return out.masked_fill((lse == -torch.inf)[:, None], 0.0), lse


def same(a: Part, b: Part, *, exactly: bool = False) -> None:
    tolerance = {"rtol": 0, "atol": 0} if exactly else {"rtol": 1e-12, "atol": 1e-12}
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, **tolerance)


def test_the_public_merge_is_the_kernels() -> None:
    assert seqpar.merge is seqpar.kernels.merge


@given(parts(), parts())
def test_commutative(a, b) -> None:
    same(merge(*a, *b), merge(*b, *a), exactly=True)


@given(parts(), parts(), parts())
def test_associative(a, b, c) -> None:
    same(merge(*merge(*a, *b), *c), merge(*a, *merge(*b, *c)))


@given(parts())
def test_identity_changes_no_bit(a) -> None:
    nothing = (torch.zeros(3, 2, dtype=torch.float64), torch.full((3,), -torch.inf, dtype=torch.float64))
    same(merge(*a, *nothing), a, exactly=True)
    same(merge(*nothing, *a), a, exactly=True)


@given(parts(), parts())
def test_rows_that_saw_nothing_may_hold_anything(a, b) -> None:
    out, lse = a
    dirty = torch.where((lse == -torch.inf)[:, None], torch.nan, out)
    same(merge(dirty, lse, *b), merge(out, lse, *b), exactly=True)
    same(merge(*b, dirty, lse), merge(*b, out, lse), exactly=True)


def test_merging_is_attention_over_the_union() -> None:
    g = torch.Generator().manual_seed(0)
    s, v = torch.randn(4, 9, dtype=torch.float64, generator=g), torch.randn(9, 5, dtype=torch.float64, generator=g)
    whole = (torch.softmax(s, -1) @ v, torch.logsumexp(s, -1))
    part = [(torch.softmax(s[:, at], -1) @ v[at], torch.logsumexp(s[:, at], -1)) for at in (slice(3), slice(3, 9))]
    same(merge(*part[0], *part[1]), whole)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_results_are_in_the_dtype_of_lse(low) -> None:
    out, lse = merge(torch.ones(3, 2, dtype=low), torch.zeros(3), torch.ones(3, 2, dtype=low), torch.zeros(3))
    assert out.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(lse, torch.full((3,), 2.0).log())


def test_gradients() -> None:
    g = torch.Generator().manual_seed(0)
    out, part = (torch.randn(4, 3, dtype=torch.float64, generator=g).requires_grad_() for _ in range(2))
    lse, part_lse = (torch.randn(4, dtype=torch.float64, generator=g).requires_grad_() for _ in range(2))
    assert torch.autograd.gradcheck(merge, (out, lse, part, part_lse))


@pytest.mark.parametrize("lse", [(-torch.inf, 0.5), (0.5, -torch.inf), (-torch.inf, -torch.inf), (700.0, -700.0)])
def test_gradients_stay_finite_where_nothing_was_seen(lse) -> None:
    sides = [torch.tensor([x], dtype=torch.float64, requires_grad=True) for x in lse]
    outs = [torch.full((1, 2), x, dtype=torch.float64, requires_grad=True) for x in (3.0, 5.0)]
    out, joined = merge(outs[0], sides[0], outs[1], sides[1])
    (out.sum() + joined.masked_fill(joined == -torch.inf, 0.0).sum()).backward()
    for n, (side, part) in enumerate(zip(sides, outs, strict=True)):
        weight = 0.0 if lse[n] == -torch.inf or lse[n] < lse[1 - n] else 1.0
        torch.testing.assert_close(side.grad, torch.tensor([weight], dtype=torch.float64))
        torch.testing.assert_close(part.grad, torch.full((1, 2), weight, dtype=torch.float64))


def strided(x: Tensor, device: str) -> tuple[Tensor, Tensor]:
    """x [M, H, D] as a view of memory that is otherwise NaN, and that memory."""
    rows, heads, dim = x.shape
    memory = torch.full((heads + 1, rows + 1, dim + 3), torch.nan, dtype=x.dtype, device=device)
    view = memory[:heads, :rows, 2 : 2 + dim].transpose(0, 1)
    view.copy_(x)
    return view, memory


@pytest.mark.parametrize("name", VERSIONS)
@pytest.mark.parametrize("final", [False, True])
@examples(40)
@given(
    st.tuples(st.integers(0, 40), st.integers(1, 3), st.sampled_from([1, 5, 16])),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    st.integers(0, 99),
)
def test_in_place_it_is_merge(name, final, sizes, dtype, seed) -> None:
    kernels, device = version(name, "softmax")
    rows, heads, dim = sizes
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    g = torch.Generator().manual_seed(seed)
    acc, part = (torch.randn(rows, heads, dim, dtype=torch.float64, generator=g) for _ in range(2))
    acc, part = acc.to(wide), part.to(dtype)
    lse, part_lse = (30 * torch.randn(heads, rows, dtype=torch.float64, generator=g).to(wide) for _ in range(2))
    for side, values in ((lse, acc), (part_lse, part)):  # both, one or none may have seen nothing
        blind = torch.rand(heads, rows, generator=g) < 0.3
        side[blind] = -torch.inf
        values[blind.t()] = torch.nan
    expected, joined = merge(*(x.double() for x in (acc, lse.t(), part, part_lse.t())))

    x, memory = strided(acc, device)
    y, _ = strided(part, device)
    sums, part_sums = (s.t().contiguous().t().to(device) for s in (lse, part_lse))
    out, spare = strided(torch.full_like(part, torch.nan), device) if final else (None, None)
    kernels.merge_(x, sums, y, part_sums, out)
    target = x if out is None else out
    # The interpreter cuts float32 to 16 bits instead of rounding.
    tolerance = {torch.float64: 1e-13, torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(target.dtype, 1e-5)
    torch.testing.assert_close(target.cpu().double(), expected, rtol=tolerance, atol=tolerance / 8)
    small = 1e-13 if wide == torch.float64 else 1e-6
    torch.testing.assert_close(sums.cpu().double(), joined.t(), rtol=small, atol=small)
    if out is not None:
        assert torch.equal(x.cpu().nan_to_num(7.0), acc.nan_to_num(7.0)), "acc is left as it was"
        memory = spare
    target.fill_(torch.nan)
    assert memory.isnan().all(), "nothing else is written"


@pytest.mark.parametrize("name", VERSIONS)
def test_in_place_an_identity_changes_no_bit(name) -> None:
    kernels, device = version(name, "softmax")
    g = torch.Generator().manual_seed(0)
    acc, lse = torch.randn(9, 2, 5, generator=g).to(device), torch.randn(2, 9, generator=g).to(device)
    nothing = torch.full_like(acc, torch.nan), torch.full_like(lse, -torch.inf)
    first = acc.clone(), lse.clone()
    kernels.merge_(*first, *nothing)
    same(first, (acc, lse), exactly=True)
    kernels.merge_(*nothing, acc, lse)
    same(nothing, (acc, lse), exactly=True)


def test_a_device_of_tritons_takes_its_kernel(monkeypatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    fused, _ = version("triton", "softmax")
    called = []
    monkeypatch.setattr(softmax, "on_triton", lambda x: True)
    monkeypatch.setattr(fused, "merge_", lambda *args: called.append(args))
    args = (torch.zeros(1, 1, 1), torch.zeros(1, 1), torch.zeros(1, 1, 1), torch.zeros(1, 1), None)
    softmax.merge_(*args)
    assert called == [args]
