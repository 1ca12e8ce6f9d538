"""Whether gradients hold a sum over ranks already, which a second sum would multiply.

A gradient that was summed is known with the version of its memory: what backward, clipping or zeroing change afterwards
has another one, and a new tensor, as after ``zero_grad()``, is not known. The next backward sees whether it adds to the
sum as it was left, or to zeros in its place.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from seqpar.train.dtensor import local, version

WATCHED, VALUES = 4, 64  # parameters that tell of an optimizer's step, and their values

# The sum that a gradient is, and its version then. Not an attribute of the gradient, which a pickle and a deep copy of
# it would take along.
_sums: Any = WeakTensorKeyDictionary()


class Sum:
    """One sum over ranks of the gradients of some parameters."""

    @torch.no_grad()
    def __init__(self, parameters: list[Tensor]) -> None:
        self._hooks: list[RemovableHandle] = []
        self._added = False  # whether a backward has added to the sum
        watched = parameters[:: -(-len(parameters) // WATCHED)] if parameters else []
        # a parameter keeps its gradient, which would keep the sum
        self._watched = [TensorWeakRef(p) for p in watched]
        self._versions = [version(p) for p in watched]
        self._values = [_some(p).clone() for p in watched]

    def took(self, parameters: Iterable[Tensor]) -> None:
        """Mark the gradients of parameters."""
        for p in parameters:
            assert p.grad is not None
            _sums[p.grad] = self, version(p.grad)

    def watch(self) -> None:
        """See from here on what the next backward adds to, by hooks that go with it or with the gradients."""
        found = weakref.ref(self)

        def added(parameter: Tensor) -> None:
            if (this := found()) is not None:
                this._accumulated(parameter)

        watched = [p for each in self._watched if (p := each()) is not None]
        self._hooks = [p.register_post_accumulate_grad_hook(added) for p in watched if p.requires_grad and p.is_leaf]

    def _accumulated(self, parameter: Tensor) -> None:
        # one version more is this backward's; zeros in place of the sum are another one
        self._added |= parameter.grad is not None and _sums.get(parameter.grad) == (self, version(parameter.grad) - 1)
        self._unhook()

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def __del__(self) -> None:
        self._unhook()

    def growing(self) -> bool:
        """Whether a backward has added to the sum, and no optimizer has made a step of it."""
        return self._added and not self._stepped()

    def _stepped(self) -> bool:
        """Whether an optimizer has changed the parameters since."""
        watched = [each() for each in self._watched]
        return not all(
            p is not None and version(p) == before and torch.equal(_some(p), x)
            for p, before, x in zip(watched, self._versions, self._values)
        )


@contextmanager
def remark(grad: Tensor) -> Iterator[None]:
    """A block that changes a gradient and leaves it as much of a sum as it was, as clipping does."""
    last, before = _sums.get(grad), version(grad)
    yield
    if last is not None and last[1] == before:
        _sums[grad] = last[0], version(grad)


class Marks:
    """What is known of the gradients of some parameters, where they have one."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._grads = [p.grad for p in parameters if p.grad is not None]
        self._sums = [_sums.get(grad) for grad in self._grads]

    def repeated(self) -> bool:
        """Whether all gradients are sums over ranks, and nothing has changed them since."""
        pairs = zip(self._sums, self._grads)
        return bool(self._grads) and all(last is not None and last[1] == version(grad) for last, grad in pairs)

    def growing(self) -> bool:
        """Whether some hold a sum to which a backward has added, and of which no optimizer has made a step.

        Of gradients that are not finite none will be made: they are left out as a whole, as GradScaler does.
        """
        marked = [(last[0], grad) for last, grad in zip(self._sums, self._grads) if last is not None]
        if not any(each.growing() for each in {each for each, _ in marked}):
            return False
        return all(bool(local(grad).isfinite().all()) for _, grad in marked)


def _some(p: Tensor) -> Tensor:
    flat = local(p.detach()).reshape(-1)
    return flat[:: max(1, -(-len(flat) // VALUES))]
