"""`seqpar.kernels.softmax.merge_` in one pass over the memory: two partial results of attention become one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 4096  # of a tile


@triton.jit
def merge_rows(
    p_acc, p_lse, p_part, p_part_lse, p_out, M, D, acc_strides, lse_strides, part_strides, part_lse_strides,
    out_strides, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Merge BM rows of one head, computed in the dtype of lse. Strides: of rows and heads, in elements."""
    i_h = tl.program_id(1).to(tl.int64)
    o_m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    o_d = tl.arange(0, BD)
    m_m = o_m < M
    m_tile = m_m[:, None] & (o_d < D)[None, :]
    p_lse += o_m * lse_strides[0] + i_h * lse_strides[1]
    p_part_lse += o_m * part_lse_strides[0] + i_h * part_lse_strides[1]
    p_acc += (o_m * acc_strides[0] + i_h * acc_strides[1])[:, None] + o_d[None, :]
    p_part += (o_m * part_strides[0] + i_h * part_strides[1])[:, None] + o_d[None, :]
    p_out += (o_m * out_strides[0] + i_h * out_strides[1])[:, None] + o_d[None, :]

    b_lse = tl.load(p_lse, mask=m_m, other=0.0)
    b_part_lse = tl.load(p_part_lse, mask=m_m, other=0.0).to(b_lse.dtype)
    tl.debug_barrier()  # several threads read a row's lse before one of them overwrites it
    b_top = tl.maximum(b_lse, b_part_lse)
    b_base = tl.where(b_top == float("-inf"), 0.0, b_top)
    b_a, b_b = tl.exp(b_lse - b_base), tl.exp(b_part_lse - b_base)
    b_sum = b_a + b_b
    b_safe = tl.where(b_sum == 0.0, 1.0, b_sum)
    tl.store(p_lse, tl.where(b_sum == 0.0, float("-inf"), tl.log(b_safe) + b_base), mask=m_m)

    # The output of a row that saw no key is not read, since it may be NaN.
    b_acc = tl.load(p_acc, mask=m_tile & (b_lse != float("-inf"))[:, None], other=0.0)
    b_part = tl.load(p_part, mask=m_tile & (b_part_lse != float("-inf"))[:, None], other=0.0).to(b_lse.dtype)
    b_out = (b_a / b_safe)[:, None] * b_acc + (b_b / b_safe)[:, None] * b_part
    tl.store(p_out, b_out.to(p_out.dtype.element_ty), mask=m_tile)


def merge_(acc: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, out: Tensor | None = None) -> None:
    """Merge ``(part, part_lse)`` into ``(acc, lse)``; the merged output goes to ``out`` if given.

    acc, part, out: [rows, heads, dim]. lse, part_lse: [heads, rows].
    """
    rows, heads, dim = acc.shape
    if not acc.numel():
        return
    out = acc if out is None else out
    bd = triton.next_power_of_2(dim)
    bm = min(triton.next_power_of_2(rows), max(ELEMENTS // bd, 1))
    with torch.cuda.device_of(acc):
        merge_rows[triton.cdiv(rows, bm), heads](
            acc, lse, part, part_lse, out, rows, dim, acc.stride()[:2], lse.t().stride(),
            part.stride()[:2], part_lse.t().stride(), out.stride()[:2], BM=bm, BD=bd, enable_fp_fusion=True,
        )  # fmt: skip
