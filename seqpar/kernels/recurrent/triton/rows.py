"""Outputs, and the gradients of inputs. A program for a chunk of a head, and a block of columns or of K.

::

    b = beta (v - exp(G) k S)      u = T b      out = P u + scale exp(G) q S

S is the state before the chunk, P and T are of `seqpar.kernels.recurrent.triton.pairs`. Backward, with D the gradient
of the state after it and db of `seqpar.kernels.recurrent.triton.walk`::

    dP = dout u^T      dA = -db u^T, as T is the inverse of I + A      dv = beta db

A gradient of G_i is one of the log decays up to row i: those are summed from the chunk's end, in float64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from seqpar.kernels.recurrent.triton.tile import (
    columns,
    factor,
    factors_of_pairs,
    load_rows,
    load_scalars,
    product,
    split_program,
    square,
    state,
    store_rows,
    store_scalars,
    sums_of_decays,
    wide_product,
)


@triton.jit
def outputs(q, v, decay, inside, entered, solved, chunks, out, scale, S: tl.constexpr):
    """out [T, H, V] from the states before chunks; solved is read with the delta rule, else v."""
    i_c, i_h, i_n = split_program(S, (S.C + S.BC - 1) // S.BC)
    row, stop = tl.load(chunks + i_n * 4), tl.load(chunks + i_n * 4 + 1)
    o_k, o_c = tl.arange(0, S.BK), i_c * S.BC + tl.arange(0, S.BC)
    m_c = (o_c < S.C)[None, :]
    b_sum, _ = sums_of_decays(decay, row, stop, i_h, S)
    b_q = load_rows(q, row, stop, i_h // S.PER_GROUP, S.H // S.PER_GROUP, o_k, S.K, S)
    b_s = tl.load(state(entered, i_n, i_h, o_k, o_c, S), mask=(o_k < S.K)[:, None] & m_c, other=0.0)
    if S.DELTA:
        b_u = tl.load(columns(solved, i_n, i_h, o_c, S), mask=m_c, other=0.0)
    else:
        b_u = load_rows(v, row, stop, i_h, S.H, o_c, S.V, S)
    b_out = wide_product(b_q, b_s, S) * (factor(b_sum) * scale)[:, None]
    b_out += wide_product(tl.load(square(inside, i_n, i_h, S)), b_u, S)
    store_rows(out, b_out, row, stop, i_h, S.H, o_c, S.V, S)


# Their places in memory change with the number of rows, which is not worth a binary of its own.
@triton.jit(do_not_specialize=["ddecay", "dbeta"])
def pair_gradients(
    k, v, decay, beta, chunks, inside, solved, dsolved, dout, weights, system, dv, ddecay, dbeta,
    S: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """dv [T, H, V], and the gradients of ``q_i k_j`` and ``k_i k_j``, weights and system [N, H, ROWS, ROWS].

    ddecay, dbeta [T, H]: what comes through the pairs, and for dbeta through v.
    """
    _, i_h, i_n = split_program(S, 1)
    row, stop = tl.load(chunks + i_n * 4), tl.load(chunks + i_n * 4 + 1)
    number, o = tl.load(chunks + i_n * 4 + 2), tl.arange(0, S.ROWS)
    b_beta = tl.full([S.ROWS], 0.0, tl.float32)
    b_dbeta = b_beta
    if S.DELTA:
        b_beta = load_scalars(beta, row, stop, i_h, S)
    b_weights = tl.full([S.ROWS, S.ROWS], 0.0, tl.float32)
    b_system = b_weights
    for c in range(0, S.C, S.BC):
        o_c = c + tl.arange(0, S.BC)
        m_c = (o_c < S.C)[None, :]
        b_db = tl.load(columns(dsolved, i_n, i_h, o_c, S), mask=m_c, other=0.0)
        b_u = load_rows(v, row, stop, i_h, S.H, o_c, S.V, S).to(tl.float32)
        if S.DELTA:
            b_dbeta += tl.sum(b_db * b_u, 1)
            b_u = tl.load(columns(solved, i_n, i_h, o_c, S), mask=m_c, other=0.0)
            b_system -= wide_product(b_db, tl.trans(b_u), S)
            b_db *= b_beta[:, None]
        store_rows(dv, b_db, row, stop, i_h, S.H, o_c, S.V, S)
        if OUT:
            b_dout = load_rows(dout, row, stop, i_h, S.H, o_c, S.V, S)
            b_weights += wide_product(b_dout, tl.trans(b_u), S)

    b_sum, _ = sums_of_decays(decay, row, stop, i_h, S)
    b_factor = factors_of_pairs(b_sum, S)
    m_before = o[:, None] > o[None, :]
    b_gaps = tl.full([S.ROWS, S.ROWS], 0.0, tl.float32)  # gradients of G_i - G_j
    if OUT:
        b_gaps += tl.where(m_before, b_weights * tl.load(square(inside, number, i_h, S)), 0.0)
        tl.store(square(weights, i_n, i_h, S), b_weights * b_factor)
    if S.DELTA:
        b_products = tl.full([S.ROWS, S.ROWS], 0.0, tl.float32)
        for c in range(0, S.K, S.BK):
            o_k = c + tl.arange(0, S.BK)
            b_k = load_rows(k, row, stop, i_h // S.PER_GROUP, S.H // S.PER_GROUP, o_k, S.K, S)
            b_products += product(b_k, tl.trans(b_k), S)
        b_system = tl.where(m_before, b_system * b_factor, 0.0)
        b_products *= b_system
        store_scalars(dbeta, b_dbeta + tl.sum(b_products, 1), row, stop, i_h, S)
        tl.store(square(system, i_n, i_h, S), b_system * b_beta[:, None])
        b_gaps += b_products * b_beta[:, None]
    if S.DECAY:
        b_since = tl.sum(b_gaps, 1).to(tl.float64) - tl.sum(b_gaps, 0).to(tl.float64)
        store_scalars(ddecay, from_end(b_since), row, stop, i_h, S)


@triton.jit(do_not_specialize=["rows"])
def gradients(
    q, k, decay, beta, chunks, entered, solved, after, dsolved, dout, weights, system, v, dtotals, dq, dk, ddecay,
    dbeta, scale, rows, S: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """dq, dk [T, H, K] for a block of K; ddecay, dbeta [blocks of K, T, H]: its share of what comes through states.

    weights, system: of `pair_gradients`. dtotals [R, H]: of the sums of log decays. rows: T.
    """
    i_k, i_h, i_n = split_program(S, (S.K + S.BK - 1) // S.BK)
    row, stop, i_run = tl.load(chunks + i_n * 4), tl.load(chunks + i_n * 4 + 1), tl.load(chunks + i_n * 4 + 3)
    o_k, i_g, groups = i_k * S.BK + tl.arange(0, S.BK), i_h // S.PER_GROUP, S.H // S.PER_GROUP
    b_until = tl.full([S.ROWS, S.BK], 0.0, tl.float32)  # u D^T
    b_since = b_until  # db S^T
    b_dq = b_until  # dout S^T
    b_kept = tl.full([S.BK], 0.0, tl.float32)  # S * D
    for c in range(0, S.C, S.BC):
        o_c = c + tl.arange(0, S.BC)
        m_c = (o_c < S.C)[None, :]
        m_s = (o_k < S.K)[:, None] & m_c
        b_s = tl.load(state(entered, i_n, i_h, o_k, o_c, S), mask=m_s, other=0.0)
        b_d = tl.load(state(after, i_n, i_h, o_k, o_c, S), mask=m_s, other=0.0)
        b_kept += tl.sum(b_s * b_d, 1)
        if S.DELTA:
            b_u = tl.load(columns(solved, i_n, i_h, o_c, S), mask=m_c, other=0.0)
            b_db = tl.load(columns(dsolved, i_n, i_h, o_c, S), mask=m_c, other=0.0)
            b_since += wide_product(b_db, tl.trans(b_s), S)
        else:
            b_u = load_rows(v, row, stop, i_h, S.H, o_c, S.V, S)
        b_until += wide_product(b_u, tl.trans(b_d), S)
        if OUT:
            b_dq += wide_product(load_rows(dout, row, stop, i_h, S.H, o_c, S.V, S), tl.trans(b_s), S)

    b_k = load_rows(k, row, stop, i_g, groups, o_k, S.K, S)
    b_sum, b_end = sums_of_decays(decay, row, stop, i_h, S)
    b_dk = b_until * factor(b_end - b_sum)[:, None]
    b_later = tl.sum(b_k.to(tl.float32) * b_dk, 1).to(tl.float64)  # gradients of G_end - G
    b_earlier = tl.full([S.ROWS], 0.0, tl.float64)  # gradients of G
    if OUT:
        b_q = load_rows(q, row, stop, i_g, groups, o_k, S.K, S)
        b_dq *= (factor(b_sum) * scale)[:, None]
        b_earlier += tl.sum(b_q.to(tl.float32) * b_dq, 1).to(tl.float64)
        b_weights = tl.load(square(weights, i_n, i_h, S)) * scale
        b_dq += wide_product(b_weights, b_k, S)
        b_dk += wide_product(tl.trans(b_weights), b_q, S)
        store_rows(dq, b_dq, row, stop, i_h, S.H, o_k, S.K, S)
    if S.DELTA:
        b_beta = load_scalars(beta, row, stop, i_h, S)
        b_since *= factor(b_sum)[:, None]
        b_dbeta = -tl.sum(b_k.to(tl.float32) * b_since, 1)
        b_earlier += (b_dbeta * b_beta).to(tl.float64)
        b_system = tl.load(square(system, i_n, i_h, S))
        b_dk += wide_product(b_system, b_k, S) - b_since * b_beta[:, None]
        b_dk += wide_product(tl.trans(b_system), b_k, S)
        store_scalars(dbeta + i_k.to(tl.int64) * rows * S.H, b_dbeta, row, stop, i_h, S)
    store_rows(dk, b_dk, row, stop, i_h, S.H, o_k, S.K, S)
    if S.DECAY:
        b_total = tl.sum(b_kept, 0) * factor(b_end)
        if i_k == 0:
            b_total += tl.load(dtotals + i_run.to(tl.int64) * S.H + i_h)
        b_ddecay = from_end(b_earlier) + tl.cumsum(b_later, 0) - b_later + b_total.to(tl.float64)
        store_scalars(ddecay + i_k.to(tl.int64) * rows * S.H, b_ddecay, row, stop, i_h, S)


@triton.jit
def from_end(b_x):
    """Sums of a row and all after it, as a scan: Triton 3.6 compiles no sum over a sum of a product for Blackwell."""
    return tl.cumsum(b_x, 0, reverse=True)
