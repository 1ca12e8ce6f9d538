"""`attention`: the verb, its checks, and its place in autograd; its op in graphs is in `seqpar.ops.attention.graph`."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, Literal, overload

import torch
from torch import Tensor

from seqpar.comm import Comm
from seqpar.kernels import Score, acc_dtype, call_spec, choose
from seqpar.ops.attention.call import Call, Inside, Options
from seqpar.ops.attention.recompute import Late, check, settle
from seqpar.ops.attention.schedule import backward, forward
from seqpar.ops.core.agreement import abort_on_error, agreed_under, agreement, check_comm, digest_of_call
from seqpar.ops.core.handles import handles, in_graph, uncompiled, values_of
from seqpar.plan import Part, Plan

log = logging.getLogger("seqpar.ops")


class Calls(threading.local):
    """How many calls of attention this thread has begun, in graphs too."""

    begun = 0


calls = Calls()


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan | Tensor, comm: Comm | None = ..., *, scale: float | None = ...,
    softcap: float = ..., sinks: Tensor | None = ..., alibi_slopes: Tensor | None = ..., dropout_p: float = ...,
    dropout_seed: int | None = ..., deterministic: bool = ..., kernel: str = ..., return_lse: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan | Tensor, comm: Comm | None = ..., *, scale: float | None = ...,
    softcap: float = ..., sinks: Tensor | None = ..., alibi_slopes: Tensor | None = ..., dropout_p: float = ...,
    dropout_seed: int | None = ..., deterministic: bool = ..., kernel: str = ..., return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan | Tensor,
    comm: Comm | None = None,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    deterministic: bool = True,
    kernel: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """This rank's rows of exact attention over the whole batch. A collective, forward and backward.

    Spec over ranks, with ``unshard`` putting rows where the plan's layout says::

        unshard(out) == dense_attention(unshard(q), unshard(k), unshard(v), plan.mask)

    q [T, H, D], k [T_kv, H_kv, D], v [T_kv, H_kv, D_v]: this rank's rows, ``T = plan.rows(rank)``, of one dtype
    (float64, float32, bfloat16, float16) and device, ``H % H_kv == 0``. scale: default ``D ** -0.5``. softcap: 0 for
    none. sinks [H]: a logit per head that takes part in the softmax and has no value. alibi_slopes [H]. dropout_p: of
    the probabilities, with dropout_seed required if positive; the same pairs are dropped at any number of ranks.
    deterministic: the same call gives the same bits. kernel: "auto" or a name in `seqpar.kernels.available()`; what
    "auto" takes depends on dtypes, dims, options and device, and on whether a gradient is required.

    In a compiled model ``plan`` is a handle, ``seqpar.bind(plan, comm)``, without a comm; the plan and the comm serve
    there too once `bind` has seen them. A graph is compiled once, not once per plan.

    Returns out [T, H, D_v] in q's dtype, and if return_lse also lse [T, H] in the accumulation dtype (natural log, the
    sink included; -inf, or the sink, for a row that sees no key). Both are differentiable; rows that see no key and
    pad rows have zero output and gradients. The gradient of ``sinks`` is this rank's share: sum it over ranks.

    Raises: ValueError for arguments that fit neither the plan nor each other or differ between ranks, on every rank
    before any byte of the call moves. Ranks compare when they first make a call of this kind, with ``check="call"``
    always; dropout seeds, sinks and slopes are compared then too, and a seed that differs later shows as PeerError on
    a message. NotImplementedError for what no kernel can do, for alibi_slopes that require a gradient, and for double
    backward; PeerError if a rank died or fell out of step.

    Source: Liu et al. 2023 (Ring Attention); Jacobs et al. 2023 (DeepSpeed-Ulysses); Dao 2023 (FlashAttention-2).
    """
    options = Options(scale, softcap, dropout_p, dropout_seed, deterministic, kernel, return_lse)
    out, lse = attention_of(q, k, v, sinks, alibi_slopes, None, plan, comm, options)
    return (out, lse.t()) if return_lse else out


def attention_of(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, slopes: Tensor | None, late: Late | None,
    plan: Plan | Tensor | None, comm: Comm | None, options: Options,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and lse [H, T] of a call whose plan and comm are given, or found by ``late``, or made by it of those."""
    values: list[Any] = [plan] if comm is None else [plan, comm]
    if late is not None and plan is None:
        values = []
    if in_graph(q, k, v):
        named = ([] if late is None else handles(late)) + (handles(*values) if values else [])
        grads = _requirements(q, k, v, sinks, slopes)
        out, lse, _ = torch.ops.seqpar.attention(q, k, v, sinks, slopes, named, *_plain(options), grads)
        return out, lse
    return _attention(q, k, v, sinks, slopes, late, values, options)


