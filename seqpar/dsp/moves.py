"""The four moves of DSP: keep, which is nothing, `split`, `switch` and `gather`; the space says all about the sizes.

::

    split    whole -> t    local slice           backward: zeros around it ("sum"), or all-gather ("replicated")
    switch   t -> s        one all-to-all        backward: one all-to-all
    gather   s -> whole    one all-gather        backward: reduce-scatter ("sum"), or local slice ("replicated")

How a gradient counts is a fact about the code around the sharded part, and is said with `grad`:

    "sum"          each rank's gradient is its share, and the sum over ranks is the gradient. So are parameters' then.
    "replicated"   every rank computes the same with the whole tensor, and every rank's gradient is the whole one.

Between a `split` and a `gather` every gradient is a share, whatever was said: parameters there are summed over ranks.

Source: Zhao et al. 2024 (DSP, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from seqpar.comm import Comm
from seqpar.dsp.form import form_of
from seqpar.dsp.space import Space
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.ops import switch_all as exchange
from seqpar.ops import unshard
from seqpar.ops.core.agreement import raise_on_all_ranks
from seqpar.ops.move.switch import Switching, start_switch
from seqpar.plan import Plan

GRADS = ("sum", "replicated")


def split(x: Tensor, space: Space, form: str, dim: str, *, grad: str = "sum") -> Tensor:
    """This rank's share along a dimension of a tensor that every rank has whole. Local.

    Spec over ranks: ``[x] * ranks -> x.split(space.shares(dim), dim)``, the axis taken out of its group and put back.
    grad: whether what reaches x are shares that sum to its gradient (free), or all of it on every rank (an all-gather).

    Raises: ValueError for a tensor that is not of the form or whole.
    """
    _known(grad)
    at, own = form_of(form).index(dim), space.shares(dim)[space.comm.rank]
    y = space.unfold(x, form, None).narrow(at, space.start(dim), own)
    if grad == "replicated":
        y = _Whole.apply(y, space.unfold(x, form, None), space, dim, at)
    return space.fold(y, form)


def gather(x: Tensor, space: Space, form: str, dim: str, *, grad: str = "sum") -> Tensor:
    """The whole tensor, on every rank, of which each has its share along a dimension. A collective.

    Spec over ranks: ``xs -> [cat(xs, dim)] * ranks``, the axis taken out of its group and put back. grad: whether each
    rank's gradient of the result is its share (they are summed: a loss that all ranks compute alike counts once for
    each), or all of it on every rank (nothing is sent, and the loss counts once).

    Raises: ValueError for a tensor that is not this rank's share of the form, or ranks that differ.
    """
    try:
        _known(grad)
        at = form_of(form).index(dim)
        local = space.unfold(x, form, dim)
        plan = _plan(space.dims[dim], space.comm.size)
    except Exception as error:
        raise_on_all_ranks("unshard", space.comm, error)
    if grad == "sum":
        return space.fold(unshard(local, plan, space.comm, dim=at), form)
    return space.fold(_Alike.apply(local, plan, space.comm, at, space.start(dim)), form)


def switch(x: Tensor, space: Space, form: str, src: str, dst: str) -> Tensor:
    """This rank's share along ``dst`` of a tensor sharded along ``src``: one exchange, and one backward. A collective.

    Spec over ranks: ``xs -> cat(xs, src).split(space.shares(dst), dst)``. Shares are uneven where ranks do not divide
    a size, and empty where it is smaller than the ranks; nothing is padded.

    Raises: ValueError for a tensor that is not this rank's share of the form, or ranks that differ.
    """
    return switch_all([x], space, [form], src, dst)[0]


def switch_all(xs: Sequence[Tensor], space: Space, forms: Sequence[str], src: str, dst: str) -> list[Tensor]:
    """`switch` of several tensors in one exchange, and one backward."""
    try:
        local, arguments = _arguments(xs, space, forms, src, dst)
    except Exception as error:
        raise_on_all_ranks("switch", space.comm, error)
    return _folded(exchange(local, space.comm, **arguments), space, forms)


def begin_switch(xs: Sequence[Tensor], space: Space, forms: Sequence[str], src: str, dst: str) -> Pending:
    """`switch_all` under way: what is computed before `wait` runs beside the exchange, forward and backward."""
    try:
        local, arguments = _arguments(xs, space, forms, src, dst)
    except Exception as error:
        raise_on_all_ranks("switch", space.comm, error)
    return Pending(start_switch(local, space.comm, **arguments), space, forms)


class Pending:
    """A switch under way."""

    def __init__(self, switching: Switching, space: Space, forms: Sequence[str]) -> None:
        self._switching, self._space, self._forms = switching, space, forms

    def wait(self) -> list[Tensor]:
        """The switched tensors, in order."""
        return _folded(self._switching.wait(), self._space, self._forms)

    def settle(self) -> None:
        """Wait for the exchange alone, if nothing did: after an error, when nobody needs the tensors any more."""
        self._switching.settle()


def once(x: Tensor, comm: Comm) -> Tensor:
    """x, which all ranks computed alike, as one that counts once: only rank 0's gradient goes on. Local."""
    return x if comm.size == 1 else _Once.apply(x, comm.rank)


