"""Regions of a model that backward runs again, and the contexts in which it must do so.

A checkpoint runs a region in forward and again in backward, when a context around it may have ended. Layers that are
given their plan need nothing. A context that changes what a region computes, as `seqpar.sdpa` changes PyTorch's
attention, is entered again around it (`run_again_inside`). Other libraries' autograd functions are refused: how they
rerun a function is unknown.

The regions are read off the Python stack, since nothing passes them to the calls inside::

    region                             in forward                       runs again
    torch's reentrant checkpoint       forward(ctx, ...)                ctx.run_function
    checkpoint that is not reentrant   checkpoint, whose generator      frame.recompute_fn
                                         holds a frame object
    autograd function of others        apply, without gradients         unknown

These names are private to torch, and only this file uses them; torch 2.11, 2.12 and 2.13 share them. If a later torch
renames them, a reentrant checkpoint is refused like any other autograd function, and for a non-reentrant one torch
itself reports that the recomputed tensors differ from the saved ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.utils.checkpoint import CheckpointFunction


class CheckpointRegion(NamedTuple):
    """A region that backward will run again.

    owner: an object that its forward and backward share. function: the owner's attribute that torch runs; None for an
    autograd function, whose frame is then the owner.
    """

    owner: Any
    function: str | None

    def run_again_inside(self, context: Callable[[], AbstractContextManager[Any]], by: object) -> None:
        """Make the region enter a context when it runs again; once per `by`. Its function must be known."""
        assert self.function is not None
        first = function = getattr(self.owner, self.function)
        while isinstance(function, Again):
            if function.by is by:
                return
            function = function.function
        setattr(self.owner, self.function, Again(first, by, context))


def under_way() -> list[CheckpointRegion]:
    """The regions around the caller that backward will run again, innermost first."""
    regions = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        find = _FINDERS.get(frame.f_code.co_name)
        if find is not None and (region := find(frame)) is not None:
            regions.append(region)
        frame = frame.f_back
    return regions


def known_regions() -> list[CheckpointRegion]:
    """The regions around the caller with a known function; of another nobody knows whether backward runs it again."""
    return [region for region in under_way() if region.function is not None]


def run_again_inside(
    context: Callable[[], AbstractContextManager[Any]], by: object, outside: list[CheckpointRegion]
) -> None:
    """Make the surrounding regions, except ``outside``, enter a context when they run again; once per `by`.

    Raises: NotImplementedError inside another library's autograd function.
    """
    for region in under_way():
        if any(region.owner is other.owner for other in outside):
            continue
        if region.function is None:
            raise NotImplementedError(
                f"attention is called inside {region.owner.f_locals['cls'].__name__}, an autograd function whose "
                "backward may run it again, outside of the block that reroutes it; checkpoint with "
                "torch.utils.checkpoint.checkpoint, or enter the block inside that function"
            )
        region.run_again_inside(context, by)


class Again:
    """A function that a checkpoint runs again, in a context derived from its first forward."""

    def __init__(self, function: Callable[..., Any], by: object, context: Callable[[], AbstractContextManager[Any]]):
        self.function, self.by, self.context = function, by, context

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result, computed inside the context."""
        with self.context():
            return self.function(*args, **kwargs)


def _forward(frame: FrameType) -> CheckpointRegion | None:
    own = _REENTRANT is not None and frame.f_code is _REENTRANT.forward.__code__
    return CheckpointRegion(frame.f_locals["ctx"], "run_function") if own else None


def _checkpoint(frame: FrameType) -> CheckpointRegion | None:
    if frame.f_globals.get("__name__") != "torch.utils.checkpoint":
        return None
    inside = getattr(frame.f_locals.get("gen"), "gi_frame", None)
    owner = None if inside is None else inside.f_locals.get("new_frame")
    return CheckpointRegion(owner, "recompute_fn") if hasattr(owner, "recompute_fn") else None


def _apply(frame: FrameType) -> CheckpointRegion | None:
    """An autograd function without grad mode: its backward must run the unrecorded calls inside again."""
    if frame.f_code is not Function.apply.__func__.__code__ or torch.is_grad_enabled():
        return None
    differentiable = any(isinstance(x, Tensor) and x.requires_grad for x in frame.f_locals["args"])
    return CheckpointRegion(frame, None) if differentiable and frame.f_locals["cls"] is not _REENTRANT else None


_FINDERS = {"forward": _forward, "checkpoint": _checkpoint, "apply": _apply}
_REENTRANT = CheckpointFunction if "run_function" in CheckpointFunction.backward.__code__.co_names else None
