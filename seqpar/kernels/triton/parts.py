"""The sums of key tiles that were cut: their parts are added to dk and dv, in their order."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from seqpar.kernels.triton.launch import Launch

ROWS = tl.constexpr(4)  # of a program: a cut tile has few, so many programs share it
AT_ONCE = tl.constexpr(4)  # parts that are loaded before the first of them is added


# the numbers of tiles, heads and keys change with every batch, and none of them is worth a binary of its own
@triton.jit(do_not_specialize=["kv_heads", "keys"])
def add_parts(
    dk, dv, dk_parts, dv_parts, cuts, kv_heads, keys,
    D: tl.constexpr, BD: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Add the parts of some rows of a cut key tile to dk and dv of one head.

    cuts [cut tiles, 8]: key tile, place of its first part, number of parts. A part has BN rows of dk_parts, dv_parts.
    BD, BV: powers of two that are not below the head dims D and V.
    """
    BLOCKS: tl.constexpr = BN // ROWS
    i_kv, i_block = tl.program_id(0) % kv_heads, tl.program_id(0) // kv_heads
    p_cut = cuts + i_block // BLOCKS * 8
    first = i_block % BLOCKS * ROWS
    row, place, parts = tl.load(p_cut) * BN + first, tl.load(p_cut + 1), tl.load(p_cut + 2)
    rows = keys - row
    _add(dk, dk_parts, i_kv, row, place * BN + first, parts, rows, D, BD, BN)
    _add(dv, dv_parts, i_kv, row, place * BN + first, parts, rows, V, BV, BN)


@triton.jit
def _add(x, x_parts, i_kv, row, first, parts, rows, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr):
    o_n, o_d = tl.arange(0, ROWS), tl.arange(0, BD)
    m_d = (o_d < D)[None, :]
    p_part = x_parts.data + first.to(tl.int64) * x_parts.row + i_kv.to(tl.int64) * x_parts.head
    p_part += o_n[:, None] * x_parts.row + o_d[None, :]
    between = tl.cast(x_parts.row, tl.int64) * BN
    b_sum = tl.full([ROWS, BD], 0.0, tl.float32)
    for i_part in range(0, parts, AT_ONCE):
        for n in tl.static_range(AT_ONCE):
            m_n = o_n < tl.where(i_part + n < parts, rows, 0)
            b_sum += tl.load(p_part + (i_part + n) * between, mask=m_n[:, None] & m_d, other=0.0)
    p_x = x.data + row.to(tl.int64) * x.row + i_kv.to(tl.int64) * x.head + o_n[:, None] * x.row + o_d[None, :]
    m_x = (o_n < rows)[:, None] & m_d
    tl.store(p_x, tl.load(p_x, mask=m_x, other=0.0) + b_sum, mask=m_x)


def joins(dk: Tensor, dv: Tensor, tiles: int, bn: int) -> Launch:
    """The launch for gradients [keys, heads, dim] of which so many key tiles of ``bn`` keys are cut."""
    dims = [n for x in (dk, dv) for n in (x.shape[2], triton.next_power_of_2(x.shape[2]))]
    programs = tiles * bn // ROWS.value * dk.shape[1]
    return Launch(add_parts, programs, (*dims, bn), {"num_warps": 4, "enable_fp_fusion": True})
