"""`linear_attention`: linear attention, delta rules and state spaces over the runs of a plan.

::

    rank 0   prepare   leave ──►        compute        leave: what the rank's runs do to a state
    rank 1   prepare   leave ──► pass   compute        pass: exchanges that make of it the states that enter runs
    rank 2   prepare         ──► pass   compute

States pass by `gather` or in a `chain`, and their gradients back the same way. Where runs are so short that this costs
more than moving rows, all of it is done on rows in a contiguous layout (`relaid`). Backward computes the forward's
local parts again, from the inputs and from the states that entered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqpar.comm import Comm, Tag
from seqpar.kernels import acc_dtype
from seqpar.kernels.recurrent import Recurrence, RecurrentKernel, RecurrentSpec, choose
from seqpar.ops.attention.source import plan_and_comm, values_of
from seqpar.ops.core.agreement import abort_on_error, agreement, digest_of_call, plan_and_call_keys
from seqpar.ops.core.autocast import autocasts, no_autocast
from seqpar.ops.core.collective_op import CollectiveOp, Record, Tensors
from seqpar.ops.core.compared import hashed
from seqpar.ops.core.repetition import check_repetition
from seqpar.ops.recurrent.ahead import note
from seqpar.ops.recurrent.chain import StateChain
from seqpar.ops.recurrent.checks import check_inputs, checked_scale, layer_bytes
from seqpar.ops.recurrent.gather import StateGather
from seqpar.ops.recurrent.local import LocalRuns, tables_of, way_of_layer
from seqpar.ops.recurrent.relaid import Relaid
from seqpar.ops.recurrent.rows import runs
from seqpar.plan import Plan
from seqpar.plan.travel import LAYER_WAYS, check_travel


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
    travel: str = "auto",
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
    first row reads it. kernel: "auto", "native" (on the CPU), "chunked", "reference", or by name alone "triton" (on
    CUDA, no decay of channels) and "fla" (flash-linear-attention, on CUDA in 16 bits), which no GPU has run yet.

    travel: what ranks send; all ways are exact. "gather": each rank gets the states of all runs before its last one in
    each document, and their maps, in one exchange each way. "chain": each run gets one state, of the run before it, in
    steps. "rows": rows go to a contiguous layout and results come back; between the two, states pass by the cheaper of
    the others. "auto": what costs least by `seqpar.plan.travel`, which `seqpar.recurrent.describe` shows; nothing is
    sent for documents that no two ranks share.

    The recurrence runs over whole documents in order, whatever the mask's window is.

    In a compiled model ``plan`` is a handle, ``seqpar.bind(plan, comm)``, without a comm.

    Returns out [T, H, V] in v's dtype; pad rows are zeros, and what they hold enters nothing. If return_state also the
    numbers and the states of the documents whose last row this rank holds. Gradients of initial_state are this rank's
    shares: sum them over ranks. Sums are in float32, or float64 for float64, as are the states that travel; rows travel
    in their own dtypes.

    Raises: ValueError for shapes, dtypes or options that do not fit, on every rank, before any byte moves;
    NotImplementedError for masks that are not causal inside documents, for a kv_layout other than the layout, for
    return_state in a compiled model, and for double backward.
    """
    if return_state and torch.compiler.is_compiling():
        raise NotImplementedError("linear_attention: return_state is not supported in a compiled model")
    values = values_of("linear_attention", plan, comm)
    tensors = [*autocasts([q, k, v]), decay, beta, initial_state]
    out, states = LINEAR(tensors, values, scale, normalize, kernel, travel, return_state)
    if not return_state:
        return out
    plan, comm = plan_and_comm("linear_attention", values)
    own = runs(plan, comm.rank)
    return out, States(own.documents[own.closes].tolist(), states)


@dataclass(eq=False)
class LinearCall(Record):
    """A call of `linear_attention`: what its backward needs besides tensors."""

    side: LocalRuns
    passing: StateGather | StateChain | None  # None if no document is on several ranks
    relaid: Relaid | None
    kernel: RecurrentKernel
    scale: float
    normalize: bool
    return_state: bool


