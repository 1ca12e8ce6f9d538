"""Whether gradients follow: those of some rows are part of the gradients of all of them.

Rows of a stream get gradients from the same rows of the outputs. What every rank has whole, such as the embedding of a
timestep, gets a share from each of them, and the shares add up to its gradient. An autograd function that mixes rows in
its backward alone breaks this, and so does a hook that divides gradients by their norm.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqpar.trial.compare import close
from seqpar.trial.readings import index
from seqpar.trial.rows import random_rows

Rows = tuple[int, list[int]] | None  # a dim, and which rows of the whole tensor are there; None: all of it


class Graph(NamedTuple):
    """The tensors of a run that give gradients, and the leaves that get them, each with its rows."""

    results: list[tuple[Tensor, Rows]]
    leaves: list[tuple[Tensor, Rows]]

    @staticmethod
    def of(results: list[tuple[Any, Rows]], leaves: list[tuple[Any, Rows]]) -> Graph:
        """A graph of those of the values that may have gradients."""
        results = [each for each in results if isinstance(each[0], Tensor) and each[0].is_floating_point()]
        return Graph(results, [each for each in leaves if isinstance(each[0], Tensor) and each[0].requires_grad])

    def gradients(self, given: list[Tensor]) -> list[Tensor]:
        """Gradients of the leaves for given ones of the results."""
        leaves = [x for x, _ in self.leaves]
        pairs = [(x, g) for (x, _), g in zip(self.results, given) if x.requires_grad]
        outputs, given = [x for x, _ in pairs], [g for _, g in pairs]
        if not outputs or not leaves:
            return [torch.zeros_like(x) for x in leaves]
        found = torch.autograd.grad(
            outputs, leaves, given, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return list(found)


def leaf(x: Any) -> Any:
    """A tensor as a leaf of a graph, if this thread makes one; anything else as it is."""
    grad = torch.is_grad_enabled() and isinstance(x, Tensor) and x.is_floating_point()
    return x.detach().requires_grad_() if grad else x


def gradients_follow(whole: Graph, parts: list[Graph]) -> bool:
    """Whether the gradients of a run are sums of those of its parts, which may share rows."""
    given = [random_rows(x.shape, x.detach(), n) for n, (x, _) in enumerate(whole.results)]
    sums = [torch.zeros_like(x) for x, _ in whole.leaves]
    times = [torch.zeros_like(x) for x in given]
    for part in parts:
        for x, (_, rows) in zip(times, part.results):
            _add(x, torch.ones_like(_some(x, rows)), rows)
    for part in parts:
        shares = [_some(x / n, rows) for x, n, (_, rows) in zip(given, times, part.results)]
        for x, grad, (_, rows) in zip(sums, part.gradients(shares), part.leaves):
            _add(x, grad, rows)
    return all(close(x, y) for x, y in zip(whole.gradients(given), sums))


def _some(x: Tensor, rows: Rows) -> Tensor:
    """These rows."""
    return x if rows is None else x.index_select(rows[0], index(rows[1], x))


def _add(x: Tensor, part: Tensor, rows: Rows) -> None:
    """Add to these rows."""
    if rows is None:
        x += part
    else:
        x.index_add_(rows[0], index(rows[1], x), part)
