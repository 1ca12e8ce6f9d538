"""What cannot be right on several ranks is refused by name: models when they are made parallel, batches when given."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.neftune import neftune_post_forward_hook

import seqpar
from seqpar import Comm, Layout, LocalComm, Mask, Plan
from seqpar.integrations.hf import attention as keys
from seqpar.testing import run_threads
from tests.ecosystem.architectures import Architecture
from tests.integrations.hf.models import SIZES, batches, build, check, holes, on_ranks, one_process, padded
from tests.integrations.hf.refused_models import (
    MEETS,
    MODELS,
    TINY,
    Shifted,
    averaging,
    filled,
    made,
    opt,
    with_layer,
)
from tests.integrations.hf.unions import build as build_row
from tests.ranks import error_of, errors_on_copies


def test_what_begins_at_zero_is_as_it_was_and_trains_as_on_one_process() -> None:
    model = filled(filled(build("llama"), 0.0, "o_proj"), 0.0, "down_proj")
    every = batches("right", 2)
    check(run_threads(2, on_ranks, model, every), one_process(model, every, True), every)
    before = {name: (p, p.data_ptr(), p._version, p.detach().clone()) for name, p in model.named_parameters()}
    with seqpar.parallelize(model, LocalComm()):
        for name, p in model.named_parameters():
            same, memory, version, values = before[name]
            assert p is same and (p.data_ptr(), p._version) == (memory, version) and p.equal(values), name


BATCH = padded(torch.Generator().manual_seed(3), [9, 5], left=False)
IDS = BATCH["input_ids"]
CALLS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a mask of pairs": ({"attention_mask": torch.ones(2, 1, 9, 9)}, NotImplementedError, "attention_mask"),
    "documents in a mask": ({"attention_mask": -BATCH["attention_mask"]}, ValueError, "0 or 1"),
    "weights": ({"output_attentions": True}, NotImplementedError, "output_attentions"),
    "a cache": ({"use_cache": True}, NotImplementedError, "use_cache"),
    "past keys": ({"past_key_values": transformers.DynamicCache()}, NotImplementedError, "past_key_values"),
    "some logits": ({"logits_to_keep": 1}, NotImplementedError, "logits_to_keep"),
    "cross-attention": ({"encoder_hidden_states": torch.ones(2, 9, 32)}, NotImplementedError, "encoder_hidden_states"),
    "anything else": ({"never_heard_of": 1}, NotImplementedError, "never_heard_of"),
    "a label on a pad": (
        {"labels": IDS},
        ValueError,
        "labels of pads must be -100 (ignore_index), as one device would count them: labels at row 1, token 6",
    ),
    "positions of three kinds": ({"position_ids": torch.zeros(3, 2, 9).long()}, NotImplementedError, "position_ids"),
    "a count of one rank": ({"num_items_in_batch": 3}, ValueError, "labels that count"),
    "two counts": ({"num_items_in_batch": torch.tensor([50, 60])}, ValueError, "expected one number of labels"),
    "a count in words": ({"num_items_in_batch": "fifty"}, ValueError, "expected a number of labels"),
    "half a label": ({"num_items_in_batch": 50.5}, ValueError, "expected a number of labels"),
    "labels without end": ({"num_items_in_batch": float("inf")}, ValueError, "expected a number of labels"),
}


def said(model: PreTrainedModel, batches: list[dict[str, Any]], **options: Any) -> list[str]:
    """What each rank's call raises."""
    return errors_on_copies(model, lambda own, comm: own(**batches[comm.rank]), **options)


@pytest.mark.parametrize("name", CALLS)
def test_batches_are_refused_on_every_rank(name: str) -> None:
    more, kind, message = CALLS[name]
    for error in said(build("llama"), [BATCH | more] * 2):
        assert error.startswith(kind.__name__) and message in error


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("alone", [False, True], ids=["all ranks", "one rank"])
def test_an_argument_given_twice_is_pythons_error_on_every_rank(head: bool, alone: bool) -> None:
    model = build("llama")
    if head:
        model = transformers.LlamaForSequenceClassification(model.config)
    message = r"\.forward\(\) got multiple values for argument 'input_ids'"
    with pytest.raises(TypeError, match=message):
        model(IDS, input_ids=IDS)

    def error(comm: Comm) -> str:
        own = copy.deepcopy(model)
        again = {} if alone and comm.rank else {"input_ids": IDS}
        with seqpar.parallelize(own, comm), pytest.raises((TypeError, ValueError)) as raised:
            own(IDS, **again)
        return str(raised.value)

    for text in run_threads(2, error, timeout=20.0):
        assert re.search(message, text), text


