"""Random shares of a loss beside torch's loss of the whole, and arguments that cannot be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.train import cross_entropy, linear_cross_entropy
from tests.fuzz.outcome import Ended, compare, refused


@dataclass(frozen=True)
class Loss:
    """The loss of rows [cuts[i], cuts[i + 1]) on each rank."""

    seed: int
    cuts: tuple[int, ...]
    sizes: tuple[int, int]
    linear: bool
    biased: bool
    smoothing: float
    z_loss: float
    softcap: float
    ignored: float
    averaged: int
    chunk: int
    counted: bool
    misuse: str | None = None

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Hidden states, weight, bias and labels of the whole."""
        g, (e, v), n = torch.Generator().manual_seed(self.seed), self.sizes, self.cuts[-1]
        hidden, weight, bias = (torch.randn(s, generator=g, dtype=torch.float64) for s in ((n, e), (v, e), (v,)))
        labels = torch.randint(v, (n,), generator=g)
        labels[torch.rand(n, generator=g) < self.ignored] = -100
        return hidden, weight, bias, labels


def drawn(draw: Random, seed: int) -> Loss:
    """A random loss."""
    rows = draw.randint(1, 24)
    cuts = (0, *sorted(draw.randint(0, rows) for _ in range(draw.randint(0, 3))), rows)
    linear = draw.random() < 0.6
    return Loss(
        seed, cuts, (draw.randint(1, 6), draw.randint(1, 9)), linear, linear and draw.random() < 0.5,
        draw.choice((0.0, 0.1, 1.0)), draw.choice((0.0, 0.01)), draw.choice((0.0, 2.0)) if linear else 0.0,
        draw.choice((0.0, 0.3, 1.0)), draw.choice((1, 1, 4)), draw.randint(1, 9), draw.random() < 0.5,
        draw.choice(list(MISUSES)) if draw.random() < 0.5 else None,
    )  # fmt: skip


def put(name: str, *values: Any) -> Callable[[dict[str, Any], Random], dict[str, Any]]:
    return lambda call, draw: call | {name: draw.choice(values)}


MISUSES: dict[str, Callable[[dict[str, Any], Random], dict[str, Any]]] = {
    "valid": put("valid", -1, True, 2.5, None, "3", torch.tensor(-3), torch.tensor(True), torch.ones(2), np.zeros(())),
    "bias": put("bias", torch.zeros(1, 1), torch.zeros(77), [0.0], torch.zeros(77, dtype=torch.int64), 0.5),
    "softcap": put("softcap", -3.0, float("nan"), float("inf")),
    "smoothing": put("label_smoothing", -0.1, 1.5, float("nan")),
    "z_loss": put("z_loss", float("nan"), float("inf")),
    "average": put("average_over", 0, -1),
    "chunk": put("chunk", 0, -5),
    "weight": put("weight", None, torch.zeros(3), torch.zeros(4, 99), np.zeros((3, 3))),
    "rows": put("rows", None, torch.zeros(3), torch.zeros(2, 3, 4), np.zeros((3, 3)), [1.0]),
    "labels": put("labels", None, torch.zeros(99, dtype=torch.int64), torch.zeros(3), [1, 2]),
}


def judge(case: Loss) -> str:
    """How the case ends. Raises: Wrong."""
    hidden, weight, bias, labels = case.tensors()
    leaves = [hidden.requires_grad_(), weight.requires_grad_(), *([bias.requires_grad_()] if case.biased else [])]
    valid = int((labels != -100).sum())
    total = torch.zeros((), dtype=torch.float64)
    for first, last in zip(case.cuts, case.cuts[1:]):
        call: dict[str, Any] = {
            "rows": hidden[first:last], "labels": labels[first:last], "label_smoothing": case.smoothing,
            "valid": torch.tensor(valid) if case.counted else valid, "z_loss": case.z_loss,
            "average_over": case.averaged,
        }  # fmt: skip
        if case.linear:
            bound = bias if case.biased else None
            call |= {"weight": weight, "bias": bound, "softcap": case.softcap, "chunk": case.chunk}
        else:
            call["rows"] = F.linear(call["rows"], weight)
        if case.misuse is not None:
            changed = MISUSES[case.misuse](call, Random(case.seed))
            call = {name: value for name, value in changed.items() if name in call}
        try:
            rows, own = call.pop("rows"), call.pop("labels")
            loss = linear_cross_entropy(rows, call.pop("weight"), own, **call) if case.linear else cross_entropy(
                rows, own, **call
            )  # fmt: skip
        except Exception as error:
            return f"refused: {refused([Ended(None, error)], by_all=True)}"
        total = total + loss
    expected = whole(case, hidden, weight, bias, labels) * case.averaged
    compare({"loss": total.detach()[None]}, {"loss": expected.detach()[None]}, torch.float64) if valid else None
    want = torch.autograd.grad(expected, leaves) if valid else [torch.zeros_like(x) for x in leaves]
    got = torch.autograd.grad(total, leaves)
    named = [dict(zip("abc", grads)) for grads in (got, want)]
    if valid or case.linear:
        compare(*named, torch.float64)
    return "right"


def whole(case: Loss, hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    """The mean over all rows, by torch."""
    logits = F.linear(hidden, weight, bias if case.biased else None)
    if case.softcap:
        logits = case.softcap * torch.tanh(logits / case.softcap)
    squares = logits[labels != -100].logsumexp(-1).square().mean()
    return F.cross_entropy(logits, labels, label_smoothing=case.smoothing) + case.z_loss * squares
