"""Models of images and text: their towers see what a rank brings, and the rows of their text model are shared."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

import seqpar
from seqpar import Comm, LocalComm, Mask
from seqpar.integrations.hf.mask import Blocks, MaskSummary, Rule, united
from seqpar.testing import run_processes, run_threads
from tests.ecosystem.architectures import IMAGES, MORE_IMAGES, build
from tests.ecosystem.images import LIKE, SEVERAL, Document, Tokens, one_process, packed, padded, pooled_of, tokens_of
from tests.ecosystem.ways import Outcome, assert_close, cut, islands, outcome
from tests.integrations.hf.models import drawn
from tests.ranks import errors_on_copies, in_wrapper, whole_gradients

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}
ROUGH = ("qwen3_5",)  # round more than that by themselves

EVERY = IMAGES | MORE_IMAGES
TEXT: list[Document] = [[9], [5]]
SOME: list[Document] = [[3, "image", 5], [2, "wide", 4, "image", 3], [6]]
FILM: list[Document] = [[3, "video", 4, "image", 2], [4]]
SPREADS = ("one", "all", "none", "video")
FORMS = ("right", "left", "packed")


def bring(kind: str, spread: str, ranks: int, dtype: torch.dtype) -> list[list[Tokens]]:
    """The documents of every rank: images on the last one alone, on all, on none, or video on the first."""
    g = torch.Generator().manual_seed(3)
    every: list[list[Document]] = [TEXT] * ranks
    if spread == "all":
        every = [SOME] * ranks
    elif spread == "one":
        every = [*every[1:], SOME]
    elif spread == "video":
        every = [FILM, *every[1:]]
    sizes = LIKE.get(kind, kind) in SEVERAL
    return [
        [tokens_of(kind, [x if sizes or x != "wide" else "image" for x in each], g, dtype) for each in own]
        for own in every
    ]


def batch_of(kind: str, form: str, documents: list[Tokens], model: nn.Module) -> dict[str, Tensor]:
    """A rank's batch: padded on a side, or packed in one row."""
    if form == "packed":
        return packed(kind, documents, model)
    return padded(kind, documents, left=form == "left")


def compare(
    found: list[Outcome], one: Outcome, dtype: torch.dtype, truth: Callable[[], dict[str, Tensor]] | None = None
) -> None:
    """The loss on every rank, and the sum of gradients, are those of one process; ranks have the same gradients.

    truth: makes the gradients in fp64, see `assert_close`.
    """
    most = max(float(grad.abs().max()) for grad in one.grads.values())
    for each in found:
        assert abs(each.loss - one.loss) <= TOLERANCE[dtype] * abs(one.loss)
        assert each.grads.keys() == one.grads.keys()
    for name, whole in one.grads.items():
        total = torch.stack([each.grads[name] for each in found]).sum(0)
        assert_close(total, whole, TOLERANCE[dtype], most, name, truth)


def trained(kind: str, spread: str, form: str, ranks: int, dtype: torch.dtype = torch.float64, **options: Any) -> None:
    """A step on ranks beside one process."""
    every = bring(kind, spread, ranks, dtype)
    with islands(dtype):
        model = build(EVERY[kind], dtype=dtype)

    def rank(comm: Comm) -> Outcome:
        with islands(dtype):
            own = copy.deepcopy(model)
            batch = batch_of(kind, form, every[comm.rank], own)
            with seqpar.parallelize(own, comm, plan=cut, **options):
                return outcome(own, own(**batch).loss)

    @cache
    def truth() -> dict[str, Tensor]:
        with islands(torch.float64):
            exact = copy.deepcopy(model).double()
            return outcome(exact, one_process(kind, exact, sum(every, []))).grads

    found = run_threads(ranks, rank)
    with islands(dtype):
        one = outcome(model, one_process(kind, model, sum(every, [])))
    compare(found, one, dtype, truth if kind in ROUGH and dtype is torch.float32 else None)


