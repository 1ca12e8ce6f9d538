"""Moves of rows: `shard` and `unshard` between global tensors and shards, `relayout` between layouts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seqpar.comm import Comm, Tag
from seqpar.comm.entry import uncompiled
from seqpar.facts.layout import Layout
from seqpar.facts.value import Ints, Memo
from seqpar.kernels import acc_dtype
from seqpar.kernels.memory.copy import picked
from seqpar.kernels.memory.upload import upload
from seqpar.ops.core.agreement import (
    abort_on_error,
    agreement,
    check_comm,
    check_ranks,
    digest_of_call,
    errors_on_all_ranks,
    plan_fact,
    remember,
)
from seqpar.ops.core.collective_op import CollectiveOp, Record, check_dense
from seqpar.ops.core.device import Uploaded, stream_of
from seqpar.ops.core.handles import checked_values, in_graph
from seqpar.ops.core.regions import check_repetition
from seqpar.ops.move.pack import Place, post, rows_of
from seqpar.plan import Plan, Rows
from seqpar.plan.steps import as_rows
from seqpar.private import torch as torch_private


@dataclass(frozen=True, eq=False)
class Moves(Memo):
    """Rows that change ranks: peer -> local rows to send, and peer -> rows of the result; includes the rank itself.

    copied: whether a row goes to several ranks, so that its gradient is a sum. summed: the backward of such a move.
    """

    sends: Mapping[int, Rows]
    recvs: Mapping[int, Rows]
    rows_in: int
    rows_out: int
    copied: bool = False
    summed: bool = False
    _memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    def transposed(self) -> Moves:
        """The backward of the move, which shares its cache."""
        return Moves(self.recvs, self.sends, self.rows_out, self.rows_in, self.summed, self.copied, self._memo)

    def on(self, device: torch.device) -> Uploaded:
        """The row numbers on a device: see `rows_on`."""
        return rows_on(self, (x for side in (self.sends, self.recvs) for x in side.values()), device)


def rows_on(owner: Memo, rows: Iterable[Rows], device: torch.device) -> Uploaded:
    """Row numbers on a device, uploaded once per stream and cached: see `seqpar.ops.attention.call.uploaded`."""

    def make() -> Uploaded:
        arrays = [x for x in rows if isinstance(x, np.ndarray)]
        return Uploaded(dict(zip(map(id, arrays), row_numbers(arrays, device), strict=True)))

    return owner.memo(stream_of(device), make)  # type: ignore[no-any-return]


@uncompiled
def row_numbers(arrays: Sequence[Ints], device: torch.device) -> Sequence[Tensor]:
    """Row numbers on a device, in one transfer. int64: other dtypes would be converted at every assignment."""
    if not arrays:
        return ()
    with torch.inference_mode(False):  # they outlive the caller's mode, and autograd saves them
        (flat,) = upload([np.concatenate(arrays)], device)
        return flat.long().split([len(x) for x in arrays])


def relayout(x: Tensor, comm: Comm, *, src: Layout, dst: Layout, rows: int | None = None) -> Tensor:
    """This rank's rows of the same global tensor under another layout. A collective.

    Spec over ranks: ``global[dst.positions(r)]`` for ``global[src.positions(r)] = xs[r]``. x [src.tokens(rank), ...] ->
    [dst.tokens(rank), ...], any dtype that PyTorch copies. Each row moves once; a row that stays is not sent. The
    adjoint is ``relayout`` with src and dst swapped.

    In a compiled model, ``seqpar.bind(src, dst, comm)`` must have seen all three, and rows must be
    ``dst.tokens(rank)``.

    Raises: ValueError for layouts that differ in tokens or in ranks, or a wrong number of rows, on every rank.
    """
    with errors_on_all_ranks("relayout", comm):
        check_dense("relayout", [x])
        if not torch.compiler.is_compiling():
            check_comm("relayout", comm)
            _check_layouts(x, comm, src, dst)
            rows = dst.tokens(comm.rank) if rows is None else rows
        if rows is None:
            raise ValueError("relayout: a compiled model needs rows=dst.tokens(rank)")
    return RELAYOUT([x], [src, dst, comm], rows)[0]


def expect_relayout(x: Tensor, comm: Comm, *, src: Layout, dst: Layout) -> None:
    """Skip the comparison of the next `relayout`, since ranks already know each other's x and layouts.

    They do not know whether gradients are enabled: an x that requires one is still compared.
    """
    if not x.requires_grad:
        remember(comm, digest_of_call("relayout", _facts_of(x, src, dst, grad=False)))


def _facts_of(x: Tensor, src: Layout, dst: Layout, *, grad: bool) -> dict[str, object]:
    return {"src": src.digest(), "dst": dst.digest()} | facts_of_rows(x, grad)


def facts_of_rows(x: Tensor, grad: bool) -> dict[str, object]:
    """What must be equal on all ranks of a tensor whose rows are exchanged."""
    return {"dtype": x.dtype, "device": x.device.type, "other dims": tuple(x.shape[1:]), "requires grad": grad}


def _check_layouts(x: Tensor, comm: Comm, src: Layout, dst: Layout) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"x must be a tensor with rows, got {x!r:.200}")
    if not (isinstance(src, Layout) and isinstance(dst, Layout)):
        raise ValueError(f"src and dst must be layouts, got src={src!r:.200} and dst={dst!r:.200}")
    if src.total != dst.total:
        raise ValueError(f"src has {src.total} tokens, dst {dst.total}; give layouts of the same tokens")
    if not src.ranks == dst.ranks == comm.size:
        raise ValueError(
            f"src has {src.ranks} ranks, dst {dst.ranks}, the comm {comm.size}; give layouts over its ranks"
        )
    if x.dim() == 0 or x.shape[0] != src.tokens(comm.rank):
        raise ValueError(
            f"x on rank {comm.rank} must have {src.tokens(comm.rank)} rows, as src gives it, got {list(x.shape)}"
        )


def moves_between(src: Layout, dst: Layout, rank: int) -> Moves:
    """A rank's moves from one layout to another of the same tokens."""
    mine, wanted = src.positions(rank), dst.positions(rank)
    sends = _by_owner(mine, dst.owner()[mine], src.ranks)
    recvs = _by_owner(wanted, src.owner()[wanted], src.ranks)
    return Moves(sends, recvs, len(mine), len(wanted))


