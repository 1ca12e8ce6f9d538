"""Who computes which heads when ranks share them: balanced shares of the query heads, and the key heads they read."""

from __future__ import annotations


def head_share(heads: int, kv_heads: int, width: int, share: int) -> tuple[slice, slice]:
    """Query heads and key heads of one of ``width`` sharers.

    Query heads are shared to within one; a key head goes to every share that has a query head of its group, so the
    ratio of the two is kept and nothing is padded. A share may be empty.
    """
    group = heads // kv_heads
    first, last = heads * share // width, heads * (share + 1) // width
    if first == last:
        return slice(first, first), slice(0, 0)
    return slice(first, last), slice(first // group, (last - 1) // group + 1)


def replicated(heads: int, kv_heads: int, width: int) -> bool:
    """Whether some key head is read by more than one share, so that its gradient is a sum over ranks."""
    shares = [head_share(heads, kv_heads, width, s)[1] for s in range(width)]
    return sum(s.stop - s.start for s in shares) > kv_heads


def head_blocks(heads: slice, kv_heads: slice, group: int) -> list[tuple[slice, slice]]:
    """A share cut into blocks in which every key head serves the same number of query heads.

    Returns (query heads, key heads) of each block, counted from the share's first. Kernels then need no more than
    ``H % H_kv == 0``; a share that starts or ends inside a group has up to three blocks.
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
