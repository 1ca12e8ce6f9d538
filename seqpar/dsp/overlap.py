"""A stage in parts: one part is computed while the part before moves out and the part after moves in.

A part is a range of the dimension that is sharded inside the stage. The stage does not mix that dimension, and it is
whole before and after the stage. So a part is the stage in a smaller space, sharded over all ranks::

    inside t: each of 2 ranks has 2 of 4 elements      in    |0 |1 |
                                                     stage      |0 |1 |
                                                      out          |0 |1 |

Backward does the same in reverse order, since autograd runs the last recorded operation first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, product

import torch
from torch import Tensor

from seqpar.dsp.form import form_of
from seqpar.dsp.grid import Grid, GridPosition
from seqpar.dsp.moves import Pending, begin_switch, move
from seqpar.dsp.space import Sharding, Space, sizes_of_parts
from seqpar.ops.core.agreement import errors_on_all_ranks


class _Arrived:
    """Tensors that did not have to move, in place of `Pending` ones."""

    def __init__(self, xs: list[Tensor]) -> None:
        self._xs = xs

    def wait(self) -> list[Tensor]:
        return self._xs

    def settle(self) -> None:
        pass


def in_parts(
    name: str, xs: Sequence[Tensor], forms: Sequence[str], grid: Grid, src: GridPosition, inside: str,
    dst: GridPosition, parts: int, compute: Callable[[Grid, list[Tensor]], list[Tensor]],
) -> list[Tensor]:  # fmt: skip
    """A stage's outputs, moved in from src and out to dst; the dimension sharded inside is whole in both.

    name: of the stage. compute: (grid of a part, its inputs) -> the stage's outputs.

    Raises: RuntimeError for a stage that returns a part in the memory of an earlier part that is still being sent.
    """
    xs = grid.enter(xs, forms, src)
    grids = grid.parts(inside, sizes_of_parts(grid.outer.dims[inside], grid.outer.comm.size, parts))
    with errors_on_all_ranks("switch", grid.outer.comm):
        pieces = [_split(x, grid.outer, form, src[0], inside, grids) for x, form in zip(xs, forms, strict=True)]
    arriving: list[Pending | _Arrived] = []
    leaving: list[Pending | _Arrived] = []
    try:
        for part, inputs in zip(grids, zip(*pieces), strict=True):
            arriving.append(_begin(part, inputs, forms, src[0], inside))
        sent: list[Tensor] = []  # held, so that only memory that the stage reuses can overlap
        for part, pending in zip(grids, arriving, strict=True):
            outputs = compute(part, pending.wait())
            _check_memory(name, outputs, sent)
            leaving.append(_begin(part, outputs, forms, inside, dst[0]))
            sent += outputs
        del sent
        moved = [pending.wait() for pending in leaving]
    except Exception:
        # also for a checkpoint, which reruns a stage as far as it needs
        for pending in (*arriving, *leaving):
            pending.settle()
        raise
    joined = [
        _joined(several, grids, grid.outer, form, dst[0], inside)
        for several, form in zip(zip(*moved), forms, strict=True)
    ]
    return grid.leave(joined, forms, dst)


def _check_memory(name: str, outputs: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
    for (start, stop), (first, last) in product(map(_span, outputs), map(_span, sent)):
        if start < last and first < stop:
            raise RuntimeError(
                f"{name} is run in parts and returned one in the memory of another, which is still being sent; return "
                "new memory (no buffer, no CUDA graph's), or plan with parts=(1,)"
            )


def _span(x: Tensor) -> tuple[int, int]:
    """The addresses of a tensor; only the first if it has gaps, in which other tensors may be."""
    return x.data_ptr(), x.data_ptr() + (x.nbytes if x.is_contiguous() else min(1, x.nbytes))


def _begin(grid: Grid, xs: Sequence[Tensor], forms: Sequence[str], src: Sharding, dst: Sharding) -> Pending | _Arrived:
    if src is not None and dst is not None:
        return begin_switch(xs, grid.outer, forms, src, dst)
    return _Arrived(move(xs, grid.outer, forms, src, dst))


def _split(x: Tensor, space: Space, form: str, sharded: Sharding, dim: str, grids: Sequence[Grid]) -> list[Tensor]:
    whole, at = space.unfold(x, form, sharded), form_of(form).index(dim)
    sizes = [grid.outer.dims[dim] for grid in grids]
    if sharded is None:  # the stage gets them unchanged and may write to them, unlike to results of split
        pieces = [whole.narrow(at, start, size) for start, size in zip(accumulate(sizes, initial=0), sizes)]
    else:
        pieces = list(whole.split(sizes, at))
    return [form_of(form).fold(piece) for piece in pieces]


def _joined(
    ys: Sequence[Tensor], grids: Sequence[Grid], space: Space, form: str, sharded: Sharding, dim: str
) -> Tensor:
    pieces = [grid.outer.unfold(y, form, sharded) for y, grid in zip(ys, grids, strict=True)]
    return form_of(form).fold(torch.cat(pieces, form_of(form).index(dim)))
