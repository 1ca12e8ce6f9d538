"""Unions of masks beside matrices of booleans that are made apart, by broadcasting."""

from __future__ import annotations

import pickle
from functools import partial, reduce
from operator import or_

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from seqpar import Layout, Plan
from seqpar.facts.mask import Mask
from tests.cases import examples, random_nodes, random_slices, random_tree

Seen = np.ndarray  # bool [queries, keys]


def often(mask: Mask) -> np.ndarray:
    """How many bands hold each pair of a query and a key, from the bounds that kernels get."""
    rows, keys = np.arange(mask.tokens), np.arange(mask.kv_tokens)
    found = np.zeros((rows.size, keys.size), int)
    for band in range(len(mask.bands)):
        lo, hi = mask.bounds(rows, band=band)
        assert (lo >= 0).all() and (lo <= hi).all() and (hi <= keys.size).all()
        found += (
            (lo[:, None] <= keys) & (keys < hi[:, None]) & (mask.key_positions(rows)[:, None] < mask.until(band=band))
        )
    return found


def most_intervals(seen: Seen) -> int:
    """The most intervals of keys that a query sees, at least 1."""
    return max(1, int((seen & ~np.pad(seen, ((0, 0), (1, 0)))[:, :-1]).sum(1).max()))


def check(mask: Mask, seen: Seen) -> None:
    """The mask has exactly these pairs, each in one band, and knows their number; few bands if no key ends."""
    np.testing.assert_array_equal(often(mask), seen.astype(int))
    assert mask.area() == seen.sum()
    if not mask.has_until:
        assert len(mask.bands) == most_intervals(seen)
    row, key = (np.repeat(np.arange(len(x)), x) for x in (mask.lengths, mask.kv_lengths))
    assert mask.within_documents == (not (seen & (row[:, None] != key)).any())
    again = pickle.loads(pickle.dumps(mask))
    assert again == mask and repr(again) == repr(mask)
    assert not any(x.flags.writeable for band in again.bands for x in (*band.spans, *(band.until or ())))


def of_documents(
    lengths: list[int], keys: list[int], causal: bool, left: int | None, right: int | None, sinks: int = 0
) -> Seen:
    """The pairs of packed documents with a window and sink tokens."""
    seen = np.zeros((sum(lengths), sum(keys)), bool)
    row = column = 0
    for n, m in zip(lengths, keys, strict=True):
        at, j = np.arange(n)[:, None] + m - n, np.arange(m)
        near = (j >= at - (m + n if left is None else left)) & (j <= at + (m + n if right is None else right))
        seen[row : row + n, column : column + m] = (near | (j < sinks)) & ((j <= at) | (not causal))
        row, column = row + n, column + m
    return seen


def of_bounds(lo: np.ndarray, hi: np.ndarray, keys: int, until: np.ndarray | None = None) -> Seen:
    """The pairs between bounds; as many keys as queries, or no ends."""
    j = np.arange(keys)
    seen = (lo[:, None] <= j) & (j < hi[:, None])
    return seen if until is None else seen & (np.arange(lo.size)[:, None] < until)


def random_part(
    lengths: list[int], keys: list[int], rng: np.random.Generator, until: np.ndarray | None
) -> tuple[Mask, Seen]:
    """A mask of a random kind over these documents, and its pairs."""
    tokens, total = sum(lengths), sum(keys)
    if lengths != keys and len(lengths) > 1 or rng.random() < 0.4:
        causal = bool(rng.random() < 0.5)
        left, right = (None if rng.random() < 0.3 else int(rng.integers(0, 9)) for _ in range(2))
        right, sinks = None if causal else right, int(rng.integers(0, 6) * (rng.random() < 0.4))
        mask = Mask(lengths, causal=causal, window=(left, right), kv_lengths=keys, sink_tokens=sinks)
        return mask, of_documents(lengths, keys, causal, left, right, sinks)
    lo, hi = np.sort(rng.integers(0, total + 1, (2, tokens)), axis=0)
    if rng.random() < 0.5:
        lo, hi = np.maximum.accumulate(lo), np.maximum.accumulate(hi)
    if rng.random() < 0.3:
        lo, hi = np.repeat(lo[::5], 5)[:tokens], np.repeat(hi[::5], 5)[:tokens]
    if lengths != keys:
        return Mask.from_bounds(lo, hi, kv_tokens=total), of_bounds(lo, hi, total)
    until = None if rng.random() < 0.5 else until
    return Mask.from_bounds(lo, hi, until=until, lengths=lengths), of_bounds(lo, hi, total, until)


