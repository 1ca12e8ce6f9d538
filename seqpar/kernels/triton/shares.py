"""How dk and dv of a step are shared among programs: the order of key tiles, and the parts into which each is cut.

A device starts programs in the order of their table, each in the first slot that is free, so the launch ends late if
a long program starts late. A prompt or a sink is seen by every query of a batch, and its key tiles are such programs.
There are two tables, and the one whose launch ends first is taken::

    by head    heads one after another; all key tiles cut alike, if there are too few to fill the device
    by tile    tiles that exceed a half of a slot's work, or less, are cut, and all heads' programs ordered by length

The unit of work is the visit of a full tile. `bench/gpu/waves.py` compares this with the times of an H200 and says how
the coefficients were fitted. Source: Graham 1969, Bounds on multiprocessing timing anomalies.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from seqpar.facts.tiles import Tiles
from seqpar.facts.value import Ints

Floats = NDArray[np.float64]

MASKED, SKIPPED, PROGRAM = 1.6, 0.1, 8.0  # work of a masked visit, of a tile in range that is not visited, of a program
ALONE = 0.6  # work of a program that has a multiprocessor to itself, where two fit, over that beside another
SUMMED = 8.0, 1 / 16  # work until parts are summed: of the launch, and of each part of a tile
LEAST = 4 * PROGRAM  # work of a part
TAIL = (
    0.1  # of the launch after the mean of all slots, up to which a table by head is taken without a look at the other
)
FINER, NEAR = (
    (2, 4, 8),
    1.05,
)  # parts of a slot's work that are tried; until the launch takes so much more than the mean
GAIN = 0.97  # of the time by head, below which a table by tile is taken: the model is no finer


class KeyShares(NamedTuple):
    """The programs of one key head, or of all if by tile, in the order of their launch.

    parts [key tiles]: into which each is cut. tile, part [rows]: of the rows of the table. by_tile: a row has programs
    for all key heads, one after another; otherwise the rows of a key head follow each other.
    """

    parts: Ints
    tile: Ints
    part: Ints
    by_tile: bool


def shares(t: Tiles, kv_heads: int, group: int, processors: int, each: int) -> KeyShares:
    """The shares of a launch.

    group: query heads of a key head. processors: streaming multiprocessors of the device. each: programs that one of
    them runs at once.
    """
    slots, alone = processors * each, ALONE if each > 1 else 1.0
    work = key_work(t) * group
    longest = int((t.q_end - t.q_begin).max(initial=0)) * group
    alike = evenly(work.size * kv_heads, longest, processors)
    by_head = KeyShares(np.full(work.size, alike), *_rows(t.q_order, alike), False)
    cost = np.repeat(work[t.q_order] / alike + PROGRAM, alike)
    mean = cost.sum() * kv_heads / slots
    if alone * (_latest(cost, mean - cost.sum() / slots, 1, slots) - mean) <= TAIL * mean:
        return by_head
    best, least = by_head, GAIN * (_end(np.tile(cost, kv_heads), slots, alone) + summing(by_head.parts))
    for finer in FINER:
        parts = np.maximum(np.ceil(work / max(LEAST, work.sum() * kv_heads / slots / finer)), 1).astype(np.int64)
        cut = np.repeat(work / parts + PROGRAM, parts)
        order = np.argsort(-cut, kind="stable")
        whole = cut.sum() * kv_heads / slots
        end = whole + alone * (_latest(cut[order], 0.0, kv_heads, slots) - whole) + summing(parts)
        if end < least:
            tile, part = _rows(np.arange(work.size), parts)
            best, least = KeyShares(parts, tile[order], part[order], True), end
        if end <= NEAR * mean:
            break
    return best


def evenly(programs: int, work: int, processors: int) -> int:
    """The number of parts into which each program's work is split, so that all parts fill the processors twice.

    programs: their number before splitting. work: tiles that the longest of them visits; each part visits at least one.
    processors: streaming multiprocessors of the device.
    """
    return max(1, min(-(-2 * processors // max(programs, 1)), work, 16))


def key_work(t: Tiles) -> Floats:
    """The work of each key tile for one query head."""
    full, span = t.q_full_end - t.q_full_begin, t.q_end - t.q_begin
    if t.q_exact:
        return full + MASKED * (span - full)
    by = t if t.stretches is None else t.stretches
    begun, ended = (np.bincount(x, minlength=span.size + 1) for x in (by.begin, by.end))
    visits = np.cumsum(begun - ended)[: span.size]
    return full + MASKED * (visits - full) + SKIPPED * (span - visits)


def _rows(tiles: Ints, parts: Ints | int) -> tuple[Ints, Ints]:
    """Tile and part of each row, tile by tile. parts: of each tile."""
    tile = np.repeat(tiles, parts)
    first = np.cumsum(np.broadcast_to(parts, tiles.shape)) - parts
    return tile, np.arange(tile.size) - np.repeat(first, parts)


def summing(parts: Ints) -> float:
    """The work until the parts of tiles are summed; 0 if none is cut."""
    most = int(parts.max(initial=1))
    return SUMMED[0] + SUMMED[1] * most if most > 1 else 0.0


def _latest(costs: Floats, begin: float, times: int, slots: int) -> float:
    """A limit of the end of programs that start from the time begin on, each so many times.

    Until a program starts, all slots are busy with those before it, so it starts no later than their mean says.
    """
    return begin + float(((np.cumsum(costs) * times - costs) / slots + costs).max(initial=0.0))


def _end(costs: Floats, slots: int, alone: float) -> float:
    """When the last program ends. After the mean of all slots, programs have their multiprocessor to themselves."""
    free = [0.0] * slots
    for cost in costs.tolist():
        heapq.heapreplace(free, free[0] + cost)
    mean = float(costs.sum()) / slots
    return mean + alone * (max(free) - mean)
