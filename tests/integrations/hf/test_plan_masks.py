"""Layers that take the mask of a plan beside their own, or in its place; the product is in test_ways.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import seqpar
from seqpar import Comm, Layout, Mask, Plan
from seqpar.testing import run_threads, seen_pairs
from tests.integrations.hf.models import build

LENGTHS = [23, 17]
S = sum(LENGTHS)
MASKS = {
    "documents": Mask(LENGTHS),
    "window": Mask(LENGTHS, window=(5, 0)),
    "full": Mask(LENGTHS, causal=False),
}
IDS = torch.randint(1, 60, (1, S), generator=torch.Generator().manual_seed(3))


def by_one_process(model: Any, mask: Mask) -> Tensor:
    """The logits [S, V] by one process, whose attention adds the mask to its scores."""
    seen = torch.from_numpy(seen_pairs(mask))[None, None]
    bias = torch.zeros(1, 1, S, S, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    at = torch.from_numpy(mask.depths(torch.arange(S).numpy()))[None]
    with torch.no_grad():
        return model(input_ids=IDS, attention_mask=bias, position_ids=at, use_cache=False).logits[0]


def made(name: str, **config: Any) -> Any:
    model = build(name, **config).double().eval()
    model.set_attn_implementation("sdpa")  # whose softmax is in the model's dtype
    return model


def by_parallelize(model: Any, mask: Mask) -> list[Tensor]:
    """The logits [S, V] of every rank of a parallel model whose planner returns plans with this mask."""

    def rank(comm: Comm) -> Tensor:
        plan = Plan(mask, Layout.zigzag(mask.lengths, comm.size))
        at = torch.from_numpy(mask.depths(torch.arange(S).numpy()))[None]
        own = copy.deepcopy(model)
        with seqpar.parallelize(own, comm, source="replicated", plan=lambda *_: plan), torch.no_grad():
            return own(input_ids=IDS, position_ids=at).logits[0]

    return run_threads(2, rank)


def test_a_window_that_is_also_the_layers_own_is_computed() -> None:
    model = made("mistral")  # of 5 keys with its own
    for found in by_parallelize(model, Mask(LENGTHS, window=(4, 0))):
        torch.testing.assert_close(found, by_one_process(model, Mask(LENGTHS, window=(4, 0))), rtol=1e-9, atol=1e-9)
    with pytest.raises(NotImplementedError, match="and the plan has Mask"):
        by_parallelize(model, MASKS["window"])


def test_a_mask_that_no_layer_uses_refuses_nothing() -> None:
    model = made("gemma3", layer_types=["full_attention"] * 2)
    expected = by_one_process(model, MASKS["window"])
    for found in by_parallelize(model, MASKS["window"]):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_layers_that_see_ahead_take_full_documents_alone() -> None:
    model = made("bert")
    expected = by_one_process(model, MASKS["full"])
    for name in ("documents", "full"):
        for found in by_parallelize(model, MASKS[name]):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    with pytest.raises(NotImplementedError, match=r"sees keys by Rule\(causal=False, .*and the plan has Mask"):
        by_parallelize(model, MASKS["window"])
