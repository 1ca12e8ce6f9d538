"""The deterministic backward: one kernel for dq, by query tiles, and one for dk and dv, by key tiles. No atomics: every
sum has one owner and one order.

With few key tiles the work of each is split over query heads and rows into parts that are joined in their order.
Source: Dao 2023, FlashAttention-2, section 3.1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from seqpar.kernels.triton.tile import (
    LOG2E, add_product, add_rows, dropout_words, kept, load_rows, load_tile, product, scored,
)  # fmt: skip


@triton.jit
def dq(
    Q, K, K2, V, V2_, Dout, Lse, Delta, Pos, Lo, Hi, KeyPos, Table, Slopes, Dq,
    pre, post, scale, threshold, keep_scale, seed, first_head, tiles, group, keys,
    q_row, q_head, k_row, k_head, v_row, v_head, dout_row, dout_head, lse_head, delta_head, dq_row, dq_head,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, V_: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, TMA: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, DROPOUT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to dq of a query tile. Table as forward's."""
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
    if begin == end:
        return

    o_m = tl.arange(0, BM)
    m_m = o_m < stop - row
    row_64, h_64 = row.to(tl.int64), i_h.to(tl.int64)
    Q += row_64 * q_row + h_64 * q_head
    Dout += row_64 * dout_row + h_64 * dout_head
    Dq += row_64 * dq_row + h_64 * dq_head
    b_q1 = load_rows(Q, o_m, q_row, m_m, True, 0, D1, D)
    b_g1 = load_rows(Dout, o_m, dout_row, m_m, True, 0, V1, V_)
    b_q2, b_g2 = b_q1, b_g1
    if D2:
        b_q2 = load_rows(Q, o_m, q_row, m_m, True, D1, D2, D)
    if V2:
        b_g2 = load_rows(Dout, o_m, dout_row, m_m, True, V1, V2, V_)
    b_lse = row_lse(Lse + h_64 * lse_head + row + o_m, m_m)
    b_delta = tl.load(Delta + h_64 * delta_head + row + o_m, mask=m_m, other=0.0)
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

    b_dq1 = tl.zeros([BM, D1], tl.float32)
    b_dq2 = tl.zeros([BM, D2 if D2 else 1], tl.float32)
    for j in range(full_begin, full_end):
        b_dq1, b_dq2 = _dq_tile(
            j, i_kv, K, K2, V, V2_, KeyPos, b_q1, b_q2, b_g1, b_g2, b_lse, b_delta, b_pos, b_a, b_lo, b_hi, b_dq1, b_dq2, pre, post,
            slope, threshold, keep_scale, seed, first_head + i_h, keys, k_row, k_head, v_row, v_head, False, D, D1, D2,
            V_, V1, V2, BN, TMA, SOFTCAP, ALIBI, DROPOUT, UPCAST, PRECISION,
        )  # fmt: skip
    for t in range(begin, end - (full_end - full_begin)):
        j = tl.where(t < full_begin, t, t + full_end - full_begin)
        b_dq1, b_dq2 = _dq_tile(
            j, i_kv, K, K2, V, V2_, KeyPos, b_q1, b_q2, b_g1, b_g2, b_lse, b_delta, b_pos, b_a, b_lo, b_hi, b_dq1, b_dq2, pre, post,
            slope, threshold, keep_scale, seed, first_head + i_h, keys, k_row, k_head, v_row, v_head, True, D, D1, D2,
            V_, V1, V2, BN, TMA, SOFTCAP, ALIBI, DROPOUT, UPCAST, PRECISION,
        )  # fmt: skip
    add_rows(Dq, b_dq1 * scale, o_m, dq_row, m_m, True, 0, D1, D)
    if D2:
        add_rows(Dq, b_dq2 * scale, o_m, dq_row, m_m, True, D1, D2, D)


@triton.jit
def row_lse(p_lse, m_row):
    """lse of rows in units of log 2, and +inf, which makes every probability zero, for rows that have none."""
    b_lse = tl.load(p_lse, mask=m_row, other=float("inf"))
    return tl.where(b_lse == -float("inf"), float("inf"), b_lse * LOG2E)


