"""`attention`: the verb."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from seqpar.comm import Comm
from seqpar.ops.attention.op import ATTENTION, attended
from seqpar.ops.attention.signature import Accuracy, Options
from seqpar.ops.core.device import autocasts
from seqpar.plan import Plan


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan | Tensor, comm: Comm | None = ..., *, scale: float | None = ...,
    softcap: float = ..., sinks: Tensor | None = ..., alibi_slopes: Tensor | None = ..., dropout_p: float = ...,
    dropout_seed: int | None = ..., deterministic: bool = ..., kernel: str = ..., accuracy: Accuracy = ...,
    return_lse: Literal[False] = ...,
    return_max_logit: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan | Tensor, comm: Comm | None = ..., *, scale: float | None = ...,
    softcap: float = ..., sinks: Tensor | None = ..., alibi_slopes: Tensor | None = ..., dropout_p: float = ...,
    dropout_seed: int | None = ..., deterministic: bool = ..., kernel: str = ..., accuracy: Accuracy = ...,
    return_lse: Literal[True],
    return_max_logit: Literal[False] = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan | Tensor, comm: Comm | None = ..., *, scale: float | None = ...,
    softcap: float = ..., sinks: Tensor | None = ..., alibi_slopes: Tensor | None = ..., dropout_p: float = ...,
    dropout_seed: int | None = ..., deterministic: bool = ..., kernel: str = ..., accuracy: Accuracy = ...,
    return_lse: bool = ...,
    return_max_logit: Literal[True],
) -> tuple[Tensor, ...]: ...  # fmt: skip


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
    accuracy: Accuracy = "exact",
    return_lse: bool = False,
    return_max_logit: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """This rank's rows of exact attention over the whole batch. A collective, forward and backward.

    Spec over ranks, with ``unshard`` putting rows at the positions of the plan's layout:

        unshard(out) == dense_attention(unshard(q), unshard(k), unshard(v), plan.mask)

    q [T, H, D], k [T_kv, H_kv, D], v [T_kv, H_kv, D_v]: this rank's rows, ``T = plan.rows(rank)``, of one dtype
    (float64, float32, bfloat16, float16) and device, ``H % H_kv == 0``. scale: by default ``D ** -0.5``. softcap: 0 is
    off. sinks [H]: a logit per head that takes part in the softmax without a value. alibi_slopes [H]. dropout_p: of the
    probabilities; if positive, dropout_seed is required, and the same pairs are dropped on any number of ranks; the low
    64 bits of a seed count. deterministic: equal calls give equal bits. kernel: "auto" or a name in
    `seqpar.kernels.available()`; the choice of "auto" depends on dtypes, dims, options and device, and on whether a
    gradient is required. accuracy: "exact", or "fast", with which "auto" also takes other libraries' kernels where a
    row's keys come in several steps. These round each step's result, and each step's gradients, to the inputs' dtype
    before they are merged or added in float32, which makes the error at most 1.5 times that of one step. Where "auto"
    takes none of them, as on a CPU, "fast" is "exact". It cannot be combined with a kernel's name.

    In a compiled model ``plan`` is a handle, ``seqpar.bind(plan, comm)``, without a comm; the plan and the comm work
    too once `bind` has seen them. A graph is compiled once, not once per plan.

    Under autocast q, k and v are cast as for torch's own attention: all but float64, to autocast's dtype.

    Returns (out[, lse][, max_logit]), out alone by default. out [T, H, D_v] in q's dtype. lse [T, H] in the
    accumulation dtype (natural log, including the sink; -inf, or the sink, for a row that sees no key), with
    return_lse. Both are differentiable. Rows that see no key, and pad rows, have zero output and gradients. The
    gradient of ``sinks`` is this rank's share: sum it over ranks. max_logit [H], with return_max_logit: of each head
    the largest ``scale * q·k`` that any query of any rank sees, before softcap and ALiBi, in the accumulation dtype,
    the same on every rank; -inf if nothing is seen. It has no gradient. With softcap or ALiBi, and where the kernel
    does not keep it, it costs a second pass of scores in PyTorch.

    Raises: ValueError for arguments that contradict the plan or each other, or differ between ranks; on every rank,
    before any byte of the call moves. Ranks compare a call when they first make one of its kind, or always with
    ``check="call"``. Dropout seeds, sinks and slopes are only compared then (on a GPU at the next comparison, or
    64 calls later, so that the host does not wait for it); a seed that differs later raises PeerError on a message.
    NotImplementedError if no kernel can compute the call, for alibi_slopes that require a gradient, and for double
    backward. PeerError if a rank died or fell out of step.

    Source: Liu et al. 2023 (Ring Attention); Jacobs et al. 2023 (DeepSpeed-Ulysses); Dao 2023 (FlashAttention-2).
    """
    options = Options(
        scale, softcap, dropout_p, dropout_seed, deterministic, kernel, accuracy, return_lse, return_max_logit
    )
    return attended(ATTENTION, [*autocasts([q, k, v]), sinks, alibi_slopes], plan, comm, options)
