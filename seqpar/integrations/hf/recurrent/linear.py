"""Linear attention: lightning attention of MiniMax, and delta rules of Qwen3-Next, Qwen3.5, OLMo Hybrid, Kimi and Ling.

Lightning attention (arXiv:2501.08313, section 2.2) has a fixed decay of each head. The gated delta rule is
arXiv:2412.06464, Kimi delta attention arXiv:2510.26692; OLMo Hybrid's rates reach 2, so that states may change sign.

In delta rules queries, keys and values are convolved together. A decay of each token and head, for Kimi of each channel
too, and a rate beta decide what a token leaves of the state and what it writes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from seqpar.integrations.hf.recurrent.states import convolved, linear_attention
from seqpar.kernels import acc_dtype


def lightning(mixer: nn.Module, x: Tensor, plan: Tensor) -> tuple[Tensor, None]:
    """The attention of MiniMax's linear layers: [1, T, hidden] in, the same and no cache out."""
    qkv = mixer.act_fn(mixer.qkv_proj(x))[0].unflatten(-1, (mixer.num_attention_heads, -1))
    q, k, v = qkv.split(mixer.head_dim, -1)
    decay = -mixer.slope_rate.to(acc_dtype(x.dtype)).flatten().expand(len(q), -1)
    y = linear_attention(q, k, v, plan, decay=decay, scale=1.0)
    y = mixer.norm(y.flatten(1)[None])  # type: ignore[union-attr]
    return mixer.out_proj(torch.sigmoid(mixer.output_gate(x)) * y), None


def qwen3_next(mixer: nn.Module, x: Tensor, plan: Tensor) -> Tensor:
    """The mixer of Qwen3-Next, whose two projections interleave the heads: [1, T, hidden] in and out."""
    q, k, v, z, b, a = mixer.fix_query_key_value_ordering(mixer.in_proj_qkvz(x), mixer.in_proj_ba(x))
    return gated_delta(mixer, torch.cat([t.flatten(2) for t in (q, k, v)], -1), z, b, a, plan)


def qwen3_5(mixer: nn.Module, x: Tensor, plan: Tensor) -> Tensor:
    """That of Qwen3.5, which has a projection for each."""
    qkv, z, b, a = (part(x) for part in (mixer.in_proj_qkv, mixer.in_proj_z, mixer.in_proj_b, mixer.in_proj_a))
    return gated_delta(mixer, qkv, z, b, a, plan)


def gated_delta(mixer: nn.Module, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, plan: Tensor) -> Tensor:
    """The gated delta rule of projected rows, with norm and gate. qkv, z: [1, T, heads and dims]; b, a [1, T, H]."""
    y = recurred(mixer, qkv, b[0].sigmoid(), a, plan)
    y = mixer.norm(y.flatten(0, 1), z.reshape(-1, mixer.head_v_dim))
    return mixer.out_proj(y.view(z.shape[:2] + (-1,)))  # type: ignore[no-any-return]


def olmo_hybrid(mixer: nn.Module, x: Tensor, plan: Tensor) -> Tensor:
    """The mixer of OLMo Hybrid: [1, T, hidden] in and out."""
    qkv = torch.cat([mixer.q_proj(x), mixer.k_proj(x), mixer.v_proj(x)], -1)
    beta = mixer.b_proj(x)[0].sigmoid() * (2.0 if mixer.allow_neg_eigval else 1.0)
    y = recurred(mixer, qkv, beta, mixer.a_proj(x), plan)
    y = mixer.o_norm(y.flatten(0, 1), mixer.g_proj(x).reshape(-1, mixer.head_v_dim))
    return mixer.o_proj(y.view(x.shape[:2] + (-1,)))  # type: ignore[no-any-return]


def recurred(mixer: nn.Module, qkv: Tensor, beta: Tensor, a: Tensor, plan: Tensor) -> Tensor:
    """The gated delta rule alone, [T, H, V]. qkv [1, T, heads and dims]; beta [T, H]; a [1, T, H]."""
    mixed = convolved(mixer.conv1d, qkv[0], plan, mixer.activation)
    q, k, v = mixed.split([mixer.key_dim, mixer.key_dim, mixer.value_dim], -1)
    q, k = (t.unflatten(-1, (-1, mixer.head_k_dim)) for t in (q, k))
    v = v.unflatten(-1, (-1, mixer.head_v_dim))
    wide = acc_dtype(v.dtype)
    decay = -torch.exp(mixer.A_log.to(wide)) * softplus(a[0].to(wide) + mixer.dt_bias)
    return linear_attention(q, k, v, plan, decay=decay, beta=beta, normalize=True)


def kimi(mixer: nn.Module, x: Tensor, plan: Tensor) -> Tensor:
    """The mixer of Kimi Linear: [1, T, hidden] in and out."""
    return kimi_delta(mixer, x, mixer.g_b_proj(mixer.g_a_proj(x)), plan)


def bailing(mixer: nn.Module, x: Tensor, plan: Tensor) -> Tensor:
    """That of Ling 3 (bailing_hybrid), whose gate has one projection."""
    return kimi_delta(mixer, x, mixer.g_proj(x), plan)


def kimi_delta(mixer: nn.Module, x: Tensor, gate: Tensor, plan: Tensor) -> Tensor:
    """Kimi delta attention: [1, T, hidden] in and out. gate: of its output, [1, T, heads and dims]."""
    qkv = torch.cat([mixer.q_proj(x), mixer.k_proj(x), mixer.v_proj(x)], -1)
    mixed = convolved(mixer.conv1d, qkv[0], plan, mixer.activation)
    q, k, v = mixed.unflatten(-1, (3, -1, mixer.head_dim)).unbind(1)
    beta = mixer.b_proj(x)[0].sigmoid()
    y = linear_attention(q, k, v, plan, decay=mixer.forget_gate(x)[0], beta=beta, normalize=True)
    y = mixer.o_norm(y[None], gate.unflatten(-1, (-1, mixer.head_dim)))
    return mixer.o_proj(y.flatten(2))  # type: ignore[no-any-return]
