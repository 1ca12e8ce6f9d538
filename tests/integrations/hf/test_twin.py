"""Models whose weights come later or are sharded: a small model of their config is tried in their place."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM

import seqpar
from seqpar import Comm, LocalComm
from seqpar.testing import run_processes, run_threads
from tests.ecosystem.architectures import TABLE, Architecture
from tests.ecosystem.ways import islands
from tests.integrations.hf.hybrids import contiguous, gradients
from tests.integrations.hf.models import batches
from tests.integrations.hf.unions import Outcome, build, check, one
from tests.ranks import in_wrapper, whole_gradients

RANKS = 2
MODELS = {"llama": Architecture("llama", "dense"), "qwen3": Architecture("qwen3", "dense")}


def loaded(model: Any, weights: Any) -> Any:
    """The model with the weights of another one, and with its buffers, which no state dict has."""
    model.load_state_dict(weights.state_dict(), assign=True)
    for (_, module), (_, other) in zip(model.named_modules(), weights.named_modules(), strict=True):
        for name, buffer in other.named_buffers(recurse=False):
            module._buffers[name] = buffer.clone()
            if f"original_{name}" in module.__dict__:
                module.__dict__[f"original_{name}"] = buffer.clone()
    return model


def as_by_zero_3(model: Any) -> None:
    """Weights are empty outside of their module's forward, which gathers them, as DeepSpeed leaves them."""
    for number, p in enumerate(model.parameters()):
        p.ds_id, p.whole, p.data = number, p.data, p.data.new_empty(0)

    def fill(module: nn.Module, *_: Any) -> None:
        for p in module.parameters(recurse=False):
            p.data = p.whole

    def empty(module: nn.Module, *_: Any) -> None:
        for p in module.parameters(recurse=False):
            p.data = p.whole.new_empty(0)

    for module in model.modules():
        module.register_forward_pre_hook(fill)
        module.register_forward_hook(empty)


def test_weights_that_deepspeed_has_sharded() -> None:
    model, every = build(MODELS["llama"]), batches("left", RANKS)
    expected = one(model, every, torch.float64)[0]

    def rank(comm: Comm) -> float:
        own = copy.deepcopy(model)
        as_by_zero_3(own)
        with islands(torch.float64), seqpar.parallelize(own, comm, plan=contiguous), torch.no_grad():
            return float(own(**every[comm.rank]).loss)

    assert run_threads(RANKS, rank) == [pytest.approx(expected, rel=1e-9)] * RANKS


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("first", ["meta", "weights"])
@pytest.mark.sampled(2)
def test_weights_that_are_loaded_later(name: str, first: str) -> None:
    """On every rank; or on all but the first, as accelerate's cpu_ram_efficient_loading does."""
    weights, every = build(MODELS[name]), batches("left", RANKS)

    def rank(comm: Comm) -> Outcome:
        model = copy.deepcopy(weights)
        if first == "meta" or comm.rank:
            model = model.to("meta")
        with islands(torch.float64), seqpar.parallelize(model, comm, plan=contiguous):
            loaded(model, copy.deepcopy(weights))
            loss = model(**every[comm.rank]).loss
            loss.backward()
        return float(loss.detach()), gradients(model)

    check(run_threads(RANKS, rank), one(weights, every, torch.float64), 1e-9)


def sharded_first(comm: Comm, name: str) -> tuple[float, dict[str, Tensor]]:
    """The loss, and the averaged gradients, of a model that fully_shard has sharded before it is made parallel."""
    model = build(MODELS[name])
    in_wrapper(model, "fsdp", model.model.layers)
    with islands(torch.float64):
        seqpar.parallelize(model, comm, plan=contiguous, average_over=comm.size)
        for _ in range(2):  # the second pass finds what the first one left sharded
            model.zero_grad()
            loss = model(**batches("left", comm.size)[comm.rank]).loss
            loss.backward()
    return float(loss.detach()), whole_gradients(model)


def tensors_first(comm: Comm, name: str) -> tuple[float, dict[str, Tensor]]:
    """The loss and gradients of a model whose layers are split by tensors; each rank by itself has all tokens."""
    model = build(MODELS[name])
    mesh = init_device_mesh("cpu", (comm.size,))
    every = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
    parallelize_module(model, mesh, {f"model.layers.*.mlp.{name}": style for name, style in every.items()})
    return by_itself(model)


