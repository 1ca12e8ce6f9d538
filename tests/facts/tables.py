"""Tables of tiles compared with the pairs that a mask attends."""

from __future__ import annotations

import numpy as np

from seqpar.facts.tiles import Tiles


def check_tiles(t: Tiles, visible: np.ndarray) -> None:
    """All that the tables say of a step in which query row i sees key row j iff ``visible[i, j]``."""
    tiles, key_tiles = len(t.begin), -(-visible.shape[1] // t.bn)
    assert t.rows[0] == 0 and t.rows[-1] == visible.shape[0] and len(t.rows) == tiles + 1
    assert ((np.diff(t.rows) > 0) & (np.diff(t.rows) <= t.bm)).all()
    assert t.uniform == (t.rows[:-1].tolist() == [i * t.bm for i in range(tiles)])
    pairs = [[visible[a:b, n * t.bn : (n + 1) * t.bn] for n in range(key_tiles)] for a, b in zip(t.rows, t.rows[1:])]
    some = np.array([[x.any() for x in row] for row in pairs], bool).reshape(tiles, key_tiles)
    every = np.array([[x.all() for x in row] for row in pairs], bool).reshape(tiles, key_tiles)
    number = np.arange(key_tiles)
    visited = (number >= t.begin[:, None]) & (number < t.end[:, None])
    full = (number >= t.full_begin[:, None]) & (number < t.full_end[:, None])
    assert (t.begin <= t.full_begin).all() and (t.full_begin <= t.full_end).all() and (t.full_end <= t.end).all()
    assert not (some & ~visited).any(), "every visible pair is in a visited tile"
    np.testing.assert_array_equal(full, every)
    check_transposed(t, visited, full)
    assert t.order.tolist() == sorted(range(tiles), key=lambda i: -visited[i].sum())
    assert t.q_order.tolist() == sorted(range(key_tiles), key=lambda n: t.q_begin[n] - t.q_end[n])
    assert t.visits == visited.sum()
    computed = visited.sum() * t.bm * t.bn
    assert t.cover(int(visible.sum())) == (visible.sum() / computed if computed else 1)


def visited(t: Tiles) -> set[tuple[int, int]]:
    """The pairs of a query tile and a key tile that kernels compute."""
    s = t.stretches
    edge, begin, end = (np.arange(len(t.begin) + 1), t.begin, t.end) if s is None else (s.edge, s.begin, s.end)
    tiles = np.repeat(np.arange(len(t.begin)), np.diff(edge))
    return {(int(i), n) for i, a, b in zip(tiles, begin, end, strict=True) for n in range(a, b)}


def check_transposed(t: Tiles, visited: np.ndarray, full: np.ndarray) -> None:
    """The tables of key tiles are the smallest covering intervals, and runs of full tiles inside them."""
    ascending = all((np.diff(x[t.full_begin < t.full_end]) >= 0).all() for x in (t.full_begin, t.full_end))
    for n, (a, full_a, full_b, b) in enumerate(zip(t.q_begin, t.q_full_begin, t.q_full_end, t.q_end, strict=True)):
        who = np.flatnonzero(visited[:, n])
        assert (a, b) == (who[0], who[-1] + 1) if who.size else a == b
        assert a <= full_a <= full_b <= b
        who = np.flatnonzero(full[:, n])
        runs = np.split(who, np.flatnonzero(np.diff(who) > 1) + 1)
        want = max(runs[0], runs[-1], key=len) if ascending else runs[0][:0]
        assert np.arange(full_a, full_b).tolist() == want.tolist()
    assert t.q_exact == ((t.q_end - t.q_begin).sum() == visited.sum())


def check_stretches(t: Tiles, lo: np.ndarray, hi: np.ndarray, at: np.ndarray, keys: np.ndarray, until: np.ndarray):
    """All that the tables say of a step whose keys end, tile by tile from the definition."""
    s = t.stretches
    assert s is not None
    seen = (keys >= lo[:, None]) & (keys < hi[:, None]) & (at[:, None] < until)
    tiles, key_tiles = len(t.begin), -(-keys.size // t.bn)
    visited, full = np.zeros((tiles, key_tiles), int), np.zeros((tiles, key_tiles), bool)
    for i in range(tiles):
        mine = slice(s.edge[i], s.edge[i + 1])
        begin, end, is_full = s.begin[mine], s.end[mine], s.full[mine]
        assert (begin < end).all() and (end[:-1] <= begin[1:]).all()
        assert (is_full[1:] != is_full[:-1])[end[:-1] == begin[1:]].all(), "stretches of one kind are joined"
        assert (t.begin[i], t.end[i]) == ((begin[0], end[-1]) if begin.size else (t.begin[i], t.begin[i]))
        for a, b, f in zip(begin, end, is_full, strict=True):
            visited[i, a:b] += 1
            full[i, a:b] = f
        rows = np.arange(t.rows[i], t.rows[i + 1])
        sees = rows[lo[rows] < hi[rows]]
        for n in range(key_tiles):
            mine = slice(n * t.bn, (n + 1) * t.bn)
            may = sees.size and keys[mine][-1] >= lo[sees].min() and keys[mine][0] < hi[sees].max()
            assert visited[i, n] == bool(may and at[rows[0]] < until[mine].max()), "visited iff a pair may be seen"
            assert visited[i, n] or not seen[rows, mine].any()
            assert full[i, n] == seen[rows, mine].all()
            assert visited[i, n] == (t.begin[i] <= n < t.end[i] and s.at[i] < s.until[n]), "what kernels may check"
    assert (t.full_begin == t.begin).all() and (t.full_end == t.begin).all()
    assert t.visits == visited.sum() == s.visits.sum()
    assert t.order.tolist() == sorted(range(tiles), key=lambda i: -visited[i].sum())
    for n, (a, full_a, full_b, b) in enumerate(zip(t.q_begin, t.q_full_begin, t.q_full_end, t.q_end, strict=True)):
        who = np.flatnonzero(visited[:, n])
        assert a <= full_a <= full_b <= b and full[full_a:full_b, n].all()
        assert a <= who[0] and who[-1] < b if who.size else a <= b
    assert t.q_exact == ((t.q_end - t.q_begin).sum() == visited.sum())
    assert t.q_order.tolist() == sorted(range(key_tiles), key=lambda n: t.q_begin[n] - t.q_end[n])
