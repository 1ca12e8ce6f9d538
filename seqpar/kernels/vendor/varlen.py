"""The segments of a step as calls of a library: which go together, and what lies between them.

A call covers consecutive query rows and consecutive key rows. Segments in it ascend on both sides and do not overlap;
rows and keys between two of them become sequences of their own, with no keys and with no queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqpar.facts.tiles import Kind, Segments
from seqpar.kernels.memory.upload import upload
from seqpar.kernels.protocol import StepFacts


class Piece(NamedTuple):
    """``n`` query rows from ``q`` on over ``m`` keys from ``k`` on. left, right: of the diagonal, -1 for no limit."""

    q: int
    n: int
    k: int
    m: int
    left: int = -1
    right: int = -1

    @property
    def mask(self) -> tuple[int, int]:
        """What pieces of one call have in common."""
        return self.left, self.right

    def seen(self) -> np.ndarray:
        """Which of the rows see a key, bool [n]."""
        at = np.arange(self.n) + self.m - self.n  # the diagonal, aligned at the end
        first = np.zeros(self.n, np.int64) if self.left < 0 else np.maximum(at - self.left, 0)
        stop = np.full(self.n, self.m) if self.right < 0 else np.minimum(at + self.right + 1, self.m)
        return first < stop


@dataclass(frozen=True, eq=False)
class VarlenCall:
    """One call: ``cu_q, cu_k`` int32 [sequences + 1] of the query rows and key rows that the slices take from a step.

    cu_q and cu_k are None for libraries that take one segment at a time. max_q, max_k: bounds of the lengths. left,
    right: the window that all sequences have; -1 for no limit, and right 0 with no left is causal. again: some of these
    rows see keys in a call before. seen: bool [rows] on the device, the rows that see a key in this call; None if all.
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
        """Whether keys end at the diagonal and nothing else bounds them."""
        return self.left < 0 and self.right == 0


@dataclass(frozen=True, eq=False)
class VarlenCalls:
    """The calls of a step. segments: how many there are. covers: every query row sees a key. keys_again: some key is in
    two segments, so that its gradients are a sum over calls, or cannot be made in one."""

    calls: tuple[VarlenCall, ...]
    segments: int
    covers: bool
    keys_again: bool

    @property
    def again(self) -> bool:
        """Whether some row has keys in several calls."""
        return any(call.again for call in self.calls)


def calls_of(facts: StepFacts, device: torch.device, *, varlen: bool, squares: bool) -> VarlenCalls | None:
    """A step as calls, made once; None if its bounds make no segments, or windows and the library has only squares."""
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
            max_q = max(max_q, 2)  # all of one row is a special case of FlashAttention-2, which gaps do not fit
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
    """Segments as pieces; for a library of squares a causal one is a rectangle and a square of rows that see a key."""
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
    """Pieces, ascending in rows, in as few groups as first-fit finds in which all have one mask and keys ascend."""
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
    """Query rows, key rows, and int64 [2, sequences] lengths on both sides, what lies between pieces included."""
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
