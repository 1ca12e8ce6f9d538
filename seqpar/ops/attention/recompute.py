"""Calls that are made again: activations that backward recomputes take the plan, comm and seed that forward had.

Checkpointing runs a region of a model in forward, drops what it computed, and runs it again in backward. By then
another plan of equal shapes may surround the layers or be bound to them, or none. So

- what a call was made with is noted with the owners of the regions around it, and the call made again takes it from
  there (`settle`); in a backward pass whose region is unknown a call takes nothing from what surrounds it;
- what is to become a call, as PyTorch's attention inside `seqpar.sdpa`, is run again inside the context of its forward
  (`run_again_inside`), and is refused in regions of others, which would run it again as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqpar.comm import Comm
from seqpar.ops.attention.signature import Options
from seqpar.ops.core.agreement import abort_on_error
from seqpar.ops.core.handles import carried, checked_values
from seqpar.ops.core.regions import Region, around
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


# --- what calls were made with ----------------------------------------------------------------------------------------


def settle(values: Sequence[Any], options: Options) -> tuple[Plan, Comm, Options]:
    """The plan, comm and options of a call; if it is made again, those that it was made with in forward.

    values: plan and comm, or their handle; before them, or alone, a `Late`.

    Raises: RuntimeError for a call made again with other values than in forward, or in a backward pass that is not
    known to recompute anything, without values of its own.
    """
    late, *given = values if isinstance(values[0], Late) else (None, *values)
    by_handle = bool(given) and isinstance(given[-1], Tensor)
    if by_handle:
        given = [*given[:-1], *carried(given[-1])]
    if by_handle or len(given) not in (0, 2):
        given = checked_values(given, Plan)
    seed = options.dropout_seed
    asked = (options.scale, options.softcap, options.dropout_p, seed if options.dropout_p else None)
    first, again = _notes()
    noted = None if again is None else again.get(late)
    if late is None:
        found = Given(*given, seed)
    elif given or (noted is None and torch._C._current_graph_task_id() < 0):
        found = late.now(given, seed)
    else:
        found = _only(noted, asked)
    note = asked, found if options.dropout_p else found._replace(seed=None)
    if noted is not None and not any(_alike(note, other) for other in noted):
        with abort_on_error(noted[0][1].comm, "attention, recomputed"):
            raise RuntimeError(
                f"an attention call is recomputed with {_text(note)}, but in forward none had these: "
                f"{'; '.join(map(_text, noted))}; give a checkpoint its plan and seed as arguments"
            )
    for notes in first:
        known = notes.setdefault(late, [])
        if note not in known:
            known.append(note)
    return found.plan, found.comm, options._replace(dropout_seed=found.seed)


Note = tuple["tuple[object, ...]", Given]  # scale, softcap, dropout, seed as given; what the call was made with
Notes = dict["Late | None", "list[Note]"]  # by what looks up, or None for what is given


def _alike(note: Note, other: Note) -> bool:
    """Whether they are of the same call; a comm that was given may be made anew by `sub`."""
    return note[0] == other[0] and note[1].plan == other[1].plan and note[1].seed == other[1].seed


def _text(note: Note) -> str:
    (scale, softcap, dropout, _), (plan, _, seed) = note
    return f"{plan!r:.200}, seed {seed}, scale {scale}, softcap {softcap}, dropout {dropout}"


def _only(noted: list[Note] | None, asked: tuple[object, ...]) -> Given:
    if noted is None:
        raise RuntimeError(
            "a layer without a plan of its own was called in a backward pass, by something that recomputes and is not "
            "known to seqpar: torch.utils.checkpoint.checkpoint is, and autograd functions with forward(ctx, ...) and "
            "backward(ctx, ...). Give the layer its plan, or seqpar.bind(plan, comm), as an argument"
        )
    found = [made for other, made in noted if other == asked]
    if len(found) == 1:
        return found[0]
    with abort_on_error(noted[0][1].comm, "attention, recomputed"):
        if found:
            raise RuntimeError(
                "a layer was called under several plans in one checkpointed region, and its recomputation cannot tell "
                "which is which; give the layer its plan as an argument, or checkpoint the calls apart"
            )
        raise RuntimeError(
            f"a layer is recomputed with (scale, softcap, dropout, seed) {asked}, but in forward it was called with "
            f"{[other for other, _ in noted]}; between forward and backward they stay, and train or eval does too"
        )


def _notes() -> tuple[list[Notes], Notes | None]:
    """Notes of the regions around this call: those that run for the first time, and the innermost that runs again."""
    first: list[Notes] = []
    for owner, again in ((region.owner, region.again) for region in around() if not region.foreign):
        if again and hasattr(owner, "_seqpar"):
            return first, owner._seqpar
        if not again:
            if not hasattr(owner, "_seqpar"):
                owner._seqpar = {}
            first.append(owner._seqpar)
    return first, None


# --- what is run again inside a context -------------------------------------------------------------------------------


def run_again_inside(context: Callable[[], AbstractContextManager[Any]], by: object, outside: list[Region]) -> None:
    """Put the regions under way, but for those outside, under a context when they run again; once for each `by`.

    Raises: NotImplementedError for an autograd function of others.
    """
    for region in under_way():
        if any(region.owner is other.owner for other in outside):
            continue
        if region.foreign:
            raise NotImplementedError(
                f"attention is called inside {region.owner.f_locals['cls'].__name__}, an autograd function whose "
                "backward may run it again, outside of the block that reroutes it; checkpoint with "
                "torch.utils.checkpoint.checkpoint, or enter the block inside what that function runs"
            )
        function = getattr(region.owner, region.function)
        if not (isinstance(function, Again) and function.by is by):
            setattr(region.owner, region.function, Again(function, by, context))


def under_way() -> list[Region]:
    """What this thread is inside of that backward runs again under a name that is known, or in a way that is not."""
    return [region for region in around() if not region.again and (region.function or region.foreign)]


class Again:
    """A function that a checkpoint runs again, inside a context that belongs to the first forward."""

    def __init__(self, function: Callable[..., Any], by: object, context: Callable[[], AbstractContextManager[Any]]):
        self.function, self.by, self.context = function, by, context

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns, inside the context."""
        with self.context():
            return self.function(*args, **kwargs)
