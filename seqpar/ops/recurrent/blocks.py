"""A recurrence in a `pipeline`: one block of heads of some runs after another, forward and backward.

Backward computes a block again while the gradients of what its runs left are on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from seqpar.comm import Tag
from seqpar.kernels import acc_dtype
from seqpar.ops.recurrent.call import LinearCall
from seqpar.ops.recurrent.pipeline import Level, StatePipeline
from seqpar.ops.recurrent.recompute import recomputed


def forward(call: LinearCall, inputs: Sequence[Any], tag: Tag) -> tuple[Tensor, Tensor, list[Tensor]]:
    """out, the states that documents end with, and what backward needs in addition to the inputs. A collective."""
    pipeline, (*rows, rates, initial), v = _pipeline(call), inputs, inputs[2]
    at, (_, opens, documents, closes, _) = pipeline.on(v.device), call.side.on(v.device)
    entering, leaving, out = _states(call, inputs, arriving=True), _states(call, inputs), _like(v, call)
    if initial is not None:
        entering[:, opens] = pipeline.blocked(initial[documents].to(entering.dtype))
    kept: dict[tuple[int, int], Sequence[Tensor]] = {}

    def begin(level: Level, block: int) -> Callable[[], None]:
        def finish() -> None:
            runs = at.rows(level.runs)
            mine = _parts(call, rows, level, block)
            ready = _prepared(call, level, *mine, _rates(call, rates, block), entering[block][runs])
            if call.recorded:
                part, left, kept[id(level), block] = call.kernel.keep(*ready)
            else:
                part, left = call.kernel.compute(*ready)
            leaving[block][runs] = left
            _write(call, out, level, block, part, repeats=1)

        return finish

    pipeline.run(pipeline.forth, entering, leaving, begin, call.comm, tag)
    return out, pipeline.whole(leaving[:, closes]), [entering, *(x for key in _keys(call) for x in kept.get(key, ()))]


def backward(
    call: LinearCall, inputs: Sequence[Any], kept: Sequence[Tensor], dout: Tensor | None, dstates: Tensor | None,
    needs: Sequence[bool], tag: Tag,
) -> list[Tensor | None]:  # fmt: skip
    """The gradients of the inputs; None for zero. A collective."""
    pipeline, (*rows, rates, initial), v, (entering, *more) = _pipeline(call), inputs, inputs[2], kept
    count = call.kernel.keeps
    kept_of = {key: more[count * n : count * (n + 1)] for n, key in enumerate(_keys(call))}
    at, (_, opens, documents, closes, _) = pipeline.on(v.device), call.side.on(v.device)
    dleft, dentering = _states(call, inputs, arriving=True), _states(call, inputs)
    if dstates is not None:
        dleft[:, closes] = pipeline.blocked(dstates.to(dleft.dtype))
    dout = torch.zeros_like(v) if dout is None else dout
    # heads that several blocks share get the sum of their gradients, in the dtype of sums
    rows = [x if x is None or x.shape[1] >= pipeline.blocks else x.to(entering.dtype) for x in rows]
    totals = [_like(x, call) if need else None for x, need in zip(rows, needs)]
    drates = torch.zeros_like(rates, dtype=entering.dtype) if needs[5] else None

    def begin(level: Level, block: int) -> Callable[[], None]:
        runs, same = at.rows(level.runs), id(pipeline.forth_of(level))
        *mine, given = _parts(call, [*rows, dout], level, block)
        gradients = recomputed(
            lambda *xs: call.kernel.replay(*_prepared(call, level, *xs), kept_of.get((same, block), ())),
            [*mine, _rates(call, rates, block), entering[block][runs]],
            [*needs[:6], True],
        )

        def finish() -> None:
            *found, of_rates, dentered = gradients([given, dleft[block][runs]])
            dentering[block][runs] = dentered
            if drates is not None:
                drates[_heads(call, len(drates), block, 1)] += of_rates
            for total, part in zip(totals, found, strict=True):
                if total is not None:
                    _write(call, total, level, block, part, repeats=v.shape[1] // total.shape[1])

        return finish

    pipeline.run(pipeline.back, dleft, dentering, begin, call.comm, tag)
    totals = [total if total is None else total.to(x.dtype) for total, x in zip([*totals, drates], inputs)]
    if initial is None or not needs[6]:
        return [*totals, None]
    dinitial = torch.zeros_like(initial)
    dinitial[documents] = pipeline.whole(dentering[:, opens]).to(initial.dtype)
    return [*totals, dinitial]


def _pipeline(call: LinearCall) -> StatePipeline:
    assert isinstance(call.passing, StatePipeline)
    return call.passing


def _keys(call: LinearCall) -> list[tuple[int, int]]:
    """The levels and blocks of forward, in the order of what it keeps."""
    pipeline = _pipeline(call)
    return [(id(level), block) for level in pipeline.forth.values() for block in range(pipeline.blocks)]


def _states(call: LinearCall, inputs: Sequence[Any], *, arriving: bool = False) -> Tensor:
    """Zeros [blocks, runs, H / blocks, K, V]. arriving: in memory that peers can write."""
    q, _, v, *_ = inputs
    blocks, dtype = _pipeline(call).blocks, acc_dtype(v.dtype)
    shape = blocks, call.side.counts.size, v.shape[1] // blocks, q.shape[2], v.shape[2]
    return call.comm.empty(shape, dtype, v.device, kept=True).zero_() if arriving else v.new_zeros(shape, dtype=dtype)


def _like(x: Tensor, call: LinearCall) -> Tensor:
    """Memory for the rows of all runs, with zeros in pad rows."""
    return torch.empty_like(x) if call.side.order is None else torch.zeros_like(x)


def _heads(call: LinearCall, heads: int, block: int, repeats: int) -> slice:
    """The heads that a block reads of a tensor with so many; `repeats` heads of v read each of them."""
    size = heads * repeats // _pipeline(call).blocks
    first = block * size // repeats
    return slice(first, first + max(size // repeats, 1))


def _parts(call: LinearCall, tensors: Sequence[Any], level: Level, block: int) -> list[Any]:
    """A level's rows and a block's heads of q, k, v and others."""
    rows, most = _pipeline(call).on(tensors[0].device).rows(level.rows), tensors[2].shape[1]
    return [None if x is None else x[:, _heads(call, x.shape[1], block, most // x.shape[1])][rows] for x in tensors]


def _rates(call: LinearCall, rates: Tensor | None, block: int) -> Tensor | None:
    """Those of a block's heads."""
    return None if rates is None else rates[_heads(call, len(rates), block, 1)]


def _prepared(call: LinearCall, level: Level, *tensors: Tensor | None) -> tuple[Any, Tensor]:
    """What the kernel computes a level's rows from. tensors: rows, rates, and the states that enter."""
    *rows, rates, entering = tensors
    assert entering is not None
    tables = _pipeline(call).tables(level, call.kernel, entering.device)
    return call.kernel.prepare(call.recurrence(rows, rates), tables), entering


def _write(call: LinearCall, total: Tensor, level: Level, block: int, part: Tensor, *, repeats: int) -> None:
    """Write a level's rows and a block's heads; of heads that several blocks share, the first writes and others add."""
    rows, pipeline = _pipeline(call).on(total.device).rows(level.rows), _pipeline(call)
    mine = total[:, _heads(call, total.shape[1], block, repeats)]
    if block * total.shape[1] * repeats // pipeline.blocks % repeats == 0:
        mine[rows] = part.to(total.dtype)
    else:
        mine[rows] += part.to(total.dtype)
