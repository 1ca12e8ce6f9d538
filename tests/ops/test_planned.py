"""Attention under the planner's plans equals one device.

The machines are made up, so that batches of a few dozen tokens are planned as ones of thousands are: documents are
spread and cut, and share heads in several widths.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpar import Hardware, Mask, ModelShape, Plan, plan_batch
from seqpar.comm import shm
from seqpar.planner import AttentionCost, Link
from seqpar.planner.groups import Fetching
from seqpar.planner.nested import Nest, nested
from seqpar.planner.place import Documents, layout_of
from seqpar.testing import run_processes
from tests.cases import examples
from tests.ops.cases import EACH, HEADS, OUT, Options, check, options_strategy

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
