"""Llama 3.1 8B on documents of up to 131,072 tokens, in a loop of your own, with FSDP2 and activation checkpointing.

    torchrun --nproc-per-node 8 examples/recipes/llama_loop.py             # 8 GPUs
    torchrun --nproc-per-node 2 examples/recipes/llama_loop.py --small     # 2 CPU ranks: a tiny Llama

FSDP2 shards weights over all ranks, and seqpar spreads each batch over the same ranks. FSDP2 averages gradients, which
`average_over` says to seqpar, so `sync_gradients` is not needed. What is recomputed, and what a GPU's memory holds, is
what the planner says:

    seqpar fit --lengths 131072,2000,1000,500 --ranks 8 --model llama-8b --hardware h100

    memory of a rank 70.8 of 71.7 GB in the head's backward: state 12.0, weights 2.5, activations 50.0, head
    5.3, exchanges 0.9
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import seqpar
from seqpar.train import clip_grad_norm, recompute

SMALL = "--small" in sys.argv
MODEL = "meta-llama/Llama-3.1-8B"
VOCABULARY = 64 if SMALL else 128_000
LENGTHS = [300, 41, 120, 7] if SMALL else [131_072, 2_000, 1_000, 500]
RECOMPUTED = 1 if SMALL else 19  # of the layers, the first ones

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
    if SMALL:
        torch.manual_seed(0)
        sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


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


model = build().to(device)
seqpar.parallelize(model, comm, average_over=comm.size)
for layer in model.model.layers[:RECOMPUTED]:
    recompute(layer, save_attention=True)
policy = MixedPrecisionPolicy() if SMALL else MixedPrecisionPolicy(torch.bfloat16, torch.float32)
for layer in model.model.layers:
    fully_shard(layer, mp_policy=policy)
fully_shard(model, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 if SMALL else 1e-5)

model.train()
for step in range(3):
    loss = model(**batch(step)).loss  # the mean over the labels of all ranks, the same on every rank
    optimizer.zero_grad()
    loss.backward()
    clip_grad_norm(model.parameters(), 1.0)
    optimizer.step()
    if comm.rank == 0:
        print(f"step {step} loss {loss.detach():.7f}", flush=True)
dist.destroy_process_group()
