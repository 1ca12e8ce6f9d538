"""What a parallel model gives besides its loss, how it is undone, recomputed and compiled, and who is left alone."""

from __future__ import annotations

import copy
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AttentionInterface, AutoModel
from transformers.modeling_outputs import CausalLMOutputWithPast

import seqpar
from seqpar import Comm, Layout, LocalComm, Mask, Plan
from seqpar.integrations.hf import attention as keys
from seqpar.integrations.hf.attention import LAYER, layer_of
from seqpar.testing import run_threads
from seqpar.train import sync_gradients
from tests.integrations.hf.hybrids import build as hybrid
from tests.integrations.hf.models import (
    PLANS,
    VOCABULARY,
    batches,
    build,
    check,
    drawn,
    holes,
    kept,
    logits_of,
    on_ranks,
    one_process,
    packed,
    padded,
)  # fmt: skip
from tests.ranks import errors, on_copies
from tests.recompute import in_a_thread


def without_labels(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x for name, x in batch.items() if name != "labels"}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("name", "plan"), [*(("llama", plan) for plan in PLANS), ("gpt-oss", "planner")])
@pytest.mark.sampled(2)
def test_a_document_does_not_know_of_another(name: str, plan: str) -> None:
    """To the bit if the model is dense: a mixture of experts multiplies rows in groups, which another token changes."""
    model = build(name).eval()
    one = packed(generator(), [13, 21, 6])
    other = without_labels(one) | {"input_ids": one["input_ids"].clone()}
    other["input_ids"][0, 4] = other["input_ids"][0, 4] % 60 + 1

    @torch.no_grad()
    def step(own: Any, comm: Comm) -> tuple[Tensor, Tensor]:
        return own(**without_labels(one)).logits, own(**other).logits

    for a, b in on_copies(model, step, ranks=3, source="replicated", plan=PLANS[plan]):
        for rows in (slice(13, None), slice(4)):
            allowed = 0.0 if name == "llama" else 1e-6 * float(a.abs().max())
            assert float((a[:, rows] - b[:, rows]).abs().max()) <= allowed
        assert not torch.equal(a[:, 4:13], b[:, 4:13])


def test_float64_is_as_exact_as_the_model_lets_it_be() -> None:
    """Its norms and softmax are of fp32, the loss is not: what is left of them is far below fp32's rounding."""
    model, every = build("llama").double(), batches("packed", 3)
    check(run_threads(3, on_ranks, model, every), one_process(model, every, True), every, tolerance=1e-6)


def test_hidden_states_embeddings_and_tuples() -> None:
    model = build("llama").eval()
    batch = padded(generator(), [9, 5], left=True)
    embedded = model.get_input_embeddings()(batch["input_ids"]).detach()
    expected = model(**without_labels(batch), output_hidden_states=True)

    @torch.no_grad()
    def step(own: Any, comm: Comm) -> Any:
        return own(
            inputs_embeds=embedded, attention_mask=batch["attention_mask"], output_hidden_states=True,
            return_dict=False, use_cache=False,
        )  # fmt: skip

    at = kept(batch)
    for logits, states in on_copies(model, step, source="replicated"):
        torch.testing.assert_close(logits[at], expected.logits[at], rtol=1e-5, atol=1e-5)
        for state, whole in zip(states, expected.hidden_states, strict=True):
            torch.testing.assert_close(state[at], whole[at], rtol=1e-5, atol=1e-5)


def test_token_types_that_the_model_ignores() -> None:
    """As a tokenizer of another model may add them."""
    model, every = build("llama"), batches("left", 2)
    typed = [batch | {"token_type_ids": batch["attention_mask"].clone()} for batch in every]
    check(run_threads(2, on_ranks, model, typed), one_process(model, every, True), every)


