"""The fastest choice of a rung for each block of a model that fits memory, and the simpler choices beside it.

A block on a rung holds ``held`` bytes from its forward to its backward, which works with ``working`` bytes beside what
the blocks before it hold. Memory is therefore a limit on every prefix::

    least  sum of seconds[j, o_j]
    with   held[0, o_0] + ... + held[j - 1, o_(j-1)] + working[j, o_j] <= limits[j]     for every block j
           held[0, o_0] + ... + held[N - 1, o_(N-1)]                   <= limits[N]     at the loss

`optimum` is exact: dynamic programming over the pairs (bytes held, seconds) of which none is better in both. What
cannot beat a known choice is dropped by a Lagrangian bound: any choice for the blocks to come that holds at most b
bytes takes at least ``sum of min_o (seconds + price * held) - price * b``, for every price of a byte.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

PRICES = 64  # of a byte, for the bound
BINS = 1024  # of memory in `knapsack`


@dataclass(frozen=True)
class Blocks:
    """Rungs of every block: bytes held and worked with, int64, and seconds, all ``[blocks, rungs]``; limits, int64."""

    held: NDArray[np.int64]
    working: NDArray[np.int64]
    seconds: NDArray[np.float64]
    limits: NDArray[np.int64]

    def time(self, rungs: NDArray[np.int64]) -> float:
        """Seconds of one rung for each block; inf if it does not fit."""
        at = np.arange(len(rungs))
        before = np.concatenate([[0], np.cumsum(self.held[at, rungs])])
        fits = (before[:-1] + self.working[at, rungs] <= self.limits[:-1]).all() and before[-1] <= self.limits[-1]
        return float(self.seconds[at, rungs].sum()) if fits else np.inf


class Choice(NamedTuple):
    """A rung for each block, and their seconds. Without a choice that fits: inf and no rungs."""

    seconds: float
    rungs: tuple[int, ...]


NONE = Choice(np.inf, ())


def everywhere(blocks: Blocks, rung: int) -> Choice:
    """One rung for all blocks."""
    seconds = blocks.time(rungs := np.full(len(blocks.held), rung))
    return Choice(seconds, tuple(rungs.tolist())) if seconds < np.inf else NONE


def two_rungs(blocks: Blocks, pairs: list[tuple[int, int]] | None = None) -> Choice:
    """The best of n first blocks on one rung and the rest on another. pairs: that are tried, by default all."""
    count, rungs = blocks.held.shape
    best = NONE
    for first, rest in pairs or list(itertools.product(range(rungs), repeat=2)):
        for n in range(count + 1):
            chosen = np.where(np.arange(count) < n, first, rest)
            if (seconds := blocks.time(chosen)) < best.seconds:
                best = Choice(seconds, tuple(chosen.tolist()))
    return best


def brute(blocks: Blocks) -> Choice:
    """The best of all choices, one after the other."""
    count, rungs = blocks.held.shape
    every = itertools.product(range(rungs), repeat=count)
    seconds, best = min((blocks.time(np.array(chosen)), chosen) for chosen in every)
    return Choice(seconds, best) if seconds < np.inf else NONE


def knapsack(blocks: Blocks) -> Choice:
    """OSDP's dynamic programming over bins of memory (Jiang et al. 2022): bytes are a sum, and a block has no place.

    So that the choice fits, the most that any block works with counts beside what all of them hold.
    """
    best, limit = NONE, int(blocks.limits.min())
    for most in np.unique(blocks.working):
        room = limit - int(most)
        if room < 0:
            continue
        size = room // BINS + 1
        bins = -(-blocks.held // size)  # rounded up
        table, trail = np.zeros(BINS + 1), []
        for held, works, seconds in zip(bins, blocks.working, blocks.seconds, strict=True):
            options = np.full((len(held), BINS + 1), np.inf)
            for rung in np.flatnonzero((works <= most) & (held <= BINS)):
                options[rung, held[rung] :] = table[: BINS + 1 - held[rung]] + seconds[rung]
            trail.append(options.argmin(0))
            table = options.min(0)
        if table[at := room // size] < best.seconds:
            chosen = []
            for held, taken in zip(bins[::-1], trail[::-1], strict=True):
                chosen.append(int(taken[at]))
                at -= held[chosen[-1]]
            best = Choice(blocks.time(np.array(chosen[::-1])), tuple(chosen[::-1]))
    return best


def optimum(blocks: Blocks) -> Choice:
    """The fastest choice that fits."""
    known = two_rungs(blocks)
    prices = _prices(blocks)
    later = _suffixes((blocks.seconds + prices[:, None, None] * blocks.held).min(2).T)  # [blocks + 1, prices]
    least = _suffixes(blocks.held.min(1))  # bytes that the blocks to come hold at least
    held, seconds, trail = np.zeros(1, np.int64), np.zeros(1), []
    for j in range(len(blocks.held)):
        state, rung = np.nonzero(held[:, None] + blocks.working[j] <= blocks.limits[j])
        bytes_, time = held[state] + blocks.held[j, rung], seconds[state] + blocks.seconds[j, rung]
        room = blocks.limits[-1] - bytes_
        bound = time + (later[j + 1] - prices * room[:, None]).max(1)
        keep = np.flatnonzero((room >= least[j + 1]) & (bound <= known.seconds * (1 + 1e-12)))
        keep = keep[np.lexsort((time[keep], bytes_[keep]))]
        fastest = np.minimum.accumulate(time[keep])
        keep = keep[np.concatenate([[True], time[keep][1:] < fastest[:-1]])] if len(keep) else keep
        held, seconds = bytes_[keep], time[keep]
        trail.append((state[keep], rung[keep]))
    if not len(held):
        return NONE
    at, chosen = int(seconds.argmin()), []
    for states, rungs in reversed(trail):
        chosen.append(int(rungs[at]))
        at = int(states[at])
    return Choice(blocks.time(np.array(chosen[::-1])), tuple(chosen[::-1]))


def _prices(blocks: Blocks) -> NDArray[np.float64]:
    """Prices of a byte at which some block changes its rung, and 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        gained = blocks.seconds[:, :, None] - blocks.seconds[:, None]
        prices = gained / (blocks.held[:, None] - blocks.held[:, :, None])
    prices = np.unique(prices[np.isfinite(prices) & (prices > 0)])
    picked = np.unique(np.linspace(0, len(prices) - 1, PRICES).round().astype(int)) if len(prices) else []
    return np.concatenate([[0.0], prices[picked]])


def _suffixes(values: NDArray[np.float64] | NDArray[np.int64]) -> NDArray[np.float64]:
    """Sums of ``values[j:]`` for every j to the length."""
    return np.concatenate([np.cumsum(values[::-1], axis=0)[::-1], np.zeros((1, *values.shape[1:]))])


def random_blocks(rng: np.random.Generator) -> Blocks:
    """2 to 6 blocks of 2 to 4 rungs, tight enough that about half of them fit."""
    shape = tuple(rng.integers((2, 2), (7, 5)))
    held = rng.integers(0, 100, shape)
    limits = np.full(shape[0] + 1, rng.integers(60, 80 * shape[0]))
    limits[:-1] -= np.cumsum(rng.integers(0, 5, shape[0]))[::-1]
    return Blocks(held, held + rng.integers(0, 120, shape), rng.random(shape).round(3), limits)
