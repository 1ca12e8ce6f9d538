"""A kernel that runs another library's attention on the segments of a step.

Rows that do not form segments, or form too many small ones, always go to a position kernel (`Blockwise` on the CPU;
Triton's on CUDA where it is installed). So does all else that the library cannot do: backward through lse, scales that
are not positive (libraries mask and take maxima before they scale), and values it does not accept.

If each row sees all its keys in one call, the step's result is the library's output. Otherwise parts are merged in the
accumulation dtype, and a library that rounds its results has rounded each part, unless it gives parts in that dtype
(`Library.attend_unrounded`). `accuracy_loss` says so for calls of several steps. Any other call is exact: libraries of
squares leave its causal rectangles to the position kernel.

Where gradients must have the same bits every time and the library's would not, Triton's kernel computes them all.

Where keys end, as in trees, a row has a segment on each ancestor: calls of several levels, whose parts are merged. So
`accuracy_loss` says so of every call with such keys.

A value that is not finite makes every row of its tile NaN, even rows that do not see it, as in all fused kernels. On
the CPU such inputs go to the position kernel.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from seqpar.kernels.blockwise import Blockwise
from seqpar.kernels.protocol import CallSpec, Grads, Kernel, Operands, StepFacts, Sums
from seqpar.kernels.softmax import merge_
from seqpar.kernels.vendor.library import Library, Results
from seqpar.kernels.vendor.varlen import VarlenCall, VarlenCalls, calls_of

LEAST_SCALE = torch.finfo(torch.float32).tiny  # libraries multiply in float32, where a smaller scale may become zero


class Segmented(Kernel):
    """See `seqpar.kernels.protocol.Kernel`.

    deterministic: as in `CallSpec`. merges: parts of results may be rounded and merged. rest: the position kernel.
    borrows: its backward is that of rest.
    """

    def __init__(
        self, library: Library, *, rest: Kernel | None = None, deterministic: bool = True, merges: bool = True,
        borrows: bool = False,
    ) -> None:  # fmt: skip
        self.name = library.name
        self.library = library
        self.rest = Blockwise() if rest is None else rest
        self.deterministic, self.merges, self.borrows = deterministic, merges, borrows

    def specialised_for(self, spec: CallSpec) -> Segmented:
        """This kernel for one call: on CUDA it depends on the `CallSpec`."""
        if spec.device != "cuda":
            return self
        from seqpar.kernels.triton import Triton

        triton = Triton()
        rest = triton if triton.refuses(spec) is None else Blockwise()
        merges, borrows = spec.merges or spec.until, self.varies(spec) is not None
        return Segmented(self.library, rest=rest, deterministic=spec.deterministic, merges=merges, borrows=borrows)

    def missing(self) -> str | None:
        return self.library.missing()

    def refuses(self, spec: CallSpec) -> str | None:
        refused, varies = self.library.refuses(spec), self.varies(spec)
        if refused or varies is None:
            return refused
        from seqpar.kernels.triton import Triton

        other = Triton().refuses(spec)
        return f"{varies}, and {other}" if other else None

    def varies(self, spec: CallSpec) -> str | None:
        """Why the library's gradients would not have the same bits every time, where they must; else None."""
        return self.library.varies(spec) if spec.grads and spec.deterministic else None

    def accuracy_loss(self, spec: CallSpec) -> str | None:
        if not (self.library.rounds and (spec.merges or spec.until)):
            return None
        dtype = str(spec.dtype).removeprefix("torch.")
        own = spec.grads and self.varies(spec) is None
        gradients = ", and each step's gradients before they are added" if own else ""
        return f"{self.name} rounds each step's result to {dtype} before they are merged{gradients}"

    def tables(self, spec: CallSpec, facts: StepFacts) -> dict[Hashable, Any]:
        return self.rest.tables(spec, facts) if self.borrows else {}

    def forward(self, x: Operands, into: Sums) -> None:
        calls = self._calls(x, x.q, x.k, x.v)
        if calls is None:
            self.rest.forward(x, into)
        elif into.first:
            self._first(x, into, calls)
        else:
            self._later(x, into, calls)

    def _first(self, x: Operands, into: Sums, calls: VarlenCalls) -> None:
        """Write all rows. A row's first part is written without a merge, whatever the output's dtype."""
        output, lse = into.acc if into.out is None else into.out, into.lse
        assert output is not None
        total = output if output.dtype == lse.dtype or not calls.again else torch.empty_like(output, dtype=lse.dtype)
        if calls.again or not calls.covers:
            total.zero_()
            lse.fill_(-torch.inf)
        rounded = total.dtype == x.q.dtype
        for call in calls.calls:
            part, part_lse = self._attend(x, call, rounded=rounded)
            rows, rows_lse = total[call.rows], lse[:, call.rows]
            if call.again:
                merge_(rows, rows_lse, part, part_lse)
            elif call.seen is None:
                rows.copy_(part)
                rows_lse.copy_(part_lse)
            else:
                rows.copy_(torch.where(call.seen[:, None, None], part, rows))
                rows_lse.copy_(torch.where(call.seen, part_lse, rows_lse))
        if total is not output:
            output.copy_(total)

    def _later(self, x: Operands, into: Sums, calls: VarlenCalls) -> None:
        """Merge with the earlier result; one call for all rows writes straight into the output."""
        acc, lse, out = into.acc, into.lse, into.out
        assert acc is not None
        if out is not None and calls.covers and len(calls.calls) == 1:
            merge_(acc, lse, *self._attend(x, calls.calls[0]), out=out)
            return
        for call in calls.calls:
            merge_(acc[call.rows], lse[:, call.rows], *self._attend(x, call))
        if out is not None and out is not acc:
            out.copy_(acc)

    def _attend(self, x: Operands, call: VarlenCall, *, rounded: bool = False) -> tuple[Tensor, Tensor]:
        """The part of one call, with lse -inf where a row sees no key in it. rounded: it is not merged with others."""
        q, k, v = self._aligned(x.q[call.rows], x.k[call.keys], x.v[call.keys])
        whole = None if rounded else self.library.attend_unrounded(q, k, v, call, x.score.scale)
        part, lse = self.library.attend(q, k, v, call, x.score.scale) if whole is None else whole
        return part, lse if call.seen is None else lse.masked_fill(~call.seen, -torch.inf)

    def backward(self, x: Operands, grads: Grads) -> None:
        out = grads.out
        able = not self.borrows and (out is not None or self.library.from_delta)
        calls = self._calls(x, grads.dout, x.q, x.k, x.v, *(() if out is None else (out,))) if able else None
        if calls is None or (calls.keys_again and self.library.rounds and not self.merges):
            self.rest.backward(x, grads)
            return
        for call in calls.calls:
            rows, keys = call.rows, call.keys
            q, k, v, dout = self._aligned(x.q[rows], x.k[keys], x.v[keys], grads.dout[rows])
            final = None if out is None else self._aligned(out[rows])[0]
            lse = grads.lse[:, rows]
            if call.seen is not None:  # -inf - -inf is NaN; with +inf, a row that sees no key has zero probabilities
                lse = lse.masked_fill(lse == -torch.inf, torch.inf)
            results = Results(dout, final, lse.contiguous(), grads.delta[:, rows].contiguous())
            dq, dk, dv = self.library.differentiate(q, k, v, results, call, x.score.scale, self.deterministic)
            grads.dq[rows] += dq
            grads.dk[keys] += dk
            grads.dv[keys] += dv

    def _calls(self, x: Operands, *tensors: Tensor) -> VarlenCalls | None:
        """The step as calls of the library; None if the position kernel computes it."""
        library = self.library
        if x.score.scale < LEAST_SCALE:
            return None
        calls = calls_of(x.facts, x.q.device, varlen=library.varlen, squares=library.squares)
        if calls is None or (calls.again and library.rounds and not self.merges):
            return None
        for count, rows in (calls.segments, library.rows_per_segment), (len(calls.calls), library.rows_per_call):
            if count > 1 and count * rows > len(x.facts.pos):
                return None
        if any(min(call.max_q, call.max_k) < library.shortest for call in calls.calls):
            return None
        return calls if library.accepts(*tensors) else None

    def _aligned(self, *tensors: Tensor) -> list[Tensor]:
        """The tensors, copied where a row starts at an address that the library cannot load from."""
        return [x if _is_aligned(x, self.library.alignment) else x.clone(memory_format=torch.contiguous_format)
                for x in tensors]  # fmt: skip


def _is_aligned(x: Tensor, alignment: int) -> bool:
    starts = [x.storage_offset(), *(s for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1)]
    dense = x.stride(-1) == 1 or x.shape[-1] == 1
    return dense and all(s * x.element_size() % alignment == 0 for s in starts)
