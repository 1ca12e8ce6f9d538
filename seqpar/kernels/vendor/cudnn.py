"""cuDNN's attention inside torch.

Source: torch's ``aten/src/ATen/native/cudnn/MHA.cpp`` (a causal mask is aligned at the first row, statistics are
[1, H, rows, 1]) and ``transformers/cuda/sdp_utils.cpp`` (its limits). cuDNN builds a plan for every shape, so segments
should have many rows. Its backward is not deterministic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.kernels.dispatch import no_cuda
from seqpar.kernels.protocol import CallSpec
from seqpar.kernels.vendor.aten import heads_first
from seqpar.kernels.vendor.library import Library, Results, refuses_on_cuda
from seqpar.kernels.vendor.varlen import VarlenCall
from seqpar.private import torch as torch_private

LEAST = 91501  # older versions are wrong for lengths not divisible by 128 (pytorch#169849)


class CuDNN(Library):
    """``aten::_scaled_dot_product_cudnn_attention``, one segment per call; causal ones as rectangles and squares."""

    name = "cudnn"
    varlen = False
    squares = True
    shortest = 2
    rows_per_segment = 512
    rows_per_call = 512

    def missing(self) -> str | None:
        if no_cuda():
            return no_cuda()
        release = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        if release is None:
            return "this torch has no cuDNN"
        return None if release >= LEAST else f"it needs cuDNN {LEAST} or later, this torch has {release}"

    def refuses(self, spec: CallSpec) -> str | None:
        if max(spec.dim, spec.v_dim) > 128:
            return f"cudnn has head dims up to 128, got {spec.dim} and {spec.v_dim}"
        return refuses_on_cuda(self, spec, least=90, most=109)

    def varies(self, spec: CallSpec) -> str | None:
        return "cudnn has no deterministic backward"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: VarlenCall, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch_private.scaled_dot_product_cudnn_attention(
            *heads_first(q, k, v), None, True, 0.0, call.causal, False, scale=scale
        )
        return out[0].transpose(0, 1), lse.reshape(q.shape[1], q.shape[0])

    def differentiate(
        self, q: Tensor, k: Tensor, v: Tensor, results: Results, call: VarlenCall, scale: float, deterministic: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The operator takes a generator's state, and without dropout does not read it."""
        assert results.out is not None
        dout, *tensors = heads_first(results.dout, q, k, v, results.out)
        state = q.new_empty((), dtype=torch.int64)
        dq, dk, dv = torch_private.scaled_dot_product_cudnn_attention_backward(
            dout, *tensors, results.lse[None, ..., None], state, state, None, None, None, call.max_q, call.max_k, 0.0,
            call.causal, scale=scale,
        )  # fmt: skip
        return dq[0].transpose(0, 1), dk[0].transpose(0, 1), dv[0].transpose(0, 1)
