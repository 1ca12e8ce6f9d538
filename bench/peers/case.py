"""The computation that is measured: a batch of packed documents, and what a method makes of it on one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # this rank's rows of q, k and v -> its rows of the output


@dataclass(frozen=True)
class Case:
    """Attention inside documents of these lengths, causal or full; tensors are [tokens, heads, dim]."""

    lengths: tuple[int, ...]
    heads: int = 8
    kv_heads: int = 8
    dim: int = 64
    dtype: torch.dtype = torch.float32
    causal: bool = True

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def name(self) -> str:
        """The case in a table: documents, heads, dtype."""
        documents = "one document" if len(self.lengths) == 1 else f"{len(self.lengths)} documents"
        dtype = str(self.dtype).removeprefix("torch.")
        mask = "causal" if self.causal else "full"
        return f"{self.tokens:,} tokens, {documents}, {mask}, {self.heads}/{self.kv_heads} heads of {self.dim}, {dtype}"

    def documents(self) -> list[slice]:
        """The rows of each document."""
        ends = np.cumsum(self.lengths)
        return [slice(int(end - length), int(end)) for end, length in zip(ends, self.lengths)]

    def tensors(self) -> list[Tensor]:
        """q, k, v and the gradient of the output, of the whole batch; equal on all ranks."""
        generator = torch.Generator().manual_seed(self.tokens)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        return [torch.randn(self.tokens, h, self.dim, generator=generator).to(self.dtype) for h in heads]


@dataclass(frozen=True)
class Method:
    """A way to compute a case on one rank: the positions of its rows, and the call."""

    rows: NDArray[np.int64]
    attend: Attend
    threads: int = field(default=1, kw_only=True)


def whole(q: Tensor, k: Tensor, v: Tensor, documents: list[slice], causal: bool) -> Tensor:
    """Attention of whole documents by torch's operator, one document after another."""
    parts = []
    for document in documents:
        one = (x[document].transpose(0, 1)[None] for x in (q, k, v))
        out = scaled_dot_product_attention(*one, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts) if parts else torch.zeros_like(q)


def contiguous(case: Case, rank: int, size: int) -> NDArray[np.int64]:
    """The rows of a rank that holds one stretch of the batch."""
    return np.arange(case.tokens * rank // size, case.tokens * (rank + 1) // size)


def zigzag(case: Case, rank: int, size: int) -> list[NDArray[np.int64]]:
    """The two chunks of each document, of ``2 * size`` equal ones, that balance a causal mask.

    Raises: ValueError if a document has no such chunks.
    """
    if any(length % (2 * size) for length in case.lengths):
        raise ValueError(f"lengths {case.lengths}: expected multiples of {2 * size} on {size} ranks")
    chunks = []
    for document in case.documents():
        rows = (document.stop - document.start) // (2 * size)
        chunks += [document.start + rows * n + np.arange(rows) for n in (rank, 2 * size - 1 - rank)]
    return chunks