# one form and number of ranks for a family; every spread of images over ranks
FEW = [
    ("llava", "one", "packed", 3), ("mistral3", "all", "right", 2), ("internvl", "one", "left", 2),
    ("llama4", "all", "packed", 2), ("qwen2_5_vl", "video", "right", 2), ("qwen3_vl", "one", "packed", 3),
    ("gemma3", "none", "right", 2), ("paligemma", "one", "packed", 2), ("smolvlm", "all", "left", 3),
    ("qwen3_5", "one", "right", 2), ("qwen3_vl", "none", "left", 2),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "spread", "form", "ranks"), FEW)
@pytest.mark.sampled(3)
def test_losses_and_gradients_are_those_of_one_process(kind: str, spread: str, form: str, ranks: int) -> None:
    trained(kind, spread, form, ranks)


def test_a_rank_without_a_document_has_gradients_of_zero() -> None:
    kind, dtype = "llava", torch.float64
    documents = bring(kind, "all", 1, dtype)[0]
    with islands(dtype):
        model = build(EVERY[kind], dtype=dtype)

    def rank(comm: Comm) -> Outcome:
        with islands(dtype):
            own = copy.deepcopy(model)
            batch = batch_of(kind, "right", documents, own)
            if comm.rank:
                batch = {name: torch.zeros(1, 1, dtype=torch.int64) for name in ("input_ids", "attention_mask")}
                batch["labels"] = batch["input_ids"] - 100
            with seqpar.parallelize(own, comm, plan=cut):
                return outcome(own, own(**batch).loss)

    found = run_threads(2, rank)
    with islands(dtype):
        compare(found, outcome(model, one_process(kind, model, documents)), dtype)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "spread", "form", "ranks", "dtype"), [*product(EVERY, SPREADS, FORMS, (2, 3), TOLERANCE)]
)
def test_every_family_spread_and_form(kind: str, spread: str, form: str, ranks: int, dtype: torch.dtype) -> None:
    if spread == "video" and LIKE.get(kind, kind) not in ("qwen2_5_vl", "qwen3_vl"):
        pytest.skip("takes no video")
    trained(kind, spread, form, ranks, dtype)


def wrapped(comm: Comm, kind: str, how: str) -> Outcome:
    """The loss and averaged gradients of a model in a wrapper; the tower is part of its collectives."""
    model = build(EVERY[kind], dtype=torch.float32)
    seqpar.parallelize(model, comm, average_over=comm.size, plan=cut)
    batch = batch_of(kind, "right", bring(kind, "one", comm.size, torch.float32)[comm.rank], model)
    whole = in_wrapper(model, how, (*model.model.visual.blocks, *model.model.language_model.layers))
    for _ in range(2):  # the second pass finds what the first one left behind
        model.zero_grad()
        loss = whole(**batch).loss
        loss.backward()
    return Outcome(float(loss.detach()), whole_gradients(model))


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_a_rank_without_images_takes_part_in_the_collectives_of_its_tower(how: str) -> None:
    every = bring("qwen3_vl", "one", 2, torch.float32)
    model = build(EVERY["qwen3_vl"], dtype=torch.float32)
    one = outcome(model, one_process("qwen3_vl", model, sum(every, [])))
    for each in run_processes(2, wrapped, "qwen3_vl", how):
        compare([Outcome(each.loss, {name: grad / 2 for name, grad in each.grads.items()})] * 2, one, torch.float32)


def steps(kind: str, prepare: Any, dtype: torch.dtype = torch.float64, **options: Any) -> None:
    """Gradients of a model that was changed before it became parallel, beside one process with the same change."""
    every = bring(kind, "one", 2, dtype)
    with islands(dtype):
        model = build(EVERY[kind], "sdpa", dtype)
        prepare(model)

    def rank(comm: Comm) -> Outcome:
        with islands(dtype):
            own = copy.deepcopy(model)
            with seqpar.parallelize(own, comm, plan=cut, **options):
                return outcome(own, own(**batch_of(kind, "right", every[comm.rank], own)).loss)

    found = run_threads(2, rank)
    with islands(dtype):
        compare(found, outcome(model, one_process(kind, model, sum(every, []))), dtype)


def _frozen(model: Any) -> None:
    model.model.vision_tower.requires_grad_(False)


