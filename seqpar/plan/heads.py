"""Head shares of the ranks that share heads: balanced query heads, and the key heads that they read."""

from __future__ import annotations


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
