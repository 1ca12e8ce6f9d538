"""Whether gradients are sums over ranks already, which a second sum would multiply.

A summed gradient is remembered with the version of its memory. Backward, clipping and zeroing change the version; a new
tensor, as after ``zero_grad()``, is unknown. The next backward detects whether it adds to the unchanged sum, or to
zeros that replaced it. Writes through ``.data`` or numpy change no version: values of a few gradients reveal them.
Of additions a few parameters are watched, drawn anew for each sum.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from seqpar.train.dtensor import local, version

WATCHED, VALUES = 4, 64  # parameters that are watched, as the gradients of half as many are; values of each

# The sum that a gradient is part of, and its version then. Not an attribute of the gradient, which pickle and deepcopy
# would copy.
_sums: Any = WeakTensorKeyDictionary()
_draw = random.Random(0).randrange  # of the first parameter that is watched


class Sum:
    """One sum over ranks of the gradients of some parameters."""

    @torch.no_grad()
    def __init__(self, parameters: list[Tensor]) -> None:
        self._hooks: list[RemovableHandle] = []
        self._added: dict[int, bool] = {}  # whether the first backward since has added to the sum, by parameters' ids
        step = max(1, -(-len(parameters) // WATCHED))
        watched = parameters[_draw(step) :: step]
        # a parameter holds its gradient, which would hold the sum
        self._watched = [TensorWeakRef(p) for p in watched]
        self._sampled = [TensorWeakRef(p) for p in parameters[:: 2 * step]]
        self._versions = [version(p) for p in watched]
        self._values = [_some(p).clone() for p in watched]
        self._sums: list[Tensor | None] = []  # values of the gradients of those that are sampled
        self._steps: list[Tensor | None] = []  # values of the gradients of those that are watched, by which they step

    def took(self, parameters: Iterable[Tensor]) -> None:
        """Mark the gradients of these parameters as part of the sum."""
        for p in parameters:
            grad = p.grad
            assert grad is not None
            _sums[grad] = self, version(grad)
        self.sample()

    @torch.no_grad()
    def sample(self) -> None:
        """Keep the present values of some gradients as those of the sum."""
        self._sums, self._steps = _grads(self._sampled), _grads(self._watched)

    def overwritten(self) -> bool:
        """Whether a gradient that has the version of the sum has other values, as after a write through ``.data``."""
        for each, x in zip(self._sampled, self._sums):
            grad = None if (p := each()) is None else p.grad
            if grad is not None and x is not None and _sums.get(grad) == (self, version(grad)):
                now = _some(grad)
                if now.shape != x.shape or not torch.allclose(now, x, rtol=0.0, atol=0.0, equal_nan=True):
                    return True
        return False

    def watch(self) -> None:
        """Detect the next backward's additions, with hooks that go away with it or with the gradients."""
        found = weakref.ref(self)

        def added(parameter: Tensor) -> None:
            if (this := found()) is not None:
                this._accumulated(parameter)

        watched = [p for each in self._watched if (p := each()) is not None]
        self._hooks = [p.register_post_accumulate_grad_hook(added) for p in watched if p.requires_grad and p.is_leaf]

    def _accumulated(self, parameter: Tensor) -> None:
        # this backward advances the version by one; zeros that replace the sum advance it further
        grad = parameter.grad
        self._added.setdefault(id(parameter), grad is not None and _sums.get(grad) == (self, version(grad) - 1))

    def __del__(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def growing(self) -> bool:
        """Whether a backward has added to the sum of a parameter that no optimizer has stepped since."""
        for each, before, x, grad in zip(self._watched, self._versions, self._values, self._steps):
            p = each()
            if p is None or not self._added.get(id(p)) or version(p) != before:
                continue
            # fused optimizers and writes through ``.data`` change no version, and by zeros no value
            if grad is not None and bool(grad.any()) and torch.equal(_some(p), x):
                return True
        return False


@contextmanager
def remark(parameters: Sequence[Tensor]) -> Iterator[None]:
    """A block that changes gradients but leaves their marks as sums, as clipping does."""
    marks = [
        (p, last[0])
        for p in parameters
        if (grad := p.grad) is not None and (last := _sums.get(grad)) is not None and last[1] == version(grad)
    ]
    yield
    for p, of in marks:
        assert p.grad is not None
        _sums[p.grad] = of, version(p.grad)
    for of in {of for _, of in marks}:
        of.sample()


class Marks:
    """The marks on the gradients of some parameters."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._grads = [p.grad for p in parameters]
        self._sums = [None if grad is None else _sums.get(grad) for grad in self._grads]

    def present(self) -> list[bool]:
        """Which parameters have a gradient."""
        return [grad is not None for grad in self._grads]

    def repeated(self) -> list[bool]:
        """Which gradients are sums over ranks, unchanged since."""
        pairs = zip(self._sums, self._grads)
        same = [last is not None and last[1] == version(grad) for last, grad in pairs]
        if True not in same:
            return same
        sums = {last[0] for last, alike in zip(self._sums, same) if alike}
        unseen = {each for each in sums if each.overwritten()}  # of these, versions do not tell
        return [alike and last[0] not in unseen for last, alike in zip(self._sums, same)]

    def growing(self) -> bool:
        """Whether some gradient is a sum that a backward has added to, without an optimizer step since.

        Without effect if gradients are not finite: the step is then left out, as GradScaler does.
        """
        marked = [(last[0], grad) for last, grad in zip(self._sums, self._grads) if last is not None]
        if not any(each.growing() for each in {each for each, _ in marked}):
            return False
        return all(bool(local(grad).isfinite().all()) for _, grad in marked)


def _grads(several: list[TensorWeakRef]) -> list[Tensor | None]:
    """Some values of the gradients of parameters."""
    grads = [None if (p := each()) is None else p.grad for each in several]
    return [None if grad is None else _some(grad).clone() for grad in grads]


def _some(p: Tensor) -> Tensor:
    flat = local(p.detach()).reshape(-1)
    return flat[:: -(-len(flat) // VALUES)] if len(flat) > VALUES else flat
