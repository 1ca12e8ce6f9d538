"""What ranks make of copies of one model that they have made parallel, and what their errors say."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

import seqpar
from seqpar import Comm
from seqpar.testing import run_threads


def on_copies(
    model: nn.Module, call: Callable[[Any, Comm], Any], *, ranks: int = 2,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext, **options: Any,
) -> list[Any]:  # fmt: skip
    """What ``call(own, comm)`` returns on each rank, whose model is a parallel copy.

    around: makes a block around all of it. options: of `parallelize`.
    """

    def rank(comm: Comm) -> Any:
        own = copy.deepcopy(model)
        with around(), seqpar.parallelize(own, comm, **options):
            return call(own, comm)

    return run_threads(ranks, rank)


def error_of(call: Callable[..., object], *given: Any, **named: Any) -> str:
    """The kind and message of what a call raises, or "nothing"."""
    try:
        call(*given, **named)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def errors(call: Callable[..., object], *given: Any, ranks: int = 2, timeout: float = 200.0) -> list[str]:
    """What ``call(comm, *given)`` raises on each rank."""
    return run_threads(ranks, lambda comm: error_of(call, comm, *given), timeout=timeout)


def errors_on_copies(
    model: nn.Module, call: Callable[[Any, Comm], object], *, ranks: int = 2, **options: Any
) -> list[str]:
    """What ``call(own, comm)`` raises on each rank, whose model is a parallel copy."""
    return on_copies(model, lambda own, comm: error_of(call, own, comm), ranks=ranks, **options)
