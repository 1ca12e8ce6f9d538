"""Rectangles of a step are what its bounds say; of a tree, few of them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from seqpar.facts.mask import Mask
from seqpar.facts.segments import Kind, Segments, segments
from tests.cases import ENDING, LAYOUTS, MASKS, examples, make_layout, make_mask


def pairs(s: Segments, shape: tuple[int, int]) -> np.ndarray:
    """How often each pair of a row and a key is in a segment."""
    found = np.zeros(shape, int)
    for q, n, k, m, kind, left, right in zip(s.q_row, s.q_len, s.k_row, s.k_len, s.kind, s.left, s.right, strict=True):
        key, diagonal = np.arange(m), np.arange(n)[:, None] + m - n
        seen = np.full((n, m), True)
        if kind == Kind.CAUSAL or right >= 0:
            seen &= key <= diagonal
        if left >= 0:
            seen &= key >= diagonal - left
        found[q : q + n, k : k + m] += seen
    return found


@examples(300)
@given(st.sampled_from((*ENDING, *MASKS)), st.integers(1, 60), st.integers(0, 2**16), st.booleans(), st.booleans())
def test_each_pair_is_in_one_segment(kind, tokens, seed, whole, windowed) -> None:
    rng = np.random.default_rng(seed)
    mask = make_mask(kind, [tokens], rng)
    at, keys = np.arange(mask.tokens), np.arange(mask.kv_tokens)
    if not whole:
        layout = make_layout(LAYOUTS[seed % len(LAYOUTS)], [mask.tokens], 3, rng)
        at = np.sort(layout.positions(seed % 3))
        keys = keys[rng.random(keys.size) < 0.7]
    (lo, hi), pos, until = mask.bounds(at), mask.key_positions(at), mask.until()[keys]
    if windowed:
        lo = np.minimum(np.maximum(lo, pos - 4), hi)
    seen = (keys >= lo[:, None]) & (keys < hi[:, None]) & (pos[:, None] < until)
    s = segments(lo, hi, keys, at=pos, until=until if mask.has_until else None)
    found, rest = pairs(s, seen.shape), np.isin(np.arange(at.size), s.remainder)
    np.testing.assert_array_equal(found[~rest], seen[~rest])
    assert (found[rest] <= seen[rest]).all()
    assert not rest.any() or windowed or kind != "tree"
    assert (np.diff(s.q_row) >= 0).all() and (s.q_len > 0).all() and (s.k_len > 0).all()


def test_a_prompt_with_answers_is_a_square_each_and_a_rectangle() -> None:
    mask = Mask.shared_prefix([(20, [5, 6, 7])])
    at = np.arange(38)
    for rows in (slice(None), slice(22, None)):
        lo, hi = mask.bounds(at[rows])
        s = segments(lo, hi, at, at=at[rows], until=mask.until())
        found = list(zip(s.q_row, s.q_len, s.k_row, s.k_len, s.kind, strict=True))
        if rows.start is None:
            assert found == [
                (0, 20, 0, 20, 1),
                (20, 18, 0, 20, 0),
                (20, 5, 20, 5, 1),
                (25, 6, 25, 6, 1),
                (31, 7, 31, 7, 1),
            ]
        else:
            assert found == [(0, 16, 0, 20, 0), (0, 3, 20, 5, 1), (3, 6, 25, 6, 1), (9, 7, 31, 7, 1)]
