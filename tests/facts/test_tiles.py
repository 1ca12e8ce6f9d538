"""Tile tables against tables made tile by tile from the dense mask."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpar import Layout, Mask, Plan
from seqpar.facts.tiles import Tiles, tile_tables
from tests.cases import LAYOUTS, MASKS, examples, make_layout, make_mask, random_tree
from tests.facts.tables import check_stretches, check_tiles, visited


def tables(lo: np.ndarray, hi: np.ndarray, keys: np.ndarray, bm: int, bn: int) -> Tiles:
    """The tables, checked."""
    lo, hi, keys = (np.asarray(x, np.int64) for x in (lo, hi, keys))
    t = tile_tables(lo, hi, keys, bm, bn)
    check_tiles(t, (keys >= lo[:, None]) & (keys < hi[:, None]))
    return t


@st.composite
def buffers(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bounds of one rank's queries, some of which see nothing, and the positions of some rank's keys or of all."""
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=6))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    mask = make_mask(draw(st.sampled_from(MASKS)), lengths, rng)
    ranks, layout = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from(LAYOUTS))
    queries = np.sort(make_layout(layout, lengths, ranks, rng).positions(int(rng.integers(ranks))))
    lo, hi = mask.bounds(queries)
    if draw(st.booleans()):
        hi = np.where(rng.random(lo.size) < 0.2, lo, hi)
    keys = np.arange(mask.kv_tokens)
    if draw(st.booleans()):
        keys = np.sort(make_layout(layout, mask.kv_lengths.tolist(), ranks, rng).positions(int(rng.integers(ranks))))
    return lo, hi, keys


@examples(500)
@given(buffers(), st.integers(1, 9), st.integers(1, 9))
def test_tables_say_what_the_mask_says(buffer, bm, bn) -> None:
    tables(*buffer, bm, bn)


