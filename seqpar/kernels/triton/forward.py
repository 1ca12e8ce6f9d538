"""The accumulating forward: one program for a tile of queries of one head, over the key tiles that it visits.

The running maximum and sum start from nothing; the normalised sums of the keys seen before are merged once, at the
end, so that the number of launches hardly shows in the result. Source: Dao 2023, FlashAttention-2, section 3.1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from seqpar.kernels.triton.tile import (
    LN2, LOG2E, add_product, add_rows, dropout_words, kept, load_rows, load_tile, product, scored,
)  # fmt: skip


@triton.jit
def forward(
    Q, K, K2, V, V2_, Pos, Lo, Hi, KeyPos, Table, Slopes, Prior, Target, Lse,
    pre, post, threshold, keep_scale, seed, first_head, tiles, group, keys,
    q_row, q_head, k_row, k_head, v_row, v_head, prior_row, prior_head, target_row, target_head, lse_head,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, V_: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, TMA: tl.constexpr, FIRST: tl.constexpr, IN_PLACE: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, DROPOUT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add a buffer of keys. Prior: sums of the keys before, unless FIRST. Target: where the new ones go, in its dtype,
    or Prior itself if IN_PLACE. Table [tiles, 8]: first row, row past the last, begin, full_begin, full_end, end."""
    # Tiles of one key head follow each other, so that its keys stay in the cache.
    i_work = tl.program_id(0)
    i_kv = i_work // (tiles * group)
    i_work -= i_kv * (tiles * group)
    i_tile = i_work // group
    i_h = i_kv * group + i_work % group
    p_table = Table + i_tile * 8
    row, stop = tl.load(p_table), tl.load(p_table + 1)
    begin, full_begin, full_end, end = (
        tl.load(p_table + 2), tl.load(p_table + 3), tl.load(p_table + 4), tl.load(p_table + 5),
    )  # fmt: skip
    if (not FIRST) and IN_PLACE and begin == end:
        return

    o_m = tl.arange(0, BM)
    m_m = o_m < stop - row
    row_64, h_64 = row.to(tl.int64), i_h.to(tl.int64)
    Q += row_64 * q_row + h_64 * q_head
    b_q1 = load_rows(Q, o_m, q_row, m_m, True, 0, D1, D)
    b_q2 = b_q1
    if D2:
        b_q2 = load_rows(Q, o_m, q_row, m_m, True, D1, D2, D)
    b_pos = o_m
    slope = 0.0
    if ALIBI or DROPOUT:
        b_pos = tl.load(Pos + row + o_m, mask=m_m, other=0)
    if ALIBI:
        slope = tl.load(Slopes + i_h) * LOG2E
    b_a = o_m.to(tl.uint32)
    if DROPOUT:
        b_a = dropout_words(b_pos, first_head + i_h, seed, 0)
    b_lo = tl.load(Lo + row + o_m, mask=m_m, other=0)
    b_hi = tl.load(Hi + row + o_m, mask=m_m, other=0)

    b_max = tl.full([BM], -float("inf"), tl.float32)
    b_sum = tl.zeros([BM], tl.float32)
    b_acc1 = tl.zeros([BM, V1], tl.float32)
    b_acc2 = tl.zeros([BM, V2 if V2 else 1], tl.float32)
    for j in range(full_begin, full_end):
        b_max, b_sum, b_acc1, b_acc2 = _attend(
            j, i_kv, K, K2, V, V2_, KeyPos, b_q1, b_q2, b_pos, b_a, b_lo, b_hi, b_max, b_sum, b_acc1, b_acc2, pre, post, slope,
            threshold, seed, first_head + i_h, keys, k_row, k_head, v_row, v_head, False, D, D1, D2, V_, V1, V2, BN, TMA,
            SOFTCAP, ALIBI, DROPOUT, UPCAST, PRECISION,
        )  # fmt: skip
    for t in range(begin, end - (full_end - full_begin)):
        j = tl.where(t < full_begin, t, t + full_end - full_begin)
        b_max, b_sum, b_acc1, b_acc2 = _attend(
            j, i_kv, K, K2, V, V2_, KeyPos, b_q1, b_q2, b_pos, b_a, b_lo, b_hi, b_max, b_sum, b_acc1, b_acc2, pre, post, slope,
            threshold, seed, first_head + i_h, keys, k_row, k_head, v_row, v_head, True, D, D1, D2, V_, V1, V2, BN, TMA,
            SOFTCAP, ALIBI, DROPOUT, UPCAST, PRECISION,
        )  # fmt: skip

    m_seen = b_sum != 0.0
    b_part = 1.0 / tl.where(m_seen, b_sum, 1.0)
    b_lse = tl.where(m_seen, b_max + tl.log2(tl.where(m_seen, b_sum, 1.0)), -float("inf"))
    b_keep = tl.zeros([BM], tl.float32)
    p_lse = Lse + h_64 * lse_head + row + o_m
    m_write = m_m
    if not FIRST:
        b_old = tl.load(p_lse, mask=m_m, other=0.0) * LOG2E
        b_top = tl.maximum(b_old, b_lse)
        b_base = tl.where(b_top == -float("inf"), 0.0, b_top)
        b_keep, b_new = tl.exp2(b_old - b_base), tl.exp2(b_lse - b_base)
        b_total = b_keep + b_new
        b_safe = tl.where(b_total == 0.0, 1.0, b_total)
        b_part *= b_new / b_safe
        b_keep /= b_safe
        b_lse = tl.where(b_total == 0.0, -float("inf"), b_base + tl.log2(b_safe))
        tl.store(p_lse, b_lse * LN2, mask=m_m & m_seen)
        if IN_PLACE:
            m_write = m_m & m_seen
    else:
        tl.store(p_lse, b_lse * LN2, mask=m_m)
    if DROPOUT:
        b_part *= keep_scale
    Prior += row_64 * prior_row + h_64 * prior_head
    Target += row_64 * target_row + h_64 * target_head
    b_out = b_acc1 * b_part[:, None]
    if not FIRST:
        b_out += b_keep[:, None] * load_rows(Prior, o_m, prior_row, m_m, True, 0, V1, V_)
    add_rows(Target, b_out, o_m, target_row, m_write, False, 0, V1, V_)
    if V2:
        b_out = b_acc2 * b_part[:, None]
        if not FIRST:
            b_out += b_keep[:, None] * load_rows(Prior, o_m, prior_row, m_m, True, V1, V2, V_)
        add_rows(Target, b_out, o_m, target_row, m_write, False, V1, V2, V_)