sizes = st.lists(st.tuples(st.integers(1, 14), st.integers(1, 14)), min_size=1, max_size=4)


@examples(150)
@given(sizes, st.booleans(), st.integers(1, 6), st.booleans(), st.integers(0, 2**32))
@example([(2, 1)], False, 2, True, 2989)  # neither part shows a key, and their bounds differ
def test_a_union_has_the_pairs_of_its_parts_once(sizes, cross, count, ending, seed) -> None:
    rng = np.random.default_rng(seed)
    lengths = [n for n, _ in sizes]
    keys = [m for _, m in sizes] if cross else lengths
    until = rng.integers(0, sum(keys) + 1, sum(keys)) if ending else None
    masks, seen = zip(*(random_part(lengths, keys, rng, until) for _ in range(count)), strict=True)
    union = reduce(or_, masks)
    check(union, np.any(seen, axis=0))
    assert union | masks[0] == union == masks[-1] | union and union | union == union
    if not ending and count > 1:
        order = rng.permutation(count)
        other = masks[order[0]] | reduce(or_, [masks[n] for n in order[1:]])
        assert other.area() == union.area() and len(other.bands) == len(union.bands)
        if all(mask.area() < union.area() for mask in masks):  # otherwise it is the part, as it was made
            check(other, np.any(seen, axis=0))
    one, two = masks[0], masks[-1]
    assert (one | two) == (two | one) and (one | two).digest() == (two | one).digest()


@examples(100)
@given(sizes, st.integers(1, 4), st.data())
def test_unions_with_a_window_and_of_some_documents(sizes, count, data) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    lengths, keys = map(list, zip(*sizes, strict=True))
    masks, seen = zip(*(random_part(lengths, keys, rng, None) for _ in range(count)), strict=True)
    union, pairs = reduce(or_, masks), np.any(seen, axis=0)
    left, right = (data.draw(st.none() | st.integers(0, 9)) for _ in range(2))
    far = union.key_positions(np.arange(union.tokens))[:, None] - np.arange(union.kv_tokens)
    near = (far <= (99 if left is None else left)) & (-far <= (99 if right is None else right))
    narrow = union.windowed((left, right))
    check(narrow, pairs & near)
    if union.within_documents:
        chosen = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=5))
        rows, columns = (np.split(np.arange(sum(x)), np.cumsum(x)[:-1]) for x in (lengths, keys))
        row, column = (np.repeat(np.arange(len(chosen)), [x[d] for d in chosen]) for x in (lengths, keys))
        inside = pairs[np.concatenate([rows[d] for d in chosen])][:, np.concatenate([columns[d] for d in chosen])]
        check(union.pick(chosen), inside & (row[:, None] == column))


@examples(150)
@given(sizes, st.integers(0, 9), st.sampled_from([None, 0, 3]), st.integers(0, 9), st.booleans(), st.booleans())
def test_sink_tokens_are_seen_beside_the_window(sizes, left, right, sinks, causal, cross) -> None:
    lengths = [n for n, _ in sizes]
    keys = [m for _, m in sizes] if cross else lengths
    right = None if causal else right
    mask = Mask(lengths, causal=causal, window=(left, right), sink_tokens=sinks, kv_lengths=keys)
    check(mask, of_documents(lengths, keys, causal, left, right, sinks))
    assert mask.within_documents and len(mask.bands) <= 2
    chosen = [len(sizes) - 1, 0]
    fewer = Mask(
        mask.lengths[chosen], causal=causal, window=(left, right), sink_tokens=sinks, kv_lengths=mask.kv_lengths[chosen]
    )
    assert mask.pick(chosen) == fewer and mask.pick(chosen).digest() == fewer.digest()
    if left > sinks and not cross and causal:
        again = Mask(lengths, window=(left - 1, None), sink_tokens=sinks) | Mask(lengths, window=(left, None))
        assert again == mask


def of_slices(tokens: int, keys: int, slices: list[tuple[int, int, int, int, str]]) -> Seen:
    """The pairs of slices by MagiAttention's definition of the four kinds."""
    seen = np.zeros((tokens, keys), bool)
    for a, b, c, d, kind in slices:
        i, j = np.arange(b - a)[:, None], np.arange(d - c)
        part = np.ones((b - a, d - c), bool)
        if kind in ("causal", "bi_causal"):  # the last query sees up to the last key
            part &= j <= i + (d - c) - (b - a)
        if kind in ("inv_causal", "bi_causal"):  # the first query sees from the first key on
            part &= j >= i
        seen[a:b, c:d] |= part
    return seen


