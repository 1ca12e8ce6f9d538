"""Documents in line: each rank has one stretch of the batch, of about equal cost, where rows see few keys."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpar import Mask, plan_batch
from seqpar.planner.groups import Fetching
from seqpar.planner.lines import in_line, near_sighted
from seqpar.planner.place import Documents


@given(
    st.lists(st.tuples(st.integers(1, 500), st.integers(1, 40)), min_size=1, max_size=12), st.integers(1, 9),
    st.integers(0, 200),
)  # fmt: skip
def test_each_rank_has_one_stretch_with_room_for_its_rows(documents, ranks, spare) -> None:
    lengths, each = np.array(documents).T
    tokens = int(lengths.sum())
    room = np.full(ranks, tokens // ranks + 1 + spare)
    batch = Documents(lengths, lengths * each, 1, Fetching(1, 1, 1, 1))
    pieces, widths, level = in_line(batch, ranks, room=room)
    start = (np.cumsum(lengths) - lengths)[pieces.document] + pieces.start
    np.testing.assert_array_equal(start, np.cumsum(pieces.count) - pieces.count, "end to end")
    assert pieces.count.sum() == tokens and (np.diff(pieces.rank) >= 0).all() and (widths == 1).all()
    rows, ticks = np.zeros(ranks, int), np.zeros(ranks, int)
    np.add.at(rows, pieces.rank, pieces.count)
    np.add.at(ticks, pieces.rank, each[pieces.document] * pieces.count)
    assert (rows <= room).all() and level == ticks.max()
    if spare >= tokens:  # nothing is in the way of equal ticks, up to a row on each side
        assert level <= ticks.sum() / ranks + 2 * each.max() + ranks


@pytest.mark.parametrize(
    ("mask", "near"),
    [
        (Mask([5000, 300]), False),
        (Mask([5000, 300], causal=False), False),
        (Mask([5000], window=(4500, None)), False),
        (Mask([5000, 300], window=(200, None)), True),
        (Mask([5000], window=(200, None), sink_tokens=4), True),
    ],
)
def test_windows_make_rows_near_sighted(mask: Mask, near: bool) -> None:
    assert near_sighted(((mask, 2),)) == near
    assert not near_sighted(((mask, 2), (Mask(mask.lengths), 1)))


def test_a_window_with_sinks_is_cut_into_neighbouring_rows() -> None:
    """Keys of a window before each of three borders, and the sinks: what moves does not grow with the document."""
    mask = Mask([64_000], window=(511, None), sink_tokens=4)
    plan = plan_batch(mask, 4, model="llama-8b", hardware="h100", node=1)
    assert [len(plan.layout.runs(rank).start) for rank in range(4)] == [1] * 4
    fetched = [sum(step.pos.size for step in plan.steps(rank) if not step.local) for rank in range(4)]
    assert sorted(fetched) == [0, 515, 515, 515]
