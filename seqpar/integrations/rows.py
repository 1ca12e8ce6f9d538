"""Rows of a rank: a tensor that looks whole and holds this rank's rows of it.

::

    whole x [B, 5, D]     cut      rank 0   rows of shape [B, 5, D], with x[:, :2]
                         ---->     rank 1   rows of shape [B, 5, D], with x[:, 2:]
                         gather
                         <----

What works row by row stays on the rank: arithmetic, with whole tensors too, which are cut then; linear layers, norms,
`cat`, and slices between segments. Anything else gathers first, so code that knows nothing of ranks is right.

**Gradients.** At every whole tensor the sum over ranks of its gradients is the gradient of one process. The adjoint of
a cut has zeros for the rows of others, and the adjoint of a gather sums over ranks and takes this rank's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from seqpar.comm import Comm
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.ops import unshard
from seqpar.plan import Plan
from seqpar.private import torch as torch_private
from seqpar.private.torch import tree_leaves, tree_map
from seqpar.trial.segments import RowPlace, RowSegment, RowSegments, held, ranges, total


class RowsOwner(Protocol):
    """A forward: its comm, and how often it has cut a whole tensor, or used it by rows, so far.

    copies: of tensors that were gathered, memory -> that of their rows.
    """

    comm: Comm
    cuts: int
    copies: dict[StorageWeakRef, StorageWeakRef]

    def check_use(self, rows: Tensor) -> None:
        """Raise NotImplementedError for rows that may not be used now."""


class RankRows(Tensor):
    """This rank's rows of a tensor, which has the shape of the whole tensor for code outside."""

    place: RowPlace
    owner: RowsOwner

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch_private.DisableTorchFunctionSubclass():
            return _call(func, args, kwargs or {})


def rows_of(local: Tensor, place: RowPlace, owner: RowsOwner) -> RankRows:
    """A rank's rows, as a tensor that looks whole."""
    x = local.view_as(local).as_subclass(RankRows)
    x.place, x.owner = place, owner
    return x


def local(x: RankRows) -> Tensor:
    """The rows that a rank holds."""
    x.owner.check_use(x)
    return x.as_subclass(Tensor)


def whole_shape(x: RankRows) -> torch.Size:
    """The shape of the whole tensor."""
    shape = list(Tensor.shape.__get__(x))
    shape[x.place.dim] = total(x.place.segments)
    return torch.Size(shape)


def cut(x: Tensor, place: RowPlace, owner: RowsOwner) -> Tensor:
    """This rank's rows of a whole tensor, in memory of their own, so that the whole one need not stay."""
    owner.cuts += x.requires_grad
    parts = [x.narrow(place.dim, start, stop - start) for start, stop in ranges(place.segments, *_of(owner))]
    return parts[0].clone() if len(parts) == 1 else torch.cat(parts, place.dim)


def whole(x: Any) -> Any:
    """The whole tensor of rows; anything else as it is. A collective for rows."""
    if not isinstance(x, RankRows):
        return x
    with torch_private.DisableTorchFunctionSubclass():
        rows = local(x)
        out = gather(rows, x.place, x.owner, outside=True)
        if out is not rows:
            x.owner.copies[StorageWeakRef(out.untyped_storage())] = StorageWeakRef(rows.untyped_storage())
        return out


def gather(x: Tensor, place: RowPlace, owner: RowsOwner, *, outside: bool = False) -> Tensor:
    """The whole tensor of each rank's rows. A collective, if any segment is cut.

    outside: whether what follows is whole until the forward cuts again. Then the gradient is the same on every rank,
    and this rank takes its rows of it, with nothing sent.
    """
    dim, segments = place
    if not any(each.cut for each in segments):
        return x
    sizes = [held([each], *_of(owner)) for each in segments]
    parts = x.split(sizes, dim)
    own = [piece for piece, each in zip(parts, segments) if each.cut]
    counts = [each.count for each in segments if each.cut]
    cuts = owner.cuts if outside else -1
    joined = _Gather.apply(own[0] if len(own) == 1 else torch.cat(own, dim), dim, tuple(counts), owner, cuts)
    if len(own) == len(segments):
        return joined  # type: ignore[no-any-return]
    pieces = iter(joined.split(counts, dim))
    return torch.cat([next(pieces) if each.cut else piece for piece, each in zip(parts, segments)], dim)


def _of(owner: RowsOwner) -> tuple[int, int]:
    return owner.comm.rank, owner.comm.size