def _frozen_but_for_the_text(model: Any) -> None:
    model.requires_grad_(False)
    model.model.language_model.layers.requires_grad_(True)


def _checkpointed(model: Any) -> None:
    model.gradient_checkpointing_enable()


@pytest.mark.parametrize("prepare", [_frozen, _frozen_but_for_the_text, _checkpointed])
@pytest.mark.sampled(3)
def test_towers_may_be_frozen_and_layers_checkpointed(prepare: Any) -> None:
    steps("gemma3", prepare, torch.float32)


def test_results_inside_results_of_a_checkpointed_model() -> None:
    """SmolVLM returns those of its tower as one result."""
    steps("smolvlm", _checkpointed, torch.float32)


def unlabelled(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in batch.items() if name != "labels"}


def test_accumulated_micro_batches_are_one_batch() -> None:
    """With num_items_in_batch, as Trainer gives it, and images in one micro-batch of one rank."""
    kind, dtype = "qwen3_vl", torch.float64
    every = bring(kind, "one", 2, dtype)
    with islands(dtype):
        model = build(EVERY[kind], dtype=dtype)
        one = outcome(model, one_process(kind, model, sum(every, [])))
        micro = [[batch_of(kind, "right", part, model) for part in (own[:1], own[1:])] for own in every]
    items = sum(int((batch["labels"][:, 1:] != -100).sum()) for own in micro for batch in own)

    def rank(comm: Comm) -> Outcome:
        with islands(dtype):
            own = copy.deepcopy(model)
            with seqpar.parallelize(own, comm, plan=cut):
                losses = [own(**batch, num_items_in_batch=items).loss for batch in micro[comm.rank]]
                found = outcome(own, sum(losses[1:], losses[0]))
        return found

    found = run_threads(2, rank)
    compare([each._replace(loss=sum(r.loss for r in found)) for each in found], one, dtype)


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl"])
@pytest.mark.sampled(2)
def test_results_come_home_in_the_shape_of_the_batch(kind: str) -> None:
    every = bring(kind, "one", 2, torch.float64)
    with islands(torch.float64):
        model = build(EVERY[kind]).eval()

    def rank(comm: Comm) -> None:
        with islands(torch.float64), torch.no_grad():
            own = copy.deepcopy(model)
            batch = batch_of(kind, "right", every[comm.rank], own)
            labels = batch.pop("labels")
            expected = own(**batch, output_hidden_states=True, use_cache=False)
            keep = batch["attention_mask"].bool()
            with seqpar.parallelize(own, comm, plan=cut) as handle:
                found = own(**batch, output_hidden_states=True)
                inner = own.model(**batch)
                with handle.local():
                    alone = own(**batch)
                assert own(**batch, labels=labels).loss.isfinite()
            for a, b in zip(found.hidden_states, expected.hidden_states, strict=True):
                assert (a - b)[keep].abs().max() < 1e-9
            assert (found.logits - expected.logits)[keep].abs().max() < 1e-9
            assert (inner.last_hidden_state - expected.hidden_states[-1])[keep].abs().max() < 1e-9
            assert (alone.logits - expected.logits).abs().max() < 1e-9
            if comm.rank and kind == "llava":
                assert pooled_of(found).equal(pooled_of(expected))
            assert own(**batch).logits.equal(own(**batch).logits)  # undone

    run_threads(2, rank)


