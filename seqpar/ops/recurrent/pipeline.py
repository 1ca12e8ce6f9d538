"""States in a pipeline: a rank computes a block of heads from the states that enter, and posts those that leave.

::

    rank 0   compute b0   compute b1   compute b2
                        ↘            ↘            ↘
    rank 1                compute b0   compute b1   compute b2
                                     ↘            ↘            ↘
    rank 2                             compute b0   compute b1   compute b2         3 ranks, 3 blocks: 5 blocks' time

There are no maps, and no rank computes what it would not compute alone: B blocks on P ranks take ``(B + P - 1) / B`` of
the time of a rank that never waits, less where waiting ranks leave their processor to others. The *depth* of a run is
the number of runs before it in its document, in backward of those behind it. Exchange ``(d, b)`` passes block b of what
all runs of depth d leave to the runs of depth ``d + 1``. Ranks compute, and post exchanges, in the order of
``(d + b, d)``: what an exchange sends depends on earlier exchanges alone, so ranks never wait in a circle. Before a
block a rank waits for what enters it; for the end of what it sends it waits after its last block.

Source: Sun et al. 2024 (LASP), whose ranks compute one after another; here they do so in blocks of heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqpar.comm import Comm, Tag
from seqpar.facts.value import Ints, Memo, cached
from seqpar.kernels.recurrent import RecurrentKernel
from seqpar.ops.core.device import Uploaded, stream_of
from seqpar.ops.move.pack import post, rows_of
from seqpar.ops.move.relayout import rows_on
from seqpar.ops.recurrent.local import LocalRuns
from seqpar.ops.recurrent.rows import document_runs
from seqpar.plan import Plan
from seqpar.plan.steps import Rows, as_rows


class Level(NamedTuple):
    """A rank's runs of one depth, by their numbers on the rank, ascending.

    rows: their local rows in position order. counts: rows of each. sends, recvs: peer -> runs whose state goes to it,
    or enters from it.
    """

    runs: Rows
    rows: Rows
    counts: Ints
    sends: Mapping[int, Rows]
    recvs: Mapping[int, Rows]


Levels = Mapping[int, Level]  # by depth


@dataclass(frozen=True, eq=False)
class StatePipeline(Memo):
    """One rank's part: its levels on the way forth and on the way back. hops: depths of all ranks but one."""

    blocks: int
    hops: int
    forth: Levels
    back: Levels
    _memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @staticmethod
    @cached
    def of(plan: Plan, rank: int, blocks: int) -> StatePipeline:
        """A rank's part of a plan, in so many blocks of heads; cached."""
        table, side = document_runs(plan), LocalRuns.of(plan, rank)
        own, ordinal = table.of_rank(rank), table.ordinal
        after = np.where(table.closes, -1, np.append(table.rank[1:], -1))[own]
        before = np.where(table.opens, -1, np.append(-1, table.rank[:-1]))[own]
        ahead = np.searchsorted(table.document, table.document, side="right") - 1 - np.arange(ordinal.size)
        forth, back = _levels(ordinal[own], after, before, side), _levels(ahead[own], before, after, side)
        return StatePipeline(blocks, int(ordinal.max(initial=0)), forth, back)

    def run(
        self, levels: Levels, entering: Tensor, leaving: Tensor, begin: Callable[[Level, int], Callable[[], None]],
        comm: Comm, tag: Tag,
    ) -> None:  # fmt: skip
        """Compute all blocks of all levels, and pass on what they leave. A collective.

        entering, leaving [blocks, runs, H / blocks, K, V]: what enters and leaves the rank's runs. begin(level, block)
        computes what does not depend on `entering`, and returns what writes the level's part of `leaving`.
        """
        at, posted = self.on(entering.device), dict[tuple[int, int], Callable[[], None]]()
        depths = sorted({*levels, *(depth - 1 for depth in levels if depth)})
        for _, depth, block in sorted((d + b, d, b) for d in depths for b in range(self.blocks)):
            level, following = levels.get(depth), levels.get(depth + 1)
            if level is not None:
                finish = begin(level, block)
                posted.pop((depth - 1, block), lambda: None)()
                finish()
            sends, recvs = (
                {peer: [[rows_of(x[block], at.rows(rows))]] for peer, rows in side.items()}
                for x, side in (
                    (leaving, level.sends if level else {}),
                    (entering, following.recvs if following else {}),
                )
            )
            if sends or recvs:
                number = (tag.stage * self.hops + depth) * self.blocks + block
                posted[depth, block] = post(comm, sends, recvs, tag._replace(stage=number))
        for finish in posted.values():
            finish()

    def blocked(self, states: Tensor) -> Tensor:
        """States [runs, H, K, V] as [blocks, runs, H / blocks, K, V]."""
        return states.unflatten(1, (self.blocks, -1)).movedim(1, 0)

    def whole(self, states: Tensor) -> Tensor:
        """The inverse of `blocked`."""
        return states.movedim(0, 1).flatten(1, 2)

    def tables(self, level: Level, kernel: RecurrentKernel, device: torch.device) -> Any:
        """A kernel's tables of a level's runs on a device, uploaded once per stream."""

        def make() -> Any:
            with torch.inference_mode(False):  # they outlive the caller's mode
                return kernel.tables(level.counts, np.zeros(0, np.int64), device)

        return self.memo((kernel.name, id(level), stream_of(device)), make)

    def all_tables(self, kernel: RecurrentKernel, device: torch.device) -> None:
        """Derive the tables of all levels."""
        for level in (*self.forth.values(), *self.back.values()):
            self.tables(level, kernel, device)

    def forth_of(self, back: Level) -> Level | None:
        """The level on the way forth with the same runs as one on the way back, if there is one."""
        same = (level for level in self.forth.values() if _equal(level.runs, back.runs))
        return self.memo(("forth of", id(back)), lambda: next(same, None))  # type: ignore[no-any-return]

    def on(self, device: torch.device) -> Uploaded:
        """The row numbers on a device, uploaded once per stream."""
        levels = (*self.forth.values(), *self.back.values())
        rows = (x for s in levels for x in (s.runs, s.rows, *s.sends.values(), *s.recvs.values()))
        return rows_on(self, rows, device)


def _equal(one: Rows, other: Rows) -> bool:
    """Whether two sides have the same rows."""
    if isinstance(one, slice) or isinstance(other, slice):
        return isinstance(one, slice) and isinstance(other, slice) and one == other
    return np.array_equal(one, other)


def _levels(depth: Ints, to: Ints, source: Ints, side: LocalRuns) -> dict[int, Level]:
    """Levels by depth. to, source: the ranks that a run's state goes to and enters from, -1 for none."""

    def by_peer(runs: Ints, peer: Ints) -> dict[int, Rows]:
        return {n: as_rows(runs[peer[runs] == n]) for n in np.unique(peer[runs]).tolist() if n >= 0}

    levels = {}
    for level in np.unique(depth).tolist():
        runs = np.flatnonzero(depth == level)
        levels[level] = Level(
            as_rows(runs), side.rows_of(runs), side.counts[runs], by_peer(runs, to), by_peer(runs, source)
        )
    return levels