@uncompiled
def _attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, slopes: Tensor | None, late: Late | None,
    values: Sequence[Any], options: Options,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and lse [H, T] in eager mode."""
    if len(values) == 1:
        if not isinstance(values[0], Tensor):
            raise ValueError(f"attention takes a plan and a comm, or their handle alone, got {values[0]!r:.200} alone")
        values = values_of(values, Plan)
    plan, comm, seed = settle(late, values, options)
    options = options._replace(dropout_seed=seed)
    return _Attention.apply(q, k, v, sinks, agreed_call(q, k, v, sinks, slopes, plan, comm, options))


def agreed_call(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, slopes: Tensor | None, plan: Plan, comm: Comm,
    options: Options, grads: Sequence[bool] | None = None,
) -> Call:  # fmt: skip
    """The call that these arguments make. A collective; raises what `attention` says, on every rank.

    grads: whether q, k or v, the sinks, the slopes require a gradient; by default as the tensors say.
    """
    calls.begun += 1
    check_comm("attention", comm)
    number = comm.next_call()
    with agreement("attention", comm) as agreed:
        _check_kinds(plan, q=q, k=k, v=v, sinks=sinks, alibi_slopes=slopes)
        _check_tensors(q, k, v, plan, comm)
        grads = _requirements(q, k, v, sinks, slopes) if grads is None else grads
        options = _plain(options)
        _check_options(q, sinks, slopes, options, grads)
        wide = None if slopes is None else slopes.detach().to(acc_dtype(q.dtype)).contiguous()
        seed = options.dropout_seed if options.dropout_p else None  # what is not used may differ
        score = Score(
            _checked_scale(options.scale, q), options.softcap, wide, options.dropout_p,
            0 if seed is None else seed,
        )  # fmt: skip
        merges = plan.merges or sinks is not None or (grads[1] and plan.sums_key_gradients(q.shape[1], k.shape[1]))
        asked = call_spec(q, k, v, score, grads=any(grads), deterministic=options.deterministic, merges=merges)
        chosen = choose(options.kernel, asked)
        agreed.facts = {
            "plan": plan.digest(), "dtype": q.dtype, "heads": q.shape[1], "kv_heads": k.shape[1], "dim": q.shape[2],
            "v_dim": v.shape[2], "scale": score.scale, "softcap": score.softcap, "dropout_p": score.dropout_p,
            "sinks": sinks is not None, "alibi_slopes": slopes is not None, "return_lse": options.return_lse,
            "deterministic": options.deterministic, "kernel": chosen.name, "q requires grad": grads[0],
            "k or v requires grad": grads[1], "sinks require grad": grads[2], "device": q.device.type,
        }  # fmt: skip
        digest = digest_of_call("attention", agreed.facts, score.dropout_seed) if comm.size > 1 else 0
        call = Call(
            plan=plan, comm=comm, kernel=chosen, score=score, heads=q.shape[1], kv_heads=k.shape[1], dim=q.shape[2],
            v_dim=v.shape[2], dtype=q.dtype, device=q.device, sinks=sinks is not None, return_lse=options.return_lse,
            kv_grads=grads[1], number=number, digest=digest,
        )  # fmt: skip
        agreed.values = {"dropout_seed": seed, "alibi_slopes": slopes, "sinks": sinks}
    if comm.size > 1:
        agreed_under(plan, comm)[agreed.digest] = None
    log.debug("rank %d: attention, call %d, plan %s, kernel %s", comm.rank, number, plan.digest(), call.kernel.name)
    return call


def _requirements(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, slopes: Tensor | None) -> list[bool]:
    """Whether q, k or v, the sinks, the slopes require a gradient."""
    if not torch.is_grad_enabled():
        return [False] * 4
    rest = [x is not None and x.requires_grad for x in (sinks, slopes)]
    return [q.requires_grad, k.requires_grad or v.requires_grad, *rest]


def _plain(options: Options) -> Options:
    """Options of the types that an op takes and messages show: numpy's scalars are none of them."""
    scale, softcap, p, seed, deterministic, kernel, return_lse = options
    if seed is not None and not isinstance(seed, Integral):
        raise ValueError(f"dropout_seed must be an integer, got {seed!r}")
    return Options(
        None if scale is None else _number("scale", scale), _number("softcap", softcap), _number("dropout_p", p),
        None if seed is None else int(seed), bool(deterministic), str(kernel), bool(return_lse),
    )  # fmt: skip


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, got {value!r:.200}") from None


