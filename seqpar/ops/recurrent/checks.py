"""The checks of `linear_attention` and `channel_scan`, and the bytes that follow from their arguments."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seqpar.comm import Comm
from seqpar.kernels import acc_dtype
from seqpar.ops.core.agreement import digest_of_call, remember
from seqpar.ops.recurrent.rows import check_rows
from seqpar.plan import Plan
from seqpar.plan.recurrence import LayerBytes, LayerWork
from seqpar.plan.runs import check_unbranched

LOOKED = "decays are logarithms"  # the key under which a plan notes that a rank's were read
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_inputs(tensors: Sequence[Any], plan: Plan, comm: Comm) -> None:
    """Raise unless a call's tensors fit each other and the plan."""
    q, k, v, decay, beta, initial = tensors
    name = "linear_attention"
    inputs = {"q": q, "k": k, "v": v}
    for title, x in inputs.items():
        check_rows(f"{name}: {title}", x, plan, comm)
    for title, x in inputs.items():
        if x.dim() != 3 or x.dtype not in DTYPES or (x.dtype, x.device) != (v.dtype, v.device):
            raise ValueError(
                f"{name}: q, k and v must be [rows, heads, dim] of one dtype and device, got {title} "
                f"{x.dtype} {list(x.shape)} on {x.device} and v {v.dtype} {list(v.shape)} on {v.device}"
            )
    rows, heads, values = v.shape
    groups, dim = k.shape[1:]
    if q.shape != k.shape or not groups or not dim or heads % groups:
        raise ValueError(
            f"{name}: q and k must have one shape of at least one dim per head, and v a multiple of their heads, "
            f"got {list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
        )
    shapes = {
        "decay": (decay, [rows, heads], [rows, heads, dim]), "beta": (beta, [rows, heads]),
        "initial_state": (initial, [len(plan.mask.lengths), heads, dim, values]),
    }  # fmt: skip
    _check_shapes(name, {title: given for title, given in shapes.items() if given[0] is not None}, v.device)
    _check_recurrence(name, plan)
    if decay is not None:
        _check_decays(name, decay, None, plan, comm)


def check_channels(tensors: Sequence[Any], plan: Plan, comm: Comm) -> None:
    """Raise unless the tensors of `channel_scan` fit each other and the plan."""
    name = "channel_scan"
    queries, keys, update, decay, rates, initial = tensors
    check_rows(f"{name}: update", update, plan, comm)
    if update.dim() != 2 or update.dtype not in DTYPES:
        raise ValueError(f"{name}: update must be floating [rows, channels], got {update.dtype} {list(update.shape)}")
    rows, channels = update.shape
    dims = channel_dims(queries, keys, rates, initial)
    shapes = {
        "decay": (decay, [rows, channels]), "rates": (rates, [channels, dims]), "keys": (keys, [rows, dims]),
        "queries": (queries, [rows, dims]), "initial_state": (initial, [len(plan.mask.lengths), channels, dims]),
    }  # fmt: skip
    given = {title: x for title, x in shapes.items() if x[0] is not None or title == "decay"}
    _check_shapes(name, given, update.device)
    _check_recurrence(name, plan)
    _check_decays(name, decay, rates, plan, comm)


def _check_shapes(name: str, given: Mapping[str, Sequence[Any]], device: torch.device) -> None:
    """Raise ValueError for tensors that have none of the shapes after them, or are not floating on the device."""
    for title, (x, *fitting) in given.items():
        if not isinstance(x, Tensor) or list(x.shape) not in fitting or x.dtype not in DTYPES or x.device != device:
            got = f"{x.dtype} {list(x.shape)} on {x.device}" if isinstance(x, Tensor) else repr(x)
            expected = " or ".join(map(str, fitting))
            raise ValueError(f"{name}: {title} must be floating {expected} on {device}, got {got!s:.200}")


