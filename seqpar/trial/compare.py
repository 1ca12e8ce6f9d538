"""Whether the rows of one run follow those of another: the tolerance, the verdict, and the first module.

There is one tolerance, `close`. An element may be off by 1e-4 of its size, or of the usual size in its column or row if
that is larger, since products round as their terms do: those of a few thousand terms of 6e-8 each stay below 1e-5 in
tens of layers, and what mixes rows changes them by far more. So a large element, as of masked logits, hides nothing
beside it. Products of few bits, as of quantised layers, are judged by most rows, which may lie `COARSE` apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn

from seqpar.ops.core.compared import gap
from seqpar.trial.protect import Buffers
from seqpar.trial.record import ATTENDS, RESULT, Event, RunRecord
from seqpar.trial.rows import Sample, real

FINE, COARSE = 1e-4, 0.04
SOME = 64  # rows or columns, enough to tell the usual size
LEAST = 1e-3  # the size of smaller elements


class Verdict(NamedTuple):
    """The result of the runs.

    reason: why the model is refused, or "". error: why that is unknown, or "". saw: whether any rows were changed.
    blind: whether a rank has several rows, and no argument contains them.
    """

    reason: str = ""
    error: str = ""
    saw: bool = True
    blind: bool = False


def compare(
    first: RunRecord, second: RunRecord, *, error: Exception | None = None, coarse: bool, how: str, fault: str
) -> str:  # fmt: skip
    """Why the rows of a run do not follow those of the first, or "".

    error: the second run's exception. coarse: whether products round to few bits. how: a description of the second
    run. fault: the words for tensors that do not follow.
    """
    coarse = coarse or first.narrow  # a tensor cast back to single precision too
    judged = list(zip(first.judged(), second.judged()))
    as_often = error is None and len(first.judged()) == len(second.judged())
    if as_often and all(_follows(a, b, coarse) for a, b in judged):
        return ""
    last, got_rows = first.events[-1], dict[str, bool]()
    for a, b in _pairs(first.events, second.events):
        if a.kind == "gets":
            got_rows[a.name] = a.has_rows
        decides = a is last or a.decides or (a.kind == "returns" and got_rows.get(a.name, False))
        if not _follows(a, b, coarse, whole=decides):
            break
    else:
        why = (
            f"it fails: {type(error).__name__}: {error}" if error else "it calls attention a different number of times"
        )
        return f"in a trial {how}, {why}"
    remedy = ""
    if a.kind == "gets" and len(a.samples) == len(b.samples) > 0 and all(map(_stays, a.samples, b.samples)):
        remedy = "; pass positions as an argument, plan.rope_positions(rank)"
    if a is last and a.by == RESULT and a.samples and not a.has_rows:
        remedy = "; return rows, and pool them outside the model, as by seqpar.train.token_mean"
    return f"in a trial {how}, {_tensor_of(a)} {fault}{remedy}"


def _tensor_of(event: Event) -> str:
    """The words for the tensors of an event."""
    if event.kind == "gets":
        return f"the input that {event.by} passes to {event.name}"
    return f"the output of {event.name}" if event.kind == "returns" else f"the input of attention in {event.name}"


def close(a: Tensor, b: Tensor, coarse: bool = False) -> bool:
    """Whether results are equal up to rounding, by rows, which are indexed by all dims but the last one.

    coarse: whether products round to few bits, as results of 16 bits always do.
    """
    if a.shape != b.shape or not a.numel():
        return a.shape == b.shape
    coarse = coarse or (a.is_floating_point() and a.dtype.itemsize < 4)
    fine = FINE if a.is_floating_point() or a.is_complex() else 0.0
    one, other = (real(x.detach()).reshape(-1, real(x).shape[-1] if x.dim() else 1).double() for x in (a, b))
    apart = gap(one, other)
    if not bool(apart.any()):
        return True
    varies = (one != one[:1]).any(0) | (other != other[:1]).any(0)
    apart = apart / _sizes(one, varies)
    if not coarse:
        return bool((apart <= fine).all())
    apart = apart[:, varies] if bool(varies.any()) else apart
    # one row may go to another expert
    return float(apart.clamp(max=1.0).square().mean(1).sqrt().median()) <= COARSE


def unlike(one: Buffers, other: Buffers) -> set[tuple[nn.Module, str]]:
    """The buffers that differ after two runs."""
    both = one.keys() & other.keys()
    return (one.keys() ^ other.keys()) | {at for at in both if not close(one[at].flatten(), other[at].flatten())}


def _sizes(x: Tensor, varies: Tensor) -> Tensor:
    """The size of each element [rows, columns], or the median of its column or its row, whichever is largest.

    varies: columns that have other elements than constants.
    """
    size = x.abs().masked_fill(~x.isfinite(), 0.0)
    among = size[:, varies] if bool(varies.any()) else size
    column = size[:: -(-len(size) // SOME)].median(0).values
    row = among[:, :: -(-among.shape[1] // SOME)].median(1, keepdim=True).values
    return size.maximum(column).maximum(row).clamp(min=LEAST)


def _pairs(first: list[Event], second: list[Event]) -> Iterator[tuple[Event, Event]]:
    """Matching events of both runs, call by call; a module without rows, such as an idle expert, may be missing."""
    waiting: dict[tuple[str, str], list[Event]] = {}
    for event in reversed(second):
        waiting.setdefault(event[:2], []).append(event)
    for event in first:
        if waiting.get(event[:2]):
            yield event, waiting[event[:2]].pop()


def _follows(a: Event, b: Event, coarse: bool, *, whole: bool = True) -> bool:
    """Whether the tensors of an event of the second run are those of the rows in it.

    whole: whether tensors without rows matter, which must be the same. Queries always have rows.
    """
    if len(a.samples) != len(b.samples):
        return False
    pairs = [(x, y) for x, y in zip(a.samples, b.samples) if whole or x.rows]
    if a.kind == ATTENDS and not _dims(*pairs[0]):
        return False
    return all(_same(x, y, coarse) for x, y in pairs)


def _same(x: Sample, y: Sample, coarse: bool) -> bool:
    """Whether a tensor of the second run has its rows of the first run's, or if it has none, is the same."""
    if dims := _dims(x, y):
        return any(close(x.rows[at][1][y.rows[at][0]], y.rows[at][1], coarse) for at in dims)
    return x.shape == y.shape and close(x.whole, y.whole, coarse)


def _dims(x: Sample, y: Sample) -> list[tuple[int, int]]:
    """The dims that may index the rows of both runs, each with the number of samples."""
    dims = x.rows.keys() & y.rows.keys()
    return [(d, n) for d, n in dims if all(a == b for e, (a, b) in enumerate(zip(x.shape, y.shape)) if e != d)]


def _stays(x: Sample, y: Sample) -> bool:
    """Whether the first rows of the second run are those of the first run, whatever rows it has."""
    return any(close(x.first[at][: len(y.first[at])], y.first[at]) for at in x.first.keys() & y.first.keys())
