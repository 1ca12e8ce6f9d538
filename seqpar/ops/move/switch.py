"""`switch`: change the sharded dimension of a tensor by one all-to-all (Ulysses, DSP), or of several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from numbers import Integral
from operator import index
from typing import Any

import torch
from torch import Tensor

from seqpar.comm import Comm, Tag
from seqpar.ops.core.agreement import abort_on_error, agreement, check_comm, digest_of_call, errors_on_all_ranks
from seqpar.ops.core.collective_op import (
    CollectiveOp,
    Record,
    check_dense,
    refuse_double_backward,
    refuse_tangents,
    requirements,
)  # fmt: skip
from seqpar.ops.core.handles import checked_values, in_graph
from seqpar.ops.core.regions import check_repetition
from seqpar.ops.move.pack import Message, Place, post

Sizes = tuple[Sequence[int], Sequence[int]]


def switch(x: Tensor, comm: Comm, *, split_dim: int, concat_dim: int, sizes: Sizes | None = None) -> Tensor:
    """This rank's shard along ``split_dim`` of the tensor that was sharded along ``concat_dim``. A collective.

    Spec over ranks:

        xs -> torch.cat(xs, concat_dim).split(sizes[0], split_dim)

        rank 0   a0 a1 a2          a0 b0 c0
        rank 1   b0 b1 b2    ->    a1 b1 c1
        rank 2   c0 c1 c2          a2 b2 c2

    sizes = (split, concat): elements per rank along each of the two dims, any of them 0. By default every rank has as
    many as this one along concat_dim, and split_dim is split into equal shares. Other dims are whole and equal. The
    adjoint is ``switch`` with the two dims, and the two sizes, swapped.

    In a compiled model `bind` must have seen the comm: ``seqpar.bind(comm)``, or with a plan.

    Raises: ValueError for equal or missing dims, sizes that do not add up, or ranks that differ; on every rank, before
    any byte moves.

    Source: Jacobs et al. 2023 (DeepSpeed-Ulysses); Zhao et al. 2024 (DSP, section 3).
    """
    return switch_all([x], comm, split_dims=[split_dim], concat_dims=[concat_dim], sizes=sizes)[0]


def switch_all(
    xs: Sequence[Tensor], comm: Comm, *, split_dims: Sequence[int], concat_dims: Sequence[int],
    sizes: Sizes | None = None,
) -> list[Tensor]:  # fmt: skip
    """`switch` of several tensors, in one exchange in forward and one in backward. A collective.

    Any shapes and dtypes; the two dims of all tensors have the same sizes. Tensors without a gradient send none back.

    Raises: as `switch`.
    """
    with errors_on_all_ranks("switch", comm):
        sides = _checked(xs, comm, split_dims, concat_dims, sizes)
    return list(SWITCH(xs, [comm], *sides, comm.rank))


def start_switch(
    xs: Sequence[Tensor], comm: Comm, *, split_dims: Sequence[int], concat_dims: Sequence[int],
    sizes: Sizes | None = None,
) -> Switching:  # fmt: skip
    """Start `switch_all`: computation before the result's `wait` overlaps with the exchange. A collective.

    In backward, gradients are sent once those of the waited tensors exist, and awaited when autograd has run through
    the nodes recorded between start and wait.

    Raises: as `switch`; NotImplementedError in a compiled model.
    """
    with errors_on_all_ranks("switch", comm):
        if in_graph(*xs):
            raise NotImplementedError("start_switch: not supported in a compiled model; use switch_all")
        refuse_tangents("start_switch", xs)
        sides = _checked(xs, comm, split_dims, concat_dims, sizes)
    grads = requirements(xs)
    way = SwitchRecord(comm, _agreed(xs, comm, *sides, grads), sides, [n for n, grad in enumerate(grads) if grad])
    return Switching(way, list(_Start.apply(way, *xs)) if way.needed else way.post(xs))


def _checked(
    xs: Sequence[Tensor], comm: Comm, split_dims: Sequence[int], concat_dims: Sequence[int], sizes: Sizes | None
) -> tuple[list[int], list[int], list[int], list[int]]:
    check_comm("switch", comm)
    check_dense("switch", xs)
    if not xs or not len(xs) == len(split_dims) == len(concat_dims):
        raise ValueError(f"{len(xs)} tensors, {len(split_dims)} split dims and {len(concat_dims)} concat dims")
    found = []
    for x, split_dim, concat_dim in zip(xs, split_dims, concat_dims, strict=True):
        split_dim, concat_dim = _dim(x, split_dim, "split_dim"), _dim(x, concat_dim, "concat_dim")
        if split_dim == concat_dim:
            raise ValueError(f"split_dim and concat_dim are both {split_dim}; a switch is between two dimensions")
        found.append((split_dim, concat_dim, _sizes(x, comm, split_dim, concat_dim, sizes)))
    splits, concats, shares = zip(*found, strict=True)
    if any(each != shares[0] for each in shares):
        raise ValueError(f"tensors of one switch have the same sizes along their two dims, got {list(shares)}")
    return list(splits), list(concats), *shares[0]


def _dim(x: Tensor, dim: int, name: str) -> int:
    if not isinstance(x, Tensor):
        raise ValueError(f"x must be a tensor, got {x!r:.200}")
    if type(dim) is not int and not isinstance(dim, Integral):  # the check of an abstract class is slow
        raise TypeError(f"{name} must be an integer, got {dim!r:.200}")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{name}={dim} is not a dimension of a tensor of shape {list(x.shape)}")
    return dim % x.dim()


def _sizes(x: Tensor, comm: Comm, split_dim: int, concat_dim: int, sizes: Sizes | None) -> tuple[list[int], list[int]]:
    whole, part = x.shape[split_dim], x.shape[concat_dim]
    if sizes is None:
        if whole % comm.size:
            raise ValueError(f"dim {split_dim} has {whole} elements for {comm.size} ranks; give uneven shares as sizes")
        return [whole // comm.size] * comm.size, [part] * comm.size
    try:
        split, concat = ([index(n) for n in side] for side in sizes)
    except (TypeError, ValueError):
        raise TypeError(f"sizes must be two sequences of {comm.size} integers, got {sizes!r:.200}") from None
    for name, side in (("split", split), ("concat", concat)):
        if len(side) != comm.size or min(side) < 0:
            raise ValueError(f"{name} sizes must be {comm.size} numbers of at least 0, got {side}")
    if sum(split) != whole:
        raise ValueError(f"split sizes {split} sum to {sum(split)}, dim {split_dim} of x has {whole}")
    if concat[comm.rank] != part:
        raise ValueError(f"concat sizes {concat} give rank {comm.rank} {concat[comm.rank]}, x has {part}")
    return split, concat


def _agreed(
    xs: Sequence[Tensor], comm: Comm, split_dims: Sequence[int], concat_dims: Sequence[int], split: Sequence[int],
    concat: Sequence[int], grads: Sequence[bool],
) -> Tag:  # fmt: skip
    """The tag of a call that all ranks make with the same arguments."""
    with agreement("switch", comm) as call:
        kinds = tuple([(x.shape, x.dtype, x.device.type) for x in xs])
        sides = tuple(split_dims), tuple(concat_dims), tuple(split), tuple(concat)
        call.facts, call.digest = _facts(kinds, *sides, tuple(grads))
    check_repetition("switch", comm, sides, "pair of dims")
    return Tag(call.digest, comm.next_call(), 0, 0, "switch (forward)")


@lru_cache(maxsize=4096)
def _facts(
    kinds: Sequence[tuple[torch.Size, torch.dtype, str]], split_dims: Sequence[int], concat_dims: Sequence[int],
    split: Sequence[int], concat: Sequence[int], grads: Sequence[bool],
) -> tuple[dict[str, object], int]:  # fmt: skip
    """The facts of a call that ranks compare, and their digest. kinds: shapes, dtypes and devices of its tensors."""
    shapes, dtypes, devices = zip(*kinds)
    others = [
        [n for d, n in enumerate(shape) if d not in dims] for shape, *dims in zip(shapes, split_dims, concat_dims)
    ]
    facts: dict[str, object] = {
        "split_dim": list(split_dims), "concat_dim": list(concat_dims), "split sizes": list(split),
        "concat sizes": list(concat), "other dims": others, "dtype": list(dtypes), "device": list(devices),
        "requires grad": list(grads),
    }  # fmt: skip
    return facts, digest_of_call("switch", facts)


def _post(
    xs: Sequence[Tensor], comm: Comm, split_dims: Sequence[int], concat_dims: Sequence[int], split: Sequence[int],
    concat: Sequence[int], tag: Tag,
) -> tuple[list[Tensor], Callable[[], None]]:  # fmt: skip
    """Memory for the results, and a function that waits until they have arrived."""
    sends: dict[int, list[Message]] = {peer: [] for peer in range(comm.size)}
    recvs: dict[int, list[Message]] = {peer: [] for peer in range(comm.size)}
    ys = []
    for x, split_dim, concat_dim in zip(xs, split_dims, concat_dims, strict=True):
        x = x.resolve_conj().resolve_neg()
        shape = list(x.shape)
        shape[split_dim], shape[concat_dim] = split[comm.rank], sum(concat)
        ys.append(comm.empty(shape, x.dtype, x.device, kept=True))
        pieces = torch.split_with_sizes(x, split, split_dim)
        parts = torch.split_with_sizes(ys[-1], concat, concat_dim)
        for peer in range(comm.size):
            sends[peer].append([Place(pieces[peer])])
            recvs[peer].append([Place(parts[peer])])
    return ys, post(comm, sends, recvs, tag)


def _all_to_all(xs: Sequence[Tensor], comm: Comm, sides: tuple[Sequence[int], ...], tag: Tag) -> list[Tensor]:
    with _aborting(comm, tag):
        ys, wait = _post(xs, comm, *sides, tag)
        wait()
    return ys


def _aborting(comm: Comm, tag: Tag) -> AbstractContextManager[None]:
    """Reports an error in a part of the exchange to the other ranks, which would wait for that part."""
    return abort_on_error(comm, f"switch, call {tag.call}")


def _run(
    xs: Sequence[Tensor], values: Sequence[Any], split_dims: Sequence[int], concat_dims: Sequence[int],
    split: Sequence[int], concat: Sequence[int], rank: int, grads: Sequence[bool],
) -> tuple[list[Tensor], tuple[()], Record]:  # fmt: skip
    """The results, and the record of the call. values: the comm, or the record of the switch to undo."""
    if isinstance(values[0], Record):
        comm, tag = values[0].comm, values[0].way_back()
    else:
        (comm,) = checked_values(values)
        tag = _agreed(xs, comm, split_dims, concat_dims, split, concat, grads)
    return _all_to_all(xs, comm, (split_dims, concat_dims, split, concat), tag), (), Record(comm, tag)


def _adjoint(_: object, options: tuple[Any, ...], needed: Sequence[int]) -> tuple[CollectiveOp, tuple[Any, ...]]:
    split_dims, concat_dims, split, concat, rank, *_ = options
    dims = ([side[n] for n in needed] for side in (concat_dims, split_dims))
    return SWITCH, (*dims, concat, split, rank)


def _fake(
    xs: Sequence[Tensor], handles: Sequence[Tensor], split_dims: Sequence[int], concat_dims: Sequence[int],
    split: Sequence[int], concat: Sequence[int], rank: int, grads: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    ys = []
    for x, split_dim, concat_dim in zip(xs, split_dims, concat_dims, strict=True):
        shape = list(x.shape)
        shape[split_dim], shape[concat_dim] = split[rank], sum(concat)
        ys.append(x.new_empty(shape))
    return ys


SIDES = "int[] split_dims, int[] concat_dims, SymInt[] split, SymInt[] concat, int rank"
SWITCH = CollectiveOp("switch", _run, _fake, options=SIDES, adjoint=_adjoint, checks=False)


class SwitchRecord(Record):
    """A switch with its exchanges, posted and finished separately, in backward too. needed: tensors with gradients."""

    def __init__(self, comm: Comm, tag: Tag, sides: tuple[list[int], ...], needed: list[int]) -> None:
        super().__init__(comm, tag)
        self.sides, self.needed = sides, needed
        split_dims, concat_dims, split, concat = sides
        self.back = [concat_dims[n] for n in needed], [split_dims[n] for n in needed], concat, split
        self._waits: list[Callable[[], None]] = []
        self._backs: list[tuple[Tag, list[Tensor], Callable[[], None]]] = []

    def post(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """The results, which hold nothing before `finish`."""
        with _aborting(self.comm, self.tag):
            ys, wait = _post(xs, self.comm, *self.sides, self.tag)
        self._waits.append(wait)
        return ys

    def finish(self) -> None:
        """Wait for the exchange, and release the sent tensors: the graph keeps the rest until backward."""
        with _aborting(self.comm, self.tag):
            self._waits.pop()()

    def post_back(self, dys: Sequence[Tensor]) -> None:
        """Send gradients; `finish_back` returns the received ones."""
        tag = self.way_back()
        with _aborting(self.comm, tag):
            self._backs.append((tag, *_post(dys, self.comm, *self.back, tag)))

    def finish_back(self) -> list[Tensor]:
        """The gradients of the switched tensors."""
        tag, dxs, wait = self._backs.pop()
        with _aborting(self.comm, tag):
            wait()
        return dxs


class Switching:
    """A switch in progress. Dropping it without waiting is an error that marks the comm dead."""

    def __init__(self, way: SwitchRecord, ys: list[Tensor]) -> None:
        self._way, self._ys, self._waited = way, ys, False

    def wait(self) -> list[Tensor]:
        """The switched tensors, in order; the same ones at every call."""
        if not self._waited:
            self._waited = True
            if not self._way.needed:
                self._way.finish()
                return self._ys
            finished = _Finish.apply(self._way, *(self._ys[n] for n in self._way.needed))
            for n, y in zip(self._way.needed, finished, strict=True):
                self._ys[n] = y
        return self._ys


class _Start(torch.autograd.Function):
    """Posts the exchange; in backward waits for the gradients that `_Finish` sent."""

    @staticmethod
    def forward(ctx: Any, way: SwitchRecord, *xs: Tensor) -> tuple[Tensor, ...]:
        ys = way.post(xs)
        ctx.way, ctx.count = way, len(ys)
        ctx.mark_non_differentiable(*(y for n, y in enumerate(ys) if n not in way.needed))
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("a switch begun ahead", dys)
        by_number = dict(zip(ctx.way.needed, ctx.way.finish_back(), strict=True))
        return None, *(by_number.get(n) for n in range(ctx.count))


class _Finish(torch.autograd.Function):
    """Waits, after which the same memory holds the results; in backward sends the gradients."""

    @staticmethod
    def forward(ctx: Any, way: SwitchRecord, *ys: Tensor) -> tuple[Tensor, ...]:
        way.finish()
        ctx.way = way
        ctx.mark_dirty(*ys)
        return ys

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("a switch begun ahead", dys)
        ctx.way.post_back(dys)
        return None, *dys
