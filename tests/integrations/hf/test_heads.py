"""Heads that pool: classifiers of sequences, reward models and poolers, beside one process with all ranks' batches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import BertConfig, BertForNextSentencePrediction

import seqpar
from seqpar import Comm, LocalComm
from seqpar.testing import run_processes, run_threads
from tests.ecosystem.architectures import Architecture
from tests.ecosystem.ways import islands, union
from tests.integrations.hf.hybrids import contiguous, gradients
from tests.integrations.hf.models import batches
from tests.integrations.hf.unions import agree, build, check, one
from tests.ranks import errors_on_copies

HEAD = "ForSequenceClassification"
SINGLE, REWARD = {"num_labels": 3}, {"num_labels": 1}
SEVERAL = {"num_labels": 3, "problem_type": "multi_label_classification"}
DROPOUTS: dict[str, dict[str, Any]] = {
    "distilbert": {"seq_classif_dropout": 0.0}, "albert": {"classifier_dropout_prob": 0.0},
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SINGLE),
    "llama reward": ("llama", REWARD),
    "qwen3": ("qwen3", SINGLE),
    "qwen3 reward": ("qwen3", REWARD),
    "modernbert reward": ("modernbert", REWARD),
    "modernbert cls": ("modernbert", SINGLE | {"classifier_pooling": "cls"}),
    "modernbert mean": ("modernbert", SEVERAL | {"classifier_pooling": "mean"}),
    "bert": ("bert", SINGLE),
    "albert": ("albert", SINGLE),
}  # fmt: skip
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    f"{kind} {name}": (kind, config)
    for kind in ("qwen2", "mistral", "gemma3_text", "gpt2", "opt", "mixtral", "roberta", "distilbert", "electra",
                 "nomic_bert", "phi3")
    for name, config in (("single", SINGLE), ("reward", REWARD))
}  # fmt: skip


def model_of(family: tuple[str, dict[str, Any]], dtype: torch.dtype = torch.float64) -> Any:
    kind, config = family
    return build(Architecture(kind, "encoder", config | DROPOUTS.get(kind, {}), head=HEAD), dtype)


def labelled(every: list[dict[str, Tensor]], config: dict[str, Any], dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """The batches with a label for each row; of single ones the last does not count."""
    found = []
    for rank, batch in enumerate(every):
        rows = torch.arange(len(batch["input_ids"]) if "attention_mask" in batch else 1) + rank
        if config.get("problem_type"):
            labels = ((rows[:, None] + torch.arange(3)) % 2).to(dtype)
        else:
            labels = (rows % 3) if config["num_labels"] > 1 else (rows * 0.3).to(dtype)
        if config is SINGLE and len(rows) > 1:
            labels[-1] = -100
        found.append(batch | {"labels": labels})
    return found


def compare(
    family: tuple[str, dict[str, Any]], kind: str, ranks: int, dtype: torch.dtype = torch.float64, **more: Any
) -> None:
    every = labelled(batches(kind, ranks), family[1], dtype)
    agree(model_of(family, dtype), every, 1e-9 if dtype is torch.float64 else 2e-5, **more)


@pytest.mark.parametrize("name", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MORE)])
@pytest.mark.sampled(5)
def test_a_head_on_ranks_is_the_head_of_one_process(name: str) -> None:
    compare((FAMILIES | MORE)[name], "right", 2)
    compare((FAMILIES | MORE)[name], "right", 3, torch.float32)


def test_padding_on_the_left_and_checkpoints() -> None:
    """A decoder's head looks for the last token; the first one is padding."""
    compare(FAMILIES["llama"], "left", 2)
    compare(FAMILIES["qwen3 reward"], "left", 2, torch.float32, checkpoints=True)


def test_steps_add_up_and_wrappers_average() -> None:
    """Two batches before a step; average_over; and a caller that counts items, whom this loss does not hear."""
    family = FAMILIES["llama"]
    model = model_of(family)
    steps = [labelled(batches(kind, 2), SINGLE, torch.float64) for kind in ("right", "long")]
    wholes = [one(model, every, torch.float64) for every in steps]
    grads = {name: sum(whole[1][name] for whole in wholes) for name in wholes[0][1]}

    def rank(comm: Comm, options: dict[str, Any], more: dict[str, Any], divisor: int) -> Any:
        own = copy.deepcopy(model)
        with islands(torch.float64), seqpar.parallelize(own, comm, plan=contiguous, **options):
            losses = [own(**every[comm.rank], **more).loss for every in steps]
            sum(losses).backward()
        return [float(x) for x in losses], {name: x / divisor for name, x in gradients(own).items()}

    for options, more, divisor in (({}, {}, 1), ({"average_over": 2}, {}, 2), ({}, {"num_items_in_batch": 12}, 1)):
        found = run_threads(2, rank, options, more, divisor)
        for step, whole in enumerate(wholes):
            losses = [each[0][step] for each in found]
            assert (sum(losses) if more else losses[0]) == pytest.approx(whole[0], rel=1e-9)
            assert more or losses[0] == losses[1]
        check([(0.0, each) for _, each in found], (0.0, grads), 1e-9)


