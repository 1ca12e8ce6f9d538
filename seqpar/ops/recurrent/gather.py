"""States that are gathered: each rank gets the states and maps of all runs before its own, and folds them.

::

    S_in(0) = 0      S_in(1) = S(0)      S_in(2) = M(1) S_in(1) + S(1)      S_in(3) = M(2) S_in(2) + S(2)   ...

One exchange each way, of two tensors. A document's first run is never multiplied, and its map never sent.

Source: Sun et al. 2025 (LASP-2), with maps, and with need-only rows in place of an all-gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seqpar.comm import Comm, Tag
from seqpar.facts.value import Ints, Memo
from seqpar.ops.core.device import stream_of
from seqpar.ops.move.relayout import Moves, exchanged, row_numbers
from seqpar.ops.recurrent.maps import applied
from seqpar.ops.recurrent.recompute import gradients
from seqpar.ops.recurrent.rows import moves_of
from seqpar.plan.runs import DocumentRuns, FoldOrder


@dataclass(frozen=True, eq=False)
class StateGather(Memo):
    """One rank's part: the moves of states and of maps, and how arrived and own runs are folded.

    of_maps: for each level of the order, the maps that it takes, among own and then arrived ones.
    """

    states: Moves
    maps: Moves
    order: FoldOrder
    of_maps: list[Ints]
    _memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, table: DocumentRuns, rank: int) -> StateGather:
        """A rank's part among these runs."""
        own, order = table.of_rank(rank), FoldOrder.of(table, rank)
        requests = table.earlier_runs()
        later = ~table.opens[requests.item]
        local = lambda numbers: np.searchsorted(own, numbers)  # noqa: E731
        arrived, states = moves_of(requests, rank, own.size, local)
        mapped, maps = moves_of(type(requests)(*(column[later] for column in requests)), rank, own.size, local)
        # the place among own and arrived maps of each own and arrived state; any place for a first run
        by_number = np.argsort(mapped)
        at = np.minimum(np.searchsorted(mapped[by_number], arrived), max(by_number.size - 1, 0))
        place = np.concatenate([np.arange(own.size), own.size + (by_number[at] if by_number.size else 0 * at)])
        return cls(states, maps, order, [place[level] for level in order.levels])

    def forward(self, states: Tensor, maps: Tensor, comm: Comm, tag: Tag) -> list[Tensor]:
        """The states that enter the rank's runs, and the arrived states and maps. A collective."""
        far = exchanged([states, maps], comm, [self.states, self.maps], tag)
        return [self._folded(states, maps, *far), *far]

    def backward(
        self, states: Tensor, maps: Tensor, kept: Sequence[Tensor], dentered: Tensor, comm: Comm, tag: Tag
    ) -> list[Tensor]:
        """The gradients of states and maps. A collective. kept: what `forward` returned."""
        inputs = [states, maps, *kept[1:]]
        found = gradients(self._folded, inputs, [True] * 4, [dentered])
        full = [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)]
        home = exchanged(full[2:], comm, [self.states.transposed(), self.maps.transposed()], tag)
        return [x + y for x, y in zip(full[:2], home, strict=True)]

    def _folded(self, states: Tensor, maps: Tensor, far_states: Tensor, far_maps: Tensor) -> Tensor:
        """The states that enter the rank's runs."""
        levels, entered = self._on(states.device)
        known, mapped = torch.cat([states, far_states]), torch.cat([maps, far_maps])
        left = [known.new_zeros(1, *known.shape[1:])]
        for n, (of_states, of_maps) in enumerate(levels):
            state = known[of_states]
            if n:
                state = state + applied(mapped[of_maps], left[-1][: len(of_maps)])
            left.append(state)
        return torch.cat(left)[entered]

    def _on(self, device: torch.device) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """The levels' numbers of states and of maps, and the row of the state that enters each run, counted from 1."""

        def make() -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
            *tables, entered = row_numbers([*self.order.levels, *self.of_maps, self.order.entered + 1], device)
            half = len(tables) // 2
            return list(zip(tables[:half], tables[half:], strict=True)), entered

        return self.memo(stream_of(device), make)  # type: ignore[no-any-return]
