"""The arguments of the attention kernels, in bundles whose fields the kernels read by name."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqpar.kernels.protocol import Operands, StepFacts
from seqpar.kernels.triton.config import LaunchConfig, pieces

# Of a tensor: dtype, shape, strides, and whether 16 bytes divide its address. A binary depends on no more.
TensorKind = tuple[torch.dtype, torch.Size, tuple[int, ...], bool]


class PerRow(NamedTuple):
    """A tensor [rows, heads, dim] and its strides of rows and heads."""

    data: Tensor
    row: int
    head: int


class Topped(NamedTuple):
    """A `PerRow`, and the largest scores [heads, rows] with their stride of heads; separate, as `EndingBounds` is."""

    data: Tensor
    row: int
    head: int
    top: Tensor
    top_head: int


class Bounds(NamedTuple):
    """Positions and bounds of query rows, and positions of key rows."""

    pos: Tensor
    lo: Tensor
    hi: Tensor
    key_pos: Tensor


class EndingBounds(NamedTuple):
    """`Bounds`, and where keys end: a separate class, as one more argument would make other launches slower."""

    pos: Tensor
    lo: Tensor
    hi: Tensor
    key_pos: Tensor
    until: Tensor


class Scalars(NamedTuple):
    """The numbers that a score and its dropout are computed from.

    pre, post: see `seqpar.kernels.triton.tile.scored`. slopes: of ALiBi, any tensor without it. threshold: pairs whose
    word is below it are dropped, as a signed integer of 32 bits. first_head: the model's number of head 0.
    """

    pre: float
    post: float
    scale: float
    slopes: Tensor
    threshold: int
    keep_scale: float
    first_head: int


class LaunchShape(NamedTuple):
    """Compile-time facts of a kernel: head dims D and V of keys and values with their pieces, tile sizes, options."""

    D: int
    D1: int
    D2: int
    V: int
    V1: int
    V2: int
    BM: int
    BN: int
    TMA: bool
    UNTIL: bool  # keys may end before the last query
    SOFTCAP: bool
    ALIBI: bool
    DROPOUT: bool
    TOP: bool  # the largest scores are kept, in a target that is `Topped`
    UPCAST: bool  # of bf16 operands in Triton's interpreter, whose bf16 products are wrong
    PRECISION: str  # of float32 products


def bounds_of(facts: StepFacts) -> Bounds | EndingBounds:
    """The bounds of a step."""
    of_queries = facts.pos, facts.lo, facts.hi, facts.key_pos
    return Bounds(*of_queries) if facts.until is None else EndingBounds(*of_queries, facts.until)


def kinds_of(*tensors: Tensor) -> tuple[TensorKind, ...]:
    """The kind of each tensor."""
    return tuple([(x.dtype, x.shape, x.stride(), x.data_ptr() % 16 == 0) for x in tensors])


def per_row(x: Tensor, kind: TensorKind) -> PerRow:
    """A tensor [rows, heads, dim] of a kind with its strides, which kernels read through pointers."""
    row, head, _ = kind[2]
    return tuple.__new__(PerRow, (x, row, head))  # PerRow(x, row, head) in half the time


def key_sums(dk: Tensor, dv: Tensor, kinds: tuple[TensorKind, ...], rows: int) -> tuple[PerRow, ...]:
    """dk and dv [rows, heads, dim] of two kinds, and so many rows of each for the parts of tiles that are cut.

    Without such rows, the same tensors stand for them: they have the strides that the binary is compiled for, and are
    not read.
    """
    (_, (_, heads, d), _, _), (_, (_, _, v), _, _) = kinds
    dk_parts, dv_parts = (dk.new_empty(rows, heads, d), dv.new_empty(rows, heads, v)) if rows else (dk, dv)
    new = tuple.__new__
    parts = new(PerRow, (dk_parts, heads * d, d)), new(PerRow, (dv_parts, heads * v, v))
    return per_row(dk, kinds[0]), per_row(dv, kinds[1]), *parts


def check_rows(*tensors: Tensor) -> None:
    """Check the strides of tensors for `per_row`. Offsets of tiles have 64 bits, offsets inside a tile 32.

    Raises: ValueError unless the last dim is dense; NotImplementedError for rows that are too far apart.
    """
    for x in tensors:
        if x.shape[2] > 1 and x.stride(2) != 1:
            raise ValueError(f"triton needs a dense last dim, got strides {x.stride()}")
        if x.shape[0] > 1 and x.stride(0) >= 1 << 24:
            raise NotImplementedError(f"triton has no tiles of rows {x.stride(0)} elements apart; call .contiguous()")


class TileLoads:
    """Descriptors by which the hardware loads tiles of so many rows, for the first and second piece of the head dim.

    Without tma, and for a second piece that the head dim does not have, they are the tensor itself, which the kernel
    does not read. They are arguments of their own because Triton 3.6 does not launch kernels with descriptors inside a
    bundle.
    """

    def __init__(self, x: Tensor, rows: int, tma: bool) -> None:
        self.described = [_describe(x, [rows, 1, n]) if tma and n else None for n in pieces(x.shape[2], x.itemsize)]

    def of(self, x: Tensor) -> tuple[Any, Any]:
        """The descriptors of a tensor of the kind that this was made for."""
        one, two = self.described
        return (x if one is None else _redirected(one, x)), (x if two is None else _redirected(two, x))


def _describe(x: Tensor, block: list[int]) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    descriptor = TensorDescriptor(x, list(x.shape), list(x.stride()), block)
    descriptor.base = None  # which would keep the tensor's memory
    return descriptor


def _redirected(descriptor: Any, x: Tensor) -> Any:
    """A descriptor of another tensor of the same kind. The constructor would repeat checks that are known to hold."""
    new = object.__new__(type(descriptor))
    new.__dict__.update(descriptor.__dict__, base=x)
    return new


def describable(*tensors: Tensor) -> bool:
    """Whether descriptors can load these tensors.

    Rows and heads must start at multiples of 16 bytes and not overlap, as those of expanded tensors do.
    """
    starts = [n * x.itemsize for x in tensors for n in x.stride()[:2]] + [x.data_ptr() for x in tensors]
    dense = all(x.numel() and x.stride(2) == 1 for x in tensors)
    return dense and all(n % 16 == 0 for n in starts) and all(0 < n < 1 << 40 for n in starts[: -len(tensors)])


def per_head(x: Tensor, kind: TensorKind) -> tuple[Tensor, int]:
    """A tensor [heads, rows] of a kind and its stride of heads.

    They are arguments of their own because Triton compiles a bundle again for strides that are multiples of 16, and
    these strides follow the number of rows.
    """
    return x, kind[2][0]


def check_heads(*tensors: Tensor) -> None:
    """Raise ValueError unless rows are dense, as `per_head` needs; a single row may have any stride."""
    for x in tensors:
        if x.shape[1] > 1 and x.stride(1) != 1:
            raise ValueError(f"lse and delta must have dense rows, got strides {x.stride()}")


def scalars(x: Operands) -> Scalars:
    """The scalars of a call's scores and dropout, without its slopes."""
    score = x.score
    return Scalars(
        pre=score.scale / score.softcap if score.softcap else 0.0,
        post=(score.softcap or score.scale) / math.log(2),
        scale=float(score.scale),
        slopes=x.facts.pos,
        threshold=_signed(int(score.dropout_p * 2**32), 32),
        keep_scale=1 / (1 - score.dropout_p),
        first_head=score.first_head,
    )


def with_slopes(scalars: Scalars, slopes: Tensor | None) -> Scalars:
    """The scalars with the slopes of a call, if it has any."""
    return scalars if slopes is None else scalars._replace(slopes=slopes)


def seed(x: Operands) -> int:
    """The seed of dropout as a signed integer of 64 bits."""
    return _signed(x.score.dropout_seed, 64)


def _signed(word: int, bits: int) -> int:
    word &= (1 << bits) - 1
    return word - (1 << bits) if word >> (bits - 1) else word


def launch_shape(
    x: Operands, config: LaunchConfig, *, tma: bool, top: bool, upcast: bool, precision: str
) -> LaunchShape:
    """The compile-time facts of a call's kernels."""
    (d1, d2), (v1, v2) = (pieces(y.shape[2], y.itemsize) for y in (x.q, x.v))
    score = x.score
    return LaunchShape(
        x.q.shape[2], d1, d2, x.v.shape[2], v1, v2, config.bm, config.bn, tma, x.facts.until is not None,
        score.softcap != 0.0, score.slopes is not None, score.dropout_p != 0.0, top, upcast, precision,
    )  # fmt: skip
