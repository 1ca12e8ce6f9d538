"""Times planning: all that one of 64 ranks needs for 1,048,576 tokens in 2,000 heavy-tailed documents.

And one of 4,096 for 40 million tokens in 16,384 documents, placed as planners place them: half of the ranks hold short
documents whole, the other half share the long ones, which hold half of the tokens, in zigzag pieces.

make bench ARGS="-k plans"
"""

from __future__ import annotations

import numpy as np
import pytest

from seqpar import Layout, Mask, Plan

TOKENS, DOCUMENTS, RANKS = 1 << 20, 2000, 64


def heavy_tailed(tokens: int, documents: int) -> np.ndarray:
    """Lengths of documents, a few of them long."""
    weights = np.random.default_rng(0).pareto(1.2, documents) + 0.05
    lengths = 1 + np.floor(weights / weights.sum() * (tokens - documents)).astype(np.int64)
    lengths[0] += tokens - lengths.sum()
    return lengths


LENGTHS = heavy_tailed(TOKENS, DOCUMENTS)
LAYOUTS = {
    "contiguous": lambda: Layout.contiguous(TOKENS, RANKS),
    "zigzag": lambda: Layout.zigzag(LENGTHS, RANKS),
    "striped": lambda: Layout.striped(TOKENS, RANKS),
}


def build(layout: str, rank: int, transport: str, window: int | None) -> Plan:
    """Mask, layout, plan, the rank's steps, their tile tables and the rank's rotary positions; nothing cached."""
    plan = Plan(Mask(LENGTHS, window=(window, None)), LAYOUTS[layout](), transport=transport)
    for step in plan.steps(rank):
        step.bands[0].tiles(128, 128)
    plan.rope_positions(rank)
    return plan


@pytest.mark.parametrize("rank", [0, RANKS - 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fetch(benchmark, layout, rank) -> None:
    plan = benchmark.pedantic(build, (layout, rank, "fetch", None), rounds=7, warmup_rounds=1)
    benchmark.extra_info |= {"steps": len(plan.steps(rank)), "limit_ms": 50 if layout == "contiguous" else 250}


@pytest.mark.parametrize("window", [4096])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fetch_with_a_window(benchmark, layout, window) -> None:
    benchmark.pedantic(build, (layout, RANKS - 1, "fetch", window), rounds=5, warmup_rounds=1)


@pytest.mark.parametrize("transport", ["ring", "gather"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_transports(benchmark, layout, transport) -> None:
    benchmark.pedantic(build, (layout, RANKS - 1, transport, None), rounds=3, warmup_rounds=1)


MANY, MANY_RANKS = 16384, 4096


def log_normal(documents: int) -> np.ndarray:
    """Lengths of documents, 2,500 tokens on average, the longest over a hundred times as long."""
    sigma = 1.5
    draw = np.random.default_rng(0).lognormal(np.log(2500) - sigma**2 / 2, sigma, documents)
    return np.maximum(draw.astype(np.int64), 1)


def placed(lengths: np.ndarray, ranks: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Start, count and rank of every piece: a rank for about each 1,024 tokens of a long document."""
    first, half = np.cumsum(lengths) - lengths, ranks // 2
    order = np.argsort(-lengths, kind="stable")
    longest = int(np.searchsorted(np.cumsum(lengths[order]), lengths.sum() // 2))
    shared, short = np.sort(order[:longest]), np.sort(order[longest:])
    held = (np.cumsum(lengths[short]) - lengths[short]) * half // lengths[short].sum()
    degree = np.clip(1 << np.ceil(np.log2(lengths[shared] / 1024)).astype(int), 2, half)
    base = (np.cumsum(degree) - degree) % half
    doc = np.repeat(np.arange(longest), 2 * degree)
    nth = np.arange(doc.size) - np.repeat(2 * (np.cumsum(degree) - degree), 2 * degree)
    chunks, tokens = 2 * degree[doc], lengths[shared][doc]
    edge, stop = nth * tokens // chunks, (nth + 1) * tokens // chunks
    rank = half + (base[doc] + np.minimum(nth, chunks - 1 - nth)) % half
    return (
        np.append(first[short], first[shared][doc] + edge),
        np.append(lengths[short], stop - edge),
        np.append(held, rank),
    )


MANY_LENGTHS = log_normal(MANY)
PIECES = placed(MANY_LENGTHS, MANY_RANKS)
WIDTHS = {"width 1": lambda _: 1, "width 8": lambda _: 8, "widths": lambda p: np.where(p.degrees >= 8, 8, 1).tolist()}


def planned(width: str) -> Plan:
    """A plan without any cached derivation, nor of its layout."""
    ulysses = WIDTHS[width](Plan(Mask(MANY_LENGTHS), Layout.from_pieces(*PIECES, MANY_RANKS)))
    return Plan(Mask(MANY_LENGTHS), Layout.from_pieces(*PIECES, MANY_RANKS), ulysses=ulysses)


def ranks_by_keys() -> dict[str, int]:
    """A rank that fetches nothing, one that fetches as many keys as half of the sharing ones do, and the greediest."""
    plan = planned("width 1")
    demand = plan.demand(1)
    keys = np.bincount(demand.needs.group, demand.needs.hi - demand.needs.lo, MANY_RANKS)
    sharing = MANY_RANKS // 2 + np.argsort(keys[MANY_RANKS // 2 :])
    return {"whole": 0, "shared": int(sharing[len(sharing) // 2]), "most": int(sharing[-1])}


def test_layout_of_pieces(benchmark) -> None:
    benchmark.pedantic(Layout.from_pieces, (*PIECES, MANY_RANKS), rounds=15, warmup_rounds=1)
    benchmark.extra_info |= {"pieces": PIECES[0].size, "limit_ms": 25}


@pytest.mark.parametrize("width", WIDTHS)
def test_plan_of_pieces(benchmark, width) -> None:
    mask, layout, ulysses = Mask(MANY_LENGTHS), Layout.from_pieces(*PIECES, MANY_RANKS), planned(width).ulysses

    def make() -> Plan:
        layout.__setstate__(layout.__getstate__())  # forget the facts that the previous round derived
        return Plan(mask, layout, ulysses=ulysses)

    benchmark.pedantic(make, rounds=15, warmup_rounds=1)
    benchmark.extra_info |= {"limit_ms": 40}


@pytest.mark.parametrize("what", ["degrees", "merges"])
def test_facts_of_pieces(benchmark, what) -> None:
    benchmark.pedantic(getattr, setup=lambda: ((planned("width 1"), what), {}), rounds=15, warmup_rounds=1)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rank", ["whole", "shared", "most"])
@pytest.mark.parametrize("asked", ["first", "later"])
def test_steps_of_pieces(benchmark, asked, rank, width) -> None:
    chosen = ranks_by_keys()[rank]

    def setup() -> tuple[tuple[Plan, int], dict[str, int]]:
        plan = planned(width)
        if asked == "later":
            plan.steps(chosen ^ MANY_RANKS // 4)
        return (plan, chosen), {}

    benchmark.pedantic(Plan.steps, setup=setup, rounds=9, warmup_rounds=1)
    steps = planned(width).steps(chosen)
    messages = sum(len(s.sends) + len(s.recvs) for s in steps)
    benchmark.extra_info |= {"keys": sum(s.pos.size for s in steps), "messages": messages, "limit_ms": 20}