def _by_owner(positions: np.ndarray[Any, Any], owner: np.ndarray[Any, Any], size: int) -> dict[int, Rows]:
    """The rows that go to or come from each rank, in position order on both sides."""
    result: dict[int, Rows] = {}
    for peer in range(size):
        rows = np.flatnonzero(owner == peer)
        at = positions[rows]
        if rows.size:
            result[peer] = as_rows(rows) if (at[1:] > at[:-1]).all() else rows[np.argsort(at)]
    return result


def shard(x: Tensor, plan: Plan, rank: int, *, dim: int = 0, side: str = "q") -> Tensor:
    """This rank's rows of a global tensor; pad rows are zeros. Local: nothing is sent.

    x [..., tokens, ...] with the tokens at ``dim`` -> the same with ``plan.rows(rank)``. side: "q" or "kv". Gradients
    reach the rows that this rank took; over all ranks they sum to that of the global tensor.

    Raises: ValueError for a tensor without the plan's tokens at ``dim``.
    """
    layout = _layout_of(plan, side)
    _check_tensor("shard", x, dim)
    rows = plan.rows(rank, side)
    if not -x.dim() <= dim < x.dim() or x.shape[dim] != layout.total:
        told = f"shard along dim {dim} of {list(x.shape)}, expected {layout.total} tokens"
        has_them = [at for at, size in enumerate(x.shape) if size == layout.total]
        raise ValueError(told + (f"; give dim={has_them[0]}, which has them" if has_them else ""))
    if in_graph(x):  # a layout must not keep a graph's tensors
        taken = torch.from_numpy(layout.positions(rank)).to(x.device)
    else:
        key = "positions", rank, stream_of(x.device)
        with torch_private.DisableFuncTorch():  # a layout must not keep what a transform wraps either
            taken = layout.memo(key, lambda: row_numbers([layout.positions(rank)], x.device)[0])
    y = picked(x, dim, taken)
    if pads := rows - len(taken):
        shape = list(y.shape)
        shape[dim] = pads
        y = torch.cat([y, y.new_zeros(shape)], dim)
    return y