def _arguments(
    xs: Sequence[Tensor], space: Space, forms: Sequence[str], src: str, dst: str
) -> tuple[list[Tensor], dict[str, Any]]:
    if not xs or len(xs) != len(forms):
        raise ValueError(f"a switch of {len(xs)} tensors with {len(forms)} forms; give each a form")
    local = [space.unfold(x, form, src, f"tensor {n}") for n, (x, form) in enumerate(zip(xs, forms, strict=True))]
    index = [form_of(form).index for form in forms]
    return local, {
        "split_dims": [at(dst) for at in index],
        "concat_dims": [at(src) for at in index],
        "sizes": (space.shares(dst), space.shares(src)),
    }


def _folded(ys: Sequence[Tensor], space: Space, forms: Sequence[str]) -> list[Tensor]:
    return [space.fold(y, form) for y, form in zip(ys, forms, strict=True)]


def _known(grad: str) -> None:
    if grad not in GRADS:
        raise ValueError(f"grad must be one of {GRADS}, got {grad!r}")


@lru_cache(maxsize=256)
def _plan(size: int, ranks: int) -> Plan:
    """Who holds which elements of a dimension."""
    return Plan(Mask([size]), Layout.contiguous(size, ranks))


class _Whole(torch.autograd.Function):
    """A slice whose gradient is gathered, so that every rank has that of the whole."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, space: Space, dim: str, at: int) -> Tensor:
        ctx.back = _plan(space.dims[dim], space.comm.size), space.comm, at
        return y.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        plan, comm, at = ctx.back
        return None, unshard(dy, plan, comm, dim=at), None, None, None


class _Alike(torch.autograd.Function):
    """A gather whose result every rank uses alike: the gradient is the slice of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Plan, comm: Comm, at: int, start: int) -> Tensor:
        ctx.mine = at, start, x.shape[at]
        return unshard(x, plan, comm, dim=at)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return dy.narrow(*ctx.mine), None, None, None, None


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: int) -> Tensor:
        ctx.rank = rank
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy if ctx.rank == 0 else torch.zeros_like(dy), None


def moved(
    xs: Sequence[Tensor], space: Space, forms: Sequence[str], src: str | None, dst: str | None, *, grad: str = "sum"
) -> list[Tensor]:
    """Tensors sharded along src, now along dst: kept, split, switched in one exchange, or gathered. None is whole.

    grad: as `split` and `gather` take it.

    Raises: ValueError for a tensor that is not of its form under src, also where nothing moves.
    """
    if src is not None and dst is not None and src != dst:
        return switch_all(xs, space, forms, src, dst)
    found = []
    for n, (x, form) in enumerate(zip(xs, forms, strict=True)):
        if src == dst:
            space.check(x, form, src, f"tensor {n}")
            found.append(x)
        elif src is None and dst is not None:
            found.append(split(x, space, form, dst, grad=grad))
        elif src is not None:
            found.append(gather(x, space, form, src, grad=grad))
    return found


class Flow:
    """What is sharded at this point of one forward. Stages are run in order::

        flow = Flow(Space({"b": 1, "t": 5, "s": 12}, comm))
        (x,) = flow.move([x], ["b t s c"], "t")        # split: x was whole
        x = spatial(x)
        (x,) = flow.move([x], ["b t s c"], "s")        # one exchange
        x = temporal(x)
        (x,) = flow.move([x], ["b t s c"], None)       # gather

    Every tensor that comes in is checked against its form under what is sharded now. Where two dimensions have equal
    local sizes a shape does not tell them apart: then only the order of the stages does. A flow is of one forward: two
    models, or two shapes, have a flow each. Where a region is recomputed in backward, the flow would be elsewhere
    already, so it is refused there: call the verbs, or make a flow inside the region.
    """

    def __init__(self, space: Space, sharded: str | None = None) -> None:
        if sharded is not None:
            space.shares(sharded)
        self.space, self.sharded = space, sharded

    def __repr__(self) -> str:
        return f"Flow({self.space}, sharded={self.sharded!r})"

    def move(self, xs: Sequence[Tensor], forms: Sequence[str], to: str | None, *, grad: str = "sum") -> list[Tensor]:
        """The tensors sharded along `to`, or whole. Raises: ValueError as `moved`; RuntimeError in a recomputation."""
        self._forward()
        found = moved(xs, self.space, forms, self.sharded, to, grad=grad)
        self.sharded = to
        return found

    def rows(self, x: Tensor, form: str) -> Tensor:
        """This rank's share of a tensor that every rank has whole, such as a timestep by row or a position table.

        Raises: ValueError unless it is of the form, and whole; RuntimeError in a recomputation.
        """
        self._forward()
        return rows(x, self.space, form, self.sharded)

    def check(self, x: Tensor, form: str, what: str = "x") -> None:
        """Return if x is of the form under what is sharded now. Raises as `move`."""
        self._forward()
        self.space.check(x, form, self.sharded, what)

    def _forward(self) -> None:
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"{self} is asked while a backward recomputes a region, when it stands elsewhere than it stood in that "
                "region; make the flow inside the region, or call split, switch and gather there"
            )


def rows(x: Tensor, space: Space, form: str, sharded: str | None, what: str = "x") -> Tensor:
    """The share, along what is sharded, of a tensor that every rank has whole; all of it where the form lacks that.

    Raises: ValueError unless it is of the form, and whole.
    """
    space.check(x, form, None, what)
    return split(x, space, form, sharded) if sharded in form_of(form).names else x
