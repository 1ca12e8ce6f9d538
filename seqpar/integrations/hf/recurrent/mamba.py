"""State space models: MambaMixer and Mamba2Mixer of transformers, and their copies in hybrid models.

Mamba-1 (arXiv:2312.00752): each channel has several states. Their decays are products of its step, which depends on the
token, and of rates, which do not; queries C and keys B are shared by the channels, in Zamba by those of a head.

Mamba-2 (arXiv:2405.21060, section 7): the state space is linear attention with a decay for each token and head: queries
C, keys B, values ``x * dt`` and the decay ``A * dt`` in logarithms.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu, softplus

from seqpar.integrations.hf.recurrent.states import convolved, linear_attention
from seqpar.kernels import acc_dtype
from seqpar.recurrent import channel_scan


def mamba(mixer: nn.Module, x: Tensor, plan: Tensor) -> Tensor:
    """The mixer of Mamba, Falcon Mamba and Jamba: [1, T, hidden] in and out."""
    values, gate = mixer.in_proj(x)[0].chunk(2, -1)
    values = convolved(mixer.conv1d, values, plan, mixer.activation)
    state = mixer.ssm_state_size
    steps, keys, queries = mixer.x_proj(values).split([mixer.time_step_rank, state, state], -1)
    if hasattr(mixer, "dt_layernorm"):
        steps, keys, queries = mixer.dt_layernorm(steps), mixer.b_layernorm(keys), mixer.c_layernorm(queries)
    steps = linear(steps, mixer.dt_proj.weight)
    y = selected(values, steps, keys, queries, mixer.dt_proj.bias, mixer.A_log, mixer.D, plan)
    return mixer.out_proj((y * silu(gate)).to(x.dtype))[None]  # type: ignore[no-any-return]


def zamba(mixer: nn.Module, x: Tensor, plan: Tensor) -> Tensor:
    """That of Zamba, whose heads have steps, keys and queries of their own: [1, T, hidden] in and out."""
    values, gate = mixer.in_proj(x)[0].unflatten(-1, (-1, 2)).unbind(-1)
    values = convolved(mixer.conv1d, values, plan, mixer.activation)
    heads = []
    for n, own in enumerate(values.chunk(mixer.n_mamba_heads, -1)):
        state = mixer.ssm_state_size
        steps, keys, queries = linear(own, mixer.x_proj_weight[n]).split([mixer.time_step_rank, state, state], -1)
        steps = linear(steps, mixer.dt_proj_weight[n])
        parameters = mixer.dt_proj_bias[n], mixer.A_log[n], mixer.D[n]
        heads.append(selected(own, steps, keys, queries, *parameters, plan))
    return mixer.out_proj((torch.cat(heads, -1) * silu(gate)).to(x.dtype))[None]  # type: ignore[no-any-return]


def selected(
    values: Tensor, steps: Tensor, keys: Tensor, queries: Tensor, bias: Tensor, rates: Tensor, skip: Tensor,
    plan: Tensor,
) -> Tensor:  # fmt: skip
    """The state space of rows [T, C], in fp32 or fp64. rates: logarithms of A, negated; bias: of steps; skip: D."""
    wide = acc_dtype(values.dtype)
    values, keys, queries = values.to(wide), keys.to(wide), queries.to(wide)
    steps = softplus(steps.to(wide) + bias.to(wide))
    y = channel_scan(steps * values, steps, plan, rates=-torch.exp(rates.to(wide)), keys=keys, queries=queries)
    return y + values * skip.to(wide)  # type: ignore[operator]


def mamba2(mixer: nn.Module, x: Tensor, plan: Tensor) -> Tensor:
    """The mixer of Mamba-2, Bamba, Granite 4, Nemotron-H and Zamba 2: [1, T, hidden] in and out."""
    y, gate = scanned(mixer, mixer.in_proj(x), plan)
    return mixer.out_proj(mixer.norm(y, gate).to(x.dtype))  # type: ignore[no-any-return]


def falcon_h1(mixer: nn.Module, x: Tensor, plan: Tensor) -> Tensor:
    """That of Falcon-H1: muP multipliers, and a norm that may be missing."""
    y, gate = scanned(mixer, mixer.in_proj(x * mixer.ssm_in_multiplier) * mixer.mup_vector, plan)
    y = mixer.norm(y, gate) if mixer.mamba_rms_norm else y * silu(gate)
    return mixer.out_proj(y.to(x.dtype))  # type: ignore[no-any-return]


def scanned(mixer: nn.Module, projected: Tensor, plan: Tensor) -> tuple[Tensor, Tensor]:
    """The state space of what in_proj gives, [1, T, ...]: its output, in fp32 or fp64, and the gate, [1, T, inner]."""
    inner, heads, state = mixer.intermediate_size, mixer.num_heads, mixer.ssm_state_size
    gate, mixed, dt = projected.split([inner, mixer.conv_dim, heads], -1)
    wide = acc_dtype(projected.dtype)
    mixed = convolved(mixer.conv1d, mixed[0], plan, mixer.activation).to(wide)
    values, b, c = mixed.split([inner, mixer.n_groups * state, mixer.n_groups * state], -1)
    values = values.unflatten(-1, (heads, mixer.head_dim))
    b, c = (t.unflatten(-1, (mixer.n_groups, state)) for t in (b, c))
    dt = softplus(dt[0] + mixer.dt_bias.to(dt.dtype)).clamp(*mixer.time_step_limit).to(wide)
    decay = -torch.exp(mixer.A_log.to(wide)) * dt
    y = linear_attention(c, b, values * dt[..., None], plan, decay=decay, scale=1.0) + values * mixer.D[:, None]
    return y.flatten(1)[None], gate
