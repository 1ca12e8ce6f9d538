"""`Mask` against the definition: which keys a query sees, written out pair by pair."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from seqpar import Layout, Plan, plan_batch, plan_step
from seqpar.facts.intervals import linear_spans
from seqpar.facts.mask import Mask
from seqpar.testing import seen_pairs
from tests.cases import document_lengths, examples


def pairs_by_definition(
    lengths: list[int], kv_lengths: list[int], causal: bool, window: tuple[int | None, int | None]
) -> np.ndarray:
    """Which query sees which key, [tokens, kv_tokens], one pair at a time."""
    left, right = window
    seen = np.zeros((sum(lengths), sum(kv_lengths)), bool)
    query = key = 0
    for n, m in zip(lengths, kv_lengths, strict=True):
        for i in range(n):
            at = i + m - n  # the last query stands at the last key
            for j in range(m):
                sees = not causal or j <= at
                sees &= left is None or j >= at - left
                sees &= right is None or j <= at + right
                seen[query + i, key + j] = sees
        query, key = query + n, key + m
    return seen


def pairs_of(mask: Mask) -> np.ndarray:
    """Which query sees which key, as the mask's bounds say."""
    lo, hi = mask.bounds(np.arange(mask.tokens))
    assert (lo <= hi).all() and (lo >= 0).all() and (hi <= mask.kv_tokens).all()
    keys = np.arange(mask.kv_tokens)
    return (keys >= lo[:, None]) & (keys < hi[:, None])


reach = st.one_of(st.none(), st.integers(0, 12), st.just(10**15))


@st.composite
def documents(draw: st.DrawFn) -> dict[str, object]:
    """Arguments of any mask over few tokens."""
    lengths = draw(document_lengths(9))
    causal, count = draw(st.booleans()), len(lengths)
    keys = st.lists(st.integers(0, 12), min_size=count, max_size=count).filter(lambda x: any(x) and (x[0] or count < 2))
    kv_lengths = draw(st.one_of(st.none(), keys))
    right = st.sampled_from([None, 0]) if causal else reach
    return {"lengths": lengths, "causal": causal, "window": (draw(reach), draw(right)), "kv_lengths": kv_lengths}


@given(documents())
def test_bounds_and_area_are_those_of_the_definition(arguments) -> None:
    mask = Mask(**arguments)
    keys = arguments["kv_lengths"] or arguments["lengths"]
    seen = pairs_by_definition(arguments["lengths"], keys, arguments["causal"], arguments["window"])
    np.testing.assert_array_equal(pairs_of(mask), seen)
    assert mask.area() == seen.sum()
    assert (mask.tokens, mask.kv_tokens) == seen.shape
    assert mask.within_documents


@given(documents(), st.data())
def test_picked_documents_see_what_they_saw(arguments, data) -> None:
    mask = Mask(**arguments)
    chosen = data.draw(st.lists(st.integers(0, len(mask.lengths) - 1), min_size=1, max_size=6))
    keys = arguments["kv_lengths"]
    assume(mask.lengths[chosen[0]] and mask.kv_lengths[chosen[0]])  # else lengths may be those of cu_seqlens
    fewer = {"lengths": mask.lengths[chosen], "kv_lengths": None if keys is None else mask.kv_lengths[chosen]}
    made = Mask(**(arguments | fewer))
    picked = mask.pick(chosen)
    assert picked == made and repr(picked) == repr(made)
    assert (picked.kv_lengths is picked.lengths) == (mask.kv_lengths is mask.lengths)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.data())
