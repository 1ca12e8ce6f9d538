"""Segments: consecutive rows of a whole tensor of which each rank has a part, or all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class RowSegment(NamedTuple):
    """Consecutive rows of a whole tensor. cut: whether each rank has a part of them, or else all."""

    count: int
    cut: bool


RowSegments = tuple[RowSegment, ...]


class RowPlace(NamedTuple):
    """Where a tensor has rows: the dim, and the segments of the whole tensor there."""

    dim: int
    segments: RowSegments


def total(segments: Iterable[RowSegment]) -> int:
    """The rows of the whole tensor."""
    return sum([each.count for each in segments])


def part(count: int, rank: int, size: int) -> tuple[int, int]:
    """A rank's part of ``count`` rows: from where to where."""
    return count * rank // size, count * (rank + 1) // size


def ranges(segments: Iterable[RowSegment], rank: int, size: int) -> list[tuple[int, int]]:
    """The rows of a whole tensor that a rank has, from where to where in each segment."""
    found, at = [], 0
    for count, cut in segments:
        start, stop = part(count, rank, size) if cut else (0, count)
        found.append((at + start, at + stop))
        at += count
    return found


def is_cut(segments: Iterable[RowSegment]) -> bool:
    """Whether ranks have other rows."""
    return any([each.cut for each in segments])


def held(segments: Iterable[RowSegment], rank: int, size: int) -> int:
    """How many rows a rank has."""
    return sum([stop - start for start, stop in ranges(segments, rank, size)])