def _before(call: LinearCall, *inputs: Tensor | None) -> tuple[list[Tensor], Any]:
    """Begin, states and maps of all runs; and what the kernel has prepared."""
    q, k, v, decay, beta, initial = inputs
    assert q is not None and k is not None and v is not None
    side, dtype = call.side, acc_dtype(v.dtype)
    order, opens, documents, _, exported = side.on(v.device)
    rows = [x if x is None or order is None else x[order] for x in (q, k, v, decay, beta)]
    if call.normalize:
        wide = [x.to(dtype) for x in rows[:2] if x is not None]
        rows[:2] = [x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in wide]
    dtypes = [dtype if call.kernel.casts else v.dtype] * 3 + [dtype] * 2
    rows = [None if x is None else x.to(kind) for x, kind in zip(rows, dtypes, strict=True)]
    tables = side.tables(call.kernel, v.device)
    prepared = call.kernel.prepare(Recurrence(*rows, call.scale), tables)  # type: ignore[arg-type]
    begin = v.new_zeros(side.counts.size, v.shape[1], q.shape[2], v.shape[2], dtype=dtype)
    if initial is not None:
        begin = begin.index_copy(0, opens, initial[documents].to(dtype))
    if call.passing is None:
        return [begin], prepared
    left, mapped = call.kernel.leave(prepared, begin[exported])
    runs = side.counts.size
    states = left.new_zeros(runs, *left.shape[1:]).index_copy(0, exported, left)
    maps = mapped.new_zeros(runs, *mapped.shape[1:]).index_copy(0, exported, mapped)
    return [begin, states, maps], prepared


