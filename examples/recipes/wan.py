"""Wan 2.1, a video diffusion transformer with full attention over space and time, fine-tuned on long clips.

    torchrun --nproc-per-node 8 examples/recipes/wan.py             # 8 GPUs
    torchrun --nproc-per-node 2 examples/recipes/wan.py --small     # 2 CPU ranks: a tiny Wan

All tokens of a clip attend to each other, so the tokens are spread over ranks, and attention is computed by Ulysses.
"""

import os
import sys
from functools import partial

import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from torch.nn import functional as F

import seqpar
from seqpar.train import clip_grad_norm, sync_gradients

SMALL = "--small" in sys.argv
MODEL = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
CLIP = (3, 8, 6) if SMALL else (41, 60, 104)  # latents: frames, height, width; 161 frames of 480 x 832 pixels
TEXT = 7 if SMALL else 512

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
        return WanTransformer3DModel.from_pretrained(MODEL, subfolder="transformer", torch_dtype=torch.bfloat16)
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 8}
    return WanTransformer3DModel(**sizes, freq_dim=16, ffn_dim=32, num_layers=2, patch_size=(1, 2, 2))


def batch(step, config):
    """Latents of one clip, its caption and noise, the same on every rank. Put your own encoders and loader here."""
    generator = torch.Generator().manual_seed(step)
    latents, noise = torch.randn(2, 1, config.in_channels, *CLIP, generator=generator)
    caption = torch.randn(1, TEXT, config.text_dim, generator=generator)
    time = torch.rand(1, generator=generator)
    return [x.to(device, model.dtype) for x in (latents, noise, caption)] + [time.to(device)]


model = build().to(device)
model.enable_gradient_checkpointing()
seqpar.parallelize(model, comm, plan=partial(seqpar.Plan, ulysses=comm.size))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 if SMALL else 1e-5)

model.train()
for step in range(3):
    latents, noise, caption, time = batch(step, model.config)
    noisy = (1 - time) * latents + time * noise  # flow matching
    velocity = model(noisy.to(model.dtype), timestep=1000 * time, encoder_hidden_states=caption).sample
    loss = F.mse_loss(velocity.float(), (noise - latents).float())  # whole, and the same on every rank
    optimizer.zero_grad()
    loss.backward()
    sync_gradients(model.parameters(), comm)
    clip_grad_norm(model.parameters(), 1.0)
    optimizer.step()
    if comm.rank == 0:
        print(f"step {step} loss {loss.detach():.7f}", flush=True)
dist.destroy_process_group()
