"""Random calls of every verb on ranks that are threads, with mistakes: each is right, or refused by name, or a failure.

A block's name says which cases it has; ``python -m tests.fuzz`` and a number runs one of them again.
"""

from __future__ import annotations

import pytest

from tests.fuzz.draw import judged

CASES = 200
ALL, BLOCK = 10_000, 250


def check(first: int, last: int) -> None:
    """Every case that is neither right nor refused, a line for each."""
    failures = []
    for number in range(first, last):
        try:
            judged(number)
        except AssertionError as error:
            failures.append(str(error))
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("first", range(0, CASES, 50), ids=lambda n: f"cases {n} to {n + 49}")
@pytest.mark.sampled(2)
def test_cases_are_right_or_refused_by_name(first) -> None:
    check(first, first + 50)


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(0, ALL, BLOCK), ids=lambda n: f"cases {n} to {n + BLOCK - 1}")
def test_all_cases_are_right_or_refused_by_name(first) -> None:
    check(first, first + BLOCK)
