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

from seqpar.facts.value import is_integer
from seqpar.kernels import acc_dtype
from seqpar.ops.core.collective_op import refuse_double_backward
from seqpar.train.checks import check_average
from seqpar.train.head import (
    Head,
    blocks,
    capped,
    check_count,
    check_head,
    check_labels,
    check_rows,
    finish,
    refuse_learned,
)


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

    Raises: ValueError for wrong shapes, dtypes or numbers, and on the CPU for labels outside the vocabulary and a
    `valid` below the number of this rank's own labels; TypeError for an argument that is not a tensor.
    """
    check_rows(logits, labels, "logits")
    check_average("cross_entropy", logits, average_over)
    _check_numbers(valid, label_smoothing, z_loss, average_over)
    check_labels("cross_entropy", labels, logits.shape[1], ignore_index)
    check_count("cross_entropy", labels, valid, ignore_index)
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
    Products have the dtype to which autocast casts hidden; losses, and sums over chunks, are fp32 (fp64 for
    fp64). Forward computes the gradients along with the loss, so nothing is computed twice: between the passes it keeps
    them, [T, E] and [V, E], instead of logits.

    Under FSDP2 or DDP, call it inside the forward of the module that owns the weight: only then the weight is whole
    and its gradient is reduced.

    Raises: ValueError and TypeError as `cross_entropy`; NotImplementedError for a weight that is sharded over ranks.

    Source: Wijmans et al. 2024 (Cut Your Losses); Hsu et al. 2024 (Liger Kernel), also in one pass.
    """
    check_rows(hidden, labels, "hidden")
    check_average("linear_cross_entropy", hidden, average_over)
    _check_numbers(valid, label_smoothing, z_loss, average_over)
    refuse_learned("linear_cross_entropy", valid=valid, label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap)
    check_head("linear_cross_entropy", hidden, weight, bias, softcap, chunk)
    check_labels("linear_cross_entropy", labels, weight.shape[0], ignore_index)
    check_count("linear_cross_entropy", labels, valid, ignore_index)
    options = _Options(ignore_index, label_smoothing, z_loss, softcap, chunk)
    return _LinearCrossEntropy.apply(hidden, weight, bias, labels, valid, average_over, options)


def linear_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, valid: int | Tensor, *, softcap: float = 0.0,
    average_over: int = 1,
) -> Tensor:  # fmt: skip
    """`linear_cross_entropy` of arguments that were checked before."""
    options = _Options(-100, 0.0, 0.0, softcap, 1024)
    return _LinearCrossEntropy.apply(hidden, weight, bias, labels, valid, average_over, options)


class _Options(NamedTuple):
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float
    chunk: int


def _check_numbers(valid: int | Tensor, label_smoothing: float, z_loss: float, average_over: int) -> None:
    if not _is_count(valid):
        raise ValueError(
            f"valid={valid!r}, expected the labels that count over all ranks, an int of at least 0 or a 0-d tensor"
        )
    if not 0.0 <= label_smoothing <= 1.0 or not average_over >= 1:
        raise ValueError(f"label_smoothing={label_smoothing}, average_over={average_over}, expected [0, 1] and >= 1")
    if not -math.inf < z_loss < math.inf:  # torch.compile can trace this form
        raise ValueError(f"z_loss={z_loss}, expected a finite weight")


def _is_count(valid: object) -> bool:
    """Whether it can be a number of labels; on a device only its dtype is checked, since a value would make it wait."""
    if not isinstance(valid, Tensor):
        return is_integer(valid) and bool(valid >= 0)  # type: ignore[operator]
    if valid.dim() or valid.dtype == torch.bool or valid.is_complex():
        return False
    return not valid.is_cpu or torch.compiler.is_compiling() or type(valid) is not Tensor or bool(valid >= 0)


def _block_losses(z: Tensor, labels: Tensor, o: _Options, grad: bool) -> Tensor:
    """The losses of some rows, even of those that do not count; their logits become gradients if grad."""
    slope = capped(z, o.softcap, grad)
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
        finish(z, keep, slope)
    return losses


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss, with gradients computed in forward; products use (p - onehot) and are scaled afterwards, in fp32."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, valid: int | Tensor,
        average_over: int, o: _Options,
    ) -> Tensor:  # fmt: skip
        needs = ctx.needs_input_grad[:3]
        head = Head.of(hidden, weight, bias, o.softcap, o.chunk)
        # in fp64, or a sum of many chunks would lose the digits of each
        total, grads = torch.zeros((), dtype=torch.float64, device=hidden.device), head.gradients(needs)
        with head.alone():
            for rows in head.chunks():
                z = head.logits(rows)
                losses = torch.cat([_block_losses(*some, o, any(needs)) for some in blocks(z, labels[rows])])
                total += losses.masked_fill(labels[rows] == o.ignore_index, 0.0).sum()
                if any(needs):
                    head.add(grads, rows, z)
        ctx.save_for_backward(*grads)
        # if no label counts the loss is 0 / 0, and the gradients are zeros
        counted = valid.masked_fill(valid == 0, 1) if isinstance(valid, Tensor) else max(valid, 1)
        ctx.valid, ctx.average_over = counted, average_over
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        return total.to(head.wide) / valid * average_over

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("linear_cross_entropy")
        scale = grad / ctx.valid * ctx.average_over
        pairs = zip(ctx.saved_tensors, ctx.dtypes)
        found = (None if x is None else (x.to(scale.dtype) * scale).to(dtype) for x, dtype in pairs)
        return (*found, *[None] * 4)
