"""`channel_scan` beside the definition on one device: kinds, layouts, states, gradients, isolation, compilers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import seqpar
from seqpar import recurrent
from seqpar.comm import Comm, LocalComm
from seqpar.facts.mask import Mask
from seqpar.plan import Plan
from seqpar.testing import run_threads
from tests.ops.recurrent.cases import (
    NAMES,
    SCANS,
    Scan,
    agrees,
    plan_of,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_fewer_bits_are_summed_in_fp32(dtype) -> None:
    plan, case = plan_of("zigzag", (40, 90, 30), 3), SCANS["selective"]
    agrees(plan, case, dtype=dtype, tolerance=1e-5 if dtype is torch.float32 else 2e-2)


@pytest.mark.usefixtures("no_graphs")
@pytest.mark.exhaustive
def test_one_graph_serves_all_plans() -> None:
    comm, counter = LocalComm(), CompileCounterWithBackend("aot_eager")

    def layer(queries, keys, update, decay, rates, handle):
        y = recurrent.channel_scan(2 * update, decay, handle, rates=rates, keys=keys, queries=queries)
        return (y * y).sum() + recurrent.channel_scan(update, -decay, handle).sum()

    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for lengths in ((9, 7), (4, 4, 8), (16,)):
        plan = Plan(Mask(lengths), seqpar.Layout.contiguous(16, 1))
        results = []
        for function in (layer, compiled):
            leaves = [x.requires_grad_() for x in SCANS["selective"].inputs(plan.mask)[:5]]
            loss = function(*leaves, seqpar.bind(plan, comm))
            loss.backward()
            results.append([loss.detach(), *(x.grad for x in leaves)])
        assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    assert counter.frame_count == 1


def refused(comm: Comm, plan: Plan, change: str) -> str:
    """The error of a call with one argument that does not fit."""
    queries, keys, update, decay, rates, initial = SCANS["selective"].inputs(plan.mask)
    mine = [seqpar.shard(x, plan, comm.rank) for x in (queries, keys, update, decay)]
    named: dict[str, Any] = dict(zip(NAMES, [*mine, rates, initial], strict=True))
    wrong = {
        "update": named["update"][..., None], "decay": None, "rates": rates[:2], "keys": named["keys"][:, :1],
        "queries": named["queries"].long(), "initial_state": initial[:1], "kernel": "chunked", "travel": "car",
        "rows": named["update"][1:],
    }  # fmt: skip
    if change in wrong:
        named["update" if change == "rows" else change] = wrong[change]
    before = comm.stats.bytes_sent
    with pytest.raises((ValueError, NotImplementedError)) as error:
        recurrent.channel_scan(named.pop("update"), named.pop("decay"), plan, comm, **named)
    assert comm.stats.bytes_sent == before
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("update", "update must be floating [rows, channels]"), ("decay", "decay must be floating [8, 3]"),
        ("rates", "rates must be floating [3, 2]"), ("keys", "keys must be floating [8, 2]"),
        ("queries", "queries must be floating [8, 2]"), ("initial_state", "initial_state must be floating [2, 3, 2]"),
        ("kernel", "kernel must be one of auto, steps, reference, got 'chunked'"),
        ("travel", "travel must be one of auto, gather, chain, pipeline, rows"), ("rows", "must have 8 rows"),
        ("full", "causal inside documents"), ("cross", "without a kv_layout"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_an_error_on_all_ranks(change, text) -> None:
    plan = Plan(Mask((9, 7), causal=change != "full"), seqpar.Layout.contiguous(16, 2))
    if change == "cross":
        plan = Plan(Mask((9, 7)), seqpar.Layout.contiguous(16, 2), kv_layout=seqpar.Layout.striped(16, 2))
    errors = run_threads(2, refused, plan, change)
    assert all(error.startswith("channel_scan: ") and text in error for error in errors), errors


def checked(comm: Comm, plan: Plan, case: Scan, change: str) -> str:
    """The error where every call is checked."""
    comm.check_every = "call"
    queries, keys, update, decay, rates, _ = case.inputs(plan.mask)
    mine = [None if x is None else seqpar.shard(x, plan, comm.rank) for x in (queries, keys, update, decay)]
    if change == "growing":
        mine[3] = -mine[3]
    elif comm.rank:
        rates = 2 * rates
    with pytest.raises(ValueError) as error:
        recurrent.channel_scan(mine[2], mine[3], plan, comm, rates=rates, keys=mine[1], queries=mine[0])
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("selective", "growing", "decay, times rates, holds logarithms at or below 0"),
        ("alone", "growing", "decay, times rates, holds logarithms at or below 0"),
        ("selective", "rates", "ranks differ in a hash of rates"),
    ],
)
def test_values_are_read_where_every_call_is_checked(name, change, text) -> None:
    errors = run_threads(2, checked, plan_of("contiguous", (16,), 2), SCANS[name], change)
    assert all(text in error for error in errors), errors


def test_no_channels_and_no_states() -> None:
    plan = Plan(Mask([10, 6]), seqpar.Layout.contiguous(16, 1))
    none = torch.ones(16, 0)
    assert recurrent.channel_scan(none, -none, plan, LocalComm()).shape == (16, 0)
    assert recurrent.channel_scan(torch.ones(16, 2), -torch.ones(16, 2), plan, LocalComm(), keys=none).shape == (16, 2)
    out = recurrent.channel_scan(torch.ones(16, 2), -torch.ones(16, 2), plan, LocalComm(), rates=torch.ones(2, 0))
    assert torch.equal(out, torch.zeros(16, 2))
    with pytest.raises(
        ValueError, match=r"initial_state must be floating \[2, 2, 1\] on cpu, got torch.float32 \[2, 2\]"
    ):
        recurrent.channel_scan(torch.ones(16, 2), -torch.ones(16, 2), plan, LocalComm(), initial_state=torch.ones(2, 2))


def requiring(comm: Comm, plan: Plan, name: str, alone: bool) -> str:
    """The error of a scan whose rates or initial states require a gradient, or do so on the last rank alone."""
    queries, keys, update, decay, *both = SCANS["selective"].inputs(plan.mask)
    mine = [seqpar.shard(x, plan, comm.rank) for x in (queries, keys, update, decay)]
    given = dict(zip(("rates", "initial_state"), both))
    given[name].requires_grad_(comm.rank == comm.size - 1 or not alone)
    try:
        out = recurrent.channel_scan(mine[2].requires_grad_(), mine[3], plan, comm, queries=mine[0], **given)
    except ValueError as error:
        return str(error)
    out.sum().backward()
    return ""


@pytest.mark.parametrize("name", ["rates", "initial_state"])
def test_ranks_that_differ_in_what_requires_a_gradient_are_told(name: str) -> None:
    plan = plan_of("contiguous", (16,), 3)
    assert run_threads(3, requiring, plan, name, False) == [""] * 3
    errors = run_threads(3, requiring, plan, name, True)
    assert all("ranks differ in " + name + " require" in error for error in errors), errors
