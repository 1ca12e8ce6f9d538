"""Recurrences in chunks of rows: matrix products inside a chunk, and one state from chunk to chunk.

With G the sum of log decays from the chunk's start, for rows i and j of a chunk and the state S that enters it::

    out_i = scale (sum over j <= i of exp(G_i - G_j) (q_i k_j) u_j   +   exp(G_i) q_i S)
    S    <- exp(G_end) S + sum over j of exp(G_end - G_j) k_j u_j^T

u is v without beta. With beta it solves a triangular system, which is affine in S::

    u_i + sum over j < i of beta_i exp(G_i - G_j) (k_i k_j) u_j = beta_i (v_i - exp(G_i) k_i S)        u = U - W S

`exp` is only taken of differences at or below 0, which are rounded once, from sums in float64. A chunk has rows of one
run alone, so nothing passes between documents. Chunks are sorted by their place in the run, and runs by their number of
chunks: the t-th chunks of all runs lie together, and continue a prefix of the chunks before them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqpar.facts.intervals import edges
from seqpar.facts.value import Ints
from seqpar.kernels.memory.upload import upload
from seqpar.kernels.recurrent.protocol import Recomputed, Recurrence, with_identity

ROWS = 64  # of a chunk, at most
LEAST = 16  # rows of a chunk, at least


@dataclass(frozen=True, eq=False)
class Chunks:
    """The chunks of some runs, on a device. sizes: chunks of each level.

    order: the runs, those with most chunks first; back: its inverse. final: the last chunk of each run, in that order.
    runs: the run of each chunk. numbers: of the chunks among those of all runs, None for all.
    """

    sizes: list[int]
    order: Tensor
    back: Tensor
    final: Tensor
    runs: Tensor
    numbers: Tensor | None = None

    @classmethod
    def of(cls, chunks: Ints, chosen: Ints, device: torch.device) -> Chunks:
        """The chunks of chosen runs. chunks: of each of all runs."""
        base, place = _laid(chunks)
        own = chunks[chosen]
        order = np.argsort(-own, kind="stable")
        levels = [order[: int((own > level).sum())] for level in range(int(own.max(initial=0)))]
        starts, _ = _laid(own)
        none = np.zeros(0, np.int64)
        runs = np.concatenate([none, *levels])
        numbers = np.concatenate([none, *(base[n] + place[chosen[level]] for n, level in enumerate(levels))])
        final = starts[own[order] - 1] + np.arange(order.size)
        arrays = [order, np.argsort(order), final, runs, numbers]
        one, two, three, four, five = (x.long() for x in upload(arrays, device))
        sizes = [level.size for level in levels]
        return cls(sizes, one, two, three, four, None if chosen.size == chunks.size else five)

    def totals(self, total: Tensor | None, entering: Tensor) -> Tensor:
        """The log decays of runs from those of their chunks, None for none. entering: states [runs, H, K, V]."""
        if total is None:
            return entering.new_zeros(entering.shape[:2])
        return total.new_zeros(len(entering), *total.shape[1:]).index_add(0, self.runs, total)


def _laid(chunks: Ints) -> tuple[Ints, Ints]:
    """The first chunk of each level and the number of chunks, and the place of each run in a level."""
    order = np.argsort(-chunks, kind="stable")
    sizes = [int((chunks > level).sum()) for level in range(int(chunks.max(initial=0)))]
    place = np.empty_like(order)
    place[order] = np.arange(order.size)
    return edges(np.array(sizes, np.int64)), place


@dataclass(frozen=True, eq=False)
class Tables:
    """The chunks of all runs, and of exported ones.

    rows: of a chunk. flat [T]: the place of each row in [chunks * rows]; None if it is the row's own number.
    """

    rows: int
    flat: Tensor | None
    chunks: Chunks
    exported: Chunks

    @classmethod
    def of(cls, counts: Ints, exported: Ints, device: torch.device) -> Tables:
        """The tables of runs with so many rows each."""
        rows = _rows(counts)
        chunks = -(-counts // rows)
        base, place = _laid(chunks)
        row = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        flat = (base[row // rows] + np.repeat(place, counts)) * rows + row % rows
        in_order = flat.size == chunks.sum() * rows and (flat == np.arange(flat.size)).all()
        place_of_rows = None if in_order else upload([flat], device)[0].long()
        every = Chunks.of(chunks, np.arange(counts.size), device)
        return cls(rows, place_of_rows, every, Chunks.of(chunks, exported, device))

    def cut(self, y: Tensor) -> Tensor:
        """[T, ...] -> [N, rows, ...]; zeros behind a run's end."""
        count = sum(self.chunks.sizes)
        if self.flat is not None:
            y = y.new_zeros(count * self.rows, *y.shape[1:]).index_copy(0, self.flat, y)
        return y.view(count, self.rows, *y.shape[1:])

    def joined(self, y: Tensor) -> Tensor:
        """[N, rows, ...] -> [T, ...], the rows of runs."""
        y = y.flatten(0, 1)
        return y if self.flat is None else y.index_select(0, self.flat)


