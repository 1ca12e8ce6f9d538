"""Models that mix tokens outside their attention, and models that do not."""

from __future__ import annotations

import copy
import math
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

import seqpar
from seqpar import Comm, Layout, Mask, Plan
from seqpar.integrations.sdpa import parallelize

E, H, VOCABULARY, TOKENS = 16, 4, 61, 22
IDS = torch.arange(TOKENS) * 7 % VOCABULARY
MASK = Mask([TOKENS])


class Block(nn.Module):
    """Causal self-attention and an MLP."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(E), nn.Linear(E, 3 * E), nn.Linear(E, E)
        self.mlp = nn.Sequential(nn.LayerNorm(E), nn.Linear(E, E), nn.GELU(), nn.Dropout(dropout), nn.Linear(E, E))

    def forward(self, x: Tensor, cos: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
        if cos is not None:
            q, k = q * cos, k * cos
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Model(nn.Module):
    """Embeddings, what a case does with them and with the positions that it is given, two blocks, and a head."""

    def __init__(self, case: Callable[[Model, Tensor, Tensor], Any], part: nn.Module | None = None) -> None:
        super().__init__()
        self.case, self.part = case, part
        self.tokens, self.places = nn.Embedding(VOCABULARY, E), nn.Embedding(64, E)
        self.table = nn.Parameter(torch.randn(64, E))
        self.register_buffer("cos", torch.randn(64, E // H))
        self.register_buffer("calls", torch.zeros(1))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(E, VOCABULARY)

    def forward(self, ids: Tensor, positions: Tensor) -> Any:
        self.calls += 1
        x, cos = self.tokens(ids), None
        out = self.case(self, x, positions)
        if isinstance(out, tuple):
            x, cos = out
        else:
            x = out
        for block in self.blocks:
            x = block(x, cos)
        return self.head(x)


class Mean(nn.Module):
    """The mean of all rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1, keepdim=True)


class Trained(Model):
    """A model that returns its loss beside logits, as nanoGPT does."""

    def forward(self, ids: Tensor, positions: Tensor) -> Any:
        logits = super().forward(ids, positions)
        return logits, F.cross_entropy(logits.flatten(0, 1), ids.flatten())


class Pooled(Model):
    """A model of whole sequences."""

    def forward(self, ids: Tensor, positions: Tensor) -> Any:
        return super().forward(ids, positions).mean(1)


class Rewarded(Model):
    """A model that returns a number for a sequence, its last token's."""

    def forward(self, ids: Tensor, positions: Tensor) -> Any:
        return super().forward(ids, positions)[:, -1, :1]


class Wave(Model):
    """A model that returns complex numbers, of which the imaginary parts are sums over rows."""

    def forward(self, ids: Tensor, positions: Tensor) -> Any:
        out = super().forward(ids, positions)
        return torch.complex(out, out.cumsum(1))


@dataclass
class Output:
    """What a model returns in a class of its own."""

    logits: Tensor


@dataclass(frozen=True)
class Batch:
    """A batch in a class of its own."""

    ids: Tensor
    positions: Tensor


class Rather(UserDict):  # type: ignore[type-arg]
    """A dict of its own, as tokenizers return."""

    def __getattr__(self, name: str) -> Any:
        return self.data[name]


class Summed(Model):
    """A model whose rows meet behind its last attention, in what PyTorch does not look into."""

    def forward(self, ids: Tensor, positions: Tensor) -> Any:
        return Output(super().forward(ids, positions).cumsum(1))


class Gate(nn.Module):
    """The sums so far, through a gate that is shut before the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * x.cumsum(1)


class Centred(nn.Module):
    """Rows less the mean of those that came in forwards before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(E))

    def forward(self, x: Tensor) -> Tensor:
        before = self.mean.clone()
        self.mean += 0.1 * x.detach().mean((0, 1))
        return x - before


