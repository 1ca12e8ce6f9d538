"""A sample of a test's cases has every value of every parameter, as long as there is room."""

from __future__ import annotations

from itertools import product

import pytest

from tests.sampling import sample


def grid(**values: list[object]) -> list[dict[str, object]]:
    """All combinations, the last parameter's values next to each other."""
    return [dict(zip(values, case, strict=True)) for case in product(*values.values())]


@pytest.mark.parametrize("every", [1, 2, 3, 5, 100])
def test_one_in_so_many_and_at_least_one(every: int) -> None:
    cases = grid(ranks=[2, 3, 4], comm=["gloo", "shm"], heads=[1, 2])
    assert len(sample(cases, every)) == -(-12 // every)


@pytest.mark.parametrize(("every", "both"), [(2, ["gloo", "shm"]), (4, ["gloo", "shm"])])
def test_no_value_is_lost_that_there_is_room_for(every: int, both: list[object]) -> None:
    cases = grid(ranks=[2, 3, 4, 6], comm=both)
    chosen = [cases[place] for place in sample(cases, every)]
    assert {case["comm"] for case in chosen} == set(both)
    if every == 2:
        assert {case["ranks"] for case in chosen} == {2, 3, 4, 6}


def test_values_take_turns() -> None:
    cases = grid(kernel=["a", "b", "c"], case=list(range(30)))
    chosen = [cases[place] for place in sample(cases, 3)]
    assert {case["case"] for case in chosen} == set(range(30))
    assert [sum(case["kernel"] == kernel for case in chosen) for kernel in "abc"] == [10, 10, 10]


def test_one_long_list_is_taken_from_all_over() -> None:
    chosen = sorted(sample([{"seed": seed} for seed in range(100)], 10))
    assert max(b - a for a, b in zip([0, *chosen], [*chosen, 99])) <= 20
