"""The kernel protocol: attention of query rows over one buffer of keys, merged with the result of earlier buffers.

A kernel gets positions and bounds and never learns of ranks, layouts or masks. Query row ``i`` sees key row ``j`` iff
``lo[i] <= key_pos[j] < hi[i]`` and ``pos[i] < until[j]``; both are sorted by position. Shapes: ``q [M, H, D]``,
``k [N, H_kv, D]``, ``v [N, H_kv, D_v]``, any strides with a dense last dim, ``H % H_kv == 0``; ``acc [M, H, D_v]``,
``lse [H, M]`` in the accumulation dtype, which is float64 for float64 inputs and float32 for all others.

Forward starts its own running maximum at -inf and merges its normalised sum once with the normalised ``(acc, lse)`` of
earlier keys. Rows that see no key of the buffer stay as they are.

Backward, from the final ``lse`` and ``delta = rowsum(dout * out) - dlse``::

    p = exp(s - lse)      dv += p^T dout      ds = p * (dout v^T - delta)      dq += scale ds k      dk += scale ds^T q

with softcap, ALiBi and dropout in between. Source: Dao 2023, FlashAttention-2, section 3.1.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from seqpar.facts.segments import Segments
from seqpar.facts.tiles import Tiles

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # of queries, keys and values


@dataclass(frozen=True)
class Score:
    """How scores and probabilities follow from q and k.

    scale: of q·k. softcap: ``cap * tanh(s / cap)``, 0 for none. slopes [H]: ALiBi, ``-slope * |pos_q - pos_k|``, in
    the accumulation dtype. dropout_p, dropout_seed: see `seqpar.kernels.dropout`. first_head: the model's number of
    the first query head, which enters dropout's hash.
    """

    scale: float
    softcap: float = 0.0
    slopes: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: int = 0
    first_head: int = 0

    @property
    def scaled(self) -> bool:
        """Whether a score is nothing but the scaled product."""
        return not self.softcap and self.slopes is None


@dataclass(frozen=True)
class StepFacts:
    """Positions and bounds of one band of a step on the device, int32: pos, lo, hi [M] of the queries, key_pos [N].

    until [N]: the keys' bounds, None if they hide no pair; never in a call whose `CallSpec.until` is False.
    tiles(bm, bn): the band's tile tables. segments(): the band as contiguous rectangles. memo(key, make): the cached
    result of ``make()``, kept as long as the step.
    """

    pos: Tensor
    lo: Tensor
    hi: Tensor
    key_pos: Tensor
    until: Tensor | None
    tiles: Callable[[int, int], Tiles]
    segments: Callable[[], Segments]
    memo: Callable[[Hashable, Callable[[], Any]], Any]


@dataclass(eq=False, slots=True)  # a frozen one takes a microsecond more
class Operands:
    """Inputs of both directions: queries, keys and values of one buffer, the pairs that are seen, and their scores."""

    q: Tensor
    k: Tensor
    v: Tensor
    facts: StepFacts
    score: Score


@dataclass(eq=False, slots=True)  # a frozen one takes a microsecond more
class Sums:
    """Outputs of forward.

    first: ``acc`` and ``lse`` hold no earlier result; every row is written, ``0`` and ``-inf`` where it sees no key.
    out: the final output in q's dtype, at the last step; every row is written. acc: None if first and last. top [H, M],
    dense along the rows: the largest ``scale * q·k`` of the pairs that a row has seen so far, in the accumulation
    dtype, NaN after a NaN; only of calls for which the kernel keeps it, see `Kernel.keeps_top`.
    """

    acc: Tensor | None
    lse: Tensor
    out: Tensor | None
    first: bool
    top: Tensor | None = None


@dataclass(eq=False, slots=True)  # a frozen one takes a microsecond more
class Grads:
    """Further inputs of backward, and the sums it adds to: ``dq [M, H, D]``, ``dk``, ``dv`` in the accumulation dtype.

    out: the final output, for kernels that need it; None where ``delta`` is not exactly ``rowsum(dout * out)``.
    """

    dout: Tensor
    lse: Tensor
    delta: Tensor
    out: Tensor | None
    dq: Tensor
    dk: Tensor
    dv: Tensor


@dataclass(frozen=True)
class CallSpec:
    """The properties of a call by which kernels accept or refuse it: plain values that print and compare.

    device: "cpu", "cuda". capability: of a CUDA device, as 90 for 9.0; else 0. plain: scores are just scaled products.
    grads: a backward may follow. merges: results may be partial (keys of a row come in several steps, a sink precedes
    the first, or gradients of a key are sums over ranks), so a kernel that rounds results to the inputs' dtype rounds
    each part. few_shapes: all documents have the same number of queries, and of keys, and it is a round one, so that a
    library sees few shapes in all batches. fast: "auto" may take a kernel that rounds each part. until: some keys end
    before the last query.
    """

    device: str
    capability: int
    dtype: torch.dtype
    heads: int
    kv_heads: int
    dim: int
    v_dim: int
    softcap: bool = False
    alibi: bool = False
    dropout: bool = False
    grads: bool = True
    deterministic: bool = True
    merges: bool = True
    few_shapes: bool = False
    fast: bool = False
    until: bool = False

    @property
    def plain(self) -> bool:
        """Whether scores are just scaled products, the only ones that other libraries' kernels compute."""
        return not (self.softcap or self.alibi or self.dropout)

    def __str__(self) -> str:
        model = f" of capability {self.capability / 10}" if self.capability else ""
        asked = {
            "softcap": self.softcap, "alibi": self.alibi, "dropout": self.dropout, "gradients": self.grads,
            "the same bits every time": self.deterministic, "results that are merged": self.merges,
            "parts that may be rounded": self.fast, "keys that end early": self.until,
        }  # fmt: skip
        has = [words for words, is_asked in asked.items() if is_asked]
        return (
            f"{str(self.dtype).removeprefix('torch.')} on {self.device}{model}, {self.heads} query heads and "
            f"{self.kv_heads} key heads of dim {self.dim}, values of dim {self.v_dim}"
            + (f", with {', '.join(has)}" if has else "")
        )