def test_a_base_model_and_gradients_of_embeddings() -> None:
    model = build("qwen3").model
    batch = packed(generator(), [7, 12])
    embedded = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
    parts = [
        model(inputs_embeds=embedded[:, a:b], position_ids=torch.arange(b - a)[None]).last_hidden_state
        for a, b in ((0, 7), (7, 19))
    ]
    weights = torch.randn(1, 19, 32, generator=generator())
    (expected,) = torch.autograd.grad((torch.cat(parts, 1) * weights).sum(), embedded)

    def step(own: Any, comm: Comm) -> tuple[Tensor, Tensor]:
        given = embedded.detach().clone().requires_grad_()
        if comm.rank:  # the other rank brings a document of its own, and says nothing of it
            given, at, weight = given[:, :3], torch.arange(3)[None], 0.0 * weights[:, :3]
        else:
            at, weight = batch["position_ids"], weights
        out = own(inputs_embeds=given, position_ids=at).last_hidden_state
        (grad,) = torch.autograd.grad((out * weight).sum(), given)
        return out.detach(), grad

    (out, grad), (_, zero) = on_copies(model, step)
    torch.testing.assert_close(out, torch.cat(parts, 1).detach(), rtol=1e-5, atol=1e-5)
    assert (grad - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert not zero.any()


def test_evaluation_with_labels_and_training_with_logits() -> None:
    model, every = build("llama"), batches("right", 2)
    expected = one_process(model, every, True)

    def rank(comm: Comm) -> Any:
        own, batch = copy.deepcopy(model), every[comm.rank]
        with seqpar.parallelize(own, comm, logits=True):
            trained = own(**batch)
        with seqpar.parallelize(own, comm) as handle:
            short = own(**batch)
            handle.logits = True
            assert own(**batch).logits.shape == trained.logits.shape
            handle.logits = None
            own.eval()
            evaluated = own(**batch)
        with seqpar.parallelize(own, comm, logits=False) as handle:
            left_out = [own(**batch), own.train()(**batch)]
            assert own(**without_labels(batch)).logits.shape == trained.logits.shape
        return trained, short, evaluated, left_out

    for (trained, short, evaluated, left_out), batch, whole in zip(
        run_threads(2, rank), every, expected.logits, strict=True
    ):
        assert short.logits is None and list(short) == ["loss"] and len(short.to_tuple()) == 1
        for out in (trained, evaluated):
            torch.testing.assert_close(out.logits[kept(batch)], whole[kept(batch)], rtol=1e-5, atol=1e-5)
        assert all(list(out) == ["loss"] for out in left_out)
        for out in (trained, short, evaluated, *left_out):
            assert abs(float(out.loss) - float(expected.loss)) <= 1e-6 * float(expected.loss)


def focal(
    logits: Tensor, labels: Tensor, vocab_size: int = 0, num_items_in_batch: Any = None, *, shift: bool, **_: Any
) -> Tensor:
    """A loss of one's own: rows that are predicted well count little."""
    if shift:
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    rows, labels = logits.float().flatten(0, -2), labels.flatten()
    each = torch.nn.functional.cross_entropy(rows, labels, reduction="none", label_smoothing=0.1)
    each = (1 - (-each).exp()).square() * each
    return each.sum() / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)


@pytest.mark.parametrize("kind", ["right", "packed", "mixed"])
@pytest.mark.parametrize("name", ["llama", "bert", "gemma3"])
@pytest.mark.sampled(5)
def test_a_loss_function_of_ones_own_over_rows(name: str, kind: str) -> None:
    if name == "bert":  # whose class has a loss of its own
        model = encoder("ModernBert", vocab_size=VOCABULARY, pad_token_id=0, embedding_dropout=0.0, mlp_dropout=0.0)
        model.config.attention_dropout = 0.0
        model = type(model)(model.config).train()
    else:
        model = build(name)
    every = batches(kind, 2)
    own = model.loss_function = partial(focal, shift=name != "bert")
    wide = [model.get_parameter(n) for n, _ in model.named_parameters()]
    valid = sum(int((batch["labels"][:, int(name != "bert") :] != -100).sum()) for batch in every)
    whole = sum(own(logits_of(model, batch), batch["labels"], num_items_in_batch=valid) for batch in every)
    expected = torch.autograd.grad(whole, wide, allow_unused=True)

    def rank(comm: Comm) -> Any:
        mine, batch, found = copy.deepcopy(model), every[comm.rank], []
        for options, more in (({"average_over": 2}, {}), ({}, {"num_items_in_batch": torch.tensor(2 * valid)})):
            with seqpar.parallelize(mine, comm, plan=PLANS["ring"], **options):
                loss = mine(**batch, **more).loss
                grads = torch.autograd.grad(loss, [*mine.parameters()], allow_unused=True)
                found.append((float(loss.detach()), [torch.zeros(()) if g is None else g for g in grads]))
        return found

    (mean, items), (same, others) = run_threads(2, rank)
    assert mean[0] == same[0] == pytest.approx(float(whole.detach()), rel=1e-5)
    assert 2 * (items[0] + others[0]) == pytest.approx(mean[0], rel=1e-5)
    most = max(float(g.abs().max()) for g in expected if g is not None)
    for one, other, half, rest, g in zip(mean[1], same[1], items[1], others[1], expected, strict=True):
        for total in ((one + other) / 2, 2 * (half + rest)):
            assert g is None or (total - g).abs().max() <= 1e-5 * max(float(g.abs().max()), 0.1 * most)


