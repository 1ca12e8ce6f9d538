"""Calls that a checkpoint makes again in backward: calls that its forward made, or an error.

Autograd saves nothing in the forward of torch's reentrant checkpoint, and a compiled graph compares nothing. So each
call notes its *stamp*, which stands for everything but its tensors, on the checkpoints around it. The region that runs
again may only make calls with those stamps::

    forward     checkpoint:  attention (stamp 7)           notes 7
    backward    checkpoint again:  attention (stamp 8)     RuntimeError, before anything is sent

Places are not compared: a checkpoint may keep the results of some calls, or end before the last one. An eager call that
is recorded saves its stamp with its tensors (`seqpar.ops.core.collective_op`), and notices changed places too. Calls
under `torch.enable_grad` in a reentrant checkpoint are not noted, but compared: there they need the stamp of another
call of the region.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

import torch

from seqpar.comm import Comm
from seqpar.ops.core.agreement import abort_on_error
from seqpar.ops.core.regions import known_regions

VALUES = "plan, dropout seed or scale"  # what determines attention, besides its tensors


class Repetition(threading.local):
    """The stamps that forward noted for the region that this thread runs again; None outside of all."""

    stamps: set[int] | None = None


_repetition = Repetition()


def check_repetition(what: str, comm: Comm, stamp: Hashable, values: str = VALUES, *, recorded: bool) -> None:
    """Note a call for the checkpoints around it. If one runs again, check that its forward made this call too.

    values: what the stamp stands for, in words. recorded: whether autograd records the call.

    Raises: RuntimeError, and tells the other ranks, if the forward made no such call.
    """
    # Saved tensors have hooks inside a checkpoint that is not reentrant. Forward-mode derivatives are off inside the
    # forward of an autograd function, as the reentrant checkpoint is one, and on under `no_grad` alone.
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None or not (
        recorded or torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled()
    ):
        _note(_number(comm, stamp))
    if _repetition.stamps is not None and _number(comm, stamp) not in _repetition.stamps:
        refuse_repetition(what, comm, values)


def _number(comm: Comm, stamp: Hashable) -> int:
    return hash((id(comm.stats), comm.rank, stamp))  # a comm and its subs share stats


def _note(stamp: int) -> None:
    for region in known_regions():
        stamps: set[int] | None = getattr(region.owner, "_seqpar_stamps", None)
        if stamps is None:
            stamps = region.owner._seqpar_stamps = set()
            region.run_again_inside(partial(_expecting, stamps), _expecting)
        stamps.add(stamp)


@contextmanager
def _expecting(stamps: set[int]) -> Iterator[None]:
    before, _repetition.stamps = _repetition.stamps, stamps
    try:
        yield
    finally:
        _repetition.stamps = before


def refuse_repetition(what: str, comm: Comm, values: str = VALUES) -> NoReturn:
    """Raise RuntimeError, and tell the other ranks, for a repeated call with other values."""
    with abort_on_error(comm, what):
        raise RuntimeError(
            f"{what} was recomputed under another {values} than in forward, or under none; "
            "checkpoint with torch.utils.checkpoint.checkpoint, run the backward inside the block of its forward, "
            "or give the recomputed layers their plan as an argument"
        )
