"""The deterministic backward: one kernel sums dq by query tiles, the other dk and dv by key tiles.

There are no atomics: every sum has one program and one order. A key tile with more work than its share is cut into
parts, whose sums are added in their order afterwards. Source: Dao 2023, FlashAttention-2, section 3.1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from seqpar.kernels.triton.tile import (
    add_product,
    along_stretches,
    head_tile,
    kept,
    load_tile,
    load_until,
    product,
    row_lse,
    scored,
    seen,
    store_tile,
    words,
)


# Counts and strides of lse and delta change with every batch and the seed with every layer, and none of them is worth
# a binary of its own.
@triton.jit(do_not_specialize=["lse", "lse_head", "delta", "delta_head", "seed", "tiles", "keys"])
def dq(
    q, k, k1, k2, v, v1, v2, dout, lse, lse_head, delta, delta_head, bounds, table, grad, score, seed, tiles, group,
    keys, S: tl.constexpr,
):  # fmt: skip
    """Add the gradient from a buffer of keys to dq of a query tile. table: as in forward."""
    p_table, i_h, i_kv = head_tile(table, tiles, group)
    row, stop, begin = tl.load(p_table), tl.load(p_table + 1), tl.load(p_table + 2)
    full_begin, full_end, end = tl.load(p_table + 3), tl.load(p_table + 4), tl.load(p_table + 5)
    if begin == end:
        return

    o_m = tl.arange(0, S.BM)
    m_m = o_m < stop - row
    b_q1 = load_tile(q, q.data, row, i_h, o_m, m_m, True, False, 0, S.D1, S.D)
    b_g1 = load_tile(dout, dout.data, row, i_h, o_m, m_m, True, False, 0, S.V1, S.V)
    b_q2, b_g2 = b_q1, b_g1
    if S.D2:
        b_q2 = load_tile(q, q.data, row, i_h, o_m, m_m, True, False, S.D1, S.D2, S.D)
    if S.V2:
        b_g2 = load_tile(dout, dout.data, row, i_h, o_m, m_m, True, False, S.V1, S.V2, S.V)
    b_lse = row_lse(lse, lse_head, i_h, row, o_m, m_m)
    b_delta = tl.load(delta + i_h.to(tl.int64) * delta_head + row + o_m, mask=m_m, other=0.0)
    b_pos, b_word = o_m, o_m
    if S.ALIBI or S.DROPOUT or S.UNTIL:
        b_pos = tl.load(bounds.pos + row + o_m, mask=m_m, other=0)
    if S.DROPOUT:
        b_word = words(b_pos, i_h, score, seed, 0)
    b_lo = tl.load(bounds.lo + row + o_m, mask=m_m, other=0)
    b_hi = tl.load(bounds.hi + row + o_m, mask=m_m, other=0)

    b_dq1 = tl.full([S.BM, S.D1], 0.0, tl.float32)
    b_dq2 = tl.full([S.BM, S.D2 if S.D2 else 1], 0.0, tl.float32)
    p_stretch, stretch_end, shift = table, 0, 0
    if S.UNTIL:
        p_stretch, stretch_end, shift = along_stretches(0, table + tl.load(p_table + 6), 0, 0)
    for visit in range(full_begin, full_end):
        b_dq1, b_dq2 = _dq_tile(
            visit + shift, i_kv, i_h, k, k1, k2, v, v1, v2, bounds, score, seed, keys,
            b_q1, b_q2, b_g1, b_g2, b_lse, b_delta, b_pos, b_word, b_lo, b_hi,
            b_dq1, b_dq2, False, S,
        )  # fmt: skip
        if S.UNTIL:
            p_stretch, stretch_end, shift = along_stretches(visit + 1, p_stretch, stretch_end, shift)
    for t in range(begin, end - (full_end - full_begin)):
        visit = tl.where(t < full_begin, t, t + full_end - full_begin)
        b_dq1, b_dq2 = _dq_tile(
            visit + shift, i_kv, i_h, k, k1, k2, v, v1, v2, bounds, score, seed, keys,
            b_q1, b_q2, b_g1, b_g2, b_lse, b_delta, b_pos, b_word, b_lo, b_hi,
            b_dq1, b_dq2, True, S,
        )  # fmt: skip
        if S.UNTIL:
            p_stretch, stretch_end, shift = along_stretches(visit + 1, p_stretch, stretch_end, shift)
    p_grad = grad.data + row.to(tl.int64) * grad.row + i_h.to(tl.int64) * grad.head
    store_tile(p_grad, b_dq1 * score.scale, o_m, grad.row, m_m, m_m, True, 0, S.D1, S.D)
    if S.D2:
        store_tile(p_grad, b_dq2 * score.scale, o_m, grad.row, m_m, m_m, True, S.D1, S.D2, S.D)


@triton.jit
def _dq_tile(
    j, i_kv, i_h, k, k1, k2, v, v1, v2, bounds, score, seed, keys,
    b_q1, b_q2, b_g1, b_g2, b_lse, b_delta, b_pos, b_word, b_lo, b_hi,
    b_dq1, b_dq2, MASKED: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """dq before scaling, after one more key tile."""
    first = j * S.BN
    o_n = tl.arange(0, S.BN)
    m_n = o_n < keys - first
    b_k1 = load_tile(k, k1, first, i_kv, o_n, m_n, MASKED, S.TMA, 0, S.D1, S.D)
    b_k2 = b_k1
    b_s = product(b_q1, tl.trans(b_k1), S)
    b_dp = product(b_g1, tl.trans(load_tile(v, v1, first, i_kv, o_n, m_n, MASKED, S.TMA, 0, S.V1, S.V)), S)
    if S.D2:
        b_k2 = load_tile(k, k2, first, i_kv, o_n, m_n, MASKED, S.TMA, S.D1, S.D2, S.D)
        b_s = add_product(b_s, b_q2, tl.trans(b_k2), S)
    if S.V2:
        b_v2 = load_tile(v, v2, first, i_kv, o_n, m_n, MASKED, S.TMA, S.V1, S.V2, S.V)
        b_dp = add_product(b_dp, b_g2, tl.trans(b_v2), S)
    b_at = o_n
    if MASKED:
        b_at = tl.load(bounds.key_pos + first + o_n, mask=m_n, other=0x7FFFFFFF)  # no bound lies beyond it
    elif S.ALIBI or S.DROPOUT:
        b_at = tl.load(bounds.key_pos + first + o_n)
    b_s, b_tanh = scored(b_s, score, i_h, b_pos, b_at, S)
    b_p = tl.exp2(b_s - b_lse[:, None])
    if S.DROPOUT:
        b_dp = tl.where(kept(b_word, words(b_at, i_h, score, seed, 1), score), b_dp * score.keep_scale, 0.0)
    b_ds = b_p * (b_dp - b_delta[:, None])
    if S.SOFTCAP:
        b_ds *= 1.0 - b_tanh * b_tanh
    if MASKED:
        b_until = load_until(bounds, first, o_n, m_n, S)
        m_seen = seen(b_at[None, :], b_until[None, :], b_pos[:, None], b_lo[:, None], b_hi[:, None], S)
        b_ds = tl.where(m_seen, b_ds, 0.0)
    b_ds = b_ds.to(b_k1.dtype)
    b_dq1 = add_product(b_dq1, b_ds, b_k1, S)
    if S.D2:
        b_dq2 = add_product(b_dq2, b_ds, b_k2, S)
    return b_dq1, b_dq2


# Counts and strides of lse and delta change with every batch and the seed with every layer, and none of them is worth
# a binary of its own.
@triton.jit(do_not_specialize=["lse", "lse_head", "delta", "delta_head", "seed", "inner", "by_tile", "rows", "keys"])
def dkdv(
    q, q1, q2, k, v, dout, g1, g2, lse, lse_head, delta, delta_head, bounds, table, query_tiles, dk, dv, dk_parts,
    dv_parts, score, seed, inner, by_tile, group, rows, keys,
    UNIFORM: tl.constexpr, EXACT: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """One part of dk and dv of a key tile: added to the present values if it is the only one, else stored among parts.

    table [rows, 8]: see `seqpar.kernels.triton.tables.key_table`. inner: the number of programs that follow each other,
    by_tile those of a row for all key heads, otherwise those of a key head for all rows. dk_parts, dv_parts: BN rows
    for each part of a cut tile. query_tiles [query tiles, 4]: first row, row past the last, begin, end. UNIFORM: all
    query tiles but the last have BM rows. EXACT: the key tile is visited by all query tiles in [q_begin, q_end).
    query_tiles is read only where one of the two does not hold.
    """
    i_outer, i_inner = tl.program_id(0) // inner, tl.program_id(0) % inner
    i_kv = tl.where(by_tile != 0, i_inner, i_outer)
    p_table = table + tl.where(by_tile != 0, i_outer, i_inner) * 8
    j, begin, end = tl.load(p_table), tl.load(p_table + 1), tl.load(p_table + 4)
    full_begin, full_end = tl.load(p_table + 2), tl.load(p_table + 3)
    i_part, parts = tl.load(p_table + 5), tl.load(p_table + 6)
    if begin == end and parts == 1:
        return

    first = j * S.BN
    o_n = tl.arange(0, S.BN)
    m_n = o_n < keys - first
    b_k1 = load_tile(k, k.data, first, i_kv, o_n, m_n, True, False, 0, S.D1, S.D)
    b_v1 = load_tile(v, v.data, first, i_kv, o_n, m_n, True, False, 0, S.V1, S.V)
    b_k2, b_v2 = b_k1, b_v1
    if S.D2:
        b_k2 = load_tile(k, k.data, first, i_kv, o_n, m_n, True, False, S.D1, S.D2, S.D)
    if S.V2:
        b_v2 = load_tile(v, v.data, first, i_kv, o_n, m_n, True, False, S.V1, S.V2, S.V)
    b_at = tl.load(bounds.key_pos + first + o_n, mask=m_n, other=0x7FFFFFFF)  # no bound lies beyond it
    b_until, last_end = load_until(bounds, first, o_n, m_n, S), 0
    if S.UNTIL and not EXACT:
        last_end = tl.max(b_until, 0)

    b_dk1 = tl.full([S.BN, S.D1], 0.0, tl.float32)
    b_dk2 = tl.full([S.BN, S.D2 if S.D2 else 1], 0.0, tl.float32)
    b_dv1 = tl.full([S.BN, S.V1], 0.0, tl.float32)
    b_dv2 = tl.full([S.BN, S.V2 if S.V2 else 1], 0.0, tl.float32)
    # The query tiles of all heads of the group form one sequence, and this part computes its share of it.
    full = full_end - full_begin
    work = full * group
    for t in range(work * i_part // parts, work * (i_part + 1) // parts):
        b_dk1, b_dk2, b_dv1, b_dv2 = _dkdv_tile(
            full_begin + t % full, i_kv * group + t // full, q, q1, q2, dout, g1, g2, lse, lse_head, delta, delta_head,
            bounds, query_tiles, score, seed, rows, b_k1, b_k2, b_v1, b_v2, b_at, b_until, b_dk1, b_dk2, b_dv1, b_dv2,
            False, UNIFORM, S,
        )  # fmt: skip
    partial = end - begin - full
    work = partial * group
    for t in range(work * i_part // parts, work * (i_part + 1) // parts):
        i = begin + t % partial
        i = tl.where(i < full_begin, i, i + full)
        visits = True
        if not EXACT:
            visits = (tl.load(query_tiles + i * 4 + 2) <= j) & (j < tl.load(query_tiles + i * 4 + 3))
            if S.UNTIL:  # rows are in the order of positions, so if the first sees no open key, none does
                visits &= tl.load(bounds.pos + tl.load(query_tiles + i * 4)) < last_end
        if visits:
            b_dk1, b_dk2, b_dv1, b_dv2 = _dkdv_tile(
                i, i_kv * group + t // partial, q, q1, q2, dout, g1, g2, lse, lse_head, delta, delta_head, bounds,
                query_tiles, score, seed, rows, b_k1, b_k2, b_v1, b_v2, b_at, b_until, b_dk1, b_dk2, b_dv1, b_dv2, True,
                UNIFORM, S,
            )  # fmt: skip
    whole = parts == 1
    row = tl.where(whole, first, tl.load(p_table + 7) * S.BN)
    m_add = o_n < tl.where(whole, keys - first, 0)
    b_dk1, b_dk2 = b_dk1 * score.scale, b_dk2 * score.scale
    _store_sums(dk, dk_parts, b_dk1, b_dk2, row, i_kv, o_n, m_n, m_add, whole, S.D1, S.D2, S.D)
    _store_sums(dv, dv_parts, b_dv1, b_dv2, row, i_kv, o_n, m_n, m_add, whole, S.V1, S.V2, S.V)


@triton.jit
def _store_sums(
    x, x_parts, b_1, b_2, row, i_kv, o_n, m_n, m_add, whole,
    W1: tl.constexpr, W2: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Add both pieces of the sums of a whole key tile to rows of a head, or store those of a part."""
    stride, head = tl.where(whole, x.row, x_parts.row), tl.where(whole, x.head, x_parts.head)
    p_x = tl.where(whole, x.data, x_parts.data) + row.to(tl.int64) * stride + i_kv.to(tl.int64) * head
    store_tile(p_x, b_1, o_n, stride, m_n, m_add, True, 0, W1, LIMIT)
    if W2:
        store_tile(p_x, b_2, o_n, stride, m_n, m_add, True, W1, W2, LIMIT)


