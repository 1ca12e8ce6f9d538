"""RG-LRU (arXiv:2402.19427, section 2.4): the recurrent block of RecurrentGemma, with one state for each channel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from seqpar.data.batch import Reading, read
from seqpar.data.rows import MASK, POSITIONS
from seqpar.integrations.hf.recurrent.states import convolved
from seqpar.kernels import acc_dtype
from seqpar.recurrent import channel_scan, shift

STEEPEST = 1000.0  # a square root's gradient, where transformers clips it


def recurrent_gemma(mixer: nn.Module, x: Tensor, plan: Tensor) -> tuple[Tensor, None]:
    """The block of RecurrentGemma: [1, T, hidden] in, the same and no cache out."""
    gate, rows = mixer.act_fn(mixer.linear_y(x)), convolved(mixer.conv_1d, mixer.linear_x(x)[0], plan)
    y = recurred(mixer.rg_lru, rows, plan)
    return mixer.linear_out(y[None] * gate), None


def recurred(lru: nn.Module, x: Tensor, plan: Tensor) -> Tensor:
    """The recurrence of rows [T, C]. A document's first row enters it unscaled, wherever it is in a batch's row."""
    wide, heads = acc_dtype(x.dtype), x.unflatten(-1, (lru.num_attention_heads, -1)).transpose(0, 1)
    enters, stays = (
        torch.baddbmm(bias[:, None], heads, weight).transpose(0, 1).reshape(x.shape).sigmoid()
        for weight, bias in (
            (lru.input_gate_weight, lru.input_gate_bias),
            (lru.recurrent_gate_weight, lru.recurrent_gate_bias),
        )
    )
    decay = -8.0 * stays.to(wide) * softplus(lru.recurrent_param.to(wide))
    first = shift(x.new_ones(len(x), 1), plan) == 0
    scale = square_root(1 - torch.exp(2 * decay)).masked_fill(first, 1.0)
    return channel_scan(x * enters * scale.to(x.dtype), decay, plan)  # type: ignore[return-value]


def misread(batch: Mapping[str, Any]) -> str:
    """Why the block does not keep the documents of a batch apart, or "". Waits for the device.

    transformers' block begins anew where a position is 0 alone, and padding before a row enters it.
    """
    mask, packed = batch.get(MASK), read(batch, Reading("none"))
    padded = mask is not None and mask.dim() == 2 and not mask.bool()[mask.bool().any(1), :1].all()
    zeros = np.flatnonzero(packed.tensors[POSITIONS].cpu().numpy() == 0) if packed.lengths.size else packed.lengths
    if not padded and np.array_equal(zeros, np.cumsum(packed.lengths) - packed.lengths):
        return ""
    return (
        "its recurrence begins where a position is 0, and takes in padding on the left; pad on the right, and number "
        "the tokens of each document from 0"
    )


def square_root(x: Tensor) -> Tensor:
    """The square root, with a gradient of at most `STEEPEST`."""
    slope = 0.5 / x.detach().clamp(min=0.25 / STEEPEST**2).sqrt()
    return x.detach().sqrt() + (x - x.detach()) * slope
