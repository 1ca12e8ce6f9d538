"""Models with multi-head latent attention exchange latents, those with an indexer too: results, gradients and bytes."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

import seqpar
from seqpar import Comm, LocalComm
from seqpar.integrations.hf import latents
from seqpar.testing import run_processes, run_threads
from tests.ecosystem import architectures
from tests.ecosystem.architectures import TABLE, Architecture
from tests.ecosystem.ways import islands
from tests.integrations.hf.hybrids import alone, check, gradients, striped, zigzag
from tests.integrations.hf.models import batches, logits_of
from tests.ranks import in_wrapper, whole_gradients

pytestmark = pytest.mark.skipif(
    not hasattr(DeepseekV3Attention, "expand_kv"), reason="transformers before 5.24 expands latents inside forwards"
)
DOUBLE = torch.float64
DIMS = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 12, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6, "v_head_dim": 7, "num_hidden_layers": 2,
}  # fmt: skip
MLA: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"head_dim": "unset", "first_k_dense_replace": 1, "q_lora_rank": 16},
    "deepseek_v2": {"head_dim": "unset", "first_k_dense_replace": 1, "q_lora_rank": "unset"},
    "glm4_moe_lite": {"mlp_layer_types": ["dense", "sparse"], "q_lora_rank": 16, "head_dim": "unset"},
    "kimi_linear": {"mlp_layer_types": ["dense", "dense"]},
    "longcat_flash": {"q_lora_rank": 16, "head_dim": 4},
    "minicpm3": {"q_lora_rank": 16},
    "mistral4": {"q_lora_rank": 16},
    "youtu": {"q_lora_rank": 16, "head_dim": 4},
    "axk1": {"q_lora_rank": 16, "head_dim": 4},
    "bailing_hybrid": {},
}
CHOOSING = ("deepseek_v32", "glm_moe_dsa", "axk2", "mistral_large4")  # with an indexer of many heads: no scores tie
KINDS = (*MLA, *CHOOSING)


def build(kind: str, dtype: torch.dtype = DOUBLE) -> Any:
    """A small model, the same whenever it is called."""
    row = TABLE[kind] if kind in CHOOSING else Architecture(kind, "latents", DIMS | MLA[kind])
    with islands(dtype):
        return architectures.build(row, dtype=dtype)


def layers_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "expand_kv")]


def outcome(comm: Comm, model: Any, every: list[dict[str, Tensor]], plan: Any) -> Any:
    """The loss, this rank's part of the gradients, and the logits of its batch, of a copy of the model."""
    own, batch = copy.deepcopy(model), every[comm.rank]
    with islands(DOUBLE), seqpar.parallelize(own, comm, plan=plan) as handle:
        assert "exchange latents" in handle.describe()
        loss = own(**batch).loss
        loss.backward()
        with torch.no_grad():
            logits = own(**{name: x for name, x in batch.items() if name != "labels"}).logits
    return (float(loss.detach()), gradients(own)), logits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
@pytest.mark.sampled(4)
def test_a_model_has_the_logits_loss_and_gradients_of_one_process(kind, ranks) -> None:
    model, every = build(kind), batches("packed", ranks)
    found = run_threads(ranks, outcome, model, every, zigzag if ranks == 2 else striped)
    check([result for result, _ in found], alone(model, every, DOUBLE), 1e-9)
    with islands(DOUBLE), torch.no_grad():
        for (_, logits), batch in zip(found, every, strict=True):
            whole = logits_of(model, batch)
            assert (logits - whole).abs().max() <= 1e-9 * whole.abs().max()


def adapted(kind: str) -> Any:
    """A model with adapters of the expansion that change it."""
    model = build(kind)
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=2, target_modules=["kv_b_proj"], init_lora_weights=False)).double()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(6)
def test_adapters_of_the_expansion_are_in_the_result_under_checkpoints_too(kind) -> None:
    model, every = adapted(kind), batches("packed", 2)
    whole = alone(model, every, DOUBLE)
    changed = [name for name, grad in whole[1].items() if "lora" in name and grad.any()]
    assert len(changed) == 2 * len([module for module in model.modules() if hasattr(module, "expand_kv")])
    contexts = {"context_fn": lambda: (islands(DOUBLE), islands(DOUBLE))}  # backward leaves that of the forward
    model.gradient_checkpointing_enable({"use_reentrant": False} | contexts)
    check([result for result, _ in run_threads(2, outcome, model, every, zigzag)], whole, 1e-9)