def test_logits_that_one_rank_alone_leaves_out_are_refused() -> None:
    def rank(comm: Comm) -> None:
        seqpar.parallelize(own := build("llama").eval(), comm, logits=None if comm.rank else False)
        own(**batches("right", 2)[comm.rank])

    assert all("ranks differ in logits" in said for said in errors(rank))


def test_a_trainer_that_reads_the_loss_alone_gets_no_logits(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model, seen = build("llama").eval(), []
    rows = [{name: x[0] for name, x in packed(generator(n), [9]).items()} for n in range(2)]
    rows = [{name: x for name, x in row.items() if name != "position_ids"} for row in rows]

    def compute_metrics(found: Any) -> dict[str, float]:
        return {"width": found.predictions.shape[-1]}

    def evaluated(**options: Any) -> dict[str, float]:
        arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True)
        return transformers.Trainer(model, arguments, eval_dataset=rows, **options).evaluate()

    expected = evaluated()["eval_loss"]
    with seqpar.parallelize(model, LocalComm()) as handle:
        watch = model.register_forward_hook(lambda module, args, out: seen.append(out.logits is None))
        found = [evaluated(), evaluated(compute_metrics=compute_metrics)]
        handle.logits = True
        found.append(evaluated())
        watch.remove()
    assert seen == [True, False, False] and found[1]["eval_width"] == VOCABULARY
    assert [each["eval_loss"] for each in found] == pytest.approx([expected] * 3, rel=1e-5)
    with torch.no_grad(), seqpar.parallelize(model, LocalComm()):
        assert model(**{name: x[None] for name, x in rows[0].items()}).logits is not None


def test_a_class_that_does_not_count_items_gives_the_mean_of_the_batch() -> None:
    """As on one device, where BertForMaskedLM ignores num_items_in_batch; its caller scales for wrappers anyway."""
    model, every = build("bert"), batches("left", 2)
    whole = one_process(model, every, False)
    items = 3 * sum(int((batch["labels"] != -100).sum()) for batch in every)
    with torch.no_grad():
        ignored, counted = (m(**every[0], num_items_in_batch=items).loss for m in (model, build("llama")))
        assert ignored == model(**every[0]).loss and counted < build("llama")(**every[0]).loss / 2

    def step(own: Any, comm: Comm) -> tuple[float, Tensor]:
        loss = own(**every[comm.rank], num_items_in_batch=items).loss
        loss.backward()
        return float(loss.detach()), own.get_input_embeddings().weight.grad

    (one, part), (other, part_too) = on_copies(model, step)
    assert one + other == pytest.approx(float(whole.loss), rel=1e-5)
    embedding = next(name for name, p in model.named_parameters() if p is model.get_input_embeddings().weight)
    torch.testing.assert_close(part + part_too, whole.grads[embedding], rtol=1e-4, atol=1e-6)


