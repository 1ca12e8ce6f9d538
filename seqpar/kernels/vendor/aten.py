"""torch's own operators: its fused attention on the CPU, and FlashAttention-2 and cuDNN inside torch."""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.kernels.dispatch import no_cuda
from seqpar.kernels.protocol import DTYPES, CallSpec, acc_dtype
from seqpar.kernels.vendor.library import Library, Results, refuses_on_cuda
from seqpar.kernels.vendor.varlen import VarlenCall
from seqpar.private import torch as torch_private

LEAST = 91501  # of cuDNN: older versions are wrong for lengths not divisible by 128 (pytorch#169849)


class Aten(Library):
    """``aten::_scaled_dot_product_flash_attention_for_cpu``, in float32 and float64.

    It takes one segment per call, has no windows, and aligns a causal mask at the first row, so causal segments must be
    square. It reports lse 0 for a row that sees nothing; no segment here has such a row. Inside a square it multiplies
    unseen values by zero, so inputs must be finite.
    """

    name = "aten"
    varlen = False
    squares = True
    rounds = False
    alignment = 1
    rows_per_segment = 16  # with fewer rows per segment, a call costs more than the tiles it saves
    rows_per_call = 0

    def refuses(self, spec: CallSpec) -> str | None:
        if spec.device != "cpu":
            return f"aten runs on the CPU, q is on {spec.device}"
        if spec.dtype not in DTYPES:
            return f"aten has no {spec.dtype}"
        if spec.dtype != acc_dtype(spec.dtype):
            return f"aten rounds partial results of {spec.dtype}"
        if not spec.plain:
            return "aten has no softcap, ALiBi or counter-based dropout"
        if spec.dim != spec.v_dim:
            return f"aten needs values as wide as keys, got {spec.v_dim} and {spec.dim}"
        return None

    def accepts(self, *tensors: Tensor) -> bool:
        """Whether all elements are finite. A sum that overflows says no: slower, and just as accurate."""
        return all(bool(torch.isfinite(x.sum())) for x in tensors)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: VarlenCall, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = torch_private.scaled_dot_product_flash_attention_for_cpu(
            *heads_first(q, k, v), 0.0, call.causal, scale=scale
        )
        return out[0].transpose(0, 1), lse[0]

    def differentiate(
        self, q: Tensor, k: Tensor, v: Tensor, results: Results, call: VarlenCall, scale: float, deterministic: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The operator is deterministic."""
        assert results.out is not None
        dq, dk, dv = torch_private.scaled_dot_product_flash_attention_for_cpu_backward(
            *heads_first(results.dout, q, k, v, results.out), results.lse[None], 0.0, call.causal, scale=scale
        )
        return dq[0].transpose(0, 1), dk[0].transpose(0, 1), dv[0].transpose(0, 1)


class AtenFlash(Library):
    """``aten::_flash_attention_forward``. The keyword arguments used are in torch 2.11 and in all later versions.

    Source: torch's ``aten/src/ATen/native/transformers/cuda/attention.cu`` and ``attention_backward.cu``: with
    ``cum_seq_q`` tensors are packed and lse is [H, rows]; windows and causal masks are aligned at the end; backward is
    deterministic only under ``torch.use_deterministic_algorithms``, which is not a call's business to set.
    """

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


class CuDNN(Library):
    """``aten::_scaled_dot_product_cudnn_attention``, one segment per call; causal ones as rectangles and squares.

    Source: torch's ``aten/src/ATen/native/cudnn/MHA.cpp`` (a causal mask is aligned at the first row, statistics are
    [1, H, rows, 1]) and ``transformers/cuda/sdp_utils.cpp`` (its limits). cuDNN builds a plan for every shape, so
    segments should have many rows. Its backward is not deterministic.
    """

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


def heads_first(*tensors: Tensor) -> list[Tensor]:
    """[rows, H, D] -> [1, H, rows, D], views."""
    return [x.transpose(0, 1)[None] for x in tensors]
