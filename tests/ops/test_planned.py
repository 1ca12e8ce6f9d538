"""Attention under the planner's plans equals one device, and so do losses and gradients of a decoder.

The machines are made up, so that batches of a few dozen tokens are planned as ones of thousands are: documents are
spread and cut, and share heads in several widths.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import seqpar
from seqpar import Hardware, Mask, MicroBatch, ModelShape, Plan, plan_batch, plan_step
from seqpar.comm import Comm, shm
from seqpar.planner import AttentionCost, Link
from seqpar.planner.groups import Fetching
from seqpar.planner.nested import Nest, nested
from seqpar.planner.place import Documents, layout_of
from seqpar.testing import dense_attention, run_processes, run_threads
from tests.cases import examples
from tests.ops.cases import EACH, HEADS, OUT, TOLERANCE, Options, check, options_strategy

MODEL = dataclasses.replace(ModelShape.preset("tiny"), windows=(None, 5))
BANDWIDTHS = (1e6, 1e9, 1e12)  # of links that are too slow to use where that can be helped, and that cost nothing


def machine(bandwidth: float) -> Hardware:
    """A machine on which the attention of a few tokens outweighs everything else."""
    h100 = Hardware.preset("h100")
    attention = AttentionCost(1e9, 1e9, piece=0.0, query_pairs=1.0, key_pairs=1.0, stage=1e-9)
    link = Link(0.0, bandwidth)
    return dataclasses.replace(h100, attention=attention, inside=link, across=link, memory=1 << 40)


def staged(plan: Plan, stage_bytes: int) -> Plan:
    """The same plan with smaller stages than a planner chooses."""
    return Plan(plan.mask, plan.layout, ulysses=plan.ulysses, node=plan.node, stage_bytes=stage_bytes)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any plan of the planner for few tokens."""
    ranks = draw(st.integers(1, 16))
    lengths = draw(st.lists(st.integers(1, 14), max_size=6)) + [draw(st.integers(1, 40))]
    kind = draw(st.sampled_from(["model's", "full", "window", "band"]))
    masks = {
        "model's": None,
        "full": Mask(lengths, causal=False),
        "window": Mask(lengths, window=(3, None)),
        "band": Mask(lengths, causal=False, window=(4, 2)),
    }[kind]
    node = draw(st.sampled_from([1, 2, 3, 4, 8, 16]))
    slack = draw(st.sampled_from([0.0, 0.5]))
    hardware = machine(draw(st.sampled_from(BANDWIDTHS)))
    plan = plan_batch(lengths, ranks, masks=masks, model=MODEL, hardware=hardware, node=node, token_slack=slack)
    if kind == "model's" and draw(st.booleans()):
        plan = plan.with_mask(Mask(lengths, window=(5, None)))
    return staged(plan, draw(st.sampled_from([1, 5 * 4096, 64 << 20])))


@examples(40)
@given(plans(), st.sampled_from(HEADS), st.sampled_from([(8, 8), (6, 4)]), options_strategy, st.integers(0, 1000))
def test_any_plan_of_the_planner_equals_one_device(plan, heads, dims, options, seed) -> None:
    check(plan, heads, dims, options, seed=seed)


def sample(seed: int, ranks: int | None = None) -> Plan:
    """A random plan of the planner with fetches of a row or a few at a time."""
    rng = np.random.default_rng(seed)
    ranks = int(rng.choice([2, 3, 4, 6, 8, 12, 16])) if ranks is None else ranks
    lengths = [*rng.integers(1, 15, int(rng.integers(2, 12))).tolist(), int(rng.integers(10, 50))]
    hardware = machine(float(rng.choice(BANDWIDTHS)))
    plan = plan_batch(lengths, ranks, model=MODEL, hardware=hardware, node=int(rng.choice([1, 2, 4, 8])))
    return staged(plan, int(rng.choice([1, 5 * 4096])))


