"""The plan that surrounds the layers of a model: ``with parallel(plan, comm):``."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor

from seqpar.comm import Comm
from seqpar.ops import bind
from seqpar.plan import Plan


class Surrounding(NamedTuple):
    """A plan, a comm, and the handle of both for compiled code."""

    plan: Plan
    comm: Comm
    handle: Tensor


_stacks = threading.local()


@contextmanager
def parallel(plan: Plan, comm: Comm) -> Iterator[Surrounding]:
    """Make plan and comm those of every layer of this thread that is given none, until the block ends. Blocks nest.

    Raises: ValueError for a plan of another number of ranks than the comm's.
    """
    if not isinstance(plan, Plan) or plan.ranks != comm.size:
        raise ValueError(f"parallel takes a plan for the comm's {comm.size} ranks, got {plan!r:.200}")
    stack = _stack()
    stack.append(Surrounding(plan, comm, bind(plan, comm)))
    try:
        yield stack[-1]
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


def _stack() -> list[Surrounding]:
    found: list[Surrounding] | None = getattr(_stacks, "stack", None)
    if found is None:
        found = _stacks.stack = []
    return found
