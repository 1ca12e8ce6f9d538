"""`delta`, the row sums of dout * out, against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import seqpar
from seqpar.facts.mask import Mask
from seqpar.kernels import StepFacts, acc_dtype, softmax
from tests.cases import examples
from tests.kernels.cases import facts_of
from tests.kernels.versions import VERSIONS, version

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def facts(rows: int) -> StepFacts:
    return facts_of(Mask([rows + 1]), np.arange(rows + 1), np.arange(rows))


def between_nans(x: Tensor, device: str) -> Tensor:
    """x [M, H, D] as a view with heads outermost, of memory that is otherwise NaN."""
    rows, heads, dim = x.shape
    memory = torch.full((heads + 1, rows + 1, dim + 3), torch.nan, dtype=x.dtype, device=device)
    view = memory[:heads, :rows, 2 : 2 + dim].transpose(0, 1)
    view.copy_(x)
    return view


@pytest.mark.parametrize("name", VERSIONS)
@examples(30)
@given(
    st.tuples(st.sampled_from([0, 1, 31, 70]), st.integers(1, 3), st.sampled_from([1, 5, 64, 72, 129])),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.integers(0, 99),
)
def test_delta_is_its_definition(name, sizes, dtype, strided, seed) -> None:
    kernels, device = version(name, "delta")
    g = torch.Generator().manual_seed(seed)
    dout, out = (torch.randn(sizes, dtype=torch.float64, generator=g).to(dtype) for _ in range(2))
    places = [between_nans(x, device) if strided else x.to(device) for x in (dout, out)]
    sums = kernels.delta(*places, facts(sizes[0])).cpu()
    assert sums.shape == (sizes[1], sizes[0]) and sums.dtype == acc_dtype(dtype)
    products = dout.double() * out.double()
    # each of D products and D - 1 sums is rounded once
    bound = sizes[2] * torch.finfo(sums.dtype).eps * products.abs().sum(-1).t()
    assert ((sums.double() - products.sum(-1).t()).abs() <= bound).all()


def test_on_the_cpu_it_is_the_formula_to_the_last_bit() -> None:
    dout, out = torch.randn(2, 37, 3, 72, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(softmax.delta(dout, out, facts(37)), (dout.float() * out.float()).sum(-1).t())


def test_a_device_of_tritons_takes_its_kernel_and_prepares_it_once(monkeypatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    fused, _ = version("triton", "delta")
    prepared, prepare = [], fused._prepare
    monkeypatch.setattr(fused, "_prepare", lambda *tensors: (prepared.append(tensors), prepare(*tensors))[1])
    plan = seqpar.Plan(Mask([40]), seqpar.Layout.zigzag([40], 1))
    g = torch.Generator().manual_seed(0)
    leaves = [torch.randn(40, 2, 8, generator=g).requires_grad_() for _ in range(3)]
    dout = torch.randn(40, 2, 8, generator=g)

    def grads() -> tuple[Tensor, ...]:
        out = seqpar.attention(*leaves, plan, seqpar.LocalComm(), kernel="reference")
        return torch.autograd.grad(out, leaves, dout)

    expected = grads()
    monkeypatch.setattr(softmax, "on_triton", lambda x: True)
    for _ in range(2):
        for x, y in zip(grads(), expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
    assert len(prepared) == 1
