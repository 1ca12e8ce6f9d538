"""The plan that surrounds the layers of a model: ``with parallel(plan, comm):``."""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor

from seqpar.comm import Comm
from seqpar.ops import bind
from seqpar.plan import Plan


class Surrounding(NamedTuple):
    """A plan, a comm, the handle of both for compiled code, and the seed that layers derive theirs from."""

    plan: Plan
    comm: Comm
    handle: Tensor
    seed: int


AFTER = "a block of seqpar.parallel after one that ended with an error"
_stacks = threading.local()
_blocks: weakref.WeakKeyDictionary[Comm, int] = weakref.WeakKeyDictionary()
_left: weakref.WeakSet[Comm] = weakref.WeakSet()  # whose last block was left by an error, maybe on this rank alone


@contextmanager
def parallel(plan: Plan, comm: Comm, *, seed: int | None = None) -> Iterator[Surrounding]:
    """Make plan and comm those of every layer of this thread that is given none, until the block ends. Blocks nest.

    seed: what the layers of `seqpar.nn` derive the seeds of their dropout from, equal on all ranks and different for
    each step; by default the number of blocks that this comm object had before.

    The backward pass may run anywhere, checkpoints included: what is recomputed takes the plan that forward had.

    A block after one that was left by an error begins with an agreement of all ranks: a rank that goes on alone, as in
    a loop that catches what a batch raises, would else meet the others in the middle of their forward.

    Raises: ValueError for a plan of another number of ranks than the comm's, and on all ranks where some go on after an
    error that the others did not have.
    """
    if not isinstance(plan, Plan) or plan.ranks != comm.size:
        raise ValueError(f"parallel takes a plan for the comm's {comm.size} ranks, got {plan!r:.200}")
    before = _blocks.get(comm, 0)
    _blocks[comm] = before + 1
    if comm in _left:
        if comm.size > 1:  # as many blocks on all ranks, so that none is a batch ahead from here on
            comm.agree(AFTER, {"blocks before": before})
        _left.discard(comm)
    stack = _stack()
    stack.append(Surrounding(plan, comm, bind(plan, comm), before if seed is None else seed))
    try:
        yield stack[-1]
    except BaseException:
        _left.add(comm)
        raise
    finally:
        stack.pop()


def surrounding() -> Surrounding:
    """The innermost plan and comm of this thread.

    Raises: RuntimeError outside every block.
    """
    stack = _stack()
    if not stack:
        raise RuntimeError("no plan surrounds this call; call it inside `with seqpar.parallel(plan, comm):`")
    return stack[-1]


def derived_seed(seed: int, number: int) -> int:
    """63 bits of a seed and a number: of a step and its layers, of a training and its forwards."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest(), "little") >> 1


def _stack() -> list[Surrounding]:
    found: list[Surrounding] | None = getattr(_stacks, "stack", None)
    if found is None:
        found = _stacks.stack = []
    return found