def attend(call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor, list[Inside]]:
    """The schedule forward, with autocast off and the other ranks told of what fails."""
    with abort_on_error(call.comm, f"attention, call {call.number}"), _exact(call):
        return forward(call, q, k, v, sinks)


def differentiate(
    call: Call, insides: list[Inside], sinks: Tensor | None, out: Tensor, lse: Tensor, dout: Tensor | None,
    dlse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The schedule backward, likewise. Where a part's results are views of the call's they are put in its inside."""
    rows = call.plan.rows(call.comm.rank), call.plan.rows(call.comm.rank, "kv")
    for part, inside in zip(call.parts(), insides, strict=True):
        if part.q.trivial:
            inside.out, inside.lse = out[: part.q.rows], lse[:, : part.q.rows]
    with abort_on_error(call.comm, f"attention, call {call.number}"), _exact(call):
        return backward(call, insides, sinks, torch.zeros_like(out) if dout is None else dout, dlse, rows)


class _Attention(torch.autograd.Function):
    """The schedule in autograd. Saved are the tensors inside the head trade, so that backward trades only gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Call) -> tuple[Tensor, Tensor]:
        out, lse, insides = attend(call, q, k, v, sinks)
        ctx.call, ctx.repeat = call, 0
        ctx.set_materialize_grads(False)
        inside = (t for p, i in zip(call.parts(), insides, strict=True) for t in _saved(p, i, (q, k, v)))
        ctx.stamp = torch.full((), call.stamp, dtype=torch.int64, device="cpu")
        ctx.save_for_backward(ctx.stamp, sinks, out, lse, *inside)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        call: Call = replace(ctx.call, repeat=ctx.repeat)
        ctx.repeat += 1
        stamp, sinks, out, lse, *saved = ctx.saved_tensors
        if stamp.data_ptr() != ctx.stamp.data_ptr():  # else nothing came between, and nothing is read
            check(call, stamp)
        insides = [_restored(part, saved[5 * n : 5 * n + 5]) for n, part in enumerate(call.parts())]
        dq, dk, dv, dsinks = differentiate(call, insides, sinks, out, lse, *grads)
        need = ctx.needs_input_grad
        return (
            dq if need[0] else None,
            dk.to(call.dtype) if need[1] else None,
            dv.to(call.dtype) if need[2] else None,
            dsinks.to(sinks.dtype) if need[3] and dsinks is not None else None,
            None,
        )


def _saved(part: Part, inside: Inside, outside: Sequence[Tensor]) -> list[Tensor | None]:
    """What is saved of a part, 5 tensors. Where nothing is traded its own are views: of the inputs, which are saved in
    their place, so that autograd names what is changed later; and of the outputs, which are saved anyway."""
    own = zip((inside.q, inside.k, inside.v), outside, _views(part), strict=True)
    results = (None, None) if part.q.trivial else (inside.out, inside.lse)
    return [*(x if rows is None else y for x, y, rows in own), *results]


