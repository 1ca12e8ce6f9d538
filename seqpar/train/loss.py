"""Cross-entropy of a rank's rows as its share of the global mean, from logits, or in chunks from hidden states.

    T rows of this rank   V vocabulary   E model dim   z logits of a row   t its label   s label smoothing

    row loss = (1 - s) (lse(z) - z_t) + s (lse(z) - mean(z)) + z_loss lse(z)^2
    d row loss / dz = (1 + 2 z_loss lse(z)) softmax(z) - s / V - (1 - s) onehot(t)

Rows labelled `ignore_index`, and their gradients, count exactly 0. A rank with no other rows returns a 0 that still
depends on its logits, so that its backward takes part in the other ranks' collectives.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from seqpar.kernels import acc_dtype
from seqpar.ops.core.autocast import autocast_dtype
from seqpar.train.dtensor import is_dtensor

CACHED = 1 << 16  # logits of the rows that a core computes at a time


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    valid: int | Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    average_over: int = 1,
) -> Tensor:
    """This rank's share of the mean loss: the sum over its rows / `valid`, times `average_over`. A scalar.

    logits [T, V], labels [T] int64, already shifted; computed in fp32 (fp64 for fp64). valid: the labels that count in
    the *whole* global batch, over all ranks and micro-batches; an int or a 0-d tensor, which is not read back from a
    device. z_loss: the weight of the squared log-normaliser. average_over: the number of ranks over which a wrapper
    averages gradients, 1 if they are summed; the loss to report is then the sum over ranks, divided by average_over.

    The sum over all ranks is ``F.cross_entropy`` of the whole batch, NaN if no label counts at all.

    Raises: ValueError for wrong shapes, dtypes or numbers; TypeError for an argument that is not a tensor.
    """
    _check_rows(logits, labels, "logits")
    _check_numbers(valid, label_smoothing, z_loss, average_over)
    logits = logits.to(acc_dtype(logits.dtype))
    total = F.cross_entropy(logits, labels, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="sum")
    if z_loss:
        squares = logits.logsumexp(-1).square()
        total = total + z_loss * squares.masked_fill(labels == ignore_index, 0.0).sum()
    return total / valid * average_over


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    valid: int | Tensor,
    bias: Tensor | None = None,
    softcap: float = 0.0,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    average_over: int = 1,
    chunk: int = 1024,
) -> Tensor:
    """`cross_entropy` of the logits ``hidden @ weight.T + bias``, computed in chunks of `chunk` rows.

    hidden [T, E], weight [V, E], bias [V], labels [T]. softcap: logits become ``softcap * tanh(logits / softcap)``.
    Products have autocast's dtype where it is on, else hidden's; losses, and sums over chunks, are fp32 (fp64 for
    fp64). Forward computes the gradients along with the loss, so nothing is computed twice: between the passes it keeps
    them, [T, E] and [V, E], instead of logits.

    Under FSDP2 or DDP, call it inside the forward of the module that owns the weight: only then the weight is whole
    and its gradient is reduced.

    Raises: ValueError and TypeError as `cross_entropy`; NotImplementedError for a weight that is sharded over ranks.

    Source: Wijmans et al. 2024 (Cut Your Losses); Hsu et al. 2024 (Liger Kernel), also in one pass.
    """
    _check_rows(hidden, labels, "hidden")
    _check_numbers(valid, label_smoothing, z_loss, average_over)
    _check_head(hidden, weight, bias)
    if not 0.0 <= softcap < math.inf or chunk < 1:
        raise ValueError(
            f"linear_cross_entropy: softcap={softcap}, chunk={chunk}, expected a finite cap, 0 for none, and at least "
            "one row in a chunk"
        )
    options = _Options(ignore_index, label_smoothing, z_loss, softcap, chunk)
    return _LinearCrossEntropy.apply(hidden, weight, bias, labels, valid, average_over, options)


class _Options(NamedTuple):
    """The settings of the row losses."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float
    chunk: int


