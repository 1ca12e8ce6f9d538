"""Rows of tensors into and out of the buffers of an exchange, in position order.

rows: a slice, or an int64 or int32 tensor of row numbers on the device, neither negative nor repeated. Tensors keep
their bits where dtypes are equal. On a CUDA device each is one launch that reads and writes every element once.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor

from seqpar.kernels.dispatch import on_triton
from seqpar.kernels.memory.copy import Pair, copy


def pack(tensors: Sequence[Tensor], rows: slice | Tensor, out: Tensor) -> None:
    """Write rows of several tensors ``[N, ..., D]`` side by side into ``out [n, sum of widths]``."""
    if on_triton(out):
        from seqpar.kernels.triton import rows as fused

        fused.pack(tensors, rows, out)
        return
    first, pairs = 0, []
    for x in tensors:
        width = prod(x.shape[1:])
        part = out[:, first : first + width].view(len(out), *x.shape[1:])
        pairs.append(Pair(part, x[rows]) if isinstance(rows, slice) else Pair(part, x, src_rows=rows))
        first += width
    copy(pairs)


def place(values: Tensor, rows: slice | Tensor, out: Tensor) -> None:
    """Write ``values [n, ...]`` to rows of ``out [N, ...]``, in its dtype."""
    if on_triton(out):
        from seqpar.kernels.triton import rows as fused

        fused.place(values, rows, out)
    elif values.dtype != out.dtype:
        out[rows] = values.to(out.dtype)
    elif isinstance(rows, slice):
        copy([Pair(out[rows], values)])
    else:
        copy([Pair(out, values, dst_rows=rows)])


def add_(x: Tensor, rows: slice | Tensor, values: Tensor) -> None:
    """Add ``values [n, ...]`` to rows of ``x [N, ...]``: the same bits every time, since rows are distinct."""
    if on_triton(x):
        from seqpar.kernels.triton import rows as fused

        fused.add_(x, rows, values)
    elif isinstance(rows, slice):
        x[rows].add_(values)
    else:
        x[rows] = (_take(x, rows) + values).to(x.dtype)


def _take(x: Tensor, rows: slice | Tensor) -> Tensor:
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)
