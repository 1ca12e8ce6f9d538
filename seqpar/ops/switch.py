"""`switch`: which dimension of a tensor is sharded, changed by one all-to-all (Ulysses, DSP)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seqpar.comm import Comm, Tag
from seqpar.ops.agree import abort_on_error, agree_once, signature


def switch(
    x: Tensor,
    comm: Comm,
    *,
    split_dim: int,
    concat_dim: int,
    sizes: tuple[Sequence[int], Sequence[int]] | None = None,
) -> Tensor:
    """This rank's shard along ``split_dim`` of the tensor that was sharded along ``concat_dim``. A collective.

    Spec over ranks::

        xs -> torch.cat(xs, concat_dim).split(sizes[0], split_dim)

        rank 0   a0 a1 a2          a0 b0 c0
        rank 1   b0 b1 b2    ->    a1 b1 c1
        rank 2   c0 c1 c2          a2 b2 c2

    sizes = (split, concat): elements per rank along each of the two dims, any of them 0; by default every rank has as
    many as this one along concat_dim, and split_dim is split into equal shares. Other dims are whole and equal.
    The adjoint is ``switch`` with the two dims, and the two sizes, swapped.

    Raises: ValueError for equal or missing dims, sizes that do not add up, or ranks that differ, on every rank before
    any byte moves.

    Source: Jacobs et al. 2023 (DeepSpeed-Ulysses); Zhao et al. 2024 (DSP, section 3).
    """
    number = comm.next_call()
    error: Exception | None = None
    split: list[int] = []
    concat: list[int] = []
    facts: dict[str, object] = {}
    try:
        split_dim, concat_dim = _dim(x, split_dim, "split_dim"), _dim(x, concat_dim, "concat_dim")
        if split_dim == concat_dim:
            raise ValueError(f"split_dim and concat_dim are both {split_dim}; a switch is between two dimensions")
        split, concat = _sizes(x, comm, split_dim, concat_dim, sizes)
        shape = list(x.shape)
        shape[split_dim] = shape[concat_dim] = -1
        facts = {
            "split_dim": split_dim, "concat_dim": concat_dim, "split sizes": split, "concat sizes": concat,
            "other dims": shape, "dtype": x.dtype, "device": x.device.type,
            "requires grad": torch.is_grad_enabled() and x.requires_grad,
        }  # fmt: skip
    except Exception as found:  # whatever it is, the others must hear of it
        error = found
    agree_once(comm, "switch", facts, error)
    tag = Tag(signature(facts, "switch"), number, 0, 0)
    return _Switch.apply(x, comm, split_dim, concat_dim, split, concat, tag)  # type: ignore[no-any-return]


def _dim(x: Tensor, dim: int, name: str) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{name}={dim} is not a dimension of a tensor of shape {list(x.shape)}")
    return dim % x.dim()


def _sizes(
    x: Tensor, comm: Comm, split_dim: int, concat_dim: int, sizes: tuple[Sequence[int], Sequence[int]] | None
) -> tuple[list[int], list[int]]:
    whole, part = x.shape[split_dim], x.shape[concat_dim]
    if sizes is None:
        if whole % comm.size:
            raise ValueError(f"dim {split_dim} has {whole} elements for {comm.size} ranks; give uneven shares as sizes")
        return [whole // comm.size] * comm.size, [part] * comm.size
    split, concat = ([int(n) for n in side] for side in sizes)
    for name, side in (("split", split), ("concat", concat)):
        if len(side) != comm.size or min(side) < 0:
            raise ValueError(f"{name} sizes must be {comm.size} numbers of at least 0, got {side}")
    if sum(split) != whole:
        raise ValueError(f"split sizes {split} sum to {sum(split)}, dim {split_dim} of x has {whole}")
    if concat[comm.rank] != part:
        raise ValueError(f"concat sizes {concat} give rank {comm.rank} {concat[comm.rank]}, x has {part}")
    return split, concat


class _Switch(torch.autograd.Function):
    """One all-to-all; backward is the switch back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, comm: Comm, split_dim: int, concat_dim: int, split: list[int], concat: list[int], tag: Tag
    ) -> Tensor:
        ctx.args = comm, concat_dim, split_dim, concat, split, tag._replace(phase=tag.phase + 1)
        return _all_to_all(x, comm, split_dim, concat_dim, split, concat, tag)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *args, tag = ctx.args
        ctx.args = *args, tag._replace(stage=tag.stage + 1)  # another backward pass has numbers of its own
        return (_Switch.apply(grads[0], *args, tag), *[None] * 6)


def _all_to_all(
    x: Tensor, comm: Comm, split_dim: int, concat_dim: int, split: list[int], concat: list[int], tag: Tag
) -> Tensor:
    pieces = x.split(split, split_dim)
    shape = list(x.shape)
    shape[split_dim] = split[comm.rank]
    shape[concat_dim] = sum(concat)
    y = x.new_empty(shape)
    starts = np.cumsum([0, *concat])
    recvs = {}
    for peer in range(comm.size):
        if peer != comm.rank:
            shape[concat_dim] = concat[peer]
            recvs[peer] = [comm.empty(shape, x.dtype, x.device)]
    sends = {p: [piece.contiguous()] for p, piece in enumerate(pieces) if p != comm.rank}
    with abort_on_error(comm, f"switch, call {tag.call}"):
        work = comm.exchange(sends, recvs, tag=tag)
        y.narrow(concat_dim, int(starts[comm.rank]), concat[comm.rank]).copy_(pieces[comm.rank])
        work.wait()
    for peer, (received,) in recvs.items():
        y.narrow(concat_dim, int(starts[peer]), concat[peer]).copy_(received)
    return y
