"""`Layout` against the definition: a partition of the tokens, made as its name says."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpar.layout import Layout, cut, expand, runs_of
from seqpar.mask import Mask

# Of Layout.zigzag([5, 9, 1], 3); changes only when the digest's recipe does.
DIGEST = "7d135267347ec9d680c08381b1824447"

tokens_and_ranks = st.tuples(st.integers(1, 60), st.integers(1, 20))


def check_partition(layout: Layout, tokens: int, ranks: int) -> None:
    """Property 1, and that counts, runs and owner say the same."""
    assert (layout.total, layout.ranks) == (tokens, ranks)
    shards = [layout.positions(r) for r in range(ranks)]
    assert all(s.dtype == np.int64 and s.size == layout.tokens(r) for r, s in enumerate(shards))
    np.testing.assert_array_equal(np.sort(np.concatenate(shards)), np.arange(tokens))
    for rank, shard in enumerate(shards):
        assert (layout.owner()[shard] == rank).all()
        runs = layout.runs(rank)
        assert (runs.count > 0).all() and (runs.step > 0).all()
        np.testing.assert_array_equal(expand(*runs), shard)
    for same in (pickle.loads(pickle.dumps(layout)), Layout(shards)):
        assert same == layout and hash(same) == hash(layout) and same.digest() == layout.digest()
        np.testing.assert_array_equal(same.owner(), layout.owner())


@given(tokens_and_ranks)
def test_contiguous(sizes) -> None:
    tokens, ranks = sizes
    layout = Layout.contiguous(tokens, ranks)
    check_partition(layout, tokens, ranks)
    np.testing.assert_array_equal(np.concatenate([layout.positions(r) for r in range(ranks)]), np.arange(tokens))
    counts = [layout.tokens(r) for r in range(ranks)]
    assert max(counts) - min(counts) <= 1


@given(tokens_and_ranks, st.integers(1, 7))
def test_striped_deals_blocks_in_turn(sizes, block) -> None:
    tokens, ranks = sizes
    layout = Layout.striped(tokens, ranks, block=block)
    check_partition(layout, tokens, ranks)
    np.testing.assert_array_equal(layout.owner(), np.arange(tokens) // block % ranks)
    for rank in range(ranks):
        assert (np.diff(layout.positions(rank)) > 0).all()


@given(st.lists(st.integers(1, 25), min_size=1, max_size=6), st.integers(1, 9))
def test_zigzag_cuts_every_document_into_chunks_alike(lengths, ranks) -> None:
    layout = Layout.zigzag(lengths, ranks)
    check_partition(layout, sum(lengths), ranks)
    first = 0
    for n in lengths:
        held = layout.owner()[first : first + n]
        assert (np.diff(held[: (n + 1) // 2]) >= 0).all(), "ranks rise, then fall"
        # Chunks from both ends: rank r has chunk r and chunk 2 ranks - 1 - r. Their sizes differ by at most one.
        sizes = np.bincount(held, minlength=ranks)
        assert sizes.max() - sizes.min() <= 2
        rising = chunk_sizes(held, ranks)
        assert rising is None or max(rising) - min(rising) <= 1
        first += n


def chunk_sizes(held: np.ndarray, ranks: int) -> list[int] | None:
    """Sizes of the 2 * ranks chunks of a document, or None if none can be made of its owners with sizes so alike."""
    order = [*range(ranks), *reversed(range(ranks))]
    low = len(held) // (2 * ranks)
    groups = [(int(r), len(list(g))) for r, g in itertools.groupby(held)]
    if low == 0:  # chunks of no or one token: all that can be said is that the owners are a part of the order
        places = iter(order)
        assert all(any(r == place for place in places) for r in held)
        return None
    sizes = []
    for r, n in groups:
        sizes += [n // 2, n - n // 2] if r == ranks - 1 else [n]
    assert len(sizes) == 2 * ranks and [r for r, _ in groups] == [r for r, _ in itertools.groupby(order)]
    return sizes


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
@pytest.mark.parametrize("longest", [3, 40])
def test_zigzag_spreads_many_short_documents(ranks, longest) -> None:
    lengths = np.random.default_rng(ranks + longest).integers(1, longest + 1, 100 * ranks)
    rows = np.array([Layout.zigzag(lengths, ranks).tokens(r) for r in range(ranks)])
    assert rows.max() <= 1.2 * rows.mean() and rows.min() >= 0.8 * rows.mean()


@pytest.mark.parametrize("length", range(1, 26))
def test_zigzag_spreads_documents_of_one_length(length) -> None:
    """The rounding turns from document to document, so that no rank has the odd token of each."""
    ranks = 4
    rows = np.array([Layout.zigzag([length] * 240, ranks).tokens(r) for r in range(ranks)])
    assert rows.max() - rows.min() <= 2 * length


@pytest.mark.parametrize("ranks", [2, 5, 16, 64])
@pytest.mark.parametrize("lengths", [[100_003], [30_011, 70_001, 9_999], [20_000] * 7])
def test_zigzag_balances_the_area_of_causal_attention(lengths, ranks) -> None:
    areas = rank_areas(Layout.zigzag(lengths, ranks), Mask(lengths))
    assert areas.max() <= 1.01 * areas.mean()


def rank_areas(layout: Layout, mask: Mask) -> np.ndarray:
    """Pairs of each rank's queries."""
    bounds = (mask.bounds(layout.positions(r)) for r in range(layout.ranks))
    return np.array([(hi - lo).sum() for lo, hi in bounds])


