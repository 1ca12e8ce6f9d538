"""A step's segments as varlen calls of a library.

A call covers consecutive query rows and consecutive key rows. Its segments ascend on both sides without overlap; rows
between two segments become a sequence without keys, and keys between them one without queries. For two segments:

    query rows   |  segment 0  | gap |  segment 1  |
    key rows     |  segment 0  |  gap  |  segment 1  |
    cu_q, cu_k   4 sequences: segment 0, the query gap without keys, the key gap without queries, segment 1
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqpar.facts.segments import Kind, Segments
from seqpar.kernels.memory.upload import upload
from seqpar.kernels.protocol import StepFacts


class Piece(NamedTuple):
    """``n`` query rows from ``q`` over ``m`` key rows from ``k``. left, right: reach from the diagonal, or -1."""

    q: int
    n: int
    k: int
    m: int
    left: int = -1
    right: int = -1

    @property
    def mask(self) -> tuple[int, int]:
        """The part of a piece that all pieces of one call must share."""
        return self.left, self.right

    def seen(self) -> np.ndarray:
        """Which of the rows see a key, bool [n]."""
        at = np.arange(self.n) + self.m - self.n  # the diagonal, aligned at the end
        first = np.zeros(self.n, np.int64) if self.left < 0 else np.maximum(at - self.left, 0)
        stop = np.full(self.n, self.m) if self.right < 0 else np.minimum(at + self.right + 1, self.m)
        return first < stop


@dataclass(frozen=True, eq=False)
class VarlenCall:
    """One call: ``cu_q, cu_k`` int32 [sequences + 1], relative to the query and key rows that the slices select.

    cu_q and cu_k are None for libraries that take one segment per call. max_q, max_k: bounds of the lengths. left,
    right: the window of all sequences, -1 if unlimited; right 0 without a left limit is causal. again: some of the rows
    also see keys in an earlier call. seen: bool [rows] on the device, the rows that see a key here; None if all do.
    """

    rows: slice
    keys: slice
    max_q: int
    max_k: int
    left: int
    right: int
    again: bool
    seen: Tensor | None
    cu_q: Tensor | None
    cu_k: Tensor | None

    @property
    def causal(self) -> bool:
        """Whether keys end at the diagonal and have no other limit."""
        return self.left < 0 and self.right == 0


@dataclass(frozen=True, eq=False)
class VarlenCalls:
    """The calls of a step.

    segments: their number. covers: every query row sees a key. keys_again: some key is in two segments, so its
    gradients are a sum over calls.
    """

    calls: tuple[VarlenCall, ...]
    segments: int
    covers: bool
    keys_again: bool

    @property
    def again(self) -> bool:
        """Whether some row has keys in several calls."""
        return any(call.again for call in self.calls)


def calls_of(facts: StepFacts, device: torch.device, *, varlen: bool, squares: bool) -> VarlenCalls | None:
    """A step as calls, cached; None if its bounds form no segments, or need windows that the library lacks."""
    key = ("varlen calls", device, varlen, squares)
    return facts.memo(key, lambda: _calls(facts, device, varlen, squares))


def _calls(facts: StepFacts, device: torch.device, varlen: bool, squares: bool) -> VarlenCalls | None:
    s = facts.segments()
    if len(s.remainder) or (squares and (s.kind == Kind.WINDOW).any()):
        return None
    pieces = list(_pieces(s, squares))
    groups = _grouped(pieces) if varlen else [[p] for p in pieces]
    rows = len(facts.pos)
    taken = np.zeros(rows, bool)
    slices, arrays, masked = [], [], []
    for group in groups:
        q, k, lengths = _sequences(group)
        seen = np.zeros(q.stop - q.start, bool)
        for p in group:
            seen[p.q - q.start :][: p.n] = p.seen()
        again = bool((taken[q] & seen).any())
        taken[q] |= seen
        masked.append(not seen.all())
        max_q, max_k = lengths.max(1).tolist()
        if varlen:
            max_q = max(max_q, 2)  # FlashAttention-2 treats sequences of one row as special, which gaps do not fit
        slices.append((q, k, max_q, max_k, *group[0].mask, again))
        arrays += [seen] if masked[-1] else []
        arrays += list(np.cumsum(np.pad(lengths, ((0, 0), (1, 0))), 1)) if varlen else []
    tensors = iter(upload(arrays, device) if arrays else [])
    calls = []
    for bounds, some_see_none in zip(slices, masked, strict=True):
        seen_rows = next(tensors).bool() if some_see_none else None
        calls.append(VarlenCall(*bounds, seen_rows, *((next(tensors), next(tensors)) if varlen else (None, None))))
    starts = np.sort(s.k_row)
    keys_again = bool((np.sort(s.k_row + s.k_len)[:-1] > starts[1:]).any()) if len(starts) else False
    return VarlenCalls(tuple(calls), len(s.q_row), bool(taken.all()), keys_again)


def _pieces(s: Segments, squares: bool) -> Iterator[Piece]:
    """Segments as pieces; for a library of squares, a causal one becomes a rectangle and a square."""
    columns = (x.tolist() for x in (s.q_row, s.q_len, s.k_row, s.k_len, s.kind, s.left, s.right))
    for q, n, k, m, kind, left, right in zip(*columns, strict=True):
        if kind == Kind.WINDOW:
            yield Piece(q, n, k, m, left, right)
        elif kind == Kind.FULL:
            yield Piece(q, n, k, m)
        elif not squares:
            yield Piece(q, n, k, m, -1, 0)
        else:
            side = min(n, m)
            if m > n:
                yield Piece(q, n, k, m - n)
            yield Piece(q + n - side, side, k + m - side, side, -1, 0)


def _grouped(pieces: list[Piece]) -> list[list[Piece]]:
    """Pieces, ascending in rows, in groups with one mask and ascending keys: first-fit, so not always the fewest."""
    groups: list[list[Piece]] = []
    for p in pieces:
        for group in groups:
            last = group[-1]
            if last.mask == p.mask and last.k + last.m <= p.k and last.q + last.n <= p.q:
                group.append(p)
                break
        else:
            groups.append([p])
    return groups


def _sequences(group: list[Piece]) -> tuple[slice, slice, np.ndarray]:
    """Query rows, key rows, and the lengths of the sequences on both sides, int64 [2, sequences], gaps included."""
    first, last = group[0], group[-1]
    lengths: list[tuple[int, int]] = []
    q, k = first.q, first.k
    for p in group:
        if p.q > q:
            lengths.append((p.q - q, 0))
        if p.k > k:
            lengths.append((0, p.k - k))
        lengths.append((p.n, p.m))
        q, k = p.q + p.n, p.k + p.m
    return slice(first.q, last.q + last.n), slice(first.k, last.k + last.m), np.array(lengths).T
