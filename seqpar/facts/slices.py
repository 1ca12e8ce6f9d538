"""Masks by rectangles: slices of queries and keys, and tables of blocks.

A slice is a rectangle of queries and keys with a cut on none, one or both of its corners. With 3 queries and 5 keys::

    full           causal         inv_causal     bi_causal
    # # # # #      # # # . .      # # # # #      # # # . .
    # # # # #      # # # # .      . # # # #      . # # # .
    # # # # #      # # # # #      . . # # #      . . # # #

Source: MagiAttention (Sandai, 2025), "Flexible Flash Attention": attention slices and their four mask types. A cut is
aligned as in its ``magi_attention/utils/_utils.py`` at 2c64135: "causal" with the last query and key, "inv_causal" with
the first ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from seqpar.facts.unions import Strips
from seqpar.facts.value import MOST, Ints, int64_of, integer

KINDS = ("full", "causal", "inv_causal", "bi_causal")


def slice_strips(
    q_ranges: ArrayLike, k_ranges: ArrayLike, kinds: Sequence[str], tokens: int | None, kv_tokens: int | None
) -> tuple[Strips, int, int]:
    """What slices show, and the numbers of queries and keys; arguments as of `Mask.from_slices`."""
    q, k = _ranges("q_ranges", q_ranges), _ranges("k_ranges", k_ranges)
    kinds = list(kinds)
    if not len(q) == len(k) == len(kinds):
        raise ValueError(
            f"got {len(q)} q_ranges, {len(k)} k_ranges and {len(kinds)} kinds; give one of each for every slice"
        )
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ValueError(f"kinds must be among {', '.join(KINDS)}, got {unknown[0]!r:.200}; give one for every slice")
    last = int(max(q.max(), k.max() if kv_tokens is None else 0, 1))
    queries = last if tokens is None else integer("tokens", tokens, 1, MOST)
    keys = queries if kv_tokens is None else integer("kv_tokens", kv_tokens, 1, MOST)
    for name, ranges, option, most in (("q_ranges", q, "tokens", queries), ("k_ranges", k, "kv_tokens", keys)):
        if ranges.max() > most:
            n = int(ranges[:, 1].argmax())
            raise ValueError(
                f"{name} of slice {n} is {ranges[n].tolist()}, beyond {option}={most}; cut the range or raise {option}"
            )
    rows = q[:, 1] - q[:, 0]
    lo_step = np.array([kind in ("inv_causal", "bi_causal") for kind in kinds], np.int64)
    hi_step = np.array([kind in ("causal", "bi_causal") for kind in kinds], np.int64)
    return Strips(q[:, 0], rows, k[:, 0], k[:, 1] - hi_step * (rows - 1), lo_step, hi_step), queries, keys


def block_strips(
    table: ArrayLike, block: int | tuple[int, int], tokens: int | None, kv_tokens: int | None
) -> tuple[Strips, int, int]:
    """What a table of blocks shows, and the numbers of queries and keys; arguments as of `Mask.blocks`."""
    shown = np.asarray(table)
    if shown.ndim != 2 or shown.dtype != bool or not shown.size:
        raise ValueError(
            f"table must be booleans [query blocks, key blocks], got {shown.dtype}{list(shown.shape)}; compare with "
            "> 0, or choose blocks first"
        )
    tall, wide = block if isinstance(block, (tuple, list)) and len(block) == 2 else (block, block)
    tall, wide = (integer("block", size, 1, MOST) for size in (tall, wide))
    held = shown.shape[0] * tall, shown.shape[1] * wide
    queries = held[0] if tokens is None else integer("tokens", tokens, 1, MOST)
    if kv_tokens is None:
        keys = queries if held[0] == held[1] else held[1]
    else:
        keys = integer("kv_tokens", kv_tokens, 1, MOST)
    for name, most, size, count in (
        ("tokens", queries, tall, shown.shape[0]),
        ("kv_tokens", keys, wide, shown.shape[1]),
    ):
        if not (count - 1) * size < most <= count * size:
            raise ValueError(
                f"{name}={most} are {-(-most // size)} blocks of {size}, the table has {count}; give a row of the "
                "table for each block of queries, and a column for each block of keys"
            )
    edge = np.diff(np.pad(shown, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    (row, begin), (_, end) = np.nonzero(edge == 1), np.nonzero(edge == -1)
    start, zero = row * tall, np.zeros_like(row)
    rows = np.minimum(tall, queries - start)
    return Strips(start, rows, begin * wide, np.minimum(end * wide, keys), zero, zero), queries, keys


def _ranges(name: str, values: ArrayLike) -> Ints:
    try:
        pairs = np.asarray(values)
    except ValueError:  # raised by numpy for nested lists of unequal lengths
        pairs = np.zeros(0)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or not pairs.size or pairs.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers [slices, 2], got {values!r:.200}; give [[start, end], ...]")
    pairs = int64_of(name, pairs)
    bad = (pairs[:, 0] < 0) | (pairs[:, 1] < pairs[:, 0])
    if bad.any():
        n = int(np.flatnonzero(bad)[0])
        raise ValueError(f"{name} of slice {n} is {pairs[n].tolist()}, expected 0 <= start <= end")
    return pairs
