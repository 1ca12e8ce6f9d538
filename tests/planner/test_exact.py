"""The exact choice of a rung for each block, against brute force."""

from __future__ import annotations

import numpy as np

from bench.planner.exact import Blocks, Choice, brute, everywhere, knapsack, optimum, random_blocks, two_rungs


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
