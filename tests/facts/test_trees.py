"""Trees against their definition: a query sees the tokens found by walking up from its node, parent by parent."""

from __future__ import annotations

import ast
import pickle
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpar import Layout, Plan
from seqpar.facts.mask import Mask
from seqpar.testing import seen_pairs
from tests.cases import examples

Forest = tuple[list[int], list[int]]


@st.composite
def forests(draw: st.DrawFn) -> Forest:
    """Lengths and parents of any forest: up to 12 nodes deep, up to 9 children each, nodes of 0 tokens among them."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    deep, wide, most = draw(st.integers(1, 12)), draw(st.integers(1, 9)), draw(st.integers(1, 50))
    lengths: list[int] = []
    parents: list[int] = []

    def grow(parent: int, level: int) -> None:
        parents.append(parent)
        lengths.append(int(rng.choice([0, 1, 1, 2, 5])))
        node = len(parents) - 1
        for _ in range(int(rng.integers(0, wide + 1)) if level < deep else 0):
            if len(parents) < most:
                grow(node, level + 1)

    for _ in range(int(rng.integers(1, 5))):
        grow(-1, 1)
    lengths[-1] += not any(lengths)
    return lengths, parents


def paths_by_definition(lengths: list[int], parents: list[int]) -> list[list[int]]:
    """For each token all tokens on the path from its root to itself."""
    first = np.cumsum([0, *lengths])
    paths = []
    for node, length in enumerate(lengths):
        path = list(range(first[node], first[node + 1]))
        above = parents[node]
        while above >= 0:
            path = [*range(first[above], first[above + 1]), *path]
            above = parents[above]
        paths += [path[: len(path) - length + n + 1] for n in range(length)]
    return paths


def matrix(paths: list[list[int]], left: int | None = None) -> np.ndarray:
    """Who sees whom, [tokens, tokens], with so many tokens to the left along the path."""
    seen = np.zeros((len(paths), len(paths)), bool)
    for i, path in enumerate(paths):
        seen[i, path if left is None else path[-1 - left :]] = True
    return seen


def documents(lengths: list[int], parents: list[int]) -> list[int]:
    """The tokens of each root and all nodes below it, where there are any."""
    roots = [n for n, parent in enumerate(parents) if parent < 0]
    return [n for a, b in zip(roots, [*roots[1:], len(parents)], strict=True) if (n := sum(lengths[a:b]))]


def recut(forest: Forest, rng: np.random.Generator) -> Forest:
    """The same tree with nodes cut in two and empty nodes between."""
    lengths: list[int] = []
    parents: list[int] = []
    last = [-1]  # the new node that ends each old one; the last entry is that of a root's parent
    for length, parent in zip(*forest, strict=True):
        pieces = [length]
        while rng.random() < 0.5:
            n = int(rng.integers(0, pieces[-1] + 1))
            pieces[-1:] = [n, pieces[-1] - n]
        parents += [last[parent], *range(len(lengths), len(lengths) + len(pieces) - 1)]
        lengths += pieces
        last.insert(-1, len(lengths) - 1)
    return lengths, parents


reach = st.none() | st.integers(0, 12)


@examples(300)
@given(forests(), reach, st.integers(0, 2**32))
def test_a_tree_is_its_definition(forest, left, seed) -> None:
    mask = Mask.tree(*forest, window=(left, None))
    paths = paths_by_definition(*forest)
    seen = matrix(paths, left)
    np.testing.assert_array_equal(seen_pairs(mask), seen)
    assert mask.area() == seen.sum() and mask.within_documents
    assert mask.lengths.tolist() == documents(*forest)
    assert mask.depths(np.arange(mask.tokens)).tolist() == [len(path) - 1 for path in paths]
    lo, hi = mask.bounds(np.arange(mask.tokens))
    assert (lo >= mask.offsets[mask.documents(np.arange(mask.tokens))]).all() and (hi == np.arange(hi.size) + 1).all()
    again = pickle.loads(pickle.dumps(mask))
    for same in (
        again, Mask.tree(*recut(forest, np.random.default_rng(seed)), window=(left, 0)),
        Mask.tree(*forest).windowed((left, None)), mask.windowed((left, 0)), mask.windowed((None, 0)),
    ):  # fmt: skip
        assert same == mask and same.digest() == mask.digest()
        assert repr(same) == repr(mask) or mask.paths is None


@examples(60)
@given(forests(), reach, reach, st.data())
def test_windows_on_windows_and_picked_documents(forest, one, other, data) -> None:
    mask = Mask.tree(*forest, window=(one, None))
    paths = paths_by_definition(*forest)
    both = min((x for x in (one, other) if x is not None), default=None)
    assert mask.windowed((other, None)) == Mask.tree(*forest, window=(both, None))
    chosen = data.draw(st.lists(st.integers(0, len(mask.lengths) - 1), min_size=1, max_size=6))
    picked = mask.pick(chosen)
    lengths, parents = forest
    roots = [*np.flatnonzero(np.array(parents) < 0), len(parents)]
    trees = [slice(*each) for each in zip(roots, roots[1:], strict=False) if any(lengths[slice(*each)])]
    few: Forest = ([], [])
    for nodes in (trees[d] for d in chosen):
        few[1].extend(p if p < 0 else p + len(few[0]) - nodes.start for p in parents[nodes])
        few[0].extend(lengths[nodes])
    same = Mask.tree(*few, window=(one, None))
    assert picked == same and (repr(picked) == repr(same) or picked.paths is None)
    np.testing.assert_array_equal(seen_pairs(picked), matrix(paths_by_definition(*few), one))
    assert len(paths) == mask.tokens


@examples(60)
@given(forests())
def test_bounds_of_a_tree_are_the_tree(forest) -> None:
    mask = Mask.tree(*forest)
    at = np.arange(mask.tokens)
    same = Mask.from_bounds(*mask.bounds(at), until=mask.until(), lengths=mask.lengths)
    assert same == mask
    np.testing.assert_array_equal(same.depths(at), mask.depths(at))
    assert same.windowed((2, None)) == mask.windowed((2, None))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), reach, st.integers(0, 2**32))
def test_chains_are_packed_documents(lengths, left, seed) -> None:
    chains = recut((lengths, [-1] * len(lengths)), np.random.default_rng(seed))
    mask, plain = Mask.tree(*chains, window=(left, None)), Mask(lengths, window=(left, None))
    assert mask == plain and mask.digest() == plain.digest() and repr(mask) == repr(plain)


def test_a_shared_prefix_is_a_tree_of_two_levels() -> None:
    mask = Mask.shared_prefix([(4, [2, 3]), (5, []), (0, [2, 1]), (1, (1, 1, 1))])
    assert mask == Mask.tree([4, 2, 3, 5, 0, 2, 1, 1, 1, 1, 1], [-1, 0, 0, -1, -1, 4, 4, -1, 7, 7, 7])
    assert mask.lengths.tolist() == [9, 5, 3, 4]
    assert mask.depths(range(9)).tolist() == [0, 1, 2, 3, 4, 5, 4, 5, 6]
    assert repr(mask) == "Mask(tree, 4 documents, 10 nodes, 21 tokens)"


@examples(40)
@given(forests(), st.integers(1, 4), st.integers(0, 2**32))
def test_a_plan_has_depths_as_positions(forest, ranks, seed) -> None:
    mask = Mask.tree(*forest)
    depths = np.array([len(path) - 1 for path in paths_by_definition(*forest)])
    layout = Layout(np.array_split(np.random.default_rng(seed).permutation(mask.tokens), ranks))
    plan = Plan(mask, layout, rows=[layout.tokens(rank) + 2 for rank in range(ranks)])
    for rank in range(ranks):
        np.testing.assert_array_equal(plan.rope_positions(rank), [*depths[layout.positions(rank)], 0, 0])


@given(forests(), st.integers(0, 2**32))
def test_nodes_in_another_order_are_told_a_right_one(forest, seed) -> None:
    lengths, parents = forest
    order = np.random.default_rng(seed).permutation(len(lengths))
    place = [*np.argsort(order).tolist(), -1]  # the last entry is that of a root's parent
    mixed = [lengths[n] for n in order], [place[parents[n]] for n in order]
    try:
        mask = Mask.tree(*mixed)
    except ValueError as error:
        told = re.search(r"in the order (\[.*\]), with parents (\[.*\])$", str(error))
        right, above = (ast.literal_eval(x) for x in told.groups())
        mask = Mask.tree([mixed[0][n] for n in right], above)
        assert sorted(right) == list(range(len(right)))
        assert [mixed[1][n] for n in right] == [-1 if p < 0 else right[p] for p in above]
    assert mask.area() == Mask.tree(*forest).area()


@pytest.mark.parametrize(
    ("lengths", "parents", "message"),
    [
        ([3, 2], [-1], "lengths has 2 nodes and parents 1; pass one length and one parent per node"),
        ([], [], "lengths must be a non-empty sequence of integers"),
        ([1], ["root"], "parents must be a non-empty sequence of integers"),
        ([2, -1], [-1, 0], "lengths must be at least 0, got -1 for node 1"),
        ([2, 1], [-1, 2], "parents must be -1 for a root or a node from 0 to 1, got 2 for node 1"),
        ([2**62, 2], [-1, 0], "lengths sum to 4.61e.18 tokens, more than 64 bits can number"),
        ([1, 1, 1], [-1, 2, 1], "parents lead from node 1 in a cycle and not to a root"),
        ([1], [0], "parents lead from node 0 in a cycle and not to a root; give a root the parent -1"),
        (
            [1, 1, 1], [2, 2, -1],
            r"node 0 does not follow its parent 2 .*; give them in the order \[2, 0, 1\], with parents \[-1, 0, 0\]$",
        ),
        ([1] * 2001, [-1, 2000] + [0] * 1999, "give them each right after its parent or after the subtree of a sib"),
    ],
)  # fmt: skip
def test_nodes_that_are_no_tree(lengths, parents, message) -> None:
    with pytest.raises(ValueError, match=message):
        Mask.tree(lengths, parents)


@pytest.mark.parametrize("group", [5, (5,), ([5], 4), (5, 4), (5, [1.5]), (5, [[1]]), (5.0, [1])])
def test_groups_that_are_none(group) -> None:
    with pytest.raises(
        ValueError, match=r"a group must be \(prompt length, \[answers' lengths\]\), got .* for group 1"
    ):
        Mask.shared_prefix([(3, [1]), group])


def test_windows_that_trees_do_not_have() -> None:
    mask = Mask.shared_prefix([(4, [2, 3])])
    for ask in (mask.windowed, lambda window: Mask.tree([4, 2, 3], [-1, 0, 0], window=window)):
        with pytest.raises(NotImplementedError, match="no window to the right, got .*3, 2.; give right=None or 0"):
            ask((3, 2))
        with pytest.raises(ValueError, match=r"window must be \(left, right\)"):
            ask((-1, 0))
    lo = {"across documents": [0, 0, 0, 0], "crossing": [0, 0, 0, 0], "begun later": [0, 0, 1, 0]}
    until = {"across documents": [3, 4, 4, 4], "crossing": [3, 4, 4, 4], "begun later": [4, 2, 4, 4]}
    lengths = {"across documents": [2, 2]}
    for name in lo:
        bounds = Mask.from_bounds(lo[name], [1, 2, 3, 4], until=until[name], lengths=lengths.get(name))
        with pytest.raises(NotImplementedError, match="takes no window: its keys end early and it is not a tree"):
            bounds.windowed((1, 0))


def test_many_nodes_cost_no_memory_per_token() -> None:
    nodes = 20_000
    parents = np.maximum(np.arange(nodes) - 1, 0) // 2 * 2  # a long path, with a leaf beside each of its nodes
    parents[0] = -1
    order = [*range(0, nodes, 2), *range(nodes - 1, 0, -2)]
    place = np.argsort(order)
    above = np.where(parents[order] < 0, -1, place[parents[order]])
    for window in (None, 10**9):
        mask = Mask.tree(np.full(nodes, 10**8), above, window=(window, None))
        assert len(pickle.dumps(mask)) < 200 * nodes
    assert mask.depths([mask.tokens - 1]) == 2 * 10**8 - 1


def test_a_plan_tells_what_its_trees_save() -> None:
    mask = Mask.shared_prefix([(4, [2, 3]), (5, []), (1, [1, 1])])
    first, second, *_ = Plan(mask, Layout.contiguous(17, 2)).describe().splitlines()
    assert first == "Mask(tree, 3 documents, 7 nodes, 17 tokens)"
    assert second.startswith("5 paths from roots to leaves, up to 7 tokens long") and second.endswith("have 22")
    assert "paths" not in Plan(Mask([4, 2]), Layout.contiguous(6, 2)).describe()
