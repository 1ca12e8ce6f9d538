"""The rotary embedding of `seqpar.kernels.memory.rotary` in one pass over the memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PAIRS = 1024  # of a tile: with 4 warps each thread loads and stores 16 bytes of bf16
HEADS = 8  # of a program at most: they share its sines and cosines


@triton.jit
def rotate_rows(
    p_x, p_y, p_pos, p_freq, n, D, half, x_strides, y_strides, SCALING: tl.constexpr,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, HEADS: tl.constexpr, BN: tl.constexpr, BJ: tl.constexpr,
    BT: tl.constexpr,
):  # fmt: skip
    """Rotate BN rows of HEADS heads. BJ: pairs, BT: elements after them, if any; both rounded up to powers of two."""
    wide = tl.float64 if p_x.dtype.element_ty == tl.float64 else tl.float32
    o_n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    o_j = tl.arange(0, BJ)
    m_n = o_n < n
    b_pos = tl.load(p_pos + o_n, mask=m_n, other=0).to(wide)
    b_freq = tl.load(p_freq + o_j, mask=o_j < half, other=0.0).to(wide)
    b_angle = b_pos[:, None] * b_freq[None, :]
    b_cos, b_sin = tl.cos(b_angle) * SCALING, tl.sin(b_angle) * (-SCALING if INVERSE else SCALING)
    p_x += (o_n * x_strides[0])[:, None]
    p_y += (o_n * y_strides[0])[:, None]

    for i in tl.static_range(HEADS):
        i_h = tl.program_id(1).to(tl.int64) * HEADS + i
        p_xh, p_yh = p_x + i_h * x_strides[1], p_y + i_h * y_strides[1]
        if INTERLEAVED:
            o_d = tl.arange(0, 2 * BJ)[None, :]
            m = m_n[:, None] & (o_d < 2 * half)
            b_a, b_b = tl.split(tl.load(p_xh + o_d * x_strides[2], mask=m, other=0.0).reshape(BN, BJ, 2))
        else:
            o_d = o_j[None, :]
            m = m_n[:, None] & (o_d < half)
            b_a = tl.load(p_xh + o_d * x_strides[2], mask=m, other=0.0)
            b_b = tl.load(p_xh + (o_d + half) * x_strides[2], mask=m, other=0.0)
        b_a, b_b = b_a.to(wide), b_b.to(wide)
        b_c = (b_a * b_cos - b_b * b_sin).to(p_y.dtype.element_ty)
        b_d = (b_b * b_cos + b_a * b_sin).to(p_y.dtype.element_ty)
        if INTERLEAVED:
            tl.store(p_yh + o_d * y_strides[2], tl.interleave(b_c, b_d), mask=m)
        else:
            tl.store(p_yh + o_d * y_strides[2], b_c, mask=m)
            tl.store(p_yh + (o_d + half) * y_strides[2], b_d, mask=m)
        if BT:
            o_t = 2 * half + tl.arange(0, BT)[None, :]
            m = m_n[:, None] & (o_t < D)
            tl.store(p_yh + o_t * y_strides[2], tl.load(p_xh + o_t * x_strides[2], mask=m), mask=m)


def rotate(
    x: Tensor, positions: Tensor, frequencies: Tensor, out: Tensor, interleaved: bool, scaling: float, inverse: bool
) -> None:
    """Write ``x`` [rows, heads, dim], rotated by its rows' positions, to ``out``."""
    if not out.numel():
        return
    n, heads, dim = out.shape
    half = len(frequencies)
    bj = triton.next_power_of_2(max(half, 1))
    bn = min(triton.next_power_of_2(n), max(PAIRS // bj, 1))
    per_program = max(count for count in range(1, HEADS + 1) if heads % count == 0)
    with torch.cuda.device_of(x):
        rotate_rows[triton.cdiv(n, bn), heads // per_program](
            x, out, positions.contiguous(), frequencies.contiguous(), n, dim, half, x.stride(), out.stride(),
            SCALING=scaling, INTERLEAVED=interleaved, INVERSE=inverse, HEADS=per_program, BN=bn, BJ=bj,
            BT=triton.next_power_of_2(dim - 2 * half) if dim > 2 * half else 0, enable_fp_fusion=True,
        )  # fmt: skip
