"""Kernels: attention of query rows over one buffer of keys, and the choice of the one that fits a call."""

from __future__ import annotations

from seqpar.kernels.blockwise import Blockwise
from seqpar.kernels.preference import KERNELS, VENDORS, available, choose, explain, faulty, order
from seqpar.kernels.protocol import (
    CallSpec,
    Grads,
    Kernel,
    Operands,
    Score,
    StepFacts,
    Sums,
    acc_dtype,
    call_spec,
)
from seqpar.kernels.softmax import merge

__all__ = [
    "KERNELS", "VENDORS", "Blockwise", "CallSpec", "Grads", "Kernel", "Operands", "Score", "StepFacts", "Sums",
    "acc_dtype", "available", "call_spec", "choose", "explain", "faulty", "merge", "order",
]  # fmt: skip
