"""FlashAttention-2 as torch carries it.

Source: torch's ``aten/src/ATen/native/transformers/cuda/attention.cu`` and ``attention_backward.cu``: with
``cum_seq_q`` tensors are packed and lse is [H, rows]; windows and causal masks are aligned at the end; backward is
deterministic only under ``torch.use_deterministic_algorithms``, which is no call's to set.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.kernels.dispatch import no_cuda
from seqpar.kernels.protocol import CallSpec
from seqpar.kernels.vendor.library import Library, Results, refuses_on_cuda
from seqpar.kernels.vendor.varlen import VarlenCall


class AtenFlash(Library):
    """``aten::_flash_attention_forward``. Arguments by name are those that torch 2.11 and later both have."""

    name = "aten_flash"

    def missing(self) -> str | None:
        """Why it cannot run on this machine, or None."""
        return no_cuda() or (
            None if torch.backends.cuda.is_flash_attention_available() else "this torch is built without FlashAttention"
        )

    def refuses(self, spec: CallSpec) -> str | None:
        """Why not, or None."""
        if spec.dim != spec.v_dim or spec.dim > 256:
            return f"aten_flash needs values as wide as keys, 256 at most, got {spec.v_dim} and {spec.dim}"
        if spec.grads and spec.deterministic:
            return "aten_flash has a deterministic backward only for a whole process, not for a call"
        consumer = 86 <= spec.capability <= 89 or spec.capability >= 120
        if spec.grads and consumer and 192 < spec.dim <= 224:
            return f"aten_flash has no backward for head dim {spec.dim} on capability {spec.capability / 10}"
        return refuses_on_cuda(self, spec)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: VarlenCall, scale: float) -> tuple[Tensor, Tensor]:
        """See `Library`."""
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, call.cu_q, call.cu_k, call.max_q, call.max_k, 0.0, call.causal, False,
            scale=scale, window_size_left=call.left, window_size_right=call.right,
        )  # fmt: skip
        return out, lse

    def differentiate(
        self, q: Tensor, k: Tensor, v: Tensor, results: Results, call: VarlenCall, scale: float, deterministic: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Library`. The state of a generator is asked for and without dropout not read."""
        state, unused = q.new_empty(2, dtype=torch.uint64), q.new_empty((), dtype=torch.uint64)
        return torch.ops.aten._flash_attention_backward(
            results.dout, q, k, v, results.out, results.lse, call.cu_q, call.cu_k, call.max_q, call.max_k, 0.0,
            call.causal, state, unused, scale=scale, window_size_left=call.left, window_size_right=call.right,
        )  # fmt: skip
