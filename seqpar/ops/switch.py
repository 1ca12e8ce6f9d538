"""`switch`: which dimension of a tensor is sharded, changed by one all-to-all (Ulysses, DSP)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from seqpar.comm import Comm, Tag
from seqpar.kernels.copy import Pair
from seqpar.ops.agree import abort_on_error, agree_once, signature
from seqpar.ops.handles import Made, carried, carry, handles, refuse, refuse_tangent, uncompiled, values_of
from seqpar.ops.parcel import Place, post


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

    In a compiled model the comm must be one that `bind` has seen: ``seqpar.bind(comm)``, or with a plan.

    Raises: ValueError for equal or missing dims, sizes that do not add up, or ranks that differ, on every rank before
    any byte moves.

    Source: Jacobs et al. 2023 (DeepSpeed-Ulysses); Zhao et al. 2024 (DSP, section 3).
    """
    try:
        split_dim, concat_dim = _dim(x, split_dim, "split_dim"), _dim(x, concat_dim, "concat_dim")
        if split_dim == concat_dim:
            raise ValueError(f"split_dim and concat_dim are both {split_dim}; a switch is between two dimensions")
        split, concat = _sizes(x, comm, split_dim, concat_dim, sizes)
        grad = torch.is_grad_enabled() and x.requires_grad
    except Exception as error:
        refuse("switch", comm, error)
    y, _ = torch.ops.seqpar.switch(x, handles(comm), split_dim, concat_dim, split, concat, comm.rank, False, grad)
    return y  # type: ignore[no-any-return]


def _dim(x: Tensor, dim: int, name: str) -> int:
    if not isinstance(x, Tensor):
        raise ValueError(f"switch is of a tensor, got {x!r:.200}")
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


@uncompiled
def _switch(
    x: Tensor, handles: Sequence[Tensor], split_dim: int, concat_dim: int, split: Sequence[int], concat: Sequence[int],
    rank: int, back: bool, grad: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The result, and the ticket of the way back. back: this is one; handles: of the comm, or else that ticket."""
    if back:
        (made,) = carried(handles[0])
        comm, tag = made.comm, made.back()
    else:
        (comm,) = values_of(handles)
        number = comm.next_call()
        shape = list(x.shape)
        shape[split_dim] = shape[concat_dim] = -1
        facts: dict[str, object] = {
            "split_dim": split_dim, "concat_dim": concat_dim, "split sizes": split, "concat sizes": concat,
            "other dims": shape, "dtype": x.dtype, "device": x.device.type, "requires grad": grad,
        }  # fmt: skip
        agree_once(comm, "switch", facts, None)
        tag = Tag(signature(facts, "switch"), number, 0, 0)
    return _all_to_all(x, comm, split_dim, concat_dim, split, concat, tag), carry(Made(comm, tag))


def _fake_switch(
    x: Tensor, handles: Sequence[Tensor], split_dim: int, concat_dim: int, split: Sequence[int], concat: Sequence[int],
    rank: int, back: bool, grad: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    shape = list(x.shape)
    shape[split_dim], shape[concat_dim] = split[rank], sum(concat)
    return x.new_empty(shape), torch.empty((), dtype=torch.int64, device="cpu")


def _all_to_all(
    x: Tensor, comm: Comm, split_dim: int, concat_dim: int, split: Sequence[int], concat: Sequence[int], tag: Tag
) -> Tensor:
    x = x.resolve_conj().resolve_neg()
    pieces = x.split(split, split_dim)
    shape = list(x.shape)
    shape[split_dim], shape[concat_dim] = split[comm.rank], sum(concat)
    y = comm.empty(shape, x.dtype, x.device)
    parts = y.split(concat, concat_dim)
    peers = [peer for peer in range(comm.size) if peer != comm.rank]
    with abort_on_error(comm, f"switch, call {tag.call}"):
        sends, recvs = ({peer: [[Place(side[peer])]] for peer in peers} for side in (pieces, parts))
        post(comm, sends, recvs, [Pair(parts[comm.rank], pieces[comm.rank])], tag)()
    return y


class _Switch(torch.autograd.Function):
    """The op in autograd; backward is the op with the roles swapped."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            y, ticket = torch.ops.seqpar.switch(*arguments)
        ctx.mark_non_differentiable(ticket)
        _, _, split_dim, concat_dim, split, concat, rank, *_ = arguments
        ctx.back = [ticket], concat_dim, split_dim, concat, split, rank, True, False
        return y, ticket

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        dx, _ = torch.ops.seqpar.switch(dy, *ctx.back)
        return (dx, *[None] * 8)


@uncompiled
def _differentiable(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    if torch.is_grad_enabled() and x.requires_grad:
        return _Switch.apply(x, *arguments)  # type: ignore[no-any-return]
    refuse_tangent("switch", x)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.seqpar.switch(x, *arguments)  # type: ignore[no-any-return]


_LIBRARY = torch.library.Library("seqpar", "FRAGMENT")
_LIBRARY.define(
    "switch(Tensor x, Tensor[] handles, int split_dim, int concat_dim, SymInt[] split, SymInt[] concat, int rank, "
    "bool back, bool grad) -> (Tensor y, Tensor ticket)",
    tags=torch.Tag.pt2_compliant_tag,
)
_LIBRARY.impl("switch", _switch, "CompositeExplicitAutograd")
_LIBRARY.impl("switch", _differentiable, "Autograd")
torch.library.register_fake("seqpar::switch", _fake_switch, lib=_LIBRARY)