class Strict(transformers.LlamaForCausalLM):
    """Hands its keywords to what does not know this one."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if "num_items_in_batch" in kwargs:
            raise TypeError("unexpected num_items_in_batch")
        return super().forward(*args, **kwargs)


def test_a_class_that_takes_no_items_after_all_is_served_without() -> None:
    model, batch = build("llama"), padded(generator(), [13, 6], left=False)
    model.__class__ = Strict
    expected = model(**batch).loss
    with seqpar.parallelize(model, LocalComm()):
        torch.testing.assert_close(model(**batch).loss, expected)


def encoder(kind: str, **more: Any) -> Any:
    """A small encoder in training, whose layers have no index, and drop pairs."""
    import transformers

    sizes = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 1}
    config = getattr(transformers, f"{kind}Config")(
        **sizes | {"intermediate_size": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.5} | more
    )
    torch.manual_seed(3)
    return getattr(transformers, f"{kind}ForMaskedLM")(config).train()


def test_layers_without_an_index_drop_pairs_of_their_own_on_any_number_of_ranks() -> None:
    model = encoder("Esm", mask_token_id=2, position_embedding_type="rotary", token_dropout=False)
    assert all(getattr(module, "layer_idx", None) is None for module in model.modules())
    ids = torch.randint(3, 40, (2, 17), generator=generator())

    def rank(comm: Comm) -> tuple[float, int]:
        own = copy.deepcopy(model)
        torch.manual_seed(5)
        with seqpar.parallelize(own, comm, source="replicated", plan=PLANS["ring"]):
            seeds = {layer_of(layer.attention.self) for layer in own.esm.encoder.layer}
            loss = float(own(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.detach())
        assert not any(LAYER in module.__dict__ for module in own.modules())
        return loss, len(seeds)

    (alone,) = run_threads(1, rank)
    assert alone[1] == 2 and abs(alone[0] - float(copy.deepcopy(model).eval()(input_ids=ids, labels=ids).loss)) > 1e-4
    for loss, seeds in run_threads(3, rank):
        assert loss == pytest.approx(alone[0], rel=1e-6) and seeds == 2


@pytest.mark.parametrize("position_embedding_type", ["rotary", "absolute"])
@pytest.mark.parametrize("kind", ["left", "right"])
def test_embeddings_scaled_by_the_mask_tokens_of_a_row(kind: str, position_embedding_type: str) -> None:
    more = {"vocab_size": VOCABULARY, "attention_probs_dropout_prob": 0.0, "token_dropout": True}
    # 5 is among the tokens that the model is tried with
    model = encoder("Esm", mask_token_id=5, position_embedding_type=position_embedding_type, **more)
    every = [*batches(kind, 2), holes(generator(), 17)]
    for seed, batch in enumerate(every):
        ids = batch["input_ids"]
        ids[(torch.rand(ids.shape, generator=generator(seed)) < 0.3) & (ids != 0)] = 5
        ids[(ids == 1) | (ids == 0)] = 2  # the padding token, by which positions are counted, is one of its own
        ids[batch["attention_mask"] == 0] = 1
        batch["labels"][batch["attention_mask"] == 0] = -100
    expected = one_process(model, every, False)
    check(run_threads(3, on_ranks, model, every, {"plan": PLANS["ring"]}), expected, every)
    ids = every[1]["input_ids"]
    given = {
        "inputs_embeds": model.esm.embeddings.word_embeddings(ids),
        "position_ids": torch.arange(ids.shape[1])[None],
    }
    with seqpar.parallelize(model, LocalComm()) as handle, torch.no_grad():
        found = [model(**given).logits, model(input_ids=ids).logits]
        with handle.local():
            alone = [model(**given).logits, model(input_ids=ids).logits]
    for one, other in zip(found, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert (alone[0] - alone[1]).abs().max() > 1e-3


def test_a_layer_that_runs_twice_has_no_number_for_its_dropout() -> None:
    model = encoder("Albert", embedding_size=16)
    ids = torch.randint(3, 40, (2, 17), generator=generator())
    with seqpar.parallelize(model, LocalComm()), pytest.raises(NotImplementedError, match="there is no layer_idx"):
        model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)


def test_undo_leaves_the_very_model_and_nobody_else_is_touched() -> None:
    model = build("gemma3").eval()
    other = type(model)(model.config).eval()  # of the same config object
    batch = without_labels(padded(generator(), [9, 5], left=False))
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    config, values = model.config, model.config.to_dict()
    expected = [m(**batch).logits.detach() for m in (model, other)]
    with seqpar.parallelize(model, LocalComm()) as handle:
        assert model.config is not config and other.config is config and config._attn_implementation == "eager"
        assert torch.equal(other(**batch).logits, expected[1])
        assert model.config.to_dict() == values
        model.config.use_cache = False  # what others set meanwhile stays
        with pytest.raises(ValueError, match="parallel already"):
            seqpar.parallelize(model, LocalComm())
        with handle.local():
            assert torch.equal(model(**batch).logits, expected[0])
        inside = model(**batch)
    assert inside.past_key_values is None
    assert model.config is config and config.use_cache is False
    config.use_cache = True
    for name, module in model.named_modules():
        after = dict(module.__dict__)
        assert after.keys() == before[name].keys(), name
        assert all(after[key] is before[name][key] or after[key] == before[name][key] for key in after), name
    assert torch.equal(model(**batch).logits, expected[0])
    handle.undo()


@pytest.mark.filterwarnings("error")
def test_a_first_batch_warns_of_nothing() -> None:
    model = build("llama")
    with seqpar.parallelize(model, LocalComm()):
        model(**batches("right", 1)[0]).loss.backward()


def test_a_copy_does_not_share_weights_by_accident() -> None:
    model = build("llama")
    with seqpar.parallelize(model, LocalComm()), pytest.raises(NotImplementedError, match="a copy of a parallel Llama"):
        copy.deepcopy(model)
    assert copy.deepcopy(model).forward.__self__ is not model


def test_a_rank_without_a_row() -> None:
    model, every = build("llama"), batches("right", 2)
    every[1] = {name: x[:0] for name, x in every[1].items()}
    expected = one_process(model, every[:1], True)
    found = run_threads(2, on_ranks, model, every)
    assert found[1][1].shape == (0, 12, 61)
    expected.logits.append(found[1][1])
    check(found, expected, every)


def test_the_registrations_can_be_undone() -> None:
    keys.unregister()
    try:
        assert keys.KEY not in AttentionInterface()
        with pytest.raises(ValueError, match="seqpar"):
            AutoModel.from_config(build("llama").config, attn_implementation=keys.KEY)
    finally:
        keys.register()
    assert keys.KEY in AttentionInterface()


UNTOUCHED = """
import torch, transformers
from torch import nn
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                             num_attention_heads=1))
REGISTRIES = AttentionInterface, AttentionMaskInterface

