"""Whether gradients hold a sum over ranks already, which a second sum would multiply.

A gradient that was summed says so itself, by the version of its memory: what backward, clipping or zeroing change
afterwards has another one, and a new tensor, as after ``zero_grad()``, has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from seqpar.train.dtensor import local, version

WATCHED, VALUES = 4, 64  # parameters that tell of an optimizer's step, and their values


class Sum:
    """One sum over ranks of the gradients of some parameters."""

    @torch.no_grad()
    def __init__(self, parameters: list[Tensor]) -> None:
        self._watched = parameters[:: -(-len(parameters) // WATCHED)] if parameters else []
        self._versions = [version(p) for p in self._watched]
        self._values = [_some(p).clone() for p in self._watched]
        self._totals: list[Tensor] = []

    def took(self, parameters: Iterable[Tensor], total: Tensor) -> None:
        """Mark the gradients of parameters. total: of all their elements, not finite if one of them is not."""
        self._totals.append(total)
        for p in parameters:
            assert p.grad is not None
            p.grad._seqpar_sum = (self, version(p.grad))  # type: ignore[attr-defined]

    def stepped(self) -> bool:
        """Whether an optimizer has changed the parameters since, or would not, as the sum is not finite."""
        changed = any(version(p) != before for p, before in zip(self._watched, self._versions))
        changed = changed or not all(torch.equal(_some(p), x) for p, x in zip(self._watched, self._values))
        return changed or not all(bool(total.isfinite()) for total in self._totals)


@contextmanager
def remark(grad: Tensor) -> Iterator[None]:
    """A block that changes a gradient and leaves it as much of a sum as it was, as clipping does."""
    last, before = getattr(grad, "_seqpar_sum", None), version(grad)
    yield
    if last is not None and last[1] == before:
        grad._seqpar_sum = (last[0], version(grad))  # type: ignore[attr-defined]


def repeated(parameters: Iterable[Tensor]) -> bool:
    """Whether all gradients are sums over ranks, and nothing has changed them since."""
    marks = [(getattr(p.grad, "_seqpar_sum", None), version(p.grad)) for p in parameters if p.grad is not None]
    return bool(marks) and all(found is not None and found[1] == now for found, now in marks)


def growing(parameters: Iterable[Tensor]) -> bool:
    """Whether some gradients hold a sum of which no optimizer has made a step."""
    marks = (getattr(p.grad, "_seqpar_sum", None) for p in parameters if p.grad is not None)
    sums = {id(found[0]): found[0] for found in marks if found is not None}
    return any(not each.stepped() for each in sums.values())


def _some(p: Tensor) -> Tensor:
    flat = local(p.detach()).reshape(-1)
    return flat[:: max(1, -(-len(flat) // VALUES))]
