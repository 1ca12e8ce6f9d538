"""What errors of transformers models say to do, done: losses are those of one process."""

from __future__ import annotations

import copy
import sys
from contextlib import nullcontext
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqpar
from seqpar import Comm, Layout, LocalComm, Mask, Plan
from seqpar.testing import run_threads, seen_pairs
from tests.advice.advised import advised

pytest.importorskip("transformers")

import transformers  # noqa: E402
from transformers.modeling_outputs import CausalLMOutputWithPast  # noqa: E402

import seqpar.integrations.transformers  # noqa: E402, F401  registers attn_implementation="seqpar"
from tests.ecosystem.architectures import Architecture  # noqa: E402
from tests.integrations.hf.models import SIZES, batches, build  # noqa: E402
from tests.integrations.hf.unions import build as of_architecture  # noqa: E402

BATCH = batches("right", 1)[0]
ROW = {"input_ids": torch.arange(1, 13)[None], "position_ids": torch.arange(12)[None]}
PLAN = Plan(Mask([12]), Layout.contiguous(12, 1))


def llama(attention: str = "eager") -> nn.Module:
    """A Llama with the weights of every other one."""
    model = build("llama")
    model.set_attn_implementation(attention)
    return model


def loss_of(model: nn.Module, **more: Any) -> float:
    return float(model(**BATCH, **more).loss)


LOSS = loss_of(llama())


def is_right(model: nn.Module, **more: Any) -> bool:
    """Whether the loss of the batch is that of one process."""
    return loss_of(model, **more) == pytest.approx(LOSS, rel=1e-5)


def test_a_transformers_model_is_parallel_without_sdpa_or_registered() -> None:
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=8)).train()
    documents = [torch.arange(1, 13)[None], torch.arange(13, 1, -1)[None]]
    expected = sum(float(model(input_ids=each, labels=each).loss) for each in documents) / 2
    alone = model(input_ids=documents[0]).logits[0]
    plan = Plan(Mask([12]), Layout.contiguous(12, 2))

    def rank(comm: Comm) -> float:
        own, at = copy.deepcopy(model), torch.from_numpy(plan.rope_positions(comm.rank))[None]
        rows = {"input_ids": at + 1, "position_ids": at, "use_cache": False}
        for whole in (own, nn.Sequential(own)):
            with advised(
                NotImplementedError,
                "give it to seqpar.parallelize(model, comm) without sdpa=True, or load it with "
                "attn_implementation='seqpar' and call it inside seqpar.parallel(plan, comm)",
            ):
                seqpar.parallelize(whole, comm, sdpa=True, plan=plan)
        with pytest.raises(NotImplementedError, match="without sdpa=True"), seqpar.sdpa(plan, comm):
            own(**rows)
        own.set_attn_implementation("seqpar")
        with seqpar.parallel(plan, comm):
            assert torch.allclose(seqpar.unshard(own(**rows).logits[0], plan, comm), alone, atol=1e-4)
        with seqpar.parallelize(own, comm):
            return float(own(input_ids=documents[comm.rank], labels=documents[comm.rank]).loss)

    assert run_threads(2, rank) == pytest.approx([expected] * 2, rel=1e-5)


def test_a_registered_model_is_made_parallel_or_given_rows_and_a_plan() -> None:
    model = llama("seqpar")
    with advised(
        RuntimeError,
        "give the model to seqpar.parallelize(model, comm), or its rows to it inside "
        "`with seqpar.parallel(plan, comm):`",
    ):
        model(**BATCH)
    with seqpar.parallel(PLAN, LocalComm()):
        rows = model(**ROW).logits
    assert torch.allclose(rows, llama()(**ROW).logits, atol=1e-4)
    with seqpar.parallelize(model, LocalComm()):
        assert is_right(model)