def test_batches_with_images_are_planned_ahead() -> None:
    kind = "qwen3_vl"
    model = build(EVERY[kind], dtype=torch.float32)
    loader = [batch_of(kind, form, bring(kind, "all", 1, torch.float32)[0], model) for form in ("packed", "right")]
    expected = [float(model(**loader[1]).loss.detach())] * 2
    with seqpar.parallelize(model, LocalComm()) as handle:
        found = [float(model(**batch).loss.detach()) for batch in handle.prefetch(loader)]
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("kind", "labels"), [("gemma3", 3), ("gemma3", 1), ("qwen3_5", 3)])
def test_classifiers_of_sequences_with_images(kind: str, labels: int) -> None:
    """Their heads run at home, on the rows of the text model."""
    every, row = bring(kind, "one", 2, torch.float64), EVERY[kind]
    with islands(torch.float64):
        model = build(row._replace(head="ForSequenceClassification", config=row.config | {"num_labels": labels}))
    targets = [torch.arange(len(own)) % labels if labels > 1 else torch.arange(len(own)) * 0.5 for own in every]
    targets = [x if labels > 1 else x.double() for x in targets]

    def rank(comm: Comm) -> Outcome:
        with islands(torch.float64):
            own = copy.deepcopy(model)
            batch = batch_of(kind, "right", every[comm.rank], own) | {"labels": targets[comm.rank]}
            with seqpar.parallelize(own, comm, plan=cut):
                return outcome(own, own(**batch).loss)

    found = run_threads(2, rank)
    with islands(torch.float64):
        batch = batch_of(kind, "right", sum(every, []), model) | {"labels": torch.cat(targets)}
        compare(found, outcome(model, model(**batch, use_cache=False).loss), torch.float64)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"use_cache": True}, "got use_cache; leave it out"),
        ({"cache": transformers.DynamicCache()}, "got cache; leave it out"),  # past_key_values before 5.24
        ({"output_attentions": True}, "got output_attentions; leave it out"),
        ({"logits_to_keep": 1}, "got logits_to_keep; leave it out"),
        ({"output_router_logits": True}, "got output_router_logits; leave it out"),
        ({"position_ids": torch.zeros(2, 1, 9)}, "position_ids .* have 2 rows, expected 1, 3 or 4"),
        ({"attention_mask": {"full_attention": torch.ones(1, 1, 9, 9)}}, "masks that were made elsewhere"),
        ({"cross_attention": torch.ones(3)}, "got cross_attention, supported are"),
    ],
)
def test_what_several_ranks_cannot_compute_is_refused_by_name_on_all_of_them(more: dict[str, Any], says: str) -> None:
    whole = build(EVERY["qwen3_vl"], dtype=torch.float32).eval()

    def rank(comm: Comm) -> None:
        model = copy.deepcopy(whole)
        batch = {"input_ids": torch.arange(1, 10)[None] + comm.rank}
        with seqpar.parallelize(model, comm):
            before = model(**batch).logits
            with pytest.raises((NotImplementedError, ValueError), match=says):
                model(**(batch | more if comm.rank else batch))
            assert model(**batch).logits.equal(before)  # a refused batch leaves the ranks together

    run_threads(2, rank)


class Handing(transformers.LlavaModel):
    """Hands its text model, beside images, a mask that the user did not give."""

    def forward(self, *args: Any, **named: Any) -> Any:
        own = {"vision_mask": named["input_ids"] == IMAGE} if named.get("pixel_values") is not None else {}
        return super().forward(*args, **named, **own)


def test_what_a_model_hands_to_its_text_model_is_not_said_to_be_given() -> None:
    model, every = build(EVERY["llava"], dtype=torch.float32), bring("llava", "one", 2, torch.float32)
    model.model.__class__ = Handing
    for said in errors_on_copies(model, lambda own, comm: own(**batch_of("llava", "right", every[comm.rank], own))):
        assert "LlavaForConditionalGeneration passes vision_mask to its LlamaModel" in said


def test_a_batch_that_the_model_itself_refuses_is_told_to_all_ranks() -> None:
    kind = "llava"
    documents = bring(kind, "all", 1, torch.float32)[0]
    whole = build(EVERY[kind], dtype=torch.float32)

    def rank(comm: Comm) -> None:
        model = copy.deepcopy(whole)
        batch = batch_of(kind, "right", documents, model)
        with seqpar.parallelize(model, comm):
            if comm.rank:
                batch["pixel_values"] = batch["pixel_values"][1:]
                with pytest.raises(Exception, match="tokens and image.*do not match|[Ii]mage features"):
                    model(**batch)
            else:
                with pytest.raises(seqpar.PeerError, match="Image features and image tokens do not match"):
                    model(**batch)

    run_threads(2, rank)


TEXT_SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4, "pad_token_id": 0}
TOWER = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "attention_heads": 4}


