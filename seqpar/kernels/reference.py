"""Dense attention by the formulas, one step at a time: slow, short, and the judge of the other kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.kernels import dropout
from seqpar.kernels.protocol import DTYPES, CallSpec, Grads, Kernel, Operands, Score, Sums, acc_dtype
from seqpar.kernels.softmax import masked_product, merge


class Reference(Kernel):
    """See `seqpar.kernels.protocol.Kernel`."""

    name = "reference"

    def refuses(self, spec: CallSpec) -> str | None:
        return None if spec.dtype in DTYPES else f"reference has no {spec.dtype}"

    def keeps_top(self, score: Score) -> bool:
        return True

    def forward(self, x: Operands, into: Sums) -> None:
        s, _, seen = _scores(x)
        if into.top is not None and x.k.shape[0]:
            torch.maximum(into.top, _products(x).masked_fill_(~seen, -torch.inf).amax(-1), out=into.top)
        part_lse = torch.logsumexp(s, -1) if x.k.shape[0] else torch.full_like(into.lse, -torch.inf)
        p = torch.exp(s - part_lse.masked_fill(part_lse == -torch.inf, 0.0)[..., None])
        p = p * _kept(x, p.dtype)
        part = masked_product(p, _heads(x.v, x.q), seen).transpose(0, 1)
        if into.first:
            total, joined = part, part_lse
        else:
            assert into.acc is not None
            total, joined = merge(into.acc, into.lse.t(), part, part_lse.t())
            joined = joined.t()
        into.lse.copy_(joined)
        (into.acc if into.out is None else into.out).copy_(total)  # type: ignore[union-attr]

    def backward(self, x: Operands, grads: Grads) -> None:
        s, slope, seen = _scores(x)
        lse = grads.lse.masked_fill(grads.lse == -torch.inf, torch.inf)
        p = torch.exp(s - lse[..., None]).masked_fill(~seen, 0.0)
        kept = _kept(x, p.dtype)
        dout = grads.dout.to(p.dtype).transpose(0, 1)
        dp = dout @ _heads(x.v, x.q).transpose(1, 2) * kept
        ds = (p * (dp - grads.delta[..., None]) * slope * x.score.scale).masked_fill(~seen, 0.0)
        grads.dq.add_(masked_product(ds, _heads(x.k, x.q), seen).transpose(0, 1))
        shape = (x.k.shape[1], -1, x.k.shape[0])
        wide = masked_product(ds.transpose(1, 2), x.q.to(p.dtype).transpose(0, 1), seen.t())
        grads.dk.add_(wide.view(*shape, wide.shape[-1]).sum(1).transpose(0, 1))
        wide = masked_product((p * kept).transpose(1, 2), dout, seen.t())
        grads.dv.add_(wide.view(*shape, wide.shape[-1]).sum(1).transpose(0, 1))


def _heads(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values for every query head, [H, N, C], in the accumulation dtype."""
    group = q.shape[1] // max(x.shape[1], 1)
    return x.to(acc_dtype(q.dtype)).transpose(0, 1).repeat_interleave(group, 0)


def _scores(x: Operands) -> tuple[Tensor, Tensor | float, Tensor]:
    """Scores [H, M, N], -inf where not seen; softcap's derivative; the pairs that are seen [M, N]."""
    facts, score = x.facts, x.score
    s = _products(x)
    slope: Tensor | float = 1.0
    if score.softcap:
        t = torch.tanh(s / score.softcap)
        s, slope = t * score.softcap, 1 - t * t
    if score.slopes is not None:
        s = s - score.slopes[:, None, None] * (facts.pos[:, None] - facts.key_pos[None]).abs()
    seen = (facts.key_pos[None] >= facts.lo[:, None]) & (facts.key_pos[None] < facts.hi[:, None])
    if facts.until is not None:
        seen &= facts.pos[:, None] < facts.until[None]
    return s.masked_fill(~seen, -torch.inf), slope, seen


def _products(x: Operands) -> Tensor:
    """``scale * q·k`` of all pairs, [H, M, N]."""
    return x.q.to(acc_dtype(x.q.dtype)).transpose(0, 1) @ _heads(x.k, x.q).transpose(1, 2) * x.score.scale


def _kept(x: Operands, dtype: torch.dtype) -> Tensor | float:
    facts, score = x.facts, x.score
    if not score.dropout_p:
        return 1.0
    which = range(score.first_head, score.first_head + x.q.shape[1])
    a, b = dropout.step_words(facts, which, score.dropout_seed)
    return dropout.keep(a[..., None], b[:, None, :], score.dropout_p).to(dtype) / (1 - score.dropout_p)