def test_a_rank_that_differs_is_named_on_every_rank() -> None:
    model = build("llama")
    without = {name: x for name, x in BATCH.items() if name != "labels"}
    others = without, *(BATCH | more for more in ({"never_heard_of": 1}, {"labels": IDS}, {"num_items_in_batch": "x"}))
    for both in ([BATCH, other] for other in others):
        first, second = said(model, both)
        assert "rank 1" in first and first.startswith("ValueError") and second != "nothing"


def test_a_term_that_a_loss_has_in_training_alone_is_not_left_out() -> None:
    class Pulled(transformers.LlamaForCausalLM):
        def forward(self, **named: Any) -> Any:
            out = super().forward(**named)
            if self.training and out.loss is not None:
                out.loss = out.loss + out.logits.logsumexp(-1).square().mean()
            return out

    model = build("llama")
    model.__class__ = Pulled
    state = torch.get_rng_state()
    with seqpar.parallelize(model, LocalComm()):
        assert torch.equal(torch.get_rng_state(), state) and model.training
        with pytest.raises(NotImplementedError, match="its loss in training is not the cross-entropy"):
            model(**BATCH)


BEGUN = {"vocab_size": 61, "d_model": 32, "decoder_layers": 2, "decoder_ffn_dim": 40, "decoder_attention_heads": 4}
WHISPER = made(
    "WhisperForCausalLM", "WhisperConfig", **BEGUN, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    decoder_start_token_id=1,
)  # fmt: skip
MEETING = {
    "trigrams": MODELS["trigrams"][0],
    "counted positions": made("BlenderbotSmallForCausalLM", "BlenderbotSmallConfig", **BEGUN, pad_token_id=0),
}


