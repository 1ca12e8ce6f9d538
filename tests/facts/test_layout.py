"""`Layout` against the definition: a partition of the tokens, made as its name says."""

from __future__ import annotations

import itertools
import pickle
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqpar.facts.intervals import Holders, cut, expand, interval_of, least_over, order_of, runs_of
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask

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
    assert layout.sizes().tolist() == [s.size for s in shards]


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


@pytest.mark.parametrize("name", ["blocked", "zigzag"])
@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(1, 40))
def test_blocked_and_zigzag_have_the_chunks_of_their_definitions(name, lengths, ranks) -> None:
    """Chunk k of n tokens begins at (k * n + first) // chunks, where the rounding begins at the document's place."""
    turns = 2 if name == "zigzag" else 1
    chunks, first, held = turns * ranks, 0, [[] for _ in range(ranks)]
    for n in lengths:
        edge = [first + (k * n + first % chunks) // chunks for k in range(chunks + 1)]
        for rank, rows in enumerate(held):
            for k in (rank, chunks - 1 - rank)[:turns]:
                rows += range(edge[k], edge[k + 1])
        first += n
    layout = getattr(Layout, name)(lengths, ranks)
    check_partition(layout, sum(lengths), ranks)
    assert layout == Layout(held)


@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 7))
def test_blocked_is_a_chunk_of_every_sample(samples, size, ranks) -> None:
    """[B, S / R, ...], as other packages hold it: the same rows in the same order."""
    whole = torch.arange(samples * size * ranks).view(samples, size * ranks)
    layout = Layout.blocked([size * ranks] * samples, ranks)
    for rank, chunk in enumerate(whole.chunk(ranks, 1)):
        assert layout.positions(rank).tolist() == chunk.flatten(0, 1).tolist()


def test_zigzag_of_short_documents_takes_memory_for_tokens_not_for_chunks() -> None:
    lengths = np.full(1000, 20)
    few, many = (peak_of(lambda ranks=ranks: Layout.zigzag(lengths, ranks)) for ranks in (16, 4096))
    assert many <= 1.5 * few


def peak_of(make: Callable[[], object]) -> int:
    """The most bytes that a call holds at once."""
    tracemalloc.start()
    try:
        make()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


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
@pytest.mark.sampled(9)
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