@triton.jit
def _attend(
    j, i_kv, K, K2, V, V2_, KeyPos, b_q1, b_q2, b_pos, b_a, b_lo, b_hi, b_max, b_sum, b_acc1, b_acc2,
    pre, post, slope, threshold, seed, head, keys, k_row, k_head, v_row, v_head,
    MASKED: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, V_: tl.constexpr, V1: tl.constexpr,
    V2: tl.constexpr, BN: tl.constexpr, TMA: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    DROPOUT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Running maximum, sum and unnormalised output with one more key tile. MASKED: some pair of it is not seen."""
    first = j * BN
    o_n = tl.arange(0, BN)
    m_n = o_n < keys - first
    b_k = load_tile(K, first, i_kv, o_n, k_row, k_head, m_n, MASKED, TMA, 0, D1, D)
    b_s = product(b_q1, tl.trans(b_k), UPCAST, PRECISION)
    if D2:
        b_k = load_tile(K2, first, i_kv, o_n, k_row, k_head, m_n, MASKED, TMA, D1, D2, D)
        b_s = add_product(b_s, b_q2, tl.trans(b_k), UPCAST, PRECISION)
    b_at = o_n
    if MASKED:
        b_at = tl.load(KeyPos + first + o_n, mask=m_n, other=0x7FFFFFFF)  # no bound lies beyond it
    elif ALIBI or DROPOUT:
        b_at = tl.load(KeyPos + first + o_n)
    b_s, _ = scored(b_s, pre, post, slope, b_pos, b_at, SOFTCAP, ALIBI)
    if MASKED:
        b_s = tl.where((b_at[None, :] >= b_lo[:, None]) & (b_at[None, :] < b_hi[:, None]), b_s, -float("inf"))
    b_new = tl.maximum(b_max, tl.max(b_s, 1))
    # Until a row sees its first key its maximum is -inf, and -inf less -inf is NaN.
    b_base = tl.where(b_new == -float("inf"), 0.0, b_new)
    b_p = tl.exp2(b_s - b_base[:, None])
    b_shrink = tl.exp2(b_max - b_base)
    b_sum = b_sum * b_shrink + tl.sum(b_p, 1)
    if DROPOUT:
        b_p = tl.where(kept(b_a, dropout_words(b_at, head, seed, 1), threshold), b_p, 0.0)
    b_v = load_tile(V, first, i_kv, o_n, v_row, v_head, m_n, MASKED, TMA, 0, V1, V_)
    b_p = b_p.to(b_v.dtype)
    b_acc1 = add_product(b_acc1 * b_shrink[:, None], b_p, b_v, UPCAST, PRECISION)
    if V2:
        b_v = load_tile(V2_, first, i_kv, o_n, v_row, v_head, m_n, MASKED, TMA, V1, V2, V_)
        b_acc2 = add_product(b_acc2 * b_shrink[:, None], b_p, b_v, UPCAST, PRECISION)
    return b_new, b_sum, b_acc1, b_acc2