def attributes():
    return {kind: dict(vars(kind)) for kind in (PreTrainedModel, nn.Module)}

before, keys = attributes(), [set(each().valid_keys()) for each in REGISTRIES]
import seqpar, seqpar.integrations.transformers
model = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                     num_attention_heads=1))
seqpar.parallelize(model, seqpar.LocalComm())
ids = torch.arange(8)[None]
model(input_ids=ids, labels=ids).loss.backward()
now = attributes()
assert all(now[kind][name] is x for kind, own in before.items() for name, x in own.items())
assert {kind: own.keys() for kind, own in now.items()} == {kind: own.keys() for kind, own in before.items()}
assert [set(each().valid_keys()) for each in REGISTRIES] == [own | {"seqpar"} for own in keys]
"""


def test_classes_of_other_libraries_stay_as_they_were() -> None:
    done = subprocess.run([sys.executable, "-c", UNTOUCHED], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("where", ["inside", "outside", "thread"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.sampled(2)
def test_layers_are_recomputed_wherever_backward_runs(reentrant: bool, where: str) -> None:
    """With rows and a plan of one's own, where there is a block to be inside of."""
    model = build("gemma3")
    model.set_attn_implementation(keys.KEY)
    lengths, ranks = [14, 5, 20], 3
    ids = packed(generator(), lengths)["input_ids"][0]
    plan = Plan(Mask(lengths), Layout.zigzag(lengths, ranks), transport="ring").padded()

    def rank(comm: Comm, checkpointed: bool) -> list[Tensor]:
        own = copy.deepcopy(model)
        if checkpointed:
            own.gradient_checkpointing_enable({"use_reentrant": reentrant})
        rows = {
            "input_ids": seqpar.shard(ids, plan, comm.rank)[None], "use_cache": False,
            "position_ids": torch.from_numpy(plan.rope_positions(comm.rank))[None],
        }  # fmt: skip
        with seqpar.parallel(plan, comm):
            loss = own(**rows).logits.square().sum()
            if checkpointed and where == "inside":
                loss.backward()
        if not checkpointed or where == "outside":
            loss.backward()
        elif where == "thread":
            in_a_thread(loss.backward)
        return [p.grad for p in own.parameters()]

    for found, expected in zip(run_threads(ranks, rank, True), run_threads(ranks, rank, False), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_parallel_model_is_recomputed_too_and_another_batch_may_come_between(reentrant: bool) -> None:
    model, every, others = build("llama"), batches("mixed", 2), batches("left", 2)

    def rank(comm: Comm) -> Any:
        own, batch = copy.deepcopy(model), every[comm.rank]
        own.gradient_checkpointing_enable({"use_reentrant": reentrant})
        with seqpar.parallelize(own, comm):
            loss = own(**batch).loss
            own(**others[comm.rank])
            loss.backward()
            own.eval()
            with torch.no_grad():
                logits = own(**without_labels(batch)).logits
        return loss.detach(), logits, {name: p.grad for name, p in own.named_parameters()}

    check(run_threads(2, rank), one_process(model, every, True), every)


@pytest.mark.usefixtures("no_graphs")
@pytest.mark.exhaustive
def test_a_decoder_layer_is_one_graph_for_all_batches() -> None:
    model = build("mistral")
    reference = copy.deepcopy(model)
    counter = CompileCounterWithBackend("aot_eager")
    model.model.layers[0].compile(fullgraph=True, backend=counter)
    with seqpar.parallelize(model, LocalComm()), seqpar.parallelize(reference, LocalComm()):
        for n in range(21):
            batch = holes(generator(n), 17 + n) if n % 3 == 1 else packed(generator(n), [5 + n, 20 - n // 2, 3])
            for each in (model, reference):
                each.zero_grad()
                each(**batch).loss.backward()
    assert counter.frame_count <= 2, "compiled once, and at most once more over 20 batches after the first"
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("no_graphs")
@pytest.mark.exhaustive
def test_a_whole_model_can_be_compiled() -> None:
    model, batch = build("llama", num_hidden_layers=1), padded(generator(), [9, 14], left=True)
    reference = copy.deepcopy(model)
    with seqpar.parallelize(model, LocalComm()), seqpar.parallelize(reference, LocalComm()):
        compiled = torch.compile(model, backend="eager")
        for each in (compiled, reference):
            each(**batch).loss.backward()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)


def moshi() -> Any:
    """A model that returns its last hidden states beside its logits."""
    config = transformers.MoshiConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        head_dim=8, ffn_dim=48, max_position_embeddings=64, sliding_window=5, audio_vocab_size=32, pad_token_id=0,
    )  # fmt: skip
    return drawn(transformers.MoshiForCausalLM, config)


@pytest.mark.parametrize("ranks", [2, 3])
def test_hidden_states_beside_logits(ranks: int) -> None:
    model, every = moshi(), batches("right", ranks)
    check(run_threads(ranks, on_ranks, model, every), one_process(model, every, True), every)
    weights = torch.randn(32, generator=generator())

    def rank(comm: Comm) -> tuple[Tensor, Any, Tensor]:
        own, batch = copy.deepcopy(model), every[comm.rank]
        with seqpar.parallelize(own, comm):
            hidden = own(**without_labels(batch)).last_hidden_state
            (hidden @ weights)[kept(batch)].sum().backward()
            return hidden.detach(), own(**batch).last_hidden_state, own.model.embed_tokens.weight.grad

    for batch, (hidden, labelled, _) in zip(every, found := run_threads(ranks, rank), strict=True):
        expected = model(**without_labels(batch)).last_hidden_state
        (expected @ weights)[kept(batch)].sum().backward()
        assert torch.allclose(hidden[kept(batch)], expected[kept(batch)], atol=1e-5) and labelled is None
    grad = model.model.embed_tokens.weight.grad
    assert torch.allclose(sum(x for _, _, x in found), grad, atol=1e-5 * float(grad.abs().max()))


class Changed(transformers.MoshiForCausalLM):
    """Returns something else for its last hidden states."""

    def forward(self, *args: Any, **named: Any) -> Any:
        out = super().forward(*args, **named)
        out.last_hidden_state = self.change(out.last_hidden_state, self.training)
        return out


@dataclass
class Summarised(CausalLMOutputWithPast):
    """An output as a later release may have it."""

    summary: Tensor | None = None


class Summing(transformers.LlamaForCausalLM):
    """Returns something of all rows, unasked."""

    def forward(self, *args: Any, **named: Any) -> Any:
        out = super().forward(*args, **named)
        return Summarised(**out, summary=out.logits.sum())


def test_what_has_no_row_per_token_is_left_out() -> None:
    """It would be of one rank's rows; the loss and the logits are as ever."""
    model, every = build("llama"), batches("left", 2)
    whole = one_process(model, every, True)
    model.__class__ = Summing

    def step(own: Any, comm: Comm) -> Any:
        out = own(**every[comm.rank])
        return float(out.loss.detach()), tuple(out.logits.shape), out.summary

    for each, batch in zip(on_copies(model, step, plan=PLANS["ring"], logits=True), every):
        assert each == (pytest.approx(float(whole.loss), rel=1e-5), (*batch["input_ids"].shape, VOCABULARY), None)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda hidden, training: hidden.roll(1, 1), "several ranks: tokens meet outside its attention"),
        (lambda hidden, training: hidden.roll(int(training), 1), "in training mode, tokens meet outside its attention"),
        (lambda hidden, training: hidden[:, :1], "it also returns last_hidden_state, which is not a row per token"),
    ],
)
def test_hidden_states_beside_logits_that_are_not_those_of_each_token(change: Any, says: str) -> None:
    model = moshi()
    model.__class__ = type("Changed", (Changed,), {"change": staticmethod(change)})
    with pytest.raises(NotImplementedError, match=says):
        seqpar.parallelize(model, LocalComm())