@pytest.fixture(params=["bfloat16", "float16", "high", "tf32"])
def coarse(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """A dtype of models, and the precision of products of the process: after the test, and during it, as it was set."""
    settings = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    dtype, before = getattr(torch, request.param, torch.float32), [x.fp32_precision for x in settings]
    if request.param == "high":
        torch.set_float32_matmul_precision("high")
    if request.param == "tf32":  # by the newer name, after which PyTorch does not tell the older one
        settings[0].fp32_precision = "tf32"
    given = [x.fp32_precision for x in settings]
    yield dtype
    after = [x.fp32_precision for x in settings]
    torch.set_float32_matmul_precision("highest")
    for each, precision in zip(settings, before, strict=True):
        each.fp32_precision = precision
    assert after == given


def test_labels_that_are_not_shifted_are_seen_in_any_precision(coarse: torch.dtype) -> None:
    """As it begins, a model has about the same loss for all labels."""
    torch.manual_seed(0)
    model = WHISPER().to(coarse)
    before = [(p, p.data_ptr(), p._version) for p in model.parameters()]
    with seqpar.parallelize(model, LocalComm()):
        assert model.dtype is coarse
        with pytest.raises(NotImplementedError, match="its loss is not the cross-entropy of its logits alone"):
            model(**BATCH)
    assert [(p, p.data_ptr(), p._version) for p in model.parameters()] == before


@pytest.mark.parametrize("name", MEETING)
def test_tokens_that_meet_are_seen_in_any_precision(name: str, coarse: torch.dtype) -> None:
    torch.manual_seed(0)
    with pytest.raises(NotImplementedError, match=MEETS):
        seqpar.parallelize(MEETING[name]().to(coarse), LocalComm())


SCALED = {
    "granite": {"logits_scaling": 1.08}, "cohere": {"logit_scale": 0.95}, "falcon_h1": {"lm_head_multiplier": 0.95},
}  # fmt: skip


@pytest.mark.parametrize("kind", SCALED)
def test_a_factor_of_logits_near_1_is_in_the_loss_of_any_precision(kind: str, coarse: torch.dtype) -> None:
    """Which is not computed in chunks then, without the model's own logits."""
    for config in ({}, SCALED[kind]):
        model = build_row(Architecture(kind, "dense", dict.fromkeys(SCALED[kind], 1.0) | config), torch.float32)
        with seqpar.parallelize(model.to(coarse), LocalComm()) as handle:
            assert (handle.fit.head is None) == bool(config) and not handle.fit.loss


@pytest.mark.parametrize("factor", [1e-5, 1e-2])
def test_a_small_term_of_a_loss_is_seen_in_any_precision(factor: float, coarse: torch.dtype) -> None:
    for weight in (0.0, factor):
        model = build_row(Architecture("bamba", "hybrid", {"z_loss_coefficient": weight}), torch.float32)
        with seqpar.parallelize(model.to(coarse), LocalComm()) as handle:
            assert bool(handle.fit.loss) == bool(weight), handle.fit.loss


def test_a_trial_needs_memory_for_one_layer_more() -> None:
    """Weights of 32 bits are there while their layer is called, and tied ones once."""
    model = build("llama", num_hidden_layers=3, tie_word_embeddings=True).bfloat16()
    widths: list[list[int]] = []

    def count(*_: Any) -> None:
        widths.append([layer.mlp.up_proj.weight.dtype.itemsize for layer in model.model.layers])
        assert model.lm_head.weight is model.model.embed_tokens.weight

    hooks = [layer.mlp.register_forward_hook(count) for layer in model.model.layers]
    with seqpar.parallelize(model, LocalComm()):
        assert {tuple(each) for each in widths} == {(4, 2, 2), (2, 4, 2), (2, 2, 4)}
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    for hook in hooks:
        hook.remove()


def test_a_quantised_model_is_tried_as_it_is() -> None:
    """Its products may take no other inputs."""
    model, seen = with_layer(build("llama"), nn.SiLU()).bfloat16(), set()
    gate = model.model.layers[1].mlp.gate_proj
    gate.weight = nn.Parameter((gate.weight.detach() * 100).to(torch.int8), requires_grad=False)

    def multiply(x: Tensor) -> Tensor:
        seen.add(x.dtype)
        return x @ gate.weight.mT.to(x.dtype) / 100

    gate.forward = multiply
    with seqpar.parallelize(model, LocalComm()) as handle:
        assert handle.fit.head is model.lm_head and not handle.fit.loss and seen == {torch.bfloat16}


def test_a_trial_that_fails_leaves_weights_and_precision_as_they_were() -> None:
    model = with_layer(build("llama"), Failing(MemoryError, always=True)).bfloat16()
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(NotImplementedError, match="fails on one process too: MemoryError: nothing left"):
            seqpar.parallelize(model, LocalComm())
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("dropout", (0.0, 0.3))
def test_tokens_that_meet_in_training_alone_are_seen(dropout: float) -> None:
    class Centred(transformers.LlamaForCausalLM):
        def forward(self, **named: Any) -> Any:
            out = super().forward(**named)
            if self.training and centres:
                out.logits = out.logits - out.logits.mean(1, keepdim=True)
            return out

    model = build("llama", attention_dropout=dropout).train()
    model.__class__ = Centred
    state, centres = torch.get_rng_state(), True
    with pytest.raises(NotImplementedError, match="in training mode, tokens meet outside its attention"):
        seqpar.parallelize(model, LocalComm())
    centres = False
    with seqpar.parallelize(model, LocalComm()):
        assert torch.equal(torch.get_rng_state(), state) and model.training
        assert model(**BATCH).loss.isfinite()


def test_noise_by_the_length_of_a_row_is_refused() -> None:
    model = build("llama")
    embedding = model.get_input_embeddings()
    embedding.neftune_noise_alpha = 5.0
    with seqpar.parallelize(model, LocalComm()):
        handle = embedding.register_forward_hook(neftune_post_forward_hook)
        with pytest.raises(NotImplementedError, match="NEFTune.*leave neftune_noise_alpha out"):
            model(**BATCH)
        assert model.eval()(**BATCH).loss.isfinite(), "which is in training alone"
        handle.remove()
        assert model.train()(**BATCH).loss.isfinite()


def test_a_label_outside_the_classes_ends_the_call_of_every_rank() -> None:
    model, batch = classes_of_tokens(), {"input_ids": BATCH["input_ids"], "labels": BATCH["input_ids"] % 9}
    labels = batch["labels"].clone()
    labels[0, 3] = 9
    found = said(model, [batch, batch | {"labels": labels}])
    assert {error.partition(":")[0] for error in found} == {"ValueError", "PeerError"}, "not after the timeout"
    assert all("is 9, expected 0 to 8, or ignore_index=-100" in error for error in found)


def classes_of_tokens(vocabulary: int = 61) -> PreTrainedModel:
    """A model of nine classes of tokens."""
    config = transformers.BertConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_labels=9,
        num_attention_heads=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForTokenClassification._from_config(config, attn_implementation="eager").train()


def test_who_counts_the_items_scales_for_wrappers_too() -> None:
    batch = BATCH | {"num_items_in_batch": 100}
    for error in said(build("llama"), [batch, batch], average_over=2):
        assert error.startswith("ValueError") and "average_over=2" in error


def test_positions_that_a_model_counts_itself_must_be_given() -> None:
    model = opt()
    forward = type(model.model.decoder).forward

    def later(self: Any, *args: Any, position_ids: Tensor | None = None, **named: Any) -> Any:
        if position_ids is None:
            position_ids = 3 + torch.arange(named["input_ids"].shape[1])[None]
        return forward(self, *args, position_ids=position_ids, **named)

    model.model.decoder.__class__ = type("Later", (type(model.model.decoder),), {"forward": later})
    batch = padded(torch.Generator().manual_seed(3), [9, 5], left=True)
    expected = float(model(**batch).loss)
    with seqpar.parallelize(model, LocalComm()):
        with pytest.raises(NotImplementedError, match="counts its positions itself"):
            model(**batch)
        assert float(model(**batch, position_ids=torch.arange(3, 12).expand(2, -1)).loss) == pytest.approx(
            expected, rel=1e-6
        )


@pytest.mark.parametrize("loss", [
    lambda logits, labels, **_: F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"),
    lambda logits, labels, **_: F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + logits.mean(),
    lambda logits, labels, **_: F.cross_entropy(logits[:, :-2].flatten(0, 1), labels[:, 2:].flatten()),
    lambda logits, labels, **_: F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1),
])  # fmt: skip
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_loss_function_that_is_no_mean_over_rows(loss: Any, device: str) -> None:
    model = build("llama").to(device)  # of a model on meta, a small one is tried
    model.loss_function = loss
    with seqpar.parallelize(model, LocalComm()) as handle:
        assert "is not among" in handle.fit.loss and "nor a mean over rows" in handle.fit.loss