def test_picked_bounds_see_what_they_saw(lengths, data) -> None:
    tokens = sum(lengths)
    start = np.repeat(np.cumsum(lengths) - lengths, lengths)
    stop = start + np.repeat(lengths, lengths)
    lo, hi = np.sort(data.draw(st.lists(st.tuples(*2 * [st.integers(0, tokens)]), min_size=tokens, max_size=tokens))).T
    # bounds inside the documents, and empty ones anywhere
    low, high = np.maximum(lo, start), np.minimum(hi, stop)
    low, high = np.where(low < high, (low, high), (lo, lo))
    mask = Mask.from_bounds(low, high, lengths=lengths)
    chosen = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=6))
    picked = mask.pick(chosen)
    seen = pairs_of(picked)
    first, at = np.cumsum([0, *lengths]), np.cumsum([0, *mask.lengths[chosen]])
    assert picked.area() == seen.sum() and picked.within_documents
    for n, d in enumerate(chosen):
        rows, mine = slice(first[d], first[d + 1]), slice(at[n], at[n + 1])
        np.testing.assert_array_equal(seen[mine, mine], pairs_of(mask)[rows, rows])
        assert seen[mine].sum() == seen[mine, mine].sum()


@examples(60)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(1, 3), st.integers(0, 2**32), st.data())
def test_picked_bands_with_ends_see_what_they_saw(lengths, count, seed, data) -> None:
    """Of any bands, if no query sees a key of another document; whether one does is told exactly."""
    rng, tokens = np.random.default_rng(seed), sum(lengths)
    document = np.repeat(np.arange(len(lengths)), lengths)
    first, stop = np.cumsum([0, *lengths])[document], np.cumsum(lengths)[document]
    bands, seen = [], []
    for _ in range(count):
        back, ahead = int(rng.integers(0, 4)), int(rng.random() < 0.2)  # how far bounds reach beyond documents
        lo, hi = np.sort(rng.integers(first - back, stop + ahead + 1, (2, tokens)), axis=0).clip(0, tokens)
        until = rng.integers(0, tokens + 1, tokens)
        if rng.random() < 0.8:
            until = np.minimum(until, stop)  # no later document sees the key
        mask = Mask.from_bounds(lo, hi, until=until if rng.random() < 0.8 else None, lengths=lengths)
        bands += mask.bands
        seen.append(seen_pairs(mask))
        assert mask.within_documents == (not (seen[-1] & (document[:, None] != document)).any())
    mask = Mask.__new__(Mask)
    mask._set(mask_lengths := np.array(lengths), mask_lengths, tuple(bands), within=False, name="bands")
    if not mask.within_documents:
        with pytest.raises(ValueError, match="see keys of other documents"):
            mask.pick([0])
        return
    chosen = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=6))
    picked = mask.pick(chosen)
    rows = np.concatenate([np.flatnonzero(document == d) for d in chosen])
    apart = np.repeat(np.arange(len(chosen)), [lengths[d] for d in chosen])
    expected = np.any(seen, axis=0)[rows][:, rows] & (apart[:, None] == apart)
    np.testing.assert_array_equal(seen_pairs(picked), expected)
    assert picked.lengths.tolist() == [lengths[d] for d in chosen] and picked.within_documents
    assert picked.area() == sum(each[rows][:, rows][apart[:, None] == apart].sum() for each in seen)


@given(documents(), st.data())
def test_a_windowed_mask_sees_what_lies_in_the_window(arguments, data) -> None:
    """Of a mask by its documents, and of bounds of any kind, also far from the diagonal."""
    mask, window = Mask(**arguments), (data.draw(reach), data.draw(reach))
    if mask.tokens == mask.kv_tokens and data.draw(st.booleans()):
        ends = st.lists(st.integers(0, mask.tokens), min_size=2 * mask.tokens, max_size=2 * mask.tokens)
        mask = Mask.from_bounds(*np.sort(np.reshape(data.draw(ends), (2, -1)), axis=0), lengths=mask.lengths)
    narrowed = mask.windowed(window)
    far = mask.key_positions(np.arange(mask.tokens))[:, None] - np.arange(mask.kv_tokens)
    left, right = (10**9 if x is None else x for x in window)
    seen = pairs_of(mask) & (far <= left) & (-far <= right)
    np.testing.assert_array_equal(pairs_of(narrowed), seen)
    assert narrowed.area() == seen.sum()
    assert mask.windowed(window) is narrowed


