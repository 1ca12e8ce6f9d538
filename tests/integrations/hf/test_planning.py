"""Where a batch's documents are computed: with who brings them, unless spreading them gains more than it takes."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import seqpar
from seqpar import Comm, Layout, Mask, Plan, plan_batch
from seqpar.facts.value import Ints
from seqpar.integrations.hf import planning
from seqpar.integrations.hf.config import PlanState
from seqpar.integrations.hf.planning import ModelPlanner, forecast_apart
from seqpar.planner import Forecast
from seqpar.testing import run_threads
from seqpar.train import sync_gradients

DAY = 86400.0
STATE = PlanState(recomputed=False, device="cpu")


def llama(hidden: int = 64) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=61, hidden_size=hidden, intermediate_size=hidden, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2,
        )
    )  # fmt: skip


def planned(*brought: Sequence[int], model: LlamaForCausalLM | None = None) -> Plan:
    planner = ModelPlanner(model or llama(), causal=True)
    lengths = np.concatenate([np.asarray(x, np.int64) for x in brought])
    return planner(lengths, len(brought), STATE, tuple(len(x) for x in brought))


def held(plan: Plan) -> list[list[int]]:
    return [sorted(plan.layout.positions(rank).tolist()) for rank in range(plan.ranks)]


@pytest.fixture
def as_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "SPREADING", 3e-3)


@pytest.mark.usefixtures("as_shipped")
def test_short_documents_stay_and_long_ones_are_spread() -> None:
    short = planned([100, 90], [128, 70])
    assert held(short) == [list(range(190)), list(range(190, 388))]
    long = planned([40_000, 100], [200, 300])
    assert long.layout.sizes().max() < 30_000
    for plan in (short, long):
        assert isinstance(plan.forecast, Forecast) and plan.forecast.gap >= 0
    # what is little for a small model is much for a large one
    assert planned([1000], [100]).layout.sizes().tolist() == [1000, 100]
    assert planned([1000], [100], model=llama(1024)).layout.sizes().max() < 600


@pytest.mark.usefixtures("as_shipped")
def test_a_rank_that_brings_nothing_and_batches_that_all_have() -> None:
    assert planned([50], []).layout.sizes().tolist() == [50, 0]
    planner = ModelPlanner(llama(), causal=True)
    replicated = planner(np.array([64, 64, 64]), 3, STATE, None)
    assert replicated.layout.sizes().tolist() == [64] * 3


@pytest.mark.parametrize("spreading", [-DAY, 3e-3])
def test_results_and_gradients_are_those_of_one_process_either_way(
    spreading: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "SPREADING", spreading)
    model = llama()
    ids = torch.randint(1, 61, (5, 24))
    kept = torch.arange(24) < torch.tensor([24, 3, 1, 2, 1])[:, None]
    batch = {"input_ids": ids, "attention_mask": kept.long(), "labels": ids.masked_fill(~kept, -100)}
    expected = copy.deepcopy(model)
    loss = expected(**batch).loss
    loss.backward()
    rows = [slice(0, 1), slice(1, 5)]

    def rank(comm: Comm) -> tuple[float, int]:
        own = copy.deepcopy(model)
        with seqpar.parallelize(own, comm, logits=True):
            comm.stats.reset()
            out = own(**{name: x[rows[comm.rank]] for name, x in batch.items()})
            assert out.logits.shape[:2] == batch["input_ids"][rows[comm.rank]].shape
            sent = comm.stats.bytes_sent
            out.loss.backward()
            sync_gradients(own.parameters(), comm)
        for p, q in zip(own.parameters(), expected.parameters(), strict=True):
            assert torch.allclose(p.grad, q.grad, atol=1e-7)
        return out.loss.item(), sent

    for got, sent in run_threads(2, rank):
        assert got == pytest.approx(loss.item(), abs=1e-6)
        assert (sent > 100) == (spreading < 0)  # else no row moves, and only the loss is summed


@pytest.mark.usefixtures("as_shipped")
def test_plans_made_ahead_know_who_brings_what() -> None:
    made: list[tuple[int, ...]] = []
    model = llama()

    def rank(comm: Comm) -> list[list[int]]:
        own, sizes = copy.deepcopy(model), []
        with seqpar.parallelize(own, comm) as handle:
            planner = handle._plans._make

            def noted(lengths: Ints, *rest: object) -> Plan:
                plan = planner(lengths, *rest)  # type: ignore[arg-type]
                made.append(tuple(plan.layout.sizes().tolist()))
                return plan

            handle._plans._make = noted
            batches = [{"input_ids": torch.ones(1, n + comm.rank, dtype=torch.long)} for n in (5, 9)]
            for batch in handle.prefetch(batches):
                sizes.append(list(own(**batch).logits.shape[:2]))
        return sizes

    assert run_threads(2, rank) == [[[1, 5], [1, 9]], [[1, 6], [1, 10]]]
    assert sorted(made) == [(5, 6)] * 2 + [(9, 10)] * 2  # once on each rank


def test_ranks_apart_take_what_plans_of_their_documents_take() -> None:
    lengths = [3000, 100, 200, 2500]
    plan = plan_batch(lengths, 2, model="llama-8b")
    forecast = plan.forecast
    assert isinstance(forecast, Forecast)
    source = Layout.from_pieces([0, 3000, 3100, 3300], lengths, [0, 0, 1, 1], 2)
    alone = [plan_batch(own, 1, model=forecast.model).forecast for own in (lengths[:2], lengths[2:])]
    apart = forecast_apart(Mask(lengths), source, forecast.model, forecast.hardware)
    assert apart.seconds == pytest.approx(max(x.seconds for x in alone), rel=1e-6)
