"""FlashAttention-2, the package flash-attn.

Source: ``flash_attn/flash_attn_interface.py`` of its release 2.8.3. Backward over a part of the keys with the lse of
all of them needs the functions below `flash_attn_varlen_func`, whose arguments change between minor releases.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from seqpar.kernels.dispatch import no_cuda
from seqpar.kernels.protocol import Ask
from seqpar.kernels.vendor.batches import Batch
from seqpar.kernels.vendor.library import Library, Results, outdated, refuses_on_cuda


class Flash2(Library):
    """``flash_attn._flash_attn_varlen_forward``."""

    name = "flash2"

    def missing(self) -> str | None:
        """Why it cannot run on this machine, or None."""
        return outdated("flash-attn", (2, 8), (3,)) or no_cuda()

    def refuses(self, ask: Ask) -> str | None:
        """Why not, or None."""
        if ask.dim != ask.v_dim or ask.dim > 256:
            return f"flash2 needs values as wide as keys, 256 at most, got {ask.v_dim} and {ask.dim}"
        return refuses_on_cuda(self, ask)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, scale: float) -> tuple[Tensor, Tensor]:
        """See `Library`."""
        out, lse, *_ = _interface()._flash_attn_varlen_forward(
            q, k, v, batch.cu_q, batch.cu_k, batch.max_q, batch.max_k, dropout_p=0.0, softmax_scale=scale,
            causal=batch.causal, window_size_left=batch.left, window_size_right=batch.right,
        )  # fmt: skip
        return out, lse

    def differentiate(
        self, q: Tensor, k: Tensor, v: Tensor, given: Results, batch: Batch, scale: float, deterministic: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Library`."""
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        _interface()._flash_attn_varlen_backward(
            given.dout, q, k, v, given.out, given.lse, dq, dk, dv, batch.cu_q, batch.cu_k, batch.max_q, batch.max_k,
            dropout_p=0.0, softmax_scale=scale, causal=batch.causal, window_size_left=batch.left,
            window_size_right=batch.right, softcap=0.0, alibi_slopes=None, deterministic=deterministic,
        )  # fmt: skip
        return dq, dk, dv


def _interface() -> Any:
    """Imported when it is called, never with seqpar."""
    return import_module("flash_attn.flash_attn_interface")
