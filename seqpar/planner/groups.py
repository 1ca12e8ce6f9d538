"""The groups of ranks that hold the long documents: each document whole on the least loaded group, cut if too large.

Largest first onto the least loaded: Graham 1969 (Bounds on multiprocessing timing anomalies). All decisions use
integers; ties go by index.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple, TypeVar

import numpy as np

from seqpar.facts.value import Ints
from seqpar.plan.routes import TAPERED

Count = TypeVar("Count", int, Ints)


class RankShares(NamedTuple):
    """Parts of documents: the document, its rows from first to stop, and the group that takes them."""

    document: Ints
    first: Ints
    stop: Ints
    group: Ints


class Fetching(NamedTuple):
    """What keys from other groups cost the ranks of a group, in ticks.

    key: of a fetched row; merge: of a row that sees fetched keys, every second stage; stage: of a stage on each rank.
    wait: of a row that comes or goes, whichever are more. rows: of a stage of one head share. width: ranks of a group.
    """

    key: int
    merge: int
    stage: int
    rows: int
    wait: int = 0
    width: int = 1

    def busy(self, keys: Count, merging: Count) -> Count:
        """Ticks in which each rank of a group computes on its fetched keys. merging: rows that see them."""
        stages = -(-keys // (self.rows * self.width))
        launched = stages + 2 * (keys >= TAPERED * (stages + (stages == 0)))
        return (self.key * keys + self.merge * merging * ((launched + 1) // 2)) // self.width + self.stage * launched

    def waiting(self, keys: Count, sent: Count) -> Count:
        """Ticks in which each rank of a group waits for the keys that the group fetches and sends."""
        return self.wait * ((keys + sent + abs(keys - sent)) // 2) // self.width

    @staticmethod
    def of_part(length: Count, first: Count, held: Count) -> tuple[Count, Count, Count]:
        """Keys, merging rows and sent keys of a zigzag part of ``held`` rows; the parts before have ``first`` rows."""
        # the first part begins with rows that see its own keys alone
        return length - first // 2 - held, held - held // 2 * (first == 0), (length + first - held) // 2

    def shared(self, length: int, groups: int) -> list[int]:
        """Ticks of all ranks of each of some groups that share a document evenly."""
        if groups == 1:
            return [0]
        held = length // groups
        ticks = []
        for nth in (0, groups // 2):
            keys, merging, sent = self.of_part(length, nth * held, held)
            ticks.append(self.width * (self.busy(keys, merging) + self.waiting(keys, sent)))
        return ticks[:1] + ticks[1:] * (groups - 1)


def grouped(lengths: Ints, ticks: Ints, *, fetch: Fetching, room: Ints, part: int) -> RankShares:
    """Balance the documents' ticks over groups, largest document first; returns the parts that groups take.

    room: rows that each group may take. part: the most ticks of a group, as long as no cut would save less than it
    fetches.
    """
    left = room.tolist()
    heap = [(0, group) for group in range(len(left))]  # load, group
    full: list[tuple[int, int, int]] = []  # groups without the rows for a whole document: -left, load, group
    parts = []
    for document, (length, extra) in enumerate(zip(lengths.tolist(), ticks.tolist(), strict=True)):
        while full and -full[0][0] >= length:
            heappush(heap, heappop(full)[1:])
        toll = min(fetch.key * length, extra // 2)
        whole = not heap or extra <= max(part - heap[0][0], 4 * toll)
        while whole and heap and left[heap[0][1]] < length:
            load, group = heappop(heap)
            heappush(full, (-left[group], load, group))
        if heap and whole:
            load, group = heap[0]
            heapreplace(heap, (load + extra, group))
            left[group] -= length
            parts.append((document, 0, length, group))
            continue
        taken = _fewest(heap, extra, toll, part)
        shares = _levelled(taken, extra, fetch.shared(length, len(taken))) if taken else []
        if not taken:
            taken, shares = _roomiest(full, length)
        edge, so_far, total = 0, 0, sum(shares)
        for (load, group), share in zip(taken, shares, strict=True):
            so_far += share
            first, edge = edge, length * so_far // total
            if edge > first:
                parts.append((document, first, edge, group))
                left[group] -= edge - first
                load += extra * share // total
            heappush(heap, (load, group))
    return RankShares(*np.array(parts, np.int64).reshape(-1, 4).T)


def _fewest(heap: list[tuple[int, int]], extra: int, toll: int, part: int) -> list[tuple[int, int]]:
    """The fewest least loaded groups that share a document within their part; none if no group is left.

    One more group is only added if each still takes more ticks than its toll.
    """
    taken = [heappop(heap)] if heap else []
    total = taken[0][0] + extra if taken else 0
    while heap and total > max(part, heap[0][0] + 2 * toll) * len(taken):
        taken.append(heappop(heap))
        total += taken[-1][0] + toll
    return taken


def _levelled(taken: list[tuple[int, int]], extra: int, tolls: list[int]) -> list[int]:
    """The ticks of a document that level groups, if each also pays its toll."""
    loads = [load + min(toll, extra // 2) for (load, _), toll in zip(taken, tolls, strict=True)]
    level = (sum(loads) + extra) // len(taken)
    shares = [max(level - load, 0) for load in loads]
    return shares if any(shares) else [1] * len(taken)


def _roomiest(full: list[tuple[int, int, int]], length: int) -> tuple[list[tuple[int, int]], list[int]]:
    """The groups with most free rows that together have room for a document, or all groups; and the rows of each."""
    taken: list[tuple[int, int]] = []
    shares: list[int] = []
    while full and sum(shares) < length:
        rows, load, group = heappop(full)
        taken.append((load, group))
        shares.append(max(-rows, 1))
    return taken, shares


def least_loaded(lengths: Ints, extra: Ints, load: list[int], left: list[int]) -> Ints:
    """The rank of each document in turn: the least loaded rank with enough rows, or -1.

    extra: the load that each document adds. left: free rows of the ranks, updated in place.
    """
    ranks = len(load)  # heap entries are load * ranks + rank: one number compares faster than two
    heap = [ticks * ranks + rank for rank, ticks in enumerate(load) if left[rank] > 0]
    heapify(heap)
    full: list[tuple[int, int]] = []  # ranks too full for the last document: -left, and the heap entry
    chosen = []
    # may exceed int64
    for length, more in zip(lengths.tolist(), [ranks * more for more in extra.tolist()], strict=True):
        while full and -full[0][0] >= length:
            heappush(heap, heappop(full)[1])
        while heap:
            least = heap[0]
            rank = least % ranks
            if left[rank] >= length:
                break
            heappush(full, (-left[rank], heappop(heap)))
        else:
            chosen.append(-1)
            continue
        heapreplace(heap, least + more)
        left[rank] -= length
        chosen.append(rank)
    return np.array(chosen, np.int64)


def beyond(ticks: Ints, per_row: int, lengths: Ints) -> Ints:
    """Documents' cost beyond ``per_row`` per row; if far below zero, any negative number."""
    return ticks - np.minimum(per_row, ticks // lengths + 1) * lengths


def borders(edge: Ints, groups: int) -> Ints:
    """The end of each group's part of the line, moved to a document's end where only a sliver would be cut."""
    total = int(edge[-1])
    border = np.array([total * group // groups for group in range(groups + 1)])
    sliver = max(1, total // (32 * groups))
    near_by = edge.searchsorted(border)
    for side in (np.maximum(near_by - 1, 0), np.minimum(near_by, edge.size - 1)):
        border = np.where(np.abs(edge[side] - border) < sliver, edge[side], border)
    return np.maximum.accumulate(border)
