"""Parameters that are zero, or nearly, as gates and last layers before training: in trials they have other values.

They would hide what they multiply later. So do zero rows and columns, as where one layer gives shifts and gates.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce

import torch
from torch import Tensor, nn

from seqpar.private import torch as torch_private

NEAR_ZERO = 1e-3  # a tensor whose largest element is below this may hide an effect
SOME = 4096  # elements of a tensor; usually one of them tells that it is not nearly zero


def in_place_of_zeros(model: nn.Module) -> dict[int, Tensor]:
    """Random weights in place of nearly zero parameters, and of zero rows and columns, by the parameters' ids.

    Biases of PyTorch's own modules never act as gates, and stay.
    """
    weights: dict[int, Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}  # where a padding token is 0
    for module in model.modules():
        for name, p in torch_private.parameters_of(module).items():
            bias = name.endswith("bias") and type(module).__module__.startswith("torch.nn.")
            if p is None or id(p) in weights or bias or not is_plain(p):
                continue
            zeros = near_zero(p.detach(), parts=id(p) not in tables)
            if zeros is not None:
                drawn = torch.rand(p.shape, generator=generator, device="cpu")
                # a vector may have to be positive; a matrix should preserve the size of its input
                drawn = (drawn * 2 - 1) * p.shape[-1] ** -0.5 if p.dim() > 1 else drawn / 2 + 0.5
                weights[id(p)] = torch.where(zeros, drawn.to(p), p.detach())
    return weights


@contextmanager
def without_zeros(model: nn.Module) -> Iterator[None]:
    """A context in which parameters have the values of `in_place_of_zeros`; nothing is written to their own memory."""
    with torch_private.DisableTorchFunction():  # a mode around may refuse random numbers, or replace them
        others = in_place_of_zeros(model)
    own = [(p, p.data) for p in model.parameters() if id(p) in others and not p.is_inference()]
    try:
        for p, _ in own:
            p.data = others[id(p)]
        yield
    finally:
        for p, values in own:
            p.data = values


def is_plain(x: Tensor) -> bool:
    """Whether a tensor or parameter has values of its own, which may be replaced."""
    plain = type(x) in (Tensor, nn.Parameter) and type(x.data) is Tensor and x.layout is torch.strided
    return plain and not x.is_meta and bool(x.numel()) and x.is_floating_point() and x.dtype.itemsize > 1


def near_zero(x: Tensor, parts: bool) -> Tensor | None:
    """Where a plain tensor may hide an effect, or None: everywhere if it is nearly zero, else in zero rows and columns.

    parts: whether to look for these.
    """
    # a look at some elements tells enough of most parameters, which may be large
    if _largest(x.reshape(-1)[:: -(-x.numel() // SOME)]) <= NEAR_ZERO and _largest(x) <= NEAR_ZERO:
        return torch.ones_like(x, dtype=torch.bool)
    zero = [_zeros(x, dim) for dim in {0, x.dim() - 1}] if parts and x.dim() else []
    return reduce(torch.logical_or, zero) if any(map(torch.any, zero)) else None


def _largest(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, torch.inf))


def _zeros(x: Tensor, dim: int) -> Tensor:
    """Which slices along a dim are zero, with the other dims kept as 1."""
    slices = x.movedim(dim, 0)
    generator = torch.Generator().manual_seed(0)
    at = [torch.randint(n, (8,), generator=generator, device="cpu").to(x.device) for n in slices.shape[1:]]
    zero = slices[(slice(None), *at)].reshape(len(slices), -1).eq(0).all(1)
    whole = zero.nonzero()[:, 0]
    zero[whole] = slices[whole].flatten(1).eq(0).all(1) if at else True
    return zero.reshape([-1 if each == dim else 1 for each in range(x.dim())])
