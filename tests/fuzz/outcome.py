"""How a case ends: right, refused by an error of ours, or a failure."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import seqpar
from seqpar.comm import Comm
from seqpar.testing import run_threads

TIMEOUT = 60.0  # of a wait: longer than any case takes on a busy machine
OURS = (ValueError, TypeError, NotImplementedError, RuntimeError)
PACKAGE = Path(seqpar.__file__).parent

# of the largest expected element and 1; what is wrong is wrong in the first digits
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}


class Wrong(AssertionError):
    """A case that is neither right nor refused."""


class Left(Exception):
    """A rank leaves its program early, by itself."""


class Ended(NamedTuple):
    """What a rank returned, or the error that it ended in."""

    value: Any
    error: Exception | None


class World(NamedTuple):
    """How the ranks of a case talk."""

    size: int
    delay: float = 0.0
    direct: bool = True
    every: str = "call"


def ends(world: World, program: Callable[[Comm], Any]) -> list[Ended]:
    """How each rank's program ends. One that ends in an error takes the comm down, as a process would."""

    def rank(comm: Any) -> Ended:
        comm.check_every = world.every
        try:
            return Ended(program(comm), None)
        except Exception as error:
            comm.abort(f"left the program in {type(error).__name__}: {error}")
            return Ended(None, None if isinstance(error, Left) else error)

    return run_threads(world.size, rank, timeout=TIMEOUT, delay=world.delay, direct=world.direct)


def refused(results: Sequence[Ended], *, by_all: bool) -> str | None:
    """The first error if any rank ended in one, None if all returned. by_all: whether one rank's is every rank's.

    Raises: Wrong for an error that is not one of ours, or that only the end of a timeout brought.
    """
    errors = {rank: end.error for rank, end in enumerate(results) if end.error is not None}
    for rank, error in errors.items():
        if not is_ours(error):
            raise Wrong(f"rank {rank} ended in {type(error).__name__}: {error}") from error
        if f"waited {TIMEOUT:g} s" in str(error):
            raise Wrong(f"rank {rank} hung: {error}") from error
    if errors and by_all and len(errors) < len(results):
        raise Wrong(f"only ranks {list(errors)} were refused: {next(iter(errors.values()))}")
    return next((f"{type(error).__name__}: {error}" for error in errors.values()), None)


def is_ours(error: BaseException) -> bool:
    """Whether an error was raised by a statement of this package, and is of a kind that its verbs promise."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not isinstance(error, OURS):
        return False
    path = trace.tb_frame.f_code.co_filename
    line = linecache.getline(path, trace.tb_lineno).strip()
    return Path(path).is_relative_to(PACKAGE) and line.startswith("raise") and len(str(error)) > 10


def compare(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Raises: Wrong if what was got is not what was expected, to the rounding of a dtype."""
    for name, x in got.items():
        y = expected[name]
        if x.shape != y.shape:
            raise Wrong(f"{name} is {list(x.shape)}, expected {list(y.shape)}")
        if not x.numel():
            continue
        x, y = x.double(), y.double()
        known = torch.isfinite(y)
        if not torch.equal(x[~known], y[~known]):
            raise Wrong(f"{name} is not -inf or +inf where it should be")
        x, y = x[known], y[known]
        limit = TOLERANCE[dtype] * (1.0 + float(y.abs().max() if y.numel() else 0.0))
        if y.numel() and not bool(((x - y).abs() <= limit).all()):
            raise Wrong(f"{name} is off by {float((x - y).abs().nan_to_num(torch.inf).max())}")
