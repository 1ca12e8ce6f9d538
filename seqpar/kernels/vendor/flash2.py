"""FlashAttention-2 from the package flash-attn.

Source: ``flash_attn/flash_attn_interface.py`` of release 2.8.3. Backward over part of the keys with the lse of all keys
needs the functions below `flash_attn_varlen_func`, whose arguments change between minor releases.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.kernels.dispatch import no_cuda
from seqpar.kernels.protocol import CallSpec
from seqpar.kernels.vendor.library import Library, Results, outdated, refuses_on_cuda
from seqpar.kernels.vendor.varlen import VarlenCall
from seqpar.private import flash_attn as flash_private


class Flash2(Library):
    """``flash_attn._flash_attn_varlen_forward``."""

    name = "flash2"

    def missing(self) -> str | None:
        return outdated("flash-attn", (2, 8), (3,)) or no_cuda()

    def refuses(self, spec: CallSpec) -> str | None:
        if spec.dim != spec.v_dim or spec.dim > 256:
            return f"flash2 needs values as wide as keys, 256 at most, got {spec.v_dim} and {spec.dim}"
        return refuses_on_cuda(self, spec)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: VarlenCall, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = flash_private.varlen_forward(flash_private.interface_of_2())(
            q, k, v, call.cu_q, call.cu_k, call.max_q, call.max_k, dropout_p=0.0, softmax_scale=scale,
            causal=call.causal, window_size_left=call.left, window_size_right=call.right,
        )  # fmt: skip
        return out, lse

    def differentiate(
        self, q: Tensor, k: Tensor, v: Tensor, results: Results, call: VarlenCall, scale: float, deterministic: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        flash_private.varlen_backward(flash_private.interface_of_2())(
            results.dout, q, k, v, results.out, results.lse, dq, dk, dv, call.cu_q, call.cu_k, call.max_q, call.max_k,
            dropout_p=0.0, softmax_scale=scale, causal=call.causal, window_size_left=call.left,
            window_size_right=call.right, softcap=0.0, alibi_slopes=None, deterministic=deterministic,
        )  # fmt: skip
        return dq, dk, dv
