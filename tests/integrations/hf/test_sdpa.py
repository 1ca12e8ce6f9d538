"""transformers models by PyTorch's attention alone: exact, or refused by name where tokens meet outside of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

import seqpar
from seqpar import Comm, Layout, LocalComm, Mask, Plan
from seqpar.testing import run_threads
from tests.integrations.hf.models import VOCABULARY

TOKENS = 40
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_expand": 2, "mamba_n_groups": 1}
ROPE = {"rope_theta": 1e4, "partial_rotary_factor": 1.0}
MIXING: dict[str, tuple[str, dict[str, Any], str]] = {
    "qwen3-next": ("Qwen3Next", LINEAR | {"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"]}, "'conv'"),
    "bamba": ("Bamba", MAMBA | {"attn_layer_indices": [1]}, "carries a state"),
    "nemotron-h": (
        "NemotronH",
        {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8,
         "n_groups": 1, "chunk_size": 8},
        "carries a state",
    ),
    "recurrent-gemma": (
        "RecurrentGemma", {"lru_width": 32, "block_types": ["recurrent", "attention"], "attention_window_size": 64},
        "carries a state",
    ),
    "phi3 longrope": (
        "Phi3",
        {"original_max_position_embeddings": 32, "sliding_window": None, "rope_parameters": ROPE | {
            "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "factor": 2.0,
            "original_max_position_embeddings": 32}},
        "longest position",
    ),
    "llama dynamic": (
        "Llama",
        {"max_position_embeddings": 32, "rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 4.0}},
        "longest position",
    ),
}  # fmt: skip
ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "opt": ("OPT", {"ffn_dim": 40, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
}


def build(name: str, more: dict[str, Any]) -> transformers.PreTrainedModel:
    """A tiny model with PyTorch's attention, in fp32."""
    torch.manual_seed(5)
    config = getattr(transformers, f"{name}Config")(**SIZES | more)
    model = getattr(transformers, f"{name}ForCausalLM")._from_config(config, attn_implementation="sdpa")
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    return model.train()


def zigzag(ranks: int) -> Plan:
    return Plan(Mask([TOKENS]), Layout.zigzag([TOKENS], ranks))


def logits(
    comm: Comm, model: transformers.PreTrainedModel, way: str, plan: Plan | None = None, mask: Tensor | None = None
) -> Tensor:
    """Logits of this rank's rows of one causal document, by a copy of the model."""
    own, plan = copy.deepcopy(model), plan or Plan(Mask([TOKENS]), Layout.contiguous(TOKENS, comm.size))
    ids = seqpar.shard(torch.arange(TOKENS) * 7 % VOCABULARY, plan, comm.rank)[None]
    batch = {"input_ids": ids, "position_ids": torch.from_numpy(plan.rope_positions(comm.rank))[None]}
    if mask is not None:
        batch["attention_mask"] = seqpar.shard(mask, plan, comm.rank)[None, None]
    if way == "block":
        with seqpar.sdpa(plan, comm):
            return own(**batch, use_cache=False).logits
    seqpar.parallelize(own, comm, sdpa=True, plan=plan)
    return own(**batch, use_cache=False).logits


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_tokens_is_refused_by_what_it_says_and_by_what_it_does(name: str) -> None:
    kind, more, said = MIXING[name]
    model = build(kind, more)

    def rank(comm: Comm, way: str) -> str:
        with pytest.raises((NotImplementedError, ValueError)) as raised:
            logits(comm, model, way)
        return str(raised.value)

    for message in run_threads(2, rank, "parallelize"):
        assert "cannot be computed on several ranks" in message and said in message
    for message in run_threads(2, rank, "block"):
        assert "does not follow" in message, message


@pytest.mark.parametrize("way", ["block", "parallelize"])
@pytest.mark.parametrize("name", ALONE)
def test_what_computes_every_token_alone_is_exact(name: str, way: str) -> None:
    model = build(*ALONE[name])
    with torch.no_grad():
        expected = model(torch.arange(TOKENS)[None] * 7 % VOCABULARY, use_cache=False).logits
    found = torch.cat(run_threads(2, logits, model, way), 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


# --- what a refusal recommends: where it is right, see `tests.advice` -------------------------------------------------


class Own(transformers.PreTrainedModel):
    """A model of transformers that calls PyTorch's attention itself."""

    config_class = transformers.LlamaConfig
    _supports_sdpa = True

    def __init__(self, config: transformers.LlamaConfig) -> None:
        super().__init__(config)
        self.tokens, self.places = nn.Embedding(VOCABULARY, 32), nn.Embedding(64, 32)
        self.qkv, self.head = nn.Linear(32, 96), nn.Linear(32, VOCABULARY)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens

    def forward(self, input_ids: Tensor, position_ids: Tensor, **_: Any) -> CausalLMOutput:
        x = self.tokens(input_ids) + self.places(position_ids)
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return CausalLMOutput(logits=self.head(x + y.transpose(1, 2).flatten(2)))


def test_sdpa_is_recommended_nowhere_else() -> None:
    counted = Own(transformers.LlamaConfig(**SIZES))
    counted.places.register_forward_pre_hook(lambda _, given: (torch.arange(given[0].shape[1])[None],))
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=61, hidden_size=32, n_layer=1, n_head=4))
    for other in (counted, bloom, build("Qwen3Next", MIXING["qwen3-next"][1])):
        with pytest.raises(NotImplementedError) as raised:
            seqpar.parallelize(other, LocalComm())
        assert "sdpa" not in str(raised.value)
