"""Log-probabilities and entropies of a rank's rows, from hidden states and the weight of the head, without [T, V].

    z logits of a row, after softcap and temperature   t its label   p = softmax(z)   H its entropy

    log p_t = z_t - lse(z)                    d log p_t / dz = onehot(t) - p
    H       = - sum(p log p)                  d H / dz       = - p (log p + H)

Gradients of rows come only in backward, each with a factor of its own. Those of hidden states are linear in it, so with
a frozen weight forward computes them along with the results, and backward multiplies. A weight that trains needs the
factors inside its sum over rows, so backward computes the logits once more, from the saved lse.

    products of [T, E] x [E, V] and the like     this op   `linear_cross_entropy`
    forward alone                                1         1
    both passes, frozen weight                   2         2
    both passes, weight that trains              4         3
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from seqpar.ops.core.collective_op import refuse_double_backward
from seqpar.train.head import (
    Head,
    blocks,
    capped,
    check_head,
    check_labels,
    check_rows,
    finish,
    is_number,
    refuse_learned,
)


@overload
def token_log_probs(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, temperature: float = 1.0,
    entropy: Literal[False] = False, softcap: float = 0.0, ignore_index: int = -100, chunk: int = 1024,
) -> Tensor: ...  # fmt: skip
@overload
def token_log_probs(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, temperature: float = 1.0,
    entropy: Literal[True], softcap: float = 0.0, ignore_index: int = -100, chunk: int = 1024,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    softcap: float = 0.0,
    ignore_index: int = -100,
    chunk: int = 1024,
) -> Tensor | tuple[Tensor, Tensor]:
    """The log-probability of each row's label, [T]; with `entropy` also the entropy of each row's distribution, [T].

    hidden [T, E], weight [V, E], bias [V], labels [T] int64, already at the row that predicts them. The logits
    ``hidden @ weight.T + bias`` are capped as ``softcap * tanh(logits / softcap)``, then divided by `temperature`, and
    exist for `chunk` rows at a time. A bias of -inf rules a token out. Rows labelled `ignore_index` give 0 and have no
    gradient. Products have the dtype to which autocast casts hidden; results and sums are fp32 (fp64 for fp64).

    Differentiable in hidden, weight and bias; a weight that needs no gradient costs none. `seqpar.data.back`
    returns results of a `seqpar.data.share` to the rank that supplied the batch.

    Under FSDP2 or DDP, call it as `linear_cross_entropy`, inside the forward of the module that owns the weight.

    Raises: ValueError for wrong shapes, dtypes or numbers, and on the CPU for labels outside the vocabulary; TypeError
    for an argument that is not a tensor; NotImplementedError for a weight that is sharded over ranks.
    """
    check_rows(hidden, labels, "hidden")
    check_head("token_log_probs", hidden, weight, bias, softcap, chunk)
    check_labels("token_log_probs", labels, weight.shape[0], ignore_index)
    refuse_learned("token_log_probs", temperature=temperature, softcap=softcap)
    if not is_number(temperature) or not 0.0 < temperature < math.inf:
        raise ValueError(f"token_log_probs: temperature={temperature}, expected a finite number above 0")
    options = _Settings(temperature, bool(entropy), softcap, ignore_index, chunk, bias is not None)
    return _TokenLogProbs.apply(hidden, weight, bias, labels, options)  # type: ignore[no-any-return]


class _Settings(NamedTuple):
    temperature: float
    entropy: bool
    softcap: float
    ignore_index: int
    chunk: int
    biased: bool  # logits may be -inf


class _TokenLogProbs(torch.autograd.Function):
    """Results of rows; their factors in backward multiply rows of hidden states rather than rows of logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, o: _Settings
    ) -> Tensor | tuple[Tensor, Tensor]:
        needs = ctx.needs_input_grad[:3]
        frozen = needs[0] and not any(needs[1:])
        head = Head.of(hidden, weight, bias, o.softcap, o.chunk)
        grads = head.gradients((frozen, False, False))
        found = log_probs, entropies, lse = [hidden.new_zeros(len(hidden), dtype=head.wide) for _ in range(3)]
        with head.alone():
            for rows in head.chunks():
                z = head.logits(rows)
                for some, kept, *to in blocks(z, labels[rows], *(x[rows] for x in found)):
                    _results(some, kept, to, o, frozen)
                if frozen:
                    head.add(grads, rows, z)
        ctx.set_materialize_grads(False)
        ctx.options, ctx.needs, ctx.dtype = o, needs, head.hidden.dtype
        again = (hidden, weight, bias, lse, entropies) if o.entropy or not frozen else (None,) * 5
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        ctx.save_for_backward(grads.hidden, labels, *again)
        return (log_probs, entropies) if o.entropy else log_probs

    @staticmethod
    def backward(ctx: Any, d_log_probs: Tensor | None, d_entropies: Tensor | None = None) -> tuple[Tensor | None, ...]:
        refuse_double_backward("token_log_probs")
        if d_log_probs is None and d_entropies is None:
            return (None,) * 5
        o, (d_hidden, labels, *again) = ctx.options, ctx.saved_tensors
        # results of these rows are constants, whose gradients may have any size
        ignored = labels == o.ignore_index
        d_log_probs, d_entropies = (
            None if x is None else x.masked_fill(ignored, 0.0) for x in (d_log_probs, d_entropies)
        )
        if d_hidden is not None and d_entropies is None:
            assert d_log_probs is not None
            d_hidden = d_hidden.to(d_log_probs.dtype) * (d_log_probs / o.temperature)[:, None]
            return (d_hidden.to(ctx.dtypes[0]), *[None] * 4)
        hidden, weight, bias, lse, entropies = again
        head = Head.of(hidden, weight, bias, o.softcap, o.chunk, ctx.dtype)
        grads = head.gradients(ctx.needs)
        scale, largest, factors = _factors(d_log_probs, d_entropies, lse)
        columns = torch.stack([lse, entropies, *factors], 1)
        with head.alone():
            for rows in head.chunks():
                z = head.logits(rows)
                for some, kept, facts in blocks(z, labels[rows], columns[rows]):
                    _slopes(some, kept, facts, o)
                head.add(grads, rows, z, scale[rows])
        by_rows = scale[:, None] * largest / o.temperature
        sizes = (by_rows, largest / o.temperature, largest / o.temperature)
        pairs = zip(grads, sizes, ctx.dtypes)
        return (*(None if x is None else (x.to(lse.dtype) * size).to(dtype) for x, size, dtype in pairs), None, None)