class ChunkProducts(NamedTuple):
    """What a recurrence computes before states are known, by chunk [N, H, rows, ...]; q and out are scaled.

    inside: weights of u in out. q: with the decay since the chunk's start. k: with the decay up to its end. u: U of the
    module. w: W of the module, or None. total: the log decay of the chunk, [N, H] or [N, H, K], or None.
    """

    inside: Tensor
    q: Tensor
    k: Tensor
    u: Tensor
    w: Tensor | None
    total: Tensor | None


class Chunked(Recomputed):
    """Batched matrix products of PyTorch, on any device."""

    name = "chunked"
    casts = True

    def tables(self, counts: Ints, exported: Ints, device: torch.device) -> Tables:
        return Tables.of(counts, exported, device)

    def prepare(self, x: Recurrence, tables: Tables) -> tuple[ChunkProducts, Tables]:
        heads, rows = x.v.shape[1], tables.rows

        def cut(y: Tensor) -> Tensor:
            """[T, H, ...] -> [N, H, rows, ...]."""
            return tables.cut(y).movedim(2, 1).contiguous()

        q, k, v = cut(x.q), cut(x.k), cut(x.v)
        sums = None if x.decay is None else cut(x.decay).double().cumsum(2)
        repeats = heads // k.shape[1]
        later = torch.ones(rows, rows, dtype=torch.bool, device=v.device).tril(-1)
        both = [q, k] if x.beta is not None else [q]
        if sums is None or sums.dim() == 3:
            # products are of groups, decays of heads
            pairs = [_repeated(y @ k.mT, repeats) for y in both]
            if sums is not None:
                gaps = (sums[..., :, None] - sums[..., None, :]).to(v.dtype).masked_fill(~later, -torch.inf)
                # a row's own factor is 1 whatever its decay: as a difference, its gradient would be noise
                factors = gaps.exp() + torch.eye(rows, dtype=v.dtype, device=v.device)
                pairs = [y * factors for y in pairs]
            q, k = _repeated(q, repeats), _repeated(k, repeats)
        else:
            q, k = _repeated(q, repeats), _repeated(k, repeats)
            pairs = _pairs_by_channel([q, k] if x.beta is not None else [q], k, sums)
        inside = pairs[0].tril() * x.scale
        u, w, total, q, entered, leaving = v, None, None, q * x.scale, k, k
        if sums is not None:
            wide = sums if sums.dim() == 4 else sums[..., None]
            since, until = wide.to(v.dtype).exp(), (wide[:, :, -1:] - wide).to(v.dtype).exp()
            q, entered, leaving = q * since, k * since, k * until
            total = sums[:, :, -1].to(v.dtype)
        if x.beta is not None:
            beta = cut(x.beta)[..., None]
            system = beta * pairs[1].tril(-1)
            solved = torch.linalg.solve_triangular(
                system, torch.cat([beta * v, beta * entered], -1), upper=False, unitriangular=True
            )
            u, w = solved.split([v.shape[-1], k.shape[-1]], -1)
        return ChunkProducts(inside, q, leaving, u, w, total), tables

    def leave(self, prepared: tuple[ChunkProducts, Tables], entering: Tensor) -> tuple[Tensor, Tensor]:
        x, chunks = prepared[0], prepared[1].exported
        if chunks.numbers is not None:
            x = x._replace(**{name: y[chunks.numbers] for name, y in x._asdict().items() if y is not None})
        if x.w is None:
            return _walk(x, chunks, entering).left, chunks.totals(x.total, entering)
        columns, u = with_identity(entering, x.u)
        left = _walk(x._replace(u=u), chunks, columns).left
        dim = entering.shape[2]
        return left[..., :-dim], left[..., -dim:]

    def compute(self, prepared: tuple[ChunkProducts, Tables], entering: Tensor) -> tuple[Tensor, Tensor]:
        x, tables = prepared
        walk = _walk(x, tables.chunks, entering)
        u = x.u if walk.u is None else walk.u
        out = torch.baddbmm((x.inside @ u).flatten(0, 1), x.q.flatten(0, 1), walk.entered.flatten(0, 1))
        return tables.joined(out.view(u.shape).movedim(1, 2)), walk.left


