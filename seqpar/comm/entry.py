"""Who may be inside a comm: one thread at a time, no compiler, and no transform of torch.func.

A second thread is refused, since other ranks might mix up the two calls: ranks match calls by order, and two threads
have no common order. Threads may take turns, as autograd's backward threads do, and a call may make other calls.
torch.compile would trace the Python that posts and awaits messages; a graph ends before it and another begins after it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar, cast

import torch

from seqpar.private import torch as torch_private

M = TypeVar("M", bound=Callable[..., Any])
transforms_active = torch_private.are_functorch_transforms_active


class OnOneRank(threading.local):
    """This thread's blocks in which a parallel model is on one rank: how many are open, and how many have begun."""

    open = begun = 0


on_one_rank = OnOneRank()


class ThreadEntry:
    """The entry of threads into a comm and its subs. inside: the innermost call and its thread, for errors."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.inside = ("no call", "")


class entered:
    """``with entered(comm, what):`` a call of a `Comm`, named for errors. A comm of one rank lets any threads enter.

    aborts: whether an error is reported to the other ranks, so that they do not wait for the timeout.

    Raises: RuntimeError if another thread is inside; the comm is then dead, as later calls of ranks would no longer
    match.
    """

    def __init__(self, comm: Any, what: str, *, aborts: bool = False) -> None:
        self.comm, self.what, self.aborts = comm, what, aborts

    def __enter__(self) -> None:
        if self.comm.size == 1:
            return
        entry: ThreadEntry = self.comm.entry
        thread = threading.current_thread().name
        if not entry.lock.acquire(blocking=False):
            running, holder = entry.inside
            reason = (
                f"rank {self.comm.rank}: {self.what} in thread {thread!r} while thread {holder!r} is inside {running}, "
                "and ranks match calls by their order; make the calls of a comm from one thread at a time, in one "
                "order on every rank"
            )
            self.comm.abort(reason)
            raise RuntimeError(reason)
        self.before, entry.inside = entry.inside, (self.what, thread)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.comm.size == 1:
            return
        try:
            if error is not None and self.aborts:
                self.comm.abort(f"{self.what}: {type(error).__name__}: {error}")
        finally:
            self.comm.entry.inside = self.before
            self.comm.entry.lock.release()


def uncompiled(function: M) -> M:
    """The function, excluded from torch.compile; plans and messages are plain Python objects."""
    compiler: Any = torch.compiler
    disabled = cache(lambda: compiler.disable(function))

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        return (disabled() if "torch._dynamo" in sys.modules else function)(*arguments, **named)

    return cast(M, call)


def refuse_transforms(what: str) -> None:
    """Raise NotImplementedError inside a transform of `torch.func`, whose tensors have no memory to send."""
    if transforms_active() and not torch.compiler.is_compiling():
        raise NotImplementedError(
            f"{what} inside a transform of torch.func (grad, vjp, vmap, jvp, ...), for which it has no rule; "
            "call it outside, and differentiate with torch.autograd.grad"
        )


def enters(method: M) -> M:
    """A method of a comm whose first argument names the call in which it runs."""

    @uncompiled
    @wraps(method)
    def call(comm: Any, what: str, *arguments: Any, **named: Any) -> Any:
        refuse_transforms(what)
        with entered(comm, what):
            return method(comm, what, *arguments, **named)

    return cast(M, call)
