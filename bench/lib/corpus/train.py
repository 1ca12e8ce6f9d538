"""A small decoder trained on shares of batches: losses, gradients summed over ranks, parameters after some steps."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import seqpar
from seqpar import Comm
from seqpar.data import share
from seqpar.nn import Attention, MultiheadAttention
from seqpar.testing import run_processes, run_threads
from seqpar.train import all_sum, clip_grad_norm, cross_entropy, linear_cross_entropy, sync_gradients, token_mean

from .groups import Cases
from .models import PLANS, drawn, gradients, normal

WORDS, DIM, HEADS = 37, 16, 4


class Layer(nn.Module):
    """Attention with rotary positions and two queries a key, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.q, self.out = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.k, self.v = nn.Linear(DIM, DIM // 2, bias=False), nn.Linear(DIM, DIM // 2, bias=False)
        self.attention = Attention()
        self.up, self.down = nn.Linear(DIM, 24, bias=False), nn.Linear(24, DIM, bias=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = (linear(normed).unflatten(-1, (-1, DIM // HEADS)) for linear in (self.q, self.k, self.v))
        frequencies = torch.tensor([1.0, 0.1])
        q, k = (seqpar.rotary(t, positions, frequencies) for t in (q, k))
        x = x + self.out(self.attention(q, k, v).flatten(1))
        return x + self.down(F.silu(self.up(self.mlp_norm(x))))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(WORDS, DIM), nn.RMSNorm(DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(DIM, WORDS, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, reentrant: bool | None) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, positions) if reentrant is None else checkpoint(layer, x, positions, use_reentrant=reentrant)
        return self.norm(x)


def batch(rank: int, step: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(7 * rank + step)
    tokens = [torch.randint(WORDS, (n,), generator=g) for n in (11 + 5 * rank, 1 + step, 23)]
    return {"input_ids": tokens, "labels": [t.masked_fill(t % 5 == 0, -100) for t in tokens]}


def trained(comm: Comm, plan: str, dtype: torch.dtype, reentrant: bool | None) -> Any:
    model = drawn(Decoder, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    results: list[Any] = []
    for step in range(2):
        mine = share(batch(comm.rank, step), comm, shift="document", plan=PLANS[plan])
        optimizer.zero_grad()
        with seqpar.parallel(mine.plan, mine.comm):
            hidden = model(mine.tensors["input_ids"], mine.positions, reentrant)
            labels = mine.tensors["labels"]
            loss = linear_cross_entropy(hidden, model.head.weight, labels, valid=mine.valid, chunk=16)
            loss.backward()  # inside the block: checkpoints call layers again
        results += [mine.plan.digest(), mine.valid, loss.detach(), all_sum(loss.detach(), comm)]
        results.append([None if g is None else g.clone() for g in gradients(model)])
        sync_gradients(model.parameters(), comm)
        results.append(clip_grad_norm(model.parameters(), 1.0))
        results.append([None if g is None else g.clone() for g in gradients(model)])
        optimizer.step()
    return [*results, list(model.parameters())]


def losses(dtype: torch.dtype, smoothing: float, z_loss: float, softcap: float) -> Any:
    hidden, weight = (normal(n, 9, seed=n, dtype=dtype).requires_grad_() for n in (19, 31))
    labels = torch.arange(19).masked_fill(torch.arange(19) % 4 == 0, -100)
    more: dict[str, Any] = {"label_smoothing": smoothing, "z_loss": z_loss, "valid": 17}
    a = linear_cross_entropy(hidden, weight, labels, softcap=softcap, chunk=8, average_over=2, **more)
    b = cross_entropy(hidden @ weight.t(), labels, **more)
    (a + 2 * b).backward()
    return [a, b, hidden.grad, weight.grad]


def sums(comm: Comm, dtype: torch.dtype) -> Any:
    values = normal(5 + comm.rank, seed=comm.rank, dtype=dtype).requires_grad_()
    keep = torch.arange(len(values)) % 3 > 0
    mean = token_mean(values, comm, keep=keep)
    total = all_sum(values.square().sum(), comm)
    (mean + total).backward()
    return [mean.detach(), total.detach(), values.grad]


def module(comm: Comm, plan: str, dtype: torch.dtype) -> Any:
    model = drawn(partial(MultiheadAttention, 24, 4, batch_first=True), dtype)
    lengths = [31]
    made = PLANS[plan](lengths, comm.size)
    x = seqpar.shard(normal(1, 31, 24, seed=2, dtype=dtype), made, comm.rank, dim=1).requires_grad_()
    with seqpar.parallel(made, comm):
        y = model(x, x, x, need_weights=False)[0]
    y.square().sum().backward()
    return [y.detach(), x.grad, gradients(model)]


def cases() -> Cases:
    calls: Cases = {}
    kinds = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
    for plan in PLANS:
        for ranks in (1, 2, 3, 4, 8):
            for name, dtype in kinds.items():
                reentrant = (None, False, True)[len(calls) % 3]
                call = partial(run_threads, ranks, trained, plan, dtype, reentrant)
                calls[f"decoder {plan} {ranks} ranks {name} reentrant={reentrant}"] = call
        for ranks in (1, 2, 4):
            calls[f"multihead {plan} {ranks} ranks"] = partial(run_threads, ranks, module, plan, torch.float32)
    for name, dtype in kinds.items():
        for options in ((0.0, 0.0, 0.0), (0.1, 0.0, 0.0), (0.0, 1e-3, 3.0)):
            calls[f"losses {name} {options}"] = partial(losses, dtype, *options)
        for ranks in (1, 2, 5):
            calls[f"sums {name} {ranks} ranks"] = partial(run_threads, ranks, sums, dtype)
    for comm in ("gloo", "shm"):
        arguments = (trained, "ring", torch.float32, None)
        calls[f"{comm} decoder"] = partial(run_processes, 2, *arguments, comm=comm)
    return calls
