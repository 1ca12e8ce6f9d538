"""What errors of hybrid and recurrent models say to do, done: losses are those of each document alone."""

from __future__ import annotations

import pytest
import torch

import seqpar
from seqpar import Layout, LocalComm, Mask, Plan
from tests.advice.remedies import advised

pytest.importorskip("transformers")

from seqpar.integrations.hf.recurrent.mixers import mixers  # noqa: E402
from tests.integrations.hf.hybrids import alone, build  # noqa: E402
from tests.integrations.hf.models import holes, packed, padded  # noqa: E402

PLAN = Plan(Mask([12]), Layout.contiguous(12, 1))


def test_tokens_between_others_are_left_out_of_the_batch() -> None:
    model, batch = build("mamba2"), holes(torch.Generator().manual_seed(0), 17)
    keep = batch["attention_mask"].bool()
    without = {name: x[keep][None] for name, x in batch.items()}
    with seqpar.parallelize(model, LocalComm()):
        with advised(NotImplementedError, "leave them out of the batch"):
            model(**batch)
        loss = float(model(**without).loss.detach())
    assert loss == pytest.approx(alone(model, [without])[0], rel=1e-5)


def test_rows_of_recurrent_gemma_are_padded_on_the_right_and_numbered_from_0() -> None:
    model, left = build("recurrent_gemma"), padded(torch.Generator().manual_seed(0), [9, 5], left=True)
    right = {name: torch.stack([x[0], x[1].roll(5)]) for name, x in left.items()}
    numbered = right | {"position_ids": torch.arange(9).expand(2, -1)}
    expected = float(model(**right, use_cache=False).loss.detach())
    with seqpar.parallelize(model, LocalComm()):
        for wrong in (left, right | {"position_ids": numbered["position_ids"] + 1}):
            with advised(NotImplementedError, "pad on the right, and number the tokens of each document from 0"):
                model(**wrong)
        for batch in (right, numbered):
            assert float(model(**batch).loss.detach()) == pytest.approx(expected, rel=1e-5)


def test_documents_that_are_numbered_have_positions_too() -> None:
    model, batch = build("mamba2"), packed(torch.Generator().manual_seed(0), [9, 5])
    numbers = torch.tensor([[0] * 9 + [1] * 5])
    with seqpar.parallelize(model, LocalComm()):
        with advised(NotImplementedError, "give position_ids that start anew with each document, or cu_seq_lens_q too"):
            model(input_ids=batch["input_ids"], labels=batch["labels"], seq_idx=numbers)
        loss = float(model(**batch, seq_idx=numbers).loss.detach())
    assert loss == pytest.approx(alone(model, [batch])[0], rel=1e-5)


def test_a_mixer_is_called_by_its_model_or_locally() -> None:
    model, batch, x = build("mamba2"), packed(torch.Generator().manual_seed(0), [9, 5]), torch.randn(1, 7, 32)
    mixer = mixers(model)[0]
    expected = mixer(x)
    with seqpar.parallelize(model, LocalComm()) as handle:
        with advised(
            RuntimeError, "call the model that was given to seqpar.parallelize, or work inside handle.local()"
        ):
            mixer(x)
        loss = float(model(**batch).loss.detach())
        with handle.local():
            assert torch.equal(mixer(x), expected)
    assert loss == pytest.approx(alone(model, [batch])[0], rel=1e-5)


def test_a_registered_hybrid_is_made_parallel() -> None:
    model, batch = build("qwen3_next"), packed(torch.Generator().manual_seed(0), [12])
    model.set_attn_implementation("seqpar")
    with (
        advised(
            NotImplementedError,
            "give the model to seqpar.parallelize, which knows some such layers",
        ),
        seqpar.parallel(PLAN, LocalComm()),
    ):
        model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
    with seqpar.parallelize(model, LocalComm()):
        loss = float(model(**batch).loss.detach())
    model.set_attn_implementation("eager")
    assert loss == pytest.approx(alone(model, [batch])[0], rel=1e-5)
