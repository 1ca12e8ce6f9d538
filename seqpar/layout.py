"""Where tokens live: a partition of the global positions over ranks, stored as runs.

A run is a stretch of one rank's rows whose positions are an arithmetic progression. Contiguous, zigzag and striped
layouts have few runs however long the sequence is; an arbitrary one has at most a run per token.

Sources: zigzag, Zhu 2024 (ring-flash-attention) and Llama 3 (section 3.3.2); striped, Brandon et al. 2023.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from seqpar.mask import Fact, Ints, digest_of, frozen, lengths_of, progressions, whole


class Runs(NamedTuple):
    """Arithmetic progressions ``start + step * [0, count)``, in row order; all counts and steps at least 1."""

    start: Ints
    count: Ints  # type: ignore[assignment]  # tuple.count is not missed
    step: Ints

    @property
    def last(self) -> Ints:
        """The last position of each run."""
        return self.start + self.step * (self.count - 1)

    def pick(self, index: Ints) -> Runs:
        """The runs at an index or mask."""
        return Runs(self.start[index], self.count[index], self.step[index])


def expand(start: Ints, count: Ints, step: Ints | int = 1) -> Ints:
    """All elements of arithmetic progressions, one after the other."""
    total = int(count.sum())
    first = np.cumsum(count) - count
    steps = np.broadcast_to(np.asarray(step, np.int64), start.shape)
    if (steps == 1).all():
        return np.repeat(start - first, count) + np.arange(total)
    return np.repeat(start - steps * first, count) + np.repeat(steps, count) * np.arange(total)


def cut(runs: Runs, breaks: Ints) -> tuple[Runs, Ints]:
    """Runs cut so that none has a break strictly inside it; and for each piece the index of its run.

    breaks: sorted positions at which a new piece begins.
    """
    lower = np.searchsorted(breaks, runs.start, side="right")
    pieces = np.searchsorted(breaks, runs.last, side="right") - lower + 1
    source = np.repeat(np.arange(len(pieces)), pieces)
    nth = np.arange(len(source)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start, step = runs.start[source], runs.step[source]
    row = np.zeros_like(source)
    later = nth > 0
    at = breaks[(lower[source] + nth - 1)[later]]
    row[later] = -((start[later] - at) // step[later])  # first row at or after the break
    end = np.append(row[1:], 0)
    final = np.append(source[1:] != source[:-1], True)[: source.size]
    end[final] = runs.count[source][final]
    kept = end > row
    piece = Runs((start + step * row)[kept], (end - row)[kept], step[kept])
    return piece, source[kept]


def runs_of(positions: Ints) -> Runs:
    """Runs of the most common distance between neighbours; found without a loop over rows."""
    if positions.size == 0:
        return Runs(positions, positions, positions)
    gaps = np.diff(positions)
    ahead = gaps[gaps > 0]
    values, counts = np.unique(ahead, return_counts=True)
    step = int(values[np.argmax(counts)]) if values.size else 1
    first = np.flatnonzero(np.append(True, gaps != step))
    count = np.diff(np.append(first, positions.size))
    return Runs(positions[first], count, np.full(first.size, step, np.int64))


class Layout(Fact):
    """Any partition of the tokens over ranks; ``Layout.contiguous``, ``zigzag`` and ``striped`` make the usual ones.

    shards: for each rank the global positions of its tokens in local row order, as integers or a ``range``; shards may
    be uneven or empty.

    Raises: ValueError for shards that overlap, miss a token or hold a negative one, naming it and the ranks.
    """

    ranks: int
    total: int
    _runs: Runs
    _bounds: Ints
    _name: str

    def __init__(self, shards: Sequence[ArrayLike | range]) -> None:
        arrays = [_checked_shard(rank, shard) for rank, shard in enumerate(shards)]
        if not arrays:
            raise ValueError("a layout has at least one rank, got no shards")
        _check_partition(arrays)
        self._set([runs_of(a) for a in arrays], "arbitrary")

    @classmethod
    def _make(cls, runs: Iterable[Runs], name: str) -> Layout:
        self = cls.__new__(cls)
        self._set(list(runs), name)
        return self

    def _set(self, runs: list[Runs], name: str) -> None:
        runs = [_joined(r) for r in runs]
        joined = Runs(*(frozen(np.concatenate(parts).astype(np.int64)) for parts in zip(*runs, strict=True)))
        bounds = frozen(np.cumsum([0, *(len(r.start) for r in runs)]))
        rows = np.array([r.count.sum() for r in runs], np.int64)
        gaps = progressions(joined.start, joined.step, joined.count)
        self._fill(
            ranks=len(runs),
            total=int(joined.count.sum()),
            _runs=joined,
            _bounds=bounds,
            _name=name,
            _digest=digest_of("layout", rows, joined.start[:1], *gaps),
        )

    @classmethod
    def contiguous(cls, tokens: int, ranks: int) -> Layout:
        """Rank ``r`` holds tokens ``[r * tokens // ranks, (r + 1) * tokens // ranks)``."""
        tokens, ranks = whole("tokens", tokens, 1), whole("ranks", ranks, 1)
        edge = np.arange(ranks + 1) * tokens // ranks
        return cls._make(_by_rank(edge[:-1], np.diff(edge), np.arange(ranks), ranks), "contiguous")

    @classmethod
    def zigzag(cls, lengths: ArrayLike, ranks: int) -> Layout:
        """Each document in ``2 * ranks`` chunks, of which rank ``r`` holds the ``r``-th and the ``r``-th from the end.

        Balances the area of causal attention. Chunks differ by at most one token; the rounding turns with the
        document's place in the batch, so that short documents spread over all ranks.
        """
        docs, ranks = lengths_of("lengths", lengths), whole("ranks", ranks, 1)
        first = np.cumsum(docs) - docs
        chunks = 2 * ranks
        edge = (np.arange(chunks + 1) * docs[:, None] + (first % chunks)[:, None]) // chunks + first[:, None]
        order = np.stack([np.arange(ranks), chunks - 1 - np.arange(ranks)], axis=1)  # [rank, 2] -> chunk
        start = edge[:, :-1][:, order].transpose(1, 0, 2).reshape(-1)  # rank, document, chunk
        count = np.diff(edge, axis=1)[:, order].transpose(1, 0, 2).reshape(-1)
        return cls._make(_by_rank(start, count, np.repeat(np.arange(ranks), 2 * len(docs)), ranks), "zigzag")

    @classmethod
    def striped(cls, tokens: int, ranks: int, block: int = 1) -> Layout:
        """Block after block of ``block`` tokens dealt to the ranks in turn."""
        tokens, ranks, block = whole("tokens", tokens, 1), whole("ranks", ranks, 1), whole("block", block, 1)
        if block == 1:
            start = np.arange(min(ranks, tokens))
            count = (tokens - start + ranks - 1) // ranks
            runs = _by_rank(start, count, start, ranks)
            return cls._make((Runs(r.start, r.count, r.step * ranks) for r in runs), "striped")
        start = np.arange(0, tokens, block)
        count = np.minimum(block, tokens - start)
        rank = np.arange(len(start)) % ranks
        order = np.argsort(rank, kind="stable")
        return cls._make(_by_rank(start[order], count[order], rank[order], ranks), f"striped, block={block}")

    def tokens(self, rank: int) -> int:
        """Tokens that a rank holds."""
        return int(self.runs(rank).count.sum())

    def positions(self, rank: int) -> Ints:
        """Global positions [tokens] of a rank's rows, in local row order."""
        return expand(*self.runs(rank))

    def runs(self, rank: int) -> Runs:
        """A rank's rows as runs, in local row order."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} is not one of the layout's {self.ranks} ranks")
        return self._runs.pick(slice(self._bounds[rank], self._bounds[rank + 1]))  # type: ignore[arg-type]

    def all_runs(self) -> tuple[Runs, Ints]:
        """The runs of all ranks in order, and the rank of each."""
        return self._runs, np.repeat(np.arange(self.ranks), np.diff(self._bounds))

    def owner(self) -> NDArray[np.int32]:
        """The rank that holds each token, int32 [total]; made once, O(tokens)."""
        return self.memo("owner", self._owner)

    def _owner(self) -> NDArray[np.int32]:
        runs, rank = self.all_runs()
        if (runs.step == 1).all():
            order = np.argsort(runs.start, kind="stable")
            return frozen(np.repeat(rank[order].astype(np.int32), runs.count[order]))
        owner = np.empty(self.total, np.int32)
        if len(rank) <= 4096:  # few long runs: strided writes beat making every position
            for holder, first, last, step in zip(rank, runs.start, runs.last, runs.step, strict=True):
                owner[first : last + 1 : step] = holder
        else:
            owner[expand(*runs)] = np.repeat(rank.astype(np.int32), runs.count)
        return frozen(owner)

    def __repr__(self) -> str:
        return f"Layout({self._name}, {self.total} tokens over {self.ranks} ranks)"


def _by_rank(start: Ints, count: Ints, rank: Ints, ranks: int) -> list[Runs]:
    """Runs of step 1 for each rank, from arrays sorted by rank; empty ones left out."""
    kept = count > 0
    start, count, rank = start[kept], count[kept], rank[kept]
    edge = np.searchsorted(rank, np.arange(ranks + 1))
    return [Runs(start[a:b], count[a:b], np.ones(b - a, np.int64)) for a, b in zip(edge[:-1], edge[1:], strict=True)]


def _joined(runs: Runs) -> Runs:
    """The same rows with runs that continue each other made one, so that equal layouts have equal runs."""
    if len(runs.start) < 2:
        return runs
    follows = (runs.start[1:] == runs.last[:-1] + runs.step[:-1]) & (runs.step[1:] == runs.step[:-1])
    first = np.flatnonzero(np.append(True, ~follows))
    return Runs(runs.start[first], np.add.reduceat(runs.count, first), runs.step[first])


def _checked_shard(rank: int, shard: ArrayLike | range) -> Ints:
    array = np.asarray(shard)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"the shard of rank {rank} must be a sequence of integer positions, got {shard!r:.200}")
    array = array.astype(np.int64)
    if (array < 0).any():
        raise ValueError(f"rank {rank} holds position {int(array.min())}; positions start at 0")
    return array


def _check_partition(shards: list[Ints]) -> None:
    positions = np.concatenate(shards)
    rank = np.repeat(np.arange(len(shards)), [len(s) for s in shards])
    order = np.argsort(positions, kind="stable")
    positions, rank = positions[order], rank[order]
    if positions.size == 0:
        raise ValueError(f"the shards of all {len(shards)} ranks are empty; a layout holds at least one token")
    twice = np.flatnonzero(positions[1:] == positions[:-1])
    if twice.size:
        i = int(twice[0])
        raise ValueError(f"token {positions[i]} is held by rank {rank[i]} and by rank {rank[i + 1]}; shards overlap")
    wrong = np.flatnonzero(positions != np.arange(positions.size))
    if wrong.size:
        raise ValueError(f"no rank holds token {int(wrong[0])}, though {int(positions[-1])} is held; shards miss it")
