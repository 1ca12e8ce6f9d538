"""Adapters of peft: what would meet rows of other documents is refused, and ranks agree on the rest."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import seqpar
from seqpar import LocalComm
from seqpar.comm import Comm
from seqpar.testing import run_threads
from tests.advice.remedies import advised
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


def test_an_adapter_that_begins_at_a_token_is_refused() -> None:
    with (
        seqpar.parallelize(model := adapted(peft.LoraConfig(**LAYERS, alora_invocation_tokens=[5, 6])), LocalComm()),
        advised(NotImplementedError, "leave alora_invocation_tokens out"),
    ):
        model(**BATCH)
    model = adapted(peft.LoraConfig(**LAYERS))
    alone = model(**BATCH).loss
    with seqpar.parallelize(model, LocalComm()):
        assert torch.allclose(model(**BATCH).loss, alone)


def test_adapters_by_row_are_refused_and_those_of_all_rows_are_not() -> None:
    models = [adapted(peft.LoraConfig(**LAYERS)).eval()]
    models[0].add_adapter("second", peft.LoraConfig(**LAYERS))
    models.append(copy.deepcopy(models[0]))
    with (
        seqpar.parallelize(models[0], LocalComm()),
        advised(NotImplementedError, "call set_adapter on every rank"),
        torch.no_grad(),
    ):
        models[0](input_ids=IDS, adapter_names=["default", "second"])
    model = models[1]  # peft leaves its hooks after an error
    model.set_adapter("second")
    alone = model(input_ids=IDS).logits
    with seqpar.parallelize(model, LocalComm()):
        assert torch.allclose(model(input_ids=IDS).logits, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", ["active", "disabled"])
def test_ranks_with_different_adapters_are_refused(how: str) -> None:
    models = [adapted(peft.LoraConfig(**LAYERS)).eval()]
    models[0].add_adapter("second", peft.LoraConfig(**LAYERS))
    models.append(copy.deepcopy(models[0]))

    def rank(comm: Comm) -> str:
        model = models[comm.rank]
        with seqpar.parallelize(model, comm), torch.no_grad():
            if comm.rank and how == "active":
                model.set_adapter("second")
            elif comm.rank:
                model.base_model.disable_adapter_layers()
            with pytest.raises(ValueError, match="ranks differ in adapters") as error:
                model(input_ids=IDS)
        return str(error.value)

    assert len(set(run_threads(2, rank))) == 1


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


def test_an_adaption_prompt_comes_after_parallelize() -> None:
    config = peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=3, adapter_layers=1)
    model = peft.get_peft_model(build("llama"), config)
    with advised(ValueError, "call parallelize(model, comm) first, and then get_peft_model"):
        seqpar.parallelize(model, LocalComm())
    alone = model(**BATCH).loss
    model = build("llama")
    handle = seqpar.parallelize(model, LocalComm())
    model = peft.get_peft_model(model, config)
    assert torch.allclose(model(**BATCH).loss, alone)
    handle.undo()


def test_prompts_of_embeddings_are_taken_instead_of_prefixes_of_keys() -> None:
    kinds = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
    with advised(NotImplementedError, "take another adapter, such as PromptTuningConfig"):
        seqpar.parallelize(peft.get_peft_model(build("llama"), peft.PrefixTuningConfig(**kinds)), LocalComm())
    model = peft.get_peft_model(build("llama"), peft.PromptTuningConfig(**kinds))
    alone = model(**BATCH).loss
    with seqpar.parallelize(model, LocalComm()):
        assert torch.allclose(model(**BATCH).loss, alone)


def test_layers_of_another_kind_come_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seqpar.integrations.adapters.BY_ITSELF", set())
    model = build("llama")
    with seqpar.parallelize(model, LocalComm()):
        model = peft.get_peft_model(model, peft.LoraConfig(**LAYERS))
        with advised(NotImplementedError, "add it before seqpar.parallelize"):
            model(**BATCH)
    alone = model(**BATCH).loss
    with seqpar.parallelize(model, LocalComm()):
        assert torch.allclose(model(**BATCH).loss, alone)


def test_projections_are_drawn_instead_of_means_over_rows() -> None:
    def config(kind: str) -> Any:
        return peft.LoraConfig(**LAYERS, velora_config=peft.VeloraConfig(num_groups=4, init_type=kind))

    with (
        seqpar.parallelize(model := adapted(config("batch_average")), LocalComm()),
        advised(NotImplementedError, "set init_type='random' in VeloraConfig"),
    ):
        model(**BATCH)
    model = adapted(config("random"))
    alone = model(**BATCH).loss
    with seqpar.parallelize(model, LocalComm()):
        assert torch.allclose(model(**BATCH).loss, alone)


@pytest.mark.parametrize("late", [False, True])
def test_prompts_that_take_logits_are_refused(late: bool) -> None:
    config = peft.CPTConfig(
        task_type="CAUSAL_LM", cpt_token_ids=[1, 2, 3], cpt_mask=[1, 1, 1], cpt_tokens_type_mask=[1, 2, 4]
    )
    model, said = build("llama"), "CPT computes its loss from the logits of a rank's rows.*data parallelism"
    if late:
        seqpar.parallelize(model, LocalComm())
    with pytest.raises(NotImplementedError, match=said):
        wrapped = peft.get_peft_model(model, config)
        wrapped(**BATCH) if late else seqpar.parallelize(wrapped, LocalComm())


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


def test_a_term_beside_the_loss_of_a_head_that_stays_at_home_is_refused() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=61, pad_token_id=0, num_labels=3, **sizes)
    adapters = peft.AdaLoraConfig(target_modules=["q_proj"], task_type="SEQ_CLS", init_r=4, target_r=2, total_step=10)
    model = peft.get_peft_model(transformers.LlamaForSequenceClassification(config), adapters)
    with seqpar.parallelize(model, LocalComm()):
        assert model(input_ids=IDS).logits.isfinite().all()
        with pytest.raises(NotImplementedError, match="AdaLoRA adds its orthogonal regularization"):
            model(input_ids=IDS, labels=torch.tensor([0, 2]))


def test_the_model_inside_an_adaption_prompt_is_refused_too() -> None:
    model = build("llama")
    peft.get_peft_model(model, peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=3, adapter_layers=1))
    with pytest.raises(ValueError, match="an adaption prompt keeps the forward that its model had before"):
        seqpar.parallelize(model, LocalComm())
