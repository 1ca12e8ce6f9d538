"""Random faults of processes in every verb: the others end in time, right or with an error that says who."""

import random
import sys

import pytest

from tests.fuzz.faults import Schedule, complaints

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it stops and watches processes by what Linux has")

FIRST = 20_000


def check(seed: int) -> None:
    """One schedule; its seed is printed, and `complaints(Schedule(seed))` runs it again."""
    schedule = Schedule(seed)
    print(schedule)
    assert not (found := complaints(schedule)), f"{schedule}\n" + "\n".join(found)


@pytest.mark.parametrize("seed", range(FIRST, FIRST + 10))
@pytest.mark.sampled(5)
def test_ranks_end_in_time_whatever_one_of_them_does(seed):
    check(seed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(300))
def test_ranks_end_in_time_whatever_one_of_them_does_in_many_ways(number):
    check(random.SystemRandom().randrange(1 << 30))
