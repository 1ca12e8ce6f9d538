"""Rotary embedding against the turning of complex numbers in float64, and the formula that models were trained with."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from seqpar.kernels.memory import rotary as dispatched
from tests.cases import examples
from tests.kernels.versions import VERSIONS, version

TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def frequencies(dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)).to(dtype)


def turned(x: Tensor, angle: Tensor, *, interleaved: bool, scaling: float, inverse: bool) -> Tensor:
    """Pairs as complex numbers in float64; angle [n, R/2]."""
    x, half = x.double(), angle.shape[1]
    pairs = x[..., : 2 * half].unflatten(-1, (half, 2) if interleaved else (2, half))
    a, b = pairs.unbind(-1 if interleaved else -2)
    angle = angle.double()[:, None] * (-1 if inverse else 1)
    y = torch.complex(a, b) * torch.polar(torch.full_like(angle, scaling), angle)
    y = torch.stack([y.real, y.imag], -1 if interleaved else -2).flatten(-2)
    return torch.cat([y, x[..., 2 * half :]], -1)


def call(name: str, x: Tensor, positions: Tensor, freq: Tensor, **options) -> Tensor:
    """What a version makes, back on the CPU. Triton's writes it, here to a view between NaNs."""
    kernels, device = version(name, "rotary")
    x, positions, freq = (t.to(device) for t in (x, positions, freq))
    if name == "torch":
        return kernels.rotate(x, positions, freq, **options)
    n, heads, dim = x.shape
    memory = torch.full((x.numel() * 3 + 99,), torch.nan, dtype=x.dtype, device=device)
    out = memory.as_strided(x.shape, (heads * dim + 3, dim, 1), 5)
    kernels.rotate(x, positions, freq, out, *options.values())
    result = out.clone().cpu()
    out.fill_(torch.nan)
    assert memory.isnan().all(), "nothing else is written"
    return result


@st.composite
def options(draw: st.DrawFn) -> dict[str, bool | float]:
    scaling = draw(st.sampled_from([1.0, 1.25]))
    return {"interleaved": draw(st.booleans()), "scaling": scaling, "inverse": draw(st.booleans())}


@pytest.mark.parametrize("name", VERSIONS)
@examples(40)
@given(
    st.tuples(st.integers(0, 40), st.integers(1, 10)),
    st.sampled_from([(8, 8), (12, 12), (12, 8), (7, 6), (5, 0), (2, 2)]),
    st.sampled_from(list(TOLERANCE)),
    options(),
    st.sampled_from([torch.int32, torch.int64]),
    st.integers(0, 99),
)
def test_rotate_is_its_definition(name, sizes, dims, dtype, opts, integers, seed) -> None:
    (total, heads), (dim, rotated) = sizes, dims
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(total, heads, dim + 2, dtype=torch.float64, generator=g).to(dtype)[..., 1 : 1 + dim]
    positions = torch.randint(-1, 200, (total,), generator=g, dtype=integers)
    freq = frequencies(rotated, torch.float64 if dtype == torch.float64 else torch.float32)
    expected = turned(x, positions[:, None].to(freq.dtype) * freq, **opts)
    got = call(name, x, positions, freq, **opts)
    torch.testing.assert_close(got.double(), expected, rtol=TOLERANCE[dtype], atol=4 * TOLERANCE[dtype])
    assert torch.equal(got[..., rotated:], x[..., rotated:]), "elements beyond the pairs keep their bits"


