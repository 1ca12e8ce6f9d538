"""Regions of a model that backward runs again, and the contexts in which it must do so.

A checkpoint runs a region in forward and again in backward, when a context around it may have ended. Layers that are
given their plan need nothing. A context that changes what a region computes, as `seqpar.sdpa` changes PyTorch's
attention, is entered again around it (`run_again_inside`). Torch has no such hook, so a region is put in the place of
what its checkpoint keeps to run again::

    torch's reentrant checkpoint       the function that `CheckpointFunction.apply` is given
    checkpoint that is not reentrant   `recompute_fn` of the frame behind its hook of saved tensors

Other libraries' autograd functions are refused: how they rerun a function is unknown.

The calls of a region that runs again are calls that its forward made, or an error. Autograd saves nothing in the
forward of torch's reentrant checkpoint, and a compiled graph compares nothing. So each call notes its *stamp*, which
stands for everything but its tensors, on the checkpoints around it::

    forward     checkpoint:  attention (stamp 7)           notes 7
    backward    checkpoint again:  attention (stamp 8)     RuntimeError, before anything is sent

Places are not compared: a checkpoint may keep the results of some calls, or end before the last one. An eager call that
is recorded saves its stamp with its tensors (`seqpar.ops.core.collective_op`), and notices changed places too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch.utils.checkpoint import CheckpointFunction

from seqpar.comm import Comm
from seqpar.comm.entry import uncompiled
from seqpar.ops.core.agreement import abort_on_error
from seqpar.private import torch as torch_private

VALUES = "plan, dropout seed or scale"  # what determines attention, besides its tensors


class Region:
    """A function that a checkpoint runs, and runs again inside contexts. stamps: of the calls that forward made.

    returned: of its result when it runs again, what the checkpoint gets; by default the same.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.stamps = function, set[int]()
        self.returned: Callable[[Any], Any] = lambda result: result
        self.contexts: list[tuple[object, Callable[[], AbstractContextManager[Any]]]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result; in forward there is no context yet."""
        if not self.contexts:
            return self.function(*args, **kwargs)
        with ExitStack() as stack:
            for _, context in reversed(self.contexts):
                stack.enter_context(context())
            return self.returned(self.function(*args, **kwargs))

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


class Repetition(threading.local):
    """The stamps that forward noted for the region that this thread runs again; None outside of all."""

    stamps: set[int] | None = None


_repetition = Repetition()


def check_repetition(what: str, comm: Comm, stamp: Hashable, values: str = VALUES) -> None:
    """Note a call for the checkpoints around it. If one runs again, check that its forward made this call too.

    values: what the stamp stands for, in words.

    Raises: RuntimeError, also reported to the other ranks, if the forward made no such call.
    """
    regions = known_regions()
    if not regions and _repetition.stamps is None:
        return
    number = hash((id(comm.stats), comm.rank, stamp))  # a comm and its subs share stats
    for region in regions:
        region.stamps.add(number)
        region.run_again_inside(partial(_expecting, region.stamps), _expecting)
    if _repetition.stamps is not None and number not in _repetition.stamps:
        refuse_repetition(what, comm, values)


@contextmanager
def _expecting(stamps: set[int]) -> Iterator[None]:
    before, _repetition.stamps = _repetition.stamps, stamps
    try:
        yield
    finally:
        _repetition.stamps = before


def refuse_repetition(what: str, comm: Comm, values: str = VALUES) -> NoReturn:
    """Raise RuntimeError, and report it to the other ranks, for a repeated call with other values."""
    with abort_on_error(comm, what):
        raise RuntimeError(
            f"{what} was recomputed under another {values} than in forward, or under none; "
            "checkpoint with torch.utils.checkpoint.checkpoint, run the backward inside the block of its forward, "
            "or give the recomputed layers their plan as an argument"
        )


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