def unshard(x: Tensor, plan: Plan, comm: Comm, *, dim: int = 0, side: str = "q") -> Tensor:
    """The global tensor on every rank, from the rows that each rank holds. A collective.

    x [..., plan.rows(rank), ...] with rows at ``dim`` -> [..., tokens, ...]; pad rows are dropped. Backward is the
    adjoint: the gradients of all ranks' copies are summed on the rank that holds the row, so a loss that every rank
    computes counts once per rank.

    Raises: ValueError for a wrong number of rows, on every rank.
    """
    with errors_on_all_ranks("unshard", comm):
        if torch.compiler.is_compiling():
            raise NotImplementedError("unshard: not supported in a compiled model; call it outside")
        check_comm("unshard", comm)
        check_dense("unshard", [x])
        _check_tensor("unshard", x, dim)
        layout = _layout_of(plan, side)
        check_ranks(plan, comm)
        rows = plan.rows(comm.rank, side)
        if not -x.dim() <= dim < x.dim() or x.shape[dim] != rows:
            raise ValueError(f"x on rank {comm.rank} must have {rows} rows at dim {dim}, got {list(x.shape)}")
        dim %= x.dim()
    return UNSHARD([x.movedim(dim, 0)], [plan, comm], side, dim, layout.total)[0].movedim(0, dim)


def _copies(plan: Plan, side: str, comm: Comm) -> Moves:
    layout = _layout_of(plan, side)
    mine = slice(0, layout.tokens(comm.rank))
    recvs: dict[int, Rows] = {}
    for peer in range(comm.size):
        at = layout.positions(peer)
        recvs[peer] = as_rows(at) if (at[1:] > at[:-1]).all() else at
    return Moves(
        {peer: mine for peer in range(comm.size)}, recvs, plan.rows(comm.rank, side), layout.total, copied=True
    )


