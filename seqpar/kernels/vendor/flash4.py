"""FlashAttention-4 from the package flash-attn-4 (``flash_attn/cute`` of flash-attention's repository).

Source: ``interface.py`` at the tags fa4-v4.0.0.beta12, the first with a deterministic backward for grouped heads, and
beta27. Its backward takes the gradient of lse, not delta: an output of zeros and ``dlse = -delta`` pass delta in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqpar.kernels.dispatch import no_cuda
from seqpar.kernels.protocol import CallSpec
from seqpar.kernels.vendor.library import Library, Results, outdated, refuses_on_cuda
from seqpar.kernels.vendor.varlen import VarlenCall
from seqpar.private import flash_attn as flash_private


class Flash4(Library):
    """``flash_attn.cute.interface._flash_attn_fwd`` and ``_flash_attn_bwd``, on Hopper and Blackwell."""

    name = "flash4"
    from_delta = True

    def missing(self) -> str | None:
        return outdated("flash-attn-4", (4, 0, 0, 12)) or no_cuda()

    def refuses(self, spec: CallSpec) -> str | None:
        """Left out: capability 12 (no deterministic backward) and 8 (no backward)."""
        most = 256 if spec.capability < 100 else 128
        if max(spec.dim, spec.v_dim) > most and (spec.dim, spec.v_dim) != (192, 128):
            return f"flash4 has head dims up to {most}, or 192 with values of 128, got {spec.dim} and {spec.v_dim}"
        return refuses_on_cuda(self, spec, least=90, most=119)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: VarlenCall, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = flash_private.forward_of_4(flash_private.interface_of_4())(
            q, k, v, return_lse=True, **_options(call, scale)
        )
        return out, lse

    def differentiate(
        self, q: Tensor, k: Tensor, v: Tensor, results: Results, call: VarlenCall, scale: float, deterministic: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        out, dlse = results.out, None
        if out is None:
            out, dlse = torch.zeros_like(results.dout), -results.delta
        dq, dk, dv, *_ = flash_private.backward_of_4(flash_private.interface_of_4())(
            q, k, v, out, results.dout, results.lse, deterministic=deterministic, dlse=dlse, **_options(call, scale)
        )
        return dq, dk, dv


def _options(call: VarlenCall, scale: float) -> dict[str, Any]:
    """Arguments of both forward and backward. An unlimited window is None in flash4."""
    return {
        "cu_seqlens_q": call.cu_q, "cu_seqlens_k": call.cu_k, "max_seqlen_q": call.max_q,
        "max_seqlen_k": call.max_k, "softmax_scale": scale, "causal": call.causal,
        "window_size_left": None if call.left < 0 else call.left,
        "window_size_right": None if call.right < 0 else call.right,
    }  # fmt: skip
