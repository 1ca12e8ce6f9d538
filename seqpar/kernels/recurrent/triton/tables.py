"""The runs and chunks of a plan as the kernels read them. A chunk has rows of one run alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from seqpar.facts.intervals import edges
from seqpar.facts.value import Ints
from seqpar.kernels.memory.upload import upload

ROWS = 64  # of a chunk, at most
LEAST = 16  # rows of a chunk, at least: those of a product


@dataclass(frozen=True, eq=False)
class Launched:
    """The runs that a launch walks, and their chunks.

    runs [R, 8]: number of the run among these, first row, row past the last, first chunk among these, the same among
    the chunks of all runs, chunks; longest runs first, as a device starts programs about in their order. chunks [N, 4]:
    first row, row past the run's last, number among the chunks of all runs, number of the run among these.
    """

    runs: Tensor
    chunks: Tensor


@dataclass(frozen=True, eq=False)
class ChunkTables:
    """rows: of a chunk. every: all runs. exported: those whose states others need."""

    rows: int
    every: Launched
    exported: Launched


def tables_of(counts: Ints, exported: Ints, device: torch.device) -> ChunkTables:
    """The tables of runs with so many rows."""
    rows = rows_of_chunks(counts)
    arrays = [x for chosen in (np.arange(counts.size), exported) for x in _arrays(counts, chosen, rows)]
    one, two, three, four = upload(arrays, device)
    return ChunkTables(rows, Launched(one, two), Launched(three, four))


def rows_of_chunks(counts: Ints) -> int:
    """64, or fewer where runs are so short that most rows of a chunk would be empty."""
    rows = ROWS
    while rows > LEAST and int((-(-counts // rows) * rows).sum()) > 2 * int(counts.sum()):
        rows //= 2
    return rows


def _arrays(counts: Ints, chosen: Ints, rows: int) -> list[Ints]:
    """The runs and the chunks of a launch."""
    chunks = -(-counts // rows)
    starts, numbers = edges(counts), edges(chunks)
    own, first = chunks[chosen], edges(chunks[chosen])
    runs = np.zeros((chosen.size, 8), np.int64)
    columns = np.arange(chosen.size), starts[chosen], starts[chosen + 1], first[:-1], numbers[chosen], own
    runs[:, :6] = np.stack(columns, 1)[np.argsort(-own, kind="stable")]
    of = np.repeat(np.arange(chosen.size), own)
    place = np.arange(of.size) - first[of]
    begin = starts[chosen][of] + place * rows
    return [runs, np.stack([begin, starts[chosen + 1][of], numbers[chosen][of] + place, of], 1)]
