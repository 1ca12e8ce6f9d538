"""Mamba-2 (arXiv:2405.21060, section 7): Mamba2Mixer of transformers and its copies in hybrid models.

Its state space is linear attention with a decay for each token and head: queries C, keys B, values ``x * dt`` and the
decay ``A * dt`` in logarithms.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from seqpar.integrations.hf.recurrent.filters import convolved
from seqpar.kernels import acc_dtype
from seqpar.recurrent import linear_attention


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
