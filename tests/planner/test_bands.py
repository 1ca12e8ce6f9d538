"""Masks of trees and of several bands are planned by their exact pairs, keys, launches and merged rows."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from seqpar import Layout, Mask, Plan
from seqpar.plan.counts import tally
from seqpar.planner import Hardware, ModelShape, plan_batch
from seqpar.planner.bound import document_ticks, launches_in, lower_bound
from seqpar.planner.cost import Weights, counted, ticks
from seqpar.planner.count import again, areas
from seqpar.planner.problem import layers_of

H100 = dataclasses.replace(Hardware.preset("h100"), memory=1 << 50)
SHAPE = dataclasses.replace(ModelShape.preset("llama-8b"), layers=3)
W = Weights.of(SHAPE, H100)
LENGTHS = [9000, 300, 40]
LAMBDA = Mask(LENGTHS, window=(255, None), sink_tokens=64)
GROUPS = [(2000, [500, 900, 700]), (30, [4, 5, 6])]


def attention(mask: Mask, layout: Layout) -> np.ndarray:
    """Ticks of each rank's attention, with all keys of other ranks in one stage."""
    widths = np.ones(len(mask.lengths), np.int64)
    found = counted(layers_of(mask.lengths, mask, SHAPE), layout, widths=widths, node=8, forwarded=False)
    return ticks(found, W, stage_bytes=1 << 40).attention


def test_a_further_band_costs_a_launch_and_the_rows_that_it_merges() -> None:
    bands = len(LAMBDA.bands)
    assert bands == 2 and launches_in([(LAMBDA, 3), (Mask(LENGTHS), 2)]) == 8
    # the rows whose window begins after the sinks
    assert again(LAMBDA).tolist() == [max(n - 255 - 64 - 1, 0) for n in LENGTHS]
    rows, pieces = LAMBDA.tokens + int(again(LAMBDA).sum()), LAMBDA.breaks.size
    pairs = W.both.pair * LAMBDA.area() + W.both.query * rows + W.both.piece * pieces
    stage = W.forward.stage + W.backward.stage
    found = attention(LAMBDA, Layout.contiguous(LAMBDA.tokens, 1))
    assert found.tolist() == [3 * (bands * stage + pairs)]
    layers = layers_of(LAMBDA.lengths, LAMBDA, SHAPE)
    assert document_ticks(layers, W).sum() <= found.sum() - 3 * bands * stage + LAMBDA.tokens * W.per_row
    assert plan_batch(LAMBDA, 1, model=SHAPE, hardware=H100).forecast.bound == lower_bound(layers, W, 1)


def test_fetched_keys_of_a_further_band_are_merged_too() -> None:
    mask = Mask([4096], window=(255, None), sink_tokens=64)
    layout = Layout.contiguous(4096, 2)
    found = tally(mask, layout)
    # the second rank sees sinks from all of its rows, and windows from the first 255
    assert found.keys.tolist() == [0, 64 + 255] and found.again.tolist()[1] == 0
    assert found.merging[1] >= 2048 + 255 and found.far[1] == 2048 * 64 + 255 * 256 // 2
    stage = W.forward.stage + W.backward.stage
    one = mask.bands[0]
    assert one.until is None
    both = attention(mask, layout)[1]
    alone = (
        W.both.pair * (found.near + found.far)[1]
        + W.both.query * 2048
        + W.both.key * 319
        + W.both.piece * found.pieces[1]
    )
    launches = stage * 2 * 2  # two bands of the rank's own keys, and of the fetched ones
    assert both == 3 * (launches + alone + W.both.merge * found.merging[1])


@pytest.mark.parametrize(
    "mask",
    [
        LAMBDA,
        Mask.shared_prefix(GROUPS),
        LAMBDA | Mask.from_slices([[9000, 9300]], [[9000, 9300]], ["causal"], tokens=9340, lengths=LENGTHS),
        Mask.tree([50, 20, 0, 30, 10, 25], [-1, 0, 1, 1, 0, -1], window=(40, None)),
    ],
    ids=["lambda", "answers", "union", "tree"],
)
def test_trees_and_unions_are_planned_by_exact_pairs_and_keys(mask: Mask) -> None:
    assert areas(mask).sum() == mask.area()
    plan = plan_batch(mask, 4, model=SHAPE, hardware=H100)
    assert plan.mask == mask and plan.forecast.gap >= 0
    found = tally(mask, plan.layout)
    assert (found.near + found.far).sum() == mask.area()
    if np.all(plan.ulysses == 1):
        received = [sum(len(step.pos) for step in plan.steps(rank) if not step.local) for rank in range(4)]
        assert found.keys.tolist() == received


def test_the_keys_of_a_prompt_move_once_to_the_ranks_of_its_answers() -> None:
    prompt, answers = 1000, [300] * 8
    mask = Mask.shared_prefix([(prompt, answers)])
    assert mask.tokens == prompt + sum(answers)
    # the prompt on rank 0, four answers on each of the others
    layout = Layout.from_pieces([0, 1000, 2200], [1000, 1200, 1200], [0, 1, 2], 3)
    found = tally(mask, layout)
    assert found.keys.tolist() == [0, prompt, prompt] and found.sent.tolist() == [2 * prompt, 0, 0]
    assert found.far.tolist() == [0, 1200 * prompt, 1200 * prompt]
    plan = Plan(mask, layout)
    size = {"heads": 32, "kv_heads": 8, "dim": 128, "dtype": "bfloat16"}
    assert [plan.bytes(rank, **size) for rank in range(3)] == [2 * prompt * 2 * 8 * 128 * 2, 0, 0]


def test_a_tree_is_planned_to_take_less_than_its_sequences() -> None:
    prompt, answers = 8000, [1000, 2000, 3000, 1500, 2500, 800, 1200, 4000]
    tree = plan_batch(Mask.shared_prefix([(prompt, answers)]), 4, model=SHAPE, hardware=H100)
    alone = plan_batch([prompt + n for n in answers], 4, model=SHAPE, hardware=H100)
    assert tree.forecast.seconds < 0.4 * alone.forecast.seconds
