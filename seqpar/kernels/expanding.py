"""A kernel around a kernel: it makes the keys and values of all heads from the latents of one buffer.

Of row n the inner kernel gets, for head h,

    key [D_n + E] = w_k[h] latent[n], rotated[n]              value [D_v] = w_v[h] latent[n]

and the gradients that it adds for them go back to what they were made of::

    dlatent[n]  += sum over h of  w_k[h]^T dkey[n, h, :D_n]  +  w_v[h]^T dvalue[n, h]
    drotated[n] += sum over h of  dkey[n, h, D_n:]
    dw_k[h]     += sum over n of  dkey[n, h, :D_n] latent[n]^T             dw_v[h] alike, with dvalue

Only some heads are expanded at a time. Neither their keys and values nor the gradients of these outlive the call.
Source: DeepSeek-AI 2024 (DeepSeek-V2), section 2.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from seqpar import native
from seqpar.kernels.blockwise import attend
from seqpar.kernels.protocol import CallSpec, Grads, Kernel, Operands, Score, Sums


@dataclass(eq=False)
class Expanding(Kernel):
    """See `seqpar.kernels.protocol.Kernel`. The latents are its operand k [N, 1, R], the rotated parts v [N, 1, E].

    w_k [H, D_n, R], w_v [H, D_v, R]: of all heads of the model. most: bytes of an expanded buffer, of keys and values
    or of their gradients; a single head may take more. dw_k, dw_v: sums of the weights' gradients, if needed.
    """

    inner: Kernel
    w_k: Tensor
    w_v: Tensor
    most: int
    dw_k: Tensor | None = None
    dw_v: Tensor | None = None
    buffers: dict[str, Tensor] = field(default_factory=dict)  # reused by all blocks and steps of a direction

    @property
    def name(self) -> str:  # type: ignore[override]
        """The inner kernel's name."""
        return self.inner.name

    def refuses(self, spec: CallSpec) -> str | None:
        return self.inner.refuses(spec)

    def keeps_top(self, score: Score) -> bool:
        """Always: where the inner kernel does not, `attend` does."""
        return True

    def forward(self, x: Operands, into: Sums) -> None:
        acc, out = into.acc, into.out
        for heads in self._blocks(x, x.q.dtype):
            top = None if into.top is None else into.top[heads]
            sums = Sums(_some(acc, heads), into.lse[heads], _some(out, heads), into.first, top)
            attend(self.inner, self._expanded(x, heads), sums)

    def backward(self, x: Operands, grads: Grads) -> None:
        for heads in self._blocks(x, grads.dk.dtype):
            expanded = self._expanded(x, heads)
            dk, dv = (
                self._buffer(name, y, y.shape[1], y.shape[2], grads.dk.dtype).zero_()
                for name, y in (("dk", expanded.k), ("dv", expanded.v))
            )
            own = Grads(
                grads.dout[:, heads], grads.lse[heads], grads.delta[heads], _some(grads.out, heads), grads.dq[:, heads],
                dk.transpose(0, 1), dv.transpose(0, 1),
            )  # fmt: skip
            self.inner.backward(expanded, own)
            self._give_back(x, heads, dk, dv, grads)

    def _blocks(self, x: Operands, dtype: torch.dtype) -> Iterator[slice]:
        """Heads of the operands that are expanded together, in blocks of nearly equal size."""
        heads, rows = x.q.shape[1], x.k.shape[0]
        per_head = rows * (x.q.shape[2] + self.w_v.shape[1]) * dtype.itemsize
        blocks = -(-heads // max(1, self.most // max(1, per_head)))
        for n in range(blocks):
            yield slice(heads * n // blocks, heads * (n + 1) // blocks)

    def _weights(self, x: Operands, heads: slice) -> slice:
        """The heads of the model that these heads of the operands are."""
        return slice(x.score.first_head + heads.start, x.score.first_head + heads.stop)

    def _expanded(self, x: Operands, heads: slice) -> Operands:
        """The operands of the inner kernel for these heads."""
        which, latents, rotated = self._weights(x, heads), x.k[:, 0], x.v[:, 0]
        w_k, w_v = self.w_k[which], self.w_v[which]
        h, n, _ = w_k.shape
        keys = self._buffer("k", x.k, h, n + rotated.shape[1], x.k.dtype)
        values = self._buffer("v", x.k, h, w_v.shape[1], x.k.dtype)
        _expand(latents, w_k, keys[..., :n])
        _expand(latents, w_v, values)
        keys[..., n:] = rotated
        score = replace(x.score, first_head=which.start)
        return Operands(x.q[:, heads], keys.transpose(0, 1), values.transpose(0, 1), x.facts, score)

    def _buffer(self, name: str, like: Tensor, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
        """Memory [heads, N, dim] for the rows of a buffer, which the next block overwrites."""
        count, memory = heads * like.shape[0] * dim, self.buffers.pop(name, None)
        if memory is None or memory.numel() < count:
            memory = None  # the smaller one is freed first
            memory = like.new_empty(count, dtype=dtype)
        self.buffers[name] = memory
        return memory[:count].view(heads, like.shape[0], dim)

    def _give_back(self, x: Operands, heads: slice, dk: Tensor, dv: Tensor, grads: Grads) -> None:
        """Add what follows from the gradients of some heads' keys and values [h, N, ...]."""
        which, dtype = self._weights(x, heads), dk.dtype
        w_k, w_v = self.w_k[which].to(dtype), self.w_v[which].to(dtype)
        latents, dlatents, n = x.k[:, 0].to(dtype), grads.dk[:, 0], w_k.shape[1]
        dn = dk[..., :n]
        for head in range(dk.shape[0]):  # one product for all heads would need a copy of dk in another order
            dlatents.addmm_(dn[head], w_k[head])
            dlatents.addmm_(dv[head], w_v[head])
        grads.dv[:, 0] += dk[..., n:].sum(0)
        latents = latents.expand(dk.shape[0], *latents.shape)
        for sums, of in ((self.dw_k, dn), (self.dw_v, dv)):
            if sums is not None:
                sums[which].baddbmm_(of.transpose(1, 2), latents)


def _expand(latents: Tensor, weights: Tensor, out: Tensor) -> None:
    """Write the products of latents [N, R] and each head's weights [h, D, R] to out [h, N, D]."""
    if latents.is_cuda:
        torch.bmm(latents.expand(len(weights), *latents.shape), weights.transpose(1, 2), out=out)
        return
    # by head, which the CPU computes faster in bf16 than one product of all
    if latents.dtype == torch.bfloat16 and native.widens_bf16():
        latents, product = latents.float(), out.new_empty(out.shape[1:], dtype=torch.float32)
        for w, of_head in zip(weights.float(), out, strict=True):
            of_head.copy_(torch.mm(latents, w.t(), out=product))
        return
    for w, of_head in zip(weights, out, strict=True):
        torch.mm(latents, w.t(), out=of_head)


def _some(x: Tensor | None, heads: slice) -> Tensor | None:
    """Some heads of a tensor [M, H, D]; None stays None."""
    return None if x is None else x[:, heads]
