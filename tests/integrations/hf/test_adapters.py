"""Adapters of peft that come after `parallelize`: those that compute each row by itself, and the refused others."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import seqpar
from seqpar import Comm
from seqpar.integrations.adapters import BY_ITSELF
from seqpar.testing import run_threads
from tests.integrations.hf.hybrids import contiguous
from tests.integrations.hf.models import batches, build, largest, one_process

peft = pytest.importorskip("peft")

TARGETS = {"target_modules": ["q_proj", "v_proj"]}
SQUARE = {"target_modules": ["q_proj", "o_proj"]}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "adalora": ("AdaLora", TARGETS | {"init_r": 4, "target_r": 2, "total_step": 10, "orth_reg_weight": 0.0}),
    "beft": ("Beft", TARGETS),
    "boft": ("BOFT", SQUARE | {"boft_block_size": 4}),
    "c3a": ("C3A", SQUARE | {"block_size": 8}),
    "deft": ("Deft", TARGETS),
    "delora": ("Delora", TARGETS | {"r": 2}),
    "fourierft": ("FourierFT", TARGETS | {"n_frequency": 20}),
    "frod": ("Frod", SQUARE),
    "glora": ("Glora", TARGETS | {"r": 2}),
    "gralora": ("Gralora", TARGETS | {"r": 4, "gralora_k": 2}),
    "hira": ("Hira", TARGETS | {"r": 2}),
    "hra": ("HRA", TARGETS | {"r": 2}),
    "ia3": ("IA3", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "ln_tuning": ("LNTuning", {}),
    "loha": ("LoHa", TARGETS | {"r": 2}),
    "lokr": ("LoKr", TARGETS | {"r": 2}),
    "lora": ("Lora", TARGETS | {"r": 2, "use_dora": True, "modules_to_save": ["lm_head"]}),
    "miss": ("Miss", TARGETS | {"r": 2}),
    "oft": ("OFT", TARGETS | {"r": 0, "oft_block_size": 4}),
    "osf": ("OSF", TARGETS | {"effective_rank": 4}),
    "peanut": ("Peanut", TARGETS),
    "psoft": ("Psoft", TARGETS | {"r": 4}),
    "pvera": ("Pvera", TARGETS | {"r": 2}),
    "randlora": ("RandLora", TARGETS | {"r": 2}),
    "road": ("Road", TARGETS | {"group_size": 4}),
    "shira": ("Shira", TARGETS | {"r": 2}),
    "supertuning": ("Supertuning", {}),
    "tinylora": ("TinyLora", TARGETS | {"r": 2}),
    "trainable_tokens": (
        "TrainableTokens",
        {"token_indices": list(range(1, 61, 2)), "target_modules": ["embed_tokens"]},
    ),
    "unilora": ("UniLora", TARGETS | {"r": 2}),
    "vblora": ("VBLoRA", TARGETS | {"r": 2, "num_vectors": 8, "vector_length": 8}),
    "vera": ("Vera", TARGETS | {"r": 2}),
    "waveft": ("WaveFT", TARGETS | {"n_frequency": 20}),
}
_adding = threading.Lock()  # the generator is one for all threads


def add(model: Any, config: Any) -> Any:
    """The model with adapters that have an effect; the same on every rank."""
    with _adding:
        torch.manual_seed(5)
        wrapped = peft.get_peft_model(model, copy.deepcopy(config))  # peft writes to it
        generator = torch.Generator().manual_seed(9)
        for p in wrapped.parameters():
            if p.requires_grad:
                p.data += torch.randn(p.shape, generator=generator) * 0.2
        return wrapped.eval()  # one of the methods draws numbers in training


def trained(model: Any) -> dict[str, torch.Tensor]:
    """The gradients of what trains."""
    return {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters() if p.requires_grad
    }


def test_every_kind_that_may_come_late_is_tried() -> None:
    assert CONFIGS.keys() == BY_ITSELF


@pytest.mark.parametrize("method", CONFIGS)
@pytest.mark.sampled(4)
def test_adapters_that_compute_each_row_may_come_late(method: str) -> None:
    name, options = CONFIGS[method]
    model, every = build("llama"), batches("right", 2)
    config = getattr(peft, f"{name}Config")(**options)
    whole = add(copy.deepcopy(model), config)
    expected = one_process(whole, every, True)
    with torch.no_grad():
        assert float((model(**every[0]).logits - whole(**every[0]).logits).abs().max()) > 0.1, "adapters have no effect"

    def rank(comm: Comm) -> Any:
        own = copy.deepcopy(model)
        with seqpar.parallelize(own, comm, plan=contiguous):
            late = add(own, config)
            loss = late(**every[comm.rank]).loss
            loss.backward()
            return float(loss.detach()), trained(late)

    found = run_threads(2, rank)
    assert [loss for loss, _ in found] == pytest.approx([float(expected.loss)] * 2, rel=1e-5)
    for key in found[0][1]:
        error = (sum(grads[key] for _, grads in found) - expected.grads[key]).abs().max()
        assert float(error) <= 1e-4 * largest(expected.grads), key


def refused(config: Any, match: str, *, after: bool, **given: Any) -> None:
    """Adapters are an error on both ranks: when they come after `parallelize`, and when they were there before."""
    model, every = build("llama"), batches("right", 2)
    model.config.use_cache = False
    model.set_attn_implementation("sdpa")

    def rank(comm: Comm) -> None:
        own = copy.deepcopy(model)
        if not after:
            with pytest.raises((NotImplementedError, ValueError), match=match):
                seqpar.parallelize(add(own, config), comm)
            return
        with seqpar.parallelize(own, comm):
            late = add(own, config)
            with pytest.raises((NotImplementedError, ValueError, RuntimeError), match=f"{match}|no plan surrounds"):
                late(**every[comm.rank], **given)

    run_threads(2, rank)


@pytest.mark.parametrize("after", [False, True])
def test_weights_by_task_are_refused(after: bool) -> None:
    config = peft.PolyConfig(**TARGETS, task_type="CAUSAL_LM", r=2, n_tasks=3, n_skills=2, n_splits=1)
    refused(config, "Poly chooses weights by task_ids", after=after, task_ids=torch.tensor([0, 1, 2]))


@pytest.mark.parametrize("after", [False, True])
def test_a_second_model_is_refused(after: bool) -> None:
    refused(peft.ShadowConfig(task_type="CAUSAL_LM"), "Shadow adds what a second model makes", after=after)


@pytest.mark.parametrize("after", [False, True])
def test_scales_of_tokens_are_refused(after: bool, tmp_path: Path) -> None:
    for name in "01":
        peft.get_peft_model(build("llama"), peft.LoraConfig(**TARGETS, r=2)).save_pretrained(tmp_path / name)
    adapters = {name: str(tmp_path / name) for name in "01"}
    config = peft.XLoraConfig(task_type="CAUSAL_LM", hidden_size=32, adapters=adapters, xlora_depth=1)
    refused(config, "X-LoRA scales adapters for each token", after=after)


def test_layers_that_mix_rows_are_refused_whenever_they_come() -> None:
    config = peft.LilyConfig(**TARGETS, r=2)
    refused(config, "Linear of peft's lily came after parallelize", after=True)
    refused(config, "tokens meet outside its attention", after=False)


def test_layers_that_did_not_act_in_the_trial_are_refused_when_they_do() -> None:
    model, every = add(build("llama"), peft.LilyConfig(**TARGETS, r=2)), batches("right", 2)
    bare = build("llama").eval()

    def rank(comm: Comm) -> None:
        own, batch = copy.deepcopy(model), every[comm.rank]
        own.base_model.disable_adapter_layers()
        with seqpar.parallelize(own, comm), torch.no_grad():
            logits = own(input_ids=batch["input_ids"]).logits
            torch.testing.assert_close(logits, bare(input_ids=batch["input_ids"]).logits, rtol=1e-4, atol=1e-4)
            own.base_model.enable_adapter_layers()
            with pytest.raises((NotImplementedError, ValueError), match="peft's lily came after parallelize"):
                own(input_ids=batch["input_ids"])

    run_threads(2, rank)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("kind", ["batch_average", "batch_average_once", "random"])
def test_a_projection_on_the_mean_of_rows_is_refused(kind: str, after: bool) -> None:
    """Which shows in gradients alone."""
    config = peft.LoraConfig(**TARGETS, r=2, velora_config=peft.VeloraConfig(num_groups=4, init_type=kind))
    model, every = build("llama"), batches("right", 2)
    expected = one_process(add(copy.deepcopy(model), config).train(), every, True)

    def rank(comm: Comm) -> Any:
        own = copy.deepcopy(model)
        own = own if after else add(own, config)
        with seqpar.parallelize(own, comm, plan=contiguous):
            late = (add(own, config) if after else own).train()
            if kind != "random":
                with pytest.raises((NotImplementedError, ValueError), match="VeLoRA projects inputs on the mean"):
                    late(**every[comm.rank])
                return {}
            late(**every[comm.rank]).loss.backward()
            return trained(late)

    found = run_threads(2, rank)
    for key in found[0]:
        error = (found[0][key] + found[1][key] - expected.grads[key]).abs().max()
        assert float(error) <= 1e-4 * largest(expected.grads), key
