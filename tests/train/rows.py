"""Rows of hidden states and labels, and how much of their logits exists at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

T, E, V = 23, 6, 11
IGNORED = -100


def given(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, bias and labels, a third of them ignored."""
    g = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in ((T, E), (V, E), (V,)))
    labels = torch.randint(V, (T,), generator=g)
    labels[torch.rand(T, generator=g) < 0.3] = IGNORED
    return hidden, weight, bias, labels


def grads(loss: Tensor, *leaves: Tensor | None) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [x for x in leaves if x is not None]))


class Largest(TorchDispatchMode):
    """Inside, `elements` is how many the largest tensor of logits had, of those that operators made."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.elements = vocabulary, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, Tensor) and x.shape[-1:] == (self.vocabulary,):
                self.elements = max(self.elements, x.numel())
        return out
