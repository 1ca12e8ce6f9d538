"""transformers models on several ranks: losses, logits and every gradient are those of one process."""

from __future__ import annotations

import copy

import pytest
import torch

from seqpar.testing import run_threads
from tests.integrations.hf.models import CASES, PLANS, batches, beyond, build, check, on_ranks, one_process

KINDS = ["left", "right", "packed", "cu", "long", "mixed"]
# Every pair of a batch and a plan with some number of ranks; each model takes a part of them, and all take every plan.
POINTS = [(kind, plan, 2 + (i + j) % 3) for i, kind in enumerate(KINDS) for j, plan in enumerate(PLANS)]
PARTS = 4


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(6)
def test_a_model_on_ranks_is_the_model_of_one_process(name: str) -> None:
    case, model = CASES[name], build(name)
    for kind, plan, ranks in POINTS[list(CASES).index(name) % PARTS :: PARTS]:
        every = batches(kind, ranks)
        found = run_threads(ranks, on_ranks, model, every, {"plan": PLANS[plan]})
        try:
            check(found, one_process(model, every, case.causal), every)
        except AssertionError as error:
            raise AssertionError(f"{kind}, {plan}, {ranks} ranks: {error}") from None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_a_model_on_ranks_of_a_gpu(name: str) -> None:
    on_gpu(name, "cuda")


@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_a_model_on_ranks_of_a_gpu_is_rehearsed(name: str) -> None:
    on_gpu(name, "cpu")


def on_gpu(name: str, device: str) -> None:
    """Heads of 64, which Triton's kernels take as they are, in float32, whose sums a GPU orders otherwise.

    Ranks differ from one process by at most twice what weights that move by half a unit in the last place change.
    """
    model = build(name, hidden_size=256, head_dim=64).to(device)
    wide = copy.deepcopy(model).double()
    wide.set_experts_implementation("eager")  # grouped products have no float64
    if name == "llama":
        wide.set_attn_implementation("sdpa")  # its own softmax is in float32
    near = [nudged(wide, seed) for seed in range(3)]
    for kind, plan, ranks in (("left", "ring", 3), ("mixed", "ulysses", 2), ("right", "planner", 2)):
        every = [{key: x.to(device) for key, x in batch.items()} for batch in batches(kind, ranks)]
        found = run_threads(ranks, on_ranks, model, every, {"plan": PLANS[plan]}, timeout=300.0)  # kernels compile
        moved = [beyond(one_process(each, every, True).grads, one_process(wide, every, True).grads)[0] for each in near]
        assert max(moved) < 1e-3
        check(found, one_process(model, every, True), every, tolerance=max(1e-5, 2 * max(moved)))


def nudged(wide: torch.nn.Module, seed: int) -> torch.nn.Module:
    """A copy whose weights are moved by up to half a unit in the last place of float32."""
    moved, draw = copy.deepcopy(wide), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in moved.parameters():
            by = torch.rand(weight.shape, generator=draw, dtype=weight.dtype) * 2 - 1
            weight.mul_(1 + by.to(weight.device) * 2**-24)
    return moved
