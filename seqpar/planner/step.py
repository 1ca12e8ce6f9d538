"""`plan_step`: a global batch as a few micro-batches of about equal time, each planned over all ranks.

Every rank computes every micro-batch, so their number is the same everywhere and FSDP's collectives stay in step. The
choice is which documents go together: long with short, so that each micro-batch can be balanced over the ranks. The
most expensive document goes first, to the least loaded micro-batch with room for it (Graham 1969, Bounds on
multiprocessing timing anomalies). Then the longest and the shortest micro-batch trade documents while that brings them
closer. All decisions use integers; ties go by index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from seqpar.facts.intervals import summed
from seqpar.facts.mask import Mask
from seqpar.facts.value import Ints, frozen, integer
from seqpar.plan import Plan
from seqpar.plan.plan import check_positions
from seqpar.planner.batch import plan_of
from seqpar.planner.bound import document_ticks, weights_for
from seqpar.planner.groups import least_loaded
from seqpar.planner.hardware import Hardware
from seqpar.planner.problem import Problem, lengths_in
from seqpar.planner.shape import ModelShape
from seqpar.planner.training import Training

MOST = (1 << 31) - 1  # more than kernels can number


class MicroBatch(NamedTuple):
    """A part of a global batch.

    documents: indices of its documents of at least one token, ascending, int64. plan: of these documents, packed in
    this order.
    """

    documents: Ints
    plan: Plan


def plan_step(
    lengths: ArrayLike | Mask,
    ranks: int,
    *,
    masks: Mask | Sequence[Mask] | None = None,
    model: str | ModelShape = "llama-8b",
    hardware: str | Hardware = "h100",
    node: int | None = None,
    token_slack: float = 0.0,
    max_tokens_per_rank: int | None = None,
    lockstep: bool = True,
    micro_batches: int | None = None,
    training: Training | None = None,
) -> list[MicroBatch]:
    """The micro-batches of a global batch: each document in one of them, as few as memory allows, about equal in time.

    lengths: tokens of each document of the global batch, or its mask. masks: over all of them. micro_batches: their
    number, by default the fewest. The other arguments are those of `plan_batch`. A model given by name recomputes
    as little as the longest document allows, or the number of micro-batches if that is given.

    ``sum(m.plan.forecast.seconds for m in plan_step(...))`` is the predicted time of the step. Weight the loss of a
    micro-batch by its number of labels, not equally: micro-batches differ in tokens.

    Raises: ValueError for a document that fits no micro-batch, naming the longest that would fit and the fewest ranks
    that would suffice; for fewer micro-batches than memory allows, or more than documents; and as ``plan_batch``.
    """
    tokens = lengths_in(lengths)
    needed = int(tokens.max())
    check_positions(needed)
    if micro_batches is not None:
        needed = max(needed, -(-int(tokens.sum()) // integer("micro_batches", micro_batches, 1)))
    of = partial(
        Problem.of, lengths, ranks, masks=masks, model=model, hardware=hardware, node=node, token_slack=token_slack,
        max_tokens_per_rank=max_tokens_per_rank, lockstep=lockstep, at_once=needed,
    )  # fmt: skip
    problem = of(training=training)
    several = (micro_batches or 1) > 1 or int(tokens.sum()) > problem.ranks * problem.most
    if training is not None and several:
        problem = of(training=replace(training, accumulates=True))
    capacity = min(problem.ranks * _most(problem), MOST)
    w = weights_for(problem.layers, problem.model, problem.hardware)
    ticks = document_ticks(problem.layers, w)
    parts = split(tokens, ticks, w.per_row, capacity=capacity, count=micro_batches)
    given = np.arange(tokens.size) if isinstance(lengths, Mask) else np.flatnonzero(np.asarray(lengths))
    return [MicroBatch(frozen(given[part]), plan_of(problem.pick(part))) for part in parts]


def _most(problem: Problem) -> int:
    """The most rows of a rank in a micro-batch. Raises ValueError if the longest document needs more."""
    most, ranks = problem.most, problem.ranks
    longest = int(problem.lengths.argmax())
    tokens = int(problem.lengths[longest])
    if not most:
        raise ValueError(problem.refusal(tokens))
    if tokens > most * ranks:
        ways = f"at least {-(-tokens // most)} ranks", f"documents of at most {most * ranks:,} tokens"
        raise ValueError(
            f"document {longest} has {tokens:,} tokens, and a micro-batch holds at most {most * ranks:,}, {most:,} on "
            f"each of {ranks} ranks; give {problem.ways_out(*ways, need=-(-tokens // ranks))}"
        )
    return most


def split(lengths: Ints, ticks: Ints, row: int, *, capacity: int, count: int | None = None) -> list[Ints]:
    """Documents of each micro-batch, ascending. No document may exceed the capacity, in tokens.

    ticks: the cost of each document; row: the cost of a token in addition to attention. count: number of micro-batches,
    by default the fewest found: best fit alone searches for the lengths that fill them to the last token.

    Raises: ValueError if ``count`` micro-batches cannot hold the documents, or outnumber them.
    """
    documents, fewest = lengths.size, -(-int(lengths.sum()) // capacity)
    if count is not None and count > documents:
        raise ValueError(f"micro_batches={count} for {documents} documents; give at most {documents}")
    parts = fewest if count is None else max(count, fewest)
    while not (ways := _placed(lengths, ticks, row, capacity, parts)):
        parts += 1
    if count is not None and parts > count:
        raise ValueError(
            f"micro_batches={count} of at most {capacity:,} tokens do not hold {documents} documents of "
            f"{int(lengths.sum()):,}; give at least {parts}"
        )
    evened = [_evened(target, lengths, ticks, capacity, parts) for target in ways]
    target = min(evened, key=lambda target: int(summed(target, ticks, parts).max()))
    return [frozen(np.flatnonzero(target == part)) for part in range(parts)]


def _placed(lengths: Ints, ticks: Ints, row: int, capacity: int, parts: int) -> list[Ints]:
    """The micro-batch of each document, in each of a few ways that have room; in as many as any documents need."""
    tried = [_least_loaded(lengths, cost, capacity, parts) for cost in (ticks, ticks - row * lengths, lengths)]
    # documents that cost nothing but their rows, as without attention, may all have gone to one
    targets = [target for target in tried if target is not None and np.unique(target).size == parts]
    if not targets and (target := _best_fit(lengths, capacity, parts)) is not None:
        targets = [target]
    return targets


def _descending(cost: Ints, lengths: Ints) -> Ints:
    return np.lexsort((np.arange(cost.size), -lengths, -cost))


def _least_loaded(lengths: Ints, cost: Ints, capacity: int, parts: int) -> Ints | None:
    """Documents by falling cost, each in the least loaded micro-batch with room for it."""
    order = _descending(cost, lengths)
    target = np.empty(lengths.size, np.int64)
    target[order] = least_loaded(lengths[order], cost[order], [0] * parts, [capacity] * parts)
    return None if (target < 0).any() else target


def _best_fit(lengths: Ints, capacity: int, parts: int) -> Ints | None:
    """Documents by falling length, each where it leaves least room; None also if a micro-batch stays empty."""
    target = np.empty(lengths.size, np.int64)
    left = np.full(parts, capacity, np.int64)
    for document in _descending(lengths, lengths):
        room = np.where(left >= lengths[document], left, capacity + 1)
        part = int(room.argmin())
        if room[part] > capacity:
            return None
        left[part] -= lengths[document]
        target[document] = part
    return None if (left == capacity).any() else target


def _evened(target: Ints, lengths: Ints, ticks: Ints, capacity: int, parts: int) -> Ints:
    """The micro-batches with documents traded between the slowest and the fastest while that evens them out."""
    load, used = summed(target, ticks, parts), summed(target, lengths, parts)
    for _ in range(8 * parts):
        most, least = int(load.argmax()), int(load.argmin())
        many, few = (np.flatnonzero(target == part) for part in (most, least))
        few = few[np.lexsort((few, lengths[few], ticks[few]))]
        gap = int(load[most] - load[least])
        # for each document of the one, documents of the other whose trade would move half of the gap; -1 for none
        near_by = np.searchsorted(ticks[few], ticks[many] - gap // 2)
        given = np.repeat(many, 2)
        at = np.stack([near_by - 1, np.minimum(near_by, few.size - 1)], axis=1).ravel()
        taken = few[at]
        moved = ticks[given] - np.where(at < 0, 0, ticks[taken])
        tokens = lengths[given] - np.where(at < 0, 0, lengths[taken])
        fits = (used[least] + tokens <= capacity) & (used[most] - tokens <= capacity) & (moved > 0) & (moved < gap)
        fits &= (at >= 0) | (many.size > 1)
        if not fits.any():
            break
        distance = np.where(fits, np.abs(2 * moved - gap), gap)
        best = int(np.lexsort((lengths[given], distance))[0])
        target[given[best]] = least
        if at[best] >= 0:
            target[taken[best]] = most
        for total, change in ((load, moved[best]), (used, tokens[best])):
            total[least] += change
            total[most] -= change
    return target