@examples(300)
@given(buffers(), st.integers(1, 9), st.integers(1, 4))
def test_tiles_that_start_anew_save_more_visits_than_they_add_tiles(buffer, bm, bn) -> None:
    lo, hi, keys = buffer
    t = tables(lo, hi, keys, bm, bn)
    visits = 0
    for a in range(0, lo.size, bm):
        low, high = (x[a : a + bm][lo[a : a + bm] < hi[a : a + bm]] for x in (lo, hi))
        if low.size:
            touched = [n for n in range(0, keys.size, bn) if keys[n : n + bn][-1] >= low.min() and keys[n] < high.max()]
            visits += len(touched)
    tiles = -(-lo.size // bm)
    assert t.uniform and t.visits == visits or t.visits + len(t.begin) < visits + tiles


def test_tiles_start_anew_where_keys_jump() -> None:
    """Six queries on the first keys, six on ones far behind: a tile on both would visit all between."""
    lo = np.repeat([0, 64], 6)
    t = tables(lo, lo + 8, np.arange(80), 4, 4)
    assert t.rows.tolist() == [0, 4, 6, 10, 12] and not t.uniform
    assert tables(lo, lo + 8, np.flatnonzero(np.isin(np.arange(80) // 8, [0, 8])), 4, 4).uniform, "nothing lies between"


def test_short_documents_do_not_cut_tiles() -> None:
    lengths = [1, 1, 1, *[40] * 50, 1, 1]
    plan = Plan(Mask(lengths), Layout.zigzag(lengths, 4))
    assert all(step.bands[0].tiles(128, 128).uniform for step in plan.steps(1))


def test_a_rank_of_a_window_visits_no_keys_between_its_chunks() -> None:
    """Zigzag, all keys at hand: a tile on the end of one chunk and the start of the other would visit half of them."""
    plan = Plan(Mask([4096], window=(64, None)), Layout.zigzag([4096], 2), transport="gather")
    t = plan.steps(0)[0].bands[0].tiles(700, 128)
    assert t.rows.tolist() == [0, 700, 1024, 1724, 2048]


@pytest.mark.parametrize(
    ("lo", "hi", "q_full"),
    [
        ([0] * 6, [2, 4, 6, 8, 10, 12], [(0, 6), (1, 6), (2, 6), (3, 6), (4, 6), (5, 6)]),
        ([0] * 6, [2, 4, 0, 8, 10, 12], [(3, 6), (3, 6), (3, 6), (3, 6), (4, 6), (5, 6)]),
        ([0] * 6, [4, 4, 4, 4, 0, 12], [(0, 4), (0, 4), (5, 6), (5, 6), (5, 6), (5, 6)]),
        ([0, 0, 0, 0, 0, 0], [12, 12, 2, 2, 2, 2], [(0, 0)] * 6),
    ],
    ids=["causal", "one sees nothing", "the longer run", "ends descend"],
)
def test_full_tiles_of_a_key_tile(lo, hi, q_full) -> None:
    t = tables(np.array(lo), np.array(hi), np.arange(12), 1, 2)
    assert list(zip(t.q_full_begin.tolist(), t.q_full_end.tolist())) == q_full


def test_a_gap_among_the_visitors_is_told() -> None:
    assert tables(np.zeros(4), [4, 4, 4, 4], np.arange(4), 1, 2).q_exact
    assert not tables(np.zeros(4), [4, 0, 4, 4], np.arange(4), 1, 2).q_exact


@pytest.mark.parametrize(("queries", "keys"), [(0, 0), (0, 5), (5, 0), (5, 5)])
def test_nothing_to_visit(queries, keys) -> None:
    t = tables(np.zeros(queries), np.zeros(queries), np.arange(keys), 2, 2)
    assert t.visits == 0 and t.uniform and t.q_exact and t.cover(0) == 1


def stretched(lo, hi, at, keys, until, bm: int, bn: int) -> Tiles:
    """The tables of a step whose keys end, checked."""
    lo, hi, at, keys, until = (np.asarray(x, np.int64) for x in (lo, hi, at, keys, until))
    t = tile_tables(lo, hi, keys, bm, bn, at=at, until=until)
    check_stretches(t, lo, hi, at, keys, until)
    return t


@st.composite
def ending(
    draw: st.DrawFn, kinds: tuple[str, ...] = ("tree", "nodes", "ends", "window"), blind: bool = True
) -> tuple[np.ndarray, ...]:
    """Some queries of a mask whose keys end, and some of its keys: lo, hi, at, keys, until. blind: some see nothing."""
    tokens = draw(st.integers(1, 90))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    kind = draw(st.sampled_from(kinds))
    mask = make_mask(kind, [tokens], rng)
    until = mask.until()
    if kind == "window":  # sinks: the first keys, and a window as ends of keys
        until = np.minimum(np.arange(tokens) + 7, tokens)
        until[:3] = tokens
    at, keys = (np.arange(tokens) for _ in range(2))
    if draw(st.booleans()):
        layout = make_layout(draw(st.sampled_from(LAYOUTS)), [tokens], 3, rng)
        at, keys = (np.sort(layout.positions(int(rng.integers(3)))) for _ in range(2))
    lo, hi = mask.bounds(at)
    if kind == "window":
        lo = np.zeros_like(lo)
    if blind and draw(st.booleans()):
        hi = np.where(rng.random(at.size) < 0.2, lo, hi)
    return lo, hi, at, keys, until[keys]


@examples(300)
@given(ending(), st.integers(1, 9), st.integers(1, 9))
def test_stretches_say_what_the_mask_says(step, bm, bn) -> None:
    stretched(*step, bm, bn)


@examples(200)
@given(ending(("tree", "window"), blind=False), st.integers(1, 9), st.integers(1, 9))
def test_no_loop_runs_over_tiles_that_it_skips(step, bm, bn) -> None:
    """In forward by construction: `visited` are the trips. Nor over query tiles, but for trees with windows."""
    t = stretched(*step, bm, bn)
    assert len(visited(t)) == t.visits
    assert (t.q_end - t.q_begin).sum() <= 1.1 * t.visits


@examples(100)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**16), st.integers(1, 9))
def test_tables_of_the_bands_of_a_union(tokens, more, seed, side) -> None:
    """A tree, and a window over its last tokens and those behind it: in each band the rows of the other are blind."""
    lo, hi, until, _ = random_tree(tokens, np.random.default_rng(seed))
    at, none = np.arange(tokens + more), np.zeros(more, int)
    tree = Mask.from_bounds(np.append(lo, none), np.append(hi, none), until=np.append(until, none + tokens))
    later = Mask.from_bounds(np.where(at < tokens, 0, at - 5).clip(0), np.where(at < tokens, 0, at + 1))
    mask = tree | later
    for number, band in enumerate(mask.bands):
        lo, hi = mask.bounds(at, band=number)
        if band.until is None:
            tables(lo, hi, at, side, side)
        else:
            stretched(lo, hi, at, at, mask.until(band=number), side, side)


def test_answers_to_a_prompt_skip_the_answers_before_them() -> None:
    """The example of `seqpar.facts.stretches`, of tiles of two."""
    lo, hi, at = np.zeros(14), np.arange(14) + 1, np.arange(14)
    t = stretched(lo, hi, at, at, np.repeat([14, 6, 10, 14], [2, 4, 4, 4]), 2, 2)
    s = t.stretches
    assert s.edge.tolist() == [0, 1, 3, 5, 7, 10, 12, 15]
    assert s.begin.tolist() == [0, 0, 1, 0, 2, 0, 3, 0, 3, 4, 0, 5, 0, 5, 6]
    assert s.end.tolist() == [1, 1, 2, 2, 3, 1, 4, 1, 4, 5, 1, 6, 1, 6, 7]
    assert s.full.tolist() == [0, 1, 0, 1, 0, 1, 0, 1, 1, 0, 1, 0, 1, 1, 0]
