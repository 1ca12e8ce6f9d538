"""Latte, a video diffusion transformer, trained by DSP: spatial and temporal blocks are sharded differently.

    torchrun --nproc-per-node 8 examples/recipes/latte_dsp.py             # 8 GPUs
    torchrun --nproc-per-node 2 examples/recipes/latte_dsp.py --small     # 2 CPU ranks: a tiny Latte

Spatial blocks attend within a frame, so frames are spread over ranks. Temporal blocks attend along time, so places of
the picture are. Attention itself needs no exchange.
"""

import os
import sys
from functools import partial

import torch
import torch.distributed as dist
from diffusers import DDPMScheduler, LatteTransformer3DModel
from torch.nn import functional as F

import seqpar
from seqpar.train import sync_gradients

SMALL = "--small" in sys.argv
MODEL = "maxin-cn/Latte-1"
FRAMES, SIZE, TEXT = (5, 6, 4) if SMALL else (64, 64, 120)  # frames, latents of a side, tokens of the caption

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
        return LatteTransformer3DModel.from_pretrained(MODEL, subfolder="transformer", video_length=FRAMES)
    torch.manual_seed(0)
    return LatteTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        cross_attention_dim=16,
        attention_bias=True,
        sample_size=SIZE,
        patch_size=2,
        activation_fn="gelu-approximate",
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        caption_channels=8,
        video_length=FRAMES,
    )


def batch(step, config):
    """Latents of one clip, its caption and noise, the same on every rank. Put your own encoders and loader here."""
    generator = torch.Generator().manual_seed(step)
    latents, noise = torch.randn(2, 1, config.in_channels, FRAMES, SIZE, SIZE, generator=generator)
    caption = torch.randn(1, TEXT, config.caption_channels, generator=generator)
    time = torch.randint(1000, (1,), generator=generator)
    return [x.to(device) for x in (latents, noise, caption, time)]


model = build().to(device)
model.enable_gradient_checkpointing()
plan = partial(seqpar.dsp.plan_stages, hardware="cpu") if SMALL else seqpar.dsp.plan_stages
seqpar.parallelize(model, comm, plan=plan)
scheduler = DDPMScheduler()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 if SMALL else 1e-5)

model.train()
for step in range(3):
    latents, noise, caption, time = batch(step, model.config)
    noisy = scheduler.add_noise(latents, noise, time)
    out = model(noisy, timestep=time, encoder_hidden_states=caption).sample
    loss = F.mse_loss(out.chunk(2, dim=1)[0], noise)  # whole, and the same on every rank
    optimizer.zero_grad()
    loss.backward()
    sync_gradients(model.parameters(), comm)
    optimizer.step()
    if comm.rank == 0:
        print(f"step {step} loss {loss.detach():.7f}", flush=True)
dist.destroy_process_group()
