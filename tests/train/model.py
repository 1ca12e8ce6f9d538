"""A tiny decoder whose attention asks for the plan around it and whose forward ends in the loss, and its batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import seqpar
from seqpar.comm import Comm
from seqpar.data import Share, share
from seqpar.nn import Attention
from seqpar.train import linear_cross_entropy

VOCABULARY, DIM, HEADS, HIDDEN = 37, 16, 4, 24
IGNORED = -100


class Layer(nn.Module):
    """Pre-norm attention with rotary positions and two queries a key, then an MLP. Without biases.

    A key's bias has a gradient of zero, and AdamW makes steps of any size of its rounding.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.q, self.out = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.k, self.v = nn.Linear(DIM, DIM // 2, bias=False), nn.Linear(DIM, DIM // 2, bias=False)
        self.attention = Attention()
        self.up, self.down = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = (linear(normed).unflatten(-1, (-1, DIM // HEADS)) for linear in (self.q, self.k, self.v))
        frequencies = torch.tensor([1.0, 0.1])
        q, k = (seqpar.rotary(each, positions, frequencies) for each in (q, k))
        x = x + self.out(self.attention(q, k, v).flatten(1))
        return x + self.down(F.silu(self.up(self.mlp_norm(x))))


class Decoder(nn.Module):
    """Rows, positions and labels of this rank -> its share of the loss."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.checkpoint: bool | None = None  # of layers: reentrant or not
        self.embedding, self.norm = nn.Embedding(VOCABULARY, DIM), nn.RMSNorm(DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(
        self, tokens: Tensor, positions: Tensor, labels: Tensor, *, valid: int | Tensor, average_over: int = 1
    ) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            if self.checkpoint is None:
                x = layer(x, positions)
            else:
                x = checkpoint(layer, x, positions, use_reentrant=self.checkpoint)
        return linear_cross_entropy(
            self.norm(x), self.head.weight, labels, valid=valid, average_over=average_over, chunk=16
        )


def decoder(dtype: torch.dtype = torch.float64, layers: int = 2) -> Decoder:
    """The same weights on every rank, whatever else drew random numbers."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Decoder(layers).to(dtype)


@dataclass
class Documents:
    """Tokens and labels of some documents."""

    tokens: list[Tensor]
    labels: list[Tensor]

    @classmethod
    def of(cls, step: int, number: int = 5) -> Documents:
        """The global batch of a step; documents of 1 to 40 tokens, some labels of which do not count."""
        g = torch.Generator().manual_seed(step)
        lengths = torch.randint(1, 40, (number,), generator=g).tolist()
        tokens = [torch.randint(VOCABULARY, (n,), generator=g) for n in lengths]
        labels = [t.masked_fill(torch.rand(len(t), generator=g) < 0.3 * (i % 3), IGNORED) for i, t in enumerate(tokens)]
        return cls(tokens, labels)

    def pick(self, numbers: list[int]) -> Documents:
        return Documents([self.tokens[i] for i in numbers], [self.labels[i] for i in numbers])

    def part(self, index: int, parts: int) -> Documents:
        """Every so manyth document from the index on."""
        return self.pick(list(range(index, len(self.tokens), parts)))

    def share(self, comm: Comm, **options: object) -> Share:
        """Of the union of the documents that the comm's ranks bring."""
        batch = {"input_ids": self.tokens, "labels": self.labels} if self.tokens else None
        return share(batch, comm, shift="document", **options)  # type: ignore[arg-type]


def loss_of(model: nn.Module, share: Share, *, valid: int | Tensor, average_over: int = 1) -> Tensor:
    """This rank's share of the loss."""
    with seqpar.parallel(share.plan, share.comm):
        tokens, labels = share.tensors["input_ids"], share.tensors["labels"]
        return model(tokens, share.positions, labels, valid=valid, average_over=average_over)


def single(steps: int, dtype: torch.dtype = torch.float64) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses of one process, the gradients of the last step and the parameters after it."""
    model = decoder(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        here = Documents.of(step).share(seqpar.LocalComm())
        optimizer.zero_grad()
        with torch.autograd.set_multithreading_enabled(False):
            loss = loss_of(model, here, valid=here.valid)
            loss.backward()
        losses.append(loss.item())
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return losses, grads, {name: p.detach() for name, p in model.named_parameters()}
