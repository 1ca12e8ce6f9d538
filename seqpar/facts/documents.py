"""Bands and documents: the bounds of packed documents, whether a band stays inside them, and bands of some of them."""

from __future__ import annotations

import numpy as np

from seqpar.facts.bands import Band, Until, meetings
from seqpar.facts.intervals import Runs, Spans, distinct, edges, expand, interval_of, pieces_between
from seqpar.facts.value import Ints


def document_spans(queries: Ints, keys: Ints, left: int | None, right: int | None) -> Spans:
    """Spans of documents with a window: one per document, and more where the window meets the document's ends."""
    if left is None and right in (None, 0) and keys is queries:
        start, constant = edges(queries)[:-1], np.zeros_like(queries)
        if right is None:
            return Spans(start, start, start + queries, constant, constant)
        return Spans(start, start, start + 1, constant, (queries > 1).astype(np.int64))
    n, m = queries[:, None], keys[:, None]
    shift = m - n  # query i of a document is aligned with key i + shift
    reach_left = None if left is None else np.minimum(left, m)  # no further than the document
    reach_right = None if right is None else np.minimum(right, n)

    def low(i: Ints) -> Ints:
        return np.zeros_like(i) if reach_left is None else np.clip(i + shift - reach_left, 0, m)

    def high(i: Ints) -> Ints:
        return np.broadcast_to(m, i.shape) if reach_right is None else np.clip(i + shift + reach_right + 1, 0, m)

    cuts = [np.zeros_like(n)]
    if reach_left is not None:
        cuts += [reach_left - shift]
    if reach_right is not None:
        cuts += [-(shift + reach_right + 1), n - reach_right]
    start = np.sort(np.clip(np.concatenate(cuts, axis=1), 0, n), axis=1)
    count = np.diff(start, axis=1, append=n)
    lo, hi = low(start), high(start)
    step = count > 1
    lo_step = np.where(step, low(start + 1) - lo, 0)
    hi_step = np.where(step, high(start + 1) - hi, 0)
    first_query, first_key = edges(queries)[:-1, None], edges(keys)[:-1, None]
    kept = count > 0
    return Spans(
        (start + first_query)[kept],
        (lo + first_key)[kept],
        np.maximum(hi, lo)[kept] + np.broadcast_to(first_key, hi.shape)[kept],
        lo_step[kept],
        hi_step[kept],
    )


def stays_inside(band: Band, offsets: Ints, kv_offsets: Ints) -> bool:
    """Whether every query sees keys of its own document alone. offsets: the starts of documents, and the last end."""
    start = distinct(np.concatenate([band.spans.start, offsets[:-1]]))
    count = np.diff(np.append(start, offsets[-1]))
    document = interval_of(start, offsets[:-1])
    low, high = kv_offsets[document], kv_offsets[document + 1]
    lo, hi, lo_step, hi_step = band.linear(start)
    # the rows of a piece that see any key: its first rows where intervals shrink, its last rows where they grow
    first = np.where((lo == hi) & (hi_step > lo_step), 1, 0)
    last = np.where(hi_step < lo_step, np.minimum(count, hi - lo), count) - 1
    sees = (first <= last) & ((lo < hi) | (hi_step > lo_step))
    inside = (lo + first * lo_step >= low) & (hi + last * hi_step <= high)
    if band.until is None or (inside | ~sees).all():
        return bool((inside | ~sees).all())
    # intervals reach into other documents, whose keys may have ended
    met = meetings(band, Runs(start, count, np.ones_like(start)), start + high - offsets[document + 1])
    at, lo, hi = met.intervals()
    piece = met.piece[at]
    return bool(((lo >= hi) | ((lo >= low[piece]) & (hi <= high[piece]))).all())


def band_of_documents(band: Band, documents: Ints, offsets: Ints, kv_offsets: Ints) -> Band:
    """A band that stays inside documents, restricted to some of them, which are packed in the given order."""
    lengths, kv_lengths = np.diff(offsets)[documents], np.diff(kv_offsets)[documents]
    rows, keys = edges(lengths), edges(kv_lengths)
    s = band.spans
    if band.until is None and np.array_equal(s.start, offsets[:-1]) and (s.lo < s.hi).all():
        shift = keys[:-1] - kv_offsets[documents]  # a span is a document
        lo, hi = s.lo[documents] + shift, s.hi[documents] + shift
        return Band(Spans(rows[:-1], lo, hi, s.lo_step[documents], s.hi_step[documents]))
    spans = _inner_spans(band, offsets, kv_offsets)
    span, to = _of_documents(spans.start, documents, offsets)
    row, key = rows[to] - offsets[documents[to]], keys[to] - kv_offsets[documents[to]]
    start, lo, hi, lo_step, hi_step = (x[span] for x in spans)
    spans = Spans(start + row, lo + key, hi + key, lo_step, hi_step)
    if band.until is None:
        return Band(spans)
    begin = distinct(np.concatenate([band.until.start, kv_offsets[:-1]]))
    run, to = _of_documents(begin, documents, kv_offsets)
    key = keys[to] - kv_offsets[documents[to]]
    end = np.clip(band.until.of(begin[run]) + key, keys[to], keys[to + 1])
    return Band(spans, Until(begin[run] + key, end).joined()).canonical(int(rows[-1]), int(keys[-1]))


def _inner_spans(band: Band, offsets: Ints, kv_offsets: Ints) -> Spans:
    """The spans of a band, cut at documents; bounds beyond a document, where nothing is seen, are moved to its end."""
    tokens = int(offsets[-1])
    start = distinct(np.concatenate([band.spans.start, offsets[:-1]]))
    document = interval_of(start, offsets[:-1])
    lo, hi, lo_step, hi_step = band.linear(start)
    ends = kv_offsets[document], kv_offsets[document + 1] + 1  # the first bounds inside, and again outside
    start = pieces_between(
        start, [(end - x) * step for end in ends for x, step in ((lo, lo_step), (hi, hi_step))], tokens
    )
    document = interval_of(start, offsets[:-1])
    low, high = kv_offsets[document], kv_offsets[document + 1]
    more = np.diff(np.append(start, tokens)) - 1
    lo, hi, lo_step, hi_step = band.linear(start)
    lo_step, hi_step = (
        np.where((x >= low) & (x + more * step <= high), step, 0) for x, step in ((lo, lo_step), (hi, hi_step))
    )
    return Spans(start, np.clip(lo, low, high), np.clip(hi, low, high), lo_step, hi_step)


def _of_documents(start: Ints, documents: Ints, offsets: Ints) -> tuple[Ints, Ints]:
    """The stretches of some documents: the number of each stretch, and the place of its document among them."""
    first = np.searchsorted(start, offsets)
    count = np.diff(first)[documents]
    return expand(first[documents], count), np.repeat(np.arange(documents.size), count)