def test_what_is_no_model_of_theirs_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="give sdpa=True"):
        seqpar.parallelize(nn.Linear(2, 2), LocalComm())
    with pytest.raises(TypeError, match="no_option"):
        seqpar.parallelize(build("llama"), LocalComm(), no_option=1)


@pytest.mark.parametrize("kind", ["Falcon", "GPTNeo"])
def test_a_class_with_a_table_of_attentions_of_its_own_fails_as_the_page_says(kind: str) -> None:
    config = getattr(transformers, f"{kind}Config")(hidden_size=32, vocab_size=64)
    with pytest.raises(KeyError, match="seqpar"):
        getattr(transformers, f"{kind}Model")._from_config(config, attn_implementation="seqpar")


def test_rows_of_ones_own_without_a_plan_or_in_several_rows() -> None:
    model = build("llama")
    model.set_attn_implementation(keys.KEY)
    with pytest.raises(RuntimeError, match="no plan surrounds") as raised:
        model(input_ids=IDS)
    assert raised.value.__context__ is None
    plan = Plan(Mask([9, 9]), Layout.contiguous(18, 1))
    with seqpar.parallel(plan, LocalComm()):
        with pytest.raises(NotImplementedError, match="2 rows of 9 queries"):
            model(input_ids=IDS)
        with pytest.raises(NotImplementedError, match="with zeros inside seqpar.parallel"):
            model(input_ids=IDS.view(1, 18), attention_mask=BATCH["attention_mask"].view(1, 18))
        with pytest.raises(NotImplementedError, match="which is not seqpar's"):
            model(input_ids=IDS.view(1, 18), attention_mask=torch.ones(1, 1, 18, 18))
        with pytest.raises(ValueError, match="must have 18 rows"):
            model(input_ids=IDS[:1])


class Failing(nn.Module):
    """Fails where gradients are computed."""

    def __init__(self, error: type[BaseException], *, always: bool = False) -> None:
        super().__init__()
        self.error, self.always = error, always

    def forward(self, x: Tensor) -> Tensor:
        if self.always or torch.is_grad_enabled():  # not when the model is tried
            raise self.error("nothing left")
        return x


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_rank_that_fails_inside_the_model_does_not_let_the_others_wait(error: type[BaseException]) -> None:
    def rank(comm: Comm) -> str:
        model = build("llama")
        if comm.rank:
            model = with_layer(model, Failing(error))
        with seqpar.parallelize(model, comm), pytest.raises((error, seqpar.PeerError)) as raised:
            model(**BATCH)
        return str(raised.value)

    waited, failed = run_threads(2, rank)
    assert failed == "nothing left" and f"{error.__name__}: nothing left" in waited