def numbered(seed: int, width: int, *rows: list[int]) -> tuple[dict[str, Tensor], list[Tensor]]:
    """A batch of packed rows whose attention_mask numbers the documents, with padding, and the documents."""
    g, mask = torch.Generator().manual_seed(seed), torch.zeros(len(rows), width, dtype=torch.long)
    for row, lengths in zip(mask, rows, strict=True):
        row[: sum(lengths)] = torch.repeat_interleave(torch.arange(1, len(lengths) + 1), torch.tensor(lengths))
    ids = torch.randint(1, VOCABULARY, mask.shape, generator=g)
    begins = mask.diff(dim=1, prepend=torch.zeros(len(rows), 1, dtype=torch.long)) != 0
    labels = ids.masked_fill(begins | (mask == 0), -100)
    documents = [ids[r, mask[r] == n] for r, lengths in enumerate(rows) for n in range(1, len(lengths) + 1)]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}, documents


@pytest.mark.parametrize("plan", ["planner", "ring"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "hybrid"])
def test_a_mask_that_numbers_documents_is_one_process_for_each(name: str, plan: str) -> None:
    model = hybrid("qwen3_next") if name == "hybrid" else build(name)
    every = [numbered(0, 12, [4, 3, 2]), numbered(1, 14, [9], [5, 1, 8])]
    one, count = copy.deepcopy(model), sum(len(d) - 1 for _, documents in every for d in documents)
    logits = [[one(input_ids=d[None]).logits[0] for d in documents] for _, documents in every]
    terms = [
        torch.nn.functional.cross_entropy(x[:-1], d[1:], reduction="sum")
        for rows, (_, documents) in zip(logits, every, strict=True)
        for x, d in zip(rows, documents, strict=True)
    ]
    loss = torch.stack(terms).sum() / count
    loss.backward()
    bound = max(float(p.grad.abs().max()) for p in one.parameters())  # type: ignore[union-attr]

    def step(own: Any, comm: Comm) -> tuple[float, Tensor, dict[str, Tensor]]:
        batch = every[comm.rank][0]
        out = own(**batch)
        out.loss.backward()
        sync_gradients(own.parameters(), comm)
        with torch.no_grad():
            rows = own.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return float(out.loss), rows[batch["attention_mask"] > 0], {n: p.grad for n, p in own.named_parameters()}

    for (found, rows, grads), expected in zip(on_copies(model, step, plan=PLANS[plan]), logits, strict=True):
        assert found == pytest.approx(float(loss), rel=1e-5)
        torch.testing.assert_close(rows, torch.cat(expected).detach(), rtol=1e-4, atol=1e-5)
        for each, p in one.named_parameters():
            assert float((grads[each] - p.grad).abs().max()) <= 5e-5 * bound, each
