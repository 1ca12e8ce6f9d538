"""`seqpar.kernels.softmax.delta` in one pass over the memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from seqpar.kernels.protocol import StepFacts, acc_dtype
from seqpar.kernels.triton.arguments import check_rows, kinds_of, per_row
from seqpar.kernels.triton.launch import Launch

ELEMENTS = 4096  # of a tile


# the number of rows, which is also the stride of heads, changes with every batch
@triton.jit(do_not_specialize=["delta_head", "rows"])
def delta_rows(
    dout, out, delta, delta_head, rows, heads, DIM: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """Sums of BM rows of one head, in the dtype of delta. Programs of the same rows follow each other."""
    i_h = (tl.program_id(0) % heads).to(tl.int64)
    o_m = (tl.program_id(0) // heads).to(tl.int64) * BM + tl.arange(0, BM)
    o_d = tl.arange(0, BD)
    m_m = o_m < rows
    m_tile = m_m[:, None] & (o_d < DIM)[None, :]
    b_dout = tl.load(dout.data + (o_m * dout.row + i_h * dout.head)[:, None] + o_d[None, :], mask=m_tile, other=0.0)
    b_out = tl.load(out.data + (o_m * out.row + i_h * out.head)[:, None] + o_d[None, :], mask=m_tile, other=0.0)
    wide = delta.dtype.element_ty
    tl.store(delta + i_h * delta_head + o_m, tl.sum(b_dout.to(wide) * b_out.to(wide), 1), mask=m_m)


def delta(dout: Tensor, out: Tensor, facts: StepFacts) -> Tensor:
    """``rowsum(dout * out)`` [heads, rows], in the accumulation dtype."""
    rows, heads, _ = out.shape
    sums = torch.empty(heads, rows, dtype=acc_dtype(out.dtype), device=out.device)
    if not sums.numel():
        return sums
    kinds = kinds_of(dout, out)
    launch: Launch = facts.memo(("delta", kinds), lambda: _prepare(dout, out))
    with torch.cuda.device_of(out):
        launch(*map(per_row, (dout, out), kinds), sums, sums.stride(0), rows, heads)
    return sums


def _prepare(dout: Tensor, out: Tensor) -> Launch:
    check_rows(dout, out)
    rows, heads, dim = out.shape
    bd = triton.next_power_of_2(dim)
    bm = max(ELEMENTS // bd, 1)
    return Launch(delta_rows, triton.cdiv(rows, bm) * heads, (dim, bm, bd), {"enable_fp_fusion": True})
