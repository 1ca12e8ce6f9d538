"""What the error of an adapter says to do, done: the loss is that of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import seqpar
from seqpar import LocalComm
from tests.advice.advised import advised
from tests.integrations.hf.models import build

peft = pytest.importorskip("peft")

IDS = torch.arange(2, 34).reshape(2, 16)
BATCH = {"input_ids": IDS, "labels": IDS}


def adapted(weight: float) -> Any:
    """A small Llama with AdaLoRA's adapters, whose term in the loss has that weight."""
    config = peft.AdaLoraConfig(
        target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_r=4, target_r=2, total_step=10,
        orth_reg_weight=weight,
    )  # fmt: skip
    return peft.get_peft_model(build("llama"), config)


def test_a_term_that_an_adapter_adds_to_the_loss_is_refused() -> None:
    with seqpar.parallelize(model := adapted(0.5), LocalComm()):
        assert model(input_ids=IDS).logits.isfinite().all(), "which has no loss"
        with advised(
            NotImplementedError, "set orth_reg_weight=0, and if you want the term, add it divided by comm.size"
        ):
            model(**BATCH)
    alone = (model := adapted(0.0))(**BATCH).loss
    with seqpar.parallelize(model, LocalComm()):
        assert torch.allclose(model(**BATCH).loss, alone)