@examples(150)
@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 10), st.integers(0, 2**32))
def test_slices_overlap_as_they_like(tokens, keys, count, seed) -> None:
    slices = random_slices(tokens, keys, count, np.random.default_rng(seed))
    q, k, kinds = [s[:2] for s in slices], [s[2:4] for s in slices], [s[4] for s in slices]
    mask = Mask.from_slices(q, k, kinds, tokens=tokens, kv_tokens=keys)
    check(mask, of_slices(tokens, keys, slices))
    parts = [Mask.from_slices([a], [b], [kind], tokens=tokens, kv_tokens=keys) for a, b, kind in zip(q, k, kinds)]
    assert mask.area() in [part.area() for part in parts] or reduce(or_, parts) == mask


@pytest.mark.parametrize(("queries", "keys"), [(3, 5), (5, 5), (5, 3), (1, 4), (4, 1)])
def test_areas_of_slices_are_those_that_magiattention_counts(queries, keys) -> None:
    """The formulas of ``magi_attention/meta/container/slice.py`` at 2c64135."""
    cut = (2 * keys - queries + 1) * queries // 2 if keys > queries else (1 + keys) * keys // 2
    expected = {"full": queries * keys, "causal": cut, "inv_causal": cut}
    if keys >= queries:  # else there is no such slice
        expected["bi_causal"] = (keys - queries + 1) * queries
    for kind, area in expected.items():
        assert Mask.from_slices([[2, 2 + queries]], [[1, 1 + keys]], [kind], kv_tokens=9).area() == area


def test_slices_are_the_masks_that_they_spell() -> None:
    documents = [[0, 9], [9, 13]]
    mask = Mask.from_slices(documents, documents, ["causal", "full"], lengths=[9, 4])
    assert mask == Mask.from_bounds([0] * 9 + [9] * 4, [*range(1, 10), *[13] * 4], lengths=[9, 4])
    assert Mask.from_slices(documents, documents, ["causal"] * 2, lengths=[9, 4]) == Mask([9, 4])
    assert Mask.from_slices([[0, 2]], [[3, 8]], ["full"]).kv_tokens == 8
    assert Mask.from_slices([[2, 2]], [[0, 3]], ["full"]).area() == 0
    shared = Mask.from_slices(
        [[0, 4], [4, 6], [6, 9], [6, 9]], [[0, 4], [0, 6], [0, 4], [6, 9]], ["causal"] * 2 + ["full", "causal"]
    )
    answers = Mask.shared_prefix([(4, [2, 3])])
    np.testing.assert_array_equal(often(shared), often(answers))


@examples(100)
@given(*[st.integers(1, 7)] * 2, *[st.integers(1, 5)] * 2, st.sampled_from([0.1, 0.5, 0.9]), st.integers(0, 2**32))
def test_blocks_are_seen_in_full(rows, columns, tall, wide, share, seed) -> None:
    rng = np.random.default_rng(seed)
    table = rng.random((rows, columns)) < share
    tokens, keys = rows * tall - int(rng.integers(0, tall)), columns * wide - int(rng.integers(0, wide))
    seen = table.repeat(tall, 0).repeat(wide, 1)[:tokens, :keys]
    check(Mask.blocks(table, (tall, wide), tokens=tokens, kv_tokens=keys), seen)


