"""The head trade: ``width`` consecutive ranks exchange tokens for heads, and on the way out heads for tokens.

Inside, a rank has the rows of all members in position order, for its own share of the heads. Ranks with the same share
``s``, one per group, then exchange keys. Two ranks that trade, with positions 0 to 6 and 8 heads::

    outside                             inside
    rank 0   0 1 3 5   heads 0-7        0 1 2 3 4 5 6   heads 0-3    share 0
    rank 1   2 4 6     heads 0-7        0 1 2 3 4 5 6   heads 4-7    share 1

    dest of member 0: inside rows 0 1 3 5; of member 1: inside rows 2 4 6

The documents of one width form one part of the call, with its own trade. Query heads are shared evenly, and a share has
the key heads that they read.
"""

from __future__ import annotations

import numpy as np

from seqpar.facts.intervals import cut, expand
from seqpar.facts.value import Ints
from seqpar.plan.residence import Residence
from seqpar.plan.steps import BandBounds, Part, Trade, as_rows


def part_of(residence: Residence, widths: Ints, rank: int, width: int) -> Part:
    """The part of one width from a rank's view. widths: the width of each document."""
    share = rank % width
    members = range(rank - share, rank - share + width)
    q, at = _trade(residence, widths, rank, members, "q")
    kv, keys = (q, at) if residence.one_side else _trade(residence, widths, rank, members, "kv")
    mask = residence.mask
    bands = tuple(BandBounds(*band.bounds(at), band.until) for band in mask.bands)
    return Part(width, share, members, q, kv, mask.key_positions(at), bands, keys)


def _trade(residence: Residence, widths: Ints, rank: int, members: range, side: str) -> tuple[Trade, Ints]:
    """One side of the head trade, and the positions of its inside rows."""
    held = {m: _rows_of_width(residence, widths, m, len(members), side) for m in members}
    local = held[rank][1]
    inside = np.concatenate([at for at, _ in held.values()])
    place = np.arange(inside.size)
    if len(members) > 1:
        order = np.argsort(inside, kind="stable")
        inside, place[order] = inside[order], np.arange(inside.size)
    ends = np.cumsum([at.size for at, _ in held.values()])
    dest = dict(zip(members, map(as_rows, np.split(place, ends[:-1])), strict=True))
    return Trade(as_rows(local), dest, inside.size), inside


def _rows_of_width(residence: Residence, widths: Ints, rank: int, width: int, side: str) -> tuple[Ints, Ints]:
    """A rank's positions in the documents of one width, ascending, and the local row of each."""
    starts = residence.offsets_of(side)[:-1]
    piece = residence.layout_of(side).runs(rank)
    row = np.cumsum(piece.count) - piece.count
    if (widths != width).any():
        parts, source = cut(piece, starts)
        row = row[source] + (parts.start - piece.start[source]) // parts.step
        kept = widths[np.searchsorted(starts, parts.start, side="right") - 1] == width
        piece, row = parts.pick(kept), row[kept]
    order = np.argsort(piece.start, kind="stable")
    piece, row = piece.pick(order), row[order]
    at, rows = expand(*piece), expand(row, piece.count)
    if (piece.start[1:] < piece.last[:-1]).any():  # strided runs interleave
        order = np.argsort(at, kind="stable")
        at, rows = at[order], rows[order]
    return at, rows


def head_share(heads: int, kv_heads: int, width: int, share: int) -> tuple[slice, slice]:
    """The query heads and key heads of one of ``width`` sharers.

    Shares of query heads differ by at most one. A key head goes to every share with a query head of its group, so
    nothing is padded: 6 query heads on 2 key heads over 4 ranks are 1, 2, 1, 2 query heads, and key heads 0, 0, 1, 1. A
    share may be empty.
    """
    group = heads // kv_heads
    first, last = heads * share // width, heads * (share + 1) // width
    if first == last:
        return slice(first, first), slice(0, 0)
    return slice(first, last), slice(first // group, (last - 1) // group + 1)


def replicated(heads: int, kv_heads: int, width: int) -> bool:
    """Whether several shares read the same key head, whose gradient is then a sum over ranks."""
    shares = [head_share(heads, kv_heads, width, s)[1] for s in range(width)]
    return sum(s.stop - s.start for s in shares) > kv_heads


def head_blocks(heads: slice, kv_heads: slice, group: int) -> list[tuple[slice, slice]]:
    """A share in blocks within which every key head serves the same number of query heads.

    Returns (query heads, key heads) of each block, relative to the share's first. Kernels then only need
    ``H % H_kv == 0``. A share that starts or ends inside a group of query heads has up to three blocks.
    """
    edges = [heads.start]
    inner_start, inner_stop = -(-heads.start // group) * group, heads.stop // group * group
    edges += [e for e in (inner_start, inner_stop) if heads.start < e < heads.stop]
    edges = sorted({*edges, heads.stop})
    blocks = []
    for a, b in zip(edges[:-1], edges[1:], strict=True):
        keys = slice(a // group - kv_heads.start, (b - 1) // group + 1 - kv_heads.start)
        blocks.append((slice(a - heads.start, b - heads.start), keys))
    return blocks
