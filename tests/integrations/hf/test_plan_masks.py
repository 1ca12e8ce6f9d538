"""The mask of a plan is the mask of a model's layers: those of transformers' own code with that mask, in fp64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import seqpar
from seqpar import Comm, Layout, Mask, Plan
from seqpar.integrations.transformers import KEY
from seqpar.testing import run_threads, seen_pairs
from tests.integrations.hf.models import build

LENGTHS = [23, 17]
S = sum(LENGTHS)
PREFIX = Mask.from_bounds([0] * S, [max(13, n + 1) for n in range(S)])
MASKS = {
    "documents": Mask(LENGTHS),
    "window": Mask(LENGTHS, window=(5, 0)),
    "window with sinks": Mask(LENGTHS, window=(5, 0), sink_tokens=2),
    "full": Mask(LENGTHS, causal=False),
    "bounds": PREFIX,
    "slices": Mask.from_slices([[0, 30], [30, 40]], [[0, 30], [10, 40]], ["causal", "full"]),
    "tree": Mask.tree([5, 7, 3, 2, 6, 13, 4], [-1, 0, 1, 1, 0, -1, 5]),
    "windowed tree": Mask.tree([5, 7, 3, 2, 6, 13, 4], [-1, 0, 1, 1, 0, -1, 5], window=(4, None)),
    "union": Mask.from_bounds([0] * S, [n + 1 if n < 20 else 10 for n in range(S)])
    | Mask.from_bounds([20] * S, [max(20, n + 1) for n in range(S)]),
}
IDS = torch.randint(1, 60, (1, S), generator=torch.Generator().manual_seed(3))


def by_one_process(model: Any, mask: Mask) -> Tensor:
    """The logits [S, V] by one process, whose attention adds the mask to its scores."""
    seen = torch.from_numpy(seen_pairs(mask))[None, None]
    bias = torch.zeros(1, 1, S, S, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    at = torch.from_numpy(mask.depths(torch.arange(S).numpy()))[None]
    with torch.no_grad():
        return model(input_ids=IDS, attention_mask=bias, position_ids=at, use_cache=False).logits[0]


def on_rows(model: Any, plan: Plan, comm: Comm) -> Tensor:
    """The logits of all ranks' rows of a model with the registered attention."""
    own = copy.deepcopy(model)
    own.set_attn_implementation(KEY)
    with seqpar.parallel(plan, comm), torch.no_grad():
        at = torch.from_numpy(plan.rope_positions(comm.rank))[None]
        rows = seqpar.shard(IDS[0], plan, comm.rank)[None]
        return seqpar.unshard(own(input_ids=rows, position_ids=at, use_cache=False).logits[0], plan, comm)


def made(name: str, **config: Any) -> Any:
    model = build(name, **config).double().eval()
    model.set_attn_implementation("sdpa")  # whose softmax is in the model's dtype
    return model


@pytest.mark.parametrize("name", MASKS)
def test_causal_layers_see_what_the_plan_says(name: str) -> None:
    mask, model = MASKS[name], made("llama")
    expected = by_one_process(model, mask)
    plan = Plan(mask, Layout.zigzag(mask.lengths, 2))
    for found in run_threads(2, lambda comm: on_rows(model, plan, comm)):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", [name for name in MASKS if name not in ("documents", "tree", "windowed tree")])
def test_a_layer_with_a_window_of_its_own_is_an_error(name: str) -> None:
    plan, model = Plan(MASKS[name], Layout.zigzag(MASKS[name].lengths, 2)), made("gemma3")

    def rank(comm: Comm) -> None:
        with pytest.raises(NotImplementedError, match=r"sees keys by Rule\(causal=True, left=.*and the plan has Mask"):
            on_rows(model, plan, comm)

    run_threads(2, rank)


def by_parallelize(model: Any, mask: Mask) -> list[Tensor]:
    """The logits [S, V] of every rank of a parallel model whose planner returns plans with this mask."""

    def rank(comm: Comm) -> Tensor:
        plan = Plan(mask, Layout.zigzag(mask.lengths, comm.size))
        at = torch.from_numpy(mask.depths(torch.arange(S).numpy()))[None]
        own = copy.deepcopy(model)
        with seqpar.parallelize(own, comm, source="replicated", plan=lambda *_: plan), torch.no_grad():
            return own(input_ids=IDS, position_ids=at).logits[0]

    return run_threads(2, rank)


@pytest.mark.parametrize("name", ["documents", "window", "window with sinks", "full", "bounds", "slices", "union"])
def test_a_planner_says_what_causal_layers_see(name: str) -> None:
    mask, model = MASKS[name], made("llama")
    expected = by_one_process(model, mask)
    for found in by_parallelize(model, mask):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


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
