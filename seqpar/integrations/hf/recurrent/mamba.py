"""Mamba-1 (arXiv:2312.00752): MambaMixer of transformers and its copies in Falcon Mamba, Jamba and Zamba.

Each channel has several states. Their decays are products of its step, which depends on the token, and of rates, which
do not; queries C and keys B are shared by the channels, in Zamba by those of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu, softplus

from seqpar.integrations.hf.recurrent.filters import convolved
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