def test_a_window_of_documents_that_have_keys_alone() -> None:
    mask = Mask([0, 2, 0], causal=False, kv_lengths=[1, 3, 1])
    np.testing.assert_array_equal(pairs_of(mask.windowed((0, None))), [[0, 0, 1, 1, 0], [0, 0, 0, 1, 0]])


@given(documents())
def test_a_window_given_first_or_later_makes_equal_masks(arguments) -> None:
    if arguments["kv_lengths"] is None:  # a query that sees nothing may have its empty interval anywhere
        plain = Mask(**arguments | {"window": (None, None)})
        assert plain.windowed(arguments["window"]) == Mask(**arguments)


def test_an_empty_interval_elsewhere_is_picked_with_its_row() -> None:
    mask = Mask.from_bounds([0, 0, 6, 6, 0, 0, 0], [0, 0, 6, 7, 0, 0, 0], lengths=[3, 4])
    assert not pairs_of(mask.pick([0])).any()


def test_documents_that_cannot_be_picked_are_refused() -> None:
    with pytest.raises(ValueError, match="run from 0 to 2, the mask has 2"):
        Mask([3, 4]).pick([0, 2])
    with pytest.raises(ValueError, match="non-empty sequence of integers"):
        Mask([3, 4]).pick([])
    with pytest.raises(ValueError, match="see keys of other documents"):
        Mask.from_bounds([0, 0, 0], [1, 2, 3], lengths=[2, 1]).pick([0])


@given(documents(), st.data())
def test_positions_in_any_order_with_pads(arguments, data) -> None:
    mask = Mask(**arguments)
    both = zip(arguments["lengths"], arguments["kv_lengths"] or arguments["lengths"], strict=True)
    lengths, keys = np.array([sizes for sizes in both if any(sizes)]).T
    at = np.array(data.draw(st.lists(st.integers(-1, mask.tokens - 1), max_size=20)), np.int64)
    lo, hi = mask.bounds(np.arange(mask.tokens))
    got_lo, got_hi = mask.bounds(at)
    document = np.repeat(np.arange(len(keys)), lengths)
    start, key_start = np.cumsum([0, *lengths]), np.cumsum([0, *keys])
    for n, i in enumerate(at):
        if i < 0:
            assert got_lo[n] == got_hi[n] and mask.documents(at)[n] == -1 and mask.key_positions(at)[n] == -1
            continue
        d = document[i]
        assert (got_lo[n], got_hi[n]) == (lo[i], hi[i])
        assert mask.documents(at)[n] == d
        # The last query of a document stands at its last key.
        assert mask.key_positions(at)[n] - key_start[d + 1] == i - start[d + 1]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=30), st.integers(9, 12))
def test_any_bounds_are_kept(ends, keys) -> None:
    lo, hi = (np.array(x) for x in zip(*(sorted(e) for e in ends), strict=True))
    mask = Mask.from_bounds(lo, hi, kv_tokens=keys)
    for expected, got in zip((lo, hi), mask.bounds(np.arange(len(lo))), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert mask.area() == (hi - lo).sum()
    assert mask.tokens == len(lo) and mask.kv_tokens == keys


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=30))
def test_spans_are_linear_and_no_more_than_slopes_allow(ends) -> None:
    lo, hi = (np.array([sorted(e)[side] for e in ends], np.int64) for side in (0, 1))
    s = linear_spans(lo, hi)
    count = np.diff(np.append(s.start, len(lo)))
    t = np.arange(len(lo)) - np.repeat(s.start, count)
    np.testing.assert_array_equal(np.repeat(s.lo, count) + t * np.repeat(s.lo_step, count), lo)
    np.testing.assert_array_equal(np.repeat(s.hi, count) + t * np.repeat(s.hi_step, count), hi)
    assert set(s.lo_step) | set(s.hi_step) <= {0, 1}


@given(documents())
def test_bounds_given_or_derived_make_equal_masks(arguments) -> None:
    mask = Mask(**arguments)
    if mask.kv_lengths is mask.lengths:
        again = Mask.from_bounds(*mask.bounds(np.arange(mask.tokens)), lengths=mask.lengths)
        assert again == mask and hash(again) == hash(mask) and again.within_documents


