"""Attention tile by tile in PyTorch, for real sizes on any device.

Tile tables list the key tiles that each query tile visits: others cost nothing, and full tiles need no mask. Sums
are float32 for every input dtype: products of bf16 and fp16 are exact in it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from seqpar.kernels import dropout
from seqpar.kernels.protocol import DTYPES, CallSpec, Grads, Kernel, Operands, Score, Sums, acc_dtype
from seqpar.kernels.softmax import masked_product, merge

QUERY_ROWS = 512  # rows of all query heads that share a key head; with KEY_ROWS a tile of scores fits the cache
KEY_ROWS = 512


class Blockwise(Kernel):
    """See `seqpar.kernels.protocol.Kernel`."""

    name = "blockwise"

    def refuses(self, spec: CallSpec) -> str | None:
        return None if spec.dtype in DTYPES else f"blockwise has no {spec.dtype}"

    def keeps_top(self, score: Score) -> bool:
        return score.scaled

    def forward(self, x: Operands, into: Sums) -> None:
        walk, acc, lse, out = _Walk(x), into.acc, into.lse, into.out
        for i in range(walk.tiles):
            rows = walk.rows(i)
            part, part_lse, top = walk.attend(i)
            if part is not None:
                if into.top is not None:
                    _raise(into.top[:, rows], walk.ungrouped(top)[..., 0].t())
                part = walk.ungrouped(part)
                if not into.first:
                    part, part_lse = merge(acc[rows], lse[:, rows].t(), part, walk.ungrouped(part_lse)[..., 0])  # type: ignore[index]
                    lse[:, rows] = part_lse.t()
                else:
                    lse[:, rows] = walk.ungrouped(part_lse)[..., 0].t()
                (acc if out is None else out)[rows] = part  # type: ignore[index]
            elif into.first:
                lse[:, rows] = -torch.inf
                (acc if out is None else out)[rows] = 0.0  # type: ignore[index]
            elif out is not None and out is not acc:
                out[rows] = acc[rows]  # type: ignore[index]

    def backward(self, x: Operands, grads: Grads) -> None:
        walk = _Walk(x)
        # A row that sees no key at all has lse -inf; with +inf its probabilities are zero, not NaN.
        lse = grads.lse.masked_fill(grads.lse == -torch.inf, torch.inf)
        for i in range(walk.tiles):
            if walk.empty(i):
                continue
            rows = walk.rows(i)
            dout = walk.grouped(grads.dout[rows])
            row_lse, delta = (walk.grouped(y[:, rows].t()[..., None]) for y in (lse, grads.delta))
            for a, b, full in walk.spans(i):
                for n in range(a, b, KEY_ROWS):
                    keys = slice(n, min(n + KEY_ROWS, b))
                    dq_part, dk_part, dv_part = walk.gradients(i, keys, full, dout, row_lse, delta)
                    grads.dq[rows] += walk.ungrouped(dq_part)
                    grads.dk[keys] += dk_part.transpose(0, 1)
                    grads.dv[keys] += dv_part.transpose(0, 1)


class _Walk:
    """The tiles of one call. Grouped tensors [H_kv, G * rows, ...] stack the G query heads of a key head as rows."""

    def __init__(self, x: Operands) -> None:
        self.q, self.k, self.v, self.facts, self.score = q, k, _, facts, score = x.q, x.k, x.v, x.facts, x.score
        self.heads, self.kv_heads = q.shape[1], k.shape[1]
        self.group = self.heads // self.kv_heads if self.kv_heads else 1
        self.dtype = acc_dtype(q.dtype)
        self.table = facts.tiles(max(16, QUERY_ROWS // self.group), KEY_ROWS)
        self.tiles = len(self.table.rows) - 1 if self.heads else 0
        if score.dropout_p:
            heads = range(score.first_head, score.first_head + self.heads)
            self.a, self.b = dropout.step_words(facts, heads, score.dropout_seed)

    def rows(self, i: int) -> slice:
        return slice(int(self.table.rows[i]), int(self.table.rows[i + 1]))

    def empty(self, i: int) -> bool:
        return bool(self.table.begin[i] == self.table.end[i])

    def spans(self, i: int) -> list[tuple[int, int, bool]]:
        """Key rows that a tile visits, in position order: (first, last, whether every pair is seen)."""
        t, s = self.table, self.table.stretches
        if s is None:
            begin, end = [t.begin[i], t.full_begin[i], t.full_end[i]], [t.full_begin[i], t.full_end[i], t.end[i]]
            full = [False, True, False]
        else:
            begin, end, full = (x[s.edge[i] : s.edge[i + 1]].tolist() for x in (s.begin, s.end, s.full))
        spans = [(int(a) * t.bn, min(int(b) * t.bn, self.k.shape[0])) for a, b in zip(begin, end, strict=True)]
        return [(a, b, f) for (a, b), f in zip(spans, full, strict=True) if a < b]

    def grouped(self, x: Tensor) -> Tensor:
        """[rows, H, C] -> [H_kv, G * rows, C] in the accumulation dtype."""
        rows, _, last = x.shape
        x = x.to(self.dtype).reshape(rows, self.kv_heads, self.group, last)
        return x.permute(1, 2, 0, 3).reshape(self.kv_heads, self.group * rows, last)

    def ungrouped(self, x: Tensor) -> Tensor:
        """The inverse of `grouped`."""
        rows, last = x.shape[1] // self.group, x.shape[2]
        return x.view(self.kv_heads, self.group, rows, last).permute(2, 0, 1, 3).reshape(rows, self.heads, last)

    def attend(self, i: int) -> tuple[Tensor | None, Tensor, Tensor]:
        """Normalised output (None if it sees no key), lse and largest score of a query tile, grouped."""
        top: Tensor | None = None
        total = acc = self.q.new_zeros(0)
        scaled = None
        for a, b, full in self.spans(i):
            scaled = self.grouped(self.q[self.rows(i)]) * self.score.scale if scaled is None else scaled
            for n in range(a, b, KEY_ROWS):
                keys = slice(n, min(n + KEY_ROWS, b))
                seen = None if full else self.seen(i, keys)
                scores, _ = self.scores(i, keys, scaled, seen)
                peak = scores.amax(-1, keepdim=True)
                base = peak if top is None else torch.maximum(top, peak)
                weights = scores.sub_(_finite(base)).exp_()
                size = weights.sum(-1, keepdim=True)
                if self.score.dropout_p:
                    weights = weights * self.kept(i, keys)
                values = self.keys(self.v, keys)
                part = torch.bmm(weights, values) if seen is None else masked_product(weights, values, seen)
                top, total, acc = _accumulate(top, total, acc, base, size, part)
        if top is None:
            return None, total, total
        none = total == 0
        safe = total.masked_fill(none, 1.0)
        return acc / safe, (safe.log() + top).masked_fill(none, -torch.inf), top

    def keys(self, x: Tensor, keys: slice) -> Tensor:
        """[N, H_kv, C] -> [H_kv, keys, C] in the accumulation dtype."""
        return x[keys].transpose(0, 1).to(self.dtype)

    def scores(self, i: int, keys: slice, scaled: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Scores of a tile, -inf where not seen; and with a softcap the derivative factor ``1 - tanh**2``."""
        s = torch.bmm(scaled, self.keys(self.k, keys).transpose(1, 2))
        slope = None
        if self.score.softcap:
            t = torch.tanh(s / self.score.softcap)
            s, slope = t * self.score.softcap, 1 - t * t
        if self.score.slopes is not None:
            at = self.facts.pos[self.rows(i), None] - self.facts.key_pos[None, keys]
            alibi = self.score.slopes.view(self.kv_heads, self.group, 1, 1) * at.abs()
            s = s - alibi.reshape(s.shape)
        if seen is not None:
            s = s.masked_fill_(~seen, -torch.inf)
        return s, slope

    def seen(self, i: int, keys: slice) -> Tensor:
        """Which pairs of a tile are seen, [G * rows, keys]."""
        rows, at = self.rows(i), self.facts.key_pos[None, keys]
        seen = (at >= self.facts.lo[rows, None]) & (at < self.facts.hi[rows, None])
        if self.facts.until is not None:
            seen &= self.facts.pos[rows, None] < self.facts.until[None, keys]
        return seen.repeat(self.group, 1)

    def kept(self, i: int, keys: slice) -> Tensor:
        """Dropout's factor of each pair, 0 or 1 / (1 - p), grouped."""
        p = self.score.dropout_p
        a = self.a[:, self.rows(i)].reshape(self.kv_heads, -1)[..., None]
        b = self.b[:, keys].view(self.kv_heads, self.group, 1, -1)
        b = b.expand(-1, -1, a.shape[1] // self.group, -1).reshape(self.kv_heads, a.shape[1], -1)
        return dropout.keep(a, b, p).to(self.dtype) / (1 - p)

    def gradients(
        self, i: int, keys: slice, full: bool, grad: Tensor, lse: Tensor, delta: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of one tile, grouped."""
        scaled = self.grouped(self.q[self.rows(i)]) * self.score.scale
        seen = None if full else self.seen(i, keys)
        scores, slope = self.scores(i, keys, scaled, seen)
        p = scores.sub_(lse).exp_()
        k, v = self.keys(self.k, keys), self.keys(self.v, keys)
        dp = torch.bmm(grad, v.transpose(1, 2))
        weights = p
        if self.score.dropout_p:
            kept = self.kept(i, keys)
            weights, dp = p * kept, dp * kept
        ds = dp.sub_(delta).mul_(p)
        if slope is not None:
            ds = ds.mul_(slope)
        if seen is None:
            dv = torch.bmm(weights.transpose(1, 2), grad)
            dq, dk = torch.bmm(ds, k), torch.bmm(ds.transpose(1, 2), scaled)
        else:
            weights, ds = weights.masked_fill(~seen, 0.0), ds.masked_fill(~seen, 0.0)
            dv = masked_product(weights.transpose(1, 2), grad, seen.t())
            dq, dk = masked_product(ds, k, seen), masked_product(ds.transpose(1, 2), scaled, seen.t())
        return dq.mul_(self.score.scale), dk, dv


def attend(kernel: Kernel, x: Operands, into: Sums) -> None:
    """A kernel's forward, and the largest scores if they are asked for: a pass without values, if it keeps none."""
    top = into.top
    if top is None or kernel.keeps_top(x.score):
        kernel.forward(x, into)
        return
    kernel.forward(x, replace(into, top=None))
    walk = _Walk(replace(x, score=replace(x.score, dropout_p=0.0)))
    for i in range(walk.tiles):
        if walk.empty(i):
            continue
        rows = walk.rows(i)
        scaled = walk.grouped(x.q[rows]) * x.score.scale
        for a, b, full in walk.spans(i):
            for n in range(a, b, KEY_ROWS):
                keys = slice(n, min(n + KEY_ROWS, b))
                s = torch.bmm(scaled, walk.keys(x.k, keys).transpose(1, 2))
                if not full:
                    s = s.masked_fill_(~walk.seen(i, keys), -torch.inf)
                _raise(top[:, rows], walk.ungrouped(s.amax(-1, keepdim=True))[..., 0].t())


def _raise(top: Tensor, to: Tensor) -> None:
    torch.maximum(top, to, out=top)


def _accumulate(
    top: Tensor | None, total: Tensor, acc: Tensor, peak: Tensor, size: Tensor, part: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Add one more part, relative to ``peak``, to the running (maximum, sum, unnormalised output)."""
    if top is None:
        return peak, size, part
    base = torch.maximum(top, peak)
    old, new = torch.exp(top - _finite(base)), torch.exp(peak - _finite(base))
    return base, total * old + size * new, acc * old + part * new


def _finite(top: Tensor) -> Tensor:
    """The maximum to subtract: 0 where no key was seen yet, since -inf - -inf is NaN."""
    return top.masked_fill(top == -torch.inf, 0.0)
