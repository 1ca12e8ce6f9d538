"""Regions of a model that backward runs again, as the stack shows them: nobody hands them to the calls inside.

Each has an owner, an object that its forward and its backward have in common::

    region                             in forward                       in backward                  runs again
    autograd function                  forward(ctx, ...)                backward(ctx, ...)           what it likes
      torch's reentrant checkpoint     forward(ctx, ...)                backward(ctx, ...)           ctx.run_function
    checkpoint that is not reentrant   checkpoint, whose generator      unpack_hook of that frame    frame.recompute_fn
                                         holds a frame object

The names are private to torch: here is all that knows them, and 2.11, 2.12 and 2.13 have the same ones. Where a later
torch has others, a region is not seen or not known to be torch's, and `attention.recompute` refuses what needs it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, Function
from torch.utils.checkpoint import CheckpointFunction


class Region(NamedTuple):
    """What backward runs again, or runs again now. function: the attribute of its owner that torch runs, if known."""

    owner: Any
    again: bool
    function: str | None = None

    @property
    def foreign(self) -> bool:
        """Whether it is an autograd function of others that records nothing inside; its owner is the frame then."""
        return isinstance(self.owner, FrameType)


def around() -> Iterator[Region]:
    """The regions around the caller, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        find = _FINDERS.get(frame.f_code.co_name)
        if find is not None and (region := find(frame)) is not None:
            yield region
        frame = frame.f_back


def _forward(frame: FrameType) -> Region | None:
    owner = _context(frame)
    own = _REENTRANT is not None and frame.f_code is _REENTRANT.forward.__code__
    return None if owner is None else Region(owner, False, "run_function" if own else None)


def _backward(frame: FrameType) -> Region | None:
    owner = _context(frame)
    return None if owner is None else Region(owner, True)


def _context(frame: FrameType) -> object:
    """The context of an autograd function, if this is its forward or backward, unless it says of itself that it does
    not recompute: the backward of a call may be the first that wants something of a region, and is none itself."""
    if frame.f_code.co_varnames[:1] != ("ctx",):
        return None
    context = frame.f_locals.get("ctx")
    return context if isinstance(context, BackwardCFunction) and getattr(context, "recomputes", True) else None


def _checkpoint(frame: FrameType) -> Region | None:
    inside = getattr(_local(frame, "gen"), "gi_frame", None)
    owner = None if inside is None else inside.f_locals.get("new_frame")
    return None if owner is None else Region(owner, False, "recompute_fn" if hasattr(owner, "recompute_fn") else None)


def _unpack(frame: FrameType) -> Region | None:
    owner = _local(frame, "frame")
    return None if owner is None else Region(owner, True)


def _local(frame: FrameType, name: str) -> Any:
    return frame.f_locals.get(name) if frame.f_globals.get("__name__") == "torch.utils.checkpoint" else None


def _apply(frame: FrameType) -> Region | None:
    """An autograd function whose backward has to run again what is called here, as nothing records it."""
    if frame.f_code is not Function.apply.__func__.__code__ or torch.is_grad_enabled():
        return None
    differentiable = any(isinstance(x, Tensor) and x.requires_grad for x in frame.f_locals["args"])
    return Region(frame, False) if differentiable and frame.f_locals["cls"] is not _REENTRANT else None


_FINDERS = {
    "forward": _forward,
    "backward": _backward,
    "checkpoint": _checkpoint,
    "unpack_hook": _unpack,
    "apply": _apply,
}
_REENTRANT = CheckpointFunction if "run_function" in CheckpointFunction.backward.__code__.co_names else None
