"""Copies of rows into and out of buffers, for `seqpar.kernels.memory.copy`: one kernel copies rows of several tensors.

A tensor ``[N, A, B]`` is moved in tiles of BN rows by BD elements of one of its A slices; rows that are dense have one
slice. Offsets are int64: a buffer of keys may hold more than 2**31 elements. Pairs of tensors and their shapes come as
tuples, whose entries Triton specialises like other arguments: a stride that is 1, or a multiple of 16, makes loads of
16 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, product

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 65_535  # of a CUDA grid at most, in its second dimension and in its third
ELEMENTS = 4096  # of a tile: with 4 warps each thread has four loads of 16 bytes of bf16 in flight

Transfer = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # destination, source, the row numbers of each


@triton.jit
def move(
    p_xs, p_ys, p_from, p_to, n, slices, dims, x_strides, y_strides,
    ADD: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """``ys[t][to[i]] = xs[t][from[i]]`` for every tensor t and row i; ``+=`` if ADD. Without row numbers, in order."""
    i_slice = tl.program_id(1).to(tl.int64)
    o_n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    o_d = tl.program_id(2).to(tl.int64) * BD + tl.arange(0, BD)
    m_n = o_n < n
    o_from = o_n if p_from is None else tl.load(p_from + o_n, mask=m_n, other=0).to(tl.int64)
    o_to = o_n if p_to is None else tl.load(p_to + o_n, mask=m_n, other=0).to(tl.int64)
    for t in tl.static_range(len(p_xs)):
        if i_slice < slices[t]:
            m = m_n[:, None] & (o_d < dims[t])[None, :]
            o_x = (o_from * x_strides[t][0] + i_slice * x_strides[t][1])[:, None] + (o_d * x_strides[t][2])[None, :]
            o_y = (o_to * y_strides[t][0] + i_slice * y_strides[t][1])[:, None] + (o_d * y_strides[t][2])[None, :]
            p_y = p_ys[t] + o_y
            b_x = tl.load(p_xs[t] + o_x, mask=m)
            if ADD:
                b_y = tl.load(p_y, mask=m)
                if b_x.dtype == tl.float64 or b_y.dtype == tl.float64:
                    b_x = b_x.to(tl.float64) + b_y.to(tl.float64)
                else:
                    b_x = b_x.to(tl.float32) + b_y.to(tl.float32)
            if b_x.dtype == tl.float64 and p_y.dtype.element_ty != tl.float64:
                b_x = b_x.to(tl.float32)  # torch also rounds twice on the way to 16 bits
            tl.store(p_y, b_x.to(p_y.dtype.element_ty), mask=m)


def write(pairs: Sequence[Transfer]) -> None:
    """``dst[dst_rows] = src[src_rows]`` in dst's dtype. Neighbouring pairs with the same row numbers are one launch."""
    for _, group in groupby(pairs, key=lambda pair: (id(pair[2]), id(pair[3]))):
        _launch(list(group), add=False)


def add(pair: Transfer) -> None:
    """``dst[dst_rows] += src[src_rows]``, rounded once to dst's dtype."""
    _launch([pair], add=True)


def _launch(pairs: list[Transfer], *, add: bool) -> None:
    """One launch for pairs with the same row numbers, of one side at least; several for rows beyond a grid's limits."""
    to, at = (None if rows is None else rows.contiguous() for rows in pairs[0][2:])
    n = max(len(rows) for rows in (to, at) if rows is not None)
    if not n:
        return
    tiled = [_tiled(dst, src) for dst, src, *_ in pairs]
    slices, dims = (max(x.shape[dim] for x, _ in tiled) for dim in (1, 2))
    bd = min(triton.next_power_of_2(dims), 1024)
    bn = min(triton.next_power_of_2(n), ELEMENTS // bd)
    if slices <= PROGRAMS and dims <= PROGRAMS * bd:
        _launch_tiled(tiled, at, to, n, add, bn, bd)
        return
    for i, j in product(range(0, slices, PROGRAMS), range(0, dims, PROGRAMS * bd)):
        part = [tuple(x[:, i : i + PROGRAMS, j : j + PROGRAMS * bd] for x in both) for both in tiled]
        _launch_tiled(part, at, to, n, add, bn, bd)


def _launch_tiled(
    pairs: Sequence[tuple[Tensor, ...]], at: Tensor | None, to: Tensor | None, n: int, add: bool, bn: int, bd: int
) -> None:
    """One launch for destinations and sources [rows, A, B]."""
    ys, xs = zip(*pairs, strict=True)
    slices, dims = (tuple(x.shape[dim] for x in xs) for dim in (1, 2))
    with torch.cuda.device_of(ys[0]):
        move[triton.cdiv(n, bn), max(slices), triton.cdiv(max(dims), bd)](
            xs, ys, at, to, n, slices, dims, tuple(x.stride() for x in xs), tuple(y.stride() for y in ys),
            ADD=add, BN=bn, BD=bd, enable_fp_fusion=True,
        )  # fmt: skip


def _tiled(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Both as [rows, A, B], with A = 1 where the rows of both are dense."""
    if x[0].is_contiguous() and y[0].is_contiguous():
        return x.reshape(len(x), 1, -1), y.reshape(len(y), 1, -1)
    if x.dim() > 3:
        raise ValueError(f"rows of more than two dims must be dense, got {list(x.shape)} with strides {x.stride()}")
    return (x[:, None], y[:, None]) if x.dim() == 2 else (x, y)
