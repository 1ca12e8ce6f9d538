"""The moves of DSP: keep (nothing), `split`, `switch` and `gather`. The space has all sizes.

::

    split    whole -> t    local slice           backward: zeros around it ("sum"), or all-gather ("replicated")
    switch   t -> s        one all-to-all        backward: one all-to-all
    gather   s -> whole    one all-gather        backward: reduce-scatter ("sum"), or local slice ("replicated")

How a gradient counts depends on the code around the sharded part, and is given as `grad`:

    "sum"          each rank's gradient is its share; the sum over ranks is the gradient. The same holds for parameters.
    "replicated"   every rank computes the same from the whole tensor, and every rank has the whole gradient.

Between a `split` and a `gather` every gradient is a share in both cases: parameters there are summed over ranks.

Source: Zhao et al. 2024 (DSP, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqpar.comm import Comm
from seqpar.dsp.form import Form, form_of
from seqpar.dsp.space import Sharding, Space, fitting_form, shape_of, shares
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.ops import switch_all as exchange
from seqpar.ops import unshard
from seqpar.ops.core.agreement import errors_on_all_ranks
from seqpar.ops.core.collective_op import refuse_double_backward
from seqpar.ops.move.switch import Switching, start_switch
from seqpar.plan import Plan

GRADS = ("sum", "replicated")


def split(x: Tensor, space: Space, form: str, dim: str, *, grad: str = "sum") -> Tensor:
    """This rank's share along a dimension of a tensor that every rank has whole. Local.

    Spec over ranks: ``[x] * ranks -> x.split(space.shares(dim), dim)``; a grouped axis is split up and merged again.
    grad: whether the gradients of x are shares that sum up ("sum", nothing is sent) or whole on every rank (an
    all-gather).

    Raises: ValueError for a tensor that does not fit the form, or is not whole.
    """
    with errors_on_all_ranks("split", space.comm):
        _check_grad(grad)
        at, share = form_of(form).index(dim), space.shares(dim)[space.comm.rank]
        whole = space.unfold(x, form, None)
    y = whole.narrow(at, space.start(dim), share)
    if grad == "replicated":
        y = _SplitReplicated.apply(y, whole, _plan(space.dims[dim], space.comm.size), space.comm, at)
    return form_of(form).fold(y)


def gather(x: Tensor, space: Space, form: str, dim: str, *, grad: str = "sum") -> Tensor:
    """The whole tensor on every rank, from each rank's share along a dimension. A collective.

    Spec over ranks: ``xs -> [cat(xs, dim)] * ranks``; a grouped axis is split up and merged again. grad: whether each
    rank's gradient of the result is a share ("sum": gradients are summed, so a loss that all ranks compute counts once
    per rank), or whole on every rank (nothing is sent, and the loss counts once).

    Raises: ValueError for a tensor that is not this rank's share of the form, or if ranks differ.
    """
    with errors_on_all_ranks("unshard", space.comm):
        _check_grad(grad)
        at = form_of(form).index(dim)
        share = space.unfold(x, form, dim)
        plan = _plan(space.dims[dim], space.comm.size)
    if grad == "sum":
        whole = unshard(share, plan, space.comm, dim=at)
    else:
        whole = _UnshardAlike.apply(share, plan, space.comm, at, space.start(dim))
    return form_of(form).fold(whole)


def switch(x: Tensor, space: Space, form: str, src: str, dst: str) -> Tensor:
    """This rank's share along ``dst`` of a tensor sharded along ``src``: one exchange, and one in backward.

    Spec over ranks: ``xs -> cat(xs, src).split(space.shares(dst), dst)``. Shares are uneven if the ranks do not divide
    a size, and empty if the size is smaller than the number of ranks; nothing is padded.

    Raises: ValueError for a tensor that is not this rank's share of the form, or if ranks differ.
    """
    return switch_all([x], space, [form], src, dst)[0]


def switch_all(xs: Sequence[Tensor], space: Space, forms: Sequence[str], src: str, dst: str) -> list[Tensor]:
    """`switch` of several tensors in one exchange, and one in backward."""
    recipe = _switch_recipe(xs, space, forms, src, dst)
    unfolded = [form.unfold(x, recipe.sizes) for form, x in zip(recipe.forms, xs)]
    ys = exchange(unfolded, space.comm, **recipe.arguments)
    return [form.fold(y) for form, y in zip(recipe.forms, ys)]


def begin_switch(xs: Sequence[Tensor], space: Space, forms: Sequence[str], src: str, dst: str) -> Pending:
    """Start `switch_all`: computation before `wait` overlaps with the exchange, in forward and backward."""
    recipe = _switch_recipe(xs, space, forms, src, dst)
    unfolded = [form.unfold(x, recipe.sizes) for form, x in zip(recipe.forms, xs)]
    return Pending(start_switch(unfolded, space.comm, **recipe.arguments), recipe.forms)


class Pending:
    """A switch in progress."""

    def __init__(self, switching: Switching, forms: Sequence[Form]) -> None:
        self._switching, self._forms = switching, forms

    def wait(self) -> list[Tensor]:
        """The switched tensors, in order."""
        return [form.fold(y) for form, y in zip(self._forms, self._switching.wait())]


def move(
    xs: Sequence[Tensor], space: Space, forms: Sequence[str], src: Sharding, dst: Sharding, *, grad: str = "sum"
) -> list[Tensor]:
    """Tensors sharded along src, moved to dst: kept, split, switched in one exchange, or gathered. None means whole.

    grad: as in `split` and `gather`. A collective if src is a dimension other than dst.

    Raises: ValueError for a tensor that does not fit its form under src, even if nothing moves.
    """
    _check_several(xs)
    if src is not None and dst is not None and src != dst:
        return switch_all(xs, space, forms, src, dst)
    if src is None and dst is not None:
        return [split(x, space, form, dst, grad=grad) for x, form in zip(xs, forms, strict=True)]
    if src is not None and dst is None:
        return [gather(x, space, form, src, grad=grad) for x, form in zip(xs, forms, strict=True)]
    with errors_on_all_ranks("move", space.comm):
        for n, (x, form) in enumerate(zip(xs, forms, strict=True)):
            space.check(x, form, src, f"tensor {n}")
    return list(xs)


def share_of(x: Tensor, space: Space, form: str, sharded: Sharding, what: str = "x") -> Tensor:
    """This rank's share of a tensor that every rank has whole; all of it if the form lacks the dimension.

    Raises: ValueError for a tensor that does not fit the form, or is not whole.
    """
    with errors_on_all_ranks("share_of", space.comm):
        names = space.check(x, form, None, what).names
    return split(x, space, form, sharded) if sharded is not None and sharded in names else x


def count_once(x: Tensor, comm: Comm) -> Tensor:
    """x, computed equally on all ranks, counted once: only rank 0's gradient is passed on. Local."""
    return x if comm.size == 1 else _CountOnce.apply(x, comm.rank)