def by_itself(model: Any) -> tuple[float, dict[str, Tensor]]:
    """The loss and gradients of a model whose ranks all have the same tokens."""
    with islands(torch.float64), seqpar.parallelize(model, LocalComm(), plan=contiguous):
        loss = model(**batches("left", 1)[0]).loss
        loss.backward()
    return float(loss.detach()), whole_gradients(model)


def by_tp_plan(comm: Comm, folder: Path) -> tuple[float, dict[str, Tensor]]:
    """The same of a model that transformers splits by its own plan while it loads the weights."""
    with warnings.catch_warnings(), islands(torch.float64):
        warnings.simplefilter("ignore", FutureWarning)  # of the name of this argument
        model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", tp_size=comm.size, dtype=torch.float64)
    assert any(isinstance(p, DTensor) for p in model.parameters())
    return by_itself(model)


def on_processes(comm: Comm, folder: Path) -> dict[str, Any]:
    found = {name: sharded_first(comm, name) for name in MODELS}
    return found | {"tensors": tensors_first(comm, "llama"), "plan": by_tp_plan(comm, folder)}


def test_weights_that_are_sharded_already(tmp_path: Path) -> None:
    build(MODELS["llama"]).save_pretrained(tmp_path)
    ranks = run_processes(RANKS, on_processes, tmp_path)
    for name, row in MODELS.items():
        whole = one(build(row), batches("left", RANKS), torch.float64)
        for each in ranks:
            check([each[name]], whole, 1e-9)
    for each in ranks:
        for name in ("tensors", "plan"):
            check([each[name]], one(build(MODELS["llama"]), batches("left", 1), torch.float64), 1e-9)


def facts(model: Any) -> tuple[Any, ...]:
    """The findings on a model, without its head."""
    with seqpar.parallelize(model, LocalComm()) as handle:
        return handle.fit._replace(head=handle.fit.head is not None)


ALIKE = ("llama", "gemma3_text", "gpt_oss", "roberta", "bloom", "qwen3_next", "llama-sequence", "phi3-longrope")


@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.sampled(2)
def test_a_twin_shows_what_the_model_shows(name: str) -> None:
    model = build(TABLE[name], torch.float32)
    assert facts(copy.deepcopy(model).to("meta")) == facts(model)


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, torch.compile])
def test_wrappers_of_layers_do_not_count_as_modules(wrap) -> None:
    model = build(TABLE["llama"], torch.float32)
    expected = facts(model)
    for n, layer in enumerate(model.model.layers):
        model.model.layers[n] = wrap(layer)
    if wrap is checkpoint_wrapper:
        assert facts(model) == expected
    assert facts(model.to("meta")) == expected


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if row.group not in ("vision", "audio")])
def test_every_twin_shows_what_the_model_shows_or_is_refused(name: str) -> None:
    try:
        model = build(TABLE[name], torch.float32)
        expected = facts(model)
    except (NotImplementedError, ValueError, RuntimeError, KeyError):
        pytest.skip("refused")
    try:
        found = facts(copy.deepcopy(model).to("meta"))
    except NotImplementedError as error:
        assert "load the weights on every rank, then call parallelize" in str(error), error  # noqa: PT017
    else:
        assert found == expected


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("llama", {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
                   "intermediate_size": 14336, "num_hidden_layers": 80, "pad_token_id": 128004, "head_dim": 128}),
        ("gemma3_text", {"hidden_size": 1152, "num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 262144,
                         "num_hidden_layers": 26, "layer_types": ["sliding_attention"] * 5 + ["full_attention"] * 21}),
        ("deepseek_v3", {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 16, "n_group": 4,
                         "num_hidden_layers": 8, "first_k_dense_replace": 3, "n_routed_experts": 64,
                         "vocab_size": 129280}),
    ],
)  # fmt: skip
def test_a_large_model_is_never_whole(name: str, sizes: dict[str, Any]) -> None:
    """Models of billions of parameters, which exist on the meta device alone, in a second."""
    from tests.ecosystem.architectures import class_of, config_of

    row = Architecture(name, "dense", sizes)
    with torch.device("meta"):
        model = class_of(row)._from_config(config_of(row), attn_implementation="sdpa")
    with seqpar.parallelize(model, LocalComm()) as handle:
        assert handle.fit.head is model.lm_head and handle.fit.result == "logits"
        assert all(p.is_meta for p in model.parameters())
