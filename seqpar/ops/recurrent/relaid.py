"""Rows in a contiguous layout, for layers whose states or halos would cost more than moving all rows and results.

::

    rank 0   rows 0 2 4 6       ──►   rows 0 1 2 3   compute, a state goes to rank 1   ──►   results 0 2 4 6
    rank 1   rows 1 3 5 7             rows 4 5 6 7   compute                                 results 1 3 5 7

Each rank has as many rows there as tokens here. Pads stay where they are. Backward moves gradients the same two ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from seqpar.comm import Comm, Tag
from seqpar.facts.intervals import edges
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.facts.value import Ints, cached
from seqpar.ops.move.relayout import Moves, exchanged, moves_between
from seqpar.ops.recurrent.rows import document_runs
from seqpar.plan import Plan
from seqpar.plan.steps import as_rows

PHASES = 2  # forward and backward of the exchange between; those of `there` and of `home` come after


@dataclass(frozen=True, eq=False)
class ContiguousRows:
    """One rank's rows of a plan in a contiguous layout.

    plan: of that layout, with the same documents. rows: their move. final: that of the states which documents end with.
    """

    plan: Plan
    rows: Moves
    final: Moves

    @staticmethod
    @cached
    def of(plan: Plan, rank: int) -> ContiguousRows:
        """A rank's part; cached."""
        inside = _contiguous(plan)
        rows = replace(moves_between(plan.layout, inside.layout, rank), rows_in=plan.rows(rank))
        before, after = (table.rank[table.closes] for table in map(document_runs, (inside, plan)))  # by document
        return ContiguousRows(inside, rows, _regrouped(before, after, rank))

    def there(self, xs: Sequence[Tensor | None], comm: Comm, tag: Tag) -> list[Tensor | None]:
        """Rows, or gradients of results, in the contiguous layout. A collective."""
        return _moved(xs, self.rows, comm, _tag(tag, 1))

    def home(self, xs: Sequence[Tensor | None], comm: Comm, tag: Tag) -> list[Tensor | None]:
        """Results, or gradients of rows, in the plan's layout; zeros for its pads. A collective."""
        ys = _moved(xs, self.rows.transposed(), comm, _tag(tag, 2))
        for y in ys:
            if y is not None:
                y[self.rows.rows_out :] = 0  # as many rows as tokens
        return ys

    def final_home(self, states: Tensor, comm: Comm, tag: Tag) -> Tensor:
        """The states that documents end with, on the ranks that hold their last row. A collective."""
        return exchanged([states], comm, [self.final], _tag(tag, 3))[0]

    def final_there(self, grads: Tensor, comm: Comm, tag: Tag) -> Tensor:
        """The gradients of those states, on the ranks that computed them. A collective."""
        return exchanged([grads], comm, [self.final.transposed()], _tag(tag, 3))[0]


def _moved(xs: Sequence[Tensor | None], moves: Moves, comm: Comm, tag: Tag) -> list[Tensor | None]:
    given = [x for x in xs if x is not None]
    moved = iter(exchanged(given, comm, [moves] * len(given), tag))
    return [None if x is None else next(moved) for x in xs]


def _tag(tag: Tag, nth: int) -> Tag:
    return tag._replace(phase=tag.phase + PHASES * nth, name=f"{tag.name}, rows in another layout")


@cached
def _contiguous(plan: Plan) -> Plan:
    """A plan of the same documents in a contiguous layout, with as many tokens on each rank."""
    sizes = plan.layout.sizes()
    layout = Layout.from_pieces(edges(sizes)[:-1], sizes, np.arange(plan.ranks), plan.ranks, name="contiguous")
    return Plan(Mask(plan.mask.lengths), layout)


def _regrouped(before: Ints, after: Ints, rank: int) -> Moves:
    """The move of items to other ranks, with each rank's in order. before, after: the rank of each item."""
    mine, wanted = np.flatnonzero(before == rank), np.flatnonzero(after == rank)
    sends = {int(peer): as_rows(np.flatnonzero(after[mine] == peer)) for peer in np.unique(after[mine])}
    recvs = {int(peer): as_rows(np.flatnonzero(before[wanted] == peer)) for peer in np.unique(before[wanted])}
    return Moves(sends, recvs, mine.size, wanted.size)
