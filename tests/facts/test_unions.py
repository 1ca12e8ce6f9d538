"""Unions of masks beside dense matrices of booleans that are written apart."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqpar.facts.mask import Mask
from tests.cases import MASKS, make_mask, random_tree

KINDS = ("full", "causal", "inv_causal", "bi_causal")


def pairs(mask: Mask) -> np.ndarray:
    """How often each pair of a query and a key is in a band."""
    rows, keys = np.arange(mask.tokens), np.arange(mask.kv_tokens)
    found = np.zeros((rows.size, keys.size), int)
    for band in range(len(mask.bands)):
        lo, hi = mask.bounds(rows, band=band)
        seen = (lo[:, None] <= keys) & (keys < hi[:, None])
        found += seen & (mask.key_positions(rows)[:, None] < mask.until(band=band))
    return found


def check(mask: Mask, seen: np.ndarray) -> None:
    """The mask has exactly these pairs, each in one band, and knows their number."""
    np.testing.assert_array_equal(pairs(mask), seen.astype(int))
    assert mask.area() == seen.sum()


@settings(max_examples=150)
@given(
    st.lists(st.sampled_from([kind for kind in MASKS if not kind.startswith("cross")]), min_size=2, max_size=6),
    st.lists(st.integers(1, 14), min_size=1, max_size=4), st.integers(0, 2**16),
)  # fmt: skip
def test_a_union_has_the_pairs_of_its_parts_once(kinds, lengths, seed) -> None:
    rng = np.random.default_rng(seed)
    parts = [make_mask(kind, lengths, rng) for kind in kinds]
    one = [sum(lengths)]
    parts = [part for part in parts if part.lengths.tolist() == parts[0].lengths.tolist()] or parts[:1]
    assert parts[0].lengths.sum() == one[0]
    union, back = parts[0], parts[-1]
    for part in parts[1:]:
        union = union | part
    for part in parts[-2::-1]:
        back = back | part
    seen = np.any([pairs(part) for part in parts], axis=0)
    check(union, seen)
    assert union == back and len(union.bands) <= max(
        1, int((np.diff(np.pad(seen, ((0, 0), (1, 0))).astype(int)) == 1).sum(1).max())
    )


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 25)), min_size=1, max_size=4), st.integers(0, 6),
    st.sampled_from([None, 0, 3]), st.integers(0, 9), st.booleans(), st.booleans(),
)  # fmt: skip
def test_sink_tokens_are_seen_beside_the_window(sizes, left, right, sinks, causal, cross) -> None:
    lengths = [n for n, _ in sizes]
    keys = [m for _, m in sizes] if cross else lengths
    mask = Mask(
        lengths, causal=causal, window=(left, None if causal else right), sink_tokens=sinks,
        kv_lengths=keys if cross else None,
    )  # fmt: skip
    blocks = []
    for n, m in zip(lengths, keys, strict=True):
        at, j = np.arange(n)[:, None] + m - n, np.arange(m)
        reach = at if causal else (at + right if right is not None else np.full_like(at, m))
        window = (j >= at - left) & (j <= reach)
        blocks.append(window | ((j < sinks) & ((j <= at) | (not causal))))
    seen = np.zeros((sum(lengths), sum(keys)), bool)
    for row, column, block in zip(np.cumsum(lengths), np.cumsum(keys), blocks, strict=True):
        seen[row - block.shape[0] : row, column - block.shape[1] : column] = block
    check(mask, seen)
    assert mask.within_documents and len(mask.bands) <= 2
    chosen = [len(sizes) - 1, 0]
    picked = mask.pick(chosen)
    offsets = np.cumsum([0, *(blocks[n].shape[1] for n in chosen)])
    rows = np.cumsum([0, *(blocks[n].shape[0] for n in chosen)])
    expected = np.zeros((rows[-1], offsets[-1]), bool)
    for place, n in enumerate(chosen):
        expected[rows[place] : rows[place + 1], offsets[place] : offsets[place + 1]] = blocks[n]
    check(picked, expected)


@st.composite
def slice_lists(draw: st.DrawFn) -> tuple[int, int, list[tuple[int, int, int, int, str]]]:
    tokens, keys = draw(st.integers(1, 30)), draw(st.integers(1, 30))
    found = []
    for _ in range(draw(st.integers(1, 8))):
        a, b = sorted((draw(st.integers(0, tokens)), draw(st.integers(0, tokens))))
        c, d = sorted((draw(st.integers(0, keys)), draw(st.integers(0, keys))))
        found.append((a, b, c, d, draw(st.sampled_from(KINDS))))
    return tokens, keys, found


@settings(max_examples=200)
@given(slice_lists())
def test_slices_have_magi_attentions_meaning(case) -> None:
    tokens, keys, several = case
    seen = np.zeros((tokens, keys), bool)
    for a, b, c, d, kind in several:
        i, j = np.arange(b - a)[:, None], np.arange(d - c)
        part = np.ones((b - a, d - c), bool)
        if kind in ("causal", "bi_causal"):
            part &= j <= i + (d - c) - (b - a)
        if kind in ("inv_causal", "bi_causal"):
            part &= j >= i
        seen[a:b, c:d] |= part
    q, k = [[a, b] for a, b, *_ in several], [[c, d] for _, _, c, d, _ in several]
    mask = Mask.from_slices(q, k, [kind for *_, kind in several], tokens=tokens, kv_tokens=keys)
    check(mask, seen)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 5), st.integers(1, 5), st.integers(0, 2**16))
def test_blocks_are_seen_in_full(rows, columns, tall, wide, seed) -> None:
    rng = np.random.default_rng(seed)
    table = rng.random((rows, columns)) < 0.5
    tokens, keys = rows * tall - int(rng.integers(0, tall)), columns * wide - int(rng.integers(0, wide))
    seen = table.repeat(tall, 0).repeat(wide, 1)[:tokens, :keys]
    check(Mask.blocks(table, (tall, wide), tokens=tokens, kv_tokens=keys), seen)


@given(st.integers(1, 40), st.integers(0, 2**16), st.integers(0, 5))
def test_a_tree_with_a_plain_mask(tokens, seed, left) -> None:
    lo, hi, until, seen = random_tree(tokens, np.random.default_rng(seed))
    tree = Mask.from_bounds(lo, hi, until=until)
    band = Mask([tokens], window=(left, None))
    check(tree | band, seen | (pairs(band) > 0))
    assert tree | tree == tree and (tree | band) == (band | tree)


def test_a_union_that_is_one_of_its_parts_is_that_part() -> None:
    window, causal = Mask([9, 4], window=(2, None)), Mask([9, 4])
    assert window | causal == causal == causal | window and (window | causal).digest() == causal.digest()
    assert Mask([9, 4], window=(2, 0), sink_tokens=20) == causal
    assert Mask.from_slices([[0, 9], [9, 13]], [[0, 9], [9, 13]], ["causal"] * 2).area() == causal.area()


def test_what_is_no_union_is_refused() -> None:
    with pytest.raises(ValueError, match="masks of the same documents"):
        Mask([5]) | Mask([4, 1])
    table = np.zeros((1, 66), bool)
    table[:, ::2] = True
    with pytest.raises(NotImplementedError, match=r"33 bands.*seqpar\.fetch"):
        Mask.blocks(table, (1, 1))
    with pytest.raises(ValueError, match="kinds must be of full, causal, inv_causal, bi_causal, got 'diagonal'"):
        Mask.from_slices([[0, 2]], [[0, 2]], ["diagonal"])
    with pytest.raises(ValueError, match="beyond the 3 queries"):
        Mask.from_slices([[0, 4]], [[0, 2]], ["full"], tokens=3)
    other = Mask.from_bounds([0, 0, 0], [1, 2, 3], until=[2, 3, 3])
    with pytest.raises(NotImplementedError, match="keys that end early, and they overlap"):
        other | Mask.from_bounds([0, 0, 0], [1, 2, 3], until=[1, 3, 3])
