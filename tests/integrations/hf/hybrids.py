"""Tiny hybrid and recurrent models of every family, and what one process makes of each document alone."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import seqpar
from seqpar import Comm, Layout, Mask, Plan
from tests.ecosystem import architectures
from tests.ecosystem.architectures import Architecture
from tests.ecosystem.ways import assert_close, islands
from tests.integrations.hf.models import documents, kept, largest

MOE = {"num_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, Architecture] = {
    name: Architecture(kind, "hybrid", config)
    for name, kind, config in [
        ("mamba2", "mamba2", {"n_groups": 2, "use_bias": True}),
        ("qwen3_next", "qwen3_next", {"mlp_only_layers": [1]} | MOE),
        ("lfm2", "lfm2", {"conv_bias": True}),
        ("nemotron_h", "nemotron_h", {"layers_block_type": ["mamba", "moe", "attention", "mlp"]}),
        ("jamba", "jamba", {"num_experts": 4, "num_experts_per_tok": 2, "mamba_proj_bias": True}),
        ("recurrent_gemma", "recurrent_gemma", {}),
        ("minimax", "minimax", {}),
        ("bamba", "bamba", {"mamba_n_groups": 2, "mamba_proj_bias": True}),
        ("granite4", "granitemoehybrid", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("falcon_h1", "falcon_h1", {"mamba_rms_norm": False}),
        ("falcon_h1 norm", "falcon_h1", {"mamba_rms_norm": True, "ssm_in_multiplier": 0.7, "mamba_n_groups": 2}),
        ("zamba2", "zamba2", {}),
        ("qwen3_5", "qwen3_5_text", {}),
        ("qwen3_5_moe", "qwen3_5_moe_text", {}),
        ("olmo_hybrid", "olmo_hybrid", {"linear_key_head_dim": 8, "linear_num_value_heads": 4}),
        ("kimi_linear", "kimi_linear", {"mlp_layer_types": ["dense", "sparse"]}),
        ("lfm2_moe", "lfm2_moe", {}),
        ("lfm3", "lfm3", {}),
        ("mamba", "mamba", {"use_bias": True}),
        ("falcon_mamba", "falcon_mamba", {}),
        ("zamba", "zamba", {}),
    ]
}  # fmt: skip

_building = threading.Lock()


def build(name: str, dtype: torch.dtype = torch.float32, **more: Any) -> transformers.PreTrainedModel:
    """The model of a family, in training. The same whenever it is called. more: other entries of its config."""
    family = FAMILIES[name]
    with _building, islands(dtype):
        model = architectures.build(family._replace(config=family.config | more), dtype=dtype)
    for module in model.modules():  # those of Qwen multiply by 1 + weight, and by 2 a model rounds more than 2e-5
        if type(module).__name__ in ("Qwen3NextRMSNorm", "Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm"):
            module.weight.data -= 1.0
    return model


def contiguous(lengths: Any, ranks: int) -> Plan:
    return Plan(Mask(lengths), Layout.contiguous(int(sum(lengths)), ranks))


def zigzag(lengths: Any, ranks: int) -> Plan:
    return Plan(Mask(lengths), Layout.zigzag(lengths, ranks), transport="ring")


def striped(lengths: Any, ranks: int) -> Plan:
    return Plan(Mask(lengths), Layout.striped(int(sum(lengths)), ranks), ulysses=ranks)


def empty(lengths: Any, ranks: int) -> Plan:
    """The last rank computes nothing: its only row is a pad."""
    shards = np.array_split(np.arange(int(sum(lengths))), ranks - 1)
    return Plan(Mask(lengths), Layout([*shards, np.zeros(0, np.int64)]))


def each_alone(batch: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Tokens and labels of the documents of a batch, without padding."""
    if "attention_mask" not in batch:
        return [(batch["input_ids"][row, at], batch["labels"][row, at]) for row, at in documents(batch)]
    rows = zip(batch["input_ids"], batch["labels"], kept(batch), strict=True)
    return [(ids[at], labels[at]) for ids, labels, at in rows if at.any()]


def alone(
    model: torch.nn.Module, every: list[dict[str, Tensor]], dtype: torch.dtype = torch.float32
) -> tuple[float, dict[str, Tensor]]:
    """The loss of all batches and its gradients, by one process that computes each document by itself."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    with islands(dtype):
        for ids, labels in (document for batch in every for document in each_alone(batch)):
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            total = total + F.cross_entropy(logits.double(), labels[1:], reduction="sum", ignore_index=-100)
            count += int((labels[1:] != -100).sum())
        loss = total / count
        loss.backward()
    grads = gradients(model)
    model.zero_grad()
    for module in model.modules():  # a tensor of the graph, with which a model cannot be copied
        if hasattr(module, "recurrent_states"):
            module.recurrent_states = None
    return float(loss.detach()), grads


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def on_ranks(
    comm: Comm, model: torch.nn.Module, every: list[dict[str, Tensor]], dtype: torch.dtype = torch.float32,
    options: dict[str, Any] | None = None,
) -> tuple[float, dict[str, Tensor]]:  # fmt: skip
    """The loss, and this rank's part of the gradients, of a copy of the model."""
    own = copy.deepcopy(model)
    with islands(dtype), seqpar.parallelize(own, comm, **options or {}):
        loss = own(**every[comm.rank]).loss
        loss.backward()
    return float(loss.detach()), gradients(own)


def check(
    found: list[tuple[float, dict[str, Tensor]]], expected: tuple[float, dict[str, Tensor]], tolerance: float,
    truth: Callable[[], dict[str, Tensor]] | None = None, least: float = 1e-6,
) -> None:  # fmt: skip
    """Losses on every rank and sums of gradients are the expected ones, relative to a tensor's largest element.

    A gradient below `least` of the model's largest is a zero but for rounding, and is judged against that. truth: makes
    the gradients in fp64; one that is further from the expected one must be as near to them as that is.
    """
    loss, grads = expected
    for own, _ in found:
        assert abs(own - loss) <= tolerance * abs(loss), (own, loss)
    floor = least * largest(grads)
    for name, whole in grads.items():
        total = torch.stack([each[name] for _, each in found]).sum(0)
        most = max(float(whole.abs().max()), floor)
        assert_close(total, whole, tolerance, most, name, truth)
