"""Micro-batches of a global batch: every document in one, within what a rank holds, of about equal time."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpar import Mask
from seqpar.planner import Hardware, ModelShape, plan_batch, plan_step
from seqpar.planner.step import split
from tests.cases import examples

VAST = dataclasses.replace(Hardware.preset("h100"), memory=1 << 50)
SMALL = dataclasses.replace(ModelShape.preset("llama-8b"), name="small", layers=2)
LENGTHS = st.one_of(
    st.lists(st.integers(1, 800), min_size=1, max_size=30),
    st.lists(st.sampled_from([1, 2, 64, 700, 6000]), min_size=1, max_size=12),
    st.builds(lambda n, count: [n] * count, st.integers(1, 900), st.integers(1, 20)),
)
RANKS = st.sampled_from([1, 2, 3, 6, 8, 14])


def lognormal(documents: int, seed: int = 0) -> np.ndarray:
    return np.minimum(np.random.default_rng(seed).lognormal(7, 1.3, documents).astype(int) + 1, 65_536)


@examples(30)
@given(LENGTHS, RANKS, st.floats(1, 6), st.sampled_from([0.0, 0.2]))
def test_every_document_is_in_one_micro_batch_within_the_rows(lengths, ranks, times, slack) -> None:
    most = max(-(-max(lengths) // ranks), int(-(-sum(lengths) // ranks) / times))
    options = {"model": SMALL, "hardware": VAST, "token_slack": slack, "max_tokens_per_rank": most}
    found = plan_step(lengths, ranks, **options)
    np.testing.assert_array_equal(np.sort(np.concatenate([m.documents for m in found])), np.arange(len(lengths)))
    assert -(-sum(lengths) // (most * ranks)) <= len(found) <= len(lengths)
    for documents, plan in found:
        assert (np.diff(documents) > 0).all() and plan.ranks == ranks
        np.testing.assert_array_equal(plan.mask.lengths, np.array(lengths)[documents])
        tokens = plan.mask.tokens
        assert max(plan.layout.tokens(rank) for rank in range(ranks)) <= min(most, tokens * (1 + slack) // ranks + 1)
        assert plan == plan_batch(plan.mask.lengths, ranks, **options)


@examples(25)
@given(LENGTHS, RANKS, st.integers(1, 5), st.randoms(use_true_random=False))
def test_the_order_of_documents_changes_only_names(lengths, ranks, count, random) -> None:
    order = list(range(len(lengths)))
    random.shuffle(order)
    shuffled = [lengths[i] for i in order]
    options = {"model": SMALL, "hardware": VAST, "micro_batches": min(count, len(lengths))}
    one, other = (plan_step(batch, ranks, **options) for batch in (lengths, shuffled))
    seen = [
        sorted((sorted(m.plan.mask.lengths.tolist()), int(m.plan.forecast.ticks.total.max())) for m in found)
        for found in (one, other)
    ]
    assert seen[0] == seen[1]


def test_a_batch_that_fits_is_one_micro_batch() -> None:
    lengths = lognormal(50)
    (only,) = plan_step(lengths, 8, hardware=VAST)
    assert only.plan == plan_batch(lengths, 8, hardware=VAST)


@pytest.mark.parametrize(("documents", "ranks", "micro_batches"), [(200, 8, 5), (16_384, 16, 4)])
def test_micro_batches_take_equal_time_and_hold_long_and_short_documents(documents, ranks, micro_batches) -> None:
    lengths = lognormal(documents)
    most = int(lengths.sum() / ranks / (micro_batches - 0.1))
    found = plan_step(lengths, ranks, model=SMALL, hardware=VAST, max_tokens_per_rank=most)
    assert len(found) == micro_batches
    bounds = np.array([m.plan.forecast.bound for m in found])
    assert bounds.max() <= 1.02 * bounds.mean()
    middle = np.median(lengths)
    for m in found:
        assert 0.3 < (m.plan.mask.lengths > middle).mean() < 0.8
        assert m.plan.mask.lengths.max() > 4 * middle


def fewest_and_shortest(lengths: list[int], ticks: list[int], capacity: int, count: int) -> tuple[int, int | None]:
    """By trying everything: the fewest micro-batches, and the ticks of the slowest of so many."""
    fewest, shortest = len(lengths), None
    for target in itertools.product(range(len(lengths)), repeat=len(lengths)):
        if any(part > max(target[:i], default=-1) + 1 for i, part in enumerate(target)):
            continue  # the same with other names
        parts = max(target) + 1
        if max(np.bincount(target, lengths)) <= capacity:
            fewest = min(fewest, parts)
            if parts == count:
                slowest = int(max(np.bincount(target, ticks)))
                shortest = slowest if shortest is None else min(shortest, slowest)
    return fewest, shortest


@examples(20)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(1, 3), st.floats(1, 3))
def test_splits_are_near_the_best_of_all(lengths, count, times) -> None:
    capacity = max(max(lengths), int(sum(lengths) / times))
    ticks = [n * (n + 40) for n in lengths]
    fewest, _ = fewest_and_shortest(lengths, ticks, capacity, 0)
    found = split(np.array(lengths), np.array(ticks), 40, capacity=capacity)
    # what best fit by falling length guarantees (Johnson 1974, Fast algorithms for bin packing)
    assert fewest <= len(found) <= (11 * fewest + 6) // 9
    if count <= len(lengths):
        _, shortest = fewest_and_shortest(lengths, ticks, sum(lengths), count)
        parts = split(np.array(lengths), np.array(ticks), 40, capacity=sum(lengths), count=count)
        # what the largest first onto the least loaded guarantees (Graham 1969)
        assert len(parts) == count and 3 * max(sum(ticks[i] for i in part) for part in parts) <= 4 * shortest


def test_documents_without_a_token_are_in_no_micro_batch() -> None:
    lengths, options = [300, 0, 20, 500, 0, 80, 410, 7, 0], {"hardware": VAST, "max_tokens_per_rank": 400}
    some, found = np.flatnonzero(lengths), plan_step(lengths, 2, **options)
    without = plan_step([n for n in lengths if n], 2, **options)
    assert len(found) == 2
    for one, other in zip(found, without, strict=True):
        assert one.plan == other.plan and one.documents.tolist() == some[other.documents].tolist()


def test_lengths_that_fill_micro_batches_exactly_are_found() -> None:
    parts = split(np.array([60, 50, 40, 30, 20]), np.array([60, 50, 40, 30, 20]), 1, capacity=100)
    assert [part.tolist() for part in parts] == [[0, 2], [1, 3, 4]]


def test_masks_are_split_by_document() -> None:
    lengths = [300, 20, 500, 80, 410, 7]
    gemma = dataclasses.replace(SMALL, windows=(64, None))
    masks = [Mask(lengths, window=(64, None)), Mask(lengths)]
    options = {"hardware": VAST, "max_tokens_per_rank": 400}
    own = plan_step(lengths, 2, model=gemma, **options)
    given_ = plan_step(lengths, 2, model=gemma, masks=masks, **options)
    assert len(own) == 2
    for a, b in zip(own, given_, strict=True):
        assert a.plan == b.plan and a.documents.tolist() == b.documents.tolist()
    tokens = np.arange(sum(lengths))
    start = np.repeat(np.cumsum(lengths) - lengths, lengths)
    blocks = Mask.from_bounds(
        start,
        np.minimum(start + (tokens - start) // 16 * 16 + 16, start + np.repeat(lengths, lengths)),
        lengths=lengths,
    )
    for documents, plan in plan_step(lengths, 2, model=SMALL, masks=blocks, **options):
        assert plan.mask == blocks.pick(documents)


def test_bounds_that_cross_documents_are_kept_whole_or_refused() -> None:
    lengths = [300, 20, 80]
    mask = Mask.from_bounds(np.zeros(400, int), np.arange(400) + 1, lengths=lengths)
    (only,) = plan_step(lengths, 2, masks=mask, model=SMALL, hardware=VAST)
    assert only.plan.mask == mask
    with pytest.raises(ValueError, match="see keys of other documents"):
        plan_step(lengths, 2, masks=mask, model=SMALL, hardware=VAST, max_tokens_per_rank=150)


def test_a_model_by_name_recomputes_as_little_as_its_micro_batches_allow() -> None:
    lengths = [12_000] * 40
    least = plan_step(lengths, 1)
    assert len(least) == 40 and all(m.plan.forecast.model.recompute == "none" for m in least)
    fewer = plan_step(lengths, 1, micro_batches=4)
    assert len(fewer) == 4 and all(m.plan.forecast.model.recompute == "full" for m in fewer)


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([100, 900, 100], {"max_tokens_per_rank": 100}, "document 1 has 900 tokens.* at most 400.* at least 9 ranks"),
        ([100, 900], {"max_tokens_per_rank": 100}, "9 ranks, documents of at most 400 tokens, or a larger max_"),
        ([100, 100, 300], {"max_tokens_per_rank": 100, "micro_batches": 1}, "micro_batches=1 .* give at least 2"),
        ([100, 100, 300], {"micro_batches": 4}, "micro_batches=4 for 3 documents"),
        ([100], {"micro_batches": 0}, "micro_batches must be an integer of at least 1"),
        ([100], {"max_tokens_per_rank": 0}, "max_tokens_per_rank must be an integer"),
        ([100, -1], {}, "lengths must be at least 0"),
        ([100], {"masks": Mask([101])}, "the batch's documents"),
        ([100], {"hardware": dataclasses.replace(Hardware.preset("h100"), reserve=73 * 10**9)}, "no row fits"),
    ],
)  # fmt: skip
def test_what_cannot_be_split_says_what_can(lengths, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        plan_step(lengths, 4, **options)


@pytest.mark.exhaustive
def test_every_process_makes_the_same_micro_batches() -> None:
    lengths = lognormal(300).tolist()
    code = f"from seqpar import plan_step; print(*(m.plan.digest() for m in plan_step({lengths}, 12)))"
    env = os.environ | {"PYTHONHASHSEED": "1", "NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3 AVX512F AVX512_SKX"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = plan_step(lengths, 12)
    assert len(found) > 1 and done.stdout.split() == [m.plan.digest() for m in found]
