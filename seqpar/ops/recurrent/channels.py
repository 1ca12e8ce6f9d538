"""`channel_scan`: recurrences with a state for each channel, as of Mamba-1 and RG-LRU, over the runs of a plan.

It is linear attention with a head for each channel and values of one number. Such states are small, and their maps are
of one factor for each element, so ranks compute what their runs do to them before any state is known.
"""

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
from seqpar.ops.recurrent.call import LinearCall
from seqpar.ops.recurrent.checks import channel_bytes, channel_dims, check_channels
from seqpar.ops.recurrent.computed import CheckedCall, States, computed, differentiated
from seqpar.plan import Plan


def channel_scan(
    update: Tensor,
    decay: Tensor,
    plan: Plan | Tensor,
    comm: Comm | None = None,
    *,
    rates: Tensor | None = None,
    keys: Tensor | None = None,
    queries: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    kernel: str = "auto",
    travel: str = "auto",
) -> Tensor | tuple[Tensor, States]:
    """This rank's rows of a recurrence with states of each channel. A collective, forward and backward.

    For each document and channel, token by token, from ``initial_state`` or zeros, with N states s of the channel:

        s[n] <- exp(decay * rates[n]) s[n] + update * keys[n]
        out = sum of queries[n] s[n]

    update, decay [T, C]: this rank's rows, ``T = plan.rows(rank)``, the latter logarithms of factors, at or below 0
    once multiplied. rates [C, N]: the same for all tokens, and equal on all ranks. keys, queries [T, N]: shared by all
    channels. Those left out are ones, and N is 1 without all. So ``channel_scan(x, log_a, plan, comm)`` is the
    recurrence of RG-LRU, and of Mamba-1, with steps dt and the parameters A, B and C:

        y = channel_scan(dt * x, dt, plan, comm, rates=A, keys=B, queries=C)

    initial_state [documents, C, N]: equal on all ranks, and so is whether it requires a gradient. Any floating dtypes
    (float64, float32, bfloat16, float16) on one device. Nothing is cast under autocast. kernel: "auto", "steps"
    (PyTorch, on any device) or "reference". travel, and the handle of a compiled model, are as of `linear_attention`.

    Returns out [T, C] in update's dtype; pad rows are zeros, and what they hold enters nothing. If return_state also
    the numbers and the states, [documents, C, N], of the documents whose last row this rank holds. Gradients of rates
    and initial_state are this rank's shares: sum them over ranks. Sums are in float32, or float64 for a float64 update,
    as are the states that travel. No tensor has C * N elements for each token of a rank.

    Raises: ValueError for shapes, dtypes or options that do not fit, on every rank, before any byte moves;
    NotImplementedError for the plans that `linear_attention` refuses, for return_state in a compiled model, and for
    double backward.
    """
    if torch.compiler.is_compiling() and return_state:
        raise NotImplementedError("channel_scan: return_state is not supported in a compiled model")
    values = values_of("channel_scan", plan, comm)
    tensors = [queries, keys, update, decay, rates, initial_state]
    out, states = CHANNELS(tensors, values, kernel, travel, return_state)
    return (out, States.of("channel_scan", values, states)) if return_state else out


def _channels(
    tensors: Sequence[Any], values: Sequence[Any], kernel: str, travel: str, return_state: bool, grads: Sequence[bool]
) -> tuple[list[Tensor], Tensors, LinearCall]:
    queries, keys, update, decay, rates, initial = tensors

    def ask(plan: Plan, comm: Comm, threads: int) -> CheckedCall:
        check_channels(tensors, plan, comm)
        kind, dims = "scalar" if rates is None else "rates", channel_dims(queries, keys, rates, initial)
        spec = RecurrentSpec(update.device.type, update.dtype, dims, 1, kind, beta=False)
        given = {"queries": queries, "keys": keys, "decay": decay, "rates": rates}
        facts = {name: None if x is None else x.dtype for name, x in given.items()}
        facts |= {"channels": update.shape[1], "dims": dims}
        facts |= {"rates require grad": grads[4], "initial_state requires grad": grads[5]}
        return CheckedCall(channel_bytes(tensors, threads), choose(kernel, spec, "channel_scan"), facts, channels=True)

    inputs = [queries, keys, update, decay, None, rates, initial]
    return computed("channel_scan", inputs, values, ask, travel, return_state, grads)


def _channels_back(call: LinearCall, saved: Sequence[Any], grads: Tensors, needs: Sequence[bool]) -> Tensors:
    """The gradients of queries, keys, update, decay, rates and initial_state."""
    *rows, _, rates, initial = differentiated(call, saved, grads, [*needs[:4], False, *needs[4:]])
    return [*rows, rates, initial]


def _fake(queries: Any, keys: Any, update: Tensor, decay: Any, rates: Any, initial: Any, *_: object) -> Any:
    shape = 0, update.shape[1], channel_dims(queries, keys, rates, initial)
    return update.new_empty(update.shape), update.new_empty(shape, dtype=acc_dtype(update.dtype))


CHANNELS = CollectiveOp(
    "channel_scan",
    _channels,
    _fake,
    tensors="Tensor? queries, Tensor? keys, Tensor update, Tensor decay, Tensor? rates, Tensor? initial_state",
    options="str kernel, str travel, bool return_state",
    results="Tensor out, Tensor states",
    back=_channels_back,
)
