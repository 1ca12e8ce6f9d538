"""What errors say to do for heads that pool, routers and rotary embeddings of the longest position, done."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import seqpar
from seqpar import Comm, LocalComm
from seqpar.testing import run_processes, run_threads
from seqpar.train import token_mean
from tests.advice.remedies import advised

transformers = pytest.importorskip("transformers")

from tests.ecosystem.architectures import DYNAMIC, Architecture  # noqa: E402
from tests.ecosystem.ways import union  # noqa: E402
from tests.integrations.hf.hybrids import contiguous  # noqa: E402
from tests.integrations.hf.models import batches, padded  # noqa: E402
from tests.integrations.hf.unions import build  # noqa: E402

BATCH = padded(torch.Generator().manual_seed(1), [9, 5], left=True) | {"labels": torch.tensor([2, 0])}
FLIPPED = {name: x.flip(1) if x.dim() > 1 else x for name, x in BATCH.items()}  # padding on the right


def head(kind: str, **config: Any) -> transformers.PreTrainedModel:
    """A classifier of sequences, in three classes."""
    row = Architecture(kind, "encoder", {"num_labels": 3} | config, head="ForSequenceClassification")
    return build(row, torch.float32)


def is_right(model: torch.nn.Module, batch: dict[str, Tensor]) -> bool:
    """Whether the loss is that of one process; inside the model's block."""
    own = copy.deepcopy(KEPT[id(model)])
    return float(model(**batch).loss) == pytest.approx(float(own(**batch).loss), rel=1e-5)


KEPT: dict[int, torch.nn.Module] = {}


def made(kind: str, **config: Any) -> transformers.PreTrainedModel:
    """A classifier, of which a copy is kept as it was."""
    model = head(kind, **config)
    KEPT[id(model)] = copy.deepcopy(model)
    return model


def test_rows_are_padded_on_the_right_for_a_head_that_reads_the_first_token() -> None:
    model = made("modernbert", classifier_pooling="cls")
    with seqpar.parallelize(model, LocalComm()):
        with advised(NotImplementedError, "pad on the right"):
            model(**BATCH)
        assert is_right(model, FLIPPED)


def test_masked_tokens_are_the_padding_token_for_a_head_that_looks_for_it() -> None:
    model = made("llama")
    with seqpar.parallelize(model, LocalComm()):
        with advised(NotImplementedError, "set input_ids to the padding token where attention_mask is 0"):
            model(**FLIPPED | {"input_ids": FLIPPED["input_ids"].masked_fill(FLIPPED["attention_mask"] == 0, 7)})
        assert is_right(model, FLIPPED)