def _after(call: LinearCall, like: Tensor, prepared: Any, entering: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's out, and the states that documents end with. like: v."""
    order, _, _, closes, _ = call.side.on(like.device)
    rows, left = call.kernel.compute(prepared, entering)
    out = rows.to(like.dtype)
    return out if order is None else like.new_zeros(like.shape).index_copy(0, order, out), left[closes]


def _linear(
    tensors: Sequence[Any], values: Sequence[Any], scale: float | None, normalize: bool, kernel: str,
    travel: str, return_state: bool, grads: Sequence[bool],
) -> tuple[list[Tensor], Tensors, LinearCall]:  # fmt: skip
    plan, comm = plan_and_comm("linear_attention", values)
    number = comm.next_call()
    with agreement("linear_attention", comm) as agreed:
        check_inputs(tensors, plan, comm)
        q, _, v, decay, beta, initial = tensors
        kind = "none" if decay is None else "scalar" if decay.dim() == 2 else "channel"
        spec = RecurrentSpec(v.device.type, v.dtype, q.shape[2], v.shape[2], kind, beta is not None)
        scale, chosen = checked_scale(scale, q.shape[2]), choose(kernel, spec)
        check_travel("linear_attention", travel, LAYER_WAYS)
        layer = layer_bytes(q, v, decay, beta)
        way = way_of_layer(plan, travel, layer)
        note(comm, tables_of, travel, layer, chosen, v.device)
        agreed.facts = {
            "plan": plan.digest(), "dtype": v.dtype, "device": v.device.type, "q": q.shape[1:], "v": v.shape[1:],
            "decay": None if decay is None else (decay.dtype, decay.dim()),
            "beta": None if beta is None else beta.dtype, "initial": initial is not None,
            "scale": scale, "normalize": bool(normalize), "kernel": chosen.name, "travel": way[:2],
            "return_state": bool(return_state), "requires grad": True in grads,
        }  # fmt: skip
        if comm.size > 1:
            key = "linear_attention", *agreed.facts.values()
            agreed.digest = plan.memo(key, lambda: digest_of_call("linear_attention", agreed.facts))
            agreed.keys = plan.memo(("keys", key), lambda: plan_and_call_keys("linear_attention", plan, agreed.facts))
        if initial is not None and comm.check_every == "call":
            agreed.values = {"a hash of initial_state": int(hashed(initial))}
    stamp = hash((plan, scale, bool(normalize), chosen.name, way, id(comm.stats), comm.rank))
    check_repetition("linear_attention", comm, stamp, "plan, scale or travel", recorded=True in grads)
    side, passed, relaid = tables_of(plan, comm.rank, travel, layer, chosen, v.device)
    tag = Tag(agreed.digest, number, 0, 0, "linear_attention")
    call = LinearCall(
        comm, tag, side, passed, relaid, chosen, scale, bool(normalize), bool(return_state), stamp=stamp
    )  # fmt: skip
    with abort_on_error(comm, f"linear_attention, call {number}"), no_autocast(v.device.type), torch.no_grad():
        inputs = list(tensors)
        if relaid is not None:
            inputs[:5] = relaid.there(inputs[:5], comm, tag)
        (begin, *passes), prepared = _before(call, *inputs)
        kept = [] if passed is None else passed.forward(*passes, comm, tag)
        out, states = _after(call, inputs[2], prepared, begin + kept[0] if kept else begin)
        if relaid is not None:
            (out,) = relaid.home([out], comm, tag)
            states = relaid.final_home(states, comm, tag) if return_state else states
    return [out, states if return_state else states[:0]], [*inputs, *kept], call


def _linear_back(call: LinearCall, saved: Sequence[Any], grads: Tensors, needs: Sequence[bool]) -> Tensors:
    """The gradients of q, k, v, decay, beta and initial_state."""
    tag, comm, relaid = call.way_back(), call.comm, call.relaid
    inputs, kept = saved[:6], saved[6:]
    dout, dstates = grads
    v = inputs[2]
    with abort_on_error(comm, f"linear_attention, call {tag.call}"), no_autocast(v.device.type), torch.enable_grad():
        leaves = [None if x is None else x.detach().requires_grad_(need) for x, need in zip(inputs, needs, strict=True)]
        local, prepared = _before(call, *leaves)
        begin = local[0].detach()
        entering = (begin + kept[0] if kept else begin).requires_grad_()
        out, states = _after(call, v, prepared, entering)
        if relaid is not None:
            like = out.detach(), states.detach()
            dout, dstates = _grads_there(relaid, call, dout, dstates, like, tag)
        wanted = [x for x in leaves if x is not None and x.requires_grad]
        pairs = [(y, g) for y, g in ((out, dout), (states, dstates)) if g is not None and g.shape == y.shape]
        ys, gs = (list(column) for column in zip(*pairs, strict=True)) if pairs else ([], [])
        first = torch.autograd.grad(ys, [*wanted, entering], gs, allow_unused=True, retain_graph=True) if ys else ()
        *found, dentered = first or [None] * (len(wanted) + 1)
        dlocal = [torch.zeros_like(entering) if dentered is None else dentered]
        if call.passing is not None:
            passes = [x.detach() for x in local[1:]]
            dlocal += call.passing.backward(*passes, kept, dlocal[0], comm, tag)
        ends = [(x, g) for x, g in zip(local, dlocal, strict=True) if x.requires_grad]
        if ends and wanted:
            ys, gs = (list(column) for column in zip(*ends, strict=True))
            second = torch.autograd.grad(ys, wanted, gs, allow_unused=True)
            found = [b if a is None else a if b is None else a + b for a, b in zip(found, second)]
    results = iter(found)
    grads_of = [next(results) if x is not None and x.requires_grad else None for x in leaves]
    if relaid is None:
        return [torch.zeros_like(x) if need and g is None else g for x, g, need in zip(inputs, grads_of, needs)]
    full = [torch.zeros_like(x) if x is not None and g is None else g for x, g in zip(inputs, grads_of)]
    with abort_on_error(comm, f"linear_attention, call {tag.call}"):
        full[:5] = relaid.home(full[:5], comm, tag)
    return [g if need else None for g, need in zip(full, needs)]


def _grads_there(
    relaid: Relaid, call: LinearCall, dout: Tensor | None, dstates: Tensor | None, like: Sequence[Tensor], tag: Tag
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of results on the ranks that computed them. like: those results."""
    out, states = like
    dout = out.new_zeros(relaid.rows.rows_in, *out.shape[1:]) if dout is None else dout
    (dout,) = relaid.there([dout], call.comm, tag)
    if not call.return_state:
        return dout, None
    dstates = states.new_zeros(relaid.final.rows_out, *states.shape[1:]) if dstates is None else dstates
    return dout, relaid.final_there(dstates, call.comm, tag)


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
    "float? scale, bool normalize, str kernel, str travel, bool return_state, bool[] grads) "
    "-> (Tensor out, Tensor states, Tensor ticket)",
    _fake,
)
LINEAR.define_back(
    "(Tensor? dout, Tensor? dstates, Tensor q, Tensor k, Tensor v, Tensor? decay, Tensor? beta, "
    "Tensor? initial_state, Tensor out, Tensor states, Tensor ticket, bool[] needs) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor ddecay, Tensor dbeta, Tensor dinitial)",
    _fake_back,
)
