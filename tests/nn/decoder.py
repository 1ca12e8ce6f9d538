"""A tiny decoder on packed rows, and one process's loss and gradients beside those of ranks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import seqpar
from seqpar.comm import Comm, LocalComm
from seqpar.facts.layout import Layout
from seqpar.plan import Plan

VOCABULARY = 11
HEADS, KV_HEADS, HEAD_DIM, WIDTH = 4, 2, 4, 8


class Layer(nn.Module):
    """Attention with grouped heads, rotary positions and sinks, then an MLP."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.heads = (HEADS, KV_HEADS, KV_HEADS)
        self.qkv, self.out = nn.Linear(WIDTH, sum(self.heads) * HEAD_DIM), nn.Linear(HEADS * HEAD_DIM, WIDTH)
        self.sinks = nn.Parameter(torch.linspace(-1, 1, HEADS))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.register_buffer("frequencies", 0.3 ** torch.arange(HEAD_DIM // 2))
        self.attention = seqpar.nn.Attention(**options)

    def forward(self, x: Tensor, positions: Tensor, *plan: object) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (-1, HEAD_DIM)).split(self.heads, dim=1)
        q, k = (seqpar.rotary(x, positions, self.frequencies) for x in (q, k))
        x = x + self.out(self.attention(q, k, v, *plan, sinks=self.sinks).flatten(1))
        return x + self.mlp(self.norms[1](x))


Run = Callable[..., Tensor]


class Decoder(nn.Module):
    """Layers between an embedding and a head; ``run`` is how a layer is called, as under a checkpoint."""

    def __init__(self, *layers: dict[str, object]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Layer(**options) for options in layers or ({}, {}))

    def forward(self, ids: Tensor, positions: Tensor, *plan: object, run: Run = nn.Module.__call__) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = run(layer, x, positions, *plan)
        return self.head(x)


def decoder(*layers: dict[str, object], dtype: torch.dtype = torch.float64) -> Decoder:
    """A decoder that is the same on every rank and in every process."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        made = Decoder(*({"layer": n, **options} for n, options in enumerate(layers or ({}, {}))))
    for parameter in made.parameters():  # drawn alone, as threads share the generator
        parameter.data.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
    return made.to(dtype)


def rows(plan: Plan, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """ids, positions inside documents, and labels of a rank; -100 for pads."""
    g = torch.Generator().manual_seed(plan.mask.tokens)
    ids, labels = (torch.randint(VOCABULARY, (plan.mask.tokens + 1,), generator=g) for _ in range(2))
    labels[-1] = -100
    at = torch.from_numpy(plan.positions(rank).copy())  # -1, a pad, is the last one
    return ids[at], torch.from_numpy(plan.rope_positions(rank)), labels[at]


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """A rank's share of the loss."""
    return F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")


Result = tuple[Tensor, Tensor, dict[str, Tensor]]  # logits of this rank's tokens, share of the loss, gradients


def result(model: nn.Module, logits: Tensor, loss: Tensor, tokens: int) -> Result:
    """What is compared."""
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return logits.detach()[:tokens], loss.detach(), grads


def step(comm: Comm, plan: Plan, make: Callable[[], nn.Module] = decoder) -> Result:
    """Forward and backward of a rank under the surrounding plan."""
    model = make()
    ids, positions, labels = rows(plan, comm.rank)
    with seqpar.parallel(plan, comm, seed=3):
        logits = model(ids, positions)
        loss = loss_of(logits, labels)
    loss.backward()
    return result(model, logits, loss, plan.layout.tokens(comm.rank))


def alone(plan: Plan) -> Plan:
    """The plan of one process for the same batch."""
    return Plan(plan.mask, Layout.contiguous(plan.mask.tokens, 1))


def one_process(plan: Plan, make: Callable[[], nn.Module] = decoder) -> Result:
    """What one process computes of the plan's batch."""
    return step(LocalComm(), alone(plan), make)


def assert_together(plan: Plan, results: list[Result], expected: Result, tolerance: float = 1e-10) -> None:
    """Results of all ranks are those of one process: logits in place, losses and gradients summed."""
    logits, loss, grads = expected
    whole = torch.empty_like(logits)
    for rank, (part, _, _) in enumerate(results):
        whole[torch.from_numpy(np.array(plan.layout.positions(rank)))] = part
    _assert_near("logits", whole, logits, tolerance)
    _assert_near("loss", torch.stack([r[1] for r in results]).sum(), loss, tolerance)
    for name, grad in grads.items():
        _assert_near(name, torch.stack([r[2][name] for r in results]).sum(0), grad, tolerance)


def _assert_near(name: str, got: Tensor, expected: Tensor, tolerance: float) -> None:
    error = float((got - expected).abs().max() / expected.abs().max().clamp_min(1e-6))
    assert error <= tolerance, f"{name} is off by {error:.2g} of its largest"