@triton.jit
def _dq_tile(
    j, i_kv, K, K2, V, V2_, KeyPos, b_q1, b_q2, b_g1, b_g2, b_lse, b_delta, b_pos, b_a, b_lo, b_hi, b_dq1, b_dq2,
    pre, post, slope, threshold, keep_scale, seed, head, keys, k_row, k_head, v_row, v_head,
    MASKED: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, V_: tl.constexpr, V1: tl.constexpr,
    V2: tl.constexpr, BN: tl.constexpr, TMA: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    DROPOUT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, still to be scaled, with one more key tile."""
    first = j * BN
    o_n = tl.arange(0, BN)
    m_n = o_n < keys - first
    b_k1 = load_tile(K, first, i_kv, o_n, k_row, k_head, m_n, MASKED, TMA, 0, D1, D)
    b_k2 = b_k1
    b_s = product(b_q1, tl.trans(b_k1), UPCAST, PRECISION)
    b_v1 = load_tile(V, first, i_kv, o_n, v_row, v_head, m_n, MASKED, TMA, 0, V1, V_)
    b_dp = product(b_g1, tl.trans(b_v1), UPCAST, PRECISION)
    if D2:
        b_k2 = load_tile(K2, first, i_kv, o_n, k_row, k_head, m_n, MASKED, TMA, D1, D2, D)
        b_s = add_product(b_s, b_q2, tl.trans(b_k2), UPCAST, PRECISION)
    if V2:
        b_v2 = load_tile(V2_, first, i_kv, o_n, v_row, v_head, m_n, MASKED, TMA, V1, V2, V_)
        b_dp = add_product(b_dp, b_g2, tl.trans(b_v2), UPCAST, PRECISION)
    b_at = o_n
    if MASKED:
        b_at = tl.load(KeyPos + first + o_n, mask=m_n, other=0x7FFFFFFF)  # no bound lies beyond it
    elif ALIBI or DROPOUT:
        b_at = tl.load(KeyPos + first + o_n)
    b_s, b_tanh = scored(b_s, pre, post, slope, b_pos, b_at, SOFTCAP, ALIBI)
    b_p = tl.exp2(b_s - b_lse[:, None])
    if DROPOUT:
        b_dp = tl.where(kept(b_a, dropout_words(b_at, head, seed, 1), threshold), b_dp * keep_scale, 0.0)
    b_ds = b_p * (b_dp - b_delta[:, None])
    if SOFTCAP:
        b_ds *= 1.0 - b_tanh * b_tanh
    if MASKED:
        b_ds = tl.where((b_at[None, :] >= b_lo[:, None]) & (b_at[None, :] < b_hi[:, None]), b_ds, 0.0)
    b_ds = b_ds.to(b_k1.dtype)
    b_dq1 = add_product(b_dq1, b_ds, b_k1, UPCAST, PRECISION)
    if D2:
        b_dq2 = add_product(b_dq2, b_ds, b_k2, UPCAST, PRECISION)
    return b_dq1, b_dq2


@triton.jit
def dkdv(
    Q, Q2, K, V, Dout, Dout2, Lse, Delta, Pos, Lo, Hi, KeyPos, Table, Tiles, Slopes, Dk, Dv,
    pre, post, scale, threshold, keep_scale, seed, first_head, key_tiles, parts, group, rows, keys,
    q_row, q_head, k_row, k_head, v_row, v_head, dout_row, dout_head, lse_head, delta_head,
    dk_part, dk_row, dk_head, dv_part, dv_row, dv_head,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, V_: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, TMA: tl.constexpr, UNIFORM: tl.constexpr, EXACT: tl.constexpr, ADD: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Part of dk and dv of a key tile; with ADD there is one part, added to what is there.

    Table [key tiles, 8]: key tile, q_begin, q_full_begin, q_full_end, q_end. Tiles [query tiles, 4]: first row, row
    past the last, begin, end; read where tiles are not UNIFORM or the intervals of the table not EXACT.
    """
    i_work = tl.program_id(0)
    i_kv = i_work // (key_tiles * parts)
    i_work -= i_kv * (key_tiles * parts)
    p_table = Table + (i_work // parts) * 8
    i_part = i_work % parts
    j, begin, full_begin, full_end, end = (
        tl.load(p_table), tl.load(p_table + 1), tl.load(p_table + 2), tl.load(p_table + 3), tl.load(p_table + 4),
    )  # fmt: skip
    if ADD and begin == end:
        return

    first = j * BN
    o_n = tl.arange(0, BN)
    m_n = o_n < keys - first
    first_64, kv_64 = first.to(tl.int64), i_kv.to(tl.int64)
    K += first_64 * k_row + kv_64 * k_head
    V += first_64 * v_row + kv_64 * v_head
    Dk += i_part.to(tl.int64) * dk_part + first_64 * dk_row + kv_64 * dk_head
    Dv += i_part.to(tl.int64) * dv_part + first_64 * dv_row + kv_64 * dv_head
    b_k1 = load_rows(K, o_n, k_row, m_n, True, 0, D1, D)
    b_v1 = load_rows(V, o_n, v_row, m_n, True, 0, V1, V_)
    b_k2, b_v2 = b_k1, b_v1
    if D2:
        b_k2 = load_rows(K, o_n, k_row, m_n, True, D1, D2, D)
    if V2:
        b_v2 = load_rows(V, o_n, v_row, m_n, True, V1, V2, V_)
    b_at = tl.load(KeyPos + first + o_n, mask=m_n, other=0x7FFFFFFF)  # no bound lies beyond it

    b_dk1 = tl.zeros([BN, D1], tl.float32)
    b_dk2 = tl.zeros([BN, D2 if D2 else 1], tl.float32)
    b_dv1 = tl.zeros([BN, V1], tl.float32)
    b_dv2 = tl.zeros([BN, V2 if V2 else 1], tl.float32)
    # The query tiles of all heads of the group are one sequence, of which this part takes its share.
    full = full_end - full_begin
    work = full * group
    for t in range(work * i_part // parts, work * (i_part + 1) // parts):
        b_dk1, b_dk2, b_dv1, b_dv2 = _dkdv_tile(
            full_begin + t % full, j, i_kv * group + t // full, Q, Q2, Dout, Dout2, Lse, Delta, Pos, Lo, Hi, Tiles, Slopes,
            b_k1, b_k2, b_v1, b_v2, b_at, b_dk1, b_dk2, b_dv1, b_dv2, pre, post, threshold, keep_scale, seed,
            first_head, rows, q_row, q_head, dout_row, dout_head, lse_head, delta_head, False, D, D1, D2, V_, V1, V2,
            BM, TMA, UNIFORM, SOFTCAP, ALIBI, DROPOUT, UPCAST, PRECISION,
        )  # fmt: skip
    partial = end - begin - full
    work = partial * group
    for t in range(work * i_part // parts, work * (i_part + 1) // parts):
        i = begin + t % partial
        i = tl.where(i < full_begin, i, i + full)
        visits = True
        if not EXACT:
            visits = (tl.load(Tiles + i * 4 + 2) <= j) & (j < tl.load(Tiles + i * 4 + 3))
        if visits:
            b_dk1, b_dk2, b_dv1, b_dv2 = _dkdv_tile(
                i, j, i_kv * group + t // partial, Q, Q2, Dout, Dout2, Lse, Delta, Pos, Lo, Hi, Tiles, Slopes, b_k1, b_k2,
                b_v1, b_v2, b_at, b_dk1, b_dk2, b_dv1, b_dv2, pre, post, threshold, keep_scale, seed, first_head, rows,
                q_row, q_head, dout_row, dout_head, lse_head, delta_head, True, D, D1, D2, V_, V1, V2, BM, TMA, UNIFORM,
                SOFTCAP, ALIBI, DROPOUT, UPCAST, PRECISION,
            )  # fmt: skip
    add_rows(Dk, b_dk1 * scale, o_n, dk_row, m_n, ADD, 0, D1, D)
    add_rows(Dv, b_dv1, o_n, dv_row, m_n, ADD, 0, V1, V_)
    if D2:
        add_rows(Dk, b_dk2 * scale, o_n, dk_row, m_n, ADD, D1, D2, D)
    if V2:
        add_rows(Dv, b_dv2, o_n, dv_row, m_n, ADD, V1, V2, V_)


@triton.jit
def _dkdv_tile(
    i, j, i_h, Q, Q2, Dout, Dout2, Lse, Delta, Pos, Lo, Hi, Tiles, Slopes, b_k1, b_k2, b_v1, b_v2, b_at,
    b_dk1, b_dk2, b_dv1, b_dv2, pre, post, threshold, keep_scale, seed, first_head, rows,
    q_row, q_head, dout_row, dout_head, lse_head, delta_head,
    MASKED: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, V_: tl.constexpr, V1: tl.constexpr,
    V2: tl.constexpr, BM: tl.constexpr, TMA: tl.constexpr, UNIFORM: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    DROPOUT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk, still to be scaled, and dv with one more query tile. Scores are transposed here: keys down, queries across."""
    if UNIFORM:
        row = i * BM
        stop = tl.minimum(row + BM, rows)
    else:
        row, stop = tl.load(Tiles + i * 4), tl.load(Tiles + i * 4 + 1)
    SHORT: tl.constexpr = MASKED or not UNIFORM  # whether the tile may have fewer than BM rows
    o_m = tl.arange(0, BM)
    m_m = o_m < stop - row
    h_64 = i_h.to(tl.int64)
    b_q1 = load_tile(Q, row, i_h, o_m, q_row, q_head, m_m, SHORT, TMA, 0, D1, D)
    b_g1 = load_tile(Dout, row, i_h, o_m, dout_row, dout_head, m_m, SHORT, TMA, 0, V1, V_)
    b_q2, b_g2 = b_q1, b_g1
    b_s = product(b_k1, tl.trans(b_q1), UPCAST, PRECISION)
    b_dp = product(b_v1, tl.trans(b_g1), UPCAST, PRECISION)
    if D2:
        b_q2 = load_tile(Q2, row, i_h, o_m, q_row, q_head, m_m, SHORT, TMA, D1, D2, D)
        b_s = add_product(b_s, b_k2, tl.trans(b_q2), UPCAST, PRECISION)
    if V2:
        b_g2 = load_tile(Dout2, row, i_h, o_m, dout_row, dout_head, m_m, SHORT, TMA, V1, V2, V_)
        b_dp = add_product(b_dp, b_v2, tl.trans(b_g2), UPCAST, PRECISION)
    b_lse = row_lse(Lse + h_64 * lse_head + row + o_m, m_m)
    b_delta = tl.load(Delta + h_64 * delta_head + row + o_m, mask=m_m, other=0.0)
    b_pos = o_m
    slope = 0.0
    if ALIBI or DROPOUT:
        b_pos = tl.load(Pos + row + o_m, mask=m_m, other=0)
    if ALIBI:
        slope = tl.load(Slopes + i_h) * LOG2E
    b_s, b_tanh = scored(b_s, pre, post, slope, b_at, b_pos, SOFTCAP, ALIBI)
    b_p = tl.exp2(b_s - b_lse[None, :])
    if MASKED:
        b_lo = tl.load(Lo + row + o_m, mask=m_m, other=0)
        b_hi = tl.load(Hi + row + o_m, mask=m_m, other=0)
        b_p = tl.where((b_at[:, None] >= b_lo[None, :]) & (b_at[:, None] < b_hi[None, :]), b_p, 0.0)
    b_w = b_p
    if DROPOUT:
        b_b = dropout_words(b_at, first_head + i_h, seed, 1)
        m_kept = kept(b_b, dropout_words(b_pos, first_head + i_h, seed, 0), threshold)
        b_w = tl.where(m_kept, b_p * keep_scale, 0.0)
        b_dp = tl.where(m_kept, b_dp * keep_scale, 0.0)
    b_w = b_w.to(b_g1.dtype)
    b_dv1 = add_product(b_dv1, b_w, b_g1, UPCAST, PRECISION)
    b_ds = b_p * (b_dp - b_delta[None, :])
    if SOFTCAP:
        b_ds *= 1.0 - b_tanh * b_tanh
    b_ds = b_ds.to(b_q1.dtype)
    b_dk1 = add_product(b_dk1, b_ds, b_q1, UPCAST, PRECISION)
    if D2:
        b_dk2 = add_product(b_dk2, b_ds, b_q2, UPCAST, PRECISION)
    if V2:
        b_dv2 = add_product(b_dv2, b_w, b_g2, UPCAST, PRECISION)
    return b_dk1, b_dk2, b_dv1, b_dv2