def test_items_of_one_rank_alone_are_refused() -> None:
    """The loss does not hear of them, and who counts them scales it for wrappers."""
    model = model_of(FAMILIES["llama"], torch.float32)
    every = labelled(batches("right", 2), SINGLE, torch.float32)

    def rank(comm: Comm) -> tuple[float, float]:
        own, batch = copy.deepcopy(model), every[comm.rank]
        with seqpar.parallelize(own, comm):
            with pytest.raises(ValueError, match="num_items_in_batch is 2, but the batches of all ranks have 4 labels"):
                own(**batch, num_items_in_batch=torch.tensor(2))
            with pytest.raises(ValueError, match=r"num_items_in_batch \(of all ranks, as Trainer counts with aver"):
                own(**batch, num_items_in_batch=torch.tensor(12 + comm.rank))
            return float(own(**batch).loss.detach()), float(own(**batch, num_items_in_batch=4).loss.detach())

    (loss, one), (_, other) = run_threads(2, rank)
    assert one + other == pytest.approx(loss, rel=1e-6)


def in_a_part_of_the_ranks(comm: Comm) -> None:
    mesh = init_device_mesh("cpu", (comm.size, 1), mesh_dim_names=("dp", "sp"))
    model = model_of(FAMILIES["llama"], torch.float32)
    batch = labelled(batches("right", 1), SINGLE, torch.float32)[0]
    with seqpar.parallelize(model, seqpar.GroupComm(mesh["sp"])):
        with pytest.raises(
            NotImplementedError, match="multiplies the loss by the 2 ranks that hold data, and .* has 1"
        ):
            model(**batch, num_items_in_batch=3)
        model._tp_size = 2  # the ranks hold the same data
        model(**batch, num_items_in_batch=3)


def test_items_of_more_ranks_than_the_comms_are_refused() -> None:
    run_processes(2, in_a_part_of_the_ranks)


def test_ranks_without_rows_or_labels_that_count() -> None:
    model, every = model_of(FAMILIES["llama"]), labelled(batches("right", 3), SINGLE, torch.float64)
    every[1] = {name: x[:0] for name, x in every[1].items()}
    every[2]["labels"][:] = -100
    agree(model, every)


