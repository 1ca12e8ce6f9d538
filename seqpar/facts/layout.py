"""Which rank holds which token: a partition of the global positions over ranks, stored as runs.

A run is a stretch of one rank's rows whose positions are an arithmetic progression. Contiguous, zigzag and striped
layouts have few runs, however long the sequence; an arbitrary layout has at most one run per token. The rank that holds
each of 12 tokens, on 3 ranks::

    position            0  1  2  3  4  5  6  7  8  9 10 11
    contiguous          0  0  0  0  1  1  1  1  2  2  2  2
    blocked             0  0  1  1  2  2  0  0  1  1  2  2      two documents of 6 tokens
    zigzag              0  0  1  1  2  2  2  2  1  1  0  0      one document
    zigzag              0  1  2  2  1  0  0  1  2  2  1  0      two of 6
    striped             0  1  2  0  1  2  0  1  2  0  1  2
    striped, block=2    0  0  1  1  2  2  0  0  1  1  2  2

Sources: zigzag, Zhu 2024 (ring-flash-attention) and Llama 3 (section 3.3.2); striped, Brandon et al. 2023.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from seqpar.facts.intervals import Holders, Runs, edges, expand, order_of, progressions, runs_of
from seqpar.facts.value import MOST, Fact, Ints, cached, digest_of, frozen, int64_of, integer, is_integer, lengths_of

RANKS = 1 << 20  # at most, per layout: the square of twice as many fits into 64 bits


class Layout(Fact):
    """Any partition of the tokens over ranks, as by ``Layout.contiguous``, ``blocked``, ``zigzag`` and ``striped``.

    shards: for each rank the global positions of its tokens in local row order, as integers or a ``range``; shards may
    be uneven or empty.

    Raises: ValueError for shards that overlap, miss a token or hold a negative position, naming it and the ranks.
    """

    ranks: int
    total: int
    _runs: Runs
    _bounds: Ints
    _name: str

    def __init__(self, shards: Sequence[ArrayLike | range]) -> None:
        arrays = [_checked_shard(rank, shard) for rank, shard in enumerate(shards)]
        if not arrays:
            raise ValueError("shards must have at least one rank, got none")
        positions = np.concatenate(arrays)
        if not positions.size:
            raise ValueError(f"the shards of all {len(arrays)} ranks are empty; a layout holds at least one token")
        holder = np.repeat(np.arange(len(arrays)), [array.size for array in arrays])
        _check_partition(positions, positions + 1, holder, "shards")
        parts = [runs_of(a) for a in arrays]
        rank = np.repeat(np.arange(len(parts)), [len(r.start) for r in parts])
        self._set(Runs(*(np.concatenate(column) for column in zip(*parts, strict=True))), rank, len(parts), "arbitrary")

    @classmethod
    def from_pieces(
        cls, start: ArrayLike, count: ArrayLike, rank: ArrayLike, ranks: int, *, name: str = "planned"
    ) -> Layout:
        """Rank ``rank[i]`` holds the positions ``start[i] + [0, count[i])``; the pieces of a rank keep their order.

        start, count, rank: integers of one length, in any order. A piece may have no tokens, and a rank no piece. name:
        the layout's name in `repr`. Time is linear in the pieces, not in tokens or ranks.

        Raises: ValueError for pieces that overlap, miss a token, start below 0 or name an unknown rank.
        """
        ranks = integer("ranks", ranks, 1, RANKS)
        first, length, holder = _checked_pieces(start, count, rank, ranks)
        order = order_of(holder, ranks)
        return cls._make(first[order], length[order], holder[order], ranks, name)

    @classmethod
    def ascending(cls, start: Ints, count: Ints, rank: Ints, ranks: int) -> Layout:
        """As `from_pieces`, with the pieces of a rank in position order.

        start, count, rank: int64, in any order. Every piece has tokens, and a known rank: this is not checked.

        Raises: ValueError for pieces that overlap or miss a token.
        """
        order = start.argsort()
        start, count, rank = start[order], count[order], rank[order]
        _check_tiled(start, start + count, rank)
        order = order_of(rank, ranks)
        return cls._make(start[order], count[order], rank[order], ranks, "planned")

    @classmethod
    def _make(cls, start: Ints, count: Ints, rank: Ints, ranks: int, name: str, step: int = 1) -> Layout:
        """A layout of runs sorted by rank; some may be empty."""
        self = cls.__new__(cls)
        if not count.all():
            kept = count > 0
            start, count, rank = start[kept], count[kept], rank[kept]
        self._set(Runs(start, count, np.full_like(start, step)), rank, ranks, name)
        return self

    def _set(self, runs: Runs, rank: Ints, ranks: int, name: str) -> None:
        runs, rank = _joined(runs, rank)
        bounds = np.searchsorted(rank, np.arange(ranks + 1))
        self._fill(
            ranks=ranks,
            total=int(runs.count.sum()),
            _runs=Runs(*(frozen(column.astype(np.int64)) for column in runs)),
            _bounds=frozen(bounds),
            _name=name,
        )

    def _made_digest(self) -> str:
        runs = self._runs
        gaps = progressions(runs.start, runs.step, runs.count)
        return digest_of("layout", self.sizes(), runs.start[:1], *gaps)

    @classmethod
    def contiguous(cls, tokens: int, ranks: int) -> Layout:
        """Rank ``r`` holds tokens ``[r * tokens // ranks, (r + 1) * tokens // ranks)``."""
        tokens, ranks = integer("tokens", tokens, 1, MOST), integer("ranks", ranks, 1, RANKS)
        edge = _part(np.arange(ranks + 1), np.int64(tokens), ranks)
        return cls._make(edge[:-1], np.diff(edge), np.arange(ranks), ranks, "contiguous")

    @classmethod
    def zigzag(cls, lengths: ArrayLike, ranks: int) -> Layout:
        """Each document in ``2 * ranks`` chunks; rank ``r`` holds the ``r``-th chunk and the ``r``-th from the end.

        Balances the area of causal attention. Chunks differ by at most one token; the rounding rotates with the
        document's place in the batch, so that short documents spread over all ranks.
        """
        ranks = integer("ranks", ranks, 1, RANKS)
        return cls._chunked(lengths_of("lengths", lengths), 2 * ranks, ranks, "zigzag")

    @classmethod
    def blocked(cls, lengths: ArrayLike, ranks: int) -> Layout:
        """Each document in ``ranks`` chunks; rank ``r`` holds the ``r``-th chunk of every document.

        So it holds ``x.chunk(ranks, 1)[r].flatten(0, 1)`` of x [B, S, ...], whose documents have the lengths [S] * B,
        where ranks divide S. Chunks as in `zigzag`: they differ by at most one token.
        """
        ranks = integer("ranks", ranks, 1, RANKS)
        return cls._chunked(lengths_of("lengths", lengths), ranks, ranks, "blocked")

    @classmethod
    def _chunked(cls, docs: Ints, chunks: int, ranks: int, name: str) -> Layout:
        """Each document in chunks, dealt to the ranks upwards, and then downwards."""
        edge = edges(docs)
        held = np.minimum(docs, chunks)  # chunks of each document that hold tokens
        nth, document = expand(np.zeros_like(held), held), np.repeat(np.arange(docs.size), held)
        tokens, first = docs[document], edge[document]
        more = first % chunks
        # In a short document chunks hold at most one token: the nth token is in the first chunk that ends after it.
        chunk = np.where(tokens < chunks, -((more - chunks * (nth + 1)) // tokens) - 1, nth)
        start = first + _part(chunk, tokens, chunks, more)
        count, rank = np.diff(start, append=edge[-1]), np.minimum(chunk, 2 * ranks - 1 - chunk)
        order = order_of(rank, ranks)
        return cls._make(start[order], count[order], rank[order], ranks, name)

    @classmethod
    def striped(cls, tokens: int, ranks: int, block: int = 1) -> Layout:
        """Deal blocks of ``block`` tokens to the ranks in turns."""
        tokens, ranks, block = (
            integer("tokens", tokens, 1, MOST),
            integer("ranks", ranks, 1, RANKS),
            integer("block", block, 1),
        )
        if block == 1:
            start = np.arange(min(ranks, tokens))
            count = (tokens - start + ranks - 1) // ranks
            return cls._make(start, count, start, ranks, "striped", step=ranks)
        start = np.arange(0, tokens, block)
        count = np.minimum(block, tokens - start)
        rank = np.arange(len(start)) % ranks
        order = order_of(rank, ranks)
        return cls._make(start[order], count[order], rank[order], ranks, f"striped, block={block}")

    @cached
    def sizes(self) -> Ints:
        """Tokens that each rank holds, [ranks]."""
        return frozen(np.diff(edges(self._runs.count)[self._bounds]))

    def tokens(self, rank: int) -> int:
        """Tokens that a rank holds."""
        return self.memo("tokens", lambda: self.sizes().tolist())[self._rank(rank)]

    def positions(self, rank: int) -> Ints:
        """Global positions [tokens] of a rank's rows, in local row order."""
        return expand(*self.runs(rank))

    def runs(self, rank: int) -> Runs:
        """A rank's rows as runs, in local row order."""
        rank = self._rank(rank)
        return self._runs.pick(slice(self._bounds[rank], self._bounds[rank + 1]))  # type: ignore[arg-type]

    def _rank(self, rank: int) -> int:
        if not is_integer(rank) or not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank!r} is not one of the layout's {self.ranks} ranks; give 0 to {self.ranks - 1}")
        return rank

    def all_runs(self) -> tuple[Runs, Ints]:
        """The runs of all ranks in order, and the rank of each."""
        return self._runs, np.repeat(np.arange(self.ranks), np.diff(self._bounds))

    @cached
    def holders(self) -> Holders:
        """The runs of all ranks in the order of their starts, and the rank of each; cached."""
        runs, rank = self.all_runs()
        order = order_of(runs.start, self.total)
        return Holders(runs.pick(order), rank[order].astype(np.int32), self.total)

    def owner(self) -> NDArray[np.int32]:
        """The rank that holds each token, int32 [total]; cached, O(tokens)."""
        return self.holders().all()

    def __repr__(self) -> str:
        return f"Layout({self._name}, {self.total} tokens over {self.ranks} ranks)"


def _part(n: Ints, tokens: Ints | np.int64, parts: int, more: Ints | int = 0) -> Ints:
    """Where part ``n`` of ``parts`` begins, ``(n * tokens + more) // parts``, even if the products exceed 64 bits."""
    return n * (tokens // parts) + (n * (tokens % parts) + more) // parts


def _joined(runs: Runs, rank: Ints) -> tuple[Runs, Ints]:
    """The same rows with adjacent runs merged, and the rank of each run: equal rows give equal runs."""
    follows = (runs.start[1:] == runs.last[:-1] + runs.step[:-1]) & (runs.step[1:] == runs.step[:-1])
    first = np.flatnonzero(np.append(True, ~follows | (rank[1:] != rank[:-1])))
    if first.size == rank.size:
        return runs, rank
    return Runs(runs.start[first], np.add.reduceat(runs.count, first), runs.step[first]), rank[first]


def _checked_pieces(start: ArrayLike, count: ArrayLike, rank: ArrayLike, ranks: int) -> tuple[Ints, Ints, Ints]:
    """The pieces that hold tokens, as int64, checked to be a partition."""
    columns = []
    for name, values in (("start", start), ("count", count), ("rank", rank)):
        array = np.asarray(values)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise ValueError(f"{name} must be a sequence of integers, one per piece, got {values!r:.200}")
        columns.append(int64_of(name, array))
    first, length, holder = columns
    if not first.size == length.size == holder.size:
        raise ValueError(
            f"start, count and rank must have one entry per piece, got {first.size}, {length.size} and {holder.size}"
        )
    _refuse_first(np.flatnonzero((holder < 0) | (holder >= ranks)), columns, f"ranks are 0 to {ranks - 1}")
    _refuse_first(np.flatnonzero(length < 0), columns, "a piece has at least 0 tokens")
    _refuse_first(np.flatnonzero((first < 0) & (length > 0)), columns, "positions start at 0")
    _refuse_first(np.flatnonzero(first >= (1 << 62) - length), columns, "positions are below 2**62")
    if not length.all():
        first, length, holder = (column[length > 0] for column in columns)
    if first.size == 0:
        raise ValueError(f"the pieces of all {ranks} ranks are empty; a layout holds at least one token")
    _check_partition(first, first + length, holder, "pieces")
    return first, length, holder


def _refuse_first(wrong: Ints, columns: list[Ints], expected: str) -> None:
    """Raise ValueError for the first wrong piece, if there is one."""
    if wrong.size:
        start, count, rank = (int(column[wrong[0]]) for column in columns)
        raise ValueError(f"piece {wrong[0]} gives rank {rank} {count} tokens from position {start}; {expected}")


def _check_partition(start: Ints, stop: Ints, rank: Ints, what: str) -> None:
    order = np.argsort(start, kind="stable")
    _check_tiled(start[order], stop[order], rank[order], what)


def _check_tiled(start: Ints, stop: Ints, rank: Ints, what: str = "pieces") -> None:
    """Raise ValueError unless pieces, sorted by start, follow each other from 0 on."""
    before = np.append(0, stop[:-1])
    wrong = np.flatnonzero(start != before)
    if wrong.size == 0:
        return
    i = int(wrong[0])
    if start[i] < before[i]:
        holders = sorted((int(rank[i - 1]), int(rank[i])))
        raise ValueError(f"token {start[i]} is held by rank {holders[0]} and by rank {holders[1]}; {what} overlap")
    raise ValueError(f"no rank holds token {before[i]}, though {stop.max() - 1} is held; {what} miss it")


def _checked_shard(rank: int, shard: ArrayLike | range) -> Ints:
    array = np.asarray(shard)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"the shard of rank {rank} must be a sequence of integer positions, got {shard!r:.200}")
    array = int64_of(f"positions of rank {rank}", array)
    if (array < 0).any():
        raise ValueError(f"rank {rank} holds position {int(array.min())}; positions start at 0")
    return array
