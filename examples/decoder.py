"""A small decoder in plain PyTorch that knows no ranks: attention is an argument, positions are data.

Packed input: ``tokens [T]`` of one or more documents back to back, ``positions [T]`` inside each document. Everything
but attention works row by row, so a rank runs this same code on whatever rows it holds.

    T tokens   H, G query and key heads   D head dim   E model dim   V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q [T, H, D], k [T, G, D], v [T, G, D] -> out [T, H, D]

BYTES = 256
START = BYTES  # the token before a document's first byte


@dataclass(frozen=True)
class Config:
    """The decoder's sizes. `tied`: the head is the transposed embedding."""

    vocabulary: int = BYTES + 1
    dim: int = 128
    layers: int = 3
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 32
    hidden: int = 352
    rope_base: float = 10_000.0
    tied: bool = False


class Linear(nn.Linear):
    """A linear layer without bias. It computes in the input's dtype; the weight keeps its own, for the optimiser."""

    def __init__(self, dim_in: int, dim_out: int) -> None:
        super().__init__(dim_in, dim_out, bias=False)
        nn.init.normal_(self.weight, std=dim_in**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """x ``[..., dim_in]`` -> ``[..., dim_out]``."""
        return F.linear(x, self.weight.to(x.dtype))


class Norm(nn.Module):
    """RMSNorm; bf16 rows are normalised in fp32."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """x ``[..., dim]`` -> the same, each row of unit mean square times the weight."""
        return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, 1e-6).to(x.dtype)


def rotations(positions: Tensor, c: Config, dtype: torch.dtype) -> Tensor:
    """Angles ``[T, D/2]`` by which rows at these positions are rotated."""
    # double, so that far positions rotate by the right angle
    frequency = c.rope_base ** (-torch.arange(0, c.head_dim, 2, dtype=torch.float64) / c.head_dim)
    return (positions.double()[:, None] * frequency).to(dtype)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate the pair ``(d, d + D/2)`` of each head of x ``[T, H, D]`` by ``angles [T, D/2]``."""
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x.to(angles.dtype).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


class Block(nn.Module):
    """Pre-norm attention with grouped key heads, then a pre-norm SwiGLU."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.norm_attention, self.norm_mlp = Norm(c.dim), Norm(c.dim)
        self.qkv = Linear(c.dim, (c.heads + 2 * c.kv_heads) * c.head_dim)
        self.out = Linear(c.heads * c.head_dim, c.dim)
        self.gate_up = Linear(c.dim, 2 * c.hidden)
        self.down = Linear(c.hidden, c.dim)

    def forward(self, x: Tensor, angles: Tensor, attend: Attend) -> Tensor:
        """x ``[T, E]``, angles ``[T, D/2]`` -> ``[T, E]``."""
        c = self.c
        heads = self.qkv(self.norm_attention(x)).unflatten(-1, (-1, c.head_dim))
        q, k, v = heads.split((c.heads, c.kv_heads, c.kv_heads), dim=1)
        return self.mlp(x + self.out(attend(rotate(q, angles), rotate(k, angles), v).flatten(1)))

    def mlp(self, x: Tensor) -> Tensor:
        """x ``[T, E]`` with its SwiGLU added."""
        gate, up = self.gate_up(self.norm_mlp(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    """tokens, positions -> logits ``[T, V]``. Weights have torch's default dtype; `dtype` is that of the rows."""

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embedding = nn.Parameter(torch.randn(config.vocabulary, config.dim) * config.dim**-0.5)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = Norm(config.dim)
        self.head = None if config.tied else Linear(config.dim, config.vocabulary)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Logits of packed rows, which may be in any order. positions: inside each document."""
        angles = rotations(positions, self.config, self.embedding.dtype)
        x = F.embedding(tokens, self.embedding).to(self.dtype)
        for block in self.blocks:
            x = block(x, angles, attend)
        x = self.norm(x)
        return self.head(x) if self.head is not None else F.linear(x, self.embedding.to(x.dtype))
