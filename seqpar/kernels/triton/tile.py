"""What forward and backward do alike on one tile of scores.

Prefixes: ``i_`` an index, ``o_`` offsets, ``p_`` pointers, ``b_`` a block of values, ``m_`` a mask. A head dim that is no
power of two is cut into two pieces, as 192 = 128 + 64, whose products are added, rather than padded to the next power.
Scores are in units of log 2, since ``exp2`` is what the hardware has.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_tile(
    P, first, i_head, o_row, row, head, m_row,
    MASKED: tl.constexpr, TMA: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Columns [START, START + WIDTH) of a tile of rows of a head: through a descriptor, or by pointers."""
    if TMA:
        b_x = tl.reshape(P.load([first, i_head, START]), (o_row.shape[0], WIDTH))
    else:
        p_head = P + first.to(tl.int64) * row + i_head.to(tl.int64) * head
        b_x = load_rows(p_head, o_row, row, m_row, MASKED, START, WIDTH, LIMIT)
    return b_x


@triton.jit
def load_rows(
    P, o_row, stride, m_row, MASKED: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr, LIMIT: tl.constexpr
):
    """Columns [START, START + WIDTH) of some rows, zero beyond the LIMIT columns that there are and in masked rows."""
    o_col = START + tl.arange(0, WIDTH)
    p_row = P + o_row[:, None] * stride + o_col[None, :]
    if START + WIDTH > LIMIT:
        m_col = (o_col < LIMIT)[None, :]
        if MASKED:
            return tl.load(p_row, mask=m_row[:, None] & m_col, other=0.0)
        return tl.load(p_row, mask=m_col, other=0.0)
    if MASKED:
        return tl.load(p_row, mask=m_row[:, None], other=0.0)
    return tl.load(p_row)


@triton.jit
def add_rows(
    P, b_x, o_row, stride, m_row, ADD: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr, LIMIT: tl.constexpr
):
    """Write a block to columns [START, START + WIDTH) of some rows, added to what is there if ADD."""
    o_col = START + tl.arange(0, WIDTH)
    p_row = P + o_row[:, None] * stride + o_col[None, :]
    mask = m_row[:, None] & (o_col < LIMIT)[None, :]
    if ADD:
        b_x += tl.load(p_row, mask=mask, other=0.0)
    tl.store(p_row, b_x.to(P.dtype.element_ty), mask=mask)


@triton.jit
def product(b_a, b_b, UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """``a @ b`` in float32. UPCAST: for Triton's interpreter, whose bf16 products are wrong."""
    if UPCAST:
        return tl.dot(b_a.to(tl.float32), b_b.to(tl.float32), input_precision=PRECISION)
    return tl.dot(b_a, b_b, input_precision=PRECISION)


@triton.jit
def add_product(b_sum, b_a, b_b, UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """``sum + a @ b`` in float32."""
    if UPCAST:
        return tl.dot(b_a.to(tl.float32), b_b.to(tl.float32), b_sum, input_precision=PRECISION)
    return tl.dot(b_a, b_b, b_sum, input_precision=PRECISION)


@triton.jit
def scored(b_s, pre, post, slope, b_pos_a, b_pos_b, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr):
    """Scores in units of log 2 from products, and the tanh of the softcap (the products themselves without one).

    post: log2(e) times the scale, or with a softcap times the cap; pre: the scale divided by the cap.
    """
    b_tanh = b_s
    if SOFTCAP:
        b_e = tl.exp2(tl.abs(b_s) * (-2.0 * LOG2E * tl.abs(pre)))
        b_tanh = (1.0 - b_e) / (1.0 + b_e)
        b_tanh = tl.where((b_s < 0) != (pre < 0), -b_tanh, b_tanh)
    b_s = b_tanh * post
    if ALIBI:
        b_s -= slope * tl.abs(b_pos_a[:, None] - b_pos_b[None, :]).to(tl.float32)
    return b_s, b_tanh


@triton.jit
def dropout_words(b_pos, head, seed, SIDE: tl.constexpr):
    """Word 0 of Philox4x32-10 of positions and a head; see `seqpar.kernels.dropout`."""
    b_zero = b_pos * 0
    b_word, _, _, _ = tl.philox(seed, b_pos, b_zero + head, b_zero + SIDE, b_zero)
    return b_word.to(tl.uint32, bitcast=True)


@triton.jit
def kept(b_a, b_b, threshold):
    """Which pairs dropout keeps, of the words of both sides."""
    b_x = b_a[:, None] ^ b_b[None, :]
    b_x ^= b_x >> 16
    b_x *= 0x7FEB352D
    b_x ^= b_x >> 15
    b_x *= 0x846CA68B
    b_x ^= b_x >> 16
    return b_x >= threshold.to(tl.uint32, bitcast=True)
