"""What errors about models of images say to do, done."""

from __future__ import annotations

import torch

import seqpar
from seqpar import Layout, LocalComm, Mask, Plan
from tests.advice.remedies import advised
from tests.ecosystem.architectures import IMAGES, build
from tests.ecosystem.images import brought, padded


def test_arguments_and_masks_that_ranks_cannot_share() -> None:
    model = build(IMAGES["gemma3"], dtype=torch.float32).eval()
    batch = padded("gemma3", brought("gemma3", 1, torch.float32)[0])
    labels = batch.pop("labels")
    expected = model(**batch, use_cache=False).logits
    mask, keep = batch["attention_mask"], batch["attention_mask"].bool()
    own = {"full_attention": mask[:, None, None], "sliding_attention": mask[:, None, None]}
    with seqpar.parallelize(model, LocalComm()) as handle:
        with advised(
            NotImplementedError, "leave it out, or run the model on one rank, inside parallelize(...).local()"
        ):
            model(**batch, logits_to_keep=1)
        assert torch.allclose(model(**batch).logits[keep], expected[keep], atol=1e-4)
        with handle.local():
            assert torch.allclose(model(**batch, logits_to_keep=1).logits, expected[:, -1:], atol=1e-4)
        with advised(NotImplementedError, "give a mask [B, S] of 0 and 1"):
            model(**batch | {"attention_mask": own})
        assert torch.allclose(model(**batch).logits[keep], expected[keep], atol=1e-4)
    assert model(**batch, labels=labels).loss.isfinite()


def test_blocks_of_images_in_rows_of_ones_own() -> None:
    model = build(IMAGES["gemma3"], "seqpar", torch.float32).eval()
    batch = padded("gemma3", brought("gemma3", 1, torch.float32)[0][:1])
    del (
        batch["labels"],
        batch["attention_mask"],
        batch["pixel_values"],
    )  # the tokens of images see each other all the same
    tokens = batch["input_ids"].shape[1]
    plan = Plan(Mask([tokens]), Layout.contiguous(tokens, 1))
    with (
        advised(
            NotImplementedError,
            "give the whole model to seqpar.parallelize(model, comm), and ordinary batches with token_type_ids",
        ),
        seqpar.parallel(plan, LocalComm()),
    ):
        model(**batch, position_ids=torch.arange(tokens)[None])
    whole = build(IMAGES["gemma3"], dtype=torch.float32).eval()
    expected = whole(**batch, use_cache=False).logits
    with seqpar.parallelize(whole, LocalComm()):
        assert torch.allclose(whole(**batch).logits, expected, atol=1e-4)