def _restored(part: Part, saved: Sequence[Any]) -> Inside:
    """A part's tensors of what was saved; the views of outputs are not among them."""
    own = (x if rows is None else x[rows] for x, rows in zip(saved, _views(part), strict=False))
    return Inside(*own, *saved[3:])


def _views(part: Part) -> list[slice | None]:
    """Which rows of q, k and v a part's tensors are views of; None where they have memory of their own."""
    trades = (part.q, part.kv, part.kv)
    return [t.mine if part.width == 1 and isinstance(t.mine, slice) else None for t in trades]


def refuse_double_backward() -> None:
    """Raise inside a backward that is itself to be differentiated."""
    if torch.is_grad_enabled():
        raise NotImplementedError("attention has no double backward; call backward without create_graph=True")


def _exact(call: Call) -> torch.autocast:
    """No autocast inside: it would round the products of the accumulation dtype."""
    return torch.autocast(call.device.type, enabled=False)


def _check_kinds(plan: object, **tensors: object) -> None:
    if not isinstance(plan, Plan):
        raise ValueError(f"attention takes a plan and a comm, or their handle alone, got {plan!r:.200} with a comm")
    for name, x in tensors.items():
        if not isinstance(x, Tensor) and not (x is None and name in ("sinks", "alibi_slopes")):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__} {x!r:.200}")


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, plan: Plan, comm: Comm) -> None:
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if any(x.dim() != 3 for x in (q, k, v)):
        raise ValueError(f"q, k, v must be packed [rows, heads, dim], got {shapes}; drop or fold the batch dimension")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k, v must be on one device, got {q.device}, {k.device}, {v.device}")
    if q.is_meta:
        raise NotImplementedError("q, k, v are on the meta device, which holds no values to attend to")
    if k.shape[:2] != v.shape[:2] or q.shape[2] != k.shape[2] or 0 in (q.shape[1], k.shape[1], q.shape[2], v.shape[2]):
        raise ValueError(f"expected q [T, H, D], k [T_kv, H_kv, D], v [T_kv, H_kv, D_v], got {shapes}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"query heads must be a multiple of key heads, got {q.shape[1]} and {k.shape[1]}")
    if any(x.numel() and x.stride(2) != 1 and x.shape[2] > 1 for x in (q, k, v)):
        raise ValueError("the last dimension of q, k, v must be dense (stride 1); call .contiguous()")
    if plan.ranks != comm.size:
        raise ValueError(f"the plan is for {plan.ranks} ranks, the comm has {comm.size}")
    for name, x, side in (("q", q, "q"), ("k and v", k, "kv")):
        if x.shape[0] != plan.rows(comm.rank, side):
            raise ValueError(
                f"{name} on rank {comm.rank} must have {plan.rows(comm.rank, side)} rows, as the plan's layout says, "
                f"got {x.shape[0]}; seqpar.shard makes them"
            )


def _check_options(
    q: Tensor, sinks: Tensor | None, slopes: Tensor | None, options: Options, grads: Sequence[bool]
) -> None:
    softcap, dropout_p = options.softcap, options.dropout_p
    for name, x in (("sinks", sinks), ("alibi_slopes", slopes)):
        if x is not None and (x.shape != q.shape[1:2] or x.device != q.device or not x.dtype.is_floating_point):
            raise ValueError(
                f"{name} must be floating point [{q.shape[1]}], one per query head, on {q.device}, got "
                f"{x.dtype}{list(x.shape)} on {x.device}"
            )
    if grads[3]:
        raise NotImplementedError("alibi_slopes have no gradient; detach them")
    if not (math.isfinite(softcap) and softcap >= 0):
        raise ValueError(f"softcap must be finite and at least 0, got {softcap}")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")
    if dropout_p and options.dropout_seed is None:
        raise ValueError(f"dropout_p={dropout_p} needs a dropout_seed, equal on all ranks and different for each layer")


def _checked_scale(scale: float | None, q: Tensor) -> float:
    value = q.shape[2] ** -0.5 if scale is None else scale
    if not math.isfinite(value):
        raise ValueError(f"scale must be finite, got {scale}")
    return value