@st.composite
def partitions(draw: st.DrawFn) -> list[list[int]]:
    """Any shards, in any local order, some empty."""
    order = draw(st.permutations(range(draw(st.integers(1, 25)))))
    edges = sorted(draw(st.lists(st.integers(0, len(order)), max_size=5)))
    return [list(order[a:b]) for a, b in zip([0, *edges], [*edges, len(order)], strict=True)]


@given(partitions())
def test_any_partition_in_any_local_order(shards) -> None:
    layout = Layout(shards)
    check_partition(layout, sum(map(len, shards)), len(shards))
    for rank, shard in enumerate(shards):
        assert layout.positions(rank).tolist() == shard


@given(partitions(), partitions())
def test_layouts_are_equal_iff_every_rank_has_the_same_rows(one, other) -> None:
    assert (Layout(one) == Layout(other)) == (one == other)
    assert Layout(one) != "a layout"


@given(st.lists(st.integers(0, 40), unique=True, max_size=20))
def test_runs_hold_the_rows_in_order(positions) -> None:
    at = np.array(positions, np.int64)
    runs = runs_of(at)
    np.testing.assert_array_equal(expand(*runs), at)
    assert (runs.count > 0).all() and (runs.step > 0).all()


@given(st.lists(st.integers(0, 40), unique=True, max_size=20), st.sets(st.integers(0, 45), max_size=8))
def test_cut_runs_hold_the_same_rows_and_no_break(positions, breaks) -> None:
    runs = runs_of(np.array(positions, np.int64))
    piece, source = cut(runs, np.array(sorted(breaks), np.int64))
    np.testing.assert_array_equal(expand(*piece), positions)
    assert (np.bincount(source, piece.count, len(runs.start)) == runs.count).all()
    for b in breaks:
        assert not ((piece.start < b) & (b <= piece.last)).any()


def test_long_layouts_have_few_runs() -> None:
    n = 10**9
    assert len(Layout.contiguous(n, 64).all_runs()[0].start) == 64
    assert len(Layout.striped(n, 64).all_runs()[0].start) == 64
    assert len(Layout.zigzag([n, n], 64).all_runs()[0].start) <= 2 * 2 * 64
    assert sum(Layout.zigzag([n, n], 64).tokens(r) for r in range(64)) == 2 * n


def test_ranges_are_shards() -> None:
    assert Layout([range(0, 6, 2), range(1, 6, 2)]) == Layout.striped(6, 2)
    assert Layout([range(3), range(3, 6)]) == Layout.contiguous(6, 2)
    assert Layout([[1, 0, 2], []]).tokens(1) == 0


def test_facts_do_not_change() -> None:
    layout = Layout.zigzag([5, 9], 2)
    with pytest.raises(AttributeError):
        layout.ranks = 3
    for same in (layout, pickle.loads(pickle.dumps(layout))):
        assert not any(a.flags.writeable for a in (*same.all_runs()[0], same.owner()))
    rows = np.array([0, 1])
    layout = Layout([rows, [2]])
    rows[0] = 5
    assert layout.positions(0).tolist() == [0, 1]


def test_digest_is_the_same_in_every_process() -> None:
    code = "from seqpar import Layout; print(Layout.zigzag([5, 9, 1], 3).digest())"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == Layout.zigzag([5, 9, 1], 3).digest() == DIGEST


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([[0, 1], [1, 2]], "token 1 is held by rank 0 and by rank 1; shards overlap"),
        ([[0], [2, 1, 2]], "token 2 is held by rank 1 and by rank 1; shards overlap"),
        ([[0, 1], [3]], "no rank holds token 2, though 3 is held; shards miss it"),
        ([[1], [2]], "no rank holds token 0"),
        ([[0], [-1, 1]], "rank 1 holds position -1; positions start at 0"),
        ([[0.5]], "the shard of rank 0 must be a sequence of integer positions"),
        ([[0], [[1]]], "the shard of rank 1 must be a sequence of integer positions"),
        ([[], []], "the shards of all 2 ranks are empty"),
        ([], "a layout has at least one rank, got no shards"),
    ],
)
def test_shards_that_are_no_partition(shards, message) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(shards)


@pytest.mark.parametrize("value", [0, -3, 2.5, "4", None, True])
def test_counts_that_are_none(value) -> None:
    for make in (
        lambda: Layout.contiguous(value, 2),
        lambda: Layout.contiguous(5, value),
        lambda: Layout.striped(5, 2, block=value),
        lambda: Layout.zigzag([5], value),
    ):
        with pytest.raises(ValueError, match="must be an integer of at least 1, got"):
            make()


def test_ranks_that_do_not_exist() -> None:
    for rank in (-1, 2):
        for ask in (Layout.contiguous(5, 2).tokens, Layout.contiguous(5, 2).positions, Layout.contiguous(5, 2).runs):
            with pytest.raises(ValueError, match=f"rank {rank} is not one of the layout's 2 ranks"):
                ask(rank)
