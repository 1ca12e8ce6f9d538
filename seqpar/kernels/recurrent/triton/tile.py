"""Parts of the recurrent kernels: rows of a chunk, its decays, and products.

Letters, in all kernels: T rows, G groups, H heads, K and V dims of keys and values; C columns of the states, which are
V, or V and K where the map of a state is walked beside it; N chunks and R runs of a launch. Prefixes: i_ index, o_
offsets, m_ mask, b_ block. Blocks are padded to powers of two, with zeros.

Products of two 16-bit inputs are exact before they are summed. All others are of float32: for 16-bit inputs in TF32, in
which such inputs are exact and intermediate results are rounded to 10 bits; for float32 inputs as three products
of TF32, which err about as float32 does.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class Shape(NamedTuple):
    """Compile-time facts of a kernel.

    PER_GROUP: heads of a group. ROWS: of a chunk. BK: K padded. BC: columns of a block. UPCAST: as in
    `seqpar.kernels.triton.arguments.LaunchShape`. PRECISION: of products of float32.
    """

    H: int
    PER_GROUP: int
    K: int
    V: int
    C: int
    ROWS: int
    BK: int
    BC: int
    DECAY: bool
    DELTA: bool
    UPCAST: bool
    PRECISION: str


@triton.jit
def product(b_a, b_b, S: tl.constexpr):
    """``a @ b`` in float32, of two inputs."""
    if S.UPCAST:
        b_a, b_b = b_a.to(tl.float32), b_b.to(tl.float32)
    return tl.dot(b_a, b_b, input_precision=S.PRECISION)


@triton.jit
def wide_product(b_a, b_b, S: tl.constexpr):
    """``a @ b`` in float32, where one is computed in float32."""
    return tl.dot(b_a.to(tl.float32), b_b.to(tl.float32), input_precision=S.PRECISION)


@triton.jit
def load_rows(x, row, stop, i_head, heads, o_col, DIM: tl.constexpr, S: tl.constexpr):
    """Columns of a chunk's rows of x [T, heads, DIM]: rows from `row` on and before `stop`, else zeros."""
    o_row = row + tl.arange(0, S.ROWS)
    p_x = x + ((o_row.to(tl.int64) * heads + i_head) * DIM)[:, None] + o_col[None, :]
    return tl.load(p_x, mask=(o_row < stop)[:, None] & (o_col < DIM)[None, :], other=0.0)


@triton.jit
def store_rows(x, b_x, row, stop, i_head, heads, o_col, DIM: tl.constexpr, S: tl.constexpr):
    """Write columns of a chunk's rows of x [T, heads, DIM]."""
    o_row = row + tl.arange(0, S.ROWS)
    p_x = x + ((o_row.to(tl.int64) * heads + i_head) * DIM)[:, None] + o_col[None, :]
    tl.store(p_x, b_x.to(x.dtype.element_ty), mask=(o_row < stop)[:, None] & (o_col < DIM)[None, :])


@triton.jit
def load_scalars(x, row, stop, i_h, S: tl.constexpr):
    """A chunk's rows of x [T, H] for a head, in float32; zeros past its end."""
    o_row = row + tl.arange(0, S.ROWS)
    return tl.load(x + o_row.to(tl.int64) * S.H + i_h, mask=o_row < stop, other=0.0).to(tl.float32)


@triton.jit
def store_scalars(x, b_x, row, stop, i_h, S: tl.constexpr):
    """Write a chunk's rows of x [T, H] for a head."""
    o_row = row + tl.arange(0, S.ROWS)
    tl.store(x + o_row.to(tl.int64) * S.H + i_h, b_x.to(tl.float32), mask=o_row < stop)


@triton.jit
def sums_of_decays(decay, row, stop, i_h, S: tl.constexpr):
    """Sums of log decays from a chunk's start to each of its rows, and of all its rows, in float64.

    In float32 they would round the differences of sums after a row that forgets nearly all.
    """
    if S.DECAY:
        b_decay = load_scalars(decay, row, stop, i_h, S).to(tl.float64)
    else:
        b_decay = tl.full([S.ROWS], 0.0, tl.float64)
    return tl.cumsum(b_decay, 0), tl.sum(b_decay, 0)


@triton.jit
def factor(b_log):
    """exp of a sum, or of a difference, of log decays."""
    return tl.exp(b_log.to(tl.float32))


@triton.jit
def factors_of_pairs(b_sum, S: tl.constexpr):
    """``exp(G_i - G_j)`` for rows j <= i, zeros for j > i."""
    o = tl.arange(0, S.ROWS)
    return factor(tl.where(o[:, None] >= o[None, :], b_sum[:, None] - b_sum[None, :], -float("inf")))


@triton.jit
def square(x, i_chunk, i_h, S: tl.constexpr):
    """Pointers to the pairs of a chunk's rows in x [N, H, ROWS, ROWS]."""
    o = tl.arange(0, S.ROWS)
    return x + (i_chunk.to(tl.int64) * S.H + i_h) * (S.ROWS * S.ROWS) + o[:, None] * S.ROWS + o[None, :]


@triton.jit
def columns(x, i_chunk, i_h, o_c, S: tl.constexpr):
    """Pointers to columns of a chunk's rows in x [N, H, ROWS, C]."""
    o = tl.arange(0, S.ROWS)
    return x + (i_chunk.to(tl.int64) * S.H + i_h) * (S.ROWS * S.C) + o[:, None] * S.C + o_c[None, :]


@triton.jit
def state(x, i_state, i_h, o_k, o_c, S: tl.constexpr):
    """Pointers to a block of a state in x [states, H, K, C]."""
    return x + (i_state.to(tl.int64) * S.H + i_h) * (S.K * S.C) + o_k[:, None] * S.C + o_c[None, :]


@triton.jit
def split_program(S: tl.constexpr, blocks):
    """This program's block, head, and chunk or run; programs of one head follow each other."""
    i = tl.program_id(0)
    return i % blocks, i // blocks % S.H, i // (blocks * S.H)