class _Sums(NamedTuple):
    """The sum of the rows' losses, and its gradients if needed."""

    loss: Tensor
    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def _check_rows(rows: Tensor, labels: Tensor, name: str) -> None:
    for kind, x in ((name, rows), ("labels", labels)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{kind} must be a tensor, got {x!r:.200}")
    if rows.dim() != 2 or labels.shape != rows.shape[:1] or labels.dtype != torch.int64:
        raise ValueError(
            f"{name} {list(rows.shape)}, labels {list(labels.shape)} of {labels.dtype}, expected [T, n] and [T] int64"
        )


def _check_numbers(valid: int | Tensor, label_smoothing: float, z_loss: float, average_over: int) -> None:
    if not _is_count(valid):
        raise ValueError(
            f"valid={valid!r}, expected the labels that count over all ranks, an int of at least 0 or a 0-d tensor"
        )
    if not 0.0 <= label_smoothing <= 1.0 or average_over < 1:
        raise ValueError(f"label_smoothing={label_smoothing}, average_over={average_over}, expected [0, 1] and >= 1")
    if not -math.inf < z_loss < math.inf:  # torch.compile can trace this form
        raise ValueError(f"z_loss={z_loss}, expected a finite weight")


def _is_count(valid: object) -> bool:
    """Whether it can be a number of labels; on a device only its dtype is checked, since a value would make it wait."""
    if not isinstance(valid, Tensor):
        return isinstance(valid, int) and not isinstance(valid, bool) and valid >= 0
    if valid.dim() or valid.dtype == torch.bool or valid.is_complex():
        return False
    return not valid.is_cpu or torch.compiler.is_compiling() or type(valid) is not Tensor or bool(valid >= 0)


def _check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    for kind, x in (("weight", weight), ("bias", bias)):
        if not isinstance(x, Tensor) and not (kind == "bias" and x is None):
            raise TypeError(f"linear_cross_entropy: the {kind} must be a tensor, got {x!r:.200}")
        if x is not None and is_dtensor(x):
            raise NotImplementedError(
                f"linear_cross_entropy: the {kind} is a DTensor {list(x.shape)} with placements {x.placements}; "
                f"call it inside the forward of the module that fully_shard wraps, where the {kind} is whole"
            )
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[1]:
        raise ValueError(
            f"linear_cross_entropy: hidden {list(hidden.shape)}, weight {list(weight.shape)}, expected [T, E], [V, E]"
        )
    if bias is not None and (bias.shape != weight.shape[:1] or not bias.dtype.is_floating_point):
        raise ValueError(
            f"linear_cross_entropy: bias {list(bias.shape)} of {bias.dtype}, expected floating point "
            f"[{weight.shape[0]}], one for each row of the weight {list(weight.shape)}"
        )


def _summed(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, o: _Options, needs: tuple[bool, bool, bool]
) -> _Sums:
    """The sums over a rank's rows, chunk after chunk. needs: the gradients to compute."""
    kind = hidden.device.type
    dtype = autocast_dtype(kind) or hidden.dtype
    wide = acc_dtype(dtype)
    h, w = hidden.to(dtype), weight.to(dtype)
    loss = torch.zeros((), dtype=wide, device=h.device)
    d_hidden = torch.empty_like(h) if needs[0] else None
    d_weight = torch.zeros_like(w, dtype=wide) if needs[1] else None
    d_bias = torch.zeros(len(w), dtype=wide, device=w.device) if needs[2] else None
    with torch.autocast(kind, enabled=False):
        for first in range(0, len(h), o.chunk):
            rows = slice(first, first + o.chunk)
            z = F.linear(h[rows], w).to(wide)
            if bias is not None:
                z += bias.to(wide)
            total, dz = _row_losses(z, labels[rows], o, any(needs))
            loss += total
            if d_bias is not None:
                d_bias += dz.sum(0)
            dz = dz.to(dtype)
            if d_hidden is not None:
                torch.mm(dz, w, out=d_hidden[rows])
            if d_weight is not None:
                d_weight += dz.t() @ h[rows]
    return _Sums(loss, d_hidden, d_weight, d_bias)


def _row_losses(z: Tensor, labels: Tensor, o: _Options, grad: bool) -> tuple[Tensor, Tensor]:
    """The sum of the rows' losses, and its gradient by the logits z, in z's memory; z is unchanged unless grad.

    On the CPU, blocks of rows go through all steps together, small enough for a core's cache.
    """
    blocks = 1
    if z.is_cpu and not torch.compiler.is_compiling():
        blocks = max(1, min(len(z) // 2, z.numel() // (CACHED * torch.get_num_threads())))
    parts = zip(z.tensor_split(blocks), labels.tensor_split(blocks))
    losses = torch.cat([_block_losses(rows, some, o, grad) for rows, some in parts])
    return losses.masked_fill(labels == o.ignore_index, 0.0).sum(), z


def _block_losses(z: Tensor, labels: Tensor, o: _Options, grad: bool) -> Tensor:
    """The losses of some rows, even of those that do not count; their logits become gradients if grad."""
    if o.softcap:
        z.div_(o.softcap).tanh_().mul_(o.softcap)
        slope = 1 - (z / o.softcap).square() if grad else None
    keep = labels != o.ignore_index
    at = labels.masked_fill(~keep, 0)[:, None]
    lse = z.logsumexp(-1)
    s = o.label_smoothing
    losses = lse - (1 - s) * z.gather(1, at)[:, 0] + o.z_loss * lse.square()
    if s:
        losses -= s * z.mean(-1)
    if grad:
        z.sub_(lse[:, None]).exp_()
        if o.z_loss:
            z.mul_((1 + 2 * o.z_loss * lse)[:, None])
        if s:
            z.sub_(s / z.shape[1])
        z.scatter_add_(1, at, torch.full_like(at, -(1 - s), dtype=z.dtype))
        if torch.compiler.is_compiling() or not z.is_cpu or not keep.all():  # a device would be waited for
            z.masked_fill_(~keep[:, None], 0.0)
        if o.softcap:
            z *= slope
    return losses


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss, with gradients computed in forward; products use (p - onehot) and are scaled afterwards, in fp32."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, valid: int | Tensor,
        average_over: int, options: _Options,
    ) -> Tensor:  # fmt: skip
        sums = _summed(hidden, weight, bias, labels, options, ctx.needs_input_grad[:3])
        ctx.save_for_backward(*sums[1:])
        # if no label counts the loss is 0 / 0, and the gradients are zeros
        ctx.valid, ctx.average_over = valid.clamp(min=1) if isinstance(valid, Tensor) else max(valid, 1), average_over
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        return sums.loss / valid * average_over

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scale = grad / ctx.valid * ctx.average_over
        pairs = zip(ctx.saved_tensors, ctx.dtypes)
        found = (None if x is None else (x.to(scale.dtype) * scale).to(dtype) for x, dtype in pairs)
        return (*found, *[None] * 4)
