"""Replacements in trial runs: for attention, for weights that hide an effect, for random numbers.

    attention        a function of each row, (sum(q) + sum(k)) / sqrt(D) + v: not q . k, where equal rotations cancel
    weights near 0   random weights: gates, adapters and tables of positions hide effects until a first training step
    random numbers   all equal; dropout drops nothing

A mode replaces them for this thread's calls only: the model is not touched. Where parameters go into functions that no
mode sees, as those of seqpar's mixers, `awake` lends them other values instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from seqpar.integrations.probe.record import under_trial
from seqpar.nn.randomness import undrawn
from seqpar.plan import Plan

ASLEEP = 1e-3  # a parameter whose largest element is below this may hide an effect
SOME = 4096  # elements of a parameter; usually one of them tells that it is not nearly zero


def stand_in(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
    """A replacement for attention, [T, H, D_v]: a function of each row of q, k and v alone; records q, k and v."""
    k, v = (x.repeat_interleave(q.shape[1] // max(1, x.shape[1]), 1) for x in (k, v))
    if plan.mask.tokens == plan.mask.kv_tokens and plan.kv_layout is plan.layout:
        out = (q.sum(-1, keepdim=True) + k.sum(-1, keepdim=True)) * q.shape[-1] ** -0.5 + v
    else:  # keys of other rows
        out, k, v = q.sum(-1, keepdim=True).expand(-1, -1, v.shape[-1]), k[:0], v[:0]
    if (record := under_trial()) is not None:
        record.note_attention(q, k, v)
    return out


class Deterministic(TorchFunctionMode):
    """A mode without random numbers: dropout drops nothing, and draws return equal numbers.

    awake: replacements of parameters, by the parameters' ids.
    """

    def __init__(self, awake: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.awake = awake

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.awake:
            args, kwargs = (tree_map(self._substitute, value) for value in (args, kwargs))
        return undrawn(func, args, kwargs)

    def _substitute(self, x: Any) -> Any:
        return self.awake.get(id(x), x) if isinstance(x, nn.Parameter) else x


def awakened(model: nn.Module) -> dict[int, Tensor]:
    """Random weights in place of nearly zero parameters, and of zero rows and columns, by the parameters' ids.

    Biases of PyTorch's own modules never act as gates, and stay.
    """
    weights: dict[int, Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}  # where a padding token is 0
    for module in model.modules():
        for name, p in module._parameters.items():
            bias = name.endswith("bias") and type(module).__module__.startswith("torch.nn.")
            if p is None or id(p) in weights or bias or not _is_plain(p):
                continue
            asleep = _asleep(p.detach(), parts=id(p) not in tables)
            if asleep is not None:
                drawn = torch.rand(p.shape, generator=generator, device="cpu")
                # a vector may have to be positive; a matrix should preserve the size of its input
                drawn = (drawn * 2 - 1) * p.shape[-1] ** -0.5 if p.dim() > 1 else drawn / 2 + 0.5
                weights[id(p)] = torch.where(asleep, drawn.to(p), p.detach())
    return weights


@contextmanager
def awake(model: nn.Module) -> Iterator[None]:
    """A context in which parameters have the values of `awakened`; nothing is written to their own memory."""
    others = awakened(model)
    own = [(p, p.data) for p in model.parameters() if id(p) in others and not p.is_inference()]
    try:
        for p, _ in own:
            p.data = others[id(p)]
        yield
    finally:
        for p, values in own:
            p.data = values


def _is_plain(p: nn.Parameter) -> bool:
    """Whether a parameter has values of its own, which may be replaced."""
    plain = type(p) is nn.Parameter and type(p.data) is Tensor and p.layout is torch.strided
    return plain and not p.is_meta and bool(p.numel()) and p.is_floating_point() and p.dtype.itemsize > 1


def _asleep(x: Tensor, parts: bool) -> Tensor | None:
    """Where a parameter may hide an effect, or None: everywhere if it is nearly zero, else in zero rows and columns.

    parts: whether to look for these.
    """
    # a look at some elements tells enough of most parameters, which may be large
    if _largest(x.reshape(-1)[:: -(-x.numel() // SOME)]) <= ASLEEP and _largest(x) <= ASLEEP:
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
