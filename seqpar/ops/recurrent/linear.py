"""`linear_attention`: linear attention, delta rules and state spaces over the runs of a plan.

A rank computes all of its runs at once, between exchanges of what they do to states (`whole`), or in blocks of heads
that pass states on (`blocks`). Where runs are so short that states cost more than moving rows, it does so on rows in a
contiguous layout (`relaid`). Backward computes the forward's local parts again, from the inputs and from the states
that entered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqpar.comm import Comm, Tag
from seqpar.kernels import acc_dtype
from seqpar.kernels.recurrent import RecurrentSpec, choose
from seqpar.ops.attention.source import plan_and_comm, values_of
from seqpar.ops.core.agreement import abort_on_error, agreement, digest_of_call, plan_and_call_keys
from seqpar.ops.core.autocast import autocasts, no_autocast
from seqpar.ops.core.collective_op import CollectiveOp, Tensors
from seqpar.ops.core.compared import hashed
from seqpar.ops.core.repetition import check_repetition
from seqpar.ops.recurrent import blocks, whole
from seqpar.ops.recurrent.ahead import note
from seqpar.ops.recurrent.call import LinearCall, tables_of, way_of_layer
from seqpar.ops.recurrent.checks import check_inputs, checked_scale, layer_bytes, most_threads
from seqpar.ops.recurrent.pipeline import StatePipeline
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
    steps. "pipeline": so too, but each block of heads is computed from the state that enters it, which it passes on: no
    maps, and nothing is computed beforehand. "rows": rows go to a contiguous layout and results come back; between the
    two, states pass by the cheapest of the others. "auto": what costs least by `seqpar.plan.travel`, which
    `seqpar.recurrent.describe` shows; nothing is sent for documents that no two ranks share.

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


def _linear(
    tensors: Sequence[Any], values: Sequence[Any], scale: float | None, normalize: bool, kernel: str,
    travel: str, return_state: bool, grads: Sequence[bool],
) -> tuple[list[Tensor], Tensors, LinearCall]:  # fmt: skip
    plan, comm = plan_and_comm("linear_attention", values)
    number, threads = comm.next_call(), most_threads(comm)
    with agreement("linear_attention", comm) as agreed:
        check_inputs(tensors, plan, comm)
        q, _, v, decay, beta, initial = tensors
        kind = "none" if decay is None else "scalar" if decay.dim() == 2 else "channel"
        spec = RecurrentSpec(v.device.type, v.dtype, q.shape[2], v.shape[2], kind, beta is not None)
        scale, chosen = checked_scale(scale, q.shape[2]), choose(kernel, spec)
        check_travel("linear_attention", travel, LAYER_WAYS)
        layer = layer_bytes(q, v, decay, beta, threads)
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
        out, states, kept = _computed_by(call).forward(call, inputs, tag)
        if relaid is not None:
            (out,) = relaid.home([out], comm, tag)
            states = relaid.final_home(states, comm, tag) if return_state else states
    return [out, states if return_state else states[:0]], [*inputs, *kept], call


def _linear_back(call: LinearCall, saved: Sequence[Any], grads: Tensors, needs: Sequence[bool]) -> Tensors:
    """The gradients of q, k, v, decay, beta and initial_state."""
    tag, comm, relaid = call.way_back(), call.comm, call.relaid
    inputs, kept = saved[:6], saved[6:]
    dout, dstates = grads
    with abort_on_error(comm, f"linear_attention, call {tag.call}"), no_autocast(inputs[2].device.type):
        if relaid is not None:
            dout, dstates = _grads_there(relaid, call, dout, dstates, inputs, tag)
        if not call.return_state:
            dstates = None
        grads_of = _computed_by(call).backward(call, inputs, kept, dout, dstates, needs, tag)
    if relaid is None:
        return [torch.zeros_like(x) if need and g is None else g for x, g, need in zip(inputs, grads_of, needs)]
    full = [torch.zeros_like(x) if x is not None and g is None else g for x, g in zip(inputs, grads_of)]
    with abort_on_error(comm, f"linear_attention, call {tag.call}"):
        full[:5] = relaid.home(full[:5], comm, tag)
    return [g if need else None for g, need in zip(full, needs)]


def _computed_by(call: LinearCall) -> Any:
    """The module with the forward and the backward of a call."""
    return blocks if isinstance(call.passing, StatePipeline) else whole


def _grads_there(
    relaid: Relaid, call: LinearCall, dout: Tensor | None, dstates: Tensor | None, inputs: Sequence[Any], tag: Tag
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of results on the ranks that computed them. inputs: of those ranks."""
    q, _, v, *_ = inputs
    dout = v.new_zeros(relaid.rows.rows_in, *v.shape[1:]) if dout is None else dout
    (dout,) = relaid.there([dout], call.comm, tag)
    if not call.return_state:
        return dout, None
    if dstates is None:
        shape = relaid.final.rows_out, v.shape[1], q.shape[2], v.shape[2]
        dstates = v.new_zeros(shape, dtype=acc_dtype(v.dtype))
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
