"""Rotary embedding: pairs of a head's elements rotated by an angle that grows with the token's position.

Pair j of a token at position p is rotated by ``p * frequencies[j]`` and scaled by ``scaling``. Pair j is elements
``j, j + R/2`` (Llama, NeoX), or ``2j, 2j + 1`` if interleaved (GPT-J), of the first ``R = 2 * len(frequencies)``
elements; the others stay as they are. Source: Su et al. 2021, RoFormer, section 3.2.

Angles are products in float32, as in the training of models: a position below 2**24 is exact and the product is rounded
once, so an angle is off by at most ``angle * 2**-24``, which at position 10 million and frequency near 1 is half a
radian. Sine and cosine of the rounded angle are exact to rounding. Float64 inputs use float64 throughout.
"""

from __future__ import annotations

from torch import Tensor

from seqpar.kernels.dispatch import on_triton
from seqpar.kernels.protocol import acc_dtype


def rotate(
    x: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    *,
    interleaved: bool = False,
    scaling: float = 1.0,
    inverse: bool = False,
) -> Tensor:
    """``out[i] = turned(x[i], positions[i])``, a new tensor in x's dtype.

    x [N, H, D], any strides; positions [N], integers; frequencies [R/2]. inverse: the adjoint, which rotates back and
    scales equally.
    """
    out = x.new_empty(x.shape)
    if on_triton(x):
        from seqpar.kernels.triton import rotary as fused

        if x.stride(-1) * x.shape[-1] >= 1 << 31:  # its offsets inside a row have 32 bits
            x = x.contiguous()
        fused.rotate(x, positions, frequencies, out, interleaved, scaling, inverse)
        return out
    wide = acc_dtype(x.dtype)
    angle = positions.to(wide)[:, None, None] * frequencies.to(wide)
    cos, sin = angle.cos() * scaling, angle.sin() * (-scaling if inverse else scaling)
    a, b = (half.to(wide) for half in _pairs(x, len(frequencies), interleaved))
    out[..., 2 * len(frequencies) :] = x[..., 2 * len(frequencies) :]
    for half, turned in zip(_pairs(out, len(frequencies), interleaved), (a * cos - b * sin, b * cos + a * sin)):
        half.copy_(turned)
    return out


def _pairs(x: Tensor, count: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """First and second elements of all pairs."""
    turned = x[..., : 2 * count]
    return (turned[..., ::2], turned[..., 1::2]) if interleaved else (turned[..., :count], turned[..., count:])
