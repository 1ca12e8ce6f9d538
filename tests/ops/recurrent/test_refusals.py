"""What recurrences refuse: on every rank, before a byte moves, and by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import seqpar
from seqpar import recurrent
from seqpar.comm import Comm
from seqpar.facts.mask import Mask
from seqpar.plan import Plan
from seqpar.testing import run_threads
from tests.ops.recurrent.cases import NAMES, SCANS, WAYS, Family, Recurrence, plan_of

LINEAR, SCAN = Family(beta=True, initial=True), SCANS["selective"]
VERBS: dict[type, tuple[Callable[..., Any], tuple[str, ...]]] = {
    Family: (recurrent.linear_attention, ("q", "k", "v", "decay", "beta", "initial_state")),
    type(SCAN): (recurrent.channel_scan, NAMES),
}
Change = Callable[[dict[str, Any]], dict[str, Any]]


def each(names: str, change: Callable[[Tensor], Any]) -> Change:
    return lambda named: {name: change(named[name]) for name in names.split()}


def refused(comm: Comm, plan: Plan, case: Recurrence, ranks: list[int], change: Change, check: str = "batch") -> str:
    """The error of a call that some ranks change."""
    comm.check_every = check
    inputs, (verb, names) = case.inputs(plan.mask), VERBS[type(case)]
    mine = [None if x is None else seqpar.shard(x, plan, comm.rank) for x in inputs[: case.rows]]
    named = dict(zip(names, [*mine, *inputs[case.rows :]], strict=True))
    with pytest.raises((ValueError, NotImplementedError)) as error:
        verb(**named | (change(named) if comm.rank in ranks else {}), plan=plan, comm=comm)
    assert check == "call" or comm.stats.bytes_sent == 0
    return str(error.value)


UNFIT: list[tuple[Recurrence, Change, str]] = [
    (LINEAR, each("q", lambda x: x[:, :1]), "q and k must have one shape"),
    (LINEAR, each("v", lambda x: x[:, :1]), "v a multiple of their heads"),
    (LINEAR, each("decay", lambda x: x[:, :1]), "decay must be floating"),
    (LINEAR, each("beta", lambda x: x[:, :1]), "beta must be floating"),
    (LINEAR, each("q k", lambda x: x[..., :0]), "at least one dim per head"),
    (LINEAR, each("k", Tensor.float), "of one dtype and device"),
    (LINEAR, each("q", lambda x: x[:1]), "must have 8 rows"),
    (LINEAR, each("initial_state", lambda x: x[:1]), "initial_state must be floating"),
    (LINEAR, lambda _: {"kernel": "fast"}, "kernel must be one of auto, "),
    (LINEAR, lambda _: {"scale": float("nan")}, "scale must be a finite number"),
    (SCAN, each("update", lambda x: x[..., None]), "update must be floating [rows, channels]"),
    (SCAN, each("update", lambda x: x[1:]), "must have 8 rows"),
    (SCAN, each("decay", lambda _: None), "decay must be floating [8, 3]"),
    (SCAN, each("rates", lambda x: x[:2]), "rates must be floating [3, 2]"),
    (SCAN, each("keys", lambda x: x[:, :1]), "keys must be floating [8, 2]"),
    (SCAN, each("queries", Tensor.long), "queries must be floating [8, 2]"),
    (SCAN, each("initial_state", lambda x: x[:1]), "initial_state must be floating [2, 3, 2]"),
    (SCAN, lambda _: {"kernel": "chunked"}, "kernel must be one of auto, steps, reference, got 'chunked'"),
    (SCAN, lambda _: {"travel": "car"}, "travel must be one of auto, gather, chain, pipeline, rows"),
]


@pytest.mark.parametrize(("case", "change", "text"), UNFIT, ids=[text for *_, text in UNFIT])
def test_what_does_not_fit_on_one_rank_is_an_error_on_all(case, change, text) -> None:
    plan = Plan(Mask((9, 7)), seqpar.Layout.contiguous(16, 2))
    assert all(text in error for error in run_threads(2, refused, plan, case, [0], change))


@pytest.mark.parametrize("case", [LINEAR, SCAN], ids=["linear_attention", "channel_scan"])
def test_plans_of_no_recurrence_are_refused(case) -> None:
    layout = seqpar.Layout.contiguous(16, 2)
    for plan, text in (
        (Plan(Mask((9, 7), causal=False), layout), "causal inside documents"),
        (Plan(Mask((9, 7)), layout, kv_layout=seqpar.Layout.striped(16, 2)), "without a kv_layout"),
    ):
        assert all(text in error for error in run_threads(2, refused, plan, case, [], dict))


def marked(x: Tensor) -> Tensor:
    x = x.clone()
    x.view(-1)[-1] = 1.0
    return x


DIFFERENT: list[tuple[Recurrence, list[int], Change, str]] = [
    (LINEAR, [0, 1, 2], each("decay", torch.neg), "logarithms at or below 0"),
    (SCAN, [0, 1, 2], each("decay", torch.neg), "decay, times rates, holds logarithms at or below 0"),
    (SCANS["alone"], [0, 1, 2], each("decay", torch.neg), "decay, times rates, holds logarithms at or below 0"),
    (LINEAR, [2], each("initial_state", marked), "ranks differ in a hash of initial_state"),
    (SCAN, [1, 2], each("rates", lambda x: 2 * x), "ranks differ in a hash of rates"),
    (LINEAR, [1], each("initial_state", lambda x: x.clone().requires_grad_()), "ranks differ in initial_state require"),
    (SCAN, [2], each("initial_state", lambda x: x.clone().requires_grad_()), "ranks differ in initial_state require"),
    (SCAN, [2], each("rates", lambda x: x.clone().requires_grad_()), "ranks differ in rates require"),
]


@pytest.mark.parametrize(("case", "ranks", "change", "text"), DIFFERENT, ids=[text for *_, text in DIFFERENT])
def test_values_are_compared_where_every_call_is_checked(case, ranks, change, text) -> None:
    errors = run_threads(3, refused, plan_of("contiguous", (16,), 3), case, ranks, change, "call")
    assert all(text in error for error in errors), errors


def unknown(comm: Comm, call: Callable[..., Any]) -> str:
    with pytest.raises(ValueError) as error:
        call(Plan(Mask([14]), seqpar.Layout.contiguous(14, 2)), comm, travel="pigeon" if comm.rank else "auto")
    assert comm.stats.bytes_sent == 0
    return str(error.value)


ROWS = torch.zeros(7, 2, 3)
CALLS = {
    "state_scan": partial(recurrent.state_scan, torch.zeros(1, 2, 3, 4), torch.zeros(1, 2)),
    "causal_conv1d": partial(recurrent.causal_conv1d, ROWS[:, 0], torch.zeros(3, 4), None),
    "linear_attention": partial(recurrent.linear_attention, ROWS, ROWS, ROWS),
}


@pytest.mark.parametrize("verb", CALLS)
def test_an_unknown_way_is_an_error_on_all_ranks(verb) -> None:
    assert all(f"{verb}: travel must be one of auto, " in error for error in run_threads(2, unknown, CALLS[verb]))


def test_ranks_that_name_other_ways_are_told() -> None:
    def other(comm: Comm) -> str:
        plan = Plan(Mask([14]), seqpar.Layout.contiguous(14, 2))
        with pytest.raises(ValueError) as error:
            recurrent.linear_attention(ROWS, ROWS, ROWS, plan, comm, travel=WAYS[comm.rank])
        return str(error.value)

    assert all("ranks differ in travel" in error for error in run_threads(2, other))
