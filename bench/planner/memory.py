"""The planner's bytes of a training step compared with torch's `FSDPMemTracker`, on fake tensors of real sizes.

    python -m bench.planner.memory            # the closed form: Llama 8B and Qwen3 8B with 4 layers, a few minutes
    python -m bench.planner.memory --traced   # blocks by seqpar.train.trace: Gemma 3, Qwen3-MoE and Qwen3-Next

A rank of 8 under FSDP2 with bfloat16 weights, float32 state and AdamW runs two steps without any memory. Layers
recompute by one policy, or the first of them by another than the rest. The tracker belongs to torch's private tools;
with `foreach=True` it counts AdamW's state several times.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

from seqpar.planner import Hardware, ModelShape, Training
from seqpar.planner.blocks import BlockBytes
from seqpar.planner.memory import LOGITS, Memory
from seqpar.planner.shape import TILE
from seqpar.train import tile
from seqpar.train.trace import set_policy, trace_layers

RANKS, LAYERS = 8, 4
MODELS = ("llama-8b", "qwen3-8b")
TRACED: dict[str, dict[str, Any]] = {  # by their types in transformers, with sizes of published models
    "gemma3_text": {
        "vocab_size": 262_144, "hidden_size": 3840, "intermediate_size": 15_360, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 256, "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "qwen3_moe": {
        "vocab_size": 151_936, "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    },
    "qwen3_next": {
        "vocab_size": 151_936, "hidden_size": 2048, "moe_intermediate_size": 512, "num_experts": 512,
        "num_experts_per_tok": 10, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    },
}  # fmt: skip


class Case(NamedTuple):
    """A model, rows of a rank, and what its layers recompute. first: so many first layers by another policy."""

    model: str
    rows: int
    recompute: str
    reshard: bool
    first: tuple[int, str] = (0, "none")


ROWS = (2048, 16_384, 65_536)
CASES = [Case(*each) for each in product(MODELS, ROWS, ("none", "full"), (True, False))]
MIXED = [
    Case("llama-8b", 16_384, "none", True, (1, "full")), Case("llama-8b", 65_536, "none", True, (2, "full")),
    Case("qwen3-8b", 65_536, "full", False, (3, "none")), Case("qwen3-8b", 16_384, "none", False, (3, "full")),
    Case("llama-8b", 65_536, "full", True, (2, "tiled")),
]  # fmt: skip
OF_BLOCKS = [
    *(Case(*each) for each in product(("gemma3_text", "qwen3_moe"), (2048, 32_768), ("none", "full"), (True, False))),
    *(Case("qwen3_next", 2048, *each) for each in product(("none", "full"), (True, False))),
    *(Case(name, 8192, each, True) for name, each in product(TRACED, ("keep-attention", "tiled"))),
    Case("gemma3_text", 32_768, "none", True, (2, "full")), Case("qwen3_moe", 32_768, "full", True, (2, "none")),
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


def config(name: str) -> Any:
    """transformers' config of a model with few layers."""
    from transformers import AutoConfig
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register("fake", attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register("fake", lambda *_, **__: None)
    kind, sizes = name, TRACED.get(name)
    if sizes is None:
        shape = ModelShape.preset(name)
        kind, sizes = "qwen3" if shape.qk_norm else "llama", {
            "vocab_size": shape.vocab, "hidden_size": shape.hidden, "intermediate_size": shape.ffn,
            "head_dim": shape.dim, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
            "tie_word_embeddings": shape.tied,
        }  # fmt: skip
    return AutoConfig.for_model(
        kind, **sizes, num_hidden_layers=LAYERS, attn_implementation="fake", use_cache=False,
        max_position_embeddings=1 << 20,
    )  # fmt: skip


def decoder(name: str, dtype: torch.dtype) -> Any:
    """transformers' model, on fake tensors."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config(name), dtype=dtype)


@cache
def blocks(name: str) -> list[BlockBytes]:
    """The trace of each layer."""
    with FakeTensorMode():
        model, ids = decoder(name, torch.bfloat16), torch.zeros((1, 31), dtype=torch.int64)
        return trace_layers(model.model.layers, lambda: model.model(input_ids=ids))


@contextmanager
def fake_ranks() -> Iterator[Any]:
    """The mesh of ranks that do not exist, and tensors without memory."""
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (RANKS,))
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield mesh
    finally:
        dist.destroy_process_group()


def traced(case: Case) -> int:
    """The most bytes of a rank before the optimizer's second step."""
    with fake_ranks() as mesh:
        model = decoder(case.model, torch.float32)
        policy, layers = MixedPrecisionPolicy(torch.bfloat16, torch.float32), model.model.layers
        for nth, layer in enumerate(layers):
            set_policy(layer, case.first[1] if nth < case.first[0] else case.recompute, TILE)
        if case.recompute == "tiled":
            tile(model.model.norm, TILE)
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=case.reshard)
        body, head = model.model, model.lm_head
        model.forward = lambda ids: ChunkedLoss.apply(body(input_ids=ids).last_hidden_state[0], head.weight)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        ids = torch.zeros((1, case.rows), dtype=torch.int64)
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


def planned(case: Case) -> int:
    """The planner's bytes, without what attention of several ranks exchanges and accumulates."""
    of_blocks = case.model in TRACED
    shape = ModelShape.from_config(config(case.model)) if of_blocks else ModelShape.preset(case.model)
    traced = tuple(blocks(case.model)) if of_blocks else ()
    shape = replace(shape, layers=LAYERS, recompute=case.recompute, blocks=traced)
    memory = Memory.of(shape, Hardware.preset("cpu"), 0, Training(reshard=case.reshard), RANKS, first=case.first)
    return memory_alone(memory, shape).bytes(case.rows)


def memory_alone(memory: Memory, shape: ModelShape) -> Memory:
    """The memory without the accumulators of attention that is exchanged."""
    working = 4 * shape.heads * (shape.dim + shape.values)
    if shape.recurrent is not None:
        working = max(working, 4 * shape.recurrent.working)
    outside = "loss", "head", "step"
    moments = [m if m.name in outside else m._replace(row=m.row - working) for m in memory.moments]
    return replace(memory, moments=tuple(moments))


def compared(case: Case) -> tuple[int, int]:
    """Bytes of the tracker and of the planner."""
    return traced(case), planned(case)


def main() -> int:
    """Print all cases; 1 if one of them is more than 5 % off."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traced", action="store_true", help="the models whose blocks are traced")
    cases = OF_BLOCKS if parser.parse_args().traced else CASES + MIXED
    worst = 0.0
    for case in cases:
        truth, ours = compared(case)
        worst = max(worst, abs(ours / truth - 1))
        print(*case, f"traced {truth / 1e9:.2f} GB, planned {ours / 1e9:.2f} GB, {ours / truth - 1:+.1%}", flush=True)
    print(f"the largest difference of {len(cases)} is {worst:.1%}")
    return 1 if worst > 0.05 else 0


if __name__ == "__main__":
    sys.exit(main())
