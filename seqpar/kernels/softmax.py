"""The algebra of partial attention: merging normalised parts, and products that zeros keep clean."""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.kernels.dispatch import on_triton


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from attention over each.

    out, part [..., D]: normalised outputs. lse, part_lse [...]: natural log of the sums of exponentials; -inf where no
    key is seen, and there the output counts for nothing. A commutative monoid with identity ``(0, -inf)``, to rounding.
    Returns both in the dtype of ``lse``. Differentiable.
    """
    top = torch.maximum(lse, part_lse)
    base = torch.where(top == -torch.inf, torch.zeros_like(top), top).detach()
    a, b = torch.exp(lse - base), torch.exp(part_lse - base)
    total = a + b
    safe = torch.where(total == 0, torch.ones_like(total), total)
    new = (a / safe)[..., None] * _only(out, lse) + (b / safe)[..., None] * _only(part, part_lse)
    joined = torch.where(total == 0, torch.full_like(top, -torch.inf), torch.log(safe) + base)
    return new.to(lse.dtype), joined


def merge_(acc: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, out: Tensor | None = None) -> None:
    """`merge` a part into ``(acc, lse)`` in place, or with the output in ``out`` instead of ``acc``, in its dtype.

    acc, part, out [M, H, D], any strides with a dense last dim; lse, part_lse [H, M]. acc and lse are float32, or
    float64. With ``out`` this is the last merge: ``acc`` is left as it was.
    """
    if on_triton(acc):
        from seqpar.kernels.triton import merge as fused

        fused.merge_(acc, lse, part, part_lse, out)
        return
    new, joined = merge(acc, lse.t(), part, part_lse.t())
    lse.copy_(joined.t())
    (acc if out is None else out).copy_(new)


def _only(out: Tensor, lse: Tensor) -> Tensor:
    """The output with rows that see nothing as zeros, so that whatever they hold reaches no result."""
    return torch.where((lse == -torch.inf)[..., None], torch.zeros((), dtype=out.dtype, device=out.device), out)


def masked_product(weights: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """``weights @ values`` in which a zero weight of an unseen pair meets no non-finite value.

    weights [B, R, C], zero where ``seen`` is False; values [B, C, D]; seen [R, C]. In floating point zero times NaN is
    NaN, and a value that is not finite must reach the rows that see it and no other.
    """
    if _known_finite(values):
        return torch.bmm(weights, values)
    bad = ~torch.isfinite(values)
    clean = torch.bmm(weights, values.masked_fill(bad, 0.0))
    # Of the bad values that a row sees: how many, and the sum of the signs with which infinities come. NaN has none.
    number = torch.bmm(seen.to(values.dtype).expand_as(weights), bad.to(values.dtype))
    signs = torch.bmm(weights.sign(), torch.where(bad, values, 0.0).nan_to_num(0.0, 1.0, -1.0))
    alike = torch.where(signs == number, torch.inf, torch.where(signs == -number, -torch.inf, torch.nan))
    return torch.where(number == 0, clean, clean + alike)


def _known_finite(values: Tensor) -> bool:
    """Whether all values are finite, as far as the host can see without waiting for a device."""
    return values.device.type == "cpu" and bool(torch.isfinite(values).all())
