"""torch's fused CPU operator, in float32 and float64.

It takes one segment per call, has no windows, and aligns a causal mask at the first row, so causal segments must be
square. It reports lse 0 for a row that sees nothing; no segment here has such a row. Inside a square it multiplies
unseen values by zero, so inputs must be finite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.kernels.protocol import DTYPES, CallSpec, acc_dtype
from seqpar.kernels.vendor.library import Library, Results
from seqpar.kernels.vendor.varlen import VarlenCall
from seqpar.private import torch as torch_private


class Aten(Library):
    """``aten::_scaled_dot_product_flash_attention_for_cpu``."""

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


def heads_first(*tensors: Tensor) -> list[Tensor]:
    """[rows, H, D] -> [1, H, rows, D], views."""
    return [x.transpose(0, 1)[None] for x in tensors]
