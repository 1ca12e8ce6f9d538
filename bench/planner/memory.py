"""The planner's bytes of a training step compared with torch's `FSDPMemTracker`, on fake tensors of real sizes.

    python -m bench.planner.memory            # 24 configurations of Llama 8B and Qwen3 8B with 4 layers: a few minutes

A rank of 8 under FSDP2 with bfloat16 weights, float32 state and AdamW runs two steps without any memory. The tracker
belongs to torch's private tools; with `foreach=True` it counts AdamW's state several times.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from seqpar.planner import Hardware, ModelShape, Training
from seqpar.planner.memory import LOGITS, Memory

RANKS, LAYERS = 8, 4
MODELS = ("llama-8b", "qwen3-8b")
ROWS = (2048, 16_384, 65_536)
CASES = [
    (model, rows, recompute, reshard)
    for model in MODELS for rows in ROWS for recompute in ("none", "full") for reshard in (True, False)
]  # fmt: skip


class ChunkedLoss(torch.autograd.Function):
    """What `seqpar.train.linear_cross_entropy` allocates, without reading a value of a fake tensor."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        grad, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        total = hidden.new_zeros(())
        for at in range(0, min(len(hidden), 2 * LOGITS), LOGITS):
            logits = F.linear(hidden[at : at + LOGITS], weight).float().softmax(-1)
            rounded = logits.to(weight.dtype)
            torch.mm(rounded, weight, out=grad[at : at + LOGITS])
            grad_weight.add_(rounded.t() @ hidden[at : at + LOGITS])
            total = total + logits.sum()
            del logits, rounded
        ctx.save_for_backward(grad, grad_weight)
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, by: Tensor) -> tuple[Tensor, Tensor]:
        grad, grad_weight = ctx.saved_tensors
        return grad * by.to(grad.dtype), (grad_weight * by).to(ctx.dtype)


def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None, scaling: Any = None, **_: Any) -> Any:
    """Causal attention without a mask, which transformers would build on fake tensors, [T, T]."""
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


def decoder(shape: ModelShape) -> nn.Module:
    """transformers' model of that shape, on fake tensors."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register("fake", attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register("fake", lambda *_, **__: None)
    config, kind = (Qwen3Config, Qwen3ForCausalLM) if shape.qk_norm else (LlamaConfig, LlamaForCausalLM)
    return kind(
        config(
            vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.ffn, head_dim=shape.dim,
            num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
            attn_implementation="fake", use_cache=False, tie_word_embeddings=shape.tied,
            max_position_embeddings=1 << 20,
        )
    )  # fmt: skip


def recomputed(forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
    return checkpoint(partial(forward, **named), *args, use_reentrant=False, preserve_rng_state=False)


def traced(shape: ModelShape, rows: int, training: Training) -> int:
    """The most bytes of a rank before the optimizer's second step."""
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (RANKS,))
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = decoder(shape)
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            for layer in model.model.layers:
                if shape.recompute == "full":
                    layer.forward = partial(recomputed, layer.forward)
                fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=training.reshard)
            body, head = model.model, model.lm_head
            model.forward = lambda ids: ChunkedLoss.apply(body(input_ids=ids).last_hidden_state[0], head.weight)
            fully_shard(model, mesh=mesh, mp_policy=policy)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
            ids = torch.zeros((1, rows), dtype=torch.int64)
            tracker = FSDPMemTracker(model, optimizer)
            tracker.track_inputs((ids,))
            with tracker:
                for _ in range(2):
                    model(ids).backward()
                    most = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
                    optimizer.step()
                    optimizer.zero_grad()
                    tracker.reset_mod_stats()
        return int(most)
    finally:
        dist.destroy_process_group()


def planned(shape: ModelShape, rows: int, training: Training) -> int:
    """The planner's bytes, without what attention of several ranks exchanges and accumulates."""
    memory = Memory.of(shape, Hardware.preset("cpu"), 0, training, RANKS)
    working = 4 * shape.heads * (shape.dim + shape.values)
    plain = [m if m.name in ("loss", "head", "step") else m._replace(row=m.row - working) for m in memory.moments]
    return replace(memory, moments=tuple(plain)).bytes(rows)


def compared(model: str, rows: int, recompute: str, reshard: bool) -> tuple[int, int]:
    """Bytes of the tracker and of the planner."""
    shape = replace(ModelShape.preset(model), layers=LAYERS, recompute=recompute)
    training = Training(reshard=reshard)
    return traced(shape, rows, training), planned(shape, rows, training)


def main() -> int:
    """Print all cases; 1 if one of them is more than 5 % off."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    worst = 0.0
    for case in CASES:
        truth, ours = compared(*case)
        worst = max(worst, abs(ours / truth - 1))
        print(*case, f"traced {truth / 1e9:.2f} GB, planned {ours / 1e9:.2f} GB, {ours / truth - 1:+.1%}", flush=True)
    print(f"the largest difference of {len(CASES)} is {worst:.1%}")
    return 1 if worst > 0.05 else 0


if __name__ == "__main__":
    sys.exit(main())
