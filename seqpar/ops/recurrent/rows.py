"""Rows of neighbours: `shift` and `halo`, under any layout.

Only rows next to a document run change ranks (`seqpar.plan.runs`); here one document on two ranks::

    rank              |  0  |   1    |  0  |
    position          | 0 1 | 2 3  4 | 5 6 |
    shift by 1        | - 0 | 1 2  3 | 4 5 |     - is zeros; rows 1 and 4 are sent
    halo of 2         | - - | 0 1    | 3 4 |     two rows for each run; rows 0, 1, 3 and 4 are sent

Both are linear, so the backward is the transposed move: gradients go back to the rows, where they are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seqpar.comm import Comm, Tag
from seqpar.comm.entry import refuse_transforms
from seqpar.facts.intervals import expand
from seqpar.facts.value import MOST, Ints, Memo, cached, is_integer
from seqpar.kernels import acc_dtype
from seqpar.kernels.memory.copy import Pair, copy
from seqpar.ops.attention.source import check_plan, plan_and_comm, values_of
from seqpar.ops.core.agreement import abort_on_error, agreement, plan_fact
from seqpar.ops.core.collective_op import CollectiveOp, Record, check_dense
from seqpar.ops.core.device import stream_of
from seqpar.ops.core.precompute import recent_recurrent
from seqpar.ops.core.regions import check_repetition
from seqpar.ops.move.relayout import Moves, exchanged, facts_of_rows, row_numbers
from seqpar.plan import Plan
from seqpar.plan.runs import DocumentRuns, RankRuns, Requests


def document_runs(plan: Plan) -> DocumentRuns:
    """The document runs of a plan; cached."""
    return DocumentRuns.of(plan.residence)


def runs(plan: Plan, rank: int) -> RankRuns:
    """A rank's document runs: maximal stretches of consecutive positions of one document, in position order; a copy."""
    return deepcopy(rank_runs(plan, rank))


@cached
def rank_runs(plan: Plan, rank: int) -> RankRuns:
    """`runs` as all calls share them; cached."""
    return RankRuns.of(document_runs(plan), plan.layout.positions(rank), rank)


def moves_of(requests: Requests, rank: int, rows: int, local: Any) -> tuple[Ints, Moves]:
    """The items that a rank asked for, and the move that brings them. local: items -> this rank's rows of them."""
    arrived, recvs = requests.arriving(rank)
    sends = {peer: local(items) for peer, items in requests.leaving(rank).items()}
    return arrived, Moves(sends, recvs, rows, arrived.size, copied=True)


