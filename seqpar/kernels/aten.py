"""torch's fused CPU operator over the segments of a step, in float32 and float64.

The operator knows full rectangles and causal squares aligned at their first row. A causal segment, aligned at its last
row, is a rectangle and a square. By this kernel's definition, and not as a fallback, these go tile by tile: steps with
windows or with bounds that make no segments, backward through lse, and inputs that are not finite (in a square the
operator multiplies unseen values by zero).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from seqpar.kernels.blockwise import Blockwise
from seqpar.kernels.protocol import Ask, Facts, Grads, Operands, Sums, acc_dtype
from seqpar.kernels.softmax import merge

ROWS_PER_SEGMENT = 16  # with fewer rows in a segment a call of the operator costs more than the tiles it saves
_CAUSAL, _WINDOW = 1, 2  # seqpar.plan.Kind


class Aten:
    """See `seqpar.kernels.protocol.Kernel`."""

    name = "aten"

    def __init__(self) -> None:
        self.tiles = Blockwise()

    def refuses(self, ask: Ask) -> str | None:
        """Why not, or None."""
        if ask.device != "cpu":
            return f"aten runs on the CPU, q is on {ask.device}"
        if ask.dtype != acc_dtype(ask.dtype):
            return f"aten rounds partial results of {ask.dtype}"
        if not ask.plain:
            return "aten has no softcap, ALiBi or counter-based dropout"
        if ask.dim != ask.v_dim:
            return f"aten needs values as wide as keys, got {ask.v_dim} and {ask.dim}"
        return None

    def costs(self, ask: Ask) -> str | None:
        """Nothing: sums are kept in the accumulation dtype."""
        return None

    def forward(self, x: Operands, into: Sums) -> None:
        """Add the keys of one buffer; see the protocol."""
        if not (_segmented(x.facts) and _finite(x.q, x.k, x.v)):
            self.tiles.forward(x, into)
            return
        total, lse = into.acc if into.out is None else into.out, into.lse
        assert total is not None
        if into.first:
            total.zero_()
            lse.fill_(-torch.inf)
        elif into.out is not None and into.acc is not None:
            into.out.copy_(into.acc)
        done = -1
        for rows, keys, causal in _pieces(x.facts):
            part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *(_batched(y) for y in (x.q[rows], x.k[keys], x.v[keys])), 0.0, causal, scale=x.score.scale
            )
            piece, piece_lse = part[0].transpose(0, 1), part_lse[0].t()
            if not into.first or rows.start < done:
                piece, piece_lse = merge(total[rows], lse[:, rows].t(), piece, piece_lse)
            total[rows], lse[:, rows] = piece, piece_lse.t()
            done = rows.stop  # segments come in the order of rows; a square follows the rectangle of its rows

    def backward(self, x: Operands, grads: Grads) -> None:
        """Add the gradients of one buffer's keys; see the protocol. The operator takes ``out`` instead of delta."""
        dout, out = grads.dout, grads.out
        if out is None or not (_segmented(x.facts) and _finite(dout, x.q, x.k, x.v, out)):
            self.tiles.backward(x, grads)
            return
        for rows, keys, causal in _pieces(x.facts):
            tensors = (_batched(y) for y in (dout[rows], x.q[rows], x.k[keys], x.v[keys], out[rows]))
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *tensors, grads.lse[None, :, rows], 0.0, causal, scale=x.score.scale
            )
            for total, at, part in zip((grads.dq, grads.dk, grads.dv), (rows, keys, keys), parts, strict=True):
                total[at] += part[0].transpose(0, 1)


def _segmented(facts: Facts) -> bool:
    """Whether the operator can do all of a step, in calls that are worth their overhead."""
    s = facts.segments()
    few = len(s.q_row) * ROWS_PER_SEGMENT <= max(len(facts.pos), ROWS_PER_SEGMENT)
    return bool(few and not len(s.remainder) and not (s.kind == _WINDOW).any())


def _pieces(facts: Facts) -> Iterator[tuple[slice, slice, bool]]:
    """Query rows, key rows, and whether it is a causal square, of each call of the operator."""
    s = facts.segments()
    for q, n, k, m, kind in zip(*(x.tolist() for x in (s.q_row, s.q_len, s.k_row, s.k_len, s.kind)), strict=True):
        if kind != _CAUSAL:
            yield slice(q, q + n), slice(k, k + m), False
            continue
        seen = min(n, m)  # rows before the first key see nothing
        if m > n:
            yield slice(q, q + n), slice(k, k + m - n), False
        yield slice(q + n - seen, q + n), slice(k + m - seen, k + m), True


def _batched(x: Tensor) -> Tensor:
    """[rows, H, D] -> [1, H, rows, D], a view."""
    return x.transpose(0, 1)[None]


def _finite(*tensors: Tensor) -> bool:
    """Whether all elements are finite; a sum that overflows says no, which costs time and no accuracy."""
    return all(bool(torch.isfinite(x.sum())) for x in tensors)