def _factors(
    d_log_probs: Tensor | None, d_entropies: Tensor | None, like: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The size of each row's gradient, at most 1, the largest size, and the parts in it of one or both results.

    So half precision's products neither overflow nor underflow by the sizes of the factors.
    """
    given = [x for x in (d_log_probs, d_entropies) if x is not None]
    size = torch.stack(given).abs().amax(0) if len(like) else like
    largest = size.max() if len(like) else like.new_ones(())
    largest = largest.masked_fill(largest == 0, 1.0)
    if d_entropies is None:  # the sign stays with the size
        assert d_log_probs is not None
        return d_log_probs / largest, largest, []
    per_row = size.masked_fill(size == 0, 1.0)
    parts = [torch.zeros_like(like) if x is None else x / per_row for x in (d_log_probs, d_entropies)]
    return size / largest, largest, parts


def _results(z: Tensor, labels: Tensor, to: list[Tensor], o: _Settings, grad: bool) -> None:
    """Write some rows' log-probabilities, entropies and lse to `to`; logits become d log_probs / d logits if grad."""
    log_probs, entropies, lse = to
    slope = capped(z, o.softcap, grad)
    if o.temperature != 1.0:
        z.div_(o.temperature)
    keep = labels != o.ignore_index
    at = labels.masked_fill(~keep, 0)[:, None]
    torch.logsumexp(z, -1, out=lse)
    log_probs.copy_((z.gather(1, at)[:, 0] - lse).masked_fill(~keep, 0.0))
    if o.entropy or grad:
        z.sub_(lse[:, None])
    if o.entropy:
        _keep_finite(z, o)
        entropies.copy_(torch.linalg.vecdot(z.exp(), z).neg_().masked_fill_(~keep, 0.0))  # 0, not -0
    if grad:
        z.exp_().neg_().scatter_add_(1, at, torch.ones_like(at, dtype=z.dtype))
        finish(z, keep, slope)


def _slopes(z: Tensor, labels: Tensor, facts: Tensor, o: _Settings) -> None:
    """Make some rows' logits the gradient by them of what `_factors` has of the results.

    facts [rows, 2 or 4]: lse and entropies, and the parts of both results if entropies have a gradient.
    """
    lse, entropies, *parts = facts.unbind(1)
    slope = capped(z, o.softcap, True)
    if o.temperature != 1.0:
        z.div_(o.temperature)
    keep = labels != o.ignore_index
    at = labels.masked_fill(~keep, 0)[:, None]
    z.sub_(lse[:, None])
    if parts:
        _keep_finite(z, o)
        of_log_probs, of_entropies = (part[:, None] for part in parts)
        weights = (z + entropies[:, None]).mul_(of_entropies).add_(of_log_probs)
        z.exp_().mul_(weights).neg_().scatter_add_(1, at, of_log_probs.to(z.dtype))
    else:
        z.exp_().neg_().scatter_add_(1, at, torch.ones_like(at, dtype=z.dtype))
    finish(z, keep, slope)


def _keep_finite(z: Tensor, o: _Settings) -> None:
    """Make the log-probability of a token that the bias rules out finite, in place, as 0 times -inf is NaN."""
    if o.biased:
        z.clamp_(min=torch.finfo(z.dtype).min)
