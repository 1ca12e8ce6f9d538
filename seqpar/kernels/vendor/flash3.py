"""FlashAttention-3 from the package flash-attn-3 (``hopper/`` of flash-attention's repository).

Source: the operators' schemas in ``hopper/flash_api_stable.cpp``. All arguments but the tensors have defaults and are
passed by name.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from seqpar.kernels.dispatch import no_cuda
from seqpar.kernels.protocol import CallSpec
from seqpar.kernels.vendor.library import Library, Results, outdated, refuses_on_cuda
from seqpar.kernels.vendor.varlen import VarlenCall


class Flash3(Library):
    """``flash_attn_3::fwd`` and ``bwd``, on Hopper."""

    name = "flash3"

    def missing(self) -> str | None:
        """Why this machine cannot run it, or None."""
        return outdated("flash-attn-3", (3, 0)) or no_cuda()

    def refuses(self, spec: CallSpec) -> str | None:
        """Why the call is refused, or None."""
        fits = spec.dim == spec.v_dim <= 256 or (128 < spec.dim <= 192 and 96 < spec.v_dim <= 128)
        if not fits:
            return f"flash3 has head dims up to 256, or 192 with values of 128, got {spec.dim} and {spec.v_dim}"
        if spec.grads and spec.deterministic and spec.dim > 192:
            return f"flash3 has a deterministic backward for head dims up to 192, got {spec.dim}"
        return refuses_on_cuda(self, spec, least=90, most=90)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: VarlenCall, scale: float) -> tuple[Tensor, Tensor]:
        """See `Library`. num_splits 1: another kernel would have to merge the splits."""
        out, lse, *_ = _operators().fwd(
            q, k, v, cu_seqlens_q=call.cu_q, cu_seqlens_k=call.cu_k, max_seqlen_q=call.max_q,
            max_seqlen_k=call.max_k, softmax_scale=scale, is_causal=call.causal, window_size_left=call.left,
            window_size_right=call.right, num_splits=1,
        )  # fmt: skip
        return out, lse

    def differentiate(
        self, q: Tensor, k: Tensor, v: Tensor, results: Results, call: VarlenCall, scale: float, deterministic: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Library`."""
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        _operators().bwd(
            results.dout, q, k, v, results.out, results.lse, dq=dq, dk=dk, dv=dv, cu_seqlens_q=call.cu_q,
            cu_seqlens_k=call.cu_k, max_seqlen_q=call.max_q, max_seqlen_k=call.max_k, softmax_scale=scale,
            is_causal=call.causal, window_size_left=call.left, window_size_right=call.right,
            deterministic=deterministic,
        )  # fmt: skip
        return dq, dk, dv


def _operators() -> Any:
    """The package's operators in ``torch.ops``, registered by importing the package on first use."""
    import_module("flash_attn_3._C")
    return torch.ops.flash_attn_3
