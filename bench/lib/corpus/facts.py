"""Masks, layouts and plans of every kind, and random draws of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from seqpar import Layout, Mask, Plan

LENGTHS: dict[str, list[int]] = {
    "one": [150], "even": [24] * 6, "uneven": [33, 64, 7, 1, 50], "long": [5, 1, 120, 2],
}  # fmt: skip


def _bounds(lengths: list[int]) -> Mask:
    """Bounds of a prefix that all tokens see, then causal, across documents."""
    at = np.arange(sum(lengths))
    return Mask.from_bounds(
        np.where(at % 3 == 0, 0, at // 2), np.maximum(at + 1, 10).clip(max=at.size), lengths=lengths
    )


MASKS: dict[str, Callable[[list[int]], Mask]] = {
    "causal": Mask,
    "full": lambda lengths: Mask(lengths, causal=False),
    "window": lambda lengths: Mask(lengths, window=(9, 0)),
    "band": lambda lengths: Mask(lengths, causal=False, window=(4, 7)),
    "cross": lambda lengths: Mask(lengths, kv_lengths=[n // 2 + 3 for n in lengths]),
    "bounds": _bounds,
}


def _by_rank(rank: np.ndarray[Any, Any], ranks: int) -> Layout:
    return Layout([np.flatnonzero(rank == r) for r in range(ranks)])


def _scattered(lengths: list[int], ranks: int) -> Layout:
    return _by_rank(np.random.default_rng(7).integers(0, ranks, sum(lengths)), ranks)


def _documents(lengths: list[int], ranks: int) -> Layout:
    starts = np.cumsum([0, *lengths[:-1]])
    return Layout.from_pieces(starts, lengths, np.arange(len(lengths)) % ranks, ranks)


def _empty(lengths: list[int], ranks: int) -> Layout:
    """A layout whose first rank holds nothing, if there is another rank."""
    rank = np.sort(np.random.default_rng(8).integers(min(1, ranks - 1), ranks, sum(lengths)))
    return _by_rank(rank, ranks)


LAYOUTS: dict[str, Callable[[list[int], int], Layout]] = {
    "contiguous": lambda lengths, ranks: Layout.contiguous(sum(lengths), ranks),
    "zigzag": Layout.zigzag,
    "striped": lambda lengths, ranks: Layout.striped(sum(lengths), ranks),
    "blocks": lambda lengths, ranks: Layout.striped(sum(lengths), ranks, 8),
    "scattered": _scattered,
    "documents": _documents,
    "empty": _empty,
}


@dataclass(frozen=True)
class PlanCase:
    """The arguments of a plan, by name. widths: the Ulysses width of each document in turn."""

    ranks: int
    lengths: str = "uneven"
    mask: str = "causal"
    layout: str = "zigzag"
    transport: str = "fetch"
    widths: tuple[int, ...] = (1,)
    node: int | None = None
    stage_bytes: int = 64 << 20
    pads: int = 0

    def plan(self) -> Plan:
        lengths = LENGTHS[self.lengths]
        mask = MASKS[self.mask](lengths)
        layout = LAYOUTS[self.layout](lengths, self.ranks)
        apart = mask.kv_tokens != mask.tokens
        keys = LAYOUTS[self.layout](mask.kv_lengths.tolist(), self.ranks) if apart else None
        rows = [layout.tokens(r) + self.pads * (r % 2) for r in range(self.ranks)] if self.pads else None
        widths: Any = self.widths[0]
        if len(self.widths) > 1:
            widths = [self.widths[n % len(self.widths)] for n in range(len(lengths))]
        return Plan(
            mask, layout, kv_layout=keys, ulysses=widths, transport=self.transport, node=self.node,
            stage_bytes=self.stage_bytes, rows=rows,
        )  # fmt: skip

    def __str__(self) -> str:
        more = f" node {self.node}" if self.node else ""
        more += f" stages {self.stage_bytes}" if self.stage_bytes < 64 << 20 else ""
        more += f" pads {self.pads}" if self.pads else ""
        width = "+".join(map(str, self.widths))
        return f"{self.ranks} ranks {self.lengths} {self.mask} {self.layout} {self.transport} x{width}{more}"


TRANSPORTS = ("fetch", "ring", "double_ring", "gather")


def named() -> list[PlanCase]:
    """Plans of every transport at every width, and of every mask and layout."""
    cases = [
        PlanCase(ranks, transport=transport, widths=(width,))
        for ranks in (1, 2, 3, 4, 6, 8)
        for transport in TRANSPORTS
        for width in range(1, ranks + 1)
        if ranks % width == 0
    ]
    cases += [PlanCase(4, mask=mask, layout=layout) for mask in MASKS for layout in LAYOUTS]
    cases += [PlanCase(8, widths=(1, 2, 8), transport=transport) for transport in TRANSPORTS]
    cases += [PlanCase(8, node=node, transport=t) for node in (2, 4) for t in ("fetch", "double_ring")]
    cases += [PlanCase(8, node=4, widths=(2,), layout="blocks"), PlanCase(4, stage_bytes=4096), PlanCase(4, pads=3)]
    return list(dict.fromkeys(cases))


def drawn(rng: np.random.Generator) -> PlanCase:
    """A random plan of parts that go together."""

    def one(values: Any) -> Any:
        values = list(values)
        return values[rng.integers(len(values))]

    ranks = one((1, 2, 3, 4, 5, 6, 7, 8))
    mask, transport = one(MASKS), one(TRANSPORTS)
    divisors = [d for d in range(1, ranks + 1) if ranks % d == 0]
    widths = (one(divisors),) if mask == "bounds" or rng.random() < 0.6 else (one(divisors), one(divisors))
    node = one([n for n in divisors if all(n % w == 0 for w in widths)] or [None]) if rng.random() < 0.3 else None
    return PlanCase(
        ranks, one(LENGTHS), mask, one(LAYOUTS), transport, widths, node, one((64 << 20, 64 << 20, 2048)),
        one((0, 0, 2)) if mask != "cross" else 0,
    )  # fmt: skip
