"""The forward, which adds a buffer of keys to earlier sums: one program per tile of queries of one head.

A program visits the key tiles [begin, end) of its row in the table. Those in the middle are seen whole:

    begin        full_begin          full_end        end
      | masked tiles |  tiles without mask |  masked tiles |

The running maximum and sum of a launch start empty, and the normalised sums of earlier launches are merged once at the
end, so that the number of launches hardly shows in the result. Source: Dao 2023, FlashAttention-2, section 3.1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from seqpar.kernels.triton.tile import (
    LN2,
    LOG2E,
    add_product,
    along_stretches,
    head_tile,
    kept,
    load_tile,
    load_until,
    product,
    scored,
    seen,
    store_tile,
    words,
)


# Counts and strides of lse and delta change with every batch and the seed with every layer, and none of them is worth
# a binary of its own.
@triton.jit(do_not_specialize=["lse", "lse_head", "seed", "tiles", "keys"])
def forward(
    q, k, k1, k2, v, v1, v2, bounds, table, prior, target, lse, lse_head, score, seed, tiles, group, keys,
    FIRST: tl.constexpr, IN_PLACE: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Add the attention of a query tile over a buffer of keys to earlier sums.

    prior: the sums over earlier keys, not read if FIRST. target: receives the new sums in its own dtype; prior itself
    if IN_PLACE. With S.TOP it has the largest scores too. table: see `seqpar.kernels.triton.tables.query_table`.
    """
    p_table, i_h, i_kv = head_tile(table, tiles, group)
    row, stop, begin = tl.load(p_table), tl.load(p_table + 1), tl.load(p_table + 2)
    full_begin, full_end, end = tl.load(p_table + 3), tl.load(p_table + 4), tl.load(p_table + 5)
    if (not FIRST) and IN_PLACE and begin == end:
        return

    o_m = tl.arange(0, S.BM)
    m_m = o_m < stop - row
    b_q1 = load_tile(q, q.data, row, i_h, o_m, m_m, True, False, 0, S.D1, S.D)
    b_q2 = b_q1
    if S.D2:
        b_q2 = load_tile(q, q.data, row, i_h, o_m, m_m, True, False, S.D1, S.D2, S.D)
    b_pos, b_word = o_m, o_m
    if S.ALIBI or S.DROPOUT or S.UNTIL:
        b_pos = tl.load(bounds.pos + row + o_m, mask=m_m, other=0)
    if S.DROPOUT:
        b_word = words(b_pos, i_h, score, seed, 0)
    b_lo = tl.load(bounds.lo + row + o_m, mask=m_m, other=0)
    b_hi = tl.load(bounds.hi + row + o_m, mask=m_m, other=0)

    b_max = tl.full([S.BM], -float("inf"), tl.float32)
    b_sum = tl.full([S.BM], 0.0, tl.float32)
    b_acc1 = tl.full([S.BM, S.V1], 0.0, tl.float32)
    b_acc2 = tl.full([S.BM, S.V2 if S.V2 else 1], 0.0, tl.float32)
    p_stretch, stretch_end, shift = table, 0, 0
    if S.UNTIL:
        p_stretch, stretch_end, shift = along_stretches(0, table + tl.load(p_table + 6), 0, 0)
    for visit in range(full_begin, full_end):
        b_max, b_sum, b_acc1, b_acc2 = _attend(
            visit + shift, i_kv, i_h, k, k1, k2, v, v1, v2, bounds, score, seed, keys,
            b_q1, b_q2, b_pos, b_word, b_lo, b_hi, b_max, b_sum, b_acc1,
            b_acc2, False, S,
        )  # fmt: skip
        if S.UNTIL:
            p_stretch, stretch_end, shift = along_stretches(visit + 1, p_stretch, stretch_end, shift)
    for t in range(begin, end - (full_end - full_begin)):
        visit = tl.where(t < full_begin, t, t + full_end - full_begin)
        b_max, b_sum, b_acc1, b_acc2 = _attend(
            visit + shift, i_kv, i_h, k, k1, k2, v, v1, v2, bounds, score, seed, keys,
            b_q1, b_q2, b_pos, b_word, b_lo, b_hi, b_max, b_sum, b_acc1,
            b_acc2, True, S,
        )  # fmt: skip
        if S.UNTIL:
            p_stretch, stretch_end, shift = along_stretches(visit + 1, p_stretch, stretch_end, shift)

    if S.TOP:
        # a sum that is NaN without an infinite score has a score that is NaN
        b_high = tl.where((b_sum != b_sum) & (b_max < float("inf")), b_sum, b_max * LN2)
        p_high = target.top + i_h.to(tl.int64) * target.top_head + row + o_m
        b_before = tl.load(p_high, mask=m_m, other=0.0)
        tl.debug_barrier()  # as for lse below
        tl.store(p_high, tl.maximum(b_before, b_high, propagate_nan=tl.PropagateNan.ALL), mask=m_m)

    m_seen = b_sum != 0.0
    b_part = 1.0 / tl.where(m_seen, b_sum, 1.0)
    b_lse = tl.where(m_seen, b_max + tl.log2(tl.where(m_seen, b_sum, 1.0)), -float("inf"))
    b_keep = tl.full([S.BM], 0.0, tl.float32)
    p_lse = lse + i_h.to(tl.int64) * lse_head + row + o_m
    m_write = m_m
    if FIRST:
        tl.store(p_lse, b_lse * LN2, mask=m_m)
    else:
        b_old = tl.load(p_lse, mask=m_m, other=0.0) * LOG2E
        tl.debug_barrier()  # several threads read a row's lse before one of them overwrites it
        b_top = tl.maximum(b_old, b_lse)
        b_base = tl.where(b_top == -float("inf"), 0.0, b_top)
        b_keep, b_new = tl.exp2(b_old - b_base), tl.exp2(b_lse - b_base)
        b_total = b_keep + b_new
        b_safe = tl.where(b_total == 0.0, 1.0, b_total)
        b_part *= b_new / b_safe
        b_keep /= b_safe
        b_lse = tl.where(b_total == 0.0, -float("inf"), b_base + tl.log2(b_safe))
        tl.store(p_lse, b_lse * LN2, mask=m_m & m_seen)  # a row that saw no key keeps its bits
        if IN_PLACE:
            m_write = m_m & m_seen
    if S.DROPOUT:
        b_part *= score.keep_scale
    p_target = target.data + row.to(tl.int64) * target.row + i_h.to(tl.int64) * target.head
    b_out = b_acc1 * b_part[:, None]
    if not FIRST:
        b_out += b_keep[:, None] * load_tile(prior, prior.data, row, i_h, o_m, m_m, True, False, 0, S.V1, S.V)
    store_tile(p_target, b_out, o_m, target.row, m_write, m_write, False, 0, S.V1, S.V)
    if S.V2:
        b_out = b_acc2 * b_part[:, None]
        if not FIRST:
            b_out += b_keep[:, None] * load_tile(prior, prior.data, row, i_h, o_m, m_m, True, False, S.V1, S.V2, S.V)
        store_tile(p_target, b_out, o_m, target.row, m_write, m_write, False, S.V1, S.V2, S.V)


