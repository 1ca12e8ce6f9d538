"""Models of transformers under sdpa, and their logits on ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

import seqpar
from seqpar import Comm, Layout, Mask, Plan
from tests.integrations.hf import models
from tests.integrations.hf.models import VOCABULARY

TOKENS = 40
SIZES = models.SIZES | {"max_position_embeddings": 64}
LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_expand": 2, "mamba_n_groups": 1}
ROPE = {"rope_theta": 1e4, "partial_rotary_factor": 1.0}


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