class Table(nn.Module):
    """A table by position that grows when it is too short, and knows how long it is."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0
        self.register_buffer("table", torch.zeros(0, E))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        if (rows := int(positions.max()) + 1) > self.rows:
            self.rows = rows
            self.register_buffer("table", torch.arange(rows * E, dtype=x.dtype).view(rows, E).cos())
        return x + self.table[positions]


class Adapted(nn.Module):
    """A layer with an adapter that adds nothing before the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.a, self.b = nn.Linear(E, E), nn.Linear(E, 2), nn.Parameter(torch.zeros(E, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.a(x) @ self.b.T


class Experts(nn.Module):
    """Each row by one of many experts, which get their rows together, if there are any."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(E, 9), nn.ModuleList(nn.Linear(E, E) for _ in range(9))

    def forward(self, x: Tensor) -> Tensor:
        rows, out = x.flatten(0, 1), torch.zeros_like(x.flatten(0, 1))
        choice = self.router(rows).argmax(-1)
        for number, expert in enumerate(self.experts):
            at = torch.where(choice == number)[0]
            if not len(at):
                continue
            out.index_add_(0, at, expert(rows[at]))
        return out.view_as(x)


def recurrence(model: Any, x: Tensor, positions: Tensor) -> Tensor:
    state, out = torch.zeros(len(x), E, dtype=x.dtype), []
    for row in x.unbind(1):
        state = model.part(row, state)
        out.append(state)
    return torch.stack(out, 1)


def stretched(model: Any, x: Tensor, positions: Tensor) -> Tensor:
    return x + model.places(positions) * (2.0 if int(positions.max()) >= 16 else 1.0)


def drawn(model: Any, x: Tensor) -> Tensor:
    """Rows with random numbers of many kinds, in a random order for a while."""
    rows = x.flatten(0, 1)
    order, expert = torch.randperm(len(rows)), torch.multinomial(rows.softmax(-1), 1)[:, 0]
    ones = torch.ones_like(rows)
    rows = rows[order][order.argsort()] + model.table[expert] + rows.softmax(-1).multinomial(2, replacement=True).sum()
    rows = F.rrelu(rows, training=True) + F.gumbel_softmax(rows, hard=True) + torch.poisson(ones)
    rows = (
        rows
        + torch.binomial(ones, ones / 2)
        + sum(
            getattr(torch.empty_like(rows), draw)(0.5)
            for draw in ("geometric_", "log_normal_", "cauchy_", "exponential_")
        )
    )
    for drop in (torch.feature_alpha_dropout, torch.feature_dropout_, torch.alpha_dropout_):
        rows = drop(rows, 0.5, True)
    return rows.view_as(x)


class DropPath(nn.Module):
    """A name by which a module is known to drop whole samples."""

    drop_prob = 0.1

    def forward(self, x: Tensor) -> Tensor:
        return x


class StochasticDepth(nn.Module):
    """torchvision's name of a module that drops whole samples in training."""

    p = 0.1

    def forward(self, x: Tensor) -> Tensor:
        return x


def zeros(module: nn.Module) -> nn.Module:
    nn.init.zeros_(module.weight)
    return module


Case = Callable[[], nn.Module]


MIXING: dict[str, tuple[Case, str]] = {
    "positions counted": (
        lambda: Model(lambda m, x, _: x + m.places(torch.arange(x.shape[1]))),
        "the input that Model passes to places (Embedding)",
    ),
    "learned positions sliced": (lambda: Model(lambda m, x, _: x + m.table[: x.shape[1]]), "blocks.0 (Block)"),
    "rotary tables sliced": (lambda: Model(lambda m, x, _: (x, m.cos[: x.shape[1]])), "blocks.0 (Block)"),
    "sums so far": (lambda: Model(lambda m, x, _: x + x.cumsum(1)), "blocks.0 (Block)"),
    "shift": (lambda: Model(lambda m, x, _: x + 0.01 * x.roll(1, 1)), "blocks.0 (Block)"),
    "convolution": (
        lambda: Model(
            lambda m, x, _: x + m.part(x[:, None])[:, 0], nn.Conv2d(1, 1, (3, 1), padding=(1, 0))
        ), "the output of part (Conv2d)",
    ),
    "mean": (lambda: Model(lambda m, x, _: x + 0.01 * m.part(x), Mean()), "the output of part (Mean)"),
    "recurrence": (lambda: Model(recurrence, nn.GRUCell(E, E)), "blocks.0 (Block)"),
    "longest position": (lambda: Model(stretched), "blocks.0 (Block)"),
    "statistics": (
        lambda: Model(lambda m, x, _: m.part(x.transpose(1, 2)).transpose(1, 2), nn.BatchNorm1d(E)), "BatchNorm1d",
    ),
    "recurrent module": (lambda: Model(lambda m, x, _: m.part(x)[0], nn.GRU(E, E, batch_first=True)), "part (GRU)"),
    "whole paths": (lambda: Model(lambda m, x, p: m.part(x), DropPath()), "DropPath"),
    "whole paths of torchvision": (lambda: Model(lambda m, x, p: m.part(x), StochasticDepth()), "StochasticDepth"),
    "whole channels": (
        lambda: Model(lambda m, x, p: m.part(x.transpose(1, 2)).transpose(1, 2), nn.Dropout1d(0.5)), "Dropout1d",
    ),
    "sums so far through a shut gate": (lambda: Model(lambda m, x, _: m.part(x), Gate()), "the output of part (Gate)"),
    "positions that are zeros": (
        lambda: Model(lambda m, x, _: x + m.part(torch.arange(x.shape[1])), zeros(nn.Embedding(64, E))),
        "the input that Model passes to part (Embedding)",
    ),
    "a random order": (lambda: Model(lambda m, x, p: x[:, torch.randperm(x.shape[1])]), "blocks.0 (Block)"),
    "number of rows": (lambda: Model(lambda m, x, _: x * math.log(x.shape[1])), "passes to blocks.0 (Block)"),
    "mean so far": (
        lambda: Model(lambda m, x, _: m.part(x), Centred()), "in a trial after other rows, which changed part.mean",
    ),
    "a result of one's own": (lambda: Summed(lambda m, x, p: x), "the output of Summed"),
    "weights rescaled": (lambda: Model(lambda m, x, p: x + m.part(p), nn.Embedding(64, E, max_norm=1.0)), "max_norm"),
    "imaginary parts": (lambda: Wave(lambda m, x, p: x + m.places(p)), "the output of Wave"),
    "one number": (lambda: Rewarded(lambda m, x, p: x + m.places(p)), "the output of Rewarded"),
    "one result": (lambda: Pooled(lambda m, x, p: x + m.places(p)), "the output of Pooled"),
}  # fmt: skip


ALONE: dict[str, Case] = {
    "positions given": lambda: Model(lambda m, x, p: x + m.places(p)),
    "no positions": lambda: Model(lambda m, x, p: x),
    "one-hot over a vocabulary": lambda: Model(lambda m, x, p: x + F.one_hot(p % E, E).double() @ m.table[:E]),
    "as many classes as rows": lambda: Model(
        lambda m, x, p: x + (p[..., None] % 11 == torch.arange(11)).double() @ m.table[:11]
    ),
    "tables by position": lambda: Model(lambda m, x, p: (x, m.cos[p][:, None])),
    "complex tables": lambda: Model(
        lambda m, x, p: (
            x + torch.view_as_real(m.part(torch.polar(m.cos, m.cos)[p])).flatten(2)[..., :4].repeat(1, 1, 4)
        ),
        nn.Identity(),
    ),
    "experts": lambda: Model(lambda m, x, p: m.part(x), Experts()),
    "dropout": lambda: Model(lambda m, x, p: F.dropout(x, 0.5) + torch.rand_like(x) - torch.randn(x.shape), Block(0.5)),
    "random numbers": lambda: Model(lambda m, x, p: drawn(m, x)),
    "checkpoints": lambda: Model(lambda m, x, p: checkpoint(m.part, x, use_reentrant=False), Block()),
    "a table that grows": lambda: Model(lambda m, x, p: m.part(x, p), Table()),
    "iterations in training": lambda: Model(lambda m, x, p: m.part(x), spectral_norm(nn.Linear(E, E))),
    "calls counted": lambda: Model(lambda m, x, p: x * (1 + m.calls)),
    "an adapter of zeros": lambda: Model(lambda m, x, p: m.part(x), Adapted()),
    "an image of one's own": lambda: Model(
        lambda m, x, p: x + m.part(torch.ones(1, 3, 4, 4, dtype=x.dtype)).mean(), nn.Conv2d(3, 2, 3)
    ),
}


def made(case: Case) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return case().double()


def logits(comm: Comm, model: nn.Module, way: str) -> Tensor:
    """What a rank's copy of the model returns for its rows."""
    own, plan = copy.deepcopy(model), Plan(MASK, Layout.contiguous(TOKENS, comm.size))
    ids, positions = seqpar.shard(IDS, plan, comm.rank)[None], torch.from_numpy(plan.rope_positions(comm.rank))[None]
    if way == "block":
        with seqpar.sdpa(plan, comm):
            return own(ids, positions)
    parallelize(own, comm, plan=plan)
    return own(ids, positions)
