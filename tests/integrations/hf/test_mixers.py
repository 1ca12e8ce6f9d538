"""Mixers of hybrid models beside what else a model meets: adapters, autocast, shards, caches, compilers and batches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import DynamicCache

import seqpar
from seqpar import Comm, LocalComm
from seqpar.integrations.hf.recurrent.mixers import mixers
from seqpar.testing import run_processes, run_threads
from tests.integrations.hf.hybrids import alone, build, check, contiguous, gradients, on_ranks, zigzag
from tests.integrations.hf.models import batches, holes, packed, padded
from tests.ranks import in_wrapper, whole_gradients

RANKS = 2


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


DENSE = {
    "mamba2": {},
    "qwen3_next": {"mlp_only_layers": [0, 1]},
    "lfm2": {},
    "kimi_linear": {"mlp_layer_types": ["dense"] * 2},
    "jamba": {"num_experts": 1, "num_experts_per_tok": 1},
    "recurrent_gemma": {},
}


@pytest.mark.parametrize("name", ["cache", "cache_params", "past_key_values"])
def test_a_cache_by_each_of_its_names_is_refused(name: str) -> None:
    model = build("mamba2")
    with seqpar.parallelize(model, LocalComm()), pytest.raises(NotImplementedError, match="Mamba2Mixer got a cache"):
        mixers(model)[0](torch.ones(1, 4, model.config.hidden_size), **{name: DynamicCache()})


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.sampled(3)
def test_a_document_does_not_know_of_another(name: str) -> None:
    """To the bit, even of NaN. Experts would multiply rows in groups, which another token changes."""
    model, batch = build(name, **DENSE[name]).eval(), packed(generator(), [13, 21, 6])
    first = model.get_input_embeddings()(batch["input_ids"]).detach()

    def rank(comm: Comm) -> list[Tensor]:
        own, found = copy.deepcopy(model), []
        with seqpar.parallelize(own, comm, source="replicated", plan=zigzag), torch.no_grad():
            for change in (0.0, 1.0, torch.nan):
                embedded = first.clone()
                embedded[0, 15] += change
                found.append(own(inputs_embeds=embedded, position_ids=batch["position_ids"]).logits[0])
        return found

    for one, *others in run_threads(3, rank):
        for other in others:
            same = (one == other).all(-1)
            assert same[:13].all() and same[34:].all() and not same[15:20].any()
        assert others[1][15:34].isnan().all()


@pytest.mark.parametrize(("name", "targets"), [("mamba2", ["in_proj"]), ("qwen3_next", ["in_proj_ba", "out_proj"])])
def test_adapters_of_projections_are_in_the_result(name: str, targets: list[str]) -> None:
    model, every = build(name), batches("packed", RANKS)
    torch.manual_seed(1)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=targets, init_lora_weights=False))

    def rank(comm: Comm) -> tuple[float, dict[str, Tensor]]:
        own = copy.deepcopy(adapted)
        with seqpar.parallelize(own, comm, plan=zigzag):
            loss = own(**every[comm.rank]).loss
            loss.backward()
        return float(loss.detach()), gradients(own)

    found, whole = run_threads(RANKS, rank), alone(adapted, every)
    assert len([name for name, grad in whole[1].items() if "lora" in name and grad.any()]) >= 2
    check(found, whole, 2e-5)


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next", "lfm2", "jamba", "recurrent_gemma", "minimax"])
@pytest.mark.sampled(3)
def test_autocast_reaches_projections_and_filters(name: str) -> None:
    model, every = build(name), batches("packed", RANKS)

    def rank(comm: Comm) -> tuple[float, dict[str, Tensor]]:
        own = copy.deepcopy(model)
        with seqpar.parallelize(own, comm, plan=contiguous):
            with torch.autocast("cpu", torch.bfloat16):
                loss = own(**every[comm.rank]).loss
            loss.backward()
        return float(loss.detach()), gradients(own)

    exact, _ = alone(model, every)
    for loss, grads in run_threads(RANKS, rank):
        assert loss == pytest.approx(exact, rel=2e-2) and loss != pytest.approx(exact, rel=1e-6)
        assert all(grad.dtype == torch.float32 and grad.isfinite().all() for grad in grads.values())


@pytest.mark.parametrize("name", ["mamba2", "nemotron_h", "qwen3_next", "jamba", "recurrent_gemma", "minimax"])
@pytest.mark.sampled(3)
def test_models_of_16_bits_have_the_loss_of_fp32(name: str) -> None:
    """Also those whose logits are fp32 all the same."""
    model, every = build(name), batches("packed", RANKS)
    exact, _ = alone(model, every)
    for loss, grads in run_threads(RANKS, on_ranks, model.bfloat16(), every, torch.float32, {"plan": contiguous}):
        assert loss == pytest.approx(exact, rel=1e-2)
        assert all(grad.dtype == torch.bfloat16 and grad.isfinite().all() for grad in grads.values())


def sharded(comm: Comm, names: list[str]) -> list[tuple[float, dict[str, Tensor]]]:
    """Losses and averaged gradients of models whose layers are sharded."""
    found = []
    for name in names:
        model = build(name)
        seqpar.parallelize(model, comm, average_over=comm.size, plan=contiguous)
        loss = in_wrapper(model, "fsdp", model.base_model.layers)(**batches("packed", comm.size)[comm.rank]).loss
        loss.backward()
        grads = {n: torch.zeros(()) for n, _ in model.named_parameters()} | whole_gradients(model)
        found.append((float(loss.detach()), {n: grad / comm.size for n, grad in grads.items()}))
    return found


@pytest.mark.exhaustive
def test_layers_may_be_sharded() -> None:
    names = ["mamba2", "qwen3_next"]
    ranks = run_processes(RANKS, sharded, names)
    for n, name in enumerate(names):
        check([found[n] for found in ranks], alone(build(name), batches("packed", RANKS)), 2e-5)


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next", "lfm2", "jamba", "recurrent_gemma", "minimax"])
@pytest.mark.sampled(3)
def test_inside_local_a_model_generates_with_its_own_cache(name: str) -> None:
    model, prompt = build(name).eval(), padded(generator(), [9], left=False)["input_ids"]
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "use_cache": True}
    expected = model.generate(prompt, **options)
    forwards = [mixer.forward for mixer in mixers(model)]
    with seqpar.parallelize(model, LocalComm()) as handle:
        with handle.local():
            assert torch.equal(model.generate(prompt, **options), expected)
        with pytest.raises(RuntimeError, match="found no plan.*call the model that was given to seqpar.parallelize"):
            mixers(model)[0](torch.zeros(1, 3, 32))
    assert [mixer.forward for mixer in mixers(model)] == forwards
    assert torch.equal(model.generate(prompt, **options), expected)


def recurrent_layer(model: nn.Module) -> nn.Module:
    """The first layer with a mixer."""
    return next(layer for layer in model.base_model.layers if mixers(layer))


@pytest.mark.usefixtures("no_graphs")
@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "lfm2", "jamba", "recurrent_gemma"])
@pytest.mark.exhaustive
def test_a_layer_is_one_graph_for_all_batches(name: str) -> None:
    model, counter = build(name, **DENSE[name]), CompileCounterWithBackend("aot_eager")
    eager = copy.deepcopy(model)
    recurrent_layer(model).compile(fullgraph=True, backend=counter)
    with seqpar.parallelize(model, LocalComm()), seqpar.parallelize(eager, LocalComm()):
        for n in range(4):
            batch, losses = packed(generator(n), [9 + n, 14 - 2 * n, 3]), []
            for each in (model, eager):
                each.zero_grad()
                losses.append(each(**batch).loss)
                losses[-1].backward()
            assert torch.equal(*losses)
            assert all(torch.equal(a, b) for a, b in zip(gradients(model).values(), gradients(eager).values()))
    assert counter.frame_count <= 2, "compiled once, and at most once more for another number of rows"


def compiled(comm: Comm, names: list[str]) -> list[tuple[float, dict[str, Tensor]]]:
    """Losses and gradients of models with compiled layers that backward repeats, after a batch with another plan."""
    found = []
    for name in names:
        torch._dynamo.reset()
        model, every = build(name, **DENSE[name]), batches("packed", comm.size)
        recurrent_layer(model).compile(fullgraph=True, backend="aot_eager")
        model.gradient_checkpointing_enable({"use_reentrant": False})
        with seqpar.parallelize(model, comm, plan=zigzag):
            loss = model(**every[comm.rank]).loss
            model(**every[comm.rank - 1])
            loss.backward()
        found.append((float(loss.detach()), gradients(model)))
    return found


@pytest.mark.exhaustive
def test_compiled_layers_find_the_plan_of_their_forward() -> None:
    names = ["mamba2", "qwen3_next"]
    ranks = run_processes(RANKS, compiled, names)
    for n, name in enumerate(names):
        check([found[n] for found in ranks], alone(build(name, **DENSE[name]), batches("packed", RANKS)), 2e-5)


def test_tokens_that_a_mask_leaves_out_between_others_are_refused() -> None:
    model = build("mamba2")
    with (
        seqpar.parallelize(model, LocalComm()),
        pytest.raises(NotImplementedError, match="would decay the states of recurrent layers; leave them out"),
    ):
        model(**holes(generator(), 17))


PLACES: dict[str, dict[str, Tensor]] = {
    "padding on the left": padded(generator(), [9, 4], left=True),
    "padding before a first position of 0": padded(generator(), [9, 4], left=True)
    | {"position_ids": torch.tensor([[*range(9)], [1] * 5 + [*range(4)]])},
    "positions from 5": padded(generator(), [9, 4], left=False) | {"position_ids": torch.arange(5, 14).expand(2, -1)},
    "a packed document from 1": packed(generator(), [5, 4])
    | {"position_ids": torch.tensor([[*range(5), *range(1, 5)]])},
}  # fmt: skip


@pytest.mark.parametrize("places", PLACES)
def test_places_that_recurrent_gemma_reads_in_its_own_way_are_refused(places: str) -> None:
    """Its state begins anew where a position is 0 alone, and padding on the left is a part of a row to it."""
    model, right = build("recurrent_gemma"), packed(generator(), [5, 4])
    expected = alone(model, [right, right])[0]

    def rank(comm: Comm) -> float:
        own = copy.deepcopy(model)
        with seqpar.parallelize(own, comm):
            with pytest.raises((NotImplementedError, ValueError), match="its recurrence begins where a position is 0"):
                own(**PLACES[places] if comm.rank else right)
            return float(own(**right).loss)

    assert run_threads(RANKS, rank) == pytest.approx([expected] * RANKS, rel=1e-5)


def test_a_mixer_of_a_known_name_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("lfm2")
    kind = type(mixers(model)[0])
    before = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, *args, **named: 1.1 * before(self, *args, **named))
    with pytest.raises(NotImplementedError, match="or its Lfm2ShortConv is not the one that seqpar knows"):
        seqpar.parallelize(model, LocalComm())
    assert "forward" not in mixers(model)[0].__dict__
