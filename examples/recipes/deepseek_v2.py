"""DeepSeek-V2-Lite on documents of up to 131,072 tokens: multi-head latent attention, whose latents are exchanged.

    torchrun --nproc-per-node 8 examples/recipes/deepseek_v2.py             # 8 GPUs
    torchrun --nproc-per-node 2 examples/recipes/deepseek_v2.py --small     # 2 CPU ranks: a tiny DeepSeek-V2

Ranks send each other latents, 576 numbers a token instead of 5,120, and each makes the keys and values that its own
queries see. Nothing of that size is kept for backward. Rank 0 prints which layers do so. Every process loads the
weights on its host (63 GB in float32). Other models with latents are trained in the same way; DeepSeek-V3 needs the
nodes, and the way of loading, of `qwen3_next.py`.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, DeepseekV2Config, DeepseekV2ForCausalLM

import seqpar
from seqpar.train import clip_grad_norm

SMALL = "--small" in sys.argv
MODEL = "deepseek-ai/DeepSeek-V2-Lite"
VOCABULARY = 64 if SMALL else 100_000
LENGTHS = [300, 41, 120, 7] if SMALL else [131_072, 9_000, 30_000, 4_000]

if SMALL:
    dist.init_process_group("gloo")
    device = torch.device("cpu")
else:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
comm = seqpar.GroupComm()


def build():
    """The model with its weights, the same on every rank."""
    if not SMALL:
        return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 16}
    heads |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "head_dim": 4, "v_head_dim": 8}
    experts = {"first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
    return DeepseekV2ForCausalLM(DeepseekV2Config(**sizes, **heads, **experts, moe_intermediate_size=16))


def batch(step):
    """This rank's documents, padded on the right; put your own loader here. seqpar computes no padding."""
    rows = []
    for n in range(comm.rank, len(LENGTHS), comm.size):
        generator = torch.Generator().manual_seed(step * len(LENGTHS) + n)
        rows.append(torch.randint(1, VOCABULARY, (LENGTHS[n],), generator=generator))
    rows = rows or [torch.zeros(1, dtype=torch.long)]  # a rank without documents passes one token of padding
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    inputs = {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}
    return {name: x.to(device) for name, x in inputs.items()}


model = build()
model.gradient_checkpointing_enable()
handle = seqpar.parallelize(model, comm, average_over=comm.size)
if comm.rank == 0:
    print(handle.describe(), flush=True)
policy = MixedPrecisionPolicy() if SMALL else MixedPrecisionPolicy(torch.bfloat16, torch.float32)
for layer in model.model.layers:
    fully_shard(layer.to(device), mp_policy=policy)  # one layer after another: a GPU does not hold all of them
fully_shard(model.to(device), mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 if SMALL else 1e-5)

model.train()
for step in range(3):
    loss = model(**batch(step)).loss
    optimizer.zero_grad()
    loss.backward()
    clip_grad_norm(model.parameters(), 1.0)
    optimizer.step()
    if comm.rank == 0:
        print(f"step {step} loss {loss.detach():.7f}", flush=True)
dist.destroy_process_group()
