"""The recurrence on NVIDIA GPUs in Triton, for one decay of a head or none, with and without the delta rule.

Runs are cut into chunks of 64 rows. Inside them rows meet in matrix products, and a state goes from chunk to chunk::

    pairs           weights of a chunk's rows for each other, the inverse of the delta rule's system    a chunk
    walk            states before chunks                                            a run and a block of state columns
    outputs         out, from both                                                                      a chunk
    walk_back       gradients of states, from the last chunk to the first           a run and a block of state columns
    pair_gradients  those of pairs and of v                                                             a chunk
    gradients       those of q and k, from both                                                         a chunk

Every sum has one program and one order. States and solutions are kept in float32 between kernels, K * V
numbers for each chunk and head. A value that is not finite makes all rows of its run NaN, and no other run. An H200
has run two short runs of a state space right, and timed nothing; the interpreter runs all, and they are compiled for
every generation.

Sources: Dao and Gu 2024, section 6 (chunks of state spaces); Yang et al. 2024, "Parallelizing linear transformers with
the delta rule", section 3, and "Gated delta networks", section 3.3.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from seqpar.facts.value import Ints
from seqpar.kernels.dispatch import no_cuda, triton_installed
from seqpar.kernels.recurrent.protocol import Recomputed, Recurrence, RecurrentSpec
from seqpar.kernels.recurrent.triton.config import MAX_DIM
from seqpar.kernels.recurrent.triton.tables import ChunkTables, Launched, tables_of
from seqpar.kernels.triton import interpreted

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class PreparedChunks(NamedTuple):
    """A call's rows, contiguous, and what `pairs` computes of them."""

    x: Recurrence
    tables: ChunkTables
    inside: Tensor
    inverse: Tensor


class TritonChunks(Recomputed):
    """The kernels as a `seqpar.kernels.recurrent.protocol.RecurrentKernel`."""

    name = "triton"
    casts = False

    def refuses(self, spec: RecurrentSpec) -> str | None:
        """Why the kernels cannot compute such a call, or None."""
        if not triton_installed():
            return "triton is not installed"
        if spec.device != "cuda" and not (spec.device == "cpu" and interpreted()):
            return f"it runs on CUDA devices, v is on {spec.device}"
        if spec.device == "cuda" and no_cuda() is not None:
            return no_cuda()
        if spec.dtype not in DTYPES:
            return f"it has no {spec.dtype}"
        if spec.decay == "channel":
            return "it has one decay for each token and head, got one for each channel"
        if spec.dim > MAX_DIM:
            return f"it has keys of up to {MAX_DIM} dims, got {spec.dim}"
        return None

    def tables(self, counts: Ints, exported: Ints, device: torch.device) -> ChunkTables:
        """The chunks of all runs and of exported ones."""
        return tables_of(counts, exported, device)

    def prepare(self, x: Recurrence, tables: ChunkTables) -> PreparedChunks:
        """Pairs of rows of all chunks. Their gradients are part of those of `leave` and `compute`."""
        from seqpar.kernels.recurrent.triton.launch import inside_chunks

        decay, beta = (None if y is None else y.contiguous() for y in (x.decay, x.beta))
        x = Recurrence(x.q.contiguous(), x.k.contiguous(), x.v.contiguous(), decay, beta, x.scale)
        with torch.no_grad():
            inside, inverse = inside_chunks(x, tables.every.chunks, tables.rows)
        return PreparedChunks(x, tables, inside, inverse)

    def leave(self, prepared: PreparedChunks, entering: Tensor) -> tuple[Tensor, Tensor]:
        """See `RecurrentKernel`; matrices are walked as further columns of the state, from the identity."""
        exported = prepared.tables.exported
        if prepared.x.beta is None:
            _, left, totals = _walk(prepared, exported, entering, has_out=False)
            return left, totals
        runs, heads, dim, values = entering.shape
        eye = torch.eye(dim, dtype=entering.dtype, device=entering.device).expand(runs, heads, dim, dim)
        _, left, _ = _walk(prepared, exported, torch.cat([entering, eye], -1), has_out=False)
        return left[..., :values], left[..., values:]

    def compute(self, prepared: PreparedChunks, entering: Tensor) -> tuple[Tensor, Tensor]:
        """See `RecurrentKernel`."""
        out, left, _ = _walk(prepared, prepared.tables.every, entering, has_out=True)
        return out, left


def _walk(
    prepared: PreparedChunks, launched: Launched, entering: Tensor, *, has_out: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from seqpar.kernels.recurrent.triton.launch import ChunkWalk

    x, tables, inside, inverse = prepared
    rows = x.q, x.k, x.v, x.decay, x.beta
    return ChunkWalk.apply(*rows, entering.contiguous(), inside, inverse, launched, tables.rows, x.scale, has_out)
