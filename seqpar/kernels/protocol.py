"""What a kernel computes: attention of query rows over one buffer of keys, added to what earlier buffers gave.

A kernel gets positions and bounds and never learns of ranks, layouts or masks. Query row ``i`` sees key row ``j`` iff
``lo[i] <= key_pos[j] < hi[i]``; both are sorted by position. Shapes: ``q [M, H, D]``, ``k [N, H_kv, D]``,
``v [N, H_kv, D_v]``, any strides with a dense last dim, ``H % H_kv == 0``; ``acc [M, H, D_v]``, ``lse [H, M]`` in the
accumulation dtype, which is float64 for float64 inputs and float32 for all others.

Forward keeps its own running maximum and unnormalised sum from -inf and merges once with the normalised ``(acc, lse)``
of the keys seen before. Rows that see no key of the buffer keep what they had.

Backward, from the final ``lse`` and ``delta = rowsum(dout * out) - dlse``::

    p = exp(s - lse)      dv += p^T dout      ds = p * (dout v^T - delta)      dq += scale ds k      dk += scale ds^T q

with softcap, ALiBi and dropout in between. Source: Dao 2023, FlashAttention-2, section 3.1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # of queries, keys and values


@dataclass(frozen=True)
class Score:
    """How a score and a probability are made.

    scale: of q·k. softcap: ``cap * tanh(s / cap)``, 0 for none. slopes [H]: ALiBi, ``-slope * |pos_q - pos_k|``, in
    the accumulation dtype. dropout_p, dropout_seed: see `seqpar.kernels.dropout`. first_head: the model's number of
    the first query head, by which dropout counts.
    """

    scale: float
    softcap: float = 0.0
    slopes: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: int = 0
    first_head: int = 0

    @property
    def plain(self) -> bool:
        """Whether scores are just scaled products, as kernels of other libraries compute them."""
        return self.softcap == 0.0 and self.slopes is None and self.dropout_p == 0.0


@dataclass(frozen=True)
class Facts:
    """One step's positions and bounds on the device, int32: pos, lo, hi [M] of the queries, key_pos [N].

    tiles(bm, bn): the step's tile tables (`seqpar.plan.Tiles`). segments(): the step as contiguous rectangles.
    """

    pos: Tensor
    lo: Tensor
    hi: Tensor
    key_pos: Tensor
    tiles: Callable[[int, int], Any]
    segments: Callable[[], Any]


class Kernel(Protocol):
    """An implementation. Its functions are pure but for the tensors they are told to write."""

    name: str

    def refuses(self, q: Tensor, k: Tensor, v: Tensor, score: Score) -> str | None:
        """Why this kernel cannot do a call, naming dtype, device or option; None if it can."""
        ...

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        facts: Facts,
        score: Score,
        *,
        acc: Tensor | None,
        lse: Tensor,
        out: Tensor | None,
        first: bool,
    ) -> None:
        """Add the keys of one buffer.

        first: ``acc`` and ``lse`` hold nothing yet; every row is written, ``0`` and ``-inf`` where it sees no key.
        out: given at the last step, in q's dtype; every row of it is written. acc: None if first and last.
        """
        ...

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Tensor,
        facts: Facts,
        score: Score,
        *,
        out: Tensor | None,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
    ) -> None:
        """Add the gradients of one buffer's keys to ``dq [M, H, D]``, ``dk``, ``dv``, all in the accumulation dtype.

        out: the final output where ``delta`` is ``rowsum(dout * out)`` and nothing else, for kernels that want it.
        """
        ...


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums and lse are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32
