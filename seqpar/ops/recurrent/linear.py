"""`linear_attention`: linear attention, delta rules and state spaces over the runs of a plan.

::

    rank 0   prepare   leave ──►                  compute        leave: what the rank's runs do to a state
    rank 1   prepare   leave ──► exchange, fold   compute        fold: the states that enter its runs
    rank 2   prepare         ──► exchange, fold   compute

One exchange in forward, of the states and maps that later runs of the same documents need, and one in backward, of
their gradients. Backward computes the forward's local parts again, from the inputs and from what arrived.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqpar.comm import Comm, Tag
from seqpar.facts.value import Ints, Memo
from seqpar.kernels import acc_dtype
from seqpar.kernels.recurrent import Recurrence, RecurrentKernel, RecurrentSpec, choose
from seqpar.ops.core.agreement import abort_on_error, agreement, digest_of_call
from seqpar.ops.core.autocast import autocasts, no_autocast
from seqpar.ops.core.collective_op import CollectiveOp, Record, Tensors
from seqpar.ops.core.compared import hashed
from seqpar.ops.core.device import stream_of
from seqpar.ops.core.repetition import check_repetition
from seqpar.ops.move.relayout import exchanged, row_numbers
from seqpar.ops.recurrent.rows import check_rows, document_runs, plan_and_comm, runs, values_of
from seqpar.ops.recurrent.scan import Folding, folded
from seqpar.plan import Plan

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class States(NamedTuple):
    """States [documents, H, K, V] that this rank has, and the numbers of their documents."""

    documents: Sequence[int]
    states: Tensor


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan | Tensor,
    comm: Comm | None = None,
    *,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    normalize: bool = False,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    kernel: str = "auto",
) -> Tensor | tuple[Tensor, States]:
    """This rank's rows of a linear recurrence over each document of the plan. A collective, forward and backward.

    For each document, token by token and head by head, from ``initial_state`` or zeros:

        S <- exp(decay) S                        without decay: S
        S <- S + k (beta (v - k^T S))^T          the delta rule; without beta: S + k v^T
        out = scale q^T S

    q, k [T, G, K], v [T, H, V]: this rank's rows, ``T = plan.rows(rank)``, of one dtype (float64, float32, bfloat16,
    float16) and device, ``H % G == 0``; head h reads group ``h // (H // G)``. decay: logarithms at or below 0, [T, H]
    (RetNet, Mamba-2, gated delta rule) or [T, H, K] (gated linear attention, Kimi delta attention). beta [T, H]. Both
    in any floating dtype. Under autocast q, k and v are cast as for torch's own attention, and nothing else. scale: by
    default ``K ** -0.5``. normalize: divides q and k by their Euclidean norms, with 1e-6 added to the squares.
    initial_state [documents, H, K, V]: equal on all ranks, which ``check="call"`` compares; the rank with a document's
    first row reads it. kernel: "auto", "chunked" or "reference".

    The recurrence runs over whole documents in order, whatever the mask's window is.

    In a compiled model ``plan`` is a handle, ``seqpar.bind(plan, comm)``, without a comm.

    Returns out [T, H, V] in v's dtype; pad rows are zeros, and what they hold enters nothing. If return_state also the
    numbers and the states of the documents whose last row this rank holds. Gradients of initial_state are this rank's
    shares: sum them over ranks. Sums are in float32, or float64 for float64, as are the states that travel: a rank gets
    those of the runs before its last one in each document.

    Raises: ValueError for shapes, dtypes or options that do not fit, on every rank, before any byte moves;
    NotImplementedError for masks that are not causal inside documents, for a kv_layout other than the layout, for
    return_state in a compiled model, and for double backward.
    """
    if return_state and torch.compiler.is_compiling():
        raise NotImplementedError("linear_attention: return_state is not supported in a compiled model")
    values = values_of("linear_attention", plan, comm)
    tensors = [*autocasts([q, k, v]), decay, beta, initial_state]
    out, states = LINEAR(tensors, values, scale, normalize, kernel, return_state)
    if not return_state:
        return out
    plan, comm = plan_and_comm("linear_attention", values)
    own = runs(plan, comm.rank)
    return out, States(own.documents[own.closes].tolist(), states)


@dataclass(frozen=True, eq=False)
class LocalRuns(Memo):
    """One rank's rows and runs, for a recurrence.

    order: local rows in position order, None if those are all rows in their own order. counts, documents: of the runs.
    opens, closes: runs that are the first or the last of their document. exported: runs that are not the last. folding:
    None if no document is on several ranks.
    """

    order: Ints | None
    counts: Ints
    documents: Ints
    opens: Ints
    closes: Ints
    exported: Ints
    folding: Folding | None
    _memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, plan: Plan, rank: int) -> LocalRuns:
        """A rank's side of a plan."""
        own = runs(plan, rank)
        exported = np.flatnonzero(~own.closes)
        passes = not document_runs(plan).closes.all()  # equal on all ranks
        folding = plan.memo(("folding", rank), lambda: Folding.of(plan, rank)) if passes else None
        order = own.local(own.positions)
        in_order = order.size == plan.rows(rank) and (order == np.arange(order.size)).all()
        return cls(
            None if in_order else order,
            own.counts,
            own.documents,
            np.flatnonzero(own.opens),
            np.flatnonzero(own.closes),
            exported,
            folding,
        )

    def on(self, device: torch.device) -> tuple[Tensor | None, Tensor, Tensor, Tensor, Tensor]:
        """order, opens, their documents, closes and exported on a device, uploaded once per stream."""

        def make() -> tuple[Tensor | None, ...]:
            arrays = [self.opens, self.documents[self.opens], self.closes, self.exported]
            *numbers, order = row_numbers([*arrays, self.opens[:0] if self.order is None else self.order], device)
            return None if self.order is None else order, *numbers

        return self.memo(stream_of(device), make)  # type: ignore[no-any-return]

    def tables(self, kernel: RecurrentKernel, device: torch.device) -> Any:
        """A kernel's tables of the runs on a device, uploaded once per stream."""

        def make() -> Any:
            with torch.inference_mode(False):  # they outlive the caller's mode
                return kernel.tables(self.counts, self.exported, device)

        return self.memo((kernel.name, stream_of(device)), make)


