"""Launches of the recurrent kernels, and a walk over chunks as a differentiable function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from seqpar.kernels.recurrent.protocol import Recurrence
from seqpar.kernels.recurrent.triton import pairs, rows, walk
from seqpar.kernels.recurrent.triton.config import RecurrentDescriptor, configure
from seqpar.kernels.recurrent.triton.tables import Launched
from seqpar.kernels.recurrent.triton.tile import Shape
from seqpar.kernels.triton import interpreted


def inside_chunks(x: Recurrence, chunks: Tensor, rows_of_chunk: int) -> tuple[Tensor, Tensor]:
    """The weights of pairs, and with beta the inverses of the systems, [N, H, rows, rows] in float32."""
    count, heads = chunks.shape[0], x.v.shape[1]
    inside = x.v.new_empty(count, heads, rows_of_chunk, rows_of_chunk, dtype=torch.float32)
    inverse = inside if x.beta is None else torch.empty_like(inside)
    launches = Launches(x, rows_of_chunk, 1)
    launches(pairs.pairs, count, x.q, x.k, x.decay, x.beta, chunks, inside, inverse, x.scale)
    return inside, inverse


class ChunkWalk(torch.autograd.Function):
    """out of the launched runs, the states [R, H, K, C] that they leave, and the sums [R, H] of their log decays.

    Columns of the states past V have no values. has_out: whether there is an out [T, H, V]; then C = V, else it is
    empty. inside, inverse: of `inside_chunks`, whose gradients are part of those of the inputs.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor | None, entering: Tensor,
        inside: Tensor, inverse: Tensor, launched: Launched, rows_of_chunk: int, scale: float, has_out: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """See the class."""
        x, (count, heads, dim, columns) = Recurrence(q, k, v, decay, beta, scale), entering.shape
        launches, chunks = Launches(x, rows_of_chunk, columns), launched.chunks
        keep = has_out or any(ctx.needs_input_grad)
        kept = chunks.shape[0] if keep else 0
        entered = entering.new_empty(kept, heads, dim, columns)
        solved = entering.new_empty(kept if beta is not None else 0, heads, rows_of_chunk, columns)
        left, totals = torch.empty_like(entering), entering.new_empty(count, heads)
        launches(
            walk.walk, count, k, v, decay, beta, inverse, entering, launched.runs, entered, solved, left, totals,
            KEEP=keep,
        )  # fmt: skip
        out = torch.empty_like(v) if has_out else v.new_empty(0)
        if has_out:
            launches(rows.outputs, kept, q, v, decay, inside, entered, solved, chunks, out, scale)
        ctx.save_for_backward(q, k, v, decay, beta, inside, inverse, entered, solved)
        ctx.launched, ctx.launches, ctx.has_out = launched, launches, has_out
        return out, left, totals

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, dleft: Tensor, dtotals: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of q, k, v, decay, beta and entering."""
        q, k, v, decay, beta, inside, inverse, entered, solved = ctx.saved_tensors
        launches, (runs, chunks), has_out = ctx.launches, (ctx.launched.runs, ctx.launched.chunks), ctx.has_out
        total, heads, groups = v.shape[0], v.shape[1], k.shape[1]
        dout, dleft = dout.contiguous(), dleft.contiguous()
        after, dentering = torch.empty_like(entered), torch.empty_like(dleft)
        dsolved = entered.new_empty(chunks.shape[0], heads, launches.rows, entered.shape[3])
        launches(
            walk.walk_back, runs.shape[0], q, k, decay, beta, inside, inverse, dout, dleft, runs, after, dsolved,
            dentering, launches.scale, OUT=has_out,
        )  # fmt: skip
        blank = torch.empty if has_out else torch.zeros  # rows outside the launched runs have no gradient
        dk, dq = (blank(total, heads, k.shape[2], device=v.device) for _ in range(2))
        dv, blocks = blank(v.shape, dtype=v.dtype, device=v.device), launches.blocks("gradients")
        ddecay, dbeta = (blank(blocks + 1, total, heads, device=v.device) for _ in range(2))
        squares = chunks.shape[0], *inside.shape[1:]
        weights, system = (entered.new_empty(squares if there else 0) for there in (has_out, beta is not None))
        launches(
            rows.pair_gradients, chunks.shape[0], k, v, decay, beta, chunks, inside, solved, dsolved, dout, weights,
            system, dv, ddecay[blocks], dbeta[blocks], OUT=has_out,
        )  # fmt: skip
        launches(
            rows.gradients, chunks.shape[0], q, k, decay, beta, chunks, entered, solved, after, dsolved, dout, weights,
            system, v, dtotals.contiguous(), dq, dk, ddecay, dbeta, launches.scale, total, OUT=has_out,
        )  # fmt: skip
        dq, dk = (g.unflatten(1, (groups, heads // groups)).sum(2).to(k.dtype) for g in (dq, dk))
        return (
            dq if has_out else None, dk, dv, None if decay is None else ddecay.sum(0),
            None if beta is None else dbeta.sum(0), dentering, *[None] * 6,
        )  # fmt: skip


class Launches:
    """Launches of kernels for inputs of one kind. rows: of a chunk. columns: of the states."""

    def __init__(self, x: Recurrence, rows: int, columns: int) -> None:
        self.heads, self.groups, self.dim = x.v.shape[1], *x.k.shape[1:]
        self.values, self.dtype, self.scale = x.v.shape[2], x.v.dtype, x.scale
        self.decays, self.delta = x.decay is not None, x.beta is not None
        self.rows, self.columns = rows, columns

    def blocks(self, kernel: str) -> int:
        """The programs of a kernel for each chunk or run of a head."""
        config = configure(RecurrentDescriptor(kernel, self.dim, self.columns, self.dtype.itemsize))
        if kernel in ("pairs", "pair_gradients"):
            return 1
        return -(-self.dim // config.bk) if kernel == "gradients" else -(-self.columns // config.bc)

    def __call__(self, kernel: Any, count: int, *arguments: Any, **constants: bool) -> None:
        """Launch a kernel over so many chunks or runs."""
        name = kernel.__name__
        config = configure(RecurrentDescriptor(name, self.dim, self.columns, self.dtype.itemsize))
        shape = Shape(
            self.heads, self.heads // self.groups, self.dim, self.values, self.columns, self.rows, config.bk, config.bc,
            self.decays, self.delta, self.dtype == torch.bfloat16 and interpreted(),
            "tf32x3" if self.dtype == torch.float32 else "tf32",
        )  # fmt: skip
        programs = count * self.heads * self.blocks(name)
        if programs:
            with torch.cuda.device_of(arguments[0]):
                kernel[programs, 1, 1](
                    *arguments, S=shape, **constants, num_warps=config.warps, num_stages=config.stages,
                    enable_fp_fusion=True,
                )  # fmt: skip
