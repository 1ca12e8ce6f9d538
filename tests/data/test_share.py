"""`share` and `back`: every token once, what it predicts, where it goes home; and what is refused, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqpar.comm import Comm
from seqpar.data import Share, back, share
from seqpar.testing import run_processes, run_threads
from tests.data.cases import IGNORE, KINDS, PLANNERS, Case, batches, make


def shared(comm: Comm, cases: list[Case], planner: str, shift: str) -> tuple[Share, Any, Any, Any]:
    """A rank's share, and its ids, positions and a float of two dims back home."""
    batch = cases[comm.rank].batch
    s = share(batch, comm, plan=PLANNERS[planner], shift=shift)
    return s, back(s, s.tensors["input_ids"]), back(s, s.positions), back(s, s.tensors["weight"])


def check(cases: list[Case], results: list[tuple[Share, Any, Any, Any]]) -> None:
    tokens = [token for case in cases for token in case.tokens]
    lengths = [len(document) for case in cases for document in case.documents]
    valid = sum(token.label != IGNORE for token in tokens)
    seen = []
    for rank, (s, ids, positions, weight) in enumerate(results):
        assert s.plan == results[0][0].plan
        assert s.plan.mask.lengths.tolist() == lengths
        assert s.valid == valid
        rows, at = s.plan.rows(rank), s.plan.positions(rank)
        assert rows == len(s.positions) == len(s.tensors["input_ids"]) == len(s.tensors["labels"]) >= 1
        for row, global_ in enumerate(at.tolist()):
            got = [s.tensors["input_ids"][row], s.tensors["labels"][row], s.positions[row], s.tensors["weight"][row, 1]]
            token = tokens[global_]
            want = [token.id, token.label, token.position, token.weight] if global_ >= 0 else [0, IGNORE, 0, 0]
            assert [float(x) for x in got] == want
        seen += at[at >= 0].tolist()
        same(ids, cases[rank].ids_home)
        batch = cases[rank].batch or {}
        if "attention_mask" in batch:
            batch = batch | {"weight": batch["weight"] * batch["attention_mask"][..., None]}
        if "weight" in batch:
            same(weight, batch["weight"])
            assert sum(int(x.sum()) for x in positions) == sum(token.position for token in cases[rank].tokens)
    assert sorted(seen) == list(range(len(tokens)))


def same(got: Any, want: Any) -> None:
    if isinstance(want, list):
        assert isinstance(got, list) and len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            same(one, other)
    else:
        assert got.shape == want.shape and torch.equal(got, want)


@settings(max_examples=80)
@given(st.data())
def test_every_token_is_computed_once_with_its_label_and_goes_home(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 4), "ranks")
    shift = data.draw(st.sampled_from(["row", "document", "none"]), "shift")
    planner = data.draw(st.sampled_from(sorted(PLANNERS)), "planner")
    cases = data.draw(batches(ranks, shift))
    check(cases, run_threads(ranks, shared, cases, planner, shift))


@pytest.mark.parametrize("planner", PLANNERS)
def test_every_form_of_batch_goes_with_every_other(planner: str) -> None:
    for i in range(0, len(KINDS), 2):
        cases = [make(kind, i, "row") for kind in (*KINDS[i : i + 2], "right", "packed")]
        check(cases, run_threads(4, shared, cases, planner, "row"))


def test_processes_share_as_threads_do() -> None:
    cases = [make("left", 3, "row"), make("list", 4, "row"), make("none", 5, "row")]
    check(cases, run_processes(3, shared_of, cases))


def shared_of(comm: Comm, cases: list[Case]) -> tuple[Any, ...]:
    s, *home = shared(comm, cases, "ring", "row")
    s.__dict__["comm"] = None  # a comm is of its process
    return (s, *home)
