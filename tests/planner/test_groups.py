"""Long documents in groups: every row once, whole where that is level enough, and level where it is not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpar import Layout, Mask
from seqpar.plan.counts import tally
from seqpar.planner.groups import Fetching, RankShares, grouped

FREE = Fetching(0, 0, 0, 1)
LENGTHS = st.lists(st.integers(1, 5000), min_size=1, max_size=30)


def shared(lengths: list[int], groups: int, *, fetch: int = 0, room: int | None = None, part: int = 0) -> RankShares:
    """Documents that cost as many ticks as rows, longest first."""
    rows = np.sort(np.array(lengths, np.int64))[::-1]
    room = int(rows.sum()) if room is None else room
    return grouped(
        rows,
        rows,
        fetch=Fetching(fetch, 0, 0, 1),
        room=np.full(groups, room),
        part=part or -(-int(rows.sum()) // groups),
    )


@given(LENGTHS, st.integers(1, 9), st.integers(0, 3), st.booleans())
def test_every_row_is_in_one_group(lengths: list[int], groups: int, fetch: int, tight: bool) -> None:
    room = -(-sum(lengths) // groups) if tight else None
    shares = shared(lengths, groups, fetch=fetch, room=room)
    assert (shares.first < shares.stop).all() and (shares.group < groups).all()
    for document, length in enumerate(sorted(lengths, reverse=True)):
        of = shares.document == document
        assert shares.first[of].tolist() == [0, *shares.stop[of][:-1]] and shares.stop[of][-1] == length
        assert len(set(shares.group[of])) == of.sum()


def load(shares: RankShares, groups: int) -> list[int]:
    """Rows of each group."""
    return np.bincount(shares.group, shares.stop - shares.first, groups).astype(int).tolist()


def test_what_fits_is_whole_and_goes_where_least_is() -> None:
    shares = shared([50, 40, 30, 20, 10], 2, part=80)
    assert shares.group.tolist() == [0, 1, 1, 0, 0] and (shares.first == 0).all()


def test_what_is_too_much_for_one_group_is_levelled_over_the_fewest() -> None:
    shares = shared([250, 20, 20, 10], 4, part=100)
    assert shares.group[shares.document == 0].tolist() == [0, 1, 2]
    assert load(shares, 4) == [83, 83, 84, 50]
    assert (shares.group[shares.document > 0] == 3).all()


def test_nothing_is_cut_for_less_than_a_group_would_fetch() -> None:
    assert shared([100, 10], 4, fetch=1).group.tolist() == [0, 1]


def test_a_document_that_no_group_has_rows_for_goes_to_those_with_most() -> None:
    shares = grouped(np.array([60, 60, 60]), np.array([60, 60, 60]), fetch=FREE, room=np.array([90, 90]), part=200)
    assert load(shares, 2) == [90, 90] and shares.document.tolist() == [0, 1, 2, 2]


def test_no_document_is_no_share() -> None:
    assert all(x.size == 0 for x in grouped(*np.zeros((2, 0), np.int64), fetch=FREE, room=np.ones(3, np.int64), part=1))


@pytest.mark.parametrize("groups", [2, 3, 8])
def test_what_a_part_fetches_and_sends_is_what_a_zigzag_layout_moves(groups: int) -> None:
    length, held = 48 * groups, 48
    moved = tally(Mask([length]), Layout.zigzag([length], groups))
    keys, merging, sent = Fetching.of_part(length, np.arange(groups) * held, held)
    assert keys.tolist() == moved.keys.tolist() and sent.tolist() == moved.sent.tolist()
    assert merging.tolist() == moved.merging.tolist()


def test_later_parts_of_a_document_are_smaller_where_they_merge_more() -> None:
    rows = np.array([4000])
    shares = grouped(rows, rows * 100, fetch=Fetching(0, 10, 0, 1000), room=np.full(2, 4000), part=250_000)
    first, second = load(shares, 2)
    assert first > second > 1500
