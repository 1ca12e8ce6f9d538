"""The runner of one forward: it holds what is sharded now, moves tensors to what the next stage needs, and checks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from seqpar.dsp.form import form_of
from seqpar.dsp.space import Space
from seqpar.dsp.verbs import gather, split, switch_all


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