@dataclass(eq=False)
class LinearCall(Record):
    """A call of `linear_attention`: what its backward needs besides tensors."""

    side: LocalRuns
    kernel: RecurrentKernel
    scale: float
    normalize: bool


def _before(call: LinearCall, *inputs: Tensor | None) -> tuple[list[Tensor], Any]:
    """Begin, states and maps of all runs; and what the kernel has prepared."""
    q, k, v, decay, beta, initial = inputs
    assert q is not None and k is not None and v is not None
    side, dtype = call.side, acc_dtype(v.dtype)
    order, opens, documents, _, exported = side.on(v.device)
    rows = [None if x is None else (x if order is None else x[order]).to(dtype) for x in (q, k, v, decay, beta)]
    if call.normalize:
        rows[:2] = [x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in rows[:2] if x is not None]
    tables = side.tables(call.kernel, v.device)
    prepared = call.kernel.prepare(Recurrence(*rows, call.scale), tables)  # type: ignore[arg-type]
    begin = v.new_zeros(side.counts.size, v.shape[1], q.shape[2], v.shape[2], dtype=dtype)
    if initial is not None:
        begin = begin.index_copy(0, opens, initial[documents].to(dtype))
    if side.folding is None:
        return [begin], prepared
    left, mapped = call.kernel.leave(prepared, begin[exported])
    runs = side.counts.size
    states = left.new_zeros(runs, *left.shape[1:]).index_copy(0, exported, left)
    maps = mapped.new_zeros(runs, *mapped.shape[1:]).index_copy(0, exported, mapped)
    return [begin, states, maps], prepared


