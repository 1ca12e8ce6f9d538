"""States of one value a head, token by token in all chunks at once: a state for each channel, as of Mamba-1 and RG-LRU.

Such a head has no product of matrices to make of a chunk. So chunks are walked in steps: the n-th rows of all chunks in
the n-th step, first from zero, which gives what each chunk adds to a state, then from the states that enter them::

    step       1      2      3      4                         5      6      7      8
    chunk 0    x0     x1     x2     x3  ─► added   entered ─► x0     x1     x2     x3  ─► out
    chunk 1    x4     x5     x6     x7  ─► added   entered ─► x4     x5     x6     x7  ─► out

A step is a product and a sum of elements. States [rows, H, K] of a few chunks are in memory at a time, in backward too,
which computes them again: a sequence has one state for each chunk. Decays are never subtracted, as in no chunk a state
is carried over more than one row at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from seqpar.facts.value import Ints
from seqpar.kernels.recurrent.chunked import Tables, levels, walked
from seqpar.kernels.recurrent.protocol import Recomputed, Recurrence, RecurrentSpec

# elements of states that are computed at a time: those that stay in a processor's cache, and those that fill a GPU
AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 25}


class ChannelRows(NamedTuple):
    """Rows of chunks: q, k [N, rows, K], v and decay [N, rows, H]; rates [H, K] or None.

    added [N, H, K, 1]: what a chunk adds to the state. total: its log decay, [N, H, K] or [N, H].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    rates: Tensor | None
    added: Tensor
    total: Tensor


class Steps(Recomputed):
    """See `seqpar.kernels.recurrent.protocol.RecurrentKernel`."""

    name = "steps"
    casts = True

    def refuses(self, spec: RecurrentSpec) -> str | None:
        if spec.values != 1 or spec.beta or spec.decay not in ("scalar", "rates"):
            return "steps computes heads of one value, with a decay of each, and without beta"
        return None

    def tables(self, counts: Ints, exported: Ints, device: torch.device) -> Tables:
        return Tables.of(counts, exported, device)

    def prepare(self, x: Recurrence, tables: Tables) -> tuple[ChannelRows, Tables]:
        assert x.decay is not None
        q, k, v, decay = (tables.cut(y) for y in (x.q[:, 0] * x.scale, x.k[:, 0], x.v[..., 0], x.decay))
        added = _Stepped.apply(v, decay, x.rates, k, None, None)  # type: ignore[no-untyped-call]
        total = decay.double().sum(1)
        if x.rates is not None:
            total = total[..., None] * x.rates
        return ChannelRows(q, k, v, decay, x.rates, added[..., None], total.to(v.dtype)), tables

    def leave(self, prepared: tuple[ChannelRows, Tables], entering: Tensor) -> tuple[Tensor, Tensor]:
        x, chunks = prepared[0], prepared[1].exported
        added, total = (y if chunks.numbers is None else y[chunks.numbers] for y in (x.added, x.total))
        own = levels(added, chunks.sizes)
        _, left = walked(chunks, entering, total, lambda level, state: own[level])
        return left, chunks.totals(total, entering)

    def compute(self, prepared: tuple[ChannelRows, Tables], entering: Tensor) -> tuple[Tensor, Tensor]:
        x, tables = prepared
        own = levels(x.added, tables.chunks.sizes)
        entered, left = walked(tables.chunks, entering, x.total, lambda level, state: own[level])
        out = _Stepped.apply(x.v, x.decay, x.rates, x.k, x.q, entered[..., 0])  # type: ignore[no-untyped-call]
        return tables.joined(out)[..., None], left


class _Stepped(torch.autograd.Function):
    """out [N, rows, H] from the states that enter chunks, or without q the states [N, H, K] that leave, from zero."""

    @staticmethod
    def forward(
        ctx: Any, v: Tensor, decay: Tensor, rates: Tensor | None, k: Tensor, q: Tensor | None, entered: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(v, decay, rates, k, q, entered)
        shape = v.shape if q is not None else (v.shape[0], v.shape[2], k.shape[2])
        out = v.new_empty(shape)
        for at in _groups(v, k):
            _, states = _states(v[at], decay[at], rates, k[at], None if entered is None else entered[at])
            out[at] = states[:, -1] if q is None else (states @ q[at][..., None])[..., 0]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        v, decay, rates, k, q, entered = ctx.saved_tensors
        dv, ddecay, dk = (torch.empty_like(x) for x in (v, decay, k))
        drates, dq, dentered = (None if x is None else torch.zeros_like(x) for x in (rates, q, entered))
        for at in _groups(v, k):
            before = None if entered is None else entered[at]
            factors, states = _states(v[at], decay[at], rates, k[at], before)
            if q is None:
                grads = torch.zeros_like(states)
                grads[:, -1] = dout[at]
            else:
                grads = dout[at][..., None] * q[at][:, :, None]
                dq[at] = (dout[at][:, :, None] @ states)[:, :, 0]  # type: ignore[index]
            for n in range(states.shape[1] - 1, 0, -1):  # of each row's state, from those of later rows
                grads[:, n - 1].addcmul_(factors[:, n], grads[:, n])
            dv[at] = (grads @ k[at][..., None])[..., 0]
            dk[at] = (v[at][:, :, None] @ grads)[:, :, 0]
            carried = grads * factors  # the gradients of the states before the rows
            if dentered is not None:
                dentered[at] = carried[:, 0]
            carried[:, 1:] *= states[:, :-1]
            carried[:, 0] = 0.0 if before is None else carried[:, 0] * before
            if rates is None or drates is None:
                ddecay[at] = carried.sum(-1)
            else:
                ddecay[at] = torch.einsum("nthk,hk->nth", carried, rates)
                drates += torch.einsum("nthk,nth->hk", carried, decay[at])
        return dv, ddecay, drates, dk, dq, dentered


def _groups(v: Tensor, k: Tensor) -> Iterator[slice]:
    """Chunks that are computed at a time."""
    count, elements = v.shape[0], v.shape[1] * v.shape[2] * k.shape[2]
    size = max(1, AT_ONCE["cpu" if v.device.type == "cpu" else "cuda"] // max(elements, 1))
    return (slice(start, start + size) for start in range(0, count, size))


def _states(v: Tensor, decay: Tensor, rates: Tensor | None, k: Tensor, entered: Tensor | None) -> tuple[Tensor, Tensor]:
    """The factors and the states of rows, [N, rows, H, 1 or K] and [N, rows, H, K]."""
    factors = (decay[..., None] if rates is None else decay[..., None] * rates).exp()
    states = v[..., None] * k[:, :, None]
    if entered is not None:
        states[:, 0].addcmul_(factors[:, 0], entered)
    for n in range(1, states.shape[1]):
        states[:, n].addcmul_(factors[:, n], states[:, n - 1])
    return factors, states
