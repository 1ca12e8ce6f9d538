"""Which cases of a test with many CI runs: ``@pytest.mark.sampled(5)`` leaves a fifth, chosen here.

Every nth case would miss values: of ``ranks`` in (2, 3) beside ``comm`` in ("gloo", "shm"), every second one has gloo.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations

GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, lie apart


def sample(cases: Sequence[Mapping[str, object]], every: int) -> set[int]:
    """The places of one in so many cases, given by their parameters.

    Each next one has the most values that no earlier one has, then the most pairs of values, then the rarest values;
    the rest is spread over the list.
    """
    values = [{(name, repr(value)) for name, value in case.items()} for case in cases]
    pairs = [set(combinations(sorted(of_case), 2)) for of_case in values]
    chosen: set[int] = set()
    seen: Counter[tuple[str, str]] = Counter()
    met: set[tuple[tuple[str, str], ...]] = set()

    def worth(place: int) -> tuple[int, int, int, float]:
        new = sum(value not in seen for value in values[place])
        return new, len(pairs[place] - met), -sum(seen[value] for value in values[place]), -(place * GOLDEN % 1)

    for _ in range(-(-len(cases) // every)):
        best = max((place for place in range(len(cases)) if place not in chosen), key=worth)
        chosen.add(best)
        seen.update(values[best])
        met |= pairs[best]
    return chosen