def test_ranks_with_other_models_or_options_are_told_and_left_as_they_were() -> None:
    def rank(comm: Comm, other: bool) -> str:
        model = build("llama")
        if comm.rank and other:
            model = with_layer(model, Shifted())
        config = model.config
        message = error_of(seqpar.parallelize, model, comm, average_over=1 if other else 1 + comm.rank)
        assert model.config is config and "forward" not in model.__dict__
        return message

    assert all("tokens meet outside" in message for message in run_threads(2, rank, True))
    assert all("average_over" in message for message in run_threads(2, rank, False))


def test_chunks_over_holes() -> None:
    sizes = SIZES | {"attention_chunk_size": 5, "intermediate_size_mlp": 40, "num_local_experts": 2}
    model = made("Llama4ForCausalLM", "Llama4TextConfig", **sizes)()
    with seqpar.parallelize(model, LocalComm()):
        assert model(**BATCH).loss.isfinite()
        with pytest.raises(NotImplementedError, match="attends in chunks"):
            model(**holes(torch.Generator().manual_seed(3), 17))


def test_a_model_around_a_pooler_is_not_told_to_leave_it_out() -> None:
    model = averaging(made("BertForSequenceClassification", "BertConfig", **TINY, intermediate_size=40)())
    with pytest.raises(NotImplementedError, match="pooler_output.*; train it with data parallelism"):
        seqpar.parallelize(model, LocalComm())


@pytest.mark.parametrize("kind", ["UMT5", "LongT5"])
def test_an_encoder_alone_is_not_refused_for_cross_attention(kind: str) -> None:
    sizes = {"vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    reason = "a bias that the model makes itself" if kind == "UMT5" else "no layer asked .* for a mask"
    with pytest.raises(NotImplementedError, match=f"several ranks: (?!.*cross-attention).*{reason}"):
        seqpar.parallelize(getattr(transformers, f"{kind}EncoderModel")(config), LocalComm())


def test_a_model_that_fails_on_one_process_is_said_to() -> None:
    model = build("llama")
    model.model.layers[1].mlp.up_proj = nn.Linear(32, 48)
    with pytest.raises(NotImplementedError, match="fails on one process too: RuntimeError: The size of") as raised:
        seqpar.parallelize(model, LocalComm())
    assert "data parallelism" not in str(raised.value)


def outside(name: str) -> tuple[PreTrainedModel, list[dict[str, Tensor]], str]:
    """A model and batches of two ranks; in the second one's, a label of row 1, token 2 is not of the vocabulary."""
    kind, entry = name.split()
    model, every = build(kind), batches("right", 2)
    every[0]["labels"][:, 0] = every[0]["labels"].shape[1] + SIZES["vocab_size"]  # which nothing predicts
    for batch in every:
        if kind == "bert":
            batch["labels"][:, 0] = 1
        if entry == "shift_labels":
            batch[entry] = batch.pop("labels").roll(-1, 1)
            batch[entry][:, -1] = -100
    every[1][entry][1, 2] = SIZES["vocab_size"]
    return model, every, f"{entry} at row 1, token 2 are {SIZES['vocab_size']}, expected 0 to {SIZES['vocab_size'] - 1}"


@pytest.mark.parametrize("name", ["llama labels", "llama shift_labels", "bert labels"])
def test_a_label_outside_the_vocabulary_is_named_on_all_ranks_and_the_comm_lives(name: str) -> None:
    model, every, told = outside(name)

    def rank(comm: Comm) -> float:
        own, batch = copy.deepcopy(model), every[comm.rank]
        entry = name.split()[1]
        with seqpar.parallelize(own, comm):
            before = comm.stats.bytes_sent
            with pytest.raises(ValueError, match=told if comm.rank else f"rank 1 refused its arguments.*{told}"):
                own(**batch)
            assert comm.stats.bytes_sent == before
            labels = batch[entry].clone()
            if comm.rank:
                labels[1, 2] = 0
            return float(own(**batch | {entry: labels}).loss.detach())

    first, second = run_threads(2, rank)
    assert first == second > 0


def test_labels_are_not_compared_with_embeddings_that_the_logits_are_not_of() -> None:
    model = build("llama")
    expected = float(model(**BATCH).loss.detach())
    model.lm_head.out_features = 3  # of another weight
    with seqpar.parallelize(model, LocalComm()):
        assert float(model(**BATCH).loss.detach()) == pytest.approx(expected, rel=1e-5)
