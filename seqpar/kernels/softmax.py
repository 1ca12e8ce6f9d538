"""The algebra of partial attention: merging normalised parts, and products that zeros keep clean."""

from __future__ import annotations

import torch
from torch import Tensor


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


def _only(out: Tensor, lse: Tensor) -> Tensor:
    """The output with rows that see nothing as zeros, so that whatever they hold reaches no result."""
    return torch.where((lse == -torch.inf)[..., None], torch.zeros((), dtype=out.dtype, device=out.device), out)


def masked_product(weights: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """``weights @ values`` in which a zero weight of an unseen pair meets no non-finite value.

    weights [B, R, C], zero where ``seen`` is False; values [B, C, D]; seen [R, C]. In floating point zero times NaN is
    NaN, and a value that is not finite must reach the rows that see it and no other.
    """
    bad = ~torch.isfinite(values).all(-1)
    if not bool(bad.any()):
        return torch.bmm(weights, values)
    result = torch.bmm(weights, values.masked_fill(bad[..., None], 0.0))
    for batch, column in bad.nonzero().tolist():
        reach = torch.where(seen[:, column, None], weights[batch, :, column, None] * values[batch, column], 0.0)
        result[batch] += reach
    return result
