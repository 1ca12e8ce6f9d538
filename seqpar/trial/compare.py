"""Whether the rows of one run follow those of another: the verdict, and the first module where they do not.

There is one tolerance, `close`. An element of single precision may be off by 1e-4 of its unit (`sizes`): products of a
few thousand terms of 6e-8 each stay below 1e-5 in tens of layers, and what mixes rows changes them by far more. Rough
products, as of 16 bits, are judged by most rows, since rounding may send some to other experts: the root of the mean
square over a row may be `ROUNDINGS` times the distance of 1 from the next number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from seqpar.ops.core.compared import gap
from seqpar.trial.protect import Buffers
from seqpar.trial.record import RESULT, Event, RunRecord
from seqpar.trial.rounding import COARSE, LOW
from seqpar.trial.rows import Ranges, Sample, real
from seqpar.trial.sizes import units

CLOSE = {torch.float64: 1e-6, torch.float32: 1e-4}  # of the largest element
# Rough products: how far rows may lie apart, in roundings. In tens of layers these add up to 1, seldom to 2, and then
# they tell copies of one row apart in one run too. A sum over all rows does not.
ROUNDINGS = 2.25


class Verdict(NamedTuple):
    """The result of the runs.

    reason: why the model is refused, or "". error: why that is unknown, or "". saw: whether any rows were permuted.
    blind: whether a rank has several rows, and no argument contains them.
    """

    reason: str = ""
    error: str = ""
    saw: bool = True
    blind: bool = False


def compare(
    first: RunRecord, second: RunRecord, *, error: Exception | None = None, rough: float, how: str, fault: str
) -> Verdict:
    """The verdict on two runs.

    error: the second run's exception. rough: the coarseness of products (`seqpar.trial.rounding`). how: a description
    of the second run. fault: the words for tensors that do not follow.
    """
    # a tensor cast back to single precision is rough too
    dtypes = {x.dtype for event in first.events for sample in event.samples for x in sample.values()}
    rough = max(rough, COARSE) if dtypes & LOW else rough
    last, fewer, judged = first.events[-1], second.fewer, list(zip(first.judged(), second.judged()))
    moved = second.second and not fewer
    as_often = error is None and len(first.judged()) == len(second.judged())
    if as_often and all(_follows(a, b, rough, fewer=fewer, moved=moved) for a, b in judged):
        return Verdict()
    for a, b in _pairs(first.events, second.events):
        if not _follows(a, b, rough, way=None if a is last else first.events, fewer=fewer, moved=moved):
            break
    else:
        why = (
            f"it fails: {type(error).__name__}: {error}" if error else "it calls attention a different number of times"
        )
        return Verdict(f"in a trial {how}, {why}")
    as_many = len(a.unmoved) == len(b.samples) > 0
    stays = a.kind == "gets" and as_many and all(_all_close(x, y, rough) for x, y in zip(a.unmoved, b.samples))
    remedy = "; pass positions as an argument, plan.rope_positions(rank)" if stays else ""
    if a is last and a.by == RESULT and a.samples and not _has_rows(a):
        remedy = "; return rows, and pool them outside the model, as by seqpar.train.token_mean"
    return Verdict(f"in a trial {how}, {_tensor_of(a)} {fault}{remedy}")


def _tensor_of(event: Event) -> str:
    """The words for the tensors of an event."""
    if event.kind == "gets":
        return f"the input that {event.by} passes to {event.name}"
    return f"the output of {event.name}" if event.kind == "returns" else f"the input of attention in {event.name}"


def close(a: Tensor, b: Tensor, rough: float = 0.0) -> bool:
    """Whether results are equal up to rounding, by rows, which are indexed by all dims but the last one.

    rough: how coarsely products round, from 1 to the next number, if more so than single precision.
    """
    if a.shape != b.shape or not a.numel():
        return a.shape == b.shape
    one, other = (real(x.detach()).reshape(-1, real(x).shape[-1] if x.dim() else 1) for x in (a, b))
    return _close(one, other, rough)


def unlike(one: Buffers, other: Buffers) -> set[tuple[nn.Module, str]]:
    """The buffers that differ after two runs."""
    both = one.keys() & other.keys()
    apart = {at for at in both if not _close(_flat(one[at]), _flat(other[at]), rough=0.0)}
    return (one.keys() ^ other.keys()) | apart


def _pairs(first: list[Event], second: list[Event]) -> Iterator[tuple[Event, Event]]:
    """Matching events of both runs, call by call; a module without rows, such as an idle expert, may be missing."""
    waiting: dict[tuple[str, str], list[Event]] = {}
    for event in reversed(second):
        waiting.setdefault(event[:2], []).append(event)
    for event in first:
        if waiting.get(event[:2]):
            yield event, waiting[event[:2]].pop()


def _follows(
    a: Event, b: Event, rough: float, *, way: list[Event] | None = None, fewer: bool, moved: bool
) -> bool:  # fmt: skip
    """Whether the tensors of an event are those of the rows in their places.

    way: the events of the run, if this event does not decide; tensors without rows then matter only if a module that
    got rows returns them. fewer: tensors with rows in one run only count as without, since sizes may agree by accident.
    moved: as in `_close`.
    """
    if len(a.samples) != len(b.samples):
        return False
    pairs = list(zip(a.samples, b.samples))
    # with rough products one row may lie apart, so samples decide
    if not rough and not all(map(_within, a.ranges, b.ranges)):
        return False
    if way is not None and (a.kind != "returns" or _has_rows(a) or not _got_rows(a, way)):
        pairs = [(x, y) for x, y in pairs if -1 not in x]
    if fewer:
        pairs = [both for both in (_left(x, y) for x, y in pairs) if both[0]]
    return all(any(_close(x[dim], y[dim], rough, moved=moved) for dim in x.keys() & y.keys()) for x, y in pairs)


def _left(first: Sample, fewer: Sample) -> tuple[Sample, Sample]:
    """The rows of both samples that a run with fewer rows has; samples of other sizes as they are."""
    one, other = dict[int, Tensor](), dict[int, Tensor]()
    for dim in first.keys() & fewer.keys():
        a, b = first[dim], fewer[dim]
        at = ~b.isnan().all(1)
        if len(a) != len(b):
            one[dim], other[dim] = a, b
        elif bool(at.any()):
            one[dim], other[dim] = a[at], b[at]
    return one, other


def _within(first: Ranges, second: Ranges) -> bool:
    """Whether ranges of all places agree."""
    both = [(first[dim].sums, second[dim].sums) for dim in first.keys() & second.keys()]
    return not both or any(_close(a, b) for a, b in both)


def _has_rows(event: Event) -> bool:
    return any(-1 not in x for x in event.samples)


def _got_rows(event: Event, way: list[Event]) -> bool:
    """Whether the module that returned this got rows in its last call."""
    earlier = way[: next(i for i, other in enumerate(way) if other is event)]
    calls = [other for other in earlier if other[:2] == ("gets", event.name)]
    return bool(calls) and _has_rows(calls[-1])


def _all_close(x: Sample, y: Sample, rough: float) -> bool:
    return x.keys() == y.keys() and all(_close(x[dim], y[dim], rough) for dim in x)


def _close(a: Tensor, b: Tensor, rough: float = 0.0, *, moved: bool = False) -> bool:
    """Equal up to rounding, row by row; if products are rough, most rows, since others may go to other experts.

    moved: whether equal rows of a, which are copies of one row, were computed in several places for b.
    """
    if a.shape != b.shape:
        return False
    if a.is_floating_point() and a.dtype not in CLOSE:
        rough = max(rough, COARSE)
    bound = CLOSE.get(a.dtype, 0.0)
    a, b = a.double(), b.double()
    if not bool(gap(a, b).any()):
        return True
    varies = (a != a[:1]).any(0) | (b != b[:1]).any(0)
    unit = units(a, varies)
    if not rough:
        return bool((gap(a, b) <= bound * unit).all())
    apart = _distance(a, b, unit, varies) / rough
    if apart > ROUNDINGS or not moved:
        return apart <= ROUNDINGS
    one, other = _copies(a)
    return not len(one) or apart <= max(1.0, 4 * _distance(b[one], b[other], unit[one], varies) / rough)


def _distance(a: Tensor, b: Tensor, unit: Tensor, varies: Tensor) -> float:
    """How far most rows lie apart: the root of the mean square over the columns that are not the same in all rows."""
    apart = (gap(a, b) / unit).clamp(max=1.0)
    apart = apart[:, varies] if bool(varies.any()) else apart
    return float(apart.square().mean(1).sqrt().median())


def _copies(x: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of rows that are equal, in pairs."""
    _, group = x.unique(dim=0, return_inverse=True)
    order = group.argsort(stable=True)
    pairs = group[order[1:]] == group[order[:-1]]
    return order[:-1][pairs], order[1:][pairs]


def _flat(x: Tensor) -> Tensor:
    return real(x).reshape(1, -1)