@triton.jit
def _dkdv_tile(
    i, i_h, q, q1, q2, dout, g1, g2, lse, lse_head, delta, delta_head, bounds, query_tiles, score, seed, rows, b_k1,
    b_k2, b_v1, b_v2, b_at, b_until, b_dk1, b_dk2, b_dv1, b_dv2, MASKED: tl.constexpr, UNIFORM: tl.constexpr,
    S: tl.constexpr,
):  # fmt: skip
    """dk before scaling, and dv, after one more query tile. Scores are transposed: keys down, queries across."""
    if UNIFORM:
        row = i * S.BM
        stop = tl.minimum(row + S.BM, rows)
    else:
        row, stop = tl.load(query_tiles + i * 4), tl.load(query_tiles + i * 4 + 1)
    SHORT: tl.constexpr = MASKED or not UNIFORM  # whether the tile may have fewer than BM rows
    o_m = tl.arange(0, S.BM)
    m_m = o_m < stop - row
    b_q1 = load_tile(q, q1, row, i_h, o_m, m_m, SHORT, S.TMA, 0, S.D1, S.D)
    b_g1 = load_tile(dout, g1, row, i_h, o_m, m_m, SHORT, S.TMA, 0, S.V1, S.V)
    b_q2, b_g2 = b_q1, b_g1
    b_s = product(b_k1, tl.trans(b_q1), S)
    b_dp = product(b_v1, tl.trans(b_g1), S)
    if S.D2:
        b_q2 = load_tile(q, q2, row, i_h, o_m, m_m, SHORT, S.TMA, S.D1, S.D2, S.D)
        b_s = add_product(b_s, b_k2, tl.trans(b_q2), S)
    if S.V2:
        b_g2 = load_tile(dout, g2, row, i_h, o_m, m_m, SHORT, S.TMA, S.V1, S.V2, S.V)
        b_dp = add_product(b_dp, b_v2, tl.trans(b_g2), S)
    b_lse = row_lse(lse, lse_head, i_h, row, o_m, m_m)
    b_delta = tl.load(delta + i_h.to(tl.int64) * delta_head + row + o_m, mask=m_m, other=0.0)
    b_pos = o_m
    if S.ALIBI or S.DROPOUT or (MASKED and S.UNTIL):
        b_pos = tl.load(bounds.pos + row + o_m, mask=m_m, other=0)
    b_s, b_tanh = scored(b_s, score, i_h, b_at, b_pos, S)
    b_p = tl.exp2(b_s - b_lse[None, :])
    if MASKED:
        b_lo = tl.load(bounds.lo + row + o_m, mask=m_m, other=0)
        b_hi = tl.load(bounds.hi + row + o_m, mask=m_m, other=0)
        m_seen = seen(b_at[:, None], b_until[:, None], b_pos[None, :], b_lo[None, :], b_hi[None, :], S)
        b_p = tl.where(m_seen, b_p, 0.0)
    b_w = b_p
    if S.DROPOUT:
        m_kept = kept(words(b_at, i_h, score, seed, 1), words(b_pos, i_h, score, seed, 0), score)
        b_w = tl.where(m_kept, b_p * score.keep_scale, 0.0)
        b_dp = tl.where(m_kept, b_dp * score.keep_scale, 0.0)
    b_w = b_w.to(b_g1.dtype)
    b_dv1 = add_product(b_dv1, b_w, b_g1, S)
    b_ds = b_p * (b_dp - b_delta[None, :])
    if S.SOFTCAP:
        b_ds *= 1.0 - b_tanh * b_tanh
    b_ds = b_ds.to(b_q1.dtype)
    b_dk1 = add_product(b_dk1, b_ds, b_q1, S)
    if S.D2:
        b_dk2 = add_product(b_dk2, b_ds, b_q2, S)
    if S.V2:
        b_dv2 = add_product(b_dv2, b_w, b_g2, S)
    return b_dk1, b_dk2, b_dv1, b_dv2