@pytest.mark.parametrize("kind", ["documents", "window", "prefix"])
def test_a_mask_of_four_dims_is_positions_a_window_of_the_config_or_that_of_a_plan(kind: str) -> None:
    """Each is computed on 2 ranks as one process computes it with the mask of 4 dims."""
    ids, n = ROW["input_ids"], torch.arange(12)
    masks = {
        "documents": Mask([5, 7]), "window": Mask([12], window=(3, 0)),
        "prefix": Mask.from_bounds([0] * 12, [max(5, i + 1) for i in range(12)]),
    }  # fmt: skip
    mask = masks[kind]
    config = llama().config.to_dict() | {"model_type": "mistral", "sliding_window": 4 if kind == "window" else None}
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**config))
    model.load_state_dict(llama().state_dict())
    plan = Plan(mask, Layout.contiguous(12, 2))
    at = torch.from_numpy(mask.depths(n.numpy()))[None]
    bias = torch.where(torch.from_numpy(seen_pairs(mask)), 0.0, -torch.inf)[None, None]
    expected = llama()(input_ids=ids, position_ids=at, attention_mask=bias).logits[0]

    def rank(comm: Comm) -> Tensor:
        own = copy.deepcopy(model).eval()
        with (
            seqpar.parallelize(own, comm, source="replicated"),
            advised(
                NotImplementedError,
                "give documents by position_ids, a window by sliding_window of the config, and another mask by a plan "
                "with it, to a model with attn_implementation='seqpar' inside seqpar.parallel",
            ),
        ):
            own(input_ids=ids, attention_mask=bias)
        if kind != "prefix":
            with seqpar.parallelize(own, comm, source="replicated"):
                return own(input_ids=ids, position_ids=at).logits[0]
        own.set_attn_implementation("seqpar")
        with seqpar.parallel(plan, comm):
            rows, places = (seqpar.shard(x[0], plan, comm.rank)[None] for x in (ids, at))
            return seqpar.unshard(own(input_ids=rows, position_ids=places).logits[0], plan, comm)

    assert all(torch.allclose(found, expected, rtol=1e-4, atol=1e-4) for found in run_threads(2, rank))


def test_a_plan_of_plain_documents_leaves_each_layer_its_own_mask() -> None:
    model, ids = build("gemma3").eval(), ROW["input_ids"]  # a layer with a window and one without
    model.set_attn_implementation("seqpar")
    with (
        advised(NotImplementedError, "make the plan with Mask(lengths), and each layer sees keys by its own rule"),
        seqpar.parallel(Plan(Mask([12], causal=False), Layout.contiguous(12, 1)), LocalComm()),
    ):
        model(**ROW)
    with seqpar.parallel(PLAN, LocalComm()):
        found = model(**ROW).logits
    assert torch.allclose(found, build("gemma3").eval()(input_ids=ids).logits, rtol=1e-4, atol=1e-4)


def test_items_are_counted_over_all_ranks() -> None:
    every = batches("right", 2)
    counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in every]
    whole = llama()
    sums = [float(whole(**batch).loss) * count for batch, count in zip(every, counts)]

    def rank(comm: Comm) -> float:
        model = llama()
        with seqpar.parallelize(model, comm):
            with advised(
                ValueError, "count those of all ranks, as Trainer does with average_tokens_across_devices=True"
            ):
                model(**every[comm.rank], num_items_in_batch=min(counts))
            return float(model(**every[comm.rank], num_items_in_batch=sum(counts)).loss)

    assert sum(run_threads(2, rank)) == pytest.approx(sum(sums) / sum(counts), rel=1e-5)

    def replicated(comm: Comm, step: int) -> float:
        """Two micro-batches, which every rank brings, so that it counts them too."""
        model = llama()
        with seqpar.parallelize(model, comm, source="replicated"):
            with pytest.raises(ValueError, match=f"but the batches of all ranks have {2 * counts[0]} labels"):
                model(**every[0], num_items_in_batch=counts[0])
            return sum(float(model(**every[0], num_items_in_batch=step).loss) for _ in range(2))

    assert sum(run_threads(2, replicated, 4 * counts[0])) == pytest.approx(sums[0] / counts[0], rel=1e-5)


def test_attention_is_set_before_a_model_is_made_parallel() -> None:
    model = llama()
    handle = seqpar.parallelize(model, LocalComm())
    model.set_attn_implementation("sdpa")
    with advised(NotImplementedError, "call undo() of the handle, and parallelize the model again after the change"):
        model(**BATCH)
    handle.undo()
    model.set_attn_implementation("sdpa")
    with seqpar.parallelize(model, LocalComm()):
        assert is_right(model)


def _own_loss(model: nn.Module) -> Tensor:
    """The loss of the batch, of the logits that the model returns."""
    logits = model(**{name: x for name, x in BATCH.items() if name != "labels"}).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), BATCH["labels"][:, 1:].flatten())


def test_a_loss_of_the_models_own_is_computed_outside() -> None:
    model = llama()
    model.loss_function = lambda **named: named["logits"].square().mean()
    with seqpar.parallelize(model, LocalComm()):
        with advised(NotImplementedError, "leave them out and compute the loss from what it returns"):
            model(**BATCH)
        assert float(_own_loss(model)) == pytest.approx(LOSS, rel=1e-5)


class Plain(nn.Module):
    """Attention by PyTorch's function over rows [1, T, 8]."""

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)


def test_a_model_of_plain_pytorch_says_sdpa() -> None:
    model, x = Plain(), torch.randn(1, 12, 8)
    expected = model(x)
    with advised(NotImplementedError, "for attention by PyTorch's scaled_dot_product_attention give sdpa=True"):
        seqpar.parallelize(model, LocalComm())
    with seqpar.parallelize(model, LocalComm(), sdpa=True, plan=PLAN):
        assert torch.allclose(model(x), expected, atol=1e-6)


