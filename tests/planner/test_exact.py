"""The exact choice of a rung for each block, against brute force, and two rungs against it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bench.planner.exact import Blocks, Choice, brute, everywhere, knapsack, optimum, random_blocks, two_rungs
from bench.planner.rungs import RUNGS, SLOWER, TRAINING, blocks_of, cases, fitted
from seqpar.planner.memory import Memory
from seqpar.planner.problem import STAGE_BYTES


def test_the_optimum_is_that_of_brute_force() -> None:
    rng, fits = np.random.default_rng(1), 0
    for _ in range(60):
        blocks = random_blocks(rng)
        best, simpler = brute(blocks), [two_rungs(blocks), knapsack(blocks), everywhere(blocks, 0)]
        found = optimum(blocks)
        assert found.seconds == best.seconds
        assert all(choice.seconds >= best.seconds for choice in simpler)
        for choice in (found, *simpler):
            assert not choice.rungs or blocks.time(np.array(choice.rungs)) == choice.seconds
        fits += best.seconds < np.inf
    assert 20 < fits < 50


def test_a_block_has_a_place_which_a_sum_of_bytes_does_not_see() -> None:
    """Of two equal blocks only the last may hold much: when it is computed backward, the first holds little."""
    blocks = Blocks(np.array([[1, 6]] * 2), np.array([[6, 6]] * 2), np.array([[1.0, 0.0]] * 2), np.array([7, 7, 9]))
    assert optimum(blocks) == two_rungs(blocks) == Choice(1.0, (0, 1))
    assert blocks.time(np.array([1, 0])) == np.inf
    assert knapsack(blocks).seconds == np.inf


def test_two_rungs_are_as_fast_as_a_choice_for_each_block() -> None:
    for model, machine, lengths, ranks in cases(8, seed=1):
        blocks, head = blocks_of(model, machine, lengths, ranks)
        best, two = optimum(blocks), fitted(blocks, model, machine, lengths, ranks)
        assert best.seconds <= two.seconds and two.seconds + head <= (1 + SLOWER) * (best.seconds + head)


def test_blocks_need_the_bytes_that_the_planner_counts() -> None:
    """For n first blocks on a rung and the rest on another."""
    rng = np.random.default_rng(0)
    for model, machine, lengths, ranks in cases(2, seed=2):
        blocks, _ = blocks_of(model, machine, lengths, ranks)
        for _ in range(20):
            (first, rest), n = rng.integers(len(RUNGS), size=2), int(rng.integers(1, model.layers))
            shape = replace(model, recompute=RUNGS[rest])
            memory = Memory.of(shape, machine, STAGE_BYTES[-1], TRAINING, ranks, first=(n, RUNGS[first]))
            fits = blocks.time(np.where(np.arange(model.layers) < n, first, rest)) < np.inf
            assert fits == (sum(lengths) // ranks <= memory.rows)