def embedded(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A batch with embeddings in place of its tokens."""
    rows = model.get_input_embeddings()(batch["input_ids"]).detach()
    return {name: x for name, x in batch.items() if name != "input_ids"} | {"inputs_embeds": rows}


def test_embeddings_are_padded_on_the_left_for_a_head_that_reads_the_last_place() -> None:
    model = made("llama")
    right, left = embedded(model, FLIPPED), embedded(model, BATCH)
    with seqpar.parallelize(model, LocalComm()):
        with advised(NotImplementedError, "pad on the left, or give input_ids"):
            model(**right)
        assert is_right(model, left) and is_right(model, FLIPPED)


def test_a_head_that_reads_the_last_token_gets_a_padding_token() -> None:
    model = made("llama", pad_token_id=None)
    with advised(NotImplementedError, "set pad_token_id in its config"):
        seqpar.parallelize(model, LocalComm())
    model.config.pad_token_id = KEPT[id(model)].config.pad_token_id = 0
    with seqpar.parallelize(model, LocalComm()):
        assert is_right(model, FLIPPED)
        model.config.pad_token_id = None
        with advised(NotImplementedError, "set pad_token_id in its config"):
            model(**FLIPPED)
        model.config.pad_token_id = 0
        assert is_right(model, FLIPPED)


def test_a_number_of_items_is_left_out_where_a_head_divides_by_it() -> None:
    model = made("zamba2")
    with seqpar.parallelize(model, LocalComm()):
        with advised(NotImplementedError, "leave it out"):
            model(**FLIPPED, num_items_in_batch=2)
        assert is_right(model, FLIPPED)


def in_a_comm_of_all(comm: Comm) -> bool:
    model, batch = made("llama"), {name: x[comm.rank : comm.rank + 1] for name, x in FLIPPED.items()}
    seqpar.parallelize(
        model, alone := seqpar.GroupComm(init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "sp"))["sp"])
    )
    with advised(NotImplementedError, "give parallelize a comm of all ranks that hold data"):
        model(**batch, num_items_in_batch=2)
    assert alone.size == 1
    with seqpar.parallelize(made("llama"), comm) as handle:
        parts = comm.gather("losses", float(handle.model(**batch, num_items_in_batch=2).loss.detach()))
    return sum(parts) == pytest.approx(float(made("llama")(**FLIPPED).loss), rel=1e-4)


def test_items_are_counted_by_ranks_of_one_comm() -> None:
    found = run_processes(2, in_a_comm_of_all)
    assert found == [True, True]


def test_items_of_a_step_are_counted_over_all_its_batches() -> None:
    model, items = made("llama"), torch.tensor(3)
    with seqpar.parallelize(model, LocalComm()):
        model(**FLIPPED, num_items_in_batch=items)
        with advised(UserWarning, "count those of all ranks, as Trainer does with average_tokens_across_devices=True"):
            model(**FLIPPED, num_items_in_batch=items)
        assert is_right(model, FLIPPED)


def test_rows_without_a_token_have_no_label() -> None:
    model = made("llama")
    with seqpar.parallelize(model, LocalComm()):
        with advised(ValueError, "leave such rows out"):
            model(**BATCH | {"attention_mask": BATCH["attention_mask"] * torch.tensor([[1], [0]])})
        assert is_right(model, {name: x[:1] for name, x in BATCH.items()})


def test_a_loss_over_pairs_is_computed_outside() -> None:
    model = head("qwen3", num_labels=1)
    model.loss_function = lambda **named: named["pooled_logits"].std()
    with torch.no_grad():
        expected = float(model(**BATCH).loss)
    with seqpar.parallelize(model, LocalComm()), torch.no_grad():
        with advised(NotImplementedError, "leave them out and compute the loss from what it returns"):
            model(**BATCH)
        rewards = model(input_ids=BATCH["input_ids"], attention_mask=BATCH["attention_mask"]).logits
    assert float(rewards.std()) == pytest.approx(expected, rel=1e-5)


def test_a_loss_of_something_else_than_labels_is_computed_outside() -> None:
    kept = head("llama")
    forward = type(kept).forward

    def distilled(self: Any, *args: Any, target: Tensor | None = None, **named: Any) -> Any:
        out = forward(self, *args, **named)
        if target is not None:
            out.loss = F.mse_loss(out.logits, target)
        return out

    kept.__class__ = type("Distilled", (type(kept),), {"forward": distilled})
    batch = {name: x for name, x in BATCH.items() if name != "labels"} | {"target": torch.ones(2, 3)}
    with torch.no_grad():
        expected = float(kept(**batch).loss)
        with seqpar.parallelize(kept, LocalComm()):
            with advised(
                NotImplementedError,
                "leave out what it was computed from, and compute the loss from what the model returns",
            ):
                kept(**batch)
            target = batch.pop("target")
            assert float(F.mse_loss(kept(**batch).logits, target)) == pytest.approx(expected, rel=1e-5)


def test_another_balance_loss_is_computed_from_means_over_all_tokens() -> None:
    model = build(Architecture("mixtral", "experts"), torch.float32)
    forward = type(model).forward

    def squared(self: Any, *args: Any, **named: Any) -> Any:
        out = forward(self, *args, **named)
        if out.aux_loss is not None:
            out.aux_loss = out.aux_loss**2
        return out

    every = batches("right", 2)
    with torch.no_grad():
        routers = model.model(**{n: x for n, x in union(every).items() if n != "labels"}, output_router_logits=True)
        keep = union(every)["attention_mask"].bool().reshape(-1)
        means = [x.softmax(-1)[keep].mean(0) for x in routers.router_logits]
    model.__class__ = type("Squared", (type(model),), {"forward": squared})

    def rank(comm: Comm) -> float:
        own, batch = copy.deepcopy(model), every[comm.rank]
        with seqpar.parallelize(own, comm, plan=contiguous), torch.no_grad():
            with advised(
                NotImplementedError,
                "set it to False, and compute a balance loss from means over all ranks' tokens "
                "(seqpar.train.token_mean)",
            ):
                own(**batch, output_router_logits=True)
            assert own(**batch, output_router_logits=False).loss.isfinite()
            hidden = own.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
            assert hidden.last_hidden_state.isfinite().all()
        keep = batch["attention_mask"].bool().reshape(-1)
        with torch.no_grad():
            logits = model.model(
                input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], output_router_logits=True
            ).router_logits
        return max(
            float((token_mean(x.softmax(-1), comm, keep=keep) - mean).abs().max())
            for x, mean in zip(logits, means, strict=True)
        )

    assert max(run_threads(2, rank)) < 1e-6


def test_layers_are_checkpointed_and_not_the_rotary_embedding() -> None:
    row = Architecture("llama", "dense", {"rope_parameters": DYNAMIC, "max_position_embeddings": 8})
    model, batch = build(row, torch.float32), batches("right", 1)[0]
    expected = float(model(**batch).loss)
    with seqpar.parallelize(model, LocalComm()):
        with advised(RuntimeError, "checkpoint the layers, which get its angles"):
            model.model.rotary_emb(torch.randn(1, 5, 32), torch.arange(5)[None])
        model.gradient_checkpointing_enable({"use_reentrant": False})
        loss = model(**batch).loss
        loss.backward()
        assert float(loss) == pytest.approx(expected, rel=1e-5)
