"""`fetch`: the keys that a rank's own queries see, in one buffer, for kernels of one's own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from seqpar.comm import Comm, Tag
from seqpar.ops.attention.source import check_plan, plan_and_comm, values_of
from seqpar.ops.core.agreement import agreement, plan_fact
from seqpar.ops.core.collective_op import CollectiveOp, check_dense
from seqpar.ops.core.regions import check_repetition
from seqpar.ops.move.relayout import MoveRecord, Moves, moved, way_back
from seqpar.plan import Plan

UNKNOWN = -1  # the number of rows, where no graph needs it
NEEDS_ROWS = "fetch: a compiled model needs rows=len(plan.fetched(rank).positions)"


def fetch(x: Tensor, plan: Plan | Tensor, comm: Comm | None = None, *, rows: int | None = None) -> Tensor:
    """The key rows that this rank's own queries see, in position order. A collective.

    Spec over ranks: ``global[plan.fetched(r).positions]`` for ``global[plan.kv_layout.positions(r)] = xs[r]``. x
    [plan.rows(rank, "kv"), ...], any dtype that PyTorch copies -> [N, ...]. `Plan.fetched` says which query row sees
    which row of the result. Owners send each rank what it needs and nothing else, whatever the plan's transport and
    Ulysses width; pads are not sent, and `Plan.fetch_bytes` is what a rank sends.

    Backward is the adjoint: gradients return to the owners, which sum them in ascending order of ranks, 16-bit ones in
    float32. As with `unshard`, a loss is each rank's share of the global one.

    In a compiled model ``plan`` is a handle, ``seqpar.bind(plan, comm)``, without a comm, or `bind` has seen both; and
    rows must be ``len(plan.fetched(rank).positions)``.

    Raises: ValueError for a wrong number of rows, or ranks that differ, on every rank, before any byte moves.

    Source: fetching only needed keys, Zewei Tao et al. 2025 (MagiAttention).
    """
    return fetch_all([x], plan, comm, rows=rows)[0]


def fetch_all(
    xs: Sequence[Tensor], plan: Plan | Tensor, comm: Comm | None = None, *, rows: int | None = None
) -> list[Tensor]:
    """`fetch` of several tensors, as keys and values, in one exchange forward and one backward. A collective.

    Any trailing dims and dtypes. Tensors without a gradient send none back.

    Raises: as `fetch`.
    """
    values = values_of("fetch", plan, comm)
    if rows is None and torch.compiler.is_compiling():
        raise ValueError(NEEDS_ROWS)
    tensors = [] if isinstance(xs, Tensor) or not isinstance(xs, Iterable) else list(xs)  # all ranks refuse none
    return list(FETCH(tensors, values, UNKNOWN if rows is None else rows))


def _run(
    xs: Sequence[Tensor], values: Sequence[Any], rows: int, grads: Sequence[bool]
) -> tuple[list[Tensor], tuple[()], MoveRecord]:
    """The results and the record of the move. values: plan and comm."""
    plan, comm = plan_and_comm("fetch", values)
    with agreement("fetch", comm) as call:
        check_dense("fetch", xs)
        check_plan("fetch", plan, comm)
        _check_tensors(xs, plan.rows(comm.rank, "kv"), comm.rank)
        moves = plan.memo(("fetch", comm.rank), lambda: _moves(plan, comm.rank))
        if rows not in (UNKNOWN, moves.rows_out):
            raise ValueError(
                f"fetch: rows={rows}, but rank {comm.rank} gets {moves.rows_out}; give "
                "len(plan.fetched(rank).positions)"
            )
        facts: dict[str, object] = {"plan": plan_fact(plan), "requires grad": tuple(grads)}
        facts |= {"dtype": tuple([x.dtype for x in xs]), "device": tuple([x.device.type for x in xs])}
        call.of(plan, facts | {"other dims": tuple([tuple(x.shape[1:]) for x in xs])})
    check_repetition("fetch", comm, plan, "plan")
    return moved(xs, comm, moves, Tag(call.digest, comm.next_call(), 0, 0, "fetch (forward)"))


def _check_tensors(xs: Sequence[object], rows: int, rank: int) -> None:
    if not xs:
        raise ValueError("fetch_all takes a sequence of at least one tensor; fetch takes one tensor")
    for x in xs:
        if not isinstance(x, Tensor):
            raise TypeError(f"fetch takes tensors, got {type(x).__name__} {x!r:.200}")
        if x.dim() == 0 or x.shape[0] != rows:
            raise ValueError(
                f"fetch: x on rank {rank} must have {rows} rows, as the plan places keys, got {list(x.shape)}; "
                'seqpar.shard(x, plan, rank, side="kv") makes them'
            )


def _moves(plan: Plan, rank: int) -> Moves:
    fetched = plan.fetch_table(rank)
    return Moves(fetched.sends, fetched.recvs, plan.rows(rank, "kv"), fetched.positions.size, copied=True)


def _fake(xs: Sequence[Tensor], handles: Sequence[Tensor], rows: int, grads: Sequence[bool]) -> list[Tensor]:
    if isinstance(rows, int) and rows == UNKNOWN:
        raise ValueError(NEEDS_ROWS)
    return [x.new_empty(rows, *x.shape[1:]) for x in xs]


FETCH = CollectiveOp("fetch", _run, _fake, options="SymInt rows", adjoint=way_back)