def call_spec(
    q: Tensor, k: Tensor, v: Tensor, score: Score, *, grads: bool, deterministic: bool, merges: bool
) -> CallSpec:
    """The `CallSpec` of a call with these tensors."""
    major, minor = torch.cuda.get_device_capability(q.device) if q.is_cuda else (0, 0)
    return CallSpec(
        q.device.type, 10 * major + minor, q.dtype, q.shape[1], k.shape[1], q.shape[2], v.shape[2],
        softcap=score.softcap != 0.0, alibi=score.slopes is not None, dropout=score.dropout_p != 0.0,
        grads=grads, deterministic=deterministic, merges=merges,
    )  # fmt: skip


class Kernel(Protocol):
    """An implementation. Functions are pure, except for the tensors that they are given to write.

    `forward` and `backward` are called where the tensors' device is the current one.
    """

    name: str

    def missing(self) -> str | None:
        """What this machine lacks to run the kernel at all; None if it can run."""
        return None

    def refuses(self, spec: CallSpec) -> str | None:
        """Why this kernel cannot compute the call, naming dtype, device or option; None if it can."""
        ...

    def accuracy_loss(self, spec: CallSpec) -> str | None:
        """What the kernel rounds in addition to its results, so that "auto" needs `CallSpec.fast`; None if nothing."""
        return None

    def tables(self, spec: CallSpec, facts: StepFacts) -> dict[Hashable, Any]:
        """The device data of a step that its launches look up in the step's memory, by key, if it can be made ahead.

        facts: of the step, on the CPU. A value is a tensor of the CPU, or a tuple that begins with such tensors.
        """
        return {}

    def keeps_top(self, score: Score) -> bool:
        """Whether forward raises `Sums.top`; else `seqpar.kernels.blockwise.attend` does it after forward."""
        return False

    def forward(self, x: Operands, into: Sums) -> None:
        """Add the keys of one buffer."""
        ...

    def backward(self, x: Operands, grads: Grads) -> None:
        """Add the gradients of one buffer's keys."""
        ...


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums and lse are kept."""
    if dtype.is_complex:
        return torch.complex128 if dtype == torch.complex128 else torch.complex64
    return torch.float64 if dtype == torch.float64 else torch.float32