class _SwitchRecipe(NamedTuple):
    """A switch of tensors of given shapes: their forms, sizes on this rank, and the arguments of `seqpar.switch`."""

    forms: tuple[Form, ...]
    sizes: dict[str, int]
    arguments: dict[str, Any]


def _switch_recipe(xs: Sequence[Tensor], space: Space, forms: Sequence[str], src: str, dst: str) -> _SwitchRecipe:
    """The recipe. Raises on every rank if the tensors cannot be switched."""
    with errors_on_all_ranks("switch", space.comm):
        _check_several(xs)
        if not xs or len(xs) != len(forms):
            raise ValueError(f"a switch of {len(xs)} tensors with {len(forms)} forms; give each a form")
        shapes = tuple([shape_of(x, f"tensor {n}") for n, x in enumerate(xs)])
        return _recipe_of_shapes(tuple(forms), shapes, *space.key, src, dst)


@lru_cache(maxsize=4096)
def _recipe_of_shapes(
    texts: tuple[str, ...], shapes: tuple[tuple[int, ...], ...], dims: tuple[tuple[str, int], ...], ranks: int,
    rank: int, src: str, dst: str,
) -> _SwitchRecipe:  # fmt: skip
    forms = tuple(
        fitting_form(text, shape, dims, ranks, rank, src, f"tensor {n}")
        for n, (text, shape) in enumerate(zip(texts, shapes, strict=True))
    )
    axes = {"split_dims": [form.index(dst) for form in forms], "concat_dims": [form.index(src) for form in forms]}
    sizes = dict(dims)
    if dst not in sizes:
        raise ValueError(f'"{dst}" is not a dimension of {sizes}; give one of these')
    sides = shares(sizes[dst], ranks), shares(sizes[src], ranks)
    return _SwitchRecipe(forms, sizes | {src: sides[1][rank]}, axes | {"sizes": sides})


def _check_several(xs: object) -> None:
    if isinstance(xs, Tensor):
        raise ValueError(
            f"expected a list of tensors, got one of shape {list(xs.shape)}; give [x], and its form in a list"
        )


def _check_grad(grad: str) -> None:
    if grad not in GRADS:
        raise ValueError(f"grad must be one of {GRADS}, got {grad!r}")


@lru_cache(maxsize=256)
def _plan(size: int, ranks: int) -> Plan:
    """The plan by which ranks hold the elements of a dimension."""
    return Plan(Mask([size]), Layout.contiguous(size, ranks))


class _SplitReplicated(torch.autograd.Function):
    """A slice of a whole tensor. Its gradient is gathered, so that every rank has the gradient of the whole tensor."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, whole: Tensor, plan: Plan, comm: Comm, at: int) -> Tensor:
        ctx.back = plan, comm, at
        return y.detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward('split with grad="replicated"', [dy])
        plan, comm, at = ctx.back
        return None, unshard(dy, plan, comm, dim=at), None, None, None


class _UnshardAlike(torch.autograd.Function):
    """`unshard` for a result that all ranks use identically: the gradient is a slice of it, with nothing sent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Plan, comm: Comm, at: int, start: int) -> Tensor:
        ctx.mine, ctx.seqpar_alike = (at, start, x.shape[at]), comm.size > 1
        return unshard(x, plan, comm, dim=at).detach()  # no view, so that it may be changed in place

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("a gather whose result all ranks use alike", [dy])
        return dy.narrow(*ctx.mine), None, None, None, None


class _CountOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: int) -> Tensor:
        ctx.rank, ctx.seqpar_alike = rank, True
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy if ctx.rank == 0 else torch.zeros_like(dy), None
