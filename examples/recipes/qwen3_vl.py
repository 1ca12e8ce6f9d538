"""Qwen3-VL on long documents of scanned pages.

    torchrun --nproc-per-node 8 examples/recipes/qwen3_vl.py             # 8 GPUs
    torchrun --nproc-per-node 2 examples/recipes/qwen3_vl.py --small     # 2 CPU ranks: a tiny Qwen3-VL

Each rank runs the vision tower on the pages of its own documents. Then the tokens of all ranks, of text and pages, are
spread evenly over the ranks.
"""

import os
import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForImageTextToText, Qwen3VLConfig, Qwen3VLForConditionalGeneration

import seqpar
from seqpar.train import sync_gradients

SMALL = "--small" in sys.argv
MODEL = "Qwen/Qwen3-VL-2B-Instruct"
PAGES = [3, 1] if SMALL else [100, 40]  # of each document
GRID = (4, 8) if SMALL else (64, 48)  # patches of a page, down and across
WORDS = 20 if SMALL else 400  # tokens of text on a page

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
        return AutoModelForImageTextToText.from_pretrained(MODEL, dtype=torch.bfloat16)
    torch.manual_seed(0)
    text = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 32}
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(
            text_config=text | {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": rope},
            vision_config=vision | {"patch_size": 4, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
            image_token_id=60,
            vision_start_token_id=61,
            vision_end_token_id=62,
        )
    )


def batch(step, config):
    """This rank's documents as a processor makes them: text, pages, text. Put your own loader here."""
    vision, rows, pages = config.vision_config, [], []
    tokens = GRID[0] * GRID[1] // vision.spatial_merge_size**2  # of a page
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    page = [config.vision_start_token_id] + [config.image_token_id] * tokens + [config.vision_end_token_id]
    for n in range(comm.rank, len(PAGES), comm.size):
        generator = torch.Generator().manual_seed(step * len(PAGES) + n)
        row = []
        for _ in range(PAGES[n]):
            pages.append(torch.randn(GRID[0] * GRID[1], patch, generator=generator))
            row += [*torch.randint(1, 50, (WORDS,), generator=generator).tolist(), *page]
        rows.append(torch.tensor(row))
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask, image = ids > 0, ids == config.image_token_id
    inputs = {
        "input_ids": ids,
        "attention_mask": mask.long(),
        "labels": ids.masked_fill(~mask | image, -100),
        "mm_token_type_ids": image.int(),
        "pixel_values": torch.cat(pages).to(torch.float32 if SMALL else torch.bfloat16),
        "image_grid_thw": torch.tensor([[1, *GRID]]).expand(len(pages), -1),
    }
    return {name: x.to(device) for name, x in inputs.items()}


model = build().to(device)
model.gradient_checkpointing_enable()
seqpar.parallelize(model, comm)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 if SMALL else 1e-5)

model.train()
for step in range(3):
    loss = model(**batch(step, model.config)).loss
    optimizer.zero_grad()
    loss.backward()
    sync_gradients(model.parameters(), comm)
    optimizer.step()
    if comm.rank == 0:
        print(f"step {step} loss {loss.detach():.7f}", flush=True)
dist.destroy_process_group()