@st.composite
def pieces(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Consecutive positions cut at random, some pieces empty, in any order on any rank: start, count, rank, ranks."""
    count = np.array(draw(st.lists(st.integers(0, 5), min_size=1, max_size=12)))
    count[0] += not count.any()
    order = np.array(draw(st.permutations(range(count.size))))
    ranks = draw(st.integers(1, 6))
    rank = np.array(draw(st.lists(st.integers(0, ranks - 1), min_size=count.size, max_size=count.size)))
    return (np.cumsum(count) - count)[order], count[order], rank, ranks


def shards_of(start: np.ndarray, count: np.ndarray, rank: np.ndarray, ranks: int) -> list[np.ndarray]:
    """What pieces mean, rank by rank."""
    held = [np.zeros(0, int) for _ in range(ranks)]
    for first, n, r in zip(start, count, rank, strict=True):
        held[r] = np.append(held[r], np.arange(first, first + n))
    return held


@given(pieces())
def test_pieces_are_the_rows_of_their_rank_in_the_order_given(given) -> None:
    layout = Layout.from_pieces(*given)
    check_partition(layout, int(given[1].sum()), given[3])
    for rank, shard in enumerate(shards_of(*given)):
        assert layout.positions(rank).tolist() == shard.tolist()
    assert layout == Layout(shards_of(*given)) and "planned" in repr(layout)


@given(pieces())
def test_ascending_pieces_are_in_position_order_on_every_rank(given) -> None:
    start, count, rank, ranks = given
    kept = count > 0
    layout = Layout.ascending(start[kept], count[kept], rank[kept], ranks)
    assert layout == Layout([np.sort(shard) for shard in shards_of(*given)])


@pytest.mark.parametrize(
    ("start", "message"),
    [
        ([3, 0], "no rank holds token 2, though 4 is held; pieces miss it"),
        ([1, 0], "token 1 is held by rank 0 and by rank 1; pieces overlap"),
    ],
)
def test_ascending_pieces_that_are_no_partition(start, message) -> None:
    with pytest.raises(ValueError, match=message):
        Layout.ascending(np.array(start), np.array([2, 2]), np.array([1, 0]), 2)


@given(pieces(), st.integers(0, 11), st.sampled_from(["start", "count"]), st.integers(-3, 3))
def test_pieces_are_refused_iff_their_shards_are(given, i, column, change) -> None:
    start, count, rank, ranks = given
    changed = start if column == "start" else count
    changed[i % changed.size] += change
    if count.min() < 0:
        with pytest.raises(ValueError, match="a piece has at least 0 tokens"):
            Layout.from_pieces(start, count, rank, ranks)
        return
    try:
        expected = Layout(shards_of(start, count, rank, ranks))
    except ValueError:
        with pytest.raises(ValueError, match=r"is held by rank|no rank holds token|positions start at 0|are empty"):
            Layout.from_pieces(start, count, rank, ranks)
        return
    assert Layout.from_pieces(start, count, rank, ranks) == expected


@pytest.mark.parametrize(
    ("start", "count", "rank", "ranks", "message"),
    [
        ([0, 2], [3, 2], [1, 0], 2, "token 2 is held by rank 0 and by rank 1; pieces overlap"),
        ([0, 3], [2, 2], [0, 1], 2, "no rank holds token 2, though 4 is held; pieces miss it"),
        ([1], [2], [0], 1, "no rank holds token 0, though 2 is held"),
        ([0, 2], [2, -1], [0, 1], 2, "piece 1 gives rank 1 -1 tokens from position 2; a piece has at least 0 tokens"),
        ([0, 2], [2, 2], [0, 2], 2, "piece 1 gives rank 2 2 tokens from position 2; ranks are 0 to 1"),
        ([0], [(1 << 63) - 1], [0], 1, r"positions are below 2\*\*62"),
        ([0.0], [1], [0], 1, r"start must be a sequence of integers, one per piece, got \[0.0\]"),
        ([0], [True], [0], 1, "count must be a sequence of integers"),
        ([0, 1], [1], [0, 0], 1, "one entry per piece, got 2, 1 and 2"),
        ([], [], [], 2, "the pieces of all 2 ranks are empty"),
        ([0], [1], [0], 0, "ranks must be an integer of at least 1, got 0"),
    ],
)
def test_pieces_that_are_no_partition(start, count, rank, ranks, message) -> None:
    with pytest.raises(ValueError, match=message):
        Layout.from_pieces(start, count, rank, ranks)


@given(st.lists(st.integers(0, 1 << 40), max_size=40), st.integers(0, 2))
def test_the_order_of_integers_is_stable(keys, spare) -> None:
    keys = np.array([*keys, *keys], np.int64)
    order = order_of(keys, int(keys.max(initial=0)) + 1 + spare)
    np.testing.assert_array_equal(order, np.argsort(keys, kind="stable"))


@given(st.lists(st.integers(0, 40), max_size=20), st.lists(st.integers(0, 45), max_size=20), st.booleans())
def test_the_interval_of_a_position_is_the_last_that_has_started(positions, starts, ascending) -> None:
    positions, starts = np.array(sorted(positions) if ascending else positions, np.int64), np.sort(starts).astype(int)
    expected = [int((starts <= p).sum()) - 1 for p in positions]
    assert interval_of(positions, starts).tolist() == expected


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5), st.integers(1, 4)), max_size=9), st.booleans())
def test_expanded_progressions_stand_one_after_the_other(progressions, alike) -> None:
    start, count, step = np.array(progressions, np.int64).reshape(-1, 3).T
    step = 3 if alike else step
    expected = [s + d * i for s, n, d in zip(start, count, np.broadcast_to(step, start.shape)) for i in range(n)]
    assert expand(start, count, step).tolist() == expected and expand(start, count, step).dtype == np.int64


@given(partitions(), st.integers(1, 3), st.data())
def test_holders_say_who_holds_a_position_if_anyone_does(shards, width, data) -> None:
    """Of some of a layout's runs, as of the documents of one Ulysses width."""
    runs, rank = Layout(shards).all_runs()
    kept = np.array(data.draw(st.lists(st.booleans(), min_size=rank.size, max_size=rank.size)), bool)
    order = np.argsort(runs.start)
    order = order[kept[order]]
    total = int(runs.count.sum())
    expected = np.full(total, -1)
    for i in order:
        expected[expand(*runs.pick(slice(i, i + 1)))] = rank[i] // width
    made = Holders(runs.pick(order), (rank[order] // width).astype(np.int32), total)
    at = np.array(data.draw(st.lists(st.integers(0, total - 1), max_size=9)), np.int64)
    assert made.of(at).tolist() == expected[at].tolist() and made.of(at).dtype == np.int32
    assert made.all().tolist() == expected.tolist() and made.all().dtype == np.int32
    check_pieces(made, expected, data)


def check_pieces(made: Holders, expected: np.ndarray, data: st.DataObject) -> None:
    """Intervals of held positions are cut into pieces of one holder each, which are as many as there must be."""
    ask = np.flatnonzero(np.array(data.draw(st.lists(st.booleans(), min_size=expected.size, max_size=expected.size))))
    ask = ask[expected[ask] >= 0]
    first = np.flatnonzero(np.append(True, np.diff(ask) > 1)[: ask.size])
    lo, hi = ask[first], ask[np.append(first[1:], ask.size)[: first.size] - 1] + 1
    start, stop, holder, source = made.pieces(lo, hi)
    assert (stop > start).all() and holder.dtype == np.int32
    assert expand(start, stop - start).tolist() == ask.tolist()
    assert np.repeat(holder, stop - start).tolist() == expected[ask].tolist()
    assert ((lo[source] <= start) & (stop <= hi[source])).all()


@given(st.lists(st.integers(0, 40), unique=True, max_size=20))
def test_runs_hold_the_rows_in_order(positions) -> None:
    at = np.array(positions, np.int64)
    runs = runs_of(at)
    np.testing.assert_array_equal(expand(*runs), at)
    assert (runs.count > 0).all() and (runs.step > 0).all()


rows = st.lists(st.integers(0, 40), unique=True, max_size=20)


@given(rows | rows.map(sorted), st.lists(st.integers(0, 45), max_size=8))
def test_cut_runs_hold_the_same_rows_and_no_break(positions, breaks) -> None:
    runs = runs_of(np.array(positions, np.int64))
    piece, source = cut(runs, np.array(sorted(breaks), np.int64))
    assert (piece.count > 0).all()
    np.testing.assert_array_equal(expand(*piece), positions)
    assert (np.bincount(source, piece.count, len(runs.start)) == runs.count).all()
    for b in breaks:
        assert not ((piece.start < b) & (b <= piece.last)).any()
    between = np.searchsorted(sorted(breaks), piece.start, side="right")
    assert len(set(zip(source, between, strict=True))) == source.size, "no piece is cut in vain"


def test_cut_tries_no_more_breaks_than_a_run_has_rows() -> None:
    tokens, breaks = 1 << 14, np.arange(0, 1 << 14, 3)
    few, many = (
        peak_of(lambda ranks=ranks: cut(Layout.striped(tokens, ranks).all_runs()[0], breaks)) for ranks in (8, 4096)
    )
    assert many <= 1.5 * few


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40), st.integers(-9, 9)), max_size=12))
def test_the_least_value_over_a_place_is_that_of_the_intervals_that_cover_it(intervals) -> None:
    size = max((first + count for first, count, _ in intervals), default=3)
    first, count, values = np.array(intervals, np.int64).reshape(-1, 3).T
    expected = [min([v for a, n, v in intervals if a <= at < a + n], default=9) for at in range(size)]
    assert least_over(first, first + count, values, size, 9).tolist() == expected


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


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([[0, 1], [1, 2]], "token 1 is held by rank 0 and by rank 1; shards overlap"),
        ([[0, 1], [3]], "no rank holds token 2, though 3 is held; shards miss it"),
        ([[0], [-1, 1]], "rank 1 holds position -1; positions start at 0"),
        ([[0.5]], "the shard of rank 0 must be a sequence of integer positions"),
        ([[0], [[1]]], "the shard of rank 1 must be a sequence of integer positions"),
        ([[], []], "the shards of all 2 ranks are empty"),
        ([], "shards must have at least one rank, got none"),
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
        lambda: Layout.blocked([5], value),
    ):
        with pytest.raises(ValueError, match="must be an integer of at least 1, got"):
            make()