def _check_decays(name: str, decay: Tensor, rates: Tensor | None, plan: Plan, comm: Comm) -> None:
    """Raise ValueError for decays above 0: on the CPU, of a plan's first layer, or of all if every call is compared."""
    own = decay.detach()[: plan.layout.tokens(comm.rank)]  # pads hold anything
    looks = decay.is_cpu and (comm.check_every == "call" or plan.known((LOOKED, comm.rank)) is None)
    if not (looks and own.numel() and (rates is None or rates.numel())):
        return
    if rates is None:
        largest = float(own.max())
    else:
        largest = max(float((d * r).max()) for d in torch.aminmax(own, dim=0) for r in torch.aminmax(rates, dim=1))
    if largest > 0:
        times = ", times rates," if name == "channel_scan" else ""
        raise ValueError(f"{name}: decay{times} holds logarithms at or below 0, got {largest}; give log(factor)")
    plan.memo((LOOKED, comm.rank), lambda: True)


def checked_scale(scale: Any, dim: int) -> float:
    """The scale as a number, by default that of so many dims."""
    if scale is None:
        return float(dim**-0.5)
    if isinstance(scale, bool) or not isinstance(scale, Real) or not math.isfinite(scale):
        raise ValueError(f"linear_attention: scale must be a finite number, got {scale!r:.200}")
    return float(scale)


def most_threads(name: str, comm: Comm) -> int:
    """The largest number of threads of any rank's process, which ranks exchange once. A collective."""
    own = torch.get_num_threads()
    if comm.size == 1:
        return own
    key = digest_of_call("threads", {})
    if key not in comm.agreed:
        remember(comm, key, known=max(comm.gather(name, own)))
    return comm.agreed[key]  # type: ignore[return-value]


def layer_bytes(q: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor | None, threads: int) -> LayerBytes:
    """The bytes of a call's states and rows, and its work on so many threads."""
    (heads, values), dim, wide = v.shape[1:], q.shape[2], acc_dtype(v.dtype).itemsize
    factors = heads if decay is None else decay.shape[1:].numel()
    rows = [(q, 2), (v, 1), *((x, 1) for x in (decay, beta) if x is not None)]
    return LayerBytes(
        heads,
        heads * dim * values * wide,
        (factors if beta is None else heads * dim * dim) * wide,
        sum([times * x.shape[1:].numel() * x.itemsize for x, times in rows]),
        heads * values * v.itemsize,
        LayerWork.of(heads, q.shape[1], dim, values, beta=beta is not None, device=v.device.type, threads=threads),
    )


def channel_dims(*tensors: Any) -> int:
    """The states of a channel in `channel_scan`, by queries, keys, rates or initial states; one without these."""
    dims = zip(tensors, (2, 2, 2, 3))
    return next((x.shape[-1] for x, count in dims if isinstance(x, Tensor) and x.dim() == count), 1)


def channel_bytes(tensors: Sequence[Any], threads: int) -> LayerBytes:
    """The bytes of a call of `channel_scan`, and its work on so many threads."""
    queries, keys, update, decay, rates, initial = tensors
    channels, dims, wide = (
        update.shape[1],
        channel_dims(queries, keys, rates, initial),
        acc_dtype(update.dtype).itemsize,
    )
    work = LayerWork.of(
        channels, 1, dims, 1, beta=False, device=update.device.type, threads=threads, channels=True
    )  # fmt: skip
    return LayerBytes(
        channels,
        channels * dims * wide,
        channels * (1 if rates is None else dims) * wide,
        sum(x.shape[1] * x.itemsize for x in (queries, keys, update, decay) if x is not None),
        channels * update.itemsize,
        work,
    )


def _check_recurrence(name: str, plan: Plan) -> None:
    """Raise NotImplementedError for plans that no recurrence can follow."""
    if plan.kv_layout is not plan.layout:
        raise NotImplementedError(f"{name}: keys are on the ranks of their queries; make the plan without a kv_layout")
    check_unbranched(name, plan.mask)
    if not plan.mask.within_documents or not plan.memo("causal documents", lambda: _is_causal(plan)):
        raise NotImplementedError(
            f"{name}: a recurrence is causal inside documents, got {plan.mask}; make the plan with Mask(lengths)"
        )


def _is_causal(plan: Plan) -> bool:
    rows = np.arange(plan.mask.tokens)
    _, hi = plan.mask.bounds(rows)
    return bool((hi <= rows + 1).all())
