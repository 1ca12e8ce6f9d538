"""`prefetch` derives what the first recurrent layers with a plan need: runs, who sends what, and kernels' tables."""

from __future__ import annotations

import copy
import sys
import threading
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import seqpar
from seqpar import Layout, Mask, Plan, recurrent
from seqpar.comm import Comm
from seqpar.data import prefetch
from seqpar.kernels.recurrent import KERNELS
from seqpar.ops.core.precompute import RecentCalls, recent_recurrent
from seqpar.ops.recurrent import call, conv, scan
from seqpar.ops.recurrent.chain import StateChain
from seqpar.ops.recurrent.gather import StateGather
from seqpar.ops.recurrent.local import LocalRuns
from seqpar.ops.recurrent.pipeline import StatePipeline
from seqpar.ops.recurrent.relaid import ContiguousRows
from seqpar.ops.recurrent.rows import RowMap
from seqpar.plan.runs import DocumentRuns, RankRuns
from seqpar.testing import run_threads

prefetching = sys.modules["seqpar.data.prefetch"]  # the name of the module in its package is the function
MADE = [
    *((table, "__init__") for table in (
        DocumentRuns, RankRuns, RowMap, LocalRuns, ContiguousRows, StateGather, StateChain, conv.RowsWithHalo,
        StatePipeline,
    )),
    (conv, "halo_way"), (call, "layer_way"), (scan, "state_way"),
]  # fmt: skip
LENGTHS = (17, 9, 22)


def zigzag(lengths: Any, ranks: int) -> Plan:
    return Plan(Mask(lengths), Layout.zigzag(lengths, ranks))


def layers(plan: Plan, comm: Comm, seed: int, travel: str) -> list[Tensor]:
    """What verbs return, and a gradient."""
    g, rows = torch.Generator().manual_seed(seed), plan.rows(comm.rank)
    x = torch.randn(rows, 6, generator=g).requires_grad_()
    filtered = recurrent.causal_conv1d(x, torch.ones(6, 3), None, plan, comm)
    shifted = recurrent.shift(filtered, plan, comm, by=2)
    q, k, v = (y.unflatten(1, (2, -1)) for y in shifted.split(2, 1))
    out = recurrent.linear_attention(q, k, v, plan, comm, decay=-torch.rand(rows, 2, generator=g), travel=travel)
    assert isinstance(out, Tensor)
    out.sum().backward()
    runs = recurrent.runs(plan, comm.rank).counts.size
    own = travel if travel in ("gather", "chain") else "auto"
    entered = recurrent.state_scan(torch.ones(runs, 2, 3, 3), torch.zeros(runs, 2), plan, comm, travel=own)
    assert x.grad is not None
    return [out.detach(), x.grad, entered]


def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, Counter[str]]:
    """How many tables each thread makes, by its name."""
    counts: dict[str, Counter[str]] = {}

    def count(owner: Any, name: str) -> None:
        before = owner.__dict__[name]

        def call(*given: Any) -> Any:
            counts.setdefault(threading.current_thread().name, Counter())[f"{owner.__name__}.{name}"] += 1
            return before(*given)

        monkeypatch.setattr(owner, name, call)

    for owner, name in MADE + [(type(kernel), "tables") for kernel in KERNELS.values()]:
        count(owner, name)
    return counts


def steps(comm: Comm, travel: str) -> list[list[Tensor]]:
    """Results for four batches of different lengths."""
    batches = [{"input_ids": torch.arange(n + 5 * comm.rank)[None]} for n in LENGTHS + (31,)]
    found = []
    for step, share in enumerate(prefetch(batches, comm, plan=zigzag)):
        threading.current_thread().name = f"rank {comm.rank} step {step}"
        found.append(layers(share.plan, comm, step, travel))
        threading.current_thread().name = f"rank {comm.rank} between"
    return found


@pytest.mark.parametrize("travel", ["gather", "chain", "pipeline", "rows"])
@pytest.mark.sampled(2)
def test_after_prefetch_no_table_is_made(travel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = counted(monkeypatch)
    found = run_threads(2, steps, travel)
    for rank in range(2):
        assert counts[f"rank {rank} step 0"]["RowMap.__init__"] >= 2, "nobody knew the calls to come"
        # the second batch was planned before the first call
        assert f"rank {rank} step 2" not in counts and f"rank {rank} step 3" not in counts
    monkeypatch.setattr(prefetching, "recent_recurrent", RecentCalls(0))
    counts.clear()
    for ranks in zip(found, run_threads(2, steps, travel), strict=True):
        for one, other in zip(*ranks, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))
    assert all(counts[f"rank {rank} step 3"]["LocalRuns.__init__"] == 1 for rank in range(2))


def test_calls_of_other_kinds_are_forgotten_in_turn() -> None:
    comm, plan = seqpar.LocalComm(), zigzag((9, 4), 1)
    for by in range(1, 3 * recent_recurrent.most):
        recurrent.shift(torch.ones(13), plan, comm, by=by)
    known = zigzag((5, 6), 1)
    recent_recurrent.derive(known, comm)
    name = f"{RowMap.__module__}.RowMap.of"
    assert known.known((name, 0, "shift", 3 * recent_recurrent.most - 1)) is not None
    assert known.known((name, 0, "shift", 1)) is None
    assert len(recent_recurrent._of[comm]) == recent_recurrent.most


def test_mixers_of_a_model_find_their_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from tests.integrations.hf.hybrids import build, contiguous

    model, counts = build("mamba2"), counted(monkeypatch)

    def rank(comm: Comm) -> None:
        own = copy.deepcopy(model)
        with seqpar.parallelize(own, comm, plan=contiguous) as handle:
            ids = [torch.arange(n)[None] + comm.rank for n in LENGTHS * 2]
            for step, tokens in enumerate(handle.prefetch([{"input_ids": x, "labels": x} for x in ids])):
                threading.current_thread().name = f"rank {comm.rank} step {step}"
                own(**tokens).loss.backward()
                threading.current_thread().name = f"rank {comm.rank} between"

    run_threads(2, rank)
    assert {f"rank {rank} step {step}" for rank in range(2) for step in (0, 1)} <= set(counts)
    assert not {f"rank {rank} step {step}" for rank in range(2) for step in (2, 3, 4, 5)} & set(counts)