@dataclass(frozen=True, eq=False)
class RowMap(Memo):
    """The rows that a rank's result consists of; zeros elsewhere.

    Local rows ``taken`` stand at ``placed``, and arrived rows ``used`` at ``filled``.
    """

    rows_in: int
    rows_out: int
    taken: Ints
    placed: Ints
    used: Ints
    filled: Ints
    moves: Moves
    _memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @staticmethod
    @cached
    def of(plan: Plan, rank: int, what: str, reach: int) -> RowMap:
        """The map of ``shift`` by `reach`, or of the ``halo`` of as many rows; cached."""
        table, own, paths = document_runs(plan), rank_runs(plan, rank), plan.mask.paths
        requests = table.rows_before(reach) if paths is None else table.rows_above(paths, reach)
        arrived, moves = moves_of(requests, rank, plan.rows(rank), own.local)
        begin, end = table.offsets[own.documents], table.offsets[own.documents + 1]
        start = table.start[own.numbers]
        if what == "halo":
            wanted = (start[:, None] + np.arange(-reach, 0)).ravel()
            inside = wanted >= np.repeat(begin, reach)
            place, rows_out = np.arange(wanted.size), wanted.size
        else:
            place, rows_out = own.local(own.positions), plan.rows(rank)
            if paths is None:
                wanted = expand(start - reach, own.counts)
                inside = (wanted >= np.repeat(begin, own.counts)) & (wanted < np.repeat(end, own.counts))
            else:
                wanted = paths.before(own.positions, reach)
                inside = wanted >= 0
        wanted, place = wanted[inside], place[inside]
        here = table.owner(wanted) == rank
        order = np.argsort(arrived)
        used = order[np.searchsorted(arrived[order], wanted[~here])]
        return RowMap(plan.rows(rank), rows_out, own.local(wanted[here]), place[here], used, place[~here], moves)

    def on(self, device: torch.device) -> Sequence[Tensor]:
        """taken, placed, used and filled on a device, uploaded once per stream."""
        arrays = [self.taken, self.placed, self.used, self.filled]
        return self.memo(stream_of(device), lambda: row_numbers(arrays, device))  # type: ignore[no-any-return]

    def apply(self, x: Tensor, comm: Comm, tag: Tag) -> Tensor:
        """x [rows_in, ...] -> [rows_out, ...]. A collective."""
        with abort_on_error(comm, f"exchange of rows, call {tag.call}"):
            taken, placed, used, filled = self.on(x.device)
            arrived = exchanged([x], comm, [self.moves], tag)[0]
            y = x.new_zeros(self.rows_out, *x.shape[1:])
            copy([Pair(y, x, placed, taken), Pair(y, arrived, filled, used)])
        return y

    def apply_transposed(self, y: Tensor, comm: Comm, tag: Tag) -> Tensor:
        """y [rows_out, ...] -> [rows_in, ...]: every row's sum over the places where `apply` puts it. A collective."""
        with abort_on_error(comm, f"exchange of rows, call {tag.call}"):
            taken, placed, used, filled = self.on(y.device)
            dtype, shape = acc_dtype(y.dtype), y.shape[1:]
            leaving = y.new_zeros(self.moves.rows_out, *shape, dtype=dtype)
            # index_put, unlike index_add, sums in one order on CUDA too
            leaving.index_put_((used,), y[filled].to(dtype), accumulate=True)
            x = exchanged([leaving], comm, [self.moves.transposed()], tag)[0]
            x.index_put_((taken,), y[placed].to(dtype), accumulate=True)
        return x.to(y.dtype)


def shift(x: Tensor, plan: Plan | Tensor, comm: Comm | None = None, *, by: int = 1) -> Tensor:
    """The row ``by`` positions earlier in the same document, for every row; zeros where there is none. A collective.

    Spec over ranks, per document: ``unshard(y)[p] == unshard(x)[p - by]``. x [T, ...], this rank's rows, any dtype
    that PyTorch copies -> the same shape; pad rows are zeros. by: negative for later rows, as labels of the next tokens
    need. Only rows next to a document run are sent, once to each rank that needs them. The adjoint is `shift` by
    ``-by``.

    In a tree the earlier row is that of the token ``by`` places up the path: the first token of every answer gets the
    row of the prompt's last token, whose gradient is the sum of theirs.

    In a compiled model ``plan`` is a handle, ``seqpar.bind(plan, comm)``, without a comm.

    Raises: ValueError for a wrong number of rows or a `by` of 0, NotImplementedError for later rows in a tree, where a
    token has several next ones; on every rank.
    """
    refuse_transforms("shift")
    rows = x.shape[0] if isinstance(x, Tensor) and not x.is_nested and x.dim() else 0
    return SHIFT([x], values_of("shift", plan, comm), "shift", by, rows)[0]


def halo(x: Tensor, plan: Plan, comm: Comm, *, reach: int) -> Tensor:
    """The ``reach`` rows before each document run of this rank, inside its document. A collective.

    x [T, ...], this rank's rows, any dtype that PyTorch copies -> [runs, reach, ...], runs in position order, rows in
    position order; zeros before a document's start. Only rows that another rank holds are sent, once to each rank that
    needs them.

    Raises: ValueError for a wrong number of rows or a reach below 1, on every rank; NotImplementedError in a compiled
    model, where the number of runs is unknown.
    """
    refuse_transforms("halo")
    if torch.compiler.is_compiling():
        raise NotImplementedError("halo: not supported in a compiled model; call it outside")
    rows = HALO([x], [plan, comm], "halo", reach, -1)[0]
    return rows.unflatten(0, (-1, reach))


