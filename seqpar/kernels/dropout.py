"""Dropout that drops the same pairs on any number of ranks: a hash of the pair's positions, head and seed.

Pair (i, j) of head h is kept iff ``mix(a[h, i] ^ b[h, j]) >= floor(p * 2**32)`` in uint32, where ``a[h, i]`` is word
0 of Philox4x32-10 with key = seed and counter ``(i, h, 0, 0)``, and ``b[h, j]`` the same with ``(j, h, 1, 0)``.

Source: Salmon et al. 2011 (Philox); the mixing constants are Wellons' lowbias32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seqpar.kernels.protocol import StepFacts

Words = TypeVar("Words", Tensor, NDArray[np.int64])

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def philox(counter: Sequence[Words], key: tuple[int, int]) -> Words:
    """Word 0 of Philox4x32-10. Words are int64 that hold 32 bits; a wrapped product keeps these bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & _WORD) ^ c1 ^ k0, p1 & _WORD, ((p0 >> 32) & _WORD) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0


def words(queries: Tensor, keys: Tensor, heads: range, seed: int) -> tuple[Tensor, Tensor]:
    """``a`` of positions of queries and ``b`` of positions of keys, int32 [heads, rows]."""
    at = torch.cat([queries, keys]).long() & _WORD
    side = (torch.arange(len(at), device=at.device) >= len(queries)).long()
    head = torch.arange(heads.start, heads.stop, device=at.device)[:, None]
    counter = (at[None], head, side[None], torch.zeros_like(head))
    seed &= (1 << 64) - 1
    key = (seed & _WORD, seed >> 32)
    if _on_host(at):  # a hundred operations, which numpy starts in a fraction of torch's time
        word = torch.from_numpy(philox([x.numpy() for x in counter], key))
    else:
        word = philox(counter, key)
    signed = torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)
    return signed[:, : len(queries)].contiguous(), signed[:, len(queries) :].contiguous()


def step_words(facts: StepFacts, heads: range, seed: int) -> tuple[Tensor, Tensor]:
    """``a`` of a step's queries and ``b`` of its keys.

    Cached with the step for one seed, and layers have seeds of their own: backward reuses forward's words only if no
    other layer ran in between, as when activations are recomputed.
    """
    kept: dict[str, tuple[int, dict[range, tuple[Tensor, Tensor]]]] = facts.memo("dropout", dict)
    earlier, of_heads = kept.get("last", (seed, {}))
    if seed != earlier:
        of_heads = {}
    if (found := of_heads.get(heads)) is None:  # threads of other seeds may share the step, so nothing is taken out
        found = of_heads[heads] = words(facts.pos, facts.key_pos, heads, seed)
    kept["last"] = seed, of_heads
    return found


def keep(a: Tensor, b: Tensor, p: float) -> Tensor:
    """Which pairs are kept, bool [..., M, N], from words ``a [..., M, 1]`` and ``b [..., 1, N]``."""
    x = a ^ b
    # int32 shifts are arithmetic: the mask clears the copies of the sign bit.
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * (0x846CA68B - (1 << 32))
    x = x ^ ((x >> 16) & 0xFFFF)
    flip = -(1 << 31)  # unsigned order is signed order with the top bit flipped
    return (x ^ flip) >= int(p * 2**32) + flip


def _on_host(x: Tensor) -> bool:
    return x.device.type == "cpu"
