"""Attention and recurrences by definition, on one device, and the error of a tensor against them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seqpar.facts.mask import Mask
from seqpar.kernels import dropout

# The error against float64, averaged over seeds, may exceed the same kernel's error on one rank by this factor.
ERROR_GROWTH = 1.05


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Output [tokens, H, D_v] and lse [tokens, H] of the whole batch on one device, differentiated by autograd.

    q [tokens, H, D], k [kv_tokens, H_kv, D], v [kv_tokens, H_kv, D_v]: global tensors in position order, float64 where
    this is the oracle. Computed by definition, from the full matrix of scores. It shares only dropout's random words
    with the kernels; these have tests of their own.
    """
    group = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = torch.einsum("ihd,jhd->hij", q, keys) * (q.shape[2] ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    rows, columns = np.arange(mask.tokens), torch.arange(mask.kv_tokens, device=q.device)
    at = torch.from_numpy(mask.key_positions(rows)).to(q.device)
    if alibi_slopes is not None:
        s = s - alibi_slopes[:, None, None] * (at[:, None] - columns).abs()
    s = s.masked_fill(~torch.from_numpy(seen_pairs(mask)).to(q.device), -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks[:, None, None].expand(-1, mask.tokens, 1)], dim=-1)
    blind = (s == -torch.inf).all(-1, keepdim=True)
    lse = torch.logsumexp(s.masked_fill(blind, 0.0), -1).masked_fill(blind[..., 0], -torch.inf)
    p = torch.softmax(s.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)[..., : mask.kv_tokens]
    if dropout_p:
        heads = range(q.shape[1])
        a, b = dropout.words(at, columns, heads, dropout_seed)
        p = p * dropout.keep(a[..., None], b[:, None], dropout_p) / (1 - dropout_p)
    return torch.einsum("hij,jhd->ihd", p, values), lse.t()


def seen_pairs(mask: Mask) -> NDArray[np.bool_]:
    """Whether query i sees key j, [tokens, kv_tokens], by definition."""
    rows, keys = np.arange(mask.tokens), np.arange(mask.kv_tokens)
    seen = np.zeros((rows.size, keys.size), bool)
    for band in range(len(mask.bands)):
        lo, hi = (bound[:, None] for bound in mask.bounds(rows, band=band))
        seen |= (lo <= keys) & (keys < hi) & (mask.key_positions(rows)[:, None] < mask.until(band=band))
    return seen


def dense_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    *,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [tokens, H, V] and final states [documents, H, K, V] of a linear recurrence, on one device.

    Arguments as of `seqpar.recurrent.linear_attention`, global and in position order, float64 where this is the oracle.
    Computed by definition, token by token, and differentiated by autograd.
    """
    heads, (_, groups, dim) = v.shape[1], k.shape
    queries, keys = (x.repeat_interleave(heads // groups, 1).unbind(0) for x in (q, k))
    # not by indices: the gradient of each would be a tensor of all rows
    values, decays, betas = ([] if x is None else x.unbind(0) for x in (v, decay, beta))
    out, final = [], []
    for document, (start, stop) in enumerate(zip(mask.offsets.tolist(), mask.offsets[1:].tolist())):
        state = v.new_zeros(heads, dim, v.shape[2]) if initial_state is None else initial_state[document]
        for t in range(start, stop):
            if decays:
                state = decays[t].exp().view(heads, -1, 1) * state
            added = values[t]
            if betas:
                added = betas[t][:, None] * (added - torch.einsum("hk,hkv->hv", keys[t], state))
            state = state + torch.einsum("hk,hv->hkv", keys[t], added)
            out.append(torch.einsum("hk,hkv->hv", queries[t], state))
        final.append(state)
    return torch.stack(out) * (dim**-0.5 if scale is None else scale), torch.stack(final)


def relative_rms(got: Tensor, expected: Tensor) -> float:
    """Root mean square of the error over the root mean square of the expected values."""
    expected = expected.double()
    return float((got.double() - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt().clamp_min(1e-300))
