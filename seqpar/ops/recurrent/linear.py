"""`linear_attention`: linear attention, delta rules and state spaces over the runs of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from seqpar.comm import Comm
from seqpar.kernels import acc_dtype
from seqpar.kernels.recurrent import RecurrentSpec, choose
from seqpar.ops.attention.source import values_of
from seqpar.ops.core.collective_op import CollectiveOp, Tensors
from seqpar.ops.core.device import autocasts
from seqpar.ops.recurrent.call import LinearCall
from seqpar.ops.recurrent.checks import check_inputs, checked_scale, layer_bytes
from seqpar.ops.recurrent.computed import CheckedCall, States, computed, differentiated
from seqpar.plan import Plan


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
    float16) and device, ``H % G == 0``; head h reads group ``h // (H // G)``. decay: logarithms from -inf to 0, [T, H]
    (RetNet, Mamba-2, gated delta rule) or [T, H, K] (gated linear attention, Kimi delta attention). beta [T, H]. Both
    in any floating dtype. Under autocast q, k and v are cast as for torch's own attention, and nothing else. scale: by
    default ``K ** -0.5``. normalize: divides q and k by their Euclidean norms, with 1e-6 added to the squares.
    initial_state [documents, H, K, V]: equal on all ranks, which ``check="call"`` compares, and so is whether it
    requires a gradient. kernel: "auto", "native" (on the CPU), "fla" (flash-linear-attention, on CUDA in 16 bits),
    "chunked" or "reference"; "auto" takes the first of them that can compute the call.

    travel: what ranks send; all methods are exact. "gather": each rank gets the states of all runs before its last one
    in each document, and their maps, in one exchange each way. "chain": each run gets one state, of the run before it,
    in steps. "pipeline": the same, but each block of heads is computed from the state that enters it, which it passes
    on: no maps, and nothing is computed beforehand. "rows": rows go to a contiguous layout and results come back;
    between the two, states pass by the cheapest of the others. "auto": what costs least by `seqpar.plan.travel`, which
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
    if torch.compiler.is_compiling() and return_state:
        raise NotImplementedError("linear_attention: return_state is not supported in a compiled model")
    values = values_of("linear_attention", plan, comm)
    tensors = [*autocasts([q, k, v]), decay, beta, initial_state]
    out, states = LINEAR(tensors, values, scale, normalize, kernel, travel, return_state)
    return (out, States.of("linear_attention", values, states)) if return_state else out


def _linear(
    tensors: Sequence[Any], values: Sequence[Any], scale: float | None, normalize: bool, kernel: str,
    travel: str, return_state: bool, grads: Sequence[bool],
) -> tuple[list[Tensor], Tensors, LinearCall]:  # fmt: skip
    *rows, initial = tensors

    def ask(plan: Plan, comm: Comm, threads: int) -> CheckedCall:
        check_inputs(tensors, plan, comm)
        q, _, v, decay, beta = rows
        kind = "none" if decay is None else "scalar" if decay.dim() == 2 else "channel"
        spec = RecurrentSpec(v.device.type, v.dtype, q.shape[2], v.shape[2], kind, beta is not None)
        facts = {
            "q": q.shape[1:], "v": v.shape[1:], "decay": None if decay is None else (decay.dtype, decay.dim()),
            "beta": None if beta is None else beta.dtype, "initial_state requires grad": grads[5],
        }  # fmt: skip
        asked = checked_scale(scale, q.shape[2]), bool(normalize)
        return CheckedCall(layer_bytes(q, v, decay, beta, threads), choose(kernel, spec), facts, *asked)

    return computed("linear_attention", [*rows, None, initial], values, ask, travel, return_state, grads)


def _linear_back(call: LinearCall, saved: Sequence[Any], grads: Tensors, needs: Sequence[bool]) -> Tensors:
    """The gradients of q, k, v, decay, beta and initial_state."""
    *rows, _, initial = differentiated(call, saved, grads, [*needs[:5], False, needs[5]])
    return [*rows, initial]


def _fake(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), v.new_empty(0, v.shape[1], q.shape[2], v.shape[2], dtype=acc_dtype(v.dtype))


LINEAR = CollectiveOp(
    "linear_attention",
    _linear,
    _fake,
    tensors="Tensor q, Tensor k, Tensor v, Tensor? decay, Tensor? beta, Tensor? initial_state",
    options="float? scale, bool normalize, str kernel, str travel, bool return_state",
    results="Tensor out, Tensor states",
    back=_linear_back,
)