class _Gather(torch.autograd.Function):
    """The whole of some segments, all of them cut. counts: of each. cuts: of the owner, if what follows is whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, counts: tuple[int, ...], owner: RowsOwner, cuts: int) -> Tensor:
        plan = _plan(counts, owner.comm.size)
        ctx.owner, ctx.dim, ctx.cuts = owner, dim, cuts
        ctx.own = ranges([RowSegment(n, True) for n in counts], *_of(owner))
        with torch.enable_grad():
            leaf = x.detach().requires_grad_(x.requires_grad)
            y = unshard(leaf, plan, owner.comm, dim=dim)
        if y.requires_grad:
            ctx.adjoint, ctx.leaf = torch.autograd.graph.get_gradient_edge(y), leaf
        return y.detach().contiguous()  # as in one process, whose code may call view

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.cuts == ctx.owner.cuts:
            own = [dy.narrow(ctx.dim, start, stop - start) for start, stop in ctx.own]
            dx = torch.cat(own, ctx.dim) * ctx.owner.comm.size
        else:
            (dx,) = torch.autograd.grad([ctx.adjoint], [ctx.leaf], [dy])
        return dx, None, None, None, None


@lru_cache(256)
def _plan(counts: tuple[int, ...], size: int) -> Plan:
    """The plan by which ranks hold their parts of segments."""
    segments = [RowSegment(n, True) for n in counts]
    own = [[np.arange(*each) for each in ranges(segments, rank, size)] for rank in range(size)]
    return Plan(Mask([total(segments)], causal=False), Layout([np.concatenate(each) for each in own]))


_ELEMENTWISE = {
    Tensor.add, Tensor.sub, Tensor.mul, Tensor.div, Tensor.neg, Tensor.abs, Tensor.__add__, Tensor.__radd__,
    Tensor.__sub__, Tensor.__rsub__, Tensor.__mul__, Tensor.__rmul__, Tensor.__truediv__, Tensor.__rtruediv__,
    Tensor.__neg__, torch.add, torch.sub, torch.mul, torch.div, torch.addcmul, torch.where, torch.nan_to_num,
    torch.tanh, torch.sigmoid, F.silu, F.gelu, F.relu, Tensor.clamp, Tensor.clip, Tensor.to, Tensor.float, Tensor.half,
    Tensor.bfloat16, Tensor.double, Tensor.type, Tensor.type_as, Tensor.contiguous, Tensor.clone,
    Tensor.view_as,  # as autograd functions do that return what they got
}  # fmt: skip
_IN_PLACE = {
    Tensor.__iadd__, Tensor.__isub__, Tensor.__imul__, Tensor.__itruediv__, Tensor.add_, Tensor.sub_, Tensor.mul_,
    Tensor.div_,
}  # fmt: skip
_WRITING = {
    "__setitem__", "__set__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__",
    "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__",
}  # fmt: skip
_OF_ANY_SHAPE = {
    Tensor.dtype.__get__, Tensor.device.__get__, Tensor.requires_grad.__get__, Tensor.ndim.__get__,
    Tensor.grad_fn.__get__, Tensor.is_leaf.__get__, Tensor.layout.__get__, Tensor.is_cuda.__get__, Tensor.grad.__get__,
    Tensor.is_floating_point, Tensor.is_complex, Tensor.dim, Tensor.ndimension, Tensor.register_hook, Tensor.__hash__,
    Tensor.get_device, Tensor.requires_grad.__set__, Tensor.grad.__set__, Tensor.requires_grad_, Tensor.element_size,
    torch.is_same_size,
}  # fmt: skip


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    """A function of torch, of arguments some of which are rows."""
    flat = [*args, *kwargs.values()]
    if any(isinstance(x, (list, tuple, dict)) for x in flat):
        flat = tree_leaves(flat)
    first = next(x for x in flat if isinstance(x, RankRows))
    if func == Tensor.shape.__get__:
        return whole_shape(first)
    if func in (Tensor.size, Tensor.numel, Tensor.__len__):
        return func(torch.empty(whole_shape(first), device="meta"), *args[1:], **kwargs)
    if func in _OF_ANY_SHAPE:
        return func(*args, **kwargs)
    if func is Tensor.detach:  # in the backward of a checkpoint too
        return rows_of(func(first.as_subclass(Tensor)), first.place, first.owner)
    out = _row_by_row(func, args, kwargs, first)
    if out is NotImplemented:
        _refuse_writes(func, args, kwargs)
        args, kwargs = tree_map(whole, (args, kwargs))
        return func(*args, **kwargs)
    for x in flat:  # whose gradient is a share, since it met some rows
        first.owner.cuts += isinstance(x, Tensor) and not isinstance(x, RankRows) and x.grad_fn is not None
    return out


def written(func: Any, args: Any, kwargs: Any) -> Any:
    """The argument that a function of torch writes into, if any."""
    name = getattr(func, "__name__", "")
    if name in _WRITING or name.endswith("_") != name.endswith("__") or kwargs.get("inplace"):
        return args[0] if args else None
    return kwargs.get("out")


def _refuse_writes(func: Any, args: Any, kwargs: Any) -> None:
    """Raise NotImplementedError for a function that would write into the gathered tensor, where nobody reads it."""
    if isinstance(written(func, args, kwargs), RankRows):
        raise NotImplementedError(
            f"diffusers: {func.__name__} between blocks writes into a tensor of which each rank holds its rows; give "
            "whole= the list of blocks before it, or make another tensor"
        )


def _row_by_row(func: Any, args: Any, kwargs: Any, first: RankRows) -> Any:
    """The rows of the result, if each row of it follows from the same rows of the arguments; else NotImplemented."""
    if func in _ELEMENTWISE or func in _IN_PLACE:
        return _elementwise(func, args, kwargs, first)
    if func in (F.linear, F.layer_norm, F.rms_norm):
        return _along_the_last_dim(func, args, kwargs)
    if func in (torch.cat, torch.concat) and args:
        return _joined(args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0))
    if func is Tensor.__getitem__:
        return _sliced(first, args[1] if isinstance(args[1], tuple) else (args[1],))
    if func in (Tensor.split, torch.split, Tensor.chunk, torch.chunk, Tensor.split_with_sizes):
        return _split(func, first, args, kwargs)
    return NotImplemented


def _elementwise(func: Callable[..., Any], args: Any, kwargs: Any, first: RankRows) -> Any:
    place, dims, in_place = first.place, Tensor.dim(first), func in _IN_PLACE
    if kwargs.get("out") is not None or (in_place and not isinstance(args[0], RankRows)):
        return NotImplemented
    own = list[Any]()
    for x in (*args, *kwargs.values()):
        if isinstance(x, RankRows):
            if x.place != place or Tensor.dim(x) != dims:
                return NotImplemented
            x = x if in_place and not own else local(x)
        elif isinstance(x, Tensor) and x.dim() >= dims - place.dim:
            at = x.dim() - dims + place.dim
            if at < 0 or x.dim() > dims or x.shape[at] not in (1, total(place.segments)) or func is Tensor.view_as:
                return NotImplemented
            if x.shape[at] > 1:
                x = cut(x, RowPlace(at, place.segments), first.owner)
        own.append(x)
    out = func(*own[: len(args)], **dict(zip(kwargs, own[len(args) :])))
    return out if in_place else rows_of(out, place, first.owner)


def _along_the_last_dim(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    x, more = args[0], [*args[1:], *kwargs.values()]
    if not isinstance(x, RankRows) or any(isinstance(y, RankRows) for y in more) or x.place.dim == Tensor.dim(x) - 1:
        return NotImplemented
    if func is not F.linear and len(args[1] if len(args) > 1 else kwargs["normalized_shape"]) > 1:
        return NotImplemented
    return rows_of(func(local(x), *args[1:], **kwargs), x.place, x.owner)


def _joined(several: Iterable[Tensor], dim: int) -> Any:
    several = list(several)
    first = next(x for x in several if isinstance(x, RankRows))
    place, owner, parts = first.place, first.owner, list[Tensor]()
    segments: RowSegments = ()
    if dim % Tensor.dim(first) != place.dim:
        return NotImplemented
    for x in several:
        own = x.place if isinstance(x, RankRows) else RowPlace(place.dim, (RowSegment(x.shape[place.dim], True),))
        if own.dim != place.dim:
            return NotImplemented
        parts.append(local(x) if isinstance(x, RankRows) else cut(x, own, owner))
        segments += own.segments
    return rows_of(torch.cat(parts, place.dim), RowPlace(place.dim, segments), owner)


def _sliced(x: RankRows, key: tuple[Any, ...]) -> Any:
    dim = x.place.dim
    if any(not isinstance(each, slice) or each.step not in (None, 1) for each in key):
        return NotImplemented
    others = any(each != slice(None) for n, each in enumerate(key) if n != dim)
    if dim >= len(key) or key[dim] == slice(None):
        return rows_of(local(x)[key], x.place, x.owner) if others else x
    if others:
        return NotImplemented
    start, stop, _ = key[dim].indices(total(x.place.segments))
    return _between(x, start, max(start, stop))


def _split(func: Any, x: RankRows, args: Any, kwargs: Any) -> Any:
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % Tensor.dim(x)
    if dim != x.place.dim:
        return tuple(rows_of(y, x.place, x.owner) for y in func(local(x), *args[1:], **kwargs))
    sizes = args[1] if len(args) > 1 else next((kwargs[name] for name in kwargs if name.startswith("split_")), None)
    if not isinstance(sizes, (list, tuple)):
        return NotImplemented
    parts = [_between(x, sum(sizes[:n]), sum(sizes[: n + 1])) for n in range(len(sizes))]
    return NotImplemented if any(each is NotImplemented for each in parts) else tuple(parts)


def _between(x: RankRows, start: int, stop: int) -> Any:
    """Some rows of the whole tensor, if these are whole segments of it."""
    at = mine = 0
    found, first, count = [], 0, 0
    for each in x.place.segments:
        here = held([each], *_of(x.owner))
        if start <= at and at + each.count <= stop and each.count:
            first = first if found else mine
            found.append(each)
            count += here
        at, mine = at + each.count, mine + here
    if total(found) != stop - start or not found:
        return NotImplemented
    return rows_of(local(x).narrow(x.place.dim, first, count), RowPlace(x.place.dim, tuple(found)), x.owner)
