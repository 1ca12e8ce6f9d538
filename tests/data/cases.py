"""Random batches in every form, and what they hold, found by loops over tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from seqpar import Hardware, Layout, Mask, Plan, plan_batch

KINDS = ("right", "left", "holes", "plain", "packed", "flat", "cu_seqlens", "list", "none", "no rows")
IGNORE = -100


def ring(lengths: Any, ranks: int) -> Plan:
    return Plan(Mask(lengths), Layout.zigzag(lengths, ranks), transport="ring")


def ulysses(lengths: Any, ranks: int) -> Plan:
    return Plan(Mask(lengths), Layout.contiguous(int(lengths.sum()), ranks), ulysses=ranks)


def two_dimensional(lengths: Any, ranks: int) -> Plan:
    width = 2 if ranks % 2 == 0 else 1
    return Plan(Mask(lengths), Layout.striped(int(lengths.sum()), ranks), ulysses=width, transport="double_ring")


PLANNERS: dict[str, Callable[[Any, int], Plan] | None] = {
    "default": None,
    "planned": partial(plan_batch, model="llama-8b", hardware=Hardware.of("a100")),
    "ring": ring,
    "ulysses": ulysses,
    "2-D": two_dimensional,
}


@dataclass
class Token:
    """One token that counts: what it is, where it was, what it predicts."""

    id: int
    label: int
    position: int
    weight: float


@dataclass
class Case:
    """A batch; its documents as lists of tokens in order; and what `back` makes of the ids."""

    batch: dict[str, Any] | None
    documents: list[list[Token]] = field(default_factory=list)
    ids_home: Any = None

    @property
    def tokens(self) -> list[Token]:
        return [token for document in self.documents for token in document]


def make(kind: str, seed: int, shift: str) -> Case:
    """A random batch of a kind. Labels that no token predicts, and labels of tokens left out, are IGNORE."""
    g = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=g))

    if kind == "none":
        return Case(None, [], torch.zeros(0, dtype=torch.int64))
    if kind in ("list", "packed", "flat", "cu_seqlens"):
        lengths = [draw(0, 7) for _ in range(draw(1, 4))]
        lengths[draw(0, len(lengths) - 1)] += not any(lengths)
        rows = lengths if kind == "list" else [sum(lengths)]
    else:
        lengths = rows = [draw(2, 8)] * (0 if kind == "no rows" else draw(1, 3))
    ids = [torch.randint(1, 99, (n,), generator=g) for n in rows]
    labels = [torch.randint(0, 99, (n,), generator=g) for n in rows]
    for each in labels:
        each[torch.rand(len(each), generator=g) < 0.2] = IGNORE
    weight = [torch.randn(n, 2, generator=g) for n in rows]
    mask = [torch.ones(n, dtype=torch.int64) for n in rows]
    for row in mask if kind in ("right", "left", "holes") else []:
        n = len(row)
        if kind == "holes":
            row[torch.rand(n, generator=g) < 0.4] = 0
        elif cut := draw(0, n):
            row[slice(n - cut, n) if kind == "right" else slice(0, cut)] = 0
    first = {sum(lengths[:i]) for i in range(len(lengths))} if len(rows) == 1 else {0}
    for row, each in zip(mask, labels, strict=True):
        for t in range(len(each)):
            predictor = t - 1 if shift == "row" else t
            if predictor < 0 or not row[predictor]:
                each[t] = IGNORE if predictor >= 0 else each[t]
    documents = [
        document
        for r in range(len(rows))
        for document in _documents(ids[r], labels[r], weight[r], mask[r], first, shift, kind)
    ]
    batch = _batch(kind, ids, labels, weight, mask, lengths)
    home: Any = [x * m for x, m in zip(ids, mask, strict=True)]
    if kind == "flat":
        (home,) = home
    elif kind != "list":
        home = torch.stack(home) if home else torch.zeros(0, 5, dtype=torch.int64)
    return Case(batch, documents, home)


def _documents(
    ids: Tensor, labels: Tensor, weight: Tensor, mask: Tensor, first: set[int], shift: str, kind: str
) -> list[list[Token]]:
    """The documents of one row."""
    found: list[list[Token]] = []
    start = 0
    kept = [t for t in range(len(ids)) if mask[t]]
    for n, t in enumerate(kept):
        if n == 0 or t in first:
            found.append([])
            start = t if kind in ("packed", "flat", "cu_seqlens") else 0
        last = n + 1 == len(kept)
        if shift == "none":
            label = int(labels[t])
        elif shift == "row":
            label = int(labels[t + 1]) if t + 1 < len(ids) else IGNORE
        else:
            label = IGNORE if last or kept[n + 1] in first else int(labels[kept[n + 1]])
        found[-1].append(Token(int(ids[t]), label, t - start, float(weight[t, 1])))
    return found


def _batch(
    kind: str, ids: list[Tensor], labels: list[Tensor], weight: list[Tensor], mask: list[Tensor], lengths: list[int]
) -> dict[str, Any]:
    if kind == "list":
        return {"input_ids": ids, "labels": labels, "weight": weight}
    if kind == "no rows":
        return {"input_ids": torch.zeros(0, 5, dtype=torch.int64), "labels": torch.zeros(0, 5, dtype=torch.int64)}
    batch: dict[str, Any] = {
        "input_ids": torch.stack(ids), "labels": torch.stack(labels), "weight": torch.stack(weight)
    }  # fmt: skip
    restarts = torch.cat([torch.arange(n) for n in lengths])
    edges = torch.tensor([0, *lengths]).cumsum(0).int()
    if kind in ("right", "left", "holes"):
        batch["attention_mask"] = torch.stack(mask)
    elif kind == "packed":
        batch["position_ids"] = restarts[None]
    elif kind == "cu_seqlens":
        batch |= {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "max_length_q": max(lengths)}
    elif kind == "flat":
        batch = {name: x[0] for name, x in batch.items()} | {"cu_seqlens": edges.tolist()}
    return batch


@st.composite
def batches(draw: st.DrawFn, ranks: int, shift: str) -> list[Case]:
    """A batch for every rank, of which some rank's has a token."""
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=ranks, max_size=ranks))
    found = [make(kind, draw(st.integers(0, 10_000)), shift) for kind in kinds]
    if not any(case.documents for case in found):
        found[draw(st.integers(0, ranks - 1))] = make("plain", 1, shift)
    return found
