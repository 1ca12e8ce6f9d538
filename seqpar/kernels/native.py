"""Attention on the CPU in C++ (``csrc/attention``), with the widest vectors of the processor, on torch's threads.

Queries lie along the lanes of a vector: a softmax needs no sum across lanes, and neither keys nor values are
transposed. Sums are float32; in bf16, probabilities are rounded to bf16 before they multiply the values, as on GPUs.
Results have the same bits on any number of threads.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seqpar import native
from seqpar.kernels import dropout
from seqpar.kernels.protocol import CallSpec, Grads, Kernel, Operands, Score, StepFacts, Sums

ISAS = ("portable", "avx2", "avx512", "avx512_bf16", "amx")  # numbered as in csrc/base/isa.h
DTYPES = (torch.float32, torch.bfloat16)
MAX_DIM = 1024  # SP_MAX_DIM of csrc/attention/attention.h


class Native(Kernel):
    """See `seqpar.kernels.protocol.Kernel`. isa: an index of `ISAS` that this machine has, or None for its best."""

    def __init__(self, *, isa: int | None = None) -> None:
        self.name = "native" if isa is None else f"native_{ISAS[isa]}"
        self._isa = isa

    def missing(self) -> str | None:
        return native.missing()

    def refuses(self, spec: CallSpec) -> str | None:
        if spec.device != "cpu":
            return f"native runs on the CPU, q is on {spec.device}"
        if spec.dtype not in DTYPES:
            return f"native has float32 and bfloat16, no {spec.dtype}"
        if max(spec.dim, spec.v_dim) > MAX_DIM:
            return f"native has head dims up to {MAX_DIM}, got {spec.dim} and {spec.v_dim}"
        return native.lacks("attention_has_until") if spec.until else native.missing()

    def keeps_top(self, score: Score) -> bool:
        return score.scaled and native.lacks("attention_forward_top") is None

    def forward(self, x: Operands, into: Sums) -> None:
        given = *self._call(x), into.acc, into.lse, into.out, into.first, self.isa
        if into.top is None:
            native.ops().attention_forward(*given)
        else:
            native.ops().attention_forward_top(*given, into.top)

    def backward(self, x: Operands, grads: Grads) -> None:
        dout, lse, delta = (_dense(y) for y in (grads.dout, grads.lse, grads.delta))
        native.ops().attention_backward(*self._call(x), dout, lse, delta, grads.dq, grads.dk, grads.dv, self.isa)

    @cached_property
    def isa(self) -> int:
        """The instruction set that calls use, an index of `ISAS`."""
        return int(native.ops().isa()) if self._isa is None else self._isa

    def _call(self, x: Operands) -> tuple[Any, ...]:
        q, score = _dense(x.q), x.score
        bm, bn = native.ops().attention_tile(self.isa, q.dtype == torch.bfloat16)
        a = b = None
        if score.dropout_p:
            heads = range(score.first_head, score.first_head + q.shape[1])
            a, b = dropout.step_words(x.facts, heads, score.dropout_seed)
        slopes = None if score.slopes is None else score.slopes.contiguous()
        facts = x.facts.memo(("native", bm, bn), lambda: _tables(x.facts, bm, bn))
        return (
            q, _dense(x.k), _dense(x.v), facts, score.scale, score.softcap, slopes, score.dropout_p, a, b, bm,
        )  # fmt: skip


def _tables(facts: StepFacts, bm: int, bn: int) -> list[Tensor]:
    """Positions, bounds and query tiles in the form that the operators take."""
    t = facts.tiles(bm, bn)
    rows, order = (torch.from_numpy(x.astype(np.int64)) for x in (t.rows, t.order))
    until = [] if facts.until is None else [facts.until]
    return [facts.pos, facts.lo, facts.hi, facts.key_pos, rows, order, *until]


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] < 2 else x.contiguous()
