"""Which case a number is, and how it ends."""

from __future__ import annotations

from random import Random
from typing import Any

from tests.fuzz import attention, losses, moves, shares

KINDS: tuple[tuple[Any, int], ...] = ((attention, 6), (moves, 2), (losses, 1), (shares, 1))  # and their weights


def drawn(number: int) -> Any:
    """The case of a number, the same everywhere."""
    return _drawn(number)[1]


def judged(number: int) -> str:
    """How the case of a number ends: "right", or "refused" and the error.

    Raises: AssertionError for any other end, with the line that runs the case again.
    """
    kind, case = _drawn(number)
    try:
        return str(kind.judge(case))
    except AssertionError as error:
        raise AssertionError(f"python -m tests.fuzz {number}: {error}\n{case}") from error


def _drawn(number: int) -> tuple[Any, Any]:
    draw = Random(number)
    (kind,) = draw.choices(*zip(*KINDS, strict=True))
    return kind, kind.drawn(draw, number)
