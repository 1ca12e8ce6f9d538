"""Adapters of peft: what would meet rows of other documents is refused, and ranks agree on the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import seqpar
from seqpar import LocalComm
from tests.advice.advised import advised
from tests.integrations.hf.models import build

peft = pytest.importorskip("peft")

IDS = torch.arange(2, 34).reshape(2, 16)
BATCH = {"input_ids": IDS, "labels": IDS}
LAYERS = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


def adapted(config: Any) -> Any:
    """A small Llama with adapters that have an effect."""
    model = peft.get_peft_model(build("llama"), config)
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        if p.requires_grad:
            p.data.copy_(torch.randn(p.shape, generator=generator) * 0.2)
    return model


def test_a_term_that_an_adapter_adds_to_the_loss_is_refused() -> None:
    def config(weight: float) -> Any:
        return peft.AdaLoraConfig(**LAYERS, init_r=4, target_r=2, total_step=10, orth_reg_weight=weight)

    with seqpar.parallelize(model := adapted(config(0.5)), LocalComm()):
        assert model(input_ids=IDS).logits.isfinite().all(), "which has no loss"
        with advised(
            NotImplementedError, "set orth_reg_weight=0, and if you want the term, add it divided by comm.size"
        ):
            model(**BATCH)
    model = adapted(config(0.0))
    alone = model(**BATCH).loss
    with seqpar.parallelize(model, LocalComm()):
        assert torch.allclose(model(**BATCH).loss, alone)


def masked_model(**more: Any) -> tuple[transformers.PreTrainedModel, Tensor]:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.EsmConfig(
        vocab_size=33, mask_token_id=32, pad_token_id=1, position_embedding_type="rotary", **sizes, **more
    )
    return transformers.EsmForMaskedLM(config).eval(), torch.tensor([[5, 32, 7, 8], [32, 32, 6, 5]])


@pytest.mark.parametrize("token_dropout", [True, False])
def test_embeddings_scaled_by_the_mask_tokens_of_a_row_take_parallelize(token_dropout: bool) -> None:
    model, ids = masked_model(token_dropout=token_dropout)
    alone = model(input_ids=ids).logits
    model.set_attn_implementation("seqpar")
    plan = seqpar.Plan(seqpar.Mask([4, 4], causal=False), seqpar.Layout.contiguous(8, 1))
    at = torch.arange(4).repeat(2)[None]
    with seqpar.parallel(plan, LocalComm()):
        if token_dropout:
            with advised(NotImplementedError, "give the model to seqpar.parallelize, which knows some such layers"):
                model(input_ids=ids.view(1, 8), position_ids=at)
        else:
            model(input_ids=ids.view(1, 8), position_ids=at)
    with seqpar.parallelize(model, LocalComm()):
        assert torch.allclose(model(input_ids=ids).logits, alone, atol=1e-6)
