"""Rotary embedding: pairs of a head's elements turned by an angle that grows with the token's position.

Pair j of a token at position p is turned by ``p * frequencies[j]`` and scaled by ``scaling``. Pair j is elements
``j, j + R/2`` (Llama, NeoX), or ``2j, 2j + 1`` if interleaved (GPT-J), of the first ``R = 2 * len(frequencies)``
elements; the others stay as they are. Source: Su et al. 2021, RoFormer, section 3.2.

Angles are products in float32, as models were trained with: a position below 2**24 is exact and the product is rounded
once, so an angle is off by at most ``angle * 2**-24``, which at position 10 million and frequency near 1 is half a
radian. Sine and cosine of the rounded angle are exact to rounding. Float64 inputs compute all of it in float64.
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
    rows: slice | Tensor = slice(None),
    out: Tensor | None = None,
    interleaved: bool = False,
    scaling: float = 1.0,
    inverse: bool = False,
) -> Tensor:
    """``out[i] = turned(x[rows[i]], positions[rows[i]])``, written to ``out`` if given, e.g. a part of a send buffer.

    x [N, H, D]; positions [N], integers; frequencies [R/2]; rows as in `memory.rows`; out [n, H, D] in x's
    dtype; any strides. inverse: the adjoint, which turns back and scales alike.
    """
    if isinstance(rows, slice):
        x, positions = x[rows], positions[rows]
        at = None
    else:
        at = rows
    if out is None:
        out = x.new_empty(len(x) if at is None else len(at), *x.shape[1:])
    if on_triton(x):
        from seqpar.kernels.triton import rotary as fused

        fused.rotate(x, positions, frequencies, at, out, interleaved, scaling, inverse)
        return out
    if at is not None:
        x, positions = x.index_select(0, at), positions.index_select(0, at)
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
