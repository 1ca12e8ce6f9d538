"""`rotary`: the verb, its checks, and its op for autograd and torch.compile."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from seqpar.comm.entry import refuse_transforms
from seqpar.kernels.memory.rotary import rotate
from seqpar.kernels.protocol import DTYPES
from seqpar.ops.core.collective_op import check_dense, refuse_tangents
from seqpar.private.torch import forward_level

NAMES = ("x", "positions", "frequencies")
_LIBRARY = torch.library.Library("seqpar", "FRAGMENT")
_LIBRARY.define(
    "rotary(Tensor x, Tensor positions, Tensor frequencies, bool interleaved, float scaling, bool inverse) -> Tensor"
)


def rotary(
    x: Tensor, positions: Tensor, frequencies: Tensor, *, interleaved: bool = False, scaling: float = 1.0
) -> Tensor:
    """Queries or keys with the rotary embedding of their positions, in x's dtype. Local to the rank.

    x [T, H, D] of any attention dtype. positions [T], int32 or int64: of tokens in their document or in the batch,
    whatever the layout. frequencies [R/2], floating point: angle per position of every pair of elements, R <= D; the
    last D - R elements stay unchanged. Pass scaled frequencies (YaRN, Llama 3) as they are. interleaved: pairs are
    neighbours (GPT-J) instead of halves (Llama, NeoX). scaling: of sines and cosines, for YaRN. Computed in float32, or
    float64 for float64; differentiable in x, any number of times.

    Raises: TypeError for arguments of other types; ValueError for shapes, dtypes or devices that do not match;
    NotImplementedError for frequencies that require a gradient, tensors that are not dense, forward-mode derivatives,
    and inside transforms of torch.func.

    Source: Su et al. 2021 (RoFormer).
    """
    refuse_transforms("rotary")
    if forward_level() >= 0:
        refuse_tangents("rotary", (x,))
    given = (x, positions, frequencies)
    for name, value in zip(NAMES, given, strict=True):
        if not isinstance(value, Tensor):
            raise TypeError(f"rotary: {name} must be a tensor, got {value!r:.200}")
    check_dense("rotary", given)
    if x.dim() != 3 or positions.shape != x.shape[:1] or frequencies.dim() != 1:
        raise ValueError(f"expected x [T, H, D], positions [T], frequencies [R/2], got {_given(*given)}")
    if 2 * frequencies.shape[0] > x.shape[2]:
        raise ValueError(f"2 * {frequencies.shape[0]} frequencies for heads of {x.shape[2]}, got {_given(*given)}")
    if x.dtype not in DTYPES or not frequencies.dtype.is_floating_point:
        raise ValueError(f"x must be one of {DTYPES} and frequencies floating point, got {_given(*given)}")
    if positions.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"positions must be int32 or int64, got {_given(*given)}")
    if not x.device == positions.device == frequencies.device:
        raise ValueError(f"x, positions and frequencies must be on one device, got {_given(*given)}")
    if frequencies.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError("frequencies have no gradient; detach them")
    if not -math.inf < scaling < math.inf:  # a form that torch.compile can trace, unlike math.isfinite
        raise ValueError(f"scaling must be finite, got {scaling}")
    return torch.ops.seqpar.rotary(x, positions, frequencies, bool(interleaved), float(scaling), False)


def _given(*tensors: Tensor) -> str:
    """The call in words; only built for an error, since text would make shapes constants of a compiled graph."""
    return ", ".join(f"{n} {x.dtype}{list(x.shape)} on {x.device}" for n, x in zip(NAMES, tensors, strict=True))


def _rotary(
    x: Tensor, positions: Tensor, frequencies: Tensor, interleaved: bool, scaling: float, inverse: bool
) -> Tensor:
    return rotate(x, positions, frequencies, interleaved=interleaved, scaling=scaling, inverse=inverse)


def _shape(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, positions, frequencies, *ctx.options = inputs
    ctx.save_for_backward(positions, frequencies)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    interleaved, scaling, inverse = ctx.options
    dx = torch.ops.seqpar.rotary(grad, *ctx.saved_tensors, interleaved, scaling, not inverse)
    return dx, None, None, None, None, None


_LIBRARY.impl("rotary", _rotary, "CompositeExplicitAutograd")
torch.library.register_fake("seqpar::rotary", _shape, lib=_LIBRARY)
torch.library.register_autograd("seqpar::rotary", _backward, setup_context=_save, lib=_LIBRARY)
