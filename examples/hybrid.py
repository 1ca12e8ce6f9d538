"""A hybrid decoder in plain PyTorch that knows no ranks: three layers of four carry a state, one attends.

As `decoder`, with the gated delta rule (Yang et al. 2024, Gated Delta Networks) and the short convolution before it in
place of attention. What joins rows is an argument: `Mixers` of one process, document by document, or over ranks.

    T tokens   H heads   D head dim   C channels of the convolution, those of q, k and v
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from decoder import Attend, Block, Config, Decoder, Linear
from torch import Tensor, nn

import seqpar
from seqpar import recurrent
from seqpar.plan.runs import DocumentRuns
from seqpar.plan.travel import halo_bytes, halo_way, layer_way, state_bytes
from seqpar.planner import RecurrentLayer

CONFIG = Config(dim=128, layers=4, heads=4, kv_heads=2, head_dim=32, hidden=352)
EVERY = 4  # the last of so many layers attends
TAPS = 4
CHUNK = 64

Convolve = Callable[[Tensor, Tensor], Tensor]  # x [T, C], filters [C, TAPS] -> [T, C], after silu
Recur = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # q, k, v [T, H, D], decay, beta [T, H] -> [T, H, D]


class Mixers(NamedTuple):
    """What joins rows of a document: attention, the convolution, the delta rule."""

    attend: Attend
    convolve: Convolve
    recur: Recur


class AttentionBlock(Block):
    """A block with attention, given all mixers."""

    def forward(self, x: Tensor, angles: Tensor, mixers: Mixers) -> Tensor:
        """x ``[T, E]``, angles ``[T, D/2]`` -> ``[T, E]``."""
        return super().forward(x, angles, mixers.attend)


class DeltaBlock(Block):
    """Pre-norm gated delta rule behind a short convolution, then a pre-norm SwiGLU."""

    def __init__(self, c: Config) -> None:
        super().__init__(c)
        self.qkv = Linear(c.dim, 3 * c.heads * c.head_dim)
        self.filters = nn.Parameter(torch.randn(3 * c.heads * c.head_dim, TAPS) * TAPS**-0.5)
        self.gates = Linear(c.dim, 2 * c.heads)

    def forward(self, x: Tensor, angles: Tensor, mixers: Mixers) -> Tensor:
        """x ``[T, E]`` -> ``[T, E]``; positions show in the state alone, so angles are not used."""
        c, y = self.c, self.norm_attention(x)
        mixed = mixers.convolve(self.qkv(y), self.filters.to(x.dtype))
        q, k, v = mixed.unflatten(-1, (3, c.heads, c.head_dim)).unbind(1)
        decay, beta = self.gates(y).chunk(2, dim=-1)
        out = mixers.recur(q, k, v, -F.softplus(decay), torch.sigmoid(beta))
        return self.mlp(x + self.out(out.flatten(1)))


class Hybrid(Decoder):
    """tokens, positions, mixers -> logits ``[T, V]``."""

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        super().__init__(config, dtype)
        kinds = [DeltaBlock if (n + 1) % EVERY else AttentionBlock for n in range(config.layers)]
        self.blocks = nn.ModuleList(kind(config) for kind in kinds)


def layer_shape(c: Config) -> RecurrentLayer:
    """A recurrent layer's sizes."""
    return RecurrentLayer.gated_delta(
        c.dim, heads=c.heads, groups=c.heads, key_dim=c.head_dim, value_dim=c.head_dim, taps=TAPS
    )


def recurrent_layers(c: Config) -> int:
    """How many layers carry a state."""
    return c.layers - c.layers // EVERY


def predicted_bytes(plan: seqpar.Plan, rank: int, c: Config, dtype: str) -> int:
    """The bytes that a rank sends in a step for all recurrent layers; in backward it sends back what it received."""
    layer, runs = layer_shape(c).bytes(dtype, gates=dtype), DocumentRuns.of(plan.residence)
    states, way = state_bytes(runs, layer, layer_way(runs, layer)), halo_way(runs, layer.reach, layer.tap)
    rows = [halo_bytes(runs, layer, way, backward=backward).sent for backward in (False, True)]
    return recurrent_layers(c) * int(sum(sent[rank] for sent in (*states, *rows)))


def sharded(plan: seqpar.Plan, comm: seqpar.Comm, attend: Attend) -> Mixers:
    """The mixers over ranks that each hold some rows of the batch."""

    def convolve(x: Tensor, filters: Tensor) -> Tensor:
        return recurrent.causal_conv1d(x, filters, None, plan, comm, activation="silu")

    def recur(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        return recurrent.linear_attention(q, k, v, plan, comm, decay=decay, beta=beta, normalize=True)

    return Mixers(attend, convolve, recur)


def dense(lengths: Sequence[int], attend: Attend) -> Mixers:
    """The mixers of one process, which holds the whole batch: torch's own functions, one document after the other."""

    def convolve(x: Tensor, filters: Tensor) -> Tensor:
        rows = [F.pad(document, (0, 0, TAPS - 1, 0)) for document in x.split(list(lengths))]
        return torch.cat([F.silu(F.conv1d(row.mT, filters[:, None], groups=len(filters)).mT) for row in rows])

    def recur(*rows: Tensor) -> Tensor:
        documents = zip(*(x.transpose(0, 1).split(list(lengths), dim=1) for x in rows), strict=True)
        return torch.cat([delta_rule(*document) for document in documents], dim=1).transpose(0, 1)

    return Mixers(attend, convolve, recur)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule over a document, in chunks: q, k, v ``[H, T, D]``, decay, beta ``[H, T]`` -> ``[H, T, D]``.

    With the sums G of log decays since the chunk's start and the state S at that start, rows of a chunk write values u
    for their keys: ``u_i = beta_i (v_i - exp(G_i) k_i S - sum over j < i of exp(G_i - G_j) (k_i k_j) u_j)``.
    """
    kept, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    q, k, v, decay, beta = (x.to(wide) for x in (q, k, v, decay, beta))
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q, state, outs = q * q.shape[-1] ** -0.5, q.new_zeros(len(q), q.shape[-1], v.shape[-1]), []
    for qs, ks, vs, logs, bs in zip(
        *(x.split(CHUNK, dim=1) for x in (q, k, v, decay[..., None], beta[..., None])), strict=True
    ):
        total = logs.cumsum(1)
        fade = (total - total.mT).tril().exp().tril()
        system = (bs * (ks @ ks.mT) * fade).tril(-1)
        wanted = bs * (vs - total.exp() * (ks @ state))
        u = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        outs.append(total.exp() * (qs @ state) + ((qs @ ks.mT) * fade) @ u)
        state = total[:, -1:].exp() * state + (ks * (total[:, -1:] - total).exp()).mT @ u
    return torch.cat(outs, dim=1).to(kept)
