"""FlashAttention-2 as torch carries it.

Source: torch's ``aten/src/ATen/native/transformers/cuda/attention.cu`` and ``attention_backward.cu``: with
``cum_seq_q`` tensors are packed and lse is [H, rows]; windows and causal masks are aligned at the end; backward is
deterministic only under ``torch.use_deterministic_algorithms``, which is no call's to set.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.kernels.dispatch import no_cuda
from seqpar.kernels.protocol import Ask
from seqpar.kernels.vendor.batches import Batch
from seqpar.kernels.vendor.library import Library, Results, refuses_on_cuda


class AtenFlash(Library):
    """``aten::_flash_attention_forward``. Arguments by name are those that torch 2.11 and later both have."""

    name = "aten_flash"

    def missing(self) -> str | None:
        """Why it cannot run on this machine, or None."""
        return no_cuda() or (
            None if torch.backends.cuda.is_flash_attention_available() else "this torch is built without FlashAttention"
        )

    def refuses(self, ask: Ask) -> str | None:
        """Why not, or None."""
        if ask.dim != ask.v_dim or ask.dim > 256:
            return f"aten_flash needs values as wide as keys, 256 at most, got {ask.v_dim} and {ask.dim}"
        if ask.grads and ask.deterministic:
            return "aten_flash has a deterministic backward only for a whole process, not for a call"
        consumer = 86 <= ask.capability <= 89 or ask.capability >= 120
        if ask.grads and consumer and 192 < ask.dim <= 224:
            return f"aten_flash has no backward for head dim {ask.dim} on capability {ask.capability / 10}"
        return refuses_on_cuda(self, ask)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, scale: float) -> tuple[Tensor, Tensor]:
        """See `Library`."""
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, batch.cu_q, batch.cu_k, batch.max_q, batch.max_k, 0.0, batch.causal, False,
            scale=scale, window_size_left=batch.left, window_size_right=batch.right,
        )  # fmt: skip
        return out, lse

    def differentiate(
        self, q: Tensor, k: Tensor, v: Tensor, given: Results, batch: Batch, scale: float, deterministic: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Library`. The state of a generator is asked for and without dropout not read."""
        state, unused = q.new_empty(2, dtype=torch.uint64), q.new_empty((), dtype=torch.uint64)
        return torch.ops.aten._flash_attention_backward(
            given.dout, q, k, v, given.out, given.lse, batch.cu_q, batch.cu_k, batch.max_q, batch.max_k, 0.0,
            batch.causal, state, unused, scale=scale, window_size_left=batch.left, window_size_right=batch.right,
        )  # fmt: skip
