"""Lightning attention (arXiv:2501.08313, section 2.2) of MiniMax: linear attention with a fixed decay of each head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from seqpar.foreign.kinds import name_of
from seqpar.foreign.wrap import replaced
from seqpar.kernels import acc_dtype
from seqpar.recurrent import linear_attention

TABLES = ("query_decay", "key_decay", "diagonal_decay")


def lightning(mixer: nn.Module, x: Tensor, plan: Tensor) -> tuple[Tensor, None]:
    """The attention of MiniMax's linear layers: [1, T, hidden] in, the same and no cache out."""
    qkv = mixer.act_fn(mixer.qkv_proj(x))[0].unflatten(-1, (mixer.num_attention_heads, -1))
    q, k, v = qkv.split(mixer.head_dim, -1)
    decay = -mixer.slope_rate.to(acc_dtype(x.dtype)).flatten().expand(len(q), -1)
    y = linear_attention(q, k, v, plan, decay=decay, scale=1.0)
    y = mixer.norm(y.flatten(1)[None])  # type: ignore[union-attr]
    return mixer.out_proj(torch.sigmoid(mixer.output_gate(x)) * y), None


@contextmanager
def exact_tables(model: nn.Module) -> Iterator[None]:
    """A context in which the tables of decays of a model of 16 bits, rounded powers of its rates, are in 32 bits."""
    with ExitStack() as stack:
        for mixer in model.modules():
            if name_of(mixer) == "MiniMaxLightningAttention" and mixer.slope_rate.dtype.itemsize == 2:
                tables = dict(zip(TABLES, mixer.decay_factors(mixer.slope_rate.float()), strict=True))
                stack.enter_context(replaced(mixer, {"_buffers": mixer._buffers | tables}))
        yield
