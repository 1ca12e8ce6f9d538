"""States in a chain: what enters a run comes from the run before it, in blocks of heads, and is passed on to the next.

::

    step          1      2      3      4
    rank 0 to 1   b0     b1                         S_out(0) = S(0)
    rank 1 to 2          b0     b1                  S_out(1) = M(1) S_in(1) + S(1)
    rank 2 to 3                 b0     b1           3 hops and 2 blocks: 4 exchanges

Block b of a document's nth run is sent in step ``n + b``, counted from 0: while one rank passes on a block, the rank
before it passes on the next one. All documents, and a rank's several runs, go at once. Steps are numbered alike on all
ranks, each takes part in those where it sends or receives, and each step needs arrivals of the one before it only: so
ranks never wait in a circle. Maps stay where they are. Backward is the same chain from each document's end, with
transposed maps, of the gradients of what enters.

Sources: Sun et al. 2024 (LASP), the chain of one block; Chou et al. 2025 (ZeCO), blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqpar.comm import Comm, Tag
from seqpar.facts.value import Ints, Memo
from seqpar.ops.core.device import Uploaded
from seqpar.ops.move.pack import post, rows_of
from seqpar.ops.move.relayout import rows_on
from seqpar.ops.recurrent.maps import applied, applied_transposed, gradient_of_maps
from seqpar.plan.runs import DocumentRuns
from seqpar.plan.steps import Rows, as_rows, count


class Hop(NamedTuple):
    """One step of a chain, on one rank. Block b of its nth run is row ``n * blocks + b``.

    folded: sent rows of runs that something has entered. sends, recvs: peer -> rows.
    """

    step: int
    folded: Rows
    sends: Mapping[int, Rows]
    recvs: Mapping[int, Rows]


@dataclass(frozen=True, eq=False)
class StateChain(Memo):
    """One rank's part: its steps on the way forth and on the way back.

    steps: of all ranks, in each direction. continuing: the rank's runs that are neither first nor last.
    """

    blocks: int
    steps: int
    forth: Sequence[Hop]
    back: Sequence[Hop]
    continuing: Ints
    _memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, table: DocumentRuns, rank: int, blocks: int) -> StateChain:
        """A rank's part among these runs, with states in so many blocks of heads."""
        own, opens, closes = table.of_rank(rank), table.opens, table.closes
        after = np.where(closes, -1, np.append(table.rank[1:], -1))[own]
        before = np.where(opens, -1, np.append(-1, table.rank[:-1]))[own]
        ordinal = table.ordinal
        ahead = np.searchsorted(table.document, table.document, side="right") - 1 - np.arange(ordinal.size)
        steps = int(ordinal.max(initial=0)) + blocks - 1
        forth, back = _hops(ordinal[own], after, before, blocks), _hops(ahead[own], before, after, blocks)
        return cls(blocks, steps, forth, back, np.flatnonzero((after >= 0) & (before >= 0)))

    def forward(self, states: Tensor, maps: Tensor, comm: Comm, tag: Tag) -> list[Tensor]:
        """The states that enter the rank's runs. A collective."""
        return [self._passed(self.forth, states, maps, applied, comm, tag)]

    def backward(
        self, states: Tensor, maps: Tensor, kept: Sequence[Tensor], dentered: Tensor, comm: Comm, tag: Tag
    ) -> list[Tensor]:
        """The gradients of states and maps. A collective. kept: what `forward` returned."""
        dleft = self._passed(self.back, dentered, maps, applied_transposed, comm, tag)
        continuing = self._on(states.device).rows(self.continuing)
        dmaps = torch.zeros_like(maps)
        dmaps[continuing] = gradient_of_maps(maps[continuing], kept[0][continuing], dleft[continuing])
        return [dleft, dmaps]

    def _passed(
        self, hops: Sequence[Hop], own: Tensor, maps: Tensor, apply: Callable[[Tensor, Tensor], Tensor], comm: Comm,
        tag: Tag,
    ) -> Tensor:  # fmt: skip
        """What enters the rank's runs, zeros where nothing does; each passes on ``own + apply(maps, entered)``."""
        at = self._on(own.device)
        entered = comm.empty(own.shape, own.dtype, own.device, kept=True).zero_()
        own = own.clone(memory_format=torch.contiguous_format)
        leaving, arriving, maps = (self._blocks(x) for x in (own, entered, maps.contiguous()))
        for hop in hops:
            if count(hop.folded):
                rows = at.rows(hop.folded)
                leaving[rows] += apply(maps[rows], arriving[rows])
            sends, recvs = (
                {peer: [[rows_of(x, at.rows(rows))]] for peer, rows in side.items()}
                for x, side in ((leaving, hop.sends), (arriving, hop.recvs))
            )
            post(comm, sends, recvs, tag._replace(stage=tag.stage * self.steps + hop.step))()
        return entered

    def _blocks(self, x: Tensor) -> Tensor:
        """[runs, H, ...] as [runs * blocks, H / blocks, ...], in the same memory."""
        return x.view(x.shape[0] * self.blocks, x.shape[1] // self.blocks, *x.shape[2:])

    def _on(self, device: torch.device) -> Uploaded:
        hops = (*self.forth, *self.back)
        rows = (x for hop in hops for x in (hop.folded, *hop.sends.values(), *hop.recvs.values()))
        return rows_on(self, chain([self.continuing], rows), device)


def _hops(depth: Ints, to: Ints, source: Ints, blocks: int) -> list[Hop]:
    """The steps of a rank's runs, which something enters from rank `source` and leaves for rank `to`, -1 for none.

    depth: the hops before each run. A pair of ranks numbers the rows of a step alike, as both go by positions.
    """
    row = np.arange(depth.size * blocks)
    depth, to, source = (np.repeat(x, blocks) for x in (depth, to, source))
    step = depth + row % blocks
    sends, recvs = _by_step(step, to, row), _by_step(step - 1, source, row)
    folded = _by_step(step, np.where((to >= 0) & (source >= 0), 0, -1), row)
    none: Mapping[int, Rows] = {}
    return [
        Hop(n, folded.get(n, {0: slice(0, 0)})[0], sends.get(n, none), recvs.get(n, none))
        for n in sorted({*sends, *recvs})
    ]


def _by_step(step: Ints, peer: Ints, row: Ints) -> dict[int, dict[int, Rows]]:
    """Ascending rows by step and peer, without those whose peer is -1."""
    order = np.lexsort((row, peer, step))
    order = order[peer[order] >= 0]
    step, peer, row = step[order], peer[order], row[order]
    first = np.flatnonzero((np.diff(step, prepend=-1) != 0) | (np.diff(peer, prepend=-1) != 0))
    found: dict[int, dict[int, Rows]] = {}
    for n, to, rows in zip(step[first].tolist(), peer[first].tolist(), np.split(row, first[1:])):
        found.setdefault(n, {})[to] = as_rows(rows)
    return found
