"""Dense attention by the formulas, one step at a time: slow, short, and what the other kernels are compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.kernels import dropout
from seqpar.kernels.protocol import DTYPES, Facts, Score, acc_dtype
from seqpar.kernels.softmax import masked_product, merge


class Reference:
    """See `seqpar.kernels.protocol.Kernel`."""

    name = "reference"

    def refuses(self, q: Tensor, k: Tensor, v: Tensor, score: Score) -> str | None:
        """Why not, or None."""
        return None if q.dtype in DTYPES else f"reference has no {q.dtype}"

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
        """Add the keys of one buffer; see the protocol."""
        s, _, seen = _scores(q, k, facts, score)
        part_lse = torch.logsumexp(s, -1) if k.shape[0] else torch.full_like(lse, -torch.inf)
        p = torch.exp(s - torch.where(part_lse == -torch.inf, 0.0, part_lse)[..., None])
        p = p * _kept(facts, score, q.shape[1], p.dtype)
        part = masked_product(p, _heads(v, q), seen).transpose(0, 1)
        if first:
            total, joined = part, part_lse
        else:
            assert acc is not None
            total, joined = merge(acc, lse.t(), part, part_lse.t())
            joined = joined.t()
        lse.copy_(joined)
        (acc if out is None else out).copy_(total)  # type: ignore[union-attr]

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
        """Add the gradients of one buffer's keys; see the protocol."""
        s, slope, seen = _scores(q, k, facts, score)
        p = torch.exp(s - torch.where(lse == -torch.inf, torch.inf, lse)[..., None]).masked_fill(~seen, 0.0)
        kept = _kept(facts, score, q.shape[1], p.dtype)
        grad = dout.to(p.dtype).transpose(0, 1)
        dp = grad @ _heads(v, q).transpose(1, 2) * kept
        ds = (p * (dp - delta[..., None]) * slope * score.scale).masked_fill(~seen, 0.0)
        dq += masked_product(ds, _heads(k, q), seen).transpose(0, 1)
        shape = (k.shape[1], -1, k.shape[0])
        wide = masked_product(ds.transpose(1, 2), q.to(p.dtype).transpose(0, 1), seen.t())
        dk += wide.view(*shape, wide.shape[-1]).sum(1).transpose(0, 1)
        wide = masked_product((p * kept).transpose(1, 2), grad, seen.t())
        dv += wide.view(*shape, wide.shape[-1]).sum(1).transpose(0, 1)


def _heads(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values for every query head, [H, N, C], in the accumulation dtype."""
    group = q.shape[1] // max(x.shape[1], 1)
    return x.to(acc_dtype(q.dtype)).transpose(0, 1).repeat_interleave(group, 0)


def _scores(q: Tensor, k: Tensor, facts: Facts, score: Score) -> tuple[Tensor, Tensor | float, Tensor]:
    """Scores [H, M, N] with -inf where not seen, the softcap's derivative, and which pairs are seen [M, N]."""
    dtype = acc_dtype(q.dtype)
    s = q.to(dtype).transpose(0, 1) @ _heads(k, q).transpose(1, 2) * score.scale
    slope: Tensor | float = 1.0
    if score.softcap:
        t = torch.tanh(s / score.softcap)
        s, slope = t * score.softcap, 1 - t * t
    if score.slopes is not None:
        s = s - score.slopes[:, None, None] * (facts.pos[:, None] - facts.key_pos[None]).abs()
    seen = (facts.key_pos[None] >= facts.lo[:, None]) & (facts.key_pos[None] < facts.hi[:, None])
    return s.masked_fill(~seen, -torch.inf), slope, seen


def _kept(facts: Facts, score: Score, heads: int, dtype: torch.dtype) -> Tensor | float:
    if not score.dropout_p:
        return 1.0
    which = range(score.first_head, score.first_head + heads)
    a = dropout.words(facts.pos, which, score.dropout_seed, side=0)
    b = dropout.words(facts.key_pos, which, score.dropout_seed, side=1)
    return dropout.keep(a[..., None], b[:, None, :], score.dropout_p).to(dtype) / (1 - score.dropout_p)