def test_cross_attention_to_images_is_refused() -> None:
    text = TEXT_SIZES | {"num_hidden_layers": 2, "num_key_value_heads": 2, "cross_attention_layers": [1]}
    tiles = {"image_size": 28, "patch_size": 14, "max_num_tiles": 1, "supported_aspect_ratios": [[1, 1]]}
    layers = {"num_global_layers": 1, "vision_output_dim": 64, "intermediate_layers_indices": [0]}
    config = transformers.MllamaConfig(text_config=text, vision_config=TOWER | tiles | layers)
    model = transformers.MllamaForConditionalGeneration._from_config(config)
    with pytest.raises(NotImplementedError, match="it has cross-attention to images; train it with data parallelism"):
        seqpar.parallelize(model, LocalComm())


def test_a_mask_among_the_results_is_that_of_the_batch() -> None:
    """As Qwen2-Audio returns it."""
    tower = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 40}
    config = transformers.Qwen2AudioConfig(
        text_config=TEXT_SIZES | {"model_type": "qwen2", "num_hidden_layers": 1, "num_key_value_heads": 2},
        audio_config=tower | {"num_mel_bins": 8, "max_source_positions": 20}, audio_token_index=50,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen2AudioForConditionalGeneration._from_config(config, attn_implementation="eager").double()
    ids, mask = torch.randint(1, 50, (4, 24)), torch.ones(4, 24, dtype=torch.int64)
    ids[:, 2:12], mask[1:3, 20:] = 50, 0
    whole = {
        "input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill((mask == 0) | (ids == 50), -100),
        "input_features": torch.randn(4, 8, 40).double(),
        "feature_attention_mask": torch.ones(4, 40, dtype=torch.int64),
    }  # fmt: skip

    def rank(comm: Comm) -> Outcome:
        own, half = copy.deepcopy(model), slice(2 * comm.rank, 2 * comm.rank + 2)
        with islands(torch.float64), seqpar.parallelize(own, comm, plan=cut):
            out = own(**{name: x[half] for name, x in whole.items()})
            assert out.attention_mask.equal(mask[half])
            return outcome(own, out.loss)

    with islands(torch.float64):
        compare(run_threads(2, rank), outcome(model, model(**whole).loss), torch.float64)


@pytest.mark.parametrize("block", ["ahead", "whole"])
@pytest.mark.parametrize("window", [None, 3])
def test_tokens_of_a_block_see_each_other(block: str, window: int | None) -> None:
    lengths, spans = [9, 12], [(2, 6), (9, 11), (15, 21)]
    blocks = Blocks(*(np.array(x) for x in zip(*spans)))
    left = None if window is None else window - 1
    causal, without = (Mask(lengths, causal=each, window=(left, None)) for each in (True, False))
    found = blocks.mask(Rule(causal=True, left=left, block=block), without, causal)
    lo, hi = found.bounds(np.arange(21))
    document = np.repeat(np.arange(2), lengths)
    number = np.full(21, -1)
    for at, (a, b) in enumerate(spans):
        number[a:b] = at
    i, j = np.arange(21)[:, None], np.arange(21)
    near = j > i - window if window else j >= 0
    same = (number[:, None] == number) & (number >= 0)
    sees = (near & ((j <= i) | same)) if block == "ahead" else ((near & (j <= i)) | same)
    expected = sees & (document[:, None] == document)
    assert (((lo[:, None] <= j) & (j < hi[:, None])) == expected).all()


def test_blocks_of_all_ranks_are_cut_where_documents_end() -> None:
    rule = Rule(causal=True)
    told = [
        MaskSummary({rule: ""}, *(np.zeros(0, np.int64),) * 3),
        MaskSummary({rule: "ahead"}, np.array([1, 7]), np.array([5, 2]), np.array([0, 1])),
    ]
    rules, blocks = united(told, [np.array([4]), np.array([3, 6])])
    assert rules == {rule: "ahead"}
    assert [*zip(blocks.starts, blocks.ends)] == [(5, 7), (7, 10), (11, 13)]
    again = told[1]._replace(numbers=np.array([0, 0]))
    with pytest.raises(NotImplementedError, match="in several stretches"):
        united([again], [np.array([9])])
    with pytest.raises(NotImplementedError, match="by different rules on ranks"):
        united([told[1], told[1]._replace(rules={rule: "whole"})], [np.array([9]), np.array([9])])


IMAGE, START, END = 55, 57, 58


def ernie() -> Any:
    """ERNIE 4.5 VL in small, whose experts of images are others than those of text."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    text = TEXT_SIZES | {
        "num_hidden_layers": 2, "num_key_value_heads": 2, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1,
        "moe_intermediate_size": [16, 16], "mlp_layer_types": ["dense", "sparse"], "rope_parameters": rope,
    }  # fmt: skip
    tower = {"depth": 1, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "patch_size": 4}
    config = transformers.Ernie4_5_VLMoeConfig(
        text_config=text, vision_config=tower, image_token_id=IMAGE, image_start_token_id=START, image_end_token_id=END
    )
    return drawn(transformers.Ernie4_5_VLMoeForConditionalGeneration, config)


def of_ernie(*documents: str) -> dict[str, Tensor]:
    """The batch of these documents as ERNIE's processor makes it: t is text, i an image."""
    g, image = torch.Generator().manual_seed(len(documents[0])), [START, *[IMAGE] * 4, END]
    parts = [[image if c == "i" else torch.randint(1, 50, (3,), generator=g).tolist() for c in x] for x in documents]
    rows: list[list[int]] = [sum(row, []) for row in parts]
    width, images = max(map(len, rows)), sum(document.count("i") for document in documents)
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    batch = {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "labels": ids.masked_fill((ids == 0) | (ids > 50), -100),
    }
    batch |= {"mm_token_type_ids": (ids == IMAGE).long(), "moe_mm_token_type_ids": (ids >= IMAGE).long()}
    if images:
        batch["pixel_values"] = torch.randn(images * 16, 3 * 4 * 4, generator=g)
        batch["image_grid_thw"] = torch.tensor([[1, 4, 4]] * images)
    return batch


ON_ONE = of_ernie("tt", "t"), of_ernie("titt", "tti"), of_ernie("itt")


@pytest.mark.parametrize("every", [ON_ONE[:2], ON_ONE[1:], ON_ONE, (ON_ONE[1], *ON_ONE[:2]), ON_ONE[:1] * 2])
def test_tokens_of_images_go_to_the_experts_of_images_on_every_rank(every: tuple[dict[str, Tensor], ...]) -> None:
    model = ernie()

    def rank(comm: Comm) -> Outcome:
        own = copy.deepcopy(model)
        with seqpar.parallelize(own, comm, plan=cut):
            return outcome(own, own(**every[comm.rank]).loss)

    total, count = torch.zeros(()), 0
    for batch in every:
        labels = batch["labels"][:, 1:].flatten()
        logits = model(**unlabelled(batch), use_cache=False).logits[:, :-1].flatten(0, 1)
        total, count = (
            total + nn.functional.cross_entropy(logits, labels, reduction="sum"),
            count + int((labels > 0).sum()),
        )
    compare(run_threads(len(every), rank), outcome(model, total / count), torch.float32)


def test_a_rank_of_text_alone_may_leave_out_which_tokens_are_of_images() -> None:
    model = ernie().eval()
    mixed = ON_ONE[1] | {"moe_mm_token_type_ids": ON_ONE[1]["moe_mm_token_type_ids"].int()}
    every = [unlabelled(batch) for batch in (ON_ONE[0], mixed, ON_ONE[2])]
    del every[0]["moe_mm_token_type_ids"]

    def rank(comm: Comm) -> Tensor:
        own = copy.deepcopy(model)
        with seqpar.parallelize(own, comm, plan=cut), torch.no_grad():
            return own(**every[comm.rank]).logits

    for batch, found in zip(every, run_threads(3, rank), strict=True):
        keep = batch["attention_mask"].bool()
        with torch.no_grad():
            expected = model(**batch).logits
        assert torch.allclose(found[keep], expected[keep], atol=1e-5)
