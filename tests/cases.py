"""Random and enumerated cases of masks, layouts and plans, shared by every tier of tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.plan import TRANSPORTS, Plan

MASKS = ("causal", "full", "window", "band", "packed", "cross", "cross_full", "bounds", "prefix")
# keys of these may end before the last query: random trees as bounds, and as nodes with a window, any bounds at all,
# and bounds with another number of keys than of queries
ENDING = ("tree", "nodes", "ends", "cross_ends")
# queries of these may see several intervals of keys
SEVERAL = ("union", "lambda", "slices", "table")
EVERY = MASKS + ENDING + SEVERAL
LAYOUTS = ("contiguous", "zigzag", "striped", "blocks", "arbitrary", "lopsided")


def examples(count: int) -> settings:
    """So many examples of a property in `make exhaustive`; in CI as many of each hundred as its profile says."""
    return settings(max_examples=max(5, count * settings.default.max_examples // 100))


def document_lengths(longest: int, most: int = 5) -> st.SearchStrategy[list[int]]:
    """Lengths of documents, some of them 0, and none that ascend from 0 as cu_seqlens."""
    lists = st.lists(st.integers(0, longest), min_size=1, max_size=most)
    return lists.filter(lambda x: any(x) and (len(x) < 2 or x[0] > 0 or min(np.diff(x)) <= 0))


def divisors(n: int) -> list[int]:
    """Every width that divides n."""
    return [d for d in range(1, n + 1) if n % d == 0]


def make_mask(kind: str, lengths: list[int], rng: np.random.Generator) -> Mask:
    """A mask of a named kind over documents; "causal", "full" and the bounds ignore where documents end."""
    total = sum(lengths)
    one = [total]
    if kind == "causal":
        return Mask(one)
    if kind == "full":
        return Mask(one, causal=False)
    if kind == "window":
        return Mask(lengths, window=(int(rng.integers(0, 7)), None))
    if kind == "band":
        return Mask(one, causal=False, window=(int(rng.integers(0, 9)), int(rng.integers(0, 4))))
    if kind == "packed":
        return Mask(lengths)
    if kind in ("cross", "cross_full"):
        keys = [int(rng.integers(1, 2 * n + 2)) for n in lengths]
        return Mask(lengths, causal=kind == "cross", kv_lengths=keys)
    if kind == "prefix":
        edge = int(rng.integers(0, total + 1))
        rows = np.arange(total)
        return Mask.from_bounds(np.zeros(total, int), np.maximum(rows + 1, edge), lengths=lengths)
    if kind == "lambda":
        return Mask(lengths, window=(int(rng.integers(0, 7)), None), sink_tokens=int(rng.integers(1, 5)))
    if kind == "union":
        window, sinks = int(rng.integers(0, 5)), int(rng.integers(0, 4))
        near = Mask(one, causal=False, window=(window, window), sink_tokens=sinks)
        return near | make_mask("bounds", lengths, rng) | make_mask("prefix", one, rng).windowed((total // 2, None))
    if kind == "slices":
        slices = random_slices(total, total, 5, rng)
        return Mask.from_slices([s[:2] for s in slices], [s[2:4] for s in slices], [s[4] for s in slices], tokens=total)
    if kind == "table":
        tall, wide = rng.integers(1, 9, 2)
        table = rng.random((-(-total // tall), -(-total // wide))) < 0.5
        return Mask.blocks(table, (tall, wide), tokens=total, kv_tokens=total)
    if kind == "tree":
        lo, hi, until, _ = random_tree(total, rng)
        return Mask.from_bounds(lo, hi, until=until)
    if kind == "nodes":
        node, parents = random_nodes(total, rng)
        window = int(rng.integers(0, 9)) if rng.random() < 0.7 else None
        return Mask.tree(np.bincount(node, minlength=len(parents)), parents, window=(window, None))
    keys = int(rng.integers(1, 2 * total + 2)) if kind == "cross_ends" else total
    lo = rng.integers(0, keys + 1, total)
    hi = np.minimum(keys, lo + rng.integers(0, 9, total))
    until = rng.integers(0, keys + 1, keys) if kind in ENDING else None
    return Mask.from_bounds(lo, hi, until=until, kv_tokens=keys)


def random_nodes(tokens: int, rng: np.random.Generator, most: int = 4) -> tuple[np.ndarray, list[int]]:
    """The node of each token, and the parent of each node, of a random forest of nodes of 0 to ``most`` tokens."""
    parents: list[int] = []
    path: list[int] = []  # of open nodes
    node: list[int] = []  # of each token
    back = rng.choice((0.2, 0.5, 0.8))  # how often a branch ends: seldom in a deep forest, often in a wide one
    while len(node) < tokens:
        while path and rng.random() < (back if len(path) > 1 else 0.1):
            path.pop()
        parents.append(path[-1] if path else -1)
        path.append(len(parents) - 1)
        node += [path[-1]] * int(rng.integers(parents[-1] < 0, most + 1))
    return np.array(node[:tokens]), parents


def random_tree(
    tokens: int, rng: np.random.Generator, most: int = 4
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """``lo, hi, until`` of a random forest, and by definition who sees whom."""
    at, parents = random_nodes(tokens, rng, most)
    above = np.zeros((len(parents), len(parents)), bool)
    for n, parent in enumerate(parents):
        above[n, n] = True
        above[n] |= above[parent] if parent >= 0 else False
    inside = above[:, at][at]  # [j, i]: whether the node of i is above that of j
    rows = np.arange(tokens)
    root = above.argmax(1)  # a node's first ancestor in depth-first order is its root
    lo = np.searchsorted(at, root[at])
    until = np.array([rows[inside[:, j]].max() + 1 for j in rows])
    return lo, rows + 1, until, inside & (rows <= rows[:, None])


def random_slices(tokens: int, keys: int, count: int, rng: np.random.Generator) -> list[tuple[int, int, int, int, str]]:
    """Slices (first query, last, first key, last, kind) anywhere, half of them on the queries of the one before."""
    kinds = ("full", "causal", "inv_causal", "bi_causal")
    slices: list[tuple[int, int, int, int, str]] = []
    for _ in range(count):
        (a, b), (c, d) = (np.sort(rng.integers(0, n + 1, 2)).tolist() for n in (tokens, keys))
        if slices and rng.random() < 0.5:
            a, b = slices[-1][:2]
        slices.append((a, b, c, d, str(rng.choice(kinds))))
    return slices


def make_layout(kind: str, lengths: list[int], ranks: int, rng: np.random.Generator) -> Layout:
    """A layout of a named kind."""
    total = sum(lengths)
    if kind == "contiguous":
        return Layout.contiguous(total, ranks)
    if kind == "zigzag":
        return Layout.zigzag(lengths, ranks)
    if kind == "striped":
        return Layout.striped(total, ranks)
    if kind == "blocks":
        return Layout.striped(total, ranks, block=int(rng.integers(2, 6)))
    if kind == "arbitrary":
        return Layout(np.split(rng.permutation(total), np.sort(rng.integers(0, total + 1, ranks - 1))))
    shards = [np.zeros(0, int) for _ in range(ranks)]  # lopsided: some rank holds nothing where there are several
    edge = total if ranks == 1 else int(rng.integers(0, total + 1))
    shards[0], shards[-1] = np.arange(edge), np.arange(edge, total) if ranks > 1 else np.arange(total)
    return Layout(shards)


@dataclass(frozen=True)
class Case:
    """One point of the product of what a plan can be."""

    mask: str
    layout: str
    transport: str
    ranks: int
    ulysses: int
    lengths: tuple[int, ...]
    seed: int = 0
    mixed: bool = False  # a Ulysses width per document
    stage_bytes: int = 64 << 20
    pads: bool = False
    node: int | None = None

    def __str__(self) -> str:
        flags = "".join(f"-{flag}" for flag in ("mixed", "pads") if getattr(self, flag))
        node = "" if self.node is None else f"-N{self.node}"
        return f"{self.mask}-{self.layout}-{self.transport}-P{self.ranks}-U{self.ulysses}{node}{flags}"

    def plan(self) -> Plan:
        """The plan of this case, the same in every process."""
        rng = np.random.default_rng(self.seed)
        lengths = list(self.lengths)
        mask = make_mask(self.mask, lengths, rng)
        layout = make_layout(self.layout, lengths, self.ranks, rng)
        keys = None
        if mask.kv_tokens != mask.tokens:
            keys = make_layout(self.layout, mask.kv_lengths.tolist(), self.ranks, rng)
        ulysses: int | list[int] = self.ulysses
        if self.mixed and mask.within_documents:
            ulysses = rng.choice(divisors(self.node or self.ranks), len(mask.lengths)).tolist()
        rows = [layout.tokens(r) + int(rng.integers(0, 3)) for r in range(self.ranks)] if self.pads else None
        return Plan(
            mask, layout, kv_layout=keys, ulysses=ulysses, transport=self.transport, stage_bytes=self.stage_bytes,
            rows=rows, node=self.node,
        )  # fmt: skip


LENGTHS = ((37,), (1, 13, 2, 22, 5), (3, 2, 1, 1, 4))

# what everything that carries or computes attention is tried with: comms, processes, other libraries' kernels
OVER_RANKS = (
    Case("packed", "zigzag", "fetch", 2, 1, LENGTHS[1], stage_bytes=4096),
    Case("packed", "contiguous", "ring", 4, 1, LENGTHS[1]),
    Case("window", "striped", "double_ring", 4, 1, LENGTHS[2], pads=True),
    Case("causal", "contiguous", "gather", 3, 1, LENGTHS[0]),
    Case("cross", "zigzag", "gather", 4, 2, LENGTHS[1]),
    Case("packed", "zigzag", "fetch", 4, 4, LENGTHS[1], mixed=True),
    Case("bounds", "lopsided", "fetch", 2, 2, LENGTHS[0]),
    Case("packed", "zigzag", "fetch", 4, 1, LENGTHS[1], stage_bytes=4096, pads=True, node=2),
    Case("window", "striped", "fetch", 4, 1, LENGTHS[0], stage_bytes=5 * 4096, node=2),
    Case("packed", "contiguous", "fetch", 1, 1, LENGTHS[1]),
)


@st.composite
def cases(draw: st.DrawFn, max_ranks: int = 8, max_tokens: int = 40, masks: Sequence[str] = MASKS) -> Case:
    """Any plan over few tokens."""
    ranks = draw(st.sampled_from([r for r in (1, 2, 3, 4, 6, 8) if r <= max_ranks]))
    ulysses = draw(st.sampled_from(divisors(ranks)))
    node = draw(st.sampled_from([None, *(d for d in divisors(ranks) if d % ulysses == 0)]))
    return draw(_cases(ranks, ulysses, st.sampled_from(TRANSPORTS), node, max(1, max_tokens // 3), masks))


@st.composite
def node_cases(draw: st.DrawFn, max_ranks: int = 12, max_tokens: int = 60, masks: Sequence[str] = MASKS) -> Case:
    """`fetch` over several nodes of several ranks."""
    nodes = [(r, n) for r in (4, 6, 8, 12) for n in (2, 3, 4) if r % n == 0 and r > n and r <= max_ranks]
    ranks, node = draw(st.sampled_from(nodes))
    ulysses = draw(st.sampled_from([1, 1, *divisors(node)]))
    return draw(_cases(ranks, ulysses, st.just("fetch"), node, max_tokens // 3, masks))


def any_cases(max_ranks: int = 12, masks: Sequence[str] = MASKS) -> st.SearchStrategy[Case]:
    """Any plan, one in four of them over several nodes."""
    return st.one_of(*[cases(min(max_ranks, 8), masks=masks)] * 3, node_cases(max(max_ranks, 4), masks=masks))


def _cases(
    ranks: int, ulysses: int, transports: st.SearchStrategy[str], node: int | None, longest: int, masks: Sequence[str]
) -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        mask=st.sampled_from(masks),
        layout=st.sampled_from(LAYOUTS),
        transport=transports,
        ranks=st.just(ranks),
        ulysses=st.just(ulysses),
        lengths=document_lengths(longest).map(tuple),
        seed=st.integers(0, 2**16),
        mixed=st.booleans(),
        stage_bytes=st.sampled_from([1, 3 * 4096, 10 * 4096, 64 << 20]),
        pads=st.booleans(),
        node=st.just(node),
    )
