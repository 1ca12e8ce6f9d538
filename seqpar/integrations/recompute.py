"""Activation checkpoints that recompute a forward under the plan of that forward, wherever their backward runs.

A checkpoint runs its function again inside a backward, which may be outside the block that gave the plan, inside a
block that gives another, or on another thread. The function to be run again is an attribute of something that lives
while the first forward runs, so the first call that is rerouted inside it can put it under its own surroundings:

    checkpoint       run again by             kept as
    reentrant        CheckpointFunction       ctx.run_function, a local of the frame of its forward
    not reentrant    an unpack hook           new_frame.recompute_fn, of the generator in the frame of `checkpoint`

A checkpoint that is neither is caught by its `stamped` tensors, unless it hides the first forward from autograd.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from inspect import unwrap
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import checkpoint as torch_checkpoint

from seqpar.comm import Comm
from seqpar.ops.agree import abort_on_error

_REENTRANT = torch_checkpoint.CheckpointFunction.forward.__code__
_OTHER = unwrap(torch_checkpoint.checkpoint).__code__


class Checkpoint(NamedTuple):
    """A checkpoint whose first forward runs: what owns the function to be run again, and under which name."""

    owner: Any
    name: str


def under_way() -> list[Checkpoint]:
    """The checkpoints that this thread is inside of, innermost first."""
    found = []
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _REENTRANT:
            found.append(Checkpoint(frame.f_locals["ctx"], "run_function"))
        elif frame.f_code is _OTHER and "gen" in frame.f_locals:
            found.append(Checkpoint(frame.f_locals["gen"].gi_frame.f_locals["new_frame"], "recompute_fn"))
        frame = frame.f_back  # type: ignore[assignment]
    return found


class Again:
    """A function that a checkpoint runs again, inside a context that belongs to the first forward."""

    def __init__(self, function: Callable[..., Any], by: object, context: Callable[[], AbstractContextManager[Any]]):
        self.function, self.by, self.context = function, by, context

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns, inside the context."""
        with self.context():
            return self.function(*args, **kwargs)


def run_again_inside(context: Callable[[], AbstractContextManager[Any]], by: object, outside: list[Checkpoint]) -> None:
    """Put the checkpoints under way, but for those outside, under a context when they run again; once for each `by`."""
    for checkpoint in under_way():
        function = getattr(checkpoint.owner, checkpoint.name)
        known = any(checkpoint.owner is other.owner for other in outside)
        if not known and not (isinstance(function, Again) and function.by is by):
            setattr(checkpoint.owner, checkpoint.name, Again(function, by, context))


def stamped(x: Tensor, key: int, comm: Comm) -> Tensor:
    """x, whose backward raises RuntimeError if a checkpoint made x again in a call of another key."""
    return _Stamp.apply(x, torch.tensor(key, dtype=torch.int64), key, comm)  # type: ignore[no-untyped-call, no-any-return]


class _Stamp(torch.autograd.Function):
    """The identity, which saves the key as a tensor: what a checkpoint saves anew if it runs the call again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stamp: Tensor, key: int, comm: Comm) -> Tensor:
        ctx.key, ctx.comm = key, comm
        ctx.save_for_backward(stamp)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (stamp,) = ctx.saved_tensors
        with abort_on_error(ctx.comm, "sdpa, backward"):
            if stamp.dtype != torch.int64 or stamp.numel() != 1 or int(stamp) != ctx.key:
                raise RuntimeError(
                    "sdpa: a checkpoint ran this forward again under another plan, dropout seed or scale, or under "
                    "none; run the backward inside the block of its forward, or checkpoint with torch.utils.checkpoint"
                )
        return grad, None, None, None