@pytest.mark.parametrize("nest", [Nest(1, 2, 2, 3), Nest(2, 1, 0, 12)], ids=str)
def test_documents_that_nobody_cuts_equal_one_device(nest: Nest) -> None:
    lengths = np.array([41, 30, 22, 9, 17, 13, 5, 5, 3, 2])
    mask = Mask(lengths)
    batch = Documents(lengths, lengths * (lengths + 9), row=9, fetch=Fetching(0, 0, 0, 1))
    ((pieces, widths, _),) = nested(batch, 8, room=np.full(8, int(lengths.sum()) // 8 + 1), nests=[nest])
    plan = Plan(mask, layout_of(mask, pieces, 8), ulysses=widths.tolist())
    of_all = pieces.rank[widths[pieces.document] == 8]
    rows = np.bincount(of_all, pieces.count[widths[pieces.document] == 8], 8)
    assert rows.max() > rows.min() and {8, 4, 1} <= set(plan.widths.tolist())
    check(plan, (8, 2))
    check(plan, (6, 1), uses=OUT)


@pytest.mark.exhaustive
def test_plans_that_spread_cut_and_share_heads_equal_one_device() -> None:
    shares, several, spread, cut, whole, stages = (0 for _ in range(6))
    for seed in range(20):
        plan = sample(seed)
        heads = HEADS[seed % len(HEADS)]
        check(plan, heads, uses=(EACH, OUT)[seed % 2])
        check(plan.with_mask(Mask(plan.mask.lengths, window=(5, None))), heads, uses=OUT)
        widths = set(plan.widths.tolist())
        shares += any(heads[0] % width for width in widths)
        several += len(widths) > 1
        spread += bool((plan.degrees > 2).any())
        cut += bool((plan.degrees == 2).any())
        whole += bool((plan.degrees == 1).any())
        stages += max(len(plan.steps(rank)) for rank in range(plan.ranks)) > 3
    found = {"shares": shares, "several": several, "spread": spread, "cut": cut, "whole": whole, "stages": stages}
    assert min(found.values()) >= 3, found


RUNS = [
    pytest.param(functools.partial(run_processes, comm="gloo"), id="gloo"),
    pytest.param(
        functools.partial(run_processes, comm="shm"), id="shm",
        marks=pytest.mark.skipif(shm.missing() is not None, reason=shm.missing() or ""),
    ),
]  # fmt: skip


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.sampled(2)
def test_plans_over_processes_equal_one_device(run: Callable[..., Any]) -> None:
    widths, degrees = set(), set()
    for seed in range(12):
        plan = sample(100 + seed, ranks=4)
        check(plan, (7, 7), (8, 4), Options(sinks=True, softcap=2.0), run=run)
        widths |= set(plan.widths.tolist())
        degrees |= set(plan.degrees.tolist())
    assert widths >= {1, 2, 4} and degrees >= {1, 2, 4}


@functools.cache
def decoder() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "examples" / "decoder.py"
    spec = importlib.util.spec_from_file_location("decoder", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["decoder"] = module  # where dataclasses look for annotations
    spec.loader.exec_module(module)
    return module


def model_of(seed: int) -> torch.nn.Module:
    """A tiny decoder in float64 with the same weights in every thread and process."""
    d = decoder()
    sizes = {"dim": 16, "layers": 2, "heads": 6, "kv_heads": 2, "head_dim": 4, "hidden": 24}
    model = d.Decoder(d.Config(vocabulary=11, **sizes), torch.float64).double()
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=g) * 0.3)
    return model


def batch_of(lengths: list[int], seed: int) -> tuple[Tensor, Tensor]:
    """Tokens, and labels with -100 where a document ends."""
    tokens = torch.randint(0, 11, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    labels = tokens.roll(-1)
    labels[torch.tensor(lengths).cumsum(0) - 1] = -100
    return tokens, labels


def of_documents(x: Tensor, lengths: list[int], documents: np.ndarray) -> Tensor:
    parts = x.split(lengths)
    return torch.cat([parts[i] for i in documents])


def loss_of(
    model: torch.nn.Module, tokens: Tensor, positions: np.ndarray, labels: Tensor, attends: list[Callable[..., Tensor]]
) -> Tensor:
    """Summed cross-entropy; layer after layer attends in its own way."""
    calls = iter(attends)
    logits = model(tokens, torch.from_numpy(positions), lambda q, k, v: next(calls)(q, k, v))
    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")


def train_rank(comm: Comm, step: list[MicroBatch], lengths: list[int], seed: int) -> list[Tensor]:
    """One rank's share of the loss and of the gradients of a global batch."""
    model, (tokens, labels) = model_of(seed), batch_of(lengths, seed)
    total = torch.zeros((), dtype=torch.float64)
    for documents, plan in step:
        plans = [plan, plan.with_mask(Mask(plan.mask.lengths, window=(5, None)))]
        mine, wanted = (seqpar.shard(of_documents(x, lengths, documents), plan, comm.rank) for x in (tokens, labels))
        attends = [functools.partial(seqpar.attention, plan=p, comm=comm) for p in plans]
        loss = loss_of(model, mine, plan.rope_positions(comm.rank), wanted, attends) / sum(lengths)
        loss.backward()
        total += loss.detach()
    return [total, *(p.grad for p in model.parameters())]


def train_alone(lengths: list[int], seed: int) -> list[Tensor]:
    """The loss and the gradients of the whole batch on one device."""
    model, (tokens, labels) = model_of(seed), batch_of(lengths, seed)
    masks = [Mask(lengths), Mask(lengths, window=(5, None))]
    attends = [lambda q, k, v, m=m: dense_attention(q, k, v, m)[0] for m in masks]
    positions = np.concatenate([np.arange(n) for n in lengths])
    loss = loss_of(model, tokens, positions, labels, attends) / sum(lengths)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def check_training(step: list[MicroBatch], lengths: list[int], seed: int, run: Callable[..., Any]) -> None:
    ranks = step[0].plan.ranks
    shares = run(ranks, train_rank, step, lengths, seed)
    for share, expected in zip(zip(*shares, strict=True), train_alone(lengths, seed), strict=True):
        got = torch.stack(share).sum(0)
        assert bool(((got - expected).abs() <= TOLERANCE).all()), (lengths, ranks, float((got - expected).abs().max()))


def step_of(lengths: list[int], ranks: int, micro_batches: int, bandwidth: float = 1e9) -> list[MicroBatch]:
    count = min(micro_batches, len(lengths))
    return plan_step(lengths, ranks, model=MODEL, hardware=machine(bandwidth), micro_batches=count)


@examples(15)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 8), st.integers(1, 3),
    st.sampled_from(BANDWIDTHS), st.integers(0, 1000),
)  # fmt: skip
def test_losses_and_gradients_equal_one_process(lengths, ranks, micro_batches, bandwidth, seed) -> None:
    check_training(step_of(lengths, ranks, micro_batches, bandwidth), lengths, seed, run_threads)


@pytest.mark.parametrize("run", RUNS)
def test_losses_and_gradients_over_processes_equal_one_process(run: Callable[..., Any]) -> None:
    lengths = [33, 5, 12, 1, 24, 7]
    for micro_batches in (1, 2):
        step = step_of(lengths, 4, micro_batches)
        assert len(step) == micro_batches and max(int(m.plan.widths.max()) for m in step) > 1
        check_training(step, lengths, 7, run)
