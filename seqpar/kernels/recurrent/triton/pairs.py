"""Inside chunks: pairs of rows, and the inverse of the delta rule's triangular system. A program for a chunk of a head.

The inverse of ``I + A``, with A strictly lower triangular, is joined from blocks two by two. For two neighbouring
blocks with inverses X and Y and the part L of A between them::

    | X        0 |
    | -Y L X   Y |

which is ``T - T L T`` for all of them at once, if T has the inverses on its diagonal and L the parts between them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from seqpar.kernels.recurrent.triton.tile import (
    factors_of_pairs,
    load_rows,
    load_scalars,
    product,
    split_program,
    square,
    sums_of_decays,
)


@triton.jit
def pairs(q, k, decay, beta, chunks, inside, inverse, scale, S: tl.constexpr):
    """Weights ``scale exp(G_i - G_j) (q_i k_j)`` of u in out, and with DELTA the inverse of I + A.

    chunks [N, 4]: first row, row past the last, number among the chunks of all runs, its run's number in the launch.
    inside, inverse [N, H, ROWS, ROWS].
    """
    _, i_h, i_n = split_program(S, 1)
    row, stop = tl.load(chunks + i_n * 4), tl.load(chunks + i_n * 4 + 1)
    i_g, groups = i_h // S.PER_GROUP, S.H // S.PER_GROUP
    b_inside = tl.full([S.ROWS, S.ROWS], 0.0, tl.float32)
    b_a = b_inside
    for c in range(0, S.K, S.BK):
        o_k = c + tl.arange(0, S.BK)
        b_k = load_rows(k, row, stop, i_g, groups, o_k, S.K, S)
        b_inside += product(load_rows(q, row, stop, i_g, groups, o_k, S.K, S), tl.trans(b_k), S)
        if S.DELTA:
            b_a += product(b_k, tl.trans(b_k), S)
    b_sum, _ = sums_of_decays(decay, row, stop, i_h, S)
    b_factor = factors_of_pairs(b_sum, S)
    tl.store(square(inside, i_n, i_h, S), b_inside * b_factor * scale)
    if S.DELTA:
        o = tl.arange(0, S.ROWS)
        o_i, o_j = o[:, None], o[None, :]
        b_a *= b_factor * load_scalars(beta, row, stop, i_h, S)[:, None]
        b_t = (o_i == o_j).to(tl.float32) - tl.where((o_i // 2 == o_j // 2) & (o_i > o_j), b_a, 0.0)
        half = 2
        while half < S.ROWS:
            between = (o_i // (2 * half) == o_j // (2 * half)) & (o_i // half > o_j // half)
            b_part = tl.dot(b_t, tl.where(between, b_a, 0.0), input_precision="tf32x3")
            b_t -= tl.dot(b_part, b_t, input_precision="tf32x3")
            half *= 2
        tl.store(square(inverse, i_n, i_h, S), b_t)
