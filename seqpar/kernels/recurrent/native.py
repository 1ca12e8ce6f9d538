"""Recurrences on the CPU in C++ (``csrc/recurrent``), with the widest vectors of the processor, on torch's threads.

Chunks of 64 rows, as in `seqpar.kernels.recurrent.chunked`, but one head of a run after another: all that a chunk needs
stays in cache. Backward is written out, and computes each chunk again from the state that enters it, which forward
keeps where a gradient is wanted. Results have the same bits on any number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from seqpar import native
from seqpar.facts.intervals import edges
from seqpar.facts.value import Ints
from seqpar.kernels.native import ISAS
from seqpar.kernels.recurrent.protocol import Recurrence, RecurrentKernel, RecurrentSpec, with_identity

CHUNK = 64  # SP_CHUNK of csrc/recurrent/recurrent.h


@dataclass(frozen=True, eq=False)
class NativeRuns:
    """Some runs, as the operators take them: their rows, their first chunks and, long ones first, their order."""

    tables: list[Tensor]
    chunks: int

    @classmethod
    def of(cls, begin: Ints, end: Ints) -> NativeRuns:
        """Runs with the rows ``begin[n]`` to ``end[n]``."""
        chunk = edges(-(-(end - begin) // CHUNK))
        arrays = (begin, end, chunk[:-1], np.argsort(begin - end, kind="stable"))
        return cls([torch.tensor(x, dtype=torch.int64, device="cpu") for x in arrays], int(chunk[-1]))

    @property
    def full(self) -> bool:
        """Whether chunks have at least half of their rows in the mean; those of short documents have fewer."""
        return 2 * int((self.tables[1] - self.tables[0]).sum()) >= CHUNK * self.chunks

    def entered(self, entering: Tensor) -> Tensor:
        """Memory for the states that enter chunks."""
        return entering.new_empty(self.chunks, *entering.shape[1:])


@dataclass(frozen=True, eq=False)
class NativeTables:
    """All runs, and exported ones: also their rows, and the number of the run that has each of these."""

    every: NativeRuns
    exported: NativeRuns
    rows: Tensor
    owners: Tensor


class NativeChunks(RecurrentKernel):
    """See `seqpar.kernels.recurrent.protocol.RecurrentKernel`. isa: as of attention's native kernel."""

    casts = True
    keeps = 1

    def __init__(self, *, isa: int | None = None) -> None:
        self.name = "native" if isa is None else f"native_{ISAS[isa]}"
        self._isa = isa

    def refuses(self, spec: RecurrentSpec) -> str | None:
        if spec.device != "cpu":
            return f"native runs on the CPU, v is on {spec.device}"
        return native.lacks("recurrence_backward")

    def tables(self, counts: Ints, exported: Ints, device: torch.device) -> NativeTables:
        edge = edges(counts)
        begin, end = edge[:-1][exported], edge[1:][exported]
        rows = np.concatenate([np.zeros(0, np.int64), *(np.arange(*x) for x in zip(begin, end, strict=True))])
        owners = np.repeat(np.arange(exported.size), end - begin)
        every = NativeRuns.of(edge[:-1], edge[1:])
        numbers = (torch.tensor(x, dtype=torch.int64, device="cpu") for x in (rows, owners))
        return NativeTables(every, NativeRuns.of(begin, end), *numbers)

    def prepare(self, x: Recurrence, tables: NativeTables) -> tuple[Recurrence, NativeTables]:
        q, k, v = map(_dense_rows, x[:3])
        decay, beta = (None if y is None else _dense_rows(y) for y in x[3:5])
        return Recurrence(q, k, v, decay, beta, x.scale, x.rates), tables

    def leave(self, prepared: tuple[Recurrence, NativeTables], entering: Tensor) -> tuple[Tensor, Tensor]:
        x, tables = prepared
        runs, heads, dim = entering.shape[:3]
        if x.beta is not None:
            columns, v = with_identity(entering, x.v)
            left = self._states(x._replace(v=v), tables.exported, columns, reads=False)[1]
            return left[..., :-dim], left[..., -dim:]
        left = self._states(x, tables.exported, entering, reads=False)[1]
        if x.decay is None:
            return left, entering.new_zeros(runs, heads)
        sums = x.decay.new_zeros(runs, *x.decay.shape[1:], dtype=torch.float64)
        return left, sums.index_add(0, tables.owners, x.decay[tables.rows].double()).to(x.decay.dtype)

    def compute(self, prepared: tuple[Recurrence, NativeTables], entering: Tensor) -> tuple[Tensor, Tensor]:
        x, tables = prepared
        return self._states(x, tables.every, entering, reads=True)

    def keep(
        self, prepared: tuple[Recurrence, NativeTables], entering: Tensor
    ) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        """The states that enter chunks, or none of them if there are many for few rows."""
        x, tables = prepared
        if not tables.every.full:
            return *self.compute(prepared, entering), [entering[:0]]
        entered = tables.every.entered(entering)
        return *self._states(x, tables.every, entering, reads=True, entered=entered), [entered]

    def replay(
        self, prepared: tuple[Recurrence, NativeTables], entering: Tensor, kept: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        x, tables = prepared
        if kept and len(kept[0]):
            (entered,) = kept
        else:
            entered = tables.every.entered(entering)
            with torch.no_grad():
                self._states(x, tables.every, entering, reads=False, entered=entered)
        return self._states(x, tables.every, entering, reads=True, entered=entered, computes=False)

    def _states(
        self, x: Recurrence, runs: NativeRuns, entering: Tensor, *, reads: bool, entered: Tensor | None = None,
        computes: bool = True,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """out, empty if q is not read, and the states that the runs leave.

        entered: written, the states that enter chunks. computes: without it nothing is, and `entered` is read.
        """
        tensors = (x.q if reads else None, *x[1:5], entering.contiguous())
        if entered is None and torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in tensors):
            entered = runs.entered(entering)
        isa = int(native.ops().isa()) if self._isa is None else self._isa
        return _Recurrence.apply(runs, x.scale, isa, entered, computes, *tensors)  # type: ignore[no-untyped-call]


class _Recurrence(torch.autograd.Function):
    """One call of the operators, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, runs: NativeRuns, scale: float, isa: int, entered: Tensor | None, computes: bool,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        q, k, v, _, _, entering = tensors
        assert k is not None and v is not None and entering is not None
        out, left = v.new_empty(v.shape) if q is not None else None, torch.empty_like(entering)
        if computes:
            native.ops().recurrence_forward(*tensors, runs.tables, scale, out, left, entered, isa)
        ctx.runs, ctx.scale, ctx.isa = runs, scale, isa
        ctx.save_for_backward(*tensors, entered)
        return v.new_empty(0) if out is None else out, left

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, dleft: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, entered = ctx.saved_tensors
        q, k, v, decay, beta, entering = tensors
        heads, groups = v.shape[1], k.shape[1]
        # rows of other runs than these have no gradient
        make = torch.zeros_like if int((ctx.runs.tables[1] - ctx.runs.tables[0]).sum()) < len(v) else torch.empty_like
        dk = make(k if heads == groups else k[:, :1].expand(-1, heads, -1).contiguous())
        dq = None if q is None else torch.empty_like(dk)
        dv, dentering = make(v), torch.empty_like(entering)
        ddecay, dbeta = (None if x is None else make(x) for x in (decay, beta))
        native.ops().recurrence_backward(
            *tensors, ctx.runs.tables, ctx.scale, None if q is None else _dense_rows(dout), dleft.contiguous(), entered,
            dq, dk, dv, ddecay, dbeta, dentering, ctx.isa,
        )  # fmt: skip
        if heads != groups:
            dk = _over_heads(dk, groups)
            dq = None if dq is None else _over_heads(dq, groups)
        return None, None, None, None, None, dq, dk, dv, ddecay, dbeta, dentering


def _dense_rows(x: Tensor) -> Tensor:
    """x [rows, ...], if each of its rows is dense; otherwise a contiguous copy."""
    return x if x[:1].is_contiguous() else x.contiguous()


def _over_heads(x: Tensor, groups: int) -> Tensor:
    """The sum over the heads of each group."""
    return x.view(len(x), groups, x.shape[1] // groups, x.shape[2]).sum(2)
