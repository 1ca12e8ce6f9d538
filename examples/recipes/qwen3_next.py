"""Qwen3-Next on documents of up to 262,144 tokens: a hybrid of attention, gated delta rules and short convolutions.

    torchrun --nnodes 4 --nproc-per-node 8 ... examples/recipes/qwen3_next.py   # 32 GPUs, see docs/nodes.md
    torchrun --nproc-per-node 2 examples/recipes/qwen3_next.py --small          # 2 CPU ranks: a tiny Qwen3-Next

Attention exchanges keys. Recurrent layers pass their states from rank to rank, and convolutions a few rows. On GPUs
install flash-linear-attention, whose kernels compute the recurrences.

No rank can hold the model, so it is made without weights and sharded by FSDP2. Then rank 0 loads the weights on its
host (320 GB in float32) and broadcasts them, one after the other.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3NextConfig

import seqpar
from seqpar.train import clip_grad_norm

SMALL = "--small" in sys.argv
MODEL = "Qwen/Qwen3-Next-80B-A3B-Instruct"
VOCABULARY = 64 if SMALL else 150_000
LENGTHS = [300, 41, 120, 7] if SMALL else [262_144, 9_000, 30_000, 4_000]

if SMALL:
    dist.init_process_group("gloo")
    device = torch.device("cpu")
else:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
comm = seqpar.GroupComm()


def config_of():
    """The sizes of the model."""
    if not SMALL:
        return AutoConfig.from_pretrained(MODEL)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    linear |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    experts |= {"shared_expert_intermediate_size": 16}
    layers = {"layer_types": ["linear_attention", "full_attention"]}
    return Qwen3NextConfig(**sizes, **heads, **linear, **experts, **layers)


def load(model, config):
    """Give the sharded model its weights, which rank 0 loads."""
    whole = None
    if comm.rank == 0 and SMALL:
        torch.manual_seed(0)
        whole = AutoModelForCausalLM.from_config(config)
    elif comm.rank == 0:
        whole = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    model.to_empty(device=device)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, {} if whole is None else whole.state_dict(), options=options)
    for name, buffer in model.named_buffers():  # such as the frequencies of rotary positions
        if whole is not None:
            buffer.copy_(whole.get_buffer(name))
        dist.broadcast(buffer, 0)


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


config = config_of()
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
model.gradient_checkpointing_enable()
seqpar.parallelize(model, comm, average_over=comm.size)
policy = MixedPrecisionPolicy() if SMALL else MixedPrecisionPolicy(torch.bfloat16, torch.float32)
for layer in model.model.layers:
    fully_shard(layer, mp_policy=policy)
fully_shard(model, mp_policy=policy)
load(model, config)
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
