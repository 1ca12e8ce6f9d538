"""The groups of ranks that hold the long documents: each document whole on the least loaded group, cut if too large.

Largest first onto the least loaded: Graham 1969 (Bounds on multiprocessing timing anomalies). All decisions use
integers; ties go by index.
"""

from __future__ import annotations

from heapq import heappop, heappush, heapreplace
from typing import NamedTuple

import numpy as np

from seqpar.facts.value import Ints


class RankShares(NamedTuple):
    """Parts of documents: the document, its rows from first to stop, and the group that takes them."""

    document: Ints
    first: Ints
    stop: Ints
    group: Ints


def grouped(lengths: Ints, ticks: Ints, *, fetch: int, room: Ints, part: int) -> RankShares:
    """Balance the documents' ticks over groups, largest document first; returns the parts that groups take.

    fetch: ticks of a fetched key row. room: rows that each group may take. part: the most ticks of a group, as long as
    no cut would save less than it fetches.
    """
    left = room.tolist()
    heap = [(0, group) for group in range(len(left))]  # load, group
    full: list[tuple[int, int, int]] = []  # groups without the rows for a whole document: -left, load, group
    parts = []
    for document, (length, extra) in enumerate(zip(lengths.tolist(), ticks.tolist(), strict=True)):
        while full and -full[0][0] >= length:
            heappush(heap, heappop(full)[1:])
        toll = min(fetch * length, extra // 2)
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
        taken, shares = _levelled(heap, extra, toll, part) if heap else _roomiest(full, length)
        edge = so_far = 0
        for (load, group), share in zip(taken, shares, strict=True):
            so_far += share
            first, edge = edge, length * so_far // sum(shares)
            if edge > first:
                parts.append((document, first, edge, group))
                left[group] -= edge - first
                load += extra * share // sum(shares)
            heappush(heap, (load, group))
    return RankShares(*np.array(parts, np.int64).reshape(-1, 4).T)


def _levelled(heap: list[tuple[int, int]], extra: int, toll: int, part: int) -> tuple[list[tuple[int, int]], list[int]]:
    """The fewest least loaded groups that share a document within their part, and the ticks that level them.

    One more group is only added if each still takes more ticks than its toll.
    """
    taken = [heappop(heap)]
    total = taken[0][0] + extra
    while heap and total > max(part, heap[0][0] + 2 * toll) * len(taken):
        taken.append(heappop(heap))
        total += taken[-1][0] + toll
    level = total // len(taken) - toll * (len(taken) > 1)
    shares = [max(level - load, 0) for load, _ in taken]
    return taken, shares if any(shares) else [1] * len(taken)


def _roomiest(full: list[tuple[int, int, int]], length: int) -> tuple[list[tuple[int, int]], list[int]]:
    """The groups with most free rows that together have room for a document, or all groups; and the rows of each."""
    taken: list[tuple[int, int]] = []
    shares: list[int] = []
    while full and sum(shares) < length:
        rows, load, group = heappop(full)
        taken.append((load, group))
        shares.append(max(-rows, 1))
    return taken, shares
