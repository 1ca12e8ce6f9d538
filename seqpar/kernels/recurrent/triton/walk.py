"""From chunk to chunk, and back. A program for a block of columns of a run's state of one head.

With G the sums of log decays since a chunk's start and S the state before it::

    u = T beta (v - exp(G) k S)          with the delta rule, T the inverse of its system; else u = v
    S <- exp(G_end) S + (exp(G_end - G) k)^T u

Backward, from the gradient D of the state after a chunk and the weights P of u in out::

    du = P^T dout + exp(G_end - G) k D
    db = T^T du                          the gradient of T's argument; else db = du
    D <- exp(G_end) D + scale (exp(G) q)^T dout - (beta exp(G) k)^T db
"""

from __future__ import annotations

import triton
import triton.language as tl

from seqpar.kernels.recurrent.triton.tile import (
    columns,
    factor,
    load_rows,
    load_scalars,
    split_program,
    square,
    state,
    sums_of_decays,
    wide_product,
)


@triton.jit
def walk(
    k, v, decay, beta, inverse, entering, runs, entered, solved, left, totals, S: tl.constexpr, KEEP: tl.constexpr
):
    """The states [R, H, K, C] that runs leave, and the sums [R, H] of their log decays.

    Columns past V have no values. KEEP: also write the states before chunks, and with the delta rule their u. runs
    [R, 8]: run, first row, row past the last, first chunk in the launch, the same among the chunks of all runs, chunks.
    entering, left [R, H, K, C]; entered [N, H, K, C], solved [N, H, ROWS, C].
    """
    i_c, i_h, i_r = split_program(S, (S.C + S.BC - 1) // S.BC)
    p_run = runs + i_r * 8
    i_run, row, stop = tl.load(p_run), tl.load(p_run + 1), tl.load(p_run + 2)
    first, number, count = tl.load(p_run + 3), tl.load(p_run + 4), tl.load(p_run + 5)
    o_k, o_c = tl.arange(0, S.BK), i_c * S.BC + tl.arange(0, S.BC)
    i_g, groups = i_h // S.PER_GROUP, S.H // S.PER_GROUP
    m_c = (o_c < S.C)[None, :]
    m_s = (o_k < S.K)[:, None] & m_c
    b_s = tl.load(state(entering, i_run, i_h, o_k, o_c, S), mask=m_s, other=0.0)
    b_total = tl.sum(tl.full([S.ROWS], 0.0, tl.float64), 0)
    for n in range(count):
        if KEEP:
            tl.store(state(entered, first + n, i_h, o_k, o_c, S), b_s, mask=m_s)
        b_k = load_rows(k, row, stop, i_g, groups, o_k, S.K, S)
        b_u = load_rows(v, row, stop, i_h, S.H, o_c, S.V, S).to(tl.float32)
        b_sum, b_end = sums_of_decays(decay, row, stop, i_h, S)
        if S.DELTA:
            b_beta = load_scalars(beta, row, stop, i_h, S)
            b_u -= wide_product(b_k, b_s, S) * factor(b_sum)[:, None]
            b_u = wide_product(tl.load(square(inverse, number + n, i_h, S)), b_u * b_beta[:, None], S)
            if KEEP:
                tl.store(columns(solved, first + n, i_h, o_c, S), b_u, mask=m_c)
        b_until = b_k.to(tl.float32) * factor(b_end - b_sum)[:, None]
        b_s = b_s * factor(b_end) + wide_product(tl.trans(b_until), b_u, S)
        b_total += b_end
        row += S.ROWS
    tl.store(state(left, i_run, i_h, o_k, o_c, S), b_s, mask=m_s)
    if i_c == 0:
        tl.store(totals + i_run.to(tl.int64) * S.H + i_h, b_total.to(tl.float32))


@triton.jit
def walk_back(
    q, k, decay, beta, inside, inverse, dout, dleft, runs, after, dsolved, dentering, scale,
    S: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """The gradients of entering states, of states after chunks [N, H, K, C], and db [N, H, ROWS, C].

    OUT: there is an output, of C = V columns, with gradient dout [T, H, V].
    """
    i_c, i_h, i_r = split_program(S, (S.C + S.BC - 1) // S.BC)
    p_run = runs + i_r * 8
    i_run, begin, stop = tl.load(p_run), tl.load(p_run + 1), tl.load(p_run + 2)
    first, number, count = tl.load(p_run + 3), tl.load(p_run + 4), tl.load(p_run + 5)
    o_k, o_c = tl.arange(0, S.BK), i_c * S.BC + tl.arange(0, S.BC)
    i_g, groups = i_h // S.PER_GROUP, S.H // S.PER_GROUP
    m_c = (o_c < S.C)[None, :]
    m_s = (o_k < S.K)[:, None] & m_c
    b_d = tl.load(state(dleft, i_run, i_h, o_k, o_c, S), mask=m_s, other=0.0)
    for t in range(count):
        n = count - 1 - t
        row = begin + n * S.ROWS
        tl.store(state(after, first + n, i_h, o_k, o_c, S), b_d, mask=m_s)
        b_k = load_rows(k, row, stop, i_g, groups, o_k, S.K, S).to(tl.float32)
        b_sum, b_end = sums_of_decays(decay, row, stop, i_h, S)
        b_since = factor(b_sum)
        b_db = wide_product(b_k, b_d, S) * factor(b_end - b_sum)[:, None]
        b_d *= factor(b_end)
        if OUT:
            b_dout = load_rows(dout, row, stop, i_h, S.H, o_c, S.V, S)
            b_q = load_rows(q, row, stop, i_g, groups, o_k, S.K, S).to(tl.float32) * (b_since * scale)[:, None]
            b_db += wide_product(tl.trans(tl.load(square(inside, number + n, i_h, S))), b_dout, S)
            b_d += wide_product(tl.trans(b_q), b_dout, S)
        if S.DELTA:
            b_beta = load_scalars(beta, row, stop, i_h, S)
            b_db = wide_product(tl.trans(tl.load(square(inverse, number + n, i_h, S))), b_db, S)
            b_d -= wide_product(tl.trans(b_k * (b_since * b_beta)[:, None]), b_db, S)
        tl.store(columns(dsolved, first + n, i_h, o_c, S), b_db, mask=m_c)
    tl.store(state(dentering, i_run, i_h, o_k, o_c, S), b_d, mask=m_s)
