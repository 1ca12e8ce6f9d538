"""Trees of tokens: a query sees the tokens on the path from the root of its tree to itself.

Nodes come in depth-first order, so every subtree is one range of tokens. A prompt of 2 tokens, a thought of 1 token
with answers of 2 and 1 tokens, and an answer of 1 token next to the thought::

    nodes     0 0 1 2 2 3 4      lengths [2, 1, 2, 1, 1], parents [-1, 0, 1, 1, 0]
    token     0 1 2 3 4 5 6
    until     7 7 6 5 5 6 7      the end of the subtree of each token
    depth     0 1 2 3 4 3 2      tokens above it: the position along the path

Tokens are kept in runs of equal ``until``: the tokens of a run continue each other. How nodes are cut does not show.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from seqpar.facts.bands import Band, Until
from seqpar.facts.intervals import Spans, distinct, edges, interval_of
from seqpar.facts.value import MOST, Ints, frozen, int64_of, is_integer

SHOWN = 1000  # nodes at most, for an error to print their order


class Paths(NamedTuple):
    """Runs of tokens, each with the tokens below it and the number of tokens above its first one."""

    start: Ints
    end: Ints  # of the subtree
    depth: Ints
    left: int | None = None  # the tokens that a query sees along its path before itself; None for all
    alone: bool = True  # False in a union, in which queries see other tokens too

    def depths(self, at: Ints) -> Ints:
        """The depth of the tokens at these positions, 0 for a root's first token; -1 for a pad row, position -1."""
        run = np.maximum(np.searchsorted(self.start, at, side="right") - 1, 0)
        return np.where(at < 0, -1, self.depth[run] + at - self.start[run])

    def before(self, at: Ints, by: int) -> Ints:
        """The tokens a number of places up the paths of the tokens at these positions; -1 where a path has fewer."""
        above = np.array(_runs_above(self.end.tolist()), np.int64)
        run = interval_of(at, self.start)
        depth = self.depth[run] + at - self.start[run] - by
        while (up := np.flatnonzero((depth >= 0) & (self.depth[run] > depth))).size:
            run[up] = above[run[up]]
        return np.where(depth < 0, -1, self.start[run] + depth - self.depth[run])

    def frozen(self) -> Paths:
        """These paths, read-only."""
        for array in self[:3]:
            frozen(array)
        return self

    def pick(self, documents: Ints, offsets: Ints) -> Paths:
        """The paths of some documents in a batch of these documents alone."""
        first = np.searchsorted(self.start, offsets)
        count = np.diff(first)[documents]
        run = np.repeat(first[documents] - edges(count)[:-1], count) + np.arange(count.sum())
        shift = np.repeat(edges(np.diff(offsets)[documents])[:-1] - offsets[documents], count)
        return self._replace(start=self.start[run] + shift, end=self.end[run] + shift, depth=self.depth[run])

    def spans(self, left: int, offsets: Ints) -> Spans:
        """The bounds of queries that see the token ``left`` places up their path and what follows, causal.

        A query with no more tokens above it sees from the start of its document.
        """
        tokens = int(offsets[-1])
        origin = offsets[interval_of(self.start, offsets[:-1])]
        start, end, depth = self.start.tolist(), self.end.tolist(), self.depth.tolist()
        pieces: list[tuple[int, int, int]] = []  # first query, its lower bound, how much that rises per query
        path: list[int] = []
        depths: list[int] = []  # of the first tokens of the runs on the path
        for n, (query, stop, lowest) in enumerate(zip(start, [*start[1:], tokens], origin.tolist(), strict=True)):
            while path and end[path[-1]] <= query:
                path.pop()
                depths.pop()
            path.append(n)
            depths.append(depth[n])
            reach = depth[n] - left  # the depth down from which the first query sees; it rises by one per query
            if reach < 0:
                pieces.append((query, lowest, 0))
            for m in range(max(bisect_right(depths, reach) - 1, 0), len(path)):
                at = max(reach, depths[m])
                if query + at - reach >= stop:
                    break
                pieces.append((query + at - reach, start[path[m]] + at - depths[m], 1))
        return _joined(np.array(pieces, np.int64), tokens)

    def leaves(self) -> tuple[Ints, Ints]:
        """The end of each path that no token continues, and its number of tokens from the root on."""
        stop = np.append(self.start[1:], self.end.max())
        leaf = np.flatnonzero(self.end == stop)
        return stop[leaf], (self.depth + stop - self.start)[leaf]

    def within(self, left: int) -> bool:
        """Whether no query sees more than ``left`` tokens along its path before itself."""
        return left >= self.leaves()[1].max() - 1 or (self.left is not None and left >= self.left)


def paths_of(band: Band, offsets: Ints) -> Paths | None:
    """The paths of a band that is a tree; None for any other.

    In a tree a query sees from the start of its document to itself, and ranges of keys and queries that see them nest.
    """
    if band.until is None:
        return None
    starts, tokens = offsets[:-1], int(offsets[-1])
    at = distinct(np.concatenate([band.spans.start, starts]))
    lo, hi, lo_step, hi_step = band.linear(at)
    bent = (np.diff(np.append(at, tokens)) > 1) & ((lo_step != 0) | (hi_step != 1))
    if bent.any() or (lo != starts[interval_of(at, starts)]).any() or (hi != at + 1).any():
        return None
    start = distinct(np.concatenate([band.until.start, starts]))
    stop = np.append(start[1:], tokens)
    end = np.minimum(band.until.of(start), offsets[interval_of(start, starts) + 1])
    if (end < stop).any():  # a query does not see itself
        return None
    depth: list[int] = []
    path: list[tuple[int, int]] = []  # runs under way: the end of the subtree, the depth below the last token
    for first, after, last in zip(start.tolist(), stop.tolist(), end.tolist(), strict=True):
        while path and path[-1][0] <= first:
            path.pop()
        if path and path[-1][0] < last:
            return None
        depth.append(path[-1][1] if path else 0)
        path.append((last, depth[-1] + after - first))
    return Paths(start, end, np.array(depth, np.int64)).frozen()