@given(st.integers(1, 6), st.integers(1, 5))
def test_frames_that_see_all_before_and_themselves(frames, tokens) -> None:
    start = np.arange(frames)[:, None] * tokens
    whole = Mask.from_slices(
        np.hstack([start, start + tokens]), np.hstack([0 * start, start + tokens]), ["full"] * frames
    )
    rows = np.arange(frames * tokens)
    check(whole, rows // tokens <= rows[:, None] // tokens)
    assert whole == Mask.blocks(np.tril(np.ones((frames, frames), bool)), tokens) and len(whole.bands) == 1


@examples(100)
@given(st.integers(1, 40), st.integers(0, 2**32), st.integers(0, 9), st.integers(0, 9))
def test_a_tree_with_other_masks(tokens, seed, left, other) -> None:
    rng = np.random.default_rng(seed)
    lo, hi, until, seen = random_tree(tokens, rng)
    tree, band = Mask.from_bounds(lo, hi, until=until), Mask([tokens], window=(left, None))
    check(tree | band, seen | of_documents([tokens], [tokens], True, left, None))
    assert tree | tree == tree and (tree | band) == (band | tree)
    np.testing.assert_array_equal((tree | band).depths(np.arange(tokens)), tree.depths(np.arange(tokens)))
    node, parents = random_nodes(tokens, rng)
    nodes = Mask.tree(np.bincount(node, minlength=len(parents)), parents)
    narrow, wide = nodes.windowed((left, None)), nodes.windowed((left + other, None))
    for union in (narrow | wide, wide | narrow, wide | nodes | narrow):
        check(union, np.any([often(wide), often(nodes if union.area() == nodes.area() else wide)], axis=0))
    assert narrow | nodes == nodes == nodes | narrow and narrow | wide == wide


def test_a_union_with_a_tree_is_no_tree() -> None:
    tree = Mask.shared_prefix([(2, [2, 3]), (3, [1, 1])])
    whole = Mask(tree.lengths, causal=False)
    for union in (tree | whole, tree | Mask(tree.lengths, window=(2, None))):
        assert union.paths is not None and union.pick([1, 0]).area() == union.area()
        np.testing.assert_array_equal(often(union.pick([1])), often(union)[7:, 7:])
        np.testing.assert_array_equal(union.pick([1]).depths(range(5)), [0, 1, 2, 3, 3])
        with pytest.raises(NotImplementedError, match="Mask.union, .* takes no window"):
            union.windowed((1, None))
    with pytest.raises(NotImplementedError, match="two paths to a token; give both parts the same tree"):
        tree | Mask.shared_prefix([(2, [3, 2]), (3, [1, 1])])


@examples(150)
@given(st.integers(1, 25), st.integers(0, 2**32))
def test_parts_whose_keys_end_are_right_or_refused(tokens, seed) -> None:
    """If their ends differ, one part must show all that the other does where they overlap."""
    rng = np.random.default_rng(seed)
    masks, seen, ends = [], [], []
    for _ in range(2):
        lo, hi = np.sort(rng.integers(0, tokens + 1, (2, tokens)), axis=0)
        until = rng.integers(0, tokens + 1, tokens) if rng.random() < 0.5 or not ends else ends[0]
        until = np.where(rng.random(tokens) < 0.3, tokens, until)
        ends.append(until)
        masks.append(Mask.from_bounds(lo, hi, until=until))
        seen.append(of_bounds(lo, hi, tokens, until))
    try:
        union = masks[0] | masks[1]
    except NotImplementedError as error:
        assert "the parts of the union share keys that end" in str(error)
        assert all(mask.has_until for mask in masks) and (ends[0] != ends[1]).any()
        with pytest.raises(NotImplementedError):
            masks[1] | masks[0]
        return
    check(union, seen[0] | seen[1])
    assert union.area() in [mask.area() for mask in masks] or union == masks[1] | masks[0]


def test_unions_that_are_plain_masks() -> None:
    window, causal = Mask([9, 4], window=(2, None)), Mask([9, 4])
    cross = partial(Mask, [3, 9], causal=False, kv_lengths=[7, 2])
    for same, plain in (
        (window | causal, causal), (causal | window, causal), (Mask([9, 4], window=(2, 0), sink_tokens=20), causal),
        (window | Mask([9, 4], window=(5, None)), Mask([9, 4], window=(5, None))),
        (Mask([9, 4], causal=False, window=(3, 0)) | Mask([9, 4], causal=False, window=(0, 2)),
         Mask([9, 4], causal=False, window=(3, 2))),
        (cross(window=(3, 0)) | cross(window=(0, 2)), cross(window=(3, 2))),
        (Mask([50, 30], window=(8, None), sink_tokens=4).windowed((3, 0)), Mask([50, 30], window=(3, None))),
        (causal | Mask([9, 4], causal=False, window=(0, None)), Mask([9, 4], causal=False)),
    ):  # fmt: skip
        assert same == plain and same.digest() == plain.digest()


def test_long_documents_cost_no_memory_per_token() -> None:
    n, documents, window, sinks = 10**9, 30, 10**6, 1000
    mask = Mask([n] * documents, window=(window, None), sink_tokens=sinks)
    assert len(pickle.dumps(mask)) < 10_000 and len(mask.bands) == 2
    exact = window * (window + 1) // 2 + (n - window) * (window + 1)
    later = n - window - 1  # queries whose window begins after key 0
    exact += sinks * (sinks + 1) // 2 + (later - sinks) * sinks
    assert mask.area() == documents * exact
    union = mask | Mask.from_slices(
        [[5 * 10**8, 20 * n]], [[10**7, 25 * n]], ["bi_causal"], tokens=30 * n, lengths=[n] * 30
    )
    assert len(pickle.dumps(union)) < 30_000 and union.area() > mask.area()
    most = 2**61
    assert Mask([most], window=(4, None), sink_tokens=2).area() == 15 + (most - 5) * 5 + (most - 5) + (most - 6)


@examples(60)
@given(st.integers(1, 40), st.integers(1, 6), st.integers(2, 5), st.integers(0, 2**32))
def test_a_plan_moves_the_keys_that_are_seen_and_no_other(tokens, count, ranks, seed) -> None:
    rng = np.random.default_rng(seed)
    slices = random_slices(tokens, tokens, count, rng)
    seen = of_slices(tokens, tokens, slices)
    mask = Mask.from_slices([s[:2] for s in slices], [s[2:4] for s in slices], [s[4] for s in slices], tokens=tokens)
    plan = Plan(mask, Layout(np.array_split(rng.permutation(tokens), ranks)))
    for rank in range(ranks):
        got = np.concatenate([np.zeros(0, int), *(s.pos[r] for s in plan.steps(rank) for r in s.recvs.values())])
        needed = np.flatnonzero(seen[plan.layout.positions(rank)].any(0))
        np.testing.assert_array_equal(np.sort(got), np.setdiff1d(needed, plan.layout.positions(rank)))
    assert sum(step.area for rank in range(ranks) for step in plan.steps(rank)) == seen.sum()


of, blocks = Mask.from_slices, Mask.blocks
TABLE = np.zeros((1, 66), bool)
TABLE[:, ::2] = True
ONE = np.ones((1, 1), bool)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Mask([5]) | Mask([4, 1]), ValueError, r"got lengths=\[5\] \| lengths=\[4, 1\]"),
        (lambda: Mask([5]) | Mask([5], kv_lengths=[6]), ValueError, r"\| lengths=\[5\], kv_lengths=\[6\]"),
        (lambda: Mask([5]) | 3, TypeError, "unsupported operand"),
        (lambda: Mask([5], sink_tokens=-1), ValueError, "sink_tokens .* at least 0, got -1"),
        (lambda: blocks(TABLE, 1), NotImplementedError, r"33 bands, .*at most 32; .* seqpar\.fetch"),
        (lambda: blocks([[1]], 1), ValueError, r"table must be booleans .*, got int64\[1, 1\]; compare with > 0"),
        (lambda: blocks(ONE, 0), ValueError, "block must be an integer of at least 1, got 0"),
        (lambda: blocks(ONE, 4, tokens=5), ValueError, "tokens=5 are 2 blocks of 4, the table has 1; give a row"),
        (lambda: blocks(ONE, 4, lengths=[3]), ValueError, "lengths sum to 3, the mask has 4 queries"),
        (lambda: of([[0, 2]], [[0, 2]], ["diagonal"]), ValueError, "bi_causal, got 'dia"),
        (lambda: of([[0, 2]], [[0, 2]], "full"), ValueError, "1 q_ranges, 1 k_ranges and 4 kinds"),
        (lambda: of([[0, 4]], [[0, 2]], ["full"], tokens=3), ValueError, r"is \[0, 4\], beyond tokens=3"),
        (lambda: of([[0, 3]], [[0, 5]], ["full"], tokens=3), ValueError, "beyond kv_tokens=3; cut"),
        (lambda: of([[0, 3], [3, 2]], [[0, 3]] * 2, ["full"] * 2), ValueError, r"of slice 1 is \[3, 2\]"),
        (lambda: of([0, 3], [[0, 3]], ["full"]), ValueError, r"q_ranges must be integers"),
        (lambda: of([], [], []), ValueError, r"give \[\[start, end\], ...\]"),
    ],
)  # fmt: skip
def test_what_is_no_union_is_refused(make, error, message) -> None:
    with pytest.raises(error, match=message):
        make()
