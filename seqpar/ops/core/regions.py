"""Regions of a model that backward runs again, and the contexts in which it must do so.

A checkpoint runs a region in forward and again in backward, when a context around it may have ended. Layers that are
given their plan need nothing. A context that changes what a region computes, as `seqpar.sdpa` changes PyTorch's
attention, is entered again around it (`run_again_inside`). Torch has no such hook, so a region is put in the place of
what its checkpoint keeps to run again::

    torch's reentrant checkpoint       the function that `CheckpointFunction.apply` is given
    checkpoint that is not reentrant   `recompute_fn` of the frame behind its hook of saved tensors

Other libraries' autograd functions are refused: how they rerun a function is unknown.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from seqpar.comm.entry import uncompiled
from seqpar.private import torch as torch_private


class Region:
    """A function that a checkpoint runs, and runs again inside contexts. stamps: of the calls that forward made."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.stamps = function, set[int]()
        self.contexts: list[tuple[object, Callable[[], AbstractContextManager[Any]]]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result; in forward there is no context yet."""
        with ExitStack() as stack:
            for _, context in reversed(self.contexts):
                stack.enter_context(context())
            return self.function(*args, **kwargs)

    def run_again_inside(self, context: Callable[[], AbstractContextManager[Any]], by: object) -> None:
        """Make the region enter a context when it runs again; once per `by`."""
        if all(by is not other for other, _ in self.contexts):
            self.contexts.append((by, context))


class _Reentrant(threading.local):
    """The regions of reentrant checkpoints whose forward runs in this thread."""

    def __init__(self) -> None:
        self.regions: list[Region] = []


_reentrant = _Reentrant()


@uncompiled
def known_regions() -> list[Region]:
    """The regions around the caller that backward will run again, as far as torch's own checkpoints make them."""
    regions, hooks = list(_reentrant.regions), []
    while (top := torch_private.top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        torch_private.pop_saved_tensors_default_hooks()
    for pack, unpack in reversed(hooks):
        torch_private.push_saved_tensors_default_hooks(pack, unpack)
        if (frame := torch_private.frame_of(pack, CheckpointFunction)) is not None:
            if not isinstance(frame.recompute_fn, Region):
                frame.recompute_fn = Region(frame.recompute_fn)
            regions.append(frame.recompute_fn)
    return regions


def under_way() -> list[Region | None]:
    """The regions around the caller; None for an autograd function of others, which may run it again too."""
    recorded = torch.is_grad_enabled() or torch_private.is_fwd_grad_enabled() or torch.is_inference_mode_enabled()
    return [*known_regions(), *(() if recorded or _reentrant.regions else (None,))]


def run_again_inside(
    context: Callable[[], AbstractContextManager[Any]], by: object, outside: list[Region | None]
) -> None:
    """Make the surrounding regions, except ``outside``, enter a context when they run again; once per `by`.

    Raises: NotImplementedError inside another library's autograd function.
    """
    for region in under_way():
        if region in outside:
            continue
        if region is None:
            raise NotImplementedError(
                "attention is called inside an autograd function whose backward may run it again, outside of the block "
                "that reroutes it; checkpoint with torch.utils.checkpoint.checkpoint, or enter the block inside that "
                "function"
            )
        region.run_again_inside(context, by)


def _apply(cls: type[CheckpointFunction], function: Callable[..., Any], *args: Any) -> Any:
    """`CheckpointFunction.apply`, of a region.

    Forward-mode derivatives are off inside the forward of an autograd function, and on under `no_grad` alone. Inside
    one, without gradients, autograd records no checkpoint: only the function around it can run it again.
    """
    if not (torch.is_grad_enabled() or torch_private.is_fwd_grad_enabled()):
        return super(CheckpointFunction, cls).apply(function, *args)
    _reentrant.regions.append(region := Region(function))
    try:
        return super(CheckpointFunction, cls).apply(region, *args)
    finally:
        _reentrant.regions.pop()


CheckpointFunction.apply = classmethod(_apply)