def _after(
    call: LinearCall, like: Tensor, prepared: Any, local: Sequence[Tensor], far: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """This rank's out, and the states that documents end with. like: v."""
    begin, *passed = local
    order, _, _, closes, _ = call.side.on(like.device)
    entering = begin
    if call.side.folding is not None:
        entering = begin + folded(*passed, *far, call.side.folding)
    rows, left = call.kernel.compute(prepared, entering)
    out = rows.to(like.dtype)
    return out if order is None else like.new_zeros(like.shape).index_copy(0, order, out), left[closes]


def _linear(
    tensors: Sequence[Any], values: Sequence[Any], scale: float | None, normalize: bool, kernel: str,
    return_state: bool, grads: Sequence[bool],
) -> tuple[list[Tensor], Tensors, LinearCall]:  # fmt: skip
    plan, comm = plan_and_comm("linear_attention", values)
    number = comm.next_call()
    with agreement("linear_attention", comm) as agreed:
        _check(tensors, plan, comm)
        q, _, v, decay, beta, initial = tensors
        kind = "none" if decay is None else "scalar" if decay.dim() == 2 else "channel"
        spec = RecurrentSpec(v.device.type, v.dtype, q.shape[2], v.shape[2], kind, beta is not None)
        scale, chosen = _checked_scale(scale, q.shape[2]), choose(kernel, spec)
        side = plan.memo(("recurrent side", comm.rank), lambda: LocalRuns.of(plan, comm.rank))
        agreed.facts = {
            "plan": plan.digest(), "dtype": v.dtype, "device": v.device.type, "q": q.shape[1:], "v": v.shape[1:],
            "decay": None if decay is None else decay.dim(), "beta": beta is not None, "initial": initial is not None,
            "scale": scale, "normalize": bool(normalize), "kernel": chosen.name, "requires grad": True in grads,
        }  # fmt: skip
        if comm.size > 1:
            key = "linear_attention", *agreed.facts.values()
            agreed.digest = plan.memo(key, lambda: digest_of_call("linear_attention", agreed.facts))
        if initial is not None and comm.check_every == "call":
            agreed.values = {"a hash of initial_state": int(hashed(initial))}
    stamp = hash((plan, scale, bool(normalize), chosen.name, id(comm.stats), comm.rank))
    check_repetition("linear_attention", comm, stamp, "plan or scale", recorded=True in grads)
    tag = Tag(agreed.digest, number, 0, 0, "linear_attention")
    call = LinearCall(comm, tag, side, chosen, scale, bool(normalize), stamp=stamp)
    with abort_on_error(comm, f"linear_attention, call {number}"), no_autocast(v.device.type), torch.no_grad():
        local, prepared = _before(call, *tensors)
        far: list[Tensor] = []
        if side.folding is not None:
            far = exchanged(local[1:], comm, [side.folding.states, side.folding.maps], tag)
        out, states = _after(call, v, prepared, local, far)
    return [out, states if return_state else states[:0]], [*tensors, *far], call


def _linear_back(call: LinearCall, saved: Sequence[Any], grads: Tensors, needs: Sequence[bool]) -> Tensors:
    """The gradients of q, k, v, decay, beta and initial_state."""
    tag, side, comm = call.way_back(), call.side, call.comm
    inputs, far = saved[:6], list(saved[6:])
    dout, dstates = grads
    v = inputs[2]
    with abort_on_error(comm, f"linear_attention, call {tag.call}"), no_autocast(v.device.type), torch.enable_grad():
        leaves = [None if x is None else x.detach().requires_grad_(need) for x, need in zip(inputs, needs, strict=True)]
        local, prepared = _before(call, *leaves)
        cut = [x.detach().requires_grad_() for x in local]
        far = [x.detach().requires_grad_() for x in far]
        out, states = _after(call, v, prepared, cut, far)
        wanted = [x for x in leaves if x is not None and x.requires_grad]
        pairs = [(y, g) for y, g in ((out, dout), (states, dstates)) if g is not None and g.shape == y.shape]
        ys, gs = (list(column) for column in zip(*pairs, strict=True)) if pairs else ([], [])
        passed = [*cut, *far]
        first = torch.autograd.grad(ys, [*wanted, *passed], gs, allow_unused=True, retain_graph=True) if ys else ()
        found = list(first) or [None] * (len(wanted) + len(passed))
        dlocal = [torch.zeros_like(x) if g is None else g for x, g in zip(passed, found[len(wanted) :], strict=True)]
        if side.folding is not None:
            moves = [side.folding.states.transposed(), side.folding.maps.transposed()]
            home = exchanged([x.detach() for x in dlocal[len(cut) :]], comm, moves, tag)
            dlocal[1:3] = [x + y for x, y in zip(dlocal[1:3], home, strict=True)]
        ends = [(x, g) for x, g in zip(local, dlocal) if x.requires_grad]
        if ends and wanted:
            ys, gs = (list(column) for column in zip(*ends, strict=True))
            second = torch.autograd.grad(ys, wanted, gs, allow_unused=True)
            found = [b if a is None else a if b is None else a + b for a, b in zip(found, second)]
    results = iter(found[: len(wanted)])
    grads_of = [next(results) if x is not None and x.requires_grad else None for x in leaves]
    zeros = [torch.zeros_like(x) if need and g is None else g for x, g, need in zip(inputs, grads_of, needs)]
    return zeros


def _check(tensors: Sequence[Any], plan: Plan, comm: Comm) -> None:
    """Raise unless a call's tensors fit each other and the plan."""
    q, k, v, decay, beta, initial = tensors
    name = "linear_attention"
    for title, x in (("q", q), ("k", k), ("v", v)):
        check_rows(f"{name}: {title}", x, plan, comm)
        if x.dim() != 3 or x.dtype not in DTYPES or (x.dtype, x.device) != (v.dtype, v.device):
            raise ValueError(
                f"{name}: q, k and v must be [rows, heads, dim] of one dtype and device, got {title} "
                f"{x.dtype} {list(x.shape)} on {x.device} beside v {v.dtype} {list(v.shape)} on {v.device}"
            )
    rows, heads, values = v.shape
    groups, dim = k.shape[1:]
    if q.shape != k.shape or not groups or heads % groups:
        raise ValueError(
            f"{name}: q and k must have one shape and v a multiple of their heads, got {list(q.shape)}, "
            f"{list(k.shape)} and {list(v.shape)}"
        )
    shapes = {
        "decay": (decay, ([rows, heads], [rows, heads, dim])),
        "beta": (beta, ([rows, heads],)),
        "initial_state": (initial, ([len(plan.mask.lengths), heads, dim, values],)),
    }
    for title, (x, fitting) in shapes.items():
        if x is None:
            continue
        if not isinstance(x, Tensor) or list(x.shape) not in fitting or x.dtype not in DTYPES or x.device != v.device:
            got = f"{x.dtype} {list(x.shape)} on {x.device}" if isinstance(x, Tensor) else repr(x)
            expected = " or ".join(map(str, fitting))
            raise ValueError(f"{name}: {title} must be floating {expected} on {v.device}, got {got!s:.200}")
    _check_recurrence(plan)
    if comm.check_every == "call" and decay is not None and decay.device.type == "cpu" and bool((decay > 0).any()):
        raise ValueError(f"{name}: decay holds logarithms at or below 0, got {float(decay.max())}; give log(factor)")


def _checked_scale(scale: Any, dim: int) -> float:
    """The scale as a number, by default that of so many dims."""
    if scale is None:
        return float(dim**-0.5)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise ValueError(f"linear_attention: scale must be a finite number, got {scale!r:.200}")
    return float(scale)


def _check_recurrence(plan: Plan) -> None:
    """Raise NotImplementedError for plans that no recurrence can follow."""
    if plan.kv_layout is not plan.layout:
        raise NotImplementedError("linear_attention: keys lie with their queries; make the plan without a kv_layout")
    if not plan.mask.within_documents or not plan.memo("causal documents", lambda: _is_causal(plan)):
        raise NotImplementedError(
            f"linear_attention: a recurrence is causal inside documents, got {plan.mask}; make the plan with "
            "Mask(lengths)"
        )


def _is_causal(plan: Plan) -> bool:
    rows = np.arange(plan.mask.tokens)
    _, hi = plan.mask.bounds(rows)
    return bool((hi <= rows + 1).all())


def _fake(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    ticket = torch.empty((), dtype=torch.int64, device="cpu")
    return v.new_empty(v.shape), v.new_empty(0, v.shape[1], q.shape[2], v.shape[2], dtype=acc_dtype(v.dtype)), ticket


def _fake_back(*arguments: Any) -> tuple[Tensor, ...]:
    _, _, *tensors, _, _, _, needs = arguments
    v = tensors[2]
    pairs = zip(tensors, needs, strict=True)
    return tuple(x.new_empty(x.shape) if x is not None and need else v.new_empty(0) for x, need in pairs)


LINEAR = CollectiveOp("linear_attention", _linear, back=_linear_back)
LINEAR.define(
    6,
    "(Tensor q, Tensor k, Tensor v, Tensor? decay, Tensor? beta, Tensor? initial_state, Tensor[] handles, "
    "float? scale, bool normalize, str kernel, bool return_state, bool[] grads) "
    "-> (Tensor out, Tensor states, Tensor ticket)",
    _fake,
)
LINEAR.define_back(
    "(Tensor? dout, Tensor? dstates, Tensor q, Tensor k, Tensor v, Tensor? decay, Tensor? beta, "
    "Tensor? initial_state, Tensor out, Tensor states, Tensor ticket, bool[] needs) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor ddecay, Tensor dbeta, Tensor dinitial)",
    _fake_back,
)
