"""Calls that are made again: activations that backward recomputes take the plan, comm and seed that forward had.

Checkpointing runs a region of a model in forward, drops what it computed, and runs it again in backward. By then
another plan of equal shapes may surround the layers or be bound to them. So what a call was made with is noted with the
regions it lies in, and the call made again takes it from there. Nobody hands regions to calls; the stack shows them::

    region                               in forward                        in backward
    autograd function that recomputes    forward(ctx, ...)                 backward(ctx, ...)
      (reentrant checkpoints, graphs)
    torch.utils.checkpoint, if not       checkpoint, which holds a         unpack_hook of that frame
      reentrant                            frame object

A call in a backward pass whose region is unknown takes nothing from what surrounds it: it is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from seqpar.comm import Comm
from seqpar.ops.handles import carried
from seqpar.plan import Plan


class Given(NamedTuple):
    """What a call is made with besides its arguments."""

    plan: Plan
    comm: Comm
    seed: int | None


class Late:
    """A plan, comm and seed that are looked up when a call is made, in compiled models too; subclasses say where."""

    def now(self, given: Sequence[Any], seed: int | None) -> Given:
        """What a call is made with that was given these values, (plan, comm) or none, and this seed or none."""
        raise NotImplementedError


def late_of(handles: Sequence[Tensor]) -> tuple[Late | None, Sequence[Tensor]]:
    """What looks the values up, if the first handle is of such, and the handles of values that were given."""
    head, *_ = carried(handles[0])
    return (head, handles[1:]) if isinstance(head, Late) else (None, handles)


def settle(late: Late | None, given: Sequence[Any], seed: int | None) -> Given:
    """What a call is made with; if it is made again, what it was made with in forward.

    Raises: RuntimeError for a call made again with other values than in forward, or in a backward pass that is not
    known to recompute anything, without values of its own.
    """
    first, again = _regions()
    key = None if late is None else (late, seed)
    noted = None if again is None else again.get(key)
    if late is None:
        found = Given(*given, seed)
    elif given or (noted is None and torch._C._current_graph_task_id() < 0):
        found = late.now(given, seed)
    else:
        found = _only(noted)
    # a comm that was given may be made anew by `sub`
    if noted is not None and not any(found.plan == other.plan and found.seed == other.seed for other in noted):
        raise RuntimeError(
            f"an attention call is recomputed with {found.plan!r:.200} and seed {found.seed}, but in forward none had "
            f"these: {[(x.plan, x.seed) for x in noted]!r:.300}; give a checkpoint its plan as an argument"
        )
    for notes in first:
        known = notes.setdefault(key, [])
        if found not in known:
            known.append(found)
    return found


def _only(noted: list[Given] | None) -> Given:
    if noted is None:
        raise RuntimeError(
            "a layer without a plan of its own was called in a backward pass, by something that recomputes and is not "
            "known to seqpar: torch.utils.checkpoint.checkpoint is, and autograd functions with forward(ctx, ...) and "
            "backward(ctx, ...). Give the layer its plan, or seqpar.bind(plan, comm), as an argument"
        )
    if len(noted) > 1:
        raise RuntimeError(
            "a layer was called under several plans in one checkpointed region, and its recomputation cannot tell "
            "which is which; give the layer its plan as an argument, or checkpoint the calls apart"
        )
    return noted[0]


Notes = dict["tuple[Late, int | None] | None", "list[Given]"]  # by what looks up, or None for what is given


def _regions() -> tuple[list[Notes], Notes | None]:
    """Notes of the regions around this call: those that run for the first time, and the innermost that runs again."""
    first: list[Notes] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_name
        if name in _FINDERS and (region := _FINDERS[name](frame)) is not None:
            if name in ("forward", "checkpoint"):
                first.append(_notes(region))
            elif hasattr(region, "_seqpar"):
                return first, _notes(region)
        frame = frame.f_back
    return first, None


def _notes(region: Any) -> Notes:
    if not hasattr(region, "_seqpar"):
        region._seqpar = {}
    return region._seqpar  # type: ignore[no-any-return]


def _context(frame: FrameType) -> object:
    """The context of an autograd function, if this is its forward or backward."""
    if frame.f_code.co_varnames[:1] != ("ctx",):
        return None
    context = frame.f_locals.get("ctx")
    return context if isinstance(context, BackwardCFunction) else None


def _checkpointed(frame: FrameType) -> object:
    """The frame object of a checkpoint that runs its function for the first time."""
    inside = getattr(_local(frame, "gen"), "gi_frame", None)
    return None if inside is None else inside.f_locals.get("new_frame")


def _local(frame: FrameType, name: str) -> Any:
    return frame.f_locals.get(name) if frame.f_globals.get("__name__") == "torch.utils.checkpoint" else None


_FINDERS = {
    "forward": _context,
    "backward": _context,
    "checkpoint": _checkpointed,
    "unpack_hook": lambda frame: _local(frame, "frame"),
}
