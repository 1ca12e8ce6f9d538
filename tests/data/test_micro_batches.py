"""`micro_batches`: a global batch in several steps, whose shares, labels and results add up to the whole."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from seqpar import Mask, MicroBatch, plan_step
from seqpar.comm import Comm
from seqpar.data import Share, back, micro_batches, share
from seqpar.testing import run_threads
from tests.cases import examples
from tests.data.cases import Case, batches, make, ring
from tests.data.checks import check_home, check_rows


def dealt(count: int, lengths: Any, ranks: int) -> list[MicroBatch]:
    """Documents dealt to at most `count` micro-batches in turn."""
    parts = [np.arange(i, len(lengths), count) for i in range(min(count, len(lengths)))]
    return [MicroBatch(part, ring(lengths[part], ranks)) for part in parts]


def in_steps(comm: Comm, cases: list[Case], plan: Any, source: str) -> tuple[list[Share], Any, list[Mask]]:
    batch = cases[comm.rank].batch
    shares = micro_batches(batch, comm, source=source, plan=plan)
    homes = [[back(s, x) for x in (s.tensors["input_ids"], s.positions, s.tensors["weight"])] for s in shares]
    whole = share(batch, comm, source=source, plan=ring)
    windows = [whole.mask_for(window=(2, None)), *[s.mask_for(window=(2, None)) for s in shares]]
    return shares, [summed(parts) for parts in zip(*homes, strict=True)], windows


def summed(parts: tuple[Any, ...]) -> Any:
    if isinstance(parts[0], list):
        return [sum(each[1:], each[0]) for each in zip(*parts, strict=True)]
    return sum(parts[1:], parts[0])


@examples(40)
@given(st.data(), st.integers(1, 3), st.integers(1, 4), st.sampled_from(["sharded", "replicated"]))
def test_micro_batches_add_up_to_the_batch(data: st.DataObject, ranks: int, count: int, source: str) -> None:
    cases = data.draw(batches(ranks, "row"))
    if source == "replicated":
        cases = [next(case for case in cases if case.documents)] * ranks
    plan = partial(dealt, count)
    results = run_threads(ranks, in_steps, cases, plan, source)
    together = cases[:1] if source == "replicated" else cases
    documents = [document for case in together for document in case.documents]
    for i in range(len(results[0][0])):
        part = np.arange(i, len(documents), count)
        check_rows([documents[n] for n in part], [shares[i] for shares, _, _ in results])
        assert results[0][2][1 + i] == results[0][2][0].pick(part)
    for case, (_, home, _) in zip(cases, results, strict=True):
        check_home(case, *home)


def test_the_planner_of_steps_is_asked_by_default() -> None:
    def call(comm: Comm) -> tuple[int, list[int]]:
        batch = make("right", comm.rank, "row").batch
        default = micro_batches(batch, comm)
        two = micro_batches(batch, comm, plan=partial(plan_step, micro_batches=2))
        return default[0].valid, [s.valid for s in two]

    for valid, two in run_threads(2, call):
        assert (len(two), sum(two)) == (2, valid)


IDS = torch.arange(1, 9).reshape(2, 4)


def gradient(comm: Comm, count: int) -> Tensor:
    """This rank's part of the gradient of the mean of a table's entries over all labels, in `count` steps."""
    table = torch.zeros(10, dtype=torch.float64, requires_grad=True)
    labels = IDS + comm.rank
    shares = micro_batches({"input_ids": IDS, "labels": labels}, comm, plan=partial(dealt, count))
    valid = sum(s.valid for s in shares)
    for s in shares:
        counted = s.tensors["labels"][s.tensors["labels"] >= 0]
        (table[counted].sum() / valid).backward()
    assert table.grad is not None
    return table.grad


def test_gradients_of_steps_add_up() -> None:
    whole, steps = (sum(run_threads(2, gradient, count)) for count in (1, 3))
    torch.testing.assert_close(whole, steps)
    assert float(whole.sum()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("deal", "message"),
    [
        (lambda lengths, ranks: [], "each of 4 documents in one micro-batch"),
        (lambda lengths, ranks: [ring(lengths, ranks)], "plan must return micro-batches"),
        (ring, "plan must return micro-batches, got Plan.*; give seqpar.plan_step"),
        (lambda lengths, ranks: dealt(2, lengths, ranks)[:1], "each of 4 documents in one micro-batch"),
        (lambda lengths, ranks: dealt(2, lengths, ranks) * 2, "each of 4 documents in one micro-batch"),
        (
            lambda lengths, ranks: [MicroBatch(np.arange(4)[::-1], ring(lengths, ranks))],
            "each of 4 documents in one micro-batch, ascending",
        ),
        (
            lambda lengths, ranks: [MicroBatch(np.arange(4), ring(lengths[:2], ranks))],
            "plan must return a Plan of the documents",
        ),
    ],
    ids=["none", "plans", "a plan", "left out", "twice", "descending", "other documents"],
)
def test_steps_that_do_not_serve_are_refused(deal: Any, message: str) -> None:
    def call(comm: Comm) -> None:
        with pytest.raises(ValueError, match=message):
            micro_batches({"input_ids": IDS}, comm, plan=deal)

    run_threads(2, call)