def test_ranks_that_do_not_exist() -> None:
    for rank in (-1, 2):
        for ask in (Layout.contiguous(5, 2).tokens, Layout.contiguous(5, 2).positions, Layout.contiguous(5, 2).runs):
            with pytest.raises(ValueError, match=f"rank {rank} is not one of the layout's 2 ranks"):
                ask(rank)


@pytest.mark.parametrize(("tokens", "ranks"), [(2**61, 8), (2**50, 2**14), (2**62 - 1024, 7), (10**18 + 1, 1000)])
def test_positions_are_right_up_to_2_to_the_62(tokens: int, ranks: int) -> None:
    even = Layout.contiguous(tokens, ranks)
    edge = [rank * tokens // ranks for rank in range(ranks + 1)]
    assert [int(even.runs(rank).start[0]) for rank in (0, 1, ranks - 1)] == [edge[0], edge[1], edge[-2]]
    assert even.sizes().tolist() == [b - a for a, b in itertools.pairwise(edge)]
    folded = Layout.zigzag([5, tokens - 5], ranks)
    sizes = folded.sizes()
    assert sum(sizes.tolist()) == tokens == folded.total and sizes.max() - sizes.min() <= 4
    assert (folded.all_runs()[0].start >= 0).all()
    assert sum(Layout.striped(tokens, ranks).sizes().tolist()) == tokens


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout.contiguous(2**62, 8), f"tokens must be an integer of at most {2**62 - 1}, got {2**62}"),
        (lambda: Layout.zigzag([2**62], 8), "lengths sum to 4.61e.18 tokens, more than 64 bits can number"),
        (lambda: Layout.contiguous(8, 2**40), f"ranks must be an integer of at most {2**20}, got {2**40}"),
        (lambda: Layout([np.array([2**64 - 1], np.uint64)]), f"rank 0 must be integers below 2..63, got {2**64 - 1}"),
        (lambda: Layout([[2**70]]), "shard of rank 0 must be a sequence of integer positions"),
        (
            lambda: Layout.from_pieces(np.array([2**63], np.uint64), [1], [0], 1),
            f"start must be integers below 2..63, got {2**63}",
        ),
        (lambda: Layout.from_pieces([0, 2**62 - 1], [2**62 - 1, 1], [0, 0], 1), "positions are below 2..62"),
        (lambda: Layout.contiguous(5, 2).runs(1.0), "rank 1.0 is not one of the layout's 2 ranks"),
    ],
)
def test_what_64_bits_do_not_number(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()
