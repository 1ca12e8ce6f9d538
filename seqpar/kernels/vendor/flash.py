"""FlashAttention 2, 3 and 4 from their own packages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqpar.kernels.dispatch import no_cuda
from seqpar.kernels.protocol import CallSpec
from seqpar.kernels.softmax import merge_
from seqpar.kernels.vendor.library import Library, Results, outdated, refuses_on_cuda
from seqpar.kernels.vendor.varlen import VarlenCall
from seqpar.private import flash_attn as flash_private


class Flash2(Library):
    """``flash_attn._flash_attn_varlen_forward``, from the package flash-attn.

    Source: ``flash_attn/flash_attn_interface.py`` of release 2.8.3. Backward over part of the keys with the lse of all
    keys needs the functions below `flash_attn_varlen_func`, whose arguments change between minor releases.
    """

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


class Flash3(Library):
    """``flash_attn_3::fwd`` and ``bwd``, on Hopper, from the package flash-attn-3 (``hopper/`` of the repository).

    Source: the operators' schemas in ``hopper/flash_api_stable.cpp``. All arguments but the tensors have defaults and
    are passed by name.

    With ``num_splits=2`` forward also returns the parts of two halves of the keys in float32, ``out_accum``
    [2, B, H, T, D] and ``lse_accum`` [2, B, H, T]. Without ``cu_seqlens`` every split of every row has an lse, -inf
    where it sees no key; its output is then not written. With ``cu_seqlens`` each sequence has a number of splits of
    its own, which is not returned, and its parts may be missing. Source: ``hopper/flash_api.cpp`` (`mha_fwd`),
    ``hopper/epilogue_fwd.hpp`` (`store_zero`). No GPU has run this yet.
    """

    name = "flash3"
    splits = True  # whether the package was built with them

    def missing(self) -> str | None:
        return outdated("flash-attn-3", (3, 0)) or no_cuda()

    def refuses(self, spec: CallSpec) -> str | None:
        fits = spec.dim == spec.v_dim <= 256 or (128 < spec.dim <= 192 and 96 < spec.v_dim <= 128)
        if not fits:
            return f"flash3 has head dims up to 256, or 192 with values of 128, got {spec.dim} and {spec.v_dim}"
        return refuses_on_cuda(self, spec, least=90, most=90)

    def varies(self, spec: CallSpec) -> str | None:
        limit = 192
        return None if spec.dim <= limit else f"flash3 has a deterministic backward for head dims up to {limit}"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: VarlenCall, scale: float) -> tuple[Tensor, Tensor]:
        """num_splits 1: another kernel would have to merge the splits."""
        out, lse, *_ = flash_private.operators_of_3().fwd(
            q, k, v, cu_seqlens_q=call.cu_q, cu_seqlens_k=call.cu_k, max_seqlen_q=call.max_q,
            max_seqlen_k=call.max_k, softmax_scale=scale, is_causal=call.causal, window_size_left=call.left,
            window_size_right=call.right, num_splits=1,
        )  # fmt: skip
        return out, lse

    def attend_unrounded(
        self, q: Tensor, k: Tensor, v: Tensor, call: VarlenCall, scale: float
    ) -> tuple[Tensor, Tensor] | None:
        """Two splits, merged here; takes twice the memory of a float32 output while it runs."""
        assert call.cu_q is not None
        if not self.splits or len(call.cu_q) > 2:
            return None
        try:
            _, _, parts, lses, *_ = flash_private.operators_of_3().fwd(
                q[None], k[None], v[None], softmax_scale=scale, is_causal=call.causal, window_size_left=call.left,
                window_size_right=call.right, num_splits=2,
            )  # fmt: skip
        except RuntimeError as error:
            if "does not support splits" not in str(error):
                raise
            self.splits = False
            return None
        (out, other), (lse, other_lse) = parts[:, 0].transpose(1, 2), lses[:, 0]
        merge_(out, lse, other, other_lse)
        return out, lse

    def differentiate(
        self, q: Tensor, k: Tensor, v: Tensor, results: Results, call: VarlenCall, scale: float, deterministic: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        flash_private.operators_of_3().bwd(
            results.dout, q, k, v, results.out, results.lse, dq=dq, dk=dk, dv=dv, cu_seqlens_q=call.cu_q,
            cu_seqlens_k=call.cu_k, max_seqlen_q=call.max_q, max_seqlen_k=call.max_k, softmax_scale=scale,
            is_causal=call.causal, window_size_left=call.left, window_size_right=call.right,
            deterministic=deterministic,
        )  # fmt: skip
        return dq, dk, dv


class Flash4(Library):
    """``flash_attn.cute.interface._flash_attn_fwd`` and ``_flash_attn_bwd``, on Hopper and Blackwell.

    From the package flash-attn-4 (``flash_attn/cute`` of the repository). Source: ``interface.py`` at the tags
    fa4-v4.0.0.beta12, the first with a deterministic backward for grouped heads, and beta27. Its backward takes the
    gradient of lse, not delta: an output of zeros and ``dlse = -delta`` pass delta in.
    """

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
