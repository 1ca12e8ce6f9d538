"""Training programs for `seqpar.testing.compare`: a right loop, and others that replace one of its parts.

`RIGHT` computes on several ranks what it computes on one. `WRONG` has the mistakes that raise nothing; `seen` is a loss
or a parameter by which each is found.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import seqpar
from seqpar.comm import Comm
from seqpar.train import all_sum, clip_grad_norm, cross_entropy, sync_gradients

VOCABULARY, DIM, HEADS = 19, 8, 2
RIGHT: dict[str, type[Loop]] = {}
WRONG: dict[str, type[Loop]] = {}


class Decoder(nn.Module):
    """One layer of causal attention, with positions as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, DIM), nn.Embedding(64, DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.head(self.hidden(tokens, positions))

    def hidden(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """What the head reads."""
        x = self.mixed(self.tokens(tokens) + self.places(positions))
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).movedim(-3, 0).transpose(-2, -3)
        return x + self.out(self.attend(q, k, v).transpose(-2, -3).flatten(-2))

    def mixed(self, x: Tensor) -> Tensor:
        """Before attention."""
        return x

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention, heads before rows."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Loop:
    """Documents that every rank has whole, plain PyTorch under `parallelize`, shares of the loss, summed gradients."""

    dtype, rate, lengths = torch.float64, 1e-2, [13, 6]
    steps, processes, seen = 2, False, ""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def __init_subclass__(cls) -> None:
        (WRONG if cls.seen else RIGHT)[cls.__name__] = cls

    def train(self) -> Iterator[tuple[nn.Module, Tensor]]:
        torch.manual_seed(0)
        model = self.model().to(self.dtype)
        wrapped = self.parallel(model)
        optimizer = self.optimizer(model)
        for step in range(self.steps):
            generator = torch.Generator().manual_seed(step)
            optimizer.zero_grad()
            loss = self.backward(wrapped, generator)
            self.sum(model)
            self.clip(model)
            optimizer.step()
            yield wrapped, self.reported(loss.detach())

    def model(self) -> nn.Module:
        return Decoder()

    def parallel(self, model: nn.Module) -> nn.Module:
        seqpar.parallelize(model, self.comm, sdpa=True)
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.rate)

    def data(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Tokens and labels of all documents."""
        several = [
            torch.randint(VOCABULARY, (n + 1,), generator=generator).cumsum(0) % VOCABULARY for n in self.lengths
        ]
        return torch.cat([x[:-1] for x in several]), torch.cat([x[1:] for x in several])

    def plan(self) -> seqpar.Plan:
        return seqpar.Plan(seqpar.Mask(self.lengths), seqpar.Layout.zigzag(self.lengths, self.comm.size))

    def rows(self, plan: seqpar.Plan, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return seqpar.shard(tokens, plan, self.comm.rank), seqpar.shard(labels, plan, self.comm.rank)

    def positions(self, plan: seqpar.Plan) -> Tensor:
        return torch.from_numpy(plan.rope_positions(self.comm.rank))

    def backward(self, model: nn.Module, generator: torch.Generator) -> Tensor:
        tokens, labels = self.data(generator)
        plan = self.plan()
        tokens, labels = self.rows(plan, tokens, labels)
        loss = self.loss(model, self.forward(model, plan, tokens), labels)
        loss.backward()
        return loss

    def forward(self, model: nn.Module, plan: seqpar.Plan, tokens: Tensor) -> Tensor:
        with seqpar.parallel(plan, self.comm):
            return model(tokens[None], self.positions(plan)[None])[0]

    def loss(self, model: nn.Module, logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits, labels, valid=sum(self.lengths))

    def sum(self, model: nn.Module) -> None:
        sync_gradients(model.parameters(), self.comm)

    def clip(self, model: nn.Module) -> None:
        pass

    def reported(self, loss: Tensor) -> Tensor:
        return all_sum(loss, self.comm)


def train(loop: type[Loop], comm: Comm) -> Iterator[tuple[nn.Module, Tensor]]:
    """The program of a loop, which processes can import."""
    return loop(comm).train()


class Plain(Loop):
    pass


class Single(Loop):
    dtype = torch.float32


class Half(Loop):
    dtype = torch.bfloat16

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.rate)


class ClippedAfterTheSum(Loop):
    def clip(self, model: nn.Module) -> None:
        clip_grad_norm(model.parameters(), 0.1)


class Penalty(Loop):
    def loss(self, model: nn.Module, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(model, logits, labels) + model.head.weight.square().sum() / self.comm.size


class Processes(Loop):
    processes, steps = True, 1


class PositionsFromZero(Loop):
    seen = "places.weight"

    def positions(self, plan: seqpar.Plan) -> Tensor:
        return torch.arange(plan.rows(self.comm.rank))


class LabelsShiftedAfterShard(Loop):
    seen = "loss"

    def rows(self, plan: seqpar.Plan, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        tokens, _ = super().rows(plan, tokens, labels)
        return tokens, torch.cat([tokens[1:], torch.tensor([-100])])


class OwnLabels(Loop):
    seen = "loss"

    def loss(self, model: nn.Module, logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits, labels, valid=int((labels != -100).sum()))


class MeanOfOwnRows(Loop):
    seen = "head.weight"

    def loss(self, model: nn.Module, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels)


class PenaltyPerRank(Loop):
    seen = "head.weight"

    def loss(self, model: nn.Module, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(model, logits, labels) + model.head.weight.square().sum()


class ClippedBeforeTheSum(Loop):
    seen = "qkv.bias"

    def sum(self, model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        super().sum(model)


class OwnShareReported(Loop):
    seen = "loss"

    def reported(self, loss: Tensor) -> Tensor:
        return loss


class RateByRanks(Loop):
    seen = "out.weight"

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.rate * self.comm.size)