@pytest.mark.parametrize("name", VERSIONS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_adjoint_turns_back(name, interleaved) -> None:
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(9, 3, 10, dtype=torch.float64, generator=g) for _ in range(2))
    positions, freq = torch.arange(9) * 1000, frequencies(8, torch.float64)
    there, back = (
        call(name, z, positions, freq, interleaved=interleaved, scaling=1.5, inverse=i)
        for z, i in ((x, False), (y, True))
    )
    torch.testing.assert_close((there * y).sum(), (x * back).sum(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", VERSIONS)
def test_positions_up_to_ten_million(name) -> None:
    """Sine and cosine of the float32 product are exact to rounding, however many turns it is."""
    g = torch.Generator().manual_seed(0)
    positions = torch.cat([torch.randint(0, 10_000_000, (60,), generator=g), torch.tensor([9_999_999, 2**23 + 1])])
    x, freq = torch.randn(62, 1, 32, generator=g), frequencies(32)
    opts = {"interleaved": False, "scaling": 1.0, "inverse": False}
    got = call(name, x, positions, freq, **opts)
    rounded = turned(x, positions[:, None].float() * freq, **opts)
    torch.testing.assert_close(got.double(), rounded, rtol=0, atol=1e-6)
    exact = positions[:, None].double() * freq.double()
    # |turned(a) - turned(b)| <= |x| |a - b|, and a product is off by half a unit in its last place.
    bound = x.double().norm(dim=-1, keepdim=True) * (exact.max(-1).values * 2**-24)[:, None, None] + 1e-6
    assert ((got.double() - turned(x, exact, **opts)).abs() <= bound).all()


@pytest.mark.parametrize("name", VERSIONS)
def test_float32_is_what_models_were_trained_with(name) -> None:
    """In torch to the last bit: cos and sin of [T, R] and rotate_half in float32, as in the Llama of transformers."""
    g = torch.Generator().manual_seed(0)
    x, positions, freq = torch.randn(64, 2, 16, generator=g), torch.arange(64) * 1031, frequencies(16)
    angle = (freq[None, :, None] @ positions[None, None, :].float()).transpose(1, 2)[0]
    both = torch.cat([angle, angle], -1)[:, None]
    half = torch.cat([-x[..., 8:], x[..., :8]], -1)
    expected = x * (both.cos() * 1.5) + half * (both.sin() * 1.5)
    opts = {"interleaved": False, "scaling": 1.5, "inverse": False}
    got = call(name, x, positions, freq, **opts)
    torch.testing.assert_close(got, expected, rtol=0, atol=0 if name == "torch" else 2e-6)


def test_a_device_of_tritons_takes_its_kernel(monkeypatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    fused, device = version("triton", "rotary")
    monkeypatch.setattr(dispatched, "on_triton", lambda x: True)
    x, positions, freq = torch.ones(4, 2, 6, device=device), torch.arange(4, device=device), frequencies(4).to(device)
    seen = []
    launch = fused.rotate
    monkeypatch.setattr(fused, "rotate", lambda *args: (seen.append(args), launch(*args)))
    got = dispatched.rotate(x, positions, freq, interleaved=True, scaling=0.5)
    expected = turned(x.cpu(), (positions[:, None] * freq).cpu(), interleaved=True, scaling=0.5, inverse=False)
    torch.testing.assert_close(got.double().cpu(), expected, rtol=1e-6, atol=1e-6)
    assert len(seen) == 1


def test_rows_whose_elements_lie_far_apart(monkeypatch) -> None:
    """Offsets inside a row of more than 31 bits; of the memory between the elements nothing is touched."""
    pytest.importorskip("triton", reason="triton is not installed")
    if version("triton", "rotary")[1] != "cpu":
        pytest.skip("this takes 8 GB of memory that is not there")
    monkeypatch.setattr(dispatched, "on_triton", lambda x: True)
    rows, dim, apart = 2, 32, 1 << 27
    x = torch.empty((dim - 1) * apart + rows, dtype=torch.bfloat16).as_strided((rows, 1, dim), (1, rows, apart))
    x.copy_(torch.ones(rows, 1, dim))
    got = dispatched.rotate(x, torch.arange(rows), frequencies(dim))
    assert torch.equal(got, dispatched.rotate(x.contiguous(), torch.arange(rows), frequencies(dim)))