class Walk(NamedTuple):
    """entered [N, H, K, V]: the state before each chunk. u: of each chunk, or None. left [runs, H, K, V]."""

    entered: Tensor
    u: Tensor | None
    left: Tensor


def _walk(x: ChunkProducts, chunks: Chunks, entering: Tensor) -> Walk:
    """The states from chunk to chunk, all runs at once."""
    if x.w is None:
        own = levels(x.k.mT @ x.u, chunks.sizes)
        entered, left = walked(chunks, entering, x.total, lambda level, state: own[level])
        return Walk(entered, None, left)
    parts, solved = [levels(y, chunks.sizes) for y in (x.u, x.k, x.w)], []

    def added(level: int, state: Tensor) -> Tensor:
        u, k, w = (part[level] for part in parts)
        solved.append(u - w @ state)
        return k.mT @ solved[-1]

    entered, left = walked(chunks, entering, x.total, added)
    return Walk(entered, torch.cat(solved) if solved else x.u, left)


def walked(
    chunks: Chunks, entering: Tensor, total: Tensor | None, added: Callable[[int, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """The state before each chunk, and those that runs leave, [runs, H, K, V], from those that enter.

    total: the log decay of each chunk. added(level, state): what the chunks of a level add, whose states are those.
    """
    if not chunks.sizes:
        return entering, entering
    factors = None if total is None else total.exp()[(..., *[None] * (4 - total.dim()))]
    entered, after, state = [], [], entering[chunks.order]
    for level, (size, factor) in enumerate(zip(chunks.sizes, levels(factors, chunks.sizes), strict=True)):
        state = state[:size]
        entered.append(state)
        state = added(level, state) + (state if factor is None else factor * state)
        after.append(state)
    return torch.cat(entered), torch.cat(after)[chunks.final][chunks.back]


def _repeated(y: Tensor, times: int) -> Tensor:
    """A tensor of groups for the heads of each."""
    return y if times == 1 else y.repeat_interleave(times, 1)


def levels(y: Tensor | None, sizes: list[int]) -> Sequence[Any]:
    """A tensor of all chunks, by level."""
    return [None] * len(sizes) if y is None else torch.split(y, sizes)


def _pairs_by_channel(left: list[Tensor], k: Tensor, sums: Tensor) -> list[Tensor]:
    """Sums over c of ``left_ic k_jc exp(G_ic - G_jc)`` for j <= i, for each of `left`; zeros for j > i.

    Blocks of rows are joined two by two. Pairs between two blocks have factors relative to the end of the first one,
    and neither is above 1::

        rows of block 1   | pairs 1              |
        rows of block 2   | 2 times 1 | pairs 2  |
    """
    pairs = [(y * k).sum(-1)[..., None, None] for y in left]
    half = 1
    while half < k.shape[2]:
        first, second = sums.unflatten(2, (-1, 2, half)).unbind(3)  # type: ignore[no-untyped-call]
        edge = first[:, :, :, -1:]
        far = _halves(k, half)[0] * (edge - first).to(k.dtype).exp()
        since = (second - edge).to(k.dtype).exp()
        for n, y in enumerate(left):
            between = (_halves(y, half)[1] * since) @ far.mT
            one, two = pairs[n].unflatten(2, (-1, 2)).unbind(3)  # type: ignore[no-untyped-call]
            lines = torch.cat([one, torch.zeros_like(one)], -1), torch.cat([between, two], -1)
            pairs[n] = torch.cat(lines, -2)
        half *= 2
    return [y.squeeze(2) for y in pairs]


def _halves(y: Tensor, half: int) -> Sequence[Tensor]:
    """[N, H, rows, C] -> the first and the second halves of its blocks, [N, H, blocks, half, C]."""
    return y.unflatten(2, (-1, 2, half)).unbind(3)  # type: ignore[no-untyped-call]


def _rows(counts: Ints) -> int:
    """Rows of a chunk: 64, or fewer where runs are so short that most rows of a chunk would be empty."""
    rows = ROWS
    while rows > LEAST and counts.size and int((-(-counts // rows) * rows).sum()) > 2 * int(counts.sum()):
        rows //= 2
    return rows
