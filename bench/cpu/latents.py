"""Prints the processor time of latent attention beside that of attention on expanded keys, and the bytes of both.

Two ranks as threads of one process, forward and backward, in turn: the dims of DeepSeek-V2-Lite, 16 heads of 128 + 64
and values of 128, latents of 512. The expanded keys are made by the same products, outside the call, and sent.
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import torch
from torch import Tensor

import seqpar
from seqpar import Comm, Layout, Mask, Plan
from seqpar.testing import run_threads

HEADS, NOPE, ROTATED, VALUE, RANK, RANKS = 16, 128, 64, 128, 512, 2


def step(comm: Comm, plan: Plan, dtype: torch.dtype, *, latents: bool) -> int:
    """Forward and backward of one rank; the bytes that it sent."""
    rows, g = plan.rows(comm.rank), torch.Generator().manual_seed(comm.rank)

    def made(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=g) * 0.1).to(dtype).requires_grad_()

    q, latent, rotated = made(rows, HEADS, NOPE + ROTATED), made(rows, RANK), made(rows, ROTATED)
    g.manual_seed(9)
    w_k, w_v = made(HEADS, NOPE, RANK), made(HEADS, VALUE, RANK)
    if latents:
        out = seqpar.latent_attention(q, latent, rotated, w_k, w_v, plan, comm)
    else:
        nope, values = ((latent @ w.flatten(0, 1).t()).unflatten(1, w.shape[:2]) for w in (w_k, w_v))
        keys = torch.cat([nope, rotated[:, None].expand(-1, HEADS, -1)], -1)
        out = seqpar.attention(q, keys, values, plan, comm)
    out.sum().backward()
    return comm.stats.bytes_sent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="of each rank")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokens = args.tokens * RANKS
    plan = Plan(Mask([tokens]), Layout.zigzag([tokens], RANKS))
    for dtype in (torch.float32, torch.bfloat16):
        seconds: dict[bool, list[float]] = {True: [], False: []}
        sent = {}
        for _ in range(args.turns):
            for latents, found in seconds.items():
                before = time.process_time()
                sent[latents] = sum(run_threads(RANKS, partial(step, latents=latents), plan, dtype))
                found.append(time.process_time() - before)
        ratio = min(seconds[True]) / min(seconds[False])
        print(
            f"{dtype}: {sent[False] / sent[True]:.2f} times fewer bytes, {ratio:.2f} of the processor time", flush=True
        )


if __name__ == "__main__":
    main()