def sent(comm: Comm, model: Any, *, expanded: bool) -> tuple[int, int, str]:
    """Bytes of a forward, those that its plan predicts for attention, and what the handle says."""
    own, batch, plans = copy.deepcopy(model), batches("packed", 1)[0], []

    def plan(lengths: Any, ranks: int) -> Any:
        plans.append(zigzag(lengths, ranks))
        return plans[-1]

    given = {name: batch[name] for name in ("input_ids", "position_ids")}
    with seqpar.parallelize(own, comm, plan=plan, source="replicated", logits=False) as handle, torch.no_grad():
        for layer in layers_of(own) if expanded else ():
            vars(layer)["expand_kv"].around.refusal = "the test wants keys"
        own(**given)
        before = comm.stats.bytes_sent
        own(**given)
        keys = {"kv_heads": 4} if expanded else {"kv_heads": 1, "latent": (12, 4)}
        predicted = plans[-1].bytes(comm.rank, heads=4, dim=10, v_dim=7, dtype="float64", **keys)
        return comm.stats.bytes_sent - before, 2 * predicted, handle.describe()


def test_it_sends_latents_and_says_so() -> None:
    model = build("deepseek_v3")
    of_latents, of_keys = (run_threads(2, partial(sent, expanded=expanded), model) for expanded in (False, True))
    for (bytes_sent, latent, said), (before, keys, instead) in zip(of_latents, of_keys, strict=True):
        assert before - bytes_sent == keys - latent > 0
        assert said.endswith("2 layers (DeepseekV3Attention) exchange latents")
        assert instead.endswith("exchange keys and values: the test wants keys")


def sharded(comm: Comm, kinds: tuple[str, ...], first: bool) -> list[tuple[float, dict[str, Tensor]]]:
    """Of models that FSDP2 shards before or after they are made parallel."""
    return [_sharded(comm, kind, first) for kind in kinds]


def _sharded(comm: Comm, kind: str, first: bool) -> tuple[float, dict[str, Tensor]]:
    with islands(DOUBLE):
        model = build(kind)
        parts = model.base_model.get_decoder().layers
        wrapped = in_wrapper(model, "fsdp", parts) if first else model
        handle = seqpar.parallelize(model, comm, average_over=comm.size, plan=zigzag)
        assert "exchange latents" in handle.describe()
        wrapped = wrapped if first else in_wrapper(model, "fsdp", parts)
        loss = wrapped(**batches("packed", comm.size)[comm.rank]).loss
        loss.backward()
    grads = {n: torch.zeros(()) for n, _ in model.named_parameters()} | whole_gradients(model)
    return float(loss.detach()), {n: grad / comm.size for n, grad in grads.items()}


def refused(comm: Comm) -> None:
    with islands(DOUBLE), pytest.raises(NotImplementedError, match="fully_shard has .* consists of several configs"):
        _sharded(comm, "mistral_large4", True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", [False, True])
def test_layers_may_be_sharded(first) -> None:
    kinds = tuple(kind for kind in KINDS if not first or kind != "mistral_large4")  # of which no small one is made
    for kind, *found in zip(kinds, *run_processes(2, sharded, kinds, first, timeout=900.0), strict=True):
        check(found, alone(build(kind), batches("packed", 2), DOUBLE), 1e-9)
    if first:
        run_processes(2, refused, timeout=300.0)


def curved(latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    keys = (latent**2)[..., :6].expand(-1, 4, -1, -1)
    return torch.cat([keys, rotated.expand(-1, 4, -1, -1)], -1), latent[..., :7].expand(-1, 4, -1, -1)


def turned(latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    keys = latent[..., :6].expand(-1, 4, -1, -1)
    return torch.cat([keys, 2 * rotated.expand(-1, 4, -1, -1)], -1), latent[..., :7].expand(-1, 4, -1, -1)


def test_a_layer_that_does_something_else_hands_on_keys() -> None:
    layer = layers_of(build("deepseek_v3", torch.float32))[0]
    assert latents.refusal(layer, layer.expand_kv) == ""
    assert latents.refusal(layer, curved) == "its expansion is not linear in the latent"
    assert latents.refusal(layer, turned) == "it changes the rotated part"
    layer.bfloat16()
    assert latents.refusal(layer, layer.expand_kv) == ""
    layer.kv_b_proj = nn.Sequential(nn.Dropout(0.1), layer.kv_b_proj)
    assert latents.refusal(layer, layer.expand_kv) == "it drops parts of what it expands"


def test_a_restored_model_expands_as_before() -> None:
    model = build("deepseek_v3", torch.float32)
    handle = seqpar.parallelize(model, LocalComm())
    assert latents.hands_on_latents(model)
    with handle.local():
        assert not latents.hands_on_latents(model)
    handle.undo()
    assert all("expand_kv" not in vars(layer) for layer in layers_of(model))