@dataclass(eq=False)
class RowRecord(Record):
    """A completed `shift` or `halo`, or the transposed move."""

    rows: RowMap
    transposed: bool


def _neighbours(
    tensors: Sequence[Tensor], values: Sequence[Any], what: str, reach: int, rows: int, grads: Sequence[bool]
) -> tuple[list[Tensor], tuple[()], RowRecord]:
    """The result, and the record of the move. values: plan and comm, or the record of the move to transpose."""
    if isinstance(values[0], RowRecord):
        record = values[0]
        return _moved(tensors[0], record.rows, not record.transposed, record.comm, record.way_back())
    (x,), (plan, comm) = tensors, plan_and_comm(what, values)
    with agreement(what, comm) as call:
        check_dense(what, tensors)
        check_rows(what, x, plan, comm)
        if not is_integer(reach) or reach == 0 or (what == "halo" and reach < 0) or abs(reach) > MOST:
            name, least = (
                ("by", "an integer other than 0, of at most 62 bits")
                if what == "shift"
                else ("reach", "an integer of at least 1")
            )
            raise ValueError(f"{what}: {name} must be {least}, got {reach!r:.200}")
        if plan.mask.paths is not None and (what == "halo" or reach < 0):
            raise NotImplementedError(
                f"{what}: a token of a tree has one token before it and several after it, got {plan.mask}; use shift "
                "with a positive by, which goes up the path"
            )
        row_map = RowMap.of(plan, comm.rank, what, reach)
        recent_recurrent.note(comm, RowMap.of, what, reach)
        call.of(plan, {"plan": plan_fact(plan), "reach": reach} | facts_of_rows(x, grads[0]))
    check_repetition(what, comm, (plan, reach), "plan")
    return _moved(x, row_map, False, comm, Tag(call.digest, comm.next_call(), 0, 0, f"{what} (forward)"))


def check_rows(what: str, x: object, plan: Plan, comm: Comm) -> None:
    """Raise unless x is a tensor with this rank's rows of a plan for the comm's ranks."""
    check_plan(what, plan, comm)
    if not isinstance(x, Tensor):
        raise TypeError(f"{what} takes a tensor, got {type(x).__name__} {x!r:.200}")
    rows = plan.rows(comm.rank)
    if x.dim() == 0 or x.shape[0] != rows:
        raise ValueError(f"{what}: rank {comm.rank} must have {rows} rows, as the plan gives it, got {list(x.shape)}")


def _moved(
    x: Tensor, rows: RowMap, transposed: bool, comm: Comm, tag: Tag
) -> tuple[list[Tensor], tuple[()], RowRecord]:
    y = rows.apply_transposed(x, comm, tag) if transposed else rows.apply(x, comm, tag)
    return [y], (), RowRecord(comm, tag, rows, transposed)


def _way_back(
    tensors: Sequence[Tensor], options: tuple[Any, ...], needed: Sequence[int]
) -> tuple[CollectiveOp, tuple[Any, ...]]:
    what, reach, *_ = options
    return SHIFT if what == "shift" else HALO, (what, reach, tensors[0].shape[0])


def _fake(
    xs: Sequence[Tensor], handles: Sequence[Tensor], what: str, reach: int, rows: int, grads: Sequence[bool]
) -> list[Tensor]:
    if isinstance(rows, int) and rows < 0:
        raise NotImplementedError(f"{what} of fake tensors, whose number of rows the plan alone knows")
    return [x.new_empty(rows, *x.shape[1:]) for x in xs]


SHIFT, HALO = (
    CollectiveOp(what, _neighbours, _fake, options="str what, int reach, SymInt rows", adjoint=_way_back)
    for what in ("shift", "halo")
)
