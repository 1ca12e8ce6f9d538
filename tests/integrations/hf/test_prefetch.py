"""Plans made ahead: of a loader's next batch in a thread, and of short batches that come again."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import seqpar
from seqpar import Comm, Mask, Plan, plan_batch
from seqpar.integrations.hf import plans
from seqpar.testing import run_threads
from tests.integrations.hf.models import build
from tests.ranks import errors


def loader(rank: int, steps: int) -> Iterator[dict[str, Tensor]]:
    """Padded batches of uneven lengths, of other lengths on every rank."""
    generator = torch.Generator().manual_seed(rank)
    for step in range(steps):
        ids = torch.randint(1, 60, (2 + rank, 9 + 5 * step), generator=generator)
        kept = torch.arange(ids.shape[1]) < torch.randint(4, 9, (len(ids), 1), generator=generator)
        yield {"input_ids": ids, "attention_mask": kept.long(), "labels": ids.masked_fill(~kept, -100)}


class Recorded:
    """Whether plans were made by the calling thread, and their digests."""

    def __init__(self) -> None:
        self.planned: list[tuple[bool, str]] = []

    def __call__(self, lengths: np.ndarray, ranks: int) -> Plan:
        plan = plan_batch(lengths, ranks, masks=Mask(lengths), model="tiny", hardware="cpu")
        self.planned.append(("plans ahead" in threading.current_thread().name, plan.digest()))
        return plan


def trained(comm: Comm, model: Any, depth: int) -> tuple[list[float], list[tuple[bool, str]]]:
    """Losses of a few steps, and the plans; depth 0 plans when a batch is given."""
    own, plans = copy.deepcopy(model), Recorded()
    with seqpar.parallelize(own, comm, plan=plans) as handle:
        batches = list(loader(comm.rank, 4))
        given = handle.prefetch(batches, depth=depth) if depth else batches
        losses = [float(own(**batch).loss.detach()) for batch in given]
        if depth:  # a loop after the end is another epoch
            planned = list(plans.planned)
            assert [float(own(**batch).loss.detach()) for batch in given] == losses
            return losses, planned
    return losses, plans.planned


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.sampled(2)
def test_plans_made_ahead_are_those_made_at_once(depth: int) -> None:
    model = build("llama")
    at_once = run_threads(3, trained, model, 0)
    in_a_thread = run_threads(3, trained, model, depth)
    for (losses, planned), (before, expected) in zip(in_a_thread, at_once, strict=True):
        assert losses == before
        assert planned == [(True, digest) for _, digest in expected]


def test_a_batch_that_is_changed_is_planned_when_it_comes() -> None:
    model = build("llama")

    def rank(comm: Comm) -> list[tuple[bool, str]]:
        own, plans = copy.deepcopy(model), Recorded()
        with seqpar.parallelize(own, comm, plan=plans) as handle:
            for batch in handle.prefetch(loader(comm.rank, 2)):
                own(**{name: x[:1] for name, x in batch.items()})
        return plans.planned

    (one, other) = run_threads(2, rank)
    assert sorted(one) == sorted(other) and sum(ahead for ahead, _ in one) == 2 == sum(not ahead for ahead, _ in one)


def test_loaders_that_end_apart_or_fail_are_told_by_every_rank() -> None:
    model = build("llama")

    def rank(comm: Comm, broken: bool) -> tuple[int, str]:
        own, steps = copy.deepcopy(model), 0

        def batches() -> Iterator[dict[str, Tensor]]:
            yield from loader(comm.rank, 2 + comm.rank * (not broken))
            if broken and comm.rank == 1:
                raise OSError("no such shard")

        with seqpar.parallelize(own, comm) as handle:
            try:
                for batch in handle.prefetch(batches()):
                    own(**batch)
                    steps += 1
            except (ValueError, OSError) as error:
                return steps, str(error)
        return steps, ""

    for steps, message in run_threads(2, rank, False):
        assert steps == 2 and "the loader of rank 0 ended before that of rank 1" in message
    for steps, message in run_threads(2, rank, True):
        assert steps == 2 and "no such shard" in message and "refused" not in message


def test_a_loader_that_fills_its_tensors_anew_is_told_by_every_rank() -> None:
    """That of one rank; the other rank's is right."""
    ids = torch.randint(1, 60, (3, 2, 9))

    def rank(comm: Comm, device: str | None) -> None:
        memory = torch.zeros_like(ids[0])

        def batches() -> Iterator[dict[str, Tensor]]:
            for x in ids:
                given = x if comm.rank else memory.copy_(x)
                yield {"input_ids": given, "labels": given}

        handle = seqpar.parallelize(build("llama"), comm)
        next(handle.prefetch(batches(), device=device))  # whose batch has the values of the second one

    for device in (None, "cpu"):
        assert all("a batch that was read ahead has been written to" in said for said in errors(rank, device))


def test_a_depth_that_differs_is_named_on_every_rank() -> None:
    def rank(comm: Comm) -> None:
        handle = seqpar.parallelize(build("llama"), comm)
        for batch in handle.prefetch(loader(comm.rank, 4), depth=1 + comm.rank):
            handle.model(**batch)

    assert all("depth=1" in said and "depth=2" in said for said in errors(rank))


def test_a_short_batch_that_comes_again_is_planned_once() -> None:
    model = build("llama")

    def rank(comm: Comm) -> int:
        own = copy.deepcopy(model)
        with seqpar.parallelize(own, comm) as handle:
            made, planner = [], handle._plans._make
            handle._plans._make = lambda *given: made.append(given) or planner(*given)
            for size in (8, 8, 12, 8):
                own(input_ids=torch.full((1, size), 1 + comm.rank))
            own.gradient_checkpointing_enable()  # of which the plan depends
            own(input_ids=torch.full((1, 8), 1 + comm.rank))
        return len(made)

    counts = run_threads(2, rank)
    assert counts == [3, 3]
    kept = plans.Plans(model, causal=True, plan=None, derive=lambda plan: None)
    for n in range(1, 3 * plans.KEPT):
        assert kept(np.array([n]), 2, brought=None).mask.tokens == n
    assert len(kept._kept) == plans.KEPT
