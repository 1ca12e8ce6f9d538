"""FlashAttention-2 inside torch.

Source: torch's ``aten/src/ATen/native/transformers/cuda/attention.cu`` and ``attention_backward.cu``: with
``cum_seq_q`` tensors are packed and lse is [H, rows]; windows and causal masks are aligned at the end; backward is
deterministic only under ``torch.use_deterministic_algorithms``, which is not a call's business to set.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.kernels.dispatch import no_cuda
from seqpar.kernels.protocol import CallSpec
from seqpar.kernels.vendor.library import Library, Results, refuses_on_cuda
from seqpar.kernels.vendor.varlen import VarlenCall
from seqpar.private import torch as torch_private


class AtenFlash(Library):
    """``aten::_flash_attention_forward``. The keyword arguments used are in torch 2.11 and in all later versions."""

    name = "aten_flash"

    def missing(self) -> str | None:
        return no_cuda() or (
            None if torch.backends.cuda.is_flash_attention_available() else "this torch is built without FlashAttention"
        )

    def refuses(self, spec: CallSpec) -> str | None:
        if spec.dim != spec.v_dim or spec.dim > 256:
            return f"aten_flash needs values as wide as keys, 256 at most, got {spec.v_dim} and {spec.dim}"
        consumer = 86 <= spec.capability <= 89 or spec.capability >= 120
        if spec.grads and consumer and 192 < spec.dim <= 224:
            return f"aten_flash has no backward for head dim {spec.dim} on capability {spec.capability / 10}"
        return refuses_on_cuda(self, spec)

    def varies(self, spec: CallSpec) -> str | None:
        return "aten_flash has no deterministic backward for one call, only for a whole process"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: VarlenCall, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch_private.flash_attention_forward(
            q, k, v, call.cu_q, call.cu_k, call.max_q, call.max_k, 0.0, call.causal, False,
            scale=scale, window_size_left=call.left, window_size_right=call.right,
        )  # fmt: skip
        return out, lse

    def differentiate(
        self, q: Tensor, k: Tensor, v: Tensor, results: Results, call: VarlenCall, scale: float, deterministic: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The operator takes a generator's state, and without dropout does not read it."""
        state, unused = q.new_empty(2, dtype=torch.uint64), q.new_empty((), dtype=torch.uint64)
        return torch_private.flash_attention_backward(
            results.dout, q, k, v, results.out, results.lse, call.cu_q, call.cu_k, call.max_q, call.max_k, 0.0,
            call.causal, state, unused, scale=scale, window_size_left=call.left, window_size_right=call.right,
        )  # fmt: skip
