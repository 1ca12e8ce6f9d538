"""Backward by recomputation: the gradients of a function of local tensors, from its inputs alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def recomputed(
    function: Callable[..., Tensor | Sequence[Tensor]], inputs: Sequence[Tensor | None], needs: Sequence[bool]
) -> Callable[[Sequence[Tensor | None]], list[Tensor | None]]:
    """Computes a function, and returns what turns the gradients of its results, None for zero, into those of inputs."""
    with torch.enable_grad():
        leaves = [None if x is None else x.detach().requires_grad_(need) for x, need in zip(inputs, needs, strict=True)]
        results = function(*leaves)
    results = [results] if isinstance(results, Tensor) else results
    wanted = [x for x in leaves if x is not None and x.requires_grad]

    def of(of_results: Sequence[Tensor | None]) -> list[Tensor | None]:
        pairs = [(y, g) for y, g in zip(results, of_results, strict=True) if g is not None and y.requires_grad]
        found: Sequence[Tensor | None] = [None] * len(wanted)
        if pairs and wanted:
            ys, gs = zip(*pairs, strict=True)
            found = torch.autograd.grad(ys, wanted, gs, allow_unused=True)
        values = iter(found)
        return [next(values) if x is not None and x.requires_grad else None for x in leaves]

    return of


def gradients(
    function: Callable[..., Tensor | Sequence[Tensor]],
    inputs: Sequence[Tensor | None],
    needs: Sequence[bool],
    of_results: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """The gradients of the inputs that need one. of_results: the gradients of the function's results, None for zero."""
    return recomputed(function, inputs, needs)(of_results)