@triton.jit
def _attend(
    j, i_kv, i_h, k, k1, k2, v, v1, v2, bounds, score, seed, keys,
    b_q1, b_q2, b_pos, b_word, b_lo, b_hi, b_max, b_sum, b_acc1, b_acc2,
    MASKED: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Running maximum, sum and unnormalised output after one more key tile. MASKED: some pairs of it are not seen."""
    first = j * S.BN
    o_n = tl.arange(0, S.BN)
    m_n = o_n < keys - first
    b_k = load_tile(k, k1, first, i_kv, o_n, m_n, MASKED, S.TMA, 0, S.D1, S.D)
    b_s = product(b_q1, tl.trans(b_k), S)
    if S.D2:
        b_k = load_tile(k, k2, first, i_kv, o_n, m_n, MASKED, S.TMA, S.D1, S.D2, S.D)
        b_s = add_product(b_s, b_q2, tl.trans(b_k), S)
    b_at = o_n
    if MASKED:
        b_at = tl.load(bounds.key_pos + first + o_n, mask=m_n, other=0x7FFFFFFF)  # no bound lies beyond it
    elif S.ALIBI or S.DROPOUT:
        b_at = tl.load(bounds.key_pos + first + o_n)
    b_s, _ = scored(b_s, score, i_h, b_pos, b_at, S)
    if MASKED:
        b_until = load_until(bounds, first, o_n, m_n, S)
        m_seen = seen(b_at[None, :], b_until[None, :], b_pos[:, None], b_lo[:, None], b_hi[:, None], S)
        b_s = tl.where(m_seen, b_s, -float("inf"))
    b_new = tl.maximum(b_max, tl.max(b_s, 1))
    # Before a row sees its first key, its maximum is -inf, and -inf minus -inf is NaN.
    b_base = tl.where(b_new == -float("inf"), 0.0, b_new)
    b_p = tl.exp2(b_s - b_base[:, None])
    b_shrink = tl.exp2(b_max - b_base)
    b_sum = b_sum * b_shrink + tl.sum(b_p, 1)
    if S.DROPOUT:
        b_p = tl.where(kept(b_word, words(b_at, i_h, score, seed, 1), score), b_p, 0.0)
    b_v = load_tile(v, v1, first, i_kv, o_n, m_n, MASKED, S.TMA, 0, S.V1, S.V)
    b_p = b_p.to(b_v.dtype)
    b_acc1 = add_product(b_acc1 * b_shrink[:, None], b_p, b_v, S)
    if S.V2:
        b_v = load_tile(v, v2, first, i_kv, o_n, m_n, MASKED, S.TMA, S.V1, S.V2, S.V)
        b_acc2 = add_product(b_acc2 * b_shrink[:, None], b_p, b_v, S)
    return b_new, b_sum, b_acc1, b_acc2
