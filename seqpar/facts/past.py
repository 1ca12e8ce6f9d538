"""Which rank holds which earlier rows of every sequence: what a cache that is split over ranks knows, without tensors.

A sequence grows by rows that come together. Each stays on the rank that it came to, as a run of rows. Two sequences
after a prompt in a contiguous layout of 2 ranks, and two more rows of each, which went to the rank with fewest::

    sequence 0   position  0  1  2  3  4 | 5 | 6        sequence 1   position  0  1  2 | 3 | 4
                 rank      0  0  0  0  1 | 1 | 1                     rank      1  1  1 | 0 | 0

A rank keeps its rows of a sequence in position order. The keys that a query sees, up to its own or a window of them,
are then consecutive among the rows of every rank (`Past.before`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from seqpar.facts.intervals import Runs, cut, edges, expand
from seqpar.facts.layout import RANKS, Layout
from seqpar.facts.mask import Mask
from seqpar.facts.value import MOST, Fact, Ints, cached, digest_of, frozen, integer


class Past(Fact):
    """The rows of some sequences over ranks, none at first; `after` and `kept` return a Past with more rows.

    sequences, ranks: their numbers. A run is rows ``[start, start + count)`` of a sequence on one rank.

    Raises: ValueError for numbers below 1.
    """

    sequences: int
    ranks: int
    _sequence: Ints
    _start: Ints
    _count: Ints
    _rank: Ints

    def __init__(self, sequences: int, ranks: int) -> None:
        none = np.zeros(0, np.int64)
        sequences, ranks = integer("sequences", sequences, 1, MOST), integer("ranks", ranks, 1, RANKS)
        self._set(sequences, ranks, none, none, none, none)

    def _set(self, sequences: int, ranks: int, sequence: Ints, start: Ints, count: Ints, rank: Ints) -> Past:
        self._fill(
            sequences=sequences, ranks=ranks, _sequence=frozen(sequence), _start=frozen(start), _count=frozen(count),
            _rank=frozen(rank),
        )  # fmt: skip
        return self

    def _made_digest(self) -> str:
        return digest_of("past", self.sequences, self.ranks, self._sequence, self._start, self._count, self._rank)

    @cached
    def counts(self) -> Ints:
        """The rows that each rank holds of each sequence, [ranks, sequences]."""
        held = np.zeros((self.ranks, self.sequences), np.int64)
        np.add.at(held, (self._rank, self._sequence), self._count)
        return frozen(held)

    @cached
    def lengths(self) -> Ints:
        """The rows of each sequence, on all ranks, [sequences]."""
        return frozen(self.counts().sum(0))

    def after(self, lengths: ArrayLike, layout: Layout) -> Past:
        """The past with new rows, which a layout places.

        lengths: new rows of each sequence, 0 allowed. layout: of the packed new rows, sequence after sequence.

        Raises: ValueError for lengths that do not match the sequences or the layout.
        """
        new = self._new(lengths)
        if layout.ranks != self.ranks or layout.total != new.sum():
            raise ValueError(
                f"the layout has {layout.total} rows on {layout.ranks} ranks, expected {int(new.sum())} on {self.ranks}"
            )
        runs, rank = layout.all_runs()
        if not ((runs.step == 1) | (runs.count == 1)).all():  # as of a striped layout: a run for each row
            rank = np.repeat(rank, runs.count)
            first = expand(*runs)
            count = np.ones_like(first)
        else:
            first, count = runs.start, runs.count
        offsets = edges(new)
        piece, run = cut(Runs(first, count, np.ones_like(first)), offsets)
        sequence = np.searchsorted(offsets, piece.start, side="right") - 1
        return self._with(sequence, piece.start - offsets[sequence], piece.count, rank[run])

    def kept(self, lengths: ArrayLike) -> Past:
        """The past with new rows of each sequence on the rank that holds fewest rows of it.

        Of several such ranks it is the first from the sequence's own number on, so that short sequences spread.

        Raises: ValueError for lengths that do not match the sequences.
        """
        new = self._new(lengths)
        sequence = np.arange(self.sequences)
        turn = (np.arange(self.ranks)[:, None] - sequence) % self.ranks
        rank = np.lexsort((turn, self.counts()), axis=0)[0]
        return self._with(sequence, np.zeros_like(sequence), new, rank)

    def _new(self, lengths: ArrayLike) -> Ints:
        new = np.asarray(lengths)
        if new.shape != (self.sequences,) or new.dtype.kind not in "iu" or (new < 0).any():
            raise ValueError(f"lengths must be {self.sequences} integers of at least 0, got {lengths!r:.200}")
        return new.astype(np.int64)

    def _with(self, sequence: Ints, start: Ints, count: Ints, rank: Ints) -> Past:
        """The past with runs of new rows. start: in the new rows of the sequence."""
        some = count > 0
        sequence, start, count, rank = sequence[some], start[some], count[some], rank[some]
        order = np.lexsort((start, sequence))
        more = sequence, start + self.lengths()[sequence], count, rank
        own = self._sequence, self._start, self._count, self._rank
        columns = [np.concatenate([a, b[order]]) for a, b in zip(own, more, strict=True)]
        return type(self).__new__(type(self))._set(self.sequences, self.ranks, *columns)

    def pick(self, sequences: ArrayLike) -> Past:
        """The past of these sequences, in this order; one may be there several times, as beams are.

        Raises: ValueError for numbers of no sequence.
        """
        chosen = np.asarray(sequences)
        if chosen.ndim != 1 or not chosen.size or chosen.dtype.kind not in "iu":
            raise ValueError(f"sequences must be numbers of sequences, got {sequences!r:.200}")
        if chosen.min() < 0 or chosen.max() >= self.sequences:
            raise ValueError(f"sequences run from {chosen.min()} to {chosen.max()}, there are {self.sequences}")
        order = np.argsort(self._sequence, kind="stable")
        runs = np.bincount(self._sequence, minlength=self.sequences)
        first, many = edges(runs)[chosen], runs[chosen]
        at = order[np.repeat(first - (np.cumsum(many) - many), many) + np.arange(many.sum())]
        sequence = np.repeat(np.arange(chosen.size), many)
        columns = (sequence, self._start[at], self._count[at], self._rank[at])
        return type(self).__new__(type(self))._set(int(chosen.size), self.ranks, *columns)

    def before(self, rank: int, positions: ArrayLike) -> Ints:
        """How many rows of each sequence a rank holds below a position. positions [sequences, ...], as the result.

        Row ``n`` of a sequence on a rank is seen by a query at position ``p`` with ``left`` keys before its own, if
        ``before(rank, p - left) <= n < before(rank, p + 1)``.
        """
        below = np.asarray(positions, np.int64)
        own = self._rank == rank
        sequence, start, count = self._sequence[own], self._start[own], self._count[own]
        reach = np.clip((below[sequence].T - start).T, 0, np.expand_dims(count, tuple(range(1, below.ndim))))
        held = np.zeros_like(below)
        np.add.at(held, sequence, reach)
        return held

    def mask(self, new: ArrayLike, *, window: tuple[int | None, int | None] = (None, None)) -> Mask:
        """The causal mask of the last rows of each sequence over all its rows. new: how many of each are queries.

        Raises: ValueError for a sequence that has rows and no query.
        """
        queries, keys = self._new(new), self.lengths()
        if idle := np.flatnonzero((queries == 0) & (keys > 0)).tolist():
            raise ValueError(f"sequences {idle!r:.200} have earlier rows and no new one; leave them out of the batch")
        return Mask(queries[keys > 0], kv_lengths=keys[keys > 0], window=window)

    @cached
    def kv_layout(self) -> Layout:
        """Where all rows lie, numbered sequence after sequence; the rows of a rank are in that order."""
        start = edges(self.lengths())[self._sequence] + self._start
        return Layout.ascending(start, self._count, self._rank, self.ranks)

    def __repr__(self) -> str:
        return f"Past({self.sequences} sequences of {int(self.lengths().sum())} rows over {self.ranks} ranks)"
