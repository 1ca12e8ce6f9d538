"""`latent_attention`: the verb, and its op. The call is attention with one key head, of the latents' dims.

Plans, exchanges and head shares are those of `seqpar.ops.attention.op`, with the latents as keys of one head and the
rotated parts as its values. Only the kernel differs: around the chosen one is `seqpar.kernels.expanding`, which makes
keys and values of what arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from seqpar.comm import Comm
from seqpar.kernels.expanding import Expanding
from seqpar.ops.attention.call import Call
from seqpar.ops.attention.op import (
    OPTIONS,
    RESULTS,
    agreed_call,
    attended,
    computed,
    differentiated,
    fake_results,
)
from seqpar.ops.attention.signature import Accuracy, Expansion, Options
from seqpar.ops.attention.source import resolved
from seqpar.ops.core.collective_op import CollectiveOp, Tensors
from seqpar.ops.core.device import autocasts
from seqpar.plan import Plan


@overload
def latent_attention(
    q: Tensor, latent: Tensor, rotated: Tensor | None, w_k: Tensor, w_v: Tensor, plan: Plan | Tensor,
    comm: Comm | None = ..., *, scale: float | None = ..., softcap: float = ..., sinks: Tensor | None = ...,
    dropout_p: float = ..., dropout_seed: int | None = ..., deterministic: bool = ..., kernel: str = ...,
    accuracy: Accuracy = ..., expand_bytes: int = ..., return_lse: Literal[False] = ...,
    return_max_logit: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip


@overload
def latent_attention(
    q: Tensor, latent: Tensor, rotated: Tensor | None, w_k: Tensor, w_v: Tensor, plan: Plan | Tensor,
    comm: Comm | None = ..., *, scale: float | None = ..., softcap: float = ..., sinks: Tensor | None = ...,
    dropout_p: float = ..., dropout_seed: int | None = ..., deterministic: bool = ..., kernel: str = ...,
    accuracy: Accuracy = ..., expand_bytes: int = ..., return_lse: Literal[True],
    return_max_logit: Literal[False] = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def latent_attention(
    q: Tensor, latent: Tensor, rotated: Tensor | None, w_k: Tensor, w_v: Tensor, plan: Plan | Tensor,
    comm: Comm | None = ..., *, scale: float | None = ..., softcap: float = ..., sinks: Tensor | None = ...,
    dropout_p: float = ..., dropout_seed: int | None = ..., deterministic: bool = ..., kernel: str = ...,
    accuracy: Accuracy = ..., expand_bytes: int = ..., return_lse: bool = ...,
    return_max_logit: Literal[True],
) -> tuple[Tensor, ...]: ...  # fmt: skip


def latent_attention(
    q: Tensor,
    latent: Tensor,
    rotated: Tensor | None,
    w_k: Tensor,
    w_v: Tensor,
    plan: Plan | Tensor,
    comm: Comm | None = None,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    deterministic: bool = True,
    kernel: str = "auto",
    accuracy: Accuracy = "exact",
    expand_bytes: int = 256 << 20,
    return_lse: bool = False,
    return_max_logit: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """This rank's rows of multi-head latent attention (MLA): ranks exchange latents. A collective, as `attention`.

    Spec over ranks, with ``unshard`` putting rows at the positions of the plan's layout:

        k = cat([einsum("nr,hdr->nhd", latent, w_k), rotated[:, None].expand(-1, H, -1)], -1)
        v = einsum("nr,hdr->nhd", latent, w_v)
        unshard(out) == dense_attention(unshard(q), unshard(k), unshard(v), plan.mask)

    q [T, H, D_n + E]: the last E elements are rotated. latent [T_kv, R]: normalised. rotated [T_kv, E]: the part of the
    keys that all heads share, after the rotary embedding; None for E = 0. w_k [H, D_n, R], w_v [H, D_v, R]: the same on
    all ranks. All of one dtype and device. scale: by default ``(D_n + E) ** -0.5``. Other arguments as of `attention`;
    a kernel computes with H key heads of dims D_n + E and D_v.

    A row that travels is R + E elements, in backward R + E of the dtype of the sums. Each rank expands the rows that
    its queries see, in forward and again in backward; no expanded row is sent or kept for backward. expand_bytes: of
    one expanded buffer, of keys and values or of their gradients; heads are expanded in blocks, at least one at a time.

    Returns as `attention`: (out[, lse][, max_logit]), out [T, H, D_v] in q's dtype. The gradients of w_k, w_v
    and sinks are this rank's shares: sum them over ranks.

    Raises: as `attention`; ValueError also for weights that differ between ranks, which are compared as sinks are.

    Source: DeepSeek-AI 2024 (DeepSeek-V2), section 2.1.
    """
    options = Options(
        scale, softcap, dropout_p, dropout_seed, deterministic, kernel, accuracy, return_lse, return_max_logit
    )
    if rotated is None and isinstance(latent, Tensor):
        rotated = latent.detach()[..., :0]
    rows = [x.unsqueeze(1) if isinstance(x, Tensor) and x.dim() else x for x in (latent, rotated)]
    tensors = [*autocasts([q, *rows, w_k, w_v]), sinks]
    return attended(LATENT_ATTENTION, tensors, plan, comm, options, expand_bytes)


def _run(tensors: Sequence[Any], values: Sequence[Any], *options_and_grads: Any) -> tuple[Tensors, Tensors, Call]:
    """Output, lse [H, T] and the largest scores, the weights and what else backward needs, and the call."""
    *given, expand_bytes, grads = options_and_grads
    q, latent, rotated, w_k, w_v, sinks = tensors
    plan, comm, options = resolved(values, Options(*given))
    of_call = (q, latent, rotated, sinks, None)
    needed = [*grads[:3], grads[5], False, *grads[3:5]]
    call = agreed_call("latent_attention", of_call, Expansion(w_k, w_v, expand_bytes), plan, comm, options, needed)
    kernel = Expanding(call.recipe.kernel, w_k, w_v, call.signature.expand_bytes)
    results, saved = computed(call, kernel, of_call, saves=any(grads))
    return results, [w_k, w_v, *saved] if saved else [], call


def _back(call: Call, saved: Sequence[Any], grads: Tensors, needs: Sequence[bool]) -> Tensors:
    """dq, dlatent, drotated, dw_k, dw_v, dsinks; None where none is needed."""
    w_k, w_v, *of_call = saved
    dw_k, dw_v = (
        torch.zeros(w.shape, dtype=call.recipe.acc, device=w.device) if need else None
        for w, need in zip((w_k, w_v), needs[3:5], strict=True)
    )
    kernel = Expanding(call.recipe.kernel, w_k, w_v, call.signature.expand_bytes, dw_k, dw_v)
    *inputs, dsinks = differentiated(call, kernel, of_call, grads, [*needs[:3], needs[5]])
    dtype = call.signature.dtype
    return (*inputs, *(None if x is None else x.to(dtype) for x in (dw_k, dw_v)), dsinks)


def _fake(q: Tensor, latent: Tensor, rotated: Tensor, w_k: Tensor, w_v: Tensor, *more: Any) -> tuple[Tensor, ...]:
    if any(x.dim() != 3 for x in (q, latent, rotated, w_k, w_v)):
        shapes = [list(x.shape) for x in (q, latent, rotated, w_k, w_v)]
        raise ValueError(f"q, w_k, w_v must have 3 dimensions, latent and rotated 2, got {shapes}")
    return fake_results(q, w_v.shape[1], scored=more[-3])


LATENT_ATTENTION = CollectiveOp(
    "latent_attention",
    _run,
    _fake,
    tensors="Tensor q, Tensor latent, Tensor rotated, Tensor w_k, Tensor w_v, Tensor? sinks",
    options=f"{OPTIONS}, int expand_bytes",
    results=RESULTS,
    back=_back,
    reads_results=True,
)
