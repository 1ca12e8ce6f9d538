"""Whether the rows of one run follow those of another: the verdict, and the first module where they do not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from seqpar.integrations.probe.record import Event, RunRecord
from seqpar.integrations.probe.rows import Sample, real
from seqpar.nn.rounding import LOW, ROUGH
from seqpar.nn.saved_state import Buffers
from seqpar.ops.core.compared import gap

CLOSE = {torch.float64: 1e-6, torch.float32: 1e-4}


class Verdict(NamedTuple):
    """The result of the runs.

    reason: why the model is refused, or "". error: why that is unknown, or "". saw: whether any rows were permuted.
    blind: whether a rank has several rows, and the arguments none of them.
    """

    reason: str = ""
    error: str = ""
    saw: bool = True
    blind: bool = False


def compare(
    first: RunRecord, second: RunRecord, *, error: Exception | None = None, rough: bool, how: str, fault: str
) -> Verdict:
    """The verdict on two runs.

    error: the second run's exception. rough: whether products round coarsely. how: a description of the second run.
    fault: the words for tensors that do not follow.
    """
    # a tensor cast back to single precision is rough too
    rough = rough or any(x.dtype in LOW for event in first.events for sample in event.samples for x in sample.values())
    last, fewer, judged = first.events[-1], second.fewer, list(zip(first.judged(), second.judged()))
    as_often = error is None and len(first.judged()) == len(second.judged())
    if as_often and all(_follows(a, b, rough, fewer=fewer) for a, b in judged):
        return Verdict()
    for a, b in _pairs(first.events, second.events):
        if not _follows(a, b, rough, way=None if a is last else first.events, fewer=fewer):
            break
    else:
        why = (
            f"it fails: {type(error).__name__}: {error}" if error else "it calls attention a different number of times"
        )
        return Verdict(f"tried {how}, {why}")
    as_many = len(a.unmoved) == len(b.samples) > 0
    stays = a.kind == "gets" and as_many and all(_all_close(x, y, rough) for x, y in zip(a.unmoved, b.samples))
    remedy = "; let it take positions as an argument, plan.rope_positions(rank)" if stays else ""
    what = f"what {a.by} gives to {a.name}" if a.kind == "gets" else f"what {a.name} {a.kind}"
    return Verdict(f"tried {how}, {what} {fault}{remedy}")


def unlike(one: Buffers, other: Buffers) -> set[tuple[nn.Module, str]]:
    """The buffers that differ after two runs."""
    both = one.keys() & other.keys()
    apart = {at for at in both if not _close(_flat(one[at]), _flat(other[at]), rough=False)}
    return (one.keys() ^ other.keys()) | apart


def _pairs(first: list[Event], second: list[Event]) -> Iterator[tuple[Event, Event]]:
    """Matching events of both runs, call by call; a module without rows, such as an idle expert, may be missing."""
    waiting: dict[tuple[str, str], list[Event]] = {}
    for event in reversed(second):
        waiting.setdefault(event[:2], []).append(event)
    for event in first:
        if waiting.get(event[:2]):
            yield event, waiting[event[:2]].pop()


def _follows(a: Event, b: Event, rough: bool, *, way: list[Event] | None = None, fewer: bool = False) -> bool:
    """Whether the tensors of an event are those of the rows in their places.

    way: the events of the run, if this event does not decide; tensors without rows then matter only if a module that
    got rows returns them. fewer: tensors with rows in one run only count as without, since sizes may agree by accident.
    """
    if len(a.samples) != len(b.samples):
        return False
    pairs = list(zip(a.samples, b.samples))
    # with rough products one row may lie apart, so samples decide
    if not rough and not all(_within(*every) for every in zip(a.samples, a.ranges, b.ranges)):
        return False
    if way is not None and (a.kind != "returns" or _has_rows(a) or not _got_rows(a, way)):
        pairs = [(x, y) for x, y in pairs if -1 not in x]
    if fewer:
        pairs = [both for both in (_left(x, y) for x, y in pairs) if both[0]]
    return all(any(_close(x[dim], y[dim], rough) for dim in x.keys() & y.keys()) for x, y in pairs)


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


def _within(sample: Sample, first: Sample, second: Sample) -> bool:
    """Whether ranges of all places agree."""
    both = first.keys() & second.keys()
    return not both or any(_close(first[dim], second[dim], False, like=sample[dim]) for dim in both)


def _has_rows(event: Event) -> bool:
    return any(-1 not in x for x in event.samples)


def _got_rows(event: Event, way: list[Event]) -> bool:
    """Whether the module that returned this got rows in its last call."""
    earlier = way[: next(i for i, other in enumerate(way) if other is event)]
    calls = [other for other in earlier if other[:2] == ("gets", event.name)]
    return bool(calls) and _has_rows(calls[-1])


def _all_close(x: Sample, y: Sample, rough: bool) -> bool:
    return x.keys() == y.keys() and all(_close(x[dim], y[dim], rough) for dim in x)


def _close(a: Tensor, b: Tensor, rough: bool, like: Tensor | None = None) -> bool:
    """Equal up to rounding, row by row; if products are rough, most rows, since others may go to other experts.

    like: elements as large as those of a and b, by default a.
    """
    if a.shape != b.shape:
        return False
    bound = ROUGH if rough else CLOSE.get(a.dtype, ROUGH if a.is_floating_point() else 0.0)
    a, b = a.double(), b.double()
    apart = gap(a, b)
    like = a if like is None else like.double()
    scale = like.masked_fill(~like.isfinite(), 0.0).abs().max().clamp(min=1e-30)
    worst = apart.amax(1) / scale
    return bool((worst.median() if bound == ROUGH else worst.max()) <= bound)


def _flat(x: Tensor) -> Tensor:
    return real(x).reshape(1, -1)
