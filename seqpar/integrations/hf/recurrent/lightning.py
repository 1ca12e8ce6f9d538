"""Lightning attention (arXiv:2501.08313, section 2.2) of MiniMax: linear attention with a fixed decay of each head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from seqpar.kernels import acc_dtype
from seqpar.recurrent import linear_attention


def lightning(mixer: nn.Module, x: Tensor, plan: Tensor) -> tuple[Tensor, None]:
    """The attention of MiniMax's linear layers: [1, T, hidden] in, the same and no cache out."""
    qkv = mixer.act_fn(mixer.qkv_proj(x))[0].unflatten(-1, (mixer.num_attention_heads, -1))
    q, k, v = qkv.split(mixer.head_dim, -1)
    decay = -mixer.slope_rate.to(acc_dtype(x.dtype)).flatten().expand(len(q), -1)
    y = linear_attention(q, k, v, plan, decay=decay, scale=1.0)
    y = mixer.norm(y.flatten(1)[None])  # type: ignore[union-attr]
    return mixer.out_proj(torch.sigmoid(mixer.output_gate(x)) * y), None