def test_rewards_come_home() -> None:
    """As reward models are used, and trained by losses of their own."""
    model, every = model_of(FAMILIES["qwen3 reward"], torch.float32).eval(), batches("left", 2)
    model.config.output_hidden_states = True
    given = [{name: x for name, x in batch.items() if name != "labels"} for batch in every]

    def rank(comm: Comm) -> Tensor:
        own = copy.deepcopy(model)
        with seqpar.parallelize(own, comm, plan=contiguous), torch.no_grad():
            assert isinstance(own(**given[comm.rank], return_dict=False), tuple)
            return own(**given[comm.rank], margin=torch.ones(2)).logits  # TRL's column, which no model reads

    for rewards, batch in zip(run_threads(2, rank), given, strict=True):
        with torch.no_grad():
            torch.testing.assert_close(rewards, model(**batch).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta", "albert"])
def test_poolers_read_the_first_row_at_home(kind: str) -> None:
    model = build(Architecture(kind, "encoder", head="Model"))
    every = [{name: x for name, x in batch.items() if name != "labels"} for batch in batches("right", 2)]
    start = 1 if kind == "xlm-roberta" else 0
    for batch in every:
        batch["position_ids"] = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"]) + start

    def loss(out: Any) -> Tensor:
        return (out.pooler_output * torch.linspace(-1, 1, 32)).sum() + out.pooler_output.square().sum()

    def rank(comm: Comm) -> Any:
        own = copy.deepcopy(model)
        with islands(torch.float64), seqpar.parallelize(own, comm, plan=contiguous):
            own_loss = loss(own(**every[comm.rank]))
            own_loss.backward()
        return float(own_loss), gradients(own)

    whole = copy.deepcopy(model)
    with islands(torch.float64):
        expected = loss(whole(**union(every)))
        expected.backward()
    found = run_threads(2, rank)
    total = sum(own for own, _ in found)
    check([(total, grads) for _, grads in found], (float(expected), gradients(whole)), 1e-9)


REFUSED: dict[str, tuple[str, dict[str, Any], type[Exception], str]] = {
    "cls of padding": ("modernbert cls", {}, NotImplementedError, "the first token of a row, which is padding"),
    "a pooler of padding": ("bert", {}, NotImplementedError, "the first token of a row, which is padding"),
    "other padding": ("llama", {"input_ids": torch.full((3, 12), 7)}, NotImplementedError, "last token that is not 0"),
    "a label of nothing": ("llama", {"attention_mask": torch.zeros(3, 12)}, ValueError, "mask is 0 everywhere"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_batches_are_refused_on_every_rank(name: str) -> None:
    family, more, kind, message = REFUSED[name]
    model = model_of(FAMILIES[family], torch.float32)
    batch = labelled(batches("left", 1), SINGLE, torch.float32)[0]
    if more:
        batch["attention_mask"] = batch["attention_mask"].flip(1)

    every = [batch | each for each in ({"attention_mask": torch.ones(3, 12)}, more)]
    first, second = errors_on_copies(model, lambda own, comm: own(**every[comm.rank]))
    assert second.startswith(kind.__name__) and message in second and "rank 1" in first, (first, second)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "opt"])
def test_embeddings_padded_on_the_right_are_refused_on_every_rank(kind: str) -> None:
    model = model_of((kind, SINGLE), torch.float32)
    embeds, mask = torch.randn(3, 6, 32), (torch.arange(6) < torch.tensor([[6], [4], [6]])).long()

    masks = torch.ones_like(mask), mask
    for said in errors_on_copies(model, lambda own, comm: own(inputs_embeds=embeds, attention_mask=masks[comm.rank])):
        assert "the last place of a row of inputs_embeds, which is padding" in said


@pytest.mark.parametrize("kind", ["llama", "bert", "modernbert mean"])
def test_embeddings_are_padded_where_a_head_does_not_read(kind: str) -> None:
    """On the left of a last token, and on the right of the first one or of a mean over the tokens."""
    model = model_of(FAMILIES[kind]).eval()
    every = batches("left" if kind == "llama" else "right", 2)
    given = [{"inputs_embeds": model.get_input_embeddings()(batch["input_ids"]).detach(),
              "attention_mask": batch["attention_mask"]} for batch in every]  # fmt: skip

    def rank(comm: Comm) -> Tensor:
        own = copy.deepcopy(model)
        with islands(torch.float64), torch.no_grad(), seqpar.parallelize(own, comm, plan=contiguous):
            return own(**given[comm.rank]).logits

    for logits, batch in zip(run_threads(2, rank), given, strict=True):
        with islands(torch.float64), torch.no_grad():
            torch.testing.assert_close(logits, model(**batch).logits, rtol=1e-9, atol=1e-9)


def test_a_loss_over_pairs_of_rows_is_left_to_its_owner() -> None:
    model = model_of(FAMILIES["qwen3 reward"], torch.float32)
    model.loss_function = lambda **named: named["pooled_logits"].std()
    batch = labelled(batches("right", 1), REWARD, torch.float32)[0]
    with seqpar.parallelize(model, LocalComm()):
        with pytest.raises(NotImplementedError, match="labels for Qwen3.*: its loss is not a mean over the rows"):
            model(**batch)
        batch.pop("labels")
        assert model(**batch).logits.shape == (3, 1)


def test_a_head_that_takes_labels_of_one_kind_alone() -> None:
    """The next sentence: its loss raises an error for labels of several classes, on one process too."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = BertConfig(**sizes, num_attention_heads=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = BertForNextSentencePrediction(config).double()
    every = labelled(batches("right", 2), {"num_labels": 2}, torch.float64)
    for batch in every:
        batch["labels"] %= 2
    agree(model, every)
    config.num_labels = 1
    says = "its loss is not one of single_label_classification, regression, multi_label_classification, which failed"
    with seqpar.parallelize(model, LocalComm()), pytest.raises(NotImplementedError, match=says):
        model(**every[0])


def test_a_loss_that_is_a_sum_with_a_count_is_a_mean_without() -> None:
    family = ("zamba2", SINGLE)
    compare(family, "right", 2)
    model, batch = model_of(family, torch.float32), labelled(batches("right", 1), SINGLE, torch.float32)[0]
    with seqpar.parallelize(model, LocalComm()):
        with pytest.raises(NotImplementedError, match="num_items_in_batch for Zamba2.*not a mean over rows then"):
            model(**batch, num_items_in_batch=3)
        assert model(**batch).loss.isfinite()