@pytest.mark.parametrize("kind", ["opt", "roberta", "classifier"])
def test_documents_have_rows_of_their_own_where_a_part_of_the_model_reads_rows(kind: str) -> None:
    given = {"opt": ("opt", "dense", "ForCausalLM"), "roberta": ("roberta", "encoder", "ForMaskedLM")}
    name, group, head = given.get(kind, ("llama", "dense", "ForSequenceClassification"))
    model = of_architecture(Architecture(name, group, head=head), torch.float32).eval()
    ids, mask = torch.arange(3, 11)[None], torch.tensor([[1, 1, 1, 2, 2, 2, 2, 2]])
    alone = [model(input_ids=x).logits for x in (ids[:, :3], ids[:, 3:])]

    def rank(comm: Comm) -> bool:
        own, document = copy.deepcopy(model), (ids[:, :3], ids[:, 3:])[comm.rank]
        seqpar.parallelize(own, comm)
        with torch.no_grad():
            with advised(NotImplementedError if comm.rank else ValueError, "give each document a row of its own"):
                own(**({"input_ids": ids, "attention_mask": mask} if comm.rank else {"input_ids": document}))
            return torch.allclose(own(input_ids=document).logits, alone[comm.rank], atol=1e-5)

    assert run_threads(2, rank) == [True, True]


@pytest.mark.exhaustive
def test_a_model_is_made_parallel_before_it_is_compiled() -> None:
    with advised(
        ValueError, "call parallelize(model, comm), with average_over where gradients are averaged, and then {}(model)"
    ):
        seqpar.parallelize(torch.compile(llama(), backend="eager"), LocalComm())
    model = llama()
    with seqpar.parallelize(model, LocalComm()):
        assert is_right(torch.compile(model, backend="eager"))


@pytest.mark.parametrize("way", ["state_dict", "save_pretrained", "undo"])
def test_what_is_saved_is_no_pickle_of_a_parallel_model(way: str, tmp_path: Path) -> None:
    model = llama()
    file = tmp_path / "model.pt"
    handle = seqpar.parallelize(model, LocalComm())
    with advised(NotImplementedError, "save model.state_dict() or call save_pretrained(), or undo() first"):
        torch.save(model, file)
    again = llama()
    for parameter in again.parameters():
        nn.init.zeros_(parameter)
    if way == "state_dict":
        torch.save(model.state_dict(), file)
        again.load_state_dict(torch.load(file))
    elif way == "save_pretrained":
        model.save_pretrained(tmp_path)
        again = transformers.LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    handle.undo()
    if way == "undo":
        torch.save(model, file)
        again = torch.load(file, weights_only=False)
    assert is_right(copy.deepcopy(again))


@pytest.mark.parametrize("bf16", [False, True])
def test_trainer_puts_in_all_kernels_of_liger_but_the_fused_loss(
    bf16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In train(), so no order helps."""

    def lce_forward(self: Any, input_ids: Tensor, labels: Tensor, **_: Any) -> Any:
        rows = self.model(input_ids).last_hidden_state[:, :-1]
        loss = F.cross_entropy(self.lm_head(rows).flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss)

    def apply(model: Any, fused_linear_cross_entropy: bool = True) -> None:
        if fused_linear_cross_entropy:
            model.forward = MethodType(lce_forward, model)

    lce_forward.__module__ = "liger_kernel.transformers.model.llama"
    liger = ModuleType("liger_kernel.transformers")
    liger._apply_liger_kernel_to_instance = apply  # type: ignore[attr-defined]
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, liger)
    monkeypatch.setattr("transformers.integrations.liger.is_liger_kernel_available", lambda: True)

    def trained(parallel: bool = True, **more: Any) -> list[float]:
        model = llama()
        arguments = transformers.TrainingArguments(
            tmp_path, max_steps=2, logging_steps=1, per_device_train_batch_size=1, use_cpu=True, report_to="none",
            save_strategy="no", disable_tqdm=True, bf16=bf16, **more,
        )  # fmt: skip
        data = [{"input_ids": BATCH["input_ids"][0], "labels": BATCH["input_ids"][0]}] * 2
        trainer = transformers.Trainer(model, arguments, train_dataset=data)
        with seqpar.parallelize(model, LocalComm()) if parallel else nullcontext():
            trainer.train()
        return [each["loss"] for each in trainer.state.log_history if "loss" in each]

    expected = trained(parallel=False)
    with advised(
        NotImplementedError,
        "give TrainingArguments liger_kernel_config={'fused_linear_cross_entropy': False} too, as the loss is computed "
        "without logits here",
    ):
        trained(use_liger_kernel=True)
    found = trained(use_liger_kernel=True, liger_kernel_config={"fused_linear_cross_entropy": False})
    assert found == pytest.approx(expected, rel=1e-2 if bf16 else 1e-5)