def runs_of_nodes(lengths: ArrayLike, parents: ArrayLike) -> tuple[Ints, Until]:
    """The lengths of the documents, which are the roots with all below them, and where the subtrees of tokens end."""
    sizes, above = _integers("lengths", lengths), _integers("parents", parents)
    nodes = sizes.size
    if above.size != nodes:
        raise ValueError(f"lengths has {nodes} nodes and parents {above.size}; pass one length and one parent per node")
    if sizes.min() < 0:
        n = int(np.flatnonzero(sizes < 0)[0])
        raise ValueError(f"lengths must be at least 0, got {sizes[n]} for node {n}")
    if float(sizes.sum(dtype=np.float64)) > MOST:
        raise ValueError(f"lengths sum to {sizes.sum(dtype=np.float64):.3g} tokens, more than 64 bits can number")
    bad = (above < -1) | (above >= nodes)
    if bad.any():
        n = int(np.flatnonzero(bad)[0])
        raise ValueError(f"parents must be -1 for a root or a node from 0 to {nodes - 1}, got {above[n]} for node {n}")
    past = _subtree_ends(above.tolist())
    offsets = edges(sizes)
    start, end = offsets[:-1], offsets[past]
    roots = np.flatnonzero(above < 0)
    documents = (end - start)[roots]
    if not documents.any():
        raise ValueError(f"lengths must hold at least one token, got {lengths!r:.200}")
    documents = frozen(documents[documents > 0])
    kept = np.flatnonzero(sizes)
    return documents, Until(start[kept], end[kept]).joined()  # a node and its only child are one run


def reach_along_paths(window: tuple[int | None, int | None]) -> int | None:
    """The left side of a window on a tree. Raises NotImplementedError for one to the right."""
    left, right = window
    if right not in (None, 0):
        raise NotImplementedError(f"a tree has no window to the right, got window={window}; give right=None or 0")
    return left


def nodes_of_groups(groups: Sequence[tuple[int, Sequence[int]]]) -> tuple[list[int], list[int]]:
    """The lengths and parents of prompts, each followed by its answers."""
    lengths: list[int] = []
    parents: list[int] = []
    for n, group in enumerate(groups):
        whole = isinstance(group, (tuple, list)) and len(group) == 2 and np.ndim(group[1]) == 1
        if not whole or not all(is_integer(x) for x in (group[0], *group[1])):
            raise ValueError(
                f"a group must be (prompt length, [answers' lengths]), got {group!r:.200} for group {n}; give integers"
            )
        prompt, answers = group
        parents += [-1, *[len(lengths)] * len(answers)]
        lengths += [int(prompt), *map(int, answers)]
    return lengths, parents


def _subtree_ends(parents: list[int]) -> Ints:
    """The first node after the subtree of each, in depth-first order; ValueError for nodes in another order."""
    end = [len(parents)] * len(parents)
    path: list[int] = []
    for node, parent in enumerate(parents):
        while path and path[-1] != parent:
            end[path.pop()] = node
        if parent >= 0 and not path:
            order = _depth_first(parents)
            place = {n: i for i, n in enumerate(order)}
            right = f"in the order {order}, with parents {[place.get(parents[n], -1) for n in order]}"
            if len(order) > SHOWN:
                right = f"each right after its parent or after the subtree of a sibling, as {order[:20]} and so on are"
            raise ValueError(
                f"nodes must come in depth-first order, but node {node} does not follow its parent {parent} or another "
                f"node below {parent}; give them {right}"
            )
        path.append(node)
    return np.array(end, np.int64)


def _runs_above(end: list[int]) -> list[int]:
    """The run that each run continues or branches from, -1 for the first of a tree. end: of their subtrees."""
    above: list[int] = []
    path: list[int] = []
    for n, stop in enumerate(end):
        while path and end[path[-1]] < stop:
            path.pop()
        above.append(path[-1] if path else -1)
        path.append(n)
    return above


def _depth_first(parents: list[int]) -> list[int]:
    """The nodes in depth-first order, siblings in the given one; ValueError if some reach no root."""
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]  # the last list holds the roots
    for node in range(len(parents) - 1, -1, -1):
        children[parents[node]].append(node)
    order: list[int] = []
    ahead = children[-1]
    while ahead:
        order.append(ahead.pop())
        ahead += children[order[-1]]
    if len(order) < len(parents):
        lost = min(set(range(len(parents))) - set(order))
        raise ValueError(f"parents lead from node {lost} in a cycle and not to a root; give a root the parent -1")
    return order


def _integers(name: str, values: Any) -> Ints:
    array = np.asarray(values)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be a non-empty sequence of integers, got {values!r:.200}")
    return int64_of(name, array)


def _joined(pieces: Ints, tokens: int) -> Spans:
    """Causal spans of pieces of queries, [pieces, (first query, lo, its slope)], joined where one continues another."""
    start, lo, step = pieces.T
    count = np.diff(np.append(start, tokens))
    goes_on = (step[1:] == step[:-1]) & (lo[1:] == (lo + step * count)[:-1])
    first = np.flatnonzero(np.append(True, ~goes_on))
    start, lo, step = start[first], lo[first], step[first]
    several = np.diff(np.append(start, tokens)) > 1
    return Spans(start, lo, start + 1, np.where(several, step, 0), several.astype(np.int64))
