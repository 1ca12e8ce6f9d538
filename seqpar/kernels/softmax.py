"""The algebra of partial attention: merging normalised parts, products in which unseen NaN stays out, and delta."""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.kernels.dispatch import on_triton
from seqpar.kernels.protocol import StepFacts, acc_dtype


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from attention over each.

    out, part [..., D]: normalised outputs. lse, part_lse [...]: natural log of the sums of exponentials; -inf where no
    key is seen, and then the output is ignored. Up to rounding a commutative monoid with identity ``(0, -inf)``.
    Returns both in the dtype of ``lse``. Differentiable.

    Raises: TypeError for anything but floating tensors; ValueError for other shapes.
    """
    given = {"out": out, "lse": lse, "part": part, "part_lse": part_lse}
    for name, x in given.items():
        if not isinstance(x, Tensor) or not x.is_floating_point():
            got = x.dtype if isinstance(x, Tensor) else f"{x!r:.200}"
            raise TypeError(f"merge: {name} must be a floating tensor, got {got}")
    if not (out.shape == part.shape and out.dim() and lse.shape == part_lse.shape == out.shape[:-1]):
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in given.items())
        raise ValueError(f"merge: expected out and part [..., D], lse and part_lse [...], got {shapes}")
    return _merged(out, lse, part, part_lse)


def _merged(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    top = torch.maximum(lse, part_lse)
    base = torch.where(top == -torch.inf, torch.zeros_like(top), top).detach()
    a, b = torch.exp(lse - base), torch.exp(part_lse - base)
    total = a + b
    safe = torch.where(total == 0, torch.ones_like(total), total)
    new = (a / safe)[..., None] * _only(out, lse) + (b / safe)[..., None] * _only(part, part_lse)
    joined = torch.where(total == 0, torch.full_like(top, -torch.inf), torch.log(safe) + base)
    return new.to(lse.dtype), joined


def merge_(acc: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, out: Tensor | None = None) -> None:
    """`merge` a part into ``(acc, lse)`` in place, or write the output to ``out`` in its dtype instead of ``acc``.

    acc, part, out [M, H, D], any strides with a dense last dim; lse, part_lse [H, M]. acc and lse are float32 or
    float64. With ``out`` this is the last merge, and ``acc`` is left unchanged.
    """
    if on_triton(acc):
        from seqpar.kernels.triton import merge as fused

        fused.merge_(acc, lse, part, part_lse, out)
        return
    new, joined = _merged(acc, lse.t(), part, part_lse.t())
    lse.copy_(joined.t())
    (acc if out is None else out).copy_(new)


def delta(dout: Tensor, out: Tensor, facts: StepFacts) -> Tensor:
    """``rowsum(dout * out)`` [H, M] in the accumulation dtype, which backward subtracts; Dao 2023, FlashAttention-2.

    dout, out [M, H, D], of the queries of a step with these facts; any strides with a dense last dim.
    """
    if on_triton(out):
        from seqpar.kernels.triton import delta as fused

        return fused.delta(dout, out, facts)
    wide = acc_dtype(out.dtype)
    return (dout.to(wide) * out.to(wide)).sum(-1).t()


def _only(out: Tensor, lse: Tensor) -> Tensor:
    """The output with zeros in rows that see nothing, so that their values reach no result."""
    return torch.where((lse == -torch.inf)[..., None], torch.zeros((), dtype=out.dtype, device=out.device), out)


def masked_product(weights: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """``weights @ values``, where an unseen pair's zero weight does not turn a NaN or infinity into a result.

    weights [B, R, C], zero where ``seen`` is False; values [B, C, D]; seen [R, C]. In floating point 0 * NaN is NaN,
    but a non-finite value must reach only the rows that see it.
    """
    if _known_finite(values):
        return torch.bmm(weights, values)
    bad = ~torch.isfinite(values)
    clean = torch.bmm(weights, values.masked_fill(bad, 0.0))
    # Per row, over the non-finite values it sees: their count, and the sum of the signs of infinities. NaN has no sign.
    number = torch.bmm(seen.to(values.dtype).expand_as(weights), bad.to(values.dtype))
    signs = torch.bmm(weights.sign(), values.masked_fill(~bad, 0.0).nan_to_num(0.0, 1.0, -1.0))
    alike = (
        torch.full_like(signs, torch.nan)
        .masked_fill_(signs == -number, -torch.inf)
        .masked_fill_(signs == number, torch.inf)
    )
    return torch.where(number == 0, clean, clean + alike)


def _known_finite(values: Tensor) -> bool:
    """Whether all values are finite, as far as the host can see without waiting for a device."""
    return values.device.type == "cpu" and bool(torch.isfinite(values).all())
