"""Bounds as bands: given for every query and key, or those that follow from how far a query sees to either side."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from seqpar.facts.bands import Band, Until
from seqpar.facts.intervals import Spans, distinct, linear_spans, pieces_between
from seqpar.facts.value import MOST, Ints, int64_of, integer, is_integer, lengths_of


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


def checked_window(window: Sequence[int | None], causal: bool) -> tuple[int | None, int | None]:
    """The window (left, right); ValueError if it is not one."""
    fits = isinstance(window, (tuple, list)) and len(window) == 2
    if not fits or any(w is not None and (not is_integer(w) or w < 0) for w in window):
        raise ValueError(f"window must be (left, right), each None or an integer of at least 0, got {window!r}")
    if any(w is not None and w > MOST for w in window):
        raise ValueError(f"window must be (left, right), each at most {MOST}, got {window!r}; give None for no limit")
    left, right = (None if w is None else int(w) for w in window)
    if causal and right not in (None, 0):
        raise ValueError(f"a causal mask sees no key to the right, got window={window!r}; give causal=False or right=0")
    return left, 0 if causal else right


def windowed(
    band: Band, left: int | None, right: int | None, offsets: Ints, key_positions: Callable[[Ints], Ints]
) -> Band:
    """A band without ends, limited to keys within a window of the query. offsets: where documents start and end."""

    def low(at: Ints) -> Ints:
        lo = band.bounds(at)[0]
        return lo if left is None else np.maximum(lo, key_positions(at) - left)

    def high(at: Ints) -> Ints:
        hi = band.bounds(at)[1]
        return hi if right is None else np.minimum(hi, key_positions(at) + right + 1)

    # A piece is cut where the window meets one of its bounds, and where it has passed a bound and nothing is seen.
    tokens = int(offsets[-1])
    start = distinct(np.concatenate([band.spans.start, offsets[:-1]]))
    start = start[start < tokens]  # documents at the end may have keys alone
    at, (lo, hi) = key_positions(start), band.bounds(start)
    cuts = [lo - at + x for x in (left,) if x is not None] + [hi - at - x - 1 for x in (right,) if x is not None]
    start = pieces_between(start, cuts, tokens)
    start = pieces_between(start, [np.abs(high(start) - low(start))], tokens)
    after = np.minimum(start + 1, np.append(start[1:], tokens) - 1)
    (lo, hi), (lo_after, hi_after) = ((low(x), np.maximum(low(x), high(x))) for x in (start, after))
    return Band(Spans(start, lo, hi, lo_after - lo, hi_after - hi))
