"""Bounds that are given for every query and every key, as bands."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from seqpar.facts.bands import Band, Until
from seqpar.facts.intervals import linear_spans
from seqpar.facts.value import MOST, Ints, int64_of, integer, lengths_of


def band_of_bounds(
    lo: ArrayLike, hi: ArrayLike, until: ArrayLike | None, kv_tokens: int | None, lengths: ArrayLike | None
) -> tuple[Ints, Ints, Band]:
    """The lengths of the documents in queries and in keys, and the band; arguments as of `Mask.from_bounds`."""
    low, high = np.asarray(lo), np.asarray(hi)
    if low.ndim != 1 or low.shape != high.shape or low.size == 0 or {low.dtype.kind, high.dtype.kind} - set("iu"):
        raise ValueError(
            f"lo and hi must be integer arrays of one shape [tokens], got {low.dtype}{list(low.shape)} and "
            f"{high.dtype}{list(high.shape)}"
        )
    low, high = int64_of("lo", low), int64_of("hi", high)
    tokens = low.size
    keys = tokens if kv_tokens is None else integer("kv_tokens", kv_tokens, 1, MOST)
    bad = (low < 0) | (low > high) | (high > keys)
    if bad.any():
        i = int(np.flatnonzero(bad)[0])
        raise ValueError(
            f"query {i} has bounds [{low[i]}, {high[i]}), expected 0 <= lo <= hi <= {keys}; clip them, and give "
            f"lo == hi to a query that sees nothing"
        )
    documents, kv_lengths = batch_lengths(tokens, keys, lengths)
    ends = None if until is None else _checked_until(until, keys)
    return documents, kv_lengths, Band(linear_spans(low, high), ends).canonical(tokens, keys)


def batch_lengths(tokens: int, keys: int, lengths: ArrayLike | None) -> tuple[Ints, Ints]:
    """The lengths of the documents in queries and in keys; by default the batch is one document."""
    documents = lengths_of("lengths", [tokens] if lengths is None else lengths)
    if documents.sum() != tokens:
        raise ValueError(f"lengths sum to {documents.sum()}, the mask has {tokens} queries; give both the same")
    if keys != tokens and len(documents) > 1:
        raise ValueError(
            f"lengths with {tokens} queries and {keys} keys do not say which keys a document has; leave lengths out"
        )
    return documents, documents if keys == tokens else lengths_of("kv_tokens", [keys])


def _checked_until(until: ArrayLike, keys: int) -> Until:
    """Runs of keys with equal ends."""
    ends = np.asarray(until)
    if ends.shape != (keys,) or ends.dtype.kind not in "iu":
        raise ValueError(f"until must be integers [{keys}], one for each key, got {ends.dtype}{list(ends.shape)}")
    ends = int64_of("until", ends)
    bad = (ends < 0) | (ends > keys)
    if bad.any():
        j = int(np.flatnonzero(bad)[0])
        raise ValueError(f"until of key {j} is {ends[j]}, expected 0 to {keys}, the number of keys")
    return Until(np.arange(keys), ends).joined()
