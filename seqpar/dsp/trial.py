"""A trial of a stage in its first forward: do rows that its spec keeps apart look at each other?

A spec lists the dimensions that a stage mixes, and ranks share one of the others. A wrong list would give each rank its
own, wrong result. So the stage is called once more with every second row of that dimension changed, and what comes out
for the rows between must stay as it was::

    rows of t     x0  x1  x2  x3         1-x0  x1  1-x2  x3
    a stage       y0  y1  y2  y3          ...  y1   ...  y3     where it mixes other dimensions alone
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.dsp.form import form_of
from seqpar.dsp.grid import Grid
from seqpar.dsp.space import Sharding, shares
from seqpar.dsp.spec import Block
from seqpar.nn.saved_state import SavedState
from seqpar.ops.core.regions import under_way

ROUGH = 0.05  # of the largest result, where products are of 16 bits
_LOW = {torch.bfloat16, torch.float16}


def untested(block: Block, grid: Grid, inside: Sharding) -> list[str]:
    """The sharded dimensions along which a stage must treat rows one by one, and some rank has two of them."""
    read = {*block.whole, *(dim for _, dims in block.gathers.values() for dim in dims)}
    sharded = [dim for dim in dict.fromkeys((inside, grid.held)) if dim is not None and _most(grid, inside, dim) > 1]
    return [dim for dim in sharded if dim not in read]


def _most(grid: Grid, inside: Sharding, dim: str) -> int:
    """The rows of the rank that has most."""
    spaces = [space for space, at in ((grid.outer, inside), (grid.inner, grid.held)) if space is not None and at == dim]
    return min(max(shares(space.dims[dim], space.comm.size)) for space in spaces)


def tried(
    module: nn.Module, block: Block, grid: Grid, inside: Sharding, dim: str, streams: Sequence[Tensor],
    compute: Callable[[Sequence[Tensor]], Sequence[Tensor]],
) -> list[tuple[int, list[Tensor]]]:  # fmt: skip
    """What a stage gives where every second row of a dimension is changed, from row 0 or 1 on; its state is restored.

    compute: calls the stage. It comes before the stage's own call, since stages may return the same memory every time.
    """
    found, state = list[tuple[int, list[Tensor]]](), SavedState(module)
    # as the stage is called, for compiled code; but a checkpoint around it counts what autograd saves
    unseen = torch.no_grad() if under_way() else nullcontext()
    # of two rows, either may be the one that looks at the other
    for first in (0, 1) if _most(grid, inside, dim) == 2 else (0,):
        changed = [_changed(x, grid, form, inside, dim, first) for x, form in zip(streams, block.stream.values())]
        try:
            with unseen:
                found.append((first, [x.detach().clone() for x in compute(changed)]))
        finally:
            state.restore()
    return found


def mixes(
    module: nn.Module, block: Block, grid: Grid, inside: Sharding, dim: str, outs: Sequence[Tensor],
    others: Sequence[tuple[int, Sequence[Tensor]]],
) -> bool:  # fmt: skip
    """Whether a stage's rows of one dimension depend on each other, on this rank.

    outs: the stage's. others: what `tried` gave.
    """
    rough = any(x.dtype in _LOW for x in (*outs, *module.parameters())) or any(
        torch.is_autocast_enabled(x.device.type) for x in outs if not x.is_meta
    )
    return any(
        _apart(a, b, grid, form, inside, dim, 1 - first, rough)
        for first, those in others
        for a, b, form in zip(outs, those, block.stream.values(), strict=True)
    )


def _changed(x: Tensor, grid: Grid, form: str, inside: Sharding, dim: str, first: int) -> Tensor:
    y = x.detach().clone()
    if dim in form_of(form).names and x.is_floating_point():
        rows = grid.outer.unfold(y, form, inside)
        rows[_every_second(rows, form, dim, first)].neg_().add_(1)
        y = form_of(form).fold(rows)
    return y.requires_grad_().clone() if x.requires_grad else y  # no leaf: stages may write to what they get


def _apart(a: Tensor, b: Tensor, grid: Grid, form: str, inside: Sharding, dim: str, first: int, rough: bool) -> bool:
    """Whether two results differ by more than rounding: where the rows between lie, or anywhere without such rows."""
    a = a.detach()
    if dim in form_of(form).names:
        a, b = (grid.outer.unfold(x, form, inside) for x in (a, b))
        between = _every_second(a, form, dim, first)
        a, b = a[between], b[between]
    if not a.numel() or not a.is_floating_point():
        return bool((a != b).any())
    bound = ROUGH if rough else torch.finfo(a.dtype).eps ** 0.5
    a, b = a.double(), b.double()
    apart = (a - b).abs().masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0).nan_to_num(torch.inf, posinf=torch.inf)
    return bool(apart.max() > bound * a.nan_to_num(0.0, 0.0, 0.0).abs().max())


def _every_second(x: Tensor, form: str, dim: str, first: int) -> tuple[Any, ...]:
    """The index of every second row of an unfolded tensor."""
    at = form_of(form).index(dim)
    return tuple(slice(first, None, 2) if axis == at else slice(None) for axis in range(x.dim()))