def test_within_documents_is_about_bounds_not_about_names() -> None:
    assert Mask.from_bounds([0, 0, 2], [1, 2, 3], lengths=[2, 1]).within_documents
    assert not Mask.from_bounds([0, 0, 1], [1, 2, 3], lengths=[2, 1]).within_documents
    assert Mask.from_bounds([0, 0, 0], [1, 2, 0], lengths=[2, 1]).within_documents, "an empty interval is anywhere"


@pytest.mark.parametrize("window", [(None, None), (7, None), (10**8, 0), (10**12, 3)])
@pytest.mark.parametrize("causal", [True, False])
def test_huge_documents_cost_no_memory_per_token(window, causal) -> None:
    n, documents = 10**9, 30
    if causal:
        window = (window[0], None)
    mask = Mask([n] * documents, causal=causal, window=window)
    assert len(mask.bands[0].spans.start) <= documents * (1 if window == (None, None) else 2)
    assert len(pickle.dumps(mask)) < 10_000
    left = n - 1 if window[0] is None else min(window[0], n - 1)
    right = 0 if causal else n - 1 if window[1] is None else min(window[1], n - 1)

    def half(w: int) -> int:
        """Pairs at distance 1 to w to one side, in Python's exact integers."""
        return w * n - w * (w + 1) // 2

    assert mask.area() == documents * (n + half(left) + half(right))
    last = mask.tokens - 1
    lo, hi = mask.bounds([last])
    assert (int(lo[0]), int(hi[0])) == (last - left, last + 1)


def test_facts_do_not_change() -> None:
    mask = Mask([3, 4], window=(2, None))
    for name in ("lengths", "tokens", "anything"):
        with pytest.raises(AttributeError):
            setattr(mask, name, 1)
    for same in (mask, pickle.loads(pickle.dumps(mask))):
        arrays = (same.lengths, same.kv_lengths, same.offsets, same.kv_offsets, *same.bands[0].spans)
        assert not any(a.flags.writeable for a in arrays)
    given = np.array([3, 4])
    mask = Mask(given)
    given[0] = 100
    assert mask.tokens == 7


