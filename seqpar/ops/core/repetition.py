"""Calls that a checkpoint makes again in backward: calls that its forward made, or an error.

Autograd saves nothing in the forward of torch's reentrant checkpoint, and a compiled graph compares nothing. So each
call notes its *stamp*, which stands for everything but its tensors, on the checkpoints around it. The region that runs
again may only make calls with those stamps::

    forward     checkpoint:  attention (stamp 7)           notes 7
    backward    checkpoint again:  attention (stamp 8)     RuntimeError, before anything is sent

Places are not compared: a checkpoint may keep the results of some calls, or end before the last one. An eager call that
is recorded saves its stamp with its tensors (`seqpar.ops.core.collective_op`), and notices changed places too.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

from seqpar.comm import Comm
from seqpar.ops.core.agreement import abort_on_error
from seqpar.ops.core.regions import known_regions

VALUES = "plan, dropout seed or scale"  # what determines attention, besides its tensors


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
