"""GRPO on prompts that are too long for one GPU to train on: the answers of a group share one prompt on a tree.

    torchrun --nproc-per-node 8 examples/recipes/grpo.py             # 8 GPUs
    torchrun --nproc-per-node 2 examples/recipes/grpo.py --small     # 2 CPU ranks: a tiny Qwen3

Each rank generates answers to its own prompts. For the update, every group becomes a tree: the prompt is computed once
for all of its answers, and the trees of all ranks are spread over all ranks.
"""

import os
import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

import seqpar
import seqpar.integrations.transformers  # registers the attention "seqpar"
from seqpar import recurrent
from seqpar.data import back, share
from seqpar.train import all_sum, sync_gradients, token_log_probs

SMALL = "--small" in sys.argv
MODEL = "Qwen/Qwen3-4B"
PROMPTS, ANSWERS, LONGEST = (2, 3, 12) if SMALL else (8, 8, 4096)  # prompts of a step, answers of a prompt, tokens
PROMPT = 50 if SMALL else 65_536

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
        return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, eos_token_id=1))


def reward(answer):
    """The share of even tokens; put your own here."""
    return (answer % 2 == 0).float().mean()


def group(number):
    """A prompt and its answers, without padding. This rank's own work."""
    model.set_attn_implementation("sdpa")  # each rank generates alone
    torch.manual_seed(number)  # the same answers on any number of ranks
    prompt = torch.randint(2, 64 if SMALL else 150_000, (1, PROMPT + number), device=device)
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": LONGEST, "num_return_sequences": ANSWERS}
    whole = torch.ones_like(prompt)
    ids = model.generate(prompt, attention_mask=whole, **options, pad_token_id=0, suppress_tokens=[0])
    return prompt[0], [answer[answer != 0] for answer in ids[:, prompt.shape[1] :]]


def trees(groups):
    """The groups of this rank as a batch of trees. An advantage goes with every token of its answer."""
    batch = {"input_ids": [], "labels": [], "advantages": [], "parents": []}
    for prompt, answers in groups:
        root = len(batch["parents"])
        rewards = torch.stack([reward(answer) for answer in answers])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        batch["input_ids"] += [prompt, *answers]
        batch["labels"] += [torch.full_like(prompt, -100), *answers]  # a prompt is given, not learnt
        weights = [advantage.expand(len(answer)) for advantage, answer in zip(advantages, answers)]
        batch["advantages"] += [torch.zeros(len(prompt), device=device), *weights]
        batch["parents"] += [-1] + [root] * len(answers)
    return batch


def log_probs_of(mine):
    """The log-probability of each of this rank's rows."""
    model.set_attn_implementation("seqpar")
    rows = {"input_ids": mine.tensors["input_ids"][None], "position_ids": mine.positions[None]}
    with seqpar.parallel(mine.plan, comm):
        hidden = model.base_model(**rows, use_cache=False).last_hidden_state[0]
    before = recurrent.shift(hidden, mine.plan, comm)  # the hidden state that predicts each row's own token
    return token_log_probs(before, model.lm_head.weight, mine.tensors["labels"])


model = build().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 if SMALL else 1e-6)
for step in range(3):
    batch = trees([group(step * PROMPTS + n) for n in range(comm.rank, PROMPTS, comm.size)])
    for update in range(2):
        mine = share(batch, comm)
        log_probs = log_probs_of(mine)
        if update == 0:
            batch["old_log_probs"] = back(mine, log_probs.detach())  # returned to the rank that made the answers
        old = mine.tensors.get("old_log_probs", log_probs.detach())
        ratio, advantages = (log_probs - old).exp(), mine.tensors["advantages"]
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        loss = -gain[mine.tensors["labels"] != -100].sum() / mine.valid  # this rank's share
        optimizer.zero_grad()
        loss.backward()
        sync_gradients(model.parameters(), comm)
        optimizer.step()
    total = all_sum(loss.detach(), comm)
    if comm.rank == 0:
        print(f"step {step} loss {total:.7f}", flush=True)
dist.destroy_process_group()
