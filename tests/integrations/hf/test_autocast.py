"""Under bf16 autocast ranks round as one process does: heads, balance losses, positions and rotary embeddings."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import seqpar
from seqpar import Comm
from seqpar.testing import run_threads
from tests.ecosystem.architectures import Architecture
from tests.ecosystem.ways import ALIKE
from tests.integrations.hf.hybrids import contiguous, gradients
from tests.integrations.hf.models import batches
from tests.integrations.hf.test_experts import ASKED
from tests.integrations.hf.test_heads import REWARD, SINGLE, labelled
from tests.integrations.hf.test_positions import COUNTING, ROTARY, given
from tests.integrations.hf.unions import build, one

CASES = COUNTING | ROTARY | {
    "classifier": Architecture("llama", "dense", SINGLE, head="ForSequenceClassification"),
    "reward model": Architecture("modernbert", "encoder", REWARD, head="ForSequenceClassification"),
    "experts": Architecture("mixtral", "experts", ASKED),
}  # fmt: skip


def distance(grads: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """RMS error over all gradients, but for their number."""
    return float(torch.cat([(grads[name] - whole).flatten() for name, whole in exact.items()]).norm())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(3)
def test_errors_are_those_of_one_process(name: str) -> None:
    row = CASES[name]
    model, pad = build(row, torch.float32), row.config.get("pad_token_id", 0)
    every = given(row, "right", 2)
    if row.head == "ForSequenceClassification":
        every = labelled(batches("right", 2), row.config, torch.float32)
    _, exact = one(model, every, torch.float32, pad=pad)
    with torch.autocast("cpu", torch.bfloat16):
        loss, rounded = one(model, every, torch.float32, pad=pad)

    def rank(comm: Comm) -> tuple[float, dict[str, Tensor]]:
        own = copy.deepcopy(model)
        with seqpar.parallelize(own, comm, plan=contiguous), torch.autocast("cpu", torch.bfloat16):
            found = own(**every[comm.rank]).loss
            found.backward()
        return float(found.detach()), gradients(own)

    found = run_threads(2, rank)
    assert found[0][0] == found[1][0] == pytest.approx(loss, rel=0.02)
    total = {key: found[0][1][key] + found[1][1][key] for key in exact}
    assert 0 < distance(total, exact) <= ALIKE * distance(rounded, exact)