def _check_tensor(what: str, x: object, dim: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{what} takes a tensor, got {type(x).__name__} {x!r:.200}")
    if not isinstance(dim, Integral):
        raise TypeError(f"{what}: dim must be an integer, got {dim!r:.200}")


def _layout_of(plan: Plan, side: str) -> Layout:
    if not isinstance(plan, Plan):
        raise TypeError(f"expected a plan, got {plan!r:.200}")
    if side not in ("q", "kv"):
        raise ValueError(f'side must be "q" or "kv", got {side!r}')
    return plan.layout if side == "q" else plan.kv_layout


def exchanged(xs: Sequence[Tensor], comm: Comm, moves: Sequence[Moves], tag: Tag) -> list[Tensor]:
    """The rows of each tensor's move, those that stay included, all in one exchange; sums are in rank order."""
    ys = []
    sends: dict[int, list[list[Place]]] = {}
    recvs: dict[int, list[list[Place]]] = {}
    for x, move in zip(xs, moves, strict=True):
        x = x.resolve_conj().resolve_neg()
        at, shape = move.on(x.device), (move.rows_out, *x.shape[1:])
        dtype = x.dtype
        if move.summed:
            dtype = acc_dtype(x.dtype) if x.dtype.is_floating_point else x.dtype
            y = x.new_zeros(shape, dtype=dtype)
        else:
            y = comm.empty(shape, dtype, x.device, kept=True)
        ys.append(y)
        for peer, rows in move.sends.items():
            sends.setdefault(peer, []).append([rows_of(x, at.rows(rows))])
        for peer, rows in move.recvs.items():
            place = rows_of(y, at.rows(rows))
            recvs.setdefault(peer, []).append([place._replace(dtype=x.dtype, summed=True) if move.summed else place])
    post(comm, sends, recvs, tag)()
    return ys


@dataclass(eq=False)
class MoveRecord(Record):
    """A completed move."""

    moves: Moves


def moved(xs: Sequence[Tensor], comm: Comm, moves: Moves, tag: Tag) -> tuple[list[Tensor], tuple[()], MoveRecord]:
    """What an op of moves returns: the tensors after one move that all of them make, and its record."""
    with abort_on_error(comm, f"exchange of rows, call {tag.call}"):
        ys = exchanged(xs, comm, [moves] * len(xs), tag)
    ys = [y if y.dtype == x.dtype else y.to(x.dtype) for x, y in zip(xs, ys, strict=True)]
    return ys, (), MoveRecord(comm, tag, moves)


def _relayout(
    tensors: Sequence[Tensor], values: Sequence[Any], rows: int, grads: Sequence[bool]
) -> tuple[list[Tensor], tuple[()], MoveRecord]:
    """The results and the record of the move. values: src, dst and comm, or the record of the move to undo."""
    if isinstance(values[0], MoveRecord):
        record = values[0]
        return moved(tensors, record.comm, record.moves.transposed(), record.way_back())
    (x,), (src, dst, comm) = tensors, checked_values(values, Layout, Layout)
    with agreement("relayout", comm) as call:
        _check_layouts(x, comm, src, dst)
        # by its digest: two layouts that refer to each other are only freed by garbage collection
        moves = src.memo(("to", dst.digest(), comm.rank), lambda: moves_between(src, dst, comm.rank))
        _check_rows(rows, moves, comm)
        call.of(src, _facts_of(x, src, dst, grad=grads[0]))
    check_repetition("relayout", comm, (src, dst), "layout")
    return moved([x], comm, moves, Tag(call.digest, comm.next_call(), 0, 0, "relayout (forward)"))


def _unshard(
    tensors: Sequence[Tensor], values: Sequence[Any], side: str, dim: int, rows: int, grads: Sequence[bool]
) -> tuple[list[Tensor], tuple[()], MoveRecord]:
    """The result and the record of the move. values: plan and comm. dim: of the rows in the verb's x."""
    (x,), (plan, comm) = tensors, checked_values(values, Plan)
    with agreement("unshard", comm) as call:
        moves = plan.memo(("unshard", side, comm.rank), lambda: _copies(plan, side, comm))
        _check_rows(rows, moves, comm)
        call.of(plan, {"plan": plan_fact(plan), "dim": dim, "side": side} | facts_of_rows(x, grads[0]))
    check_repetition("unshard", comm, (plan, side, dim), "plan")
    return moved([x], comm, moves, Tag(call.digest, comm.next_call(), 0, 0, "unshard (forward)"))


def _check_rows(rows: int, moves: Moves, comm: Comm) -> None:
    if rows != moves.rows_out:
        raise ValueError(f"rows={rows}, but rank {comm.rank} gets {moves.rows_out}")


def way_back(tensors: Sequence[Tensor], _: object, needed: Sequence[int]) -> tuple[CollectiveOp, tuple[Any, ...]]:
    """The op and the options of the backward of moves."""
    return RELAYOUT, (tensors[0].shape[0],)


def _fake(xs: Sequence[Tensor], handles: Sequence[Tensor], *options: Any) -> list[Tensor]:
    *_, rows, _ = options
    return [x.new_empty(rows, *x.shape[1:]) for x in xs]


RELAYOUT = CollectiveOp("relayout", _relayout, _fake, options="SymInt rows", adjoint=way_back, checks=False)
UNSHARD = CollectiveOp(
    "unshard", _unshard, _fake, options="str side, int dim, SymInt rows", adjoint=way_back, checks=False
)
