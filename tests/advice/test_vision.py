"""What errors about models of images say to do, done."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

import seqpar
from seqpar import Comm, Layout, LocalComm, Mask, Plan
from seqpar.integrations.hf.towers import Towers
from seqpar.testing import run_threads
from tests.advice.remedies import advised
from tests.ecosystem.architectures import IMAGES, MORE_IMAGES, TABLE, build, class_of, config_of
from tests.ecosystem.images import brought, one_process, padded


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


def test_a_tower_without_a_function_for_its_features(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Towers, "_features", lambda self, kind: None)  # as of a model that has no such method
    model = build(IMAGES["llava"], dtype=torch.float32).eval()
    with_image = padded("llava", brought("llava", 1, torch.float32)[0])
    text = {name: x[:1, :2] for name, x in with_image.items() if name != "pixel_values"}

    def rank(comm: Comm, batches: list[dict[str, Any]], frozen: bool) -> float:
        own = copy.deepcopy(model)
        if frozen:
            own.requires_grad_(False)
            own.model.language_model.requires_grad_(True)
        with seqpar.parallelize(own, comm):
            return float(own(**batches[comm.rank]).loss)

    with advised(
        (NotImplementedError, ValueError), "bring {} on every rank, or freeze all parameters outside the text model"
    ):
        run_threads(2, rank, [text, with_image], False)
    expected = float(model(**with_image).loss)
    assert run_threads(2, rank, [with_image, with_image], False) == pytest.approx([expected] * 2, rel=1e-4)
    one, two = run_threads(2, rank, [text, with_image], True)
    assert one == two and abs(one - expected) < abs(float(model(**text).loss) - expected)


def test_ranks_freeze_alike_and_leave_gradients_out_alike() -> None:
    model = build(IMAGES["llava"], dtype=torch.float32).eval()
    with_image = padded("llava", brought("llava", 1, torch.float32)[0])
    text = {name: x[:1, :2] for name, x in with_image.items() if name != "pixel_values"}

    def rank(comm: Comm, frozen: int, without: int) -> float:
        own = copy.deepcopy(model)
        if comm.rank < frozen:
            own.requires_grad_(False)
            own.model.language_model.requires_grad_(True)
        with seqpar.parallelize(own, comm), torch.set_grad_enabled(comm.rank >= without):
            return float(own(**[text, with_image][comm.rank]).loss)

    for differing in ((1, 0), (0, 1)):
        with advised(ValueError, "freeze the same parameters on all ranks, and use torch.no_grad on all or none"):
            run_threads(2, rank, *differing)
    assert len({loss for alike in ((0, 0), (2, 0), (2, 2)) for loss in run_threads(2, rank, *alike)}) == 1


def test_router_logits_are_not_asked_for_by_the_config() -> None:
    kind = "qwen3_vl_moe"
    model = build(MORE_IMAGES[kind], dtype=torch.float32).eval()
    batch = padded(kind, brought(kind, 1, torch.float32)[0])
    expected = float(model(**batch).loss)
    model.config.text_config.output_router_logits = True
    with seqpar.parallelize(model, LocalComm()):
        with advised(NotImplementedError, "set it to False in the config of its text model"):
            model(**batch)
        model.config.text_config.output_router_logits = False
        assert float(model(**batch).loss) == pytest.approx(expected, rel=1e-5)


class Handing(transformers.Gemma3Model):
    """Hands its text model something of its own beside images."""

    def forward(self, *args: Any, **named: Any) -> Any:
        own = {"vision_mask": torch.ones(1)} if named.get("pixel_values") is not None else {}
        return super().forward(*args, **named, **own)


def test_a_layer_whose_mask_the_whole_model_does_not_make_and_arguments_of_ones_own() -> None:
    """Its text model reads a window from another config than the whole model; then it is handed what is not known."""
    kind = "gemma3"
    model = build(IMAGES[kind], dtype=torch.float32).eval()
    every = [padded(kind, own) for own in brought(kind, 2, torch.float32)]

    model.model.language_model.config = copy.deepcopy(model.config.text_config)
    model.model.language_model.config.sliding_window = 3

    def rank(comm: Comm) -> float:
        own = copy.deepcopy(model)
        with seqpar.parallelize(own, comm):
            return float(own(**every[comm.rank]).loss)

    with advised(NotImplementedError, "train it with data parallelism, whole sequences on each rank"):
        run_threads(2, rank)
    model.model.__class__, model.model.language_model.config = Handing, model.config.text_config
    with advised((NotImplementedError, ValueError), "train it with data parallelism, whole sequences on each rank"):
        run_threads(2, rank)
    counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in every]
    found = run_threads(2, lambda comm: float(copy.deepcopy(model)(**every[comm.rank]).loss))
    expected = float(one_process(kind, model, sum(brought(kind, 2, torch.float32), [])))
    assert sum(n * loss for n, loss in zip(counts, found)) / sum(counts) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", ["prefix", "causal", "text alone"])
def test_layers_that_see_ahead_get_the_types_of_tokens_or_are_causal(kind: str) -> None:
    """Of PaliGemma; and of Gemma, which takes no types."""
    ids = torch.arange(1, 25).view(2, 12)
    batch = {"input_ids": ids, "labels": ids}
    row = TABLE["gemma" if kind == "text alone" else "paligemma"]
    config = config_of(row)
    config.get_text_config().use_bidirectional_attention = True
    causal = copy.deepcopy(config)
    causal.get_text_config().use_bidirectional_attention = False
    unsure, sure = (_drawn(class_of(row)(each)) for each in (config, config if kind == "prefix" else causal))
    given = batch | ({"token_type_ids": (torch.arange(12) > 4).long().expand(2, -1)} if kind == "prefix" else {})
    expected = float(sure(**given).loss)

    def rank(comm: Comm) -> float:
        own = copy.deepcopy(unsure)
        with (
            advised(
                NotImplementedError,
                "give token_type_ids, 0 for tokens that see each other and 1 for others, or load it with "
                "use_bidirectional_attention=False in the config of its text model",
            ),
            seqpar.parallelize(own, comm),
        ):
            own(**{name: x[comm.rank :: 2] for name, x in batch.items()})
        with seqpar.parallelize(own := copy.deepcopy(sure), comm):
            return float(own(**{name: x[comm.rank :: 2] for name, x in given.items()}).loss)

    assert run_threads(2, rank) == pytest.approx([expected] * 2, rel=1e-5)


def _drawn(model: Any) -> Any:
    """The model with weights at which attention matters, the same each time."""
    g = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=g)
    return model