@given(documents(), documents())
def test_equality_is_that_of_the_digest(one, other) -> None:
    a, b = Mask(**one), Mask(**other)
    again = pickle.loads(pickle.dumps(a))
    assert again == a and hash(again) == hash(a) and again.digest() == a.digest() and repr(again) == repr(a)
    same = (
        a.lengths.tolist() == b.lengths.tolist()
        and a.kv_lengths.tolist() == b.kv_lengths.tolist()
        and all(np.array_equal(x, y) for x, y in zip(*(m.bounds(np.arange(m.tokens)) for m in (a, b)), strict=True))
    )
    assert (a == b) == same == (a.digest() == b.digest())
    assert a != "a mask"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), "lengths must be a non-empty sequence of integers"),
        ((torch.ones(2, requires_grad=True),), "lengths must be a non-empty sequence of integers, got tensor"),
        (([2, -3],), "lengths must be at least 0, got -3 for document 1"),
        (([0],), r"lengths must hold at least one token, got \[0\]"),
        (([0, 4, 9],), r"lengths ascend from 0 like cu_seqlens, got \[0, 4, 9\]; give differences, x.diff\(\)"),
        ((np.array([0, 4], np.uint8),), r"lengths ascend from 0 like cu_seqlens"),
        (([2, 3.0],), "lengths must be a non-empty sequence of integers"),
        (([True],), "lengths must be a non-empty sequence of integers"),
        (([2**62, 2**62],), "64 bits"),
    ],
)
def test_lengths_that_are_none(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        Mask(*arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_lengths": [2]}, "lengths has 2 documents and kv_lengths 1"),
        ({"kv_lengths": [0, 0]}, "kv_lengths must hold at least one token"),
        ({"kv_lengths": [0, 2]}, "kv_lengths ascend from 0 like cu_seqlens"),
        ({"window": (-1, None)}, r"window must be \(left, right\).*got \(-1, None\)"),
        ({"window": (1,)}, r"window must be \(left, right\).*got \(1,\)"),
        ({"window": None}, r"window must be \(left, right\).*got None"),
        ({"window": (True, None)}, r"window must be \(left, right\).*integer.*got \(True, None\)"),
        ({"window": (2**70, None)}, r"window must be \(left, right\), each at most .*; give None for no limit"),
        (
            {"window": (1, 2)},
            r"causal mask sees no key to the right, got window=\(1, 2\); give causal=False",
        ),
    ],
)
def test_options_that_fit_nothing(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        Mask([2, 3], **options)


@pytest.mark.parametrize(
    ("lo", "hi", "options", "message"),
    [
        ([0, -1, -2], [1, 1, 1], {}, r"query 1 has bounds \[-1, 1\), expected 0 <= lo <= hi <= 3"),
        ([0, 0, 0], [1, 2, 4], {}, r"query 2 has bounds \[0, 4\), expected 0 <= lo <= hi <= 3"),
        ([0, 0], [1, 2, 3], {}, r"one shape \[tokens\], got int64\[2\] and int64\[3\]"),
        ([0.0], [1.0], {}, "integer arrays of one shape"),
        ([], [], {}, "integer arrays of one shape"),
        ([0, 0], [1, 2], {"lengths": [1]}, "lengths sum to 1, the mask has 2 queries"),
        ([0, 0], [1, 2], {"lengths": [1, 1], "kv_tokens": 3}, "do not say which keys a document has"),
        ([0], [1], {"kv_tokens": 0}, "kv_tokens must be an integer of at least 1, got 0"),
        ([0], [1], {"kv_tokens": 2**70}, f"kv_tokens must be an integer of at most {2**62 - 1}, got {2**70}"),
        (np.array([2**63], np.uint64), [1], {}, f"lo must be integers below 2..63, got {2**63}"),
    ],
)
def test_bounds_that_fit_nothing(lo, hi, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        Mask.from_bounds(lo, hi, **options)


@pytest.mark.parametrize("positions", [[2], [-2], [0.5]])
def test_positions_outside_the_batch(positions) -> None:
    for ask in (Mask([2]).bounds, Mask([2]).documents, Mask([2]).key_positions):
        with pytest.raises(ValueError, match="positions"):
            ask(positions)


def test_threads_that_make_a_fact_at_once_share_it() -> None:
    mask, both = Mask([2]), threading.Barrier(2, timeout=60)

    def make() -> object:
        both.wait()  # neither is kept before the other is being made
        return object()

    with ThreadPoolExecutor(2) as threads:
        one, two = threads.map(lambda _: mask.memo("a fact", make), range(2))
    assert one is two is mask.memo("a fact", make)


def alike(one: Mask, other: Mask) -> None:
    """Two equal masks say and do the same."""
    assert one == other and one.digest() == other.digest() and hash(one) == hash(other)
    assert one.within_documents == other.within_documents
    assert (one.kv_lengths is one.lengths) == (other.kv_lengths is other.lengths)


def test_equal_masks_behave_alike_however_they_were_made() -> None:
    loose = Mask.from_bounds([0] * 4, [1, 2, 3, 4], lengths=[2, 2])
    assert not loose.within_documents
    narrowed, tight = loose.windowed((0, 0)), Mask.from_bounds([0, 1, 2, 3], [1, 2, 3, 4], lengths=[2, 2])
    alike(narrowed, tight)
    assert narrowed.within_documents and narrowed.pick([1]) == tight.pick([1])
    layout = Layout.contiguous(4, 2)
    assert not Plan(narrowed, layout).merges and Plan(narrowed, layout, ulysses=[1, 2]).ulysses == (1, 2)
    alike(Mask([2, 5]), Mask([2, 5], kv_lengths=[2, 5]))
    # rows that see nothing may have their empty interval anywhere
    assert Mask.from_bounds([4, 0, 2, 3], [4, 1, 2, 4], lengths=[2, 2]).within_documents


@examples(60)
@given(st.data())
def test_a_mask_is_within_documents_if_every_row_is(data) -> None:
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    tokens = sum(lengths)
    lo = np.array([data.draw(st.integers(0, tokens)) for _ in range(tokens)])
    hi = np.array([data.draw(st.integers(at, tokens)) for at in lo.tolist()])
    start = np.repeat(np.cumsum(lengths) - lengths, lengths)
    if data.draw(st.booleans()):  # seldom inside by chance
        lo, hi = (np.clip(x, start, start + np.repeat(lengths, lengths)) for x in (lo, hi))
    if data.draw(st.booleans()):
        lo, hi = np.maximum.accumulate(lo), np.maximum.accumulate(hi)
    mask = Mask.from_bounds(lo, hi, lengths=lengths)
    window = data.draw(st.tuples(*[st.none() | st.integers(0, 4)] * 2))
    for found in (mask, mask.windowed(window)):
        low, high = found.bounds(np.arange(tokens))
        inside = (low >= high) | ((low >= start) & (high <= start + np.repeat(lengths, lengths)))
        assert found.within_documents == bool(inside.all())
        alike(found, Mask.from_bounds(low, high, lengths=lengths))


@pytest.mark.parametrize("band", [1, -1, 0.5])
def test_a_band_that_a_mask_has_not_is_named(band: float) -> None:
    for read in (lambda mask: mask.bounds([0], band=band), lambda mask: mask.until(band=band)):
        with pytest.raises(ValueError, match=f"band must be from 0 to 0, as the mask has bands, got {band}"):
            read(Mask([4]))


@pytest.mark.parametrize("causal", ["no", 1, None])
def test_causal_is_true_or_false(causal: object) -> None:
    with pytest.raises(ValueError, match=f"causal must be True or False, got {causal!r}"):
        Mask([4], causal=causal)  # type: ignore[arg-type]


def test_the_differences_of_cu_seqlens_are_lengths() -> None:
    assert Mask(np.diff([0, 4, 9])) == Mask([4, 5])
    assert Mask(np.diff([0, 0, 4, 4, 9, 9, 9])) == Mask([4, 5])  # padded to a constant length, as for graphs


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.data())
def test_documents_without_a_token_hold_no_row(lengths, data) -> None:
    more = list(lengths)
    for _ in range(data.draw(st.integers(1, 4))):
        more.insert(data.draw(st.integers(0, len(more))), 0)
    assume(more[0] or min(np.diff(more)) <= 0)  # else they are those of cu_seqlens
    tokens = sum(lengths)
    bounds = np.zeros(tokens, int), np.arange(tokens) + 1
    for facts in (
        Mask, partial(Mask, causal=False, window=(2, 3)), partial(Mask, window=(2, None), sink_tokens=2),
        lambda x: Mask.from_bounds(*bounds, lengths=x),
        lambda x: Mask.blocks(np.eye(tokens, dtype=bool), 1, lengths=x), lambda x: Mask.tree(x, [-1] * len(x)),
        lambda x: Mask.from_slices([(0, tokens)], [(0, tokens)], ["causal"], lengths=x),
        lambda x: Mask(x, kv_lengths=[2 * n for n in x]), partial(Layout.zigzag, ranks=3),
        partial(Layout.blocked, ranks=3), partial(plan_batch, ranks=3, hardware="h100"),
    ):  # fmt: skip
        assert facts(more) == facts(lengths)
    (part,) = plan_step(more, 3)
    assert part.plan == plan_step(lengths, 3)[0].plan
    assert [more[n] for n in part.documents] == lengths


def test_keys_without_queries_and_queries_without_keys() -> None:
    mask = Mask([3, 0, 2, 0], kv_lengths=[0, 4, 2, 0], causal=False)
    seen = np.zeros((5, 6), bool)
    seen[3:, 4:] = True
    np.testing.assert_array_equal(pairs_of(mask), seen)
    assert mask.lengths.tolist() == [3, 0, 2] and mask.kv_lengths.tolist() == [0, 4, 2]
    assert mask.documents([0, 2, 3, 4]).tolist() == [0, 0, 2, 2]
