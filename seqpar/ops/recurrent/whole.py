"""All runs of a rank at once: what they do to a state, exchanges that make of it the states that enter, and results.

::

    rank 0   prepare   leave ──►        compute        leave: what the rank's runs do to a state
    rank 1   prepare   leave ──► pass   compute        pass: by `gather` or in a `chain`
    rank 2   prepare         ──► pass   compute

Backward computes the forward's local parts again, from the inputs and from what forward kept: the states that entered
runs, and what the kernel keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from seqpar.comm import Tag
from seqpar.kernels import acc_dtype
from seqpar.ops.recurrent.call import LinearCall
from seqpar.ops.recurrent.pipeline import StatePipeline
from seqpar.ops.recurrent.recompute import recording


def forward(call: LinearCall, inputs: Sequence[Any], tag: Tag) -> tuple[Tensor, Tensor, list[Tensor]]:
    """out, the states that documents end with, and what backward needs in addition to the inputs. A collective."""
    assert not isinstance(call.passing, StatePipeline)
    (begin, *passes), prepared = _before(call, inputs)
    passed = [] if call.passing is None else call.passing.forward(*passes, call.comm, tag)
    entering, kept = begin + passed[0] if passed else begin, []
    if call.recorded:
        *results, kept = call.kernel.keep(prepared, entering)
    else:
        results = call.kernel.compute(prepared, entering)
    return *_of_rank(call, inputs[2], *results), [*kept, *passed]


def backward(
    call: LinearCall, inputs: Sequence[Any], kept: Sequence[Tensor], dout: Tensor | None, dstates: Tensor | None,
    needs: Sequence[bool], tag: Tag,
) -> list[Tensor | None]:  # fmt: skip
    """The gradients of the inputs; None for zero. A collective."""
    assert not isinstance(call.passing, StatePipeline)
    with recording():
        leaves = [None if x is None else x.detach().requires_grad_(need) for x, need in zip(inputs, needs, strict=True)]
        local, prepared = _before(call, leaves)
        kept, passed = kept[: call.kernel.keeps], kept[call.kernel.keeps :]
        begin = local[0].detach()
        entering = (begin + passed[0] if passed else begin).requires_grad_()
        results = _of_rank(call, inputs[2], *call.kernel.replay(prepared, entering, kept))
        wanted = [x for x in leaves if x is not None and x.requires_grad]
        # a result of no rows may depend on nothing
        pairs = [(y, g) for y, g in zip(results, (dout, dstates), strict=True) if g is not None and y.requires_grad]
        ys, gs = (list(column) for column in zip(*pairs, strict=True)) if pairs else ([], [])
        first = torch.autograd.grad(ys, [*wanted, entering], gs, allow_unused=True, retain_graph=True) if ys else ()
        *found, dentered = first or [None] * (len(wanted) + 1)
        dlocal = [torch.zeros_like(entering) if dentered is None else dentered]
        if call.passing is not None:
            passes = [x.detach() for x in local[1:]]
            dlocal += call.passing.backward(*passes, passed, dlocal[0], call.comm, tag)
        ends = [(x, g) for x, g in zip(local, dlocal, strict=True) if x.requires_grad]
        if ends and wanted:
            ys, gs = (list(column) for column in zip(*ends, strict=True))
            second = torch.autograd.grad(ys, wanted, gs, allow_unused=True)
            found = [b if a is None else a if b is None else a + b for a, b in zip(found, second)]
    results_of = iter(found)
    return [next(results_of) if x is not None and x.requires_grad else None for x in leaves]


def _before(call: LinearCall, inputs: Sequence[Tensor | None]) -> tuple[list[Tensor], Any]:
    """Begin, states and maps of all runs; and what the kernel has prepared."""
    q, k, v, decay, beta, rates, initial = inputs
    assert q is not None and v is not None
    side, dtype = call.side, acc_dtype(v.dtype)
    order, opens, documents, _, exported = side.on(v.device)
    rows = [x if x is None or order is None else x[order] for x in (q, k, v, decay, beta)]
    prepared = call.kernel.prepare(call.recurrence(rows, rates), side.tables(call.kernel, v.device))
    begin = v.new_zeros(side.counts.size, v.shape[1], q.shape[2], v.shape[2], dtype=dtype)
    if initial is not None:
        begin = begin.index_copy(0, opens, initial[documents].to(dtype))
    if call.passing is None:
        return [begin], prepared
    left, mapped = call.kernel.leave(prepared, begin[exported])
    runs = side.counts.size
    states = left.new_zeros(runs, *left.shape[1:]).index_copy(0, exported, left)
    maps = mapped.new_zeros(runs, *mapped.shape[1:]).index_copy(0, exported, mapped)
    return [begin, states, maps], prepared


def _of_rank(call: LinearCall, like: Tensor, rows: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's out, and the states that documents end with, from the kernel's results. like: v."""
    order, _, _, closes, _ = call.side.on(like.device)
    out = rows.to(like.dtype)
    return out if order is None else like.new_zeros(like.shape).index_copy(0, order, out), left[closes]
