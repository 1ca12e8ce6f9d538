"""Loads, products, scores and dropout of one tile, shared by forward and backward.

Prefixes of names: ``i_`` an index, ``o_`` offsets, ``p_`` pointers, ``b_`` a block of values, ``m_`` a mask. A head dim
that is not a power of two is cut into two pieces whose products are added, such as 192 = 128 + 64, instead of padded to
256. Scores and lse are in base 2, because the hardware has ``exp2``. `seqpar.kernels.triton.arguments` has the bundles
of arguments.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_tile(
    x, x_tiles, first, i_head, o_row, m_row, MASKED: tl.constexpr, TMA: tl.constexpr,
    START: tl.constexpr, WIDTH: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Columns [START, START + WIDTH) of a tile of rows of one head.

    Columns from LIMIT on are zero. With pointers, rows outside m_row are zero if MASKED; with TMA, through the
    descriptor x_tiles, only rows past the end of the tensor are.
    """
    if TMA:
        b_x = tl.reshape(x_tiles.load([first, i_head, START]), (o_row.shape[0], WIDTH))
    else:
        o_col = START + tl.arange(0, WIDTH)
        p_tile = x.data + first.to(tl.int64) * x.row + i_head.to(tl.int64) * x.head
        p_x = p_tile + o_row[:, None] * x.row + o_col[None, :]
        m_col = (o_col < LIMIT)[None, :]
        if START + WIDTH > LIMIT:
            if MASKED:
                b_x = tl.load(p_x, mask=m_row[:, None] & m_col, other=0.0)
            else:
                b_x = tl.load(p_x, mask=m_col, other=0.0)
        elif MASKED:
            b_x = tl.load(p_x, mask=m_row[:, None], other=0.0)
        else:
            b_x = tl.load(p_x)
    return b_x


@triton.jit
def store_tile(
    p_tile, b_x, o_row, stride, m_row, m_add, ADD: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    """Write a block to columns [START, START + WIDTH) of some rows; ADD adds the present values of rows in m_add."""
    o_col = START + tl.arange(0, WIDTH)
    p_x = p_tile + o_row[:, None] * stride + o_col[None, :]
    m_col = (o_col < LIMIT)[None, :]
    if ADD:
        b_x += tl.load(p_x, mask=m_add[:, None] & m_col, other=0.0)
    tl.store(p_x, b_x.to(p_tile.dtype.element_ty), mask=m_row[:, None] & m_col)


@triton.jit
def head_tile(p_table, tiles, group):
    """The table row, query head and key head of this program.

    Consecutive programs compute tiles of the same key head, so that its keys stay in the cache.
    """
    i_work = tl.program_id(0)
    i_kv = i_work // (tiles * group)
    i_work -= i_kv * (tiles * group)
    return p_table + i_work // group * 8, i_kv * group + i_work % group, i_kv


@triton.jit
def along_stretches(visit, p_next, end, shift):
    """A query tile's walk along stretches of key tiles, before a visit: the key tile is the visit plus the shift.

    p_next: the visits with which the next stretches end, each followed by its shift. One loop makes all visits, since a
    loop for each stretch would drain the pipeline of loads. A stretch is loaded by the visit before it, or the pipeline
    would be half as deep: Triton shares its stages among loads that need each other.
    """
    m_ends = visit == end
    shift = tl.load(p_next + 1, mask=m_ends, other=shift)
    end = tl.load(p_next, mask=m_ends, other=end)
    return p_next + tl.where(m_ends, 2, 0), end, shift


@triton.jit
def load_until(bounds, first, o_n, m_n, S: tl.constexpr):
    """Where the keys of a tile end; nothing that is read if no key does."""
    b_until = o_n
    if S.UNTIL:
        b_until = tl.load(bounds.until + first + o_n, mask=m_n, other=0)
    return b_until


@triton.jit
def seen(b_at, b_until, b_pos, b_lo, b_hi, S: tl.constexpr):
    """The pairs that are seen, as a mask; keys and queries lie along different dims."""
    m_seen = (b_at >= b_lo) & (b_at < b_hi)
    if S.UNTIL:
        m_seen &= b_pos < b_until
    return m_seen


@triton.jit
def product(b_a, b_b, S: tl.constexpr):
    """``a @ b`` in float32."""
    if S.UPCAST:
        b_a, b_b = b_a.to(tl.float32), b_b.to(tl.float32)
    return tl.dot(b_a, b_b, input_precision=S.PRECISION)


@triton.jit
def add_product(b_sum, b_a, b_b, S: tl.constexpr):
    """``sum + a @ b`` in float32."""
    if S.UPCAST:
        b_a, b_b = b_a.to(tl.float32), b_b.to(tl.float32)
    return tl.dot(b_a, b_b, b_sum, input_precision=S.PRECISION)


@triton.jit
def scored(b_s, score, i_h, b_pos_a, b_pos_b, S: tl.constexpr):
    """Scores in base 2 from products, and the tanh of the softcap; without a softcap the products themselves.

    score.pre: the scale divided by the cap. score.post: log2(e) times the cap, or times the scale without a softcap.
    """
    b_tanh = b_s
    if S.SOFTCAP:
        b_e = tl.exp2(tl.abs(b_s) * (-2.0 * LOG2E * tl.abs(score.pre)))
        b_tanh = (1.0 - b_e) / (1.0 + b_e)
        b_tanh = tl.where((b_s < 0) != (score.pre < 0), -b_tanh, b_tanh)
    b_s = b_tanh * score.post
    if S.ALIBI:
        slope = tl.load(score.slopes + i_h) * LOG2E
        b_s -= slope * tl.abs(b_pos_a[:, None] - b_pos_b[None, :]).to(tl.float32)
    return b_s, b_tanh


@triton.jit
def row_lse(lse, lse_head, i_h, row, o_m, m_m):
    """lse of rows in base 2. Rows that saw no key have +inf, which makes all their probabilities zero."""
    b_lse = tl.load(lse + i_h.to(tl.int64) * lse_head + row + o_m, mask=m_m, other=float("inf"))
    return tl.where(b_lse == -float("inf"), float("inf"), b_lse * LOG2E)


@triton.jit
def words(b_pos, i_h, score, seed, SIDE: tl.constexpr):
    """Random words of 32 bits for positions and a head: word 0 of Philox4x32-10, see `seqpar.kernels.dropout`."""
    b_zero = b_pos * 0
    b_word, _, _, _ = tl.philox(seed, b_pos, b_zero + score.first_head + i_h, b_zero + SIDE, b_zero)
    return b_word.to(tl.uint32, bitcast=True)


@triton.jit
def kept(b_a, b_b, score):
    """The pairs that dropout keeps, as a mask, from the words of their queries and keys."""
    b_x = b_a[:, None] ^ b_b[None, :]
    b_x ^= b_x >> 16
    b_x *= 0x7FEB352D
    b_x ^= b_x >> 15
    b_x *= 0x846CA68B
    b_x ^= b_x >> 16
    b_least = tl.full([1, 1], 0, tl.int32) + score.threshold  # which may be a constant of the compiled kernel
    return b_x >= b_least.to(tl.uint32, bitcast=True)
