"""Backward by recomputation: the gradients of a function of local tensors, from its inputs alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce

import torch
from torch import Tensor

from seqpar.private import torch as torch_private

_AUTOGRAD = [key for name, key in torch_private.DispatchKey.__members__.items() if name.startswith("Autograd")]


@contextmanager
def recording() -> Iterator[None]:
    """A block whose operations are recorded, also in an op that runs below autograd's dispatch keys.

    So do backward ops in compiled autograd, and inside `torch.cond`, whose forward and backward are graphs.
    """
    excluded = torch_private.dispatch_tls_local_exclude_set()
    excluded = reduce(lambda keys, key: keys.remove(key) if keys.has(key) else keys, _AUTOGRAD, excluded)
    included = torch_private.dispatch_tls_local_include_set()
    with torch.enable_grad(), torch_private.ForceDispatchKeyGuard(included, excluded):
        yield


def recomputed(
    function: Callable[..., Tensor | Sequence[Tensor]], inputs: Sequence[Tensor | None], needs: Sequence[bool]
) -> Callable[[Sequence[Tensor | None]], list[Tensor | None]]:
    """Computes a function, and returns what turns the gradients of its results, None for zero, into those of inputs."""
    with recording():
        leaves = [None if x is None else x.detach().requires_grad_(need) for x, need in zip(inputs, needs, strict=True)]
        results = function(*leaves)
    results = [results] if isinstance(results, Tensor) else results
    wanted = [x for x in leaves if x is not None and x.requires_grad]

    def of(of_results: Sequence[Tensor | None]) -> list[Tensor | None]:
        pairs = [(y, g) for y, g in zip(results, of_results, strict=True) if g is not None and y.requires_grad]
        found: Sequence[Tensor | None] = [None] * len(wanted)
        if pairs and wanted:
            ys, gs = zip(*pairs, strict=True)
            with recording():
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
