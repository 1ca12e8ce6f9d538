"""`Past` against a list of (rank, position) for each sequence."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.facts.past import Past

Held = list[list[int]]  # of each sequence, the rank of each row


@st.composite
def histories(draw: st.DrawFn) -> tuple[Past, Held]:
    """A past of prompts, long turns and single rows, and which rank each row went to."""
    sequences, ranks = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    past, held = Past(sequences, ranks), [[] for _ in range(sequences)]
    for _ in range(draw(st.integers(0, 4))):
        new = np.array(draw(st.lists(st.integers(0, 9), min_size=sequences, max_size=sequences)))
        way = draw(st.sampled_from(["zigzag", "contiguous", "striped", "any", "kept", "pick"]))
        if way == "pick":
            beams = draw(st.lists(st.integers(0, sequences - 1), min_size=sequences, max_size=sequences))
            past, held = past.pick(beams), [list(held[beam]) for beam in beams]
        elif way == "kept" or not new.any():
            for n, rows in enumerate(held):
                fewest = min(range(ranks), key=lambda r, n=n, rows=rows: (rows.count(r), (r - n) % ranks))
                rows += [fewest] * int(new[n])
            past = past.kept(new)
        else:
            total = int(new.sum())
            owner = np.array(draw(st.lists(st.integers(0, ranks - 1), min_size=total, max_size=total)))
            layout = {
                "zigzag": lambda new=new: Layout.zigzag(new[new > 0], ranks),
                "contiguous": lambda total=total: Layout.contiguous(total, ranks),
                "striped": lambda total=total: Layout.striped(total, ranks),
                "any": lambda owner=owner: Layout([np.flatnonzero(owner == rank)[::-1] for rank in range(ranks)]),
            }[way]()
            for rows, part in zip(held, np.split(layout.owner(), np.cumsum(new)[:-1])):
                rows += part.tolist()
            past = past.after(new, layout)
    return past, held


@given(histories(), st.data())
def test_each_row_is_where_it_came_to(history: tuple[Past, Held], data: st.DataObject) -> None:
    past, held = history
    assert past.lengths().tolist() == list(map(len, held))
    counts = [[rows.count(rank) for rows in held] for rank in range(past.ranks)]
    assert past.counts().tolist() == counts
    if past.lengths().any():
        assert past.kv_layout().owner().tolist() == [rank for rows in held for rank in rows]
        assert all((np.diff(past.kv_layout().positions(rank)) > 0).all() for rank in range(past.ranks))
    ends = st.lists(st.integers(-3, 20), min_size=2, max_size=2)
    at = data.draw(st.lists(ends, min_size=len(held), max_size=len(held)))
    for rank in range(past.ranks):
        below = [[rows[: max(p, 0)].count(rank) for p in several] for rows, several in zip(held, at)]
        assert past.before(rank, at).tolist() == below
        assert past.before(rank, [several[0] for several in at]).tolist() == [pair[0] for pair in below]


@given(histories(), st.data(), st.sampled_from([None, 0, 3]))
def test_local_bounds_are_the_masks(history: tuple[Past, Held], data: st.DataObject, left: int | None) -> None:
    past, _ = history
    few = [st.integers(1 if length else 0, 4) for length in past.lengths()]
    new = np.array(data.draw(st.tuples(*few).filter(any)))
    past = past.kept(new)
    mask, lengths = past.mask(new, window=(left, None)), past.lengths()
    lo, hi = mask.bounds(np.arange(mask.tokens))
    rows = [past.kv_layout().positions(rank) for rank in range(past.ranks)]
    starts = np.cumsum(lengths) - lengths
    at = np.repeat(np.arange(past.sequences), new), np.concatenate([np.arange(n) for n in new])
    for (number, n), a, b in zip(zip(*at), lo, hi):
        position = int(lengths[number] - new[number] + n)
        first, last = (np.full(past.sequences, p) for p in (0 if left is None else position - left, position + 1))
        for rank in range(past.ranks):
            own = rows[rank][(rows[rank] >= starts[number]) & (rows[rank] < starts[number] + lengths[number])]
            seen = own[past.before(rank, first)[number] : past.before(rank, last)[number]]
            assert seen.tolist() == [key for key in own if a <= key < b]


@given(histories(), histories())
def test_a_past_is_a_value(one: tuple[Past, Held], other: tuple[Past, Held]) -> None:
    past, again = one[0], pickle.loads(pickle.dumps(one[0]))
    assert past == again and hash(past) == hash(again)
    if one[1] != other[1] or past.ranks != other[0].ranks:
        assert past != other[0]


def test_a_prompt_and_two_rows() -> None:
    past = Past(2, 2).after([5, 3], Layout.contiguous(8, 2)).kept([1, 1]).kept([1, 1])
    assert past.counts().tolist() == [[4, 2], [3, 3]]
    assert past.mask([1, 1]) == Mask([1, 1], kv_lengths=[7, 5])
    assert repr(past) == "Past(2 sequences of 12 rows over 2 ranks)"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Past(0, 2), "sequences must be an integer of at least 1"),
        (lambda: Past(2, 2).kept([1]), "lengths must be 2 integers"),
        (lambda: Past(2, 2).kept([1, -1]), "lengths must be 2 integers"),
        (lambda: Past(2, 2).after([1, 1], Layout.contiguous(3, 2)), "3 rows on 2 ranks, expected 2 on 2"),
        (lambda: Past(2, 2).kept([1, 0]).mask([0, 0]), r"sequences \[0\] have earlier rows"),
        (lambda: Past(2, 2).pick([2]), "run from 2 to 2"),
        (lambda: Past(2, 2).pick([]), "numbers of sequences"),
    ],
)
def test_errors(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]
