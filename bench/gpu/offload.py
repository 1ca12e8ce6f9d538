"""Slice `offload`: blocks whose inputs are on the host between forward and backward, `seqpar.train.recompute`.

Gradients are those of inputs that stay on the GPU; ``bytes`` is the most that a step allocated, and ``ratio`` how
many times as much it is if inputs stay.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from bench.gpu.machine import Machine
from bench.gpu.rows import Case, Row
from seqpar.train import recompute, tile

BLOCKS, ROWS, WIDTH = 16, 32768, 2048


class Block(nn.Module):
    """An MLP beside its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, width), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [T, width] of rows [T, width]."""
        return x + self.mlp(self.norm(x))


def offload(tiny: bool) -> list[Case]:
    """One stack of blocks."""
    blocks, rows, width = (3, 20, 8) if tiny else (BLOCKS, ROWS, WIDTH)
    return [Case("offload", f"{blocks} blocks, {rows} rows", partial(_compared, blocks, rows, width))]


def _compared(blocks: int, rows: int, width: int, machine: Machine) -> Iterator[Row]:
    torch.manual_seed(0)
    kept = nn.ModuleList(Block(width) for _ in range(blocks)).to(machine.device)
    away = copy.deepcopy(kept)
    for model in (kept, away):
        for block in model:
            tile(block.mlp, rows // 4)
            recompute(block, offload=model is away)
    x = torch.randn(rows, width, device=machine.device)
    found = [_step(model, x) for _ in range(2) for model in (kept, away)][2:]  # the first step allocates pinned memory
    (expected, most), (grads, fewest) = found
    same = all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))
    sizes: Row = {"bytes": fewest, "baseline": "kept", "ratio": most / fewest} if fewest else {}
    yield {"kernel": "torch", "mode": "forward and backward", "what": "gradients", "ok": same, **sizes}


def _step(model: nn.ModuleList, x: torch.Tensor) -> tuple[list[torch.Tensor], int]:
    """The gradients of a step, and the bytes that it allocated at most; 0 without a GPU."""
    model.zero_grad()
    before = torch.cuda.memory_allocated() if x.is_cuda else 0
    if x.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    y = x.clone().requires_grad_()
    for block in model:
        y = block(y)
    y.square().sum().backward()
    most = torch.cuda.max_memory_allocated() - before if x.is_cuda else 0
    return [p.grad.clone() for p in model.parameters()], most
