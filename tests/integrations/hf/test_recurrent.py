"""Hybrid and recurrent models on several ranks: losses and every gradient are those of each document alone."""

from __future__ import annotations

import copy
import gc
from functools import cache

import pytest
import torch
from torch import Tensor

import seqpar
from seqpar import Comm
from seqpar.testing import run_threads
from tests.integrations.hf.hybrids import (
    FAMILIES,
    alone,
    build,
    check,
    contiguous,
    empty,
    gradients,
    on_ranks,
    striped,
    zigzag,
)
from tests.integrations.hf.models import batches, packed

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}
ROUGH = ("olmo_hybrid", "zamba")  # round more than that by themselves
PLANS = {"planner": None, "contiguous": contiguous, "zigzag": zigzag, "striped": striped, "empty": empty}


def brought(kind: str, ranks: int) -> list[dict[str, Tensor]]:
    """What each rank's loader brings.

    "cut": documents longer than a rank's share and than two chunks of a kernel, all brought by every rank.
    """
    if kind == "cut":
        lengths = [141] if ranks == 2 else [70, 90]
        return [packed(torch.Generator().manual_seed(3), lengths)] * ranks
    return batches(kind, ranks)


POINTS = [
    ("cut", "contiguous", 2), ("packed", "zigzag", 3), ("left", "contiguous", 3), ("right", "empty", 2),
    ("cut", "striped", 3), ("long", "zigzag", 2), ("cu", "contiguous", 3), ("packed", "planner", 2),
]  # fmt: skip


CASES = [
    pytest.param(name, dtype, point, id=f"{name}-{dtype}-{' '.join(map(str, point))}")
    for name in FAMILIES for dtype in TOLERANCE for point in POINTS
]  # fmt: skip


@pytest.mark.parametrize(("name", "dtype", "point"), CASES)
@pytest.mark.sampled(80)
def test_a_model_on_ranks_is_each_document_alone(name: str, dtype: torch.dtype, point: tuple[str, str, int]) -> None:
    kind, plan, ranks = point
    kind = "right" if name == "recurrent_gemma" and kind == "left" else kind  # its padding on the left is refused
    model, every = build(name, dtype), brought(kind, ranks)
    whole = alone(model, every[:1] if kind == "cut" else every, dtype)
    options = {"plan": PLANS[plan], "source": "replicated" if kind == "cut" else "sharded"}

    @cache
    def truth() -> dict[str, Tensor]:
        return alone(copy.deepcopy(model).double(), every[:1] if kind == "cut" else every, torch.float64)[1]

    found = run_threads(ranks, on_ranks, model, every, dtype, options)
    check(found, whole, TOLERANCE[dtype], truth if name in ROUGH and dtype is torch.float32 else None)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "jamba"])
@pytest.mark.sampled(6)
def test_layers_that_are_computed_again_find_their_plan(name: str, reentrant: bool) -> None:
    """Also where nothing else keeps it, and where other forwards came between."""
    model, every = build(name), batches("packed", 2)
    plain = run_threads(2, on_ranks, model, every, torch.float32, {"plan": contiguous})

    def rank(comm: Comm) -> tuple[float, dict[str, Tensor]]:
        own = copy.deepcopy(model)
        own.gradient_checkpointing_enable({"use_reentrant": reentrant})
        with seqpar.parallelize(own, comm, plan=contiguous):
            loss = own(**every[comm.rank]).loss
            other = own(**batches("long", 2)[comm.rank]).loss
            gc.collect()
            (loss + 0.0 * other).backward()
        return float(loss.detach()), gradients(own)

    for found, expected in zip(run_threads(2, rank), plain, strict=True):
        check([found], expected, 1e-5)
