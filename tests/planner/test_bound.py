"""No layout costs less than the bound: random ones, the usual ones, and every plan of the planner."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpar import Mask, Plan
from seqpar.plan.recurrence import RecurrentLayer
from seqpar.plan.runs import DocumentRuns
from seqpar.planner import Hardware, Link, ModelShape, plan_batch, plan_step
from seqpar.planner.bound import document_ticks, lower_bound
from seqpar.planner.carried import traffic_of
from seqpar.planner.cost import Weights, counted, ticks, trades
from seqpar.planner.problem import layers_of
from tests.cases import LAYOUTS, divisors, examples, make_layout

FREE = Link(latency=0.0, bandwidth=1e30)
H100 = dataclasses.replace(Hardware.preset("h100"), memory=1 << 50)
MACHINES = {
    "h100": H100,
    "free links": dataclasses.replace(H100, inside=FREE, across=FREE),
    "cpu": dataclasses.replace(Hardware.preset("cpu"), memory=1 << 50),
    "rows cost nothing": dataclasses.replace(Hardware.preset("a100-flexsp"), memory=1 << 50, inside=FREE, across=FREE),
}
LLAMA = dataclasses.replace(ModelShape.preset("llama-8b"), layers=2)
DELTA = RecurrentLayer.gated_delta(4096, heads=32, groups=16, key_dim=128, value_dim=128, taps=4)
MODELS = {
    "llama": LLAMA,
    "windows": dataclasses.replace(LLAMA, layers=3, windows=(5, None), recompute="full"),
    "odd heads": dataclasses.replace(LLAMA, heads=7, kv_heads=1, dim=64, hidden=448, recompute="attention"),
    "hybrid": dataclasses.replace(LLAMA, recurrent=DELTA, recurrent_layers=1, layers=3),
    "no attention": dataclasses.replace(LLAMA, recurrent=DELTA, recurrent_layers=2, recompute="attention"),
    "attention only": dataclasses.replace(LLAMA, hidden=1, ffn=1, vocab=1, dtype="float32"),
}


def slowest(seed: int) -> tuple[int, int, str]:
    """The bound and the ticks of the slowest rank of a random layout of a random batch, and what it is."""
    rng = np.random.default_rng(seed)
    ranks = int(rng.choice([1, 2, 3, 4, 6, 8, 12, 16]))
    model, machine = (str(rng.choice(sorted(names))) for names in (MODELS, MACHINES))
    kind = str(rng.choice(LAYOUTS))
    # what is counted of single tokens grows with the square of a document
    longest = [2, 40] if kind in ("striped", "blocks", "arbitrary") else [2, 40, 3000]
    lengths = rng.integers(1, int(rng.choice(longest)) + 1, int(rng.integers(1, 20)))
    masks = None
    if rng.random() < 0.4:
        masks = [
            Mask(lengths, causal=False),
            Mask(lengths, window=(3, None), sink_tokens=2),
            Mask.shared_prefix([(int(n - n // 2), [int(n // 2 - n // 4), int(n // 4)]) for n in lengths]),
        ][rng.integers(3)]
    layers = layers_of(lengths, masks, MODELS[model])
    layout = make_layout(kind, lengths.tolist(), ranks, rng)
    w = Weights.of(MODELS[model], MACHINES[machine])
    # a plan's widths, so that documents of one rank keep width 1
    widths = Plan(layers[0][0], layout, ulysses=rng.choice(divisors(ranks), len(lengths)).tolist()).widths
    if rng.random() < 0.3:
        widths = np.full(len(lengths), rng.choice(divisors(ranks)))
    node, forwarded = int(rng.choice(divisors(ranks))), bool(rng.random() < 0.5)
    found = counted(layers, layout, widths=widths, node=node, forwarded=forwarded)
    t = ticks(found, w, stage_bytes=int(rng.choice([1, 1 << 16, 64 << 20])))
    if w.recurrent is not None:
        runs = DocumentRuns.of(Plan(layers[0][0], layout).residence)
        computed, waited = w.recurrent.ticks(layout.sizes(), traffic_of(runs, w.recurrent.layer, node=node))
        t = t._replace(recurrent=computed, exposed=t.exposed + waited)
    what = f"seed {seed}: {kind}, {ranks} ranks, {lengths.tolist()}, widths {widths.tolist()}, {model} on {machine}"
    return lower_bound(layers, w, ranks), int(t.total.max()), what


@pytest.mark.parametrize("block", range(10))
@pytest.mark.sampled(9)
def test_no_layout_of_a_thousand_costs_less(block: int) -> None:
    close = 0
    for seed in range(100 * block, 100 * block + 100):
        bound, cost, what = slowest(seed)
        assert 0 < bound <= cost, what
        close += cost < 1.1 * bound
    assert close, "some layouts must be near the bound, or this shows nothing"


@given(st.integers(1000, 1 << 30))
def test_no_layout_costs_less(seed: int) -> None:
    bound, cost, what = slowest(seed)
    assert 0 < bound <= cost, what


LENGTHS = st.one_of(
    st.lists(st.integers(1, 3000), min_size=1, max_size=30),
    st.lists(st.sampled_from([1, 2, 64, 5000, 60000]), min_size=1, max_size=12),
)


@examples(30)
@given(
    LENGTHS, st.sampled_from([1, 2, 3, 6, 8, 16, 24]), st.sampled_from(sorted(MODELS)),
    st.sampled_from(sorted(MACHINES)), st.sampled_from([0.0, 0.1, 1.0]),
)  # fmt: skip
def test_no_plan_costs_less(lengths, ranks, model, machine, slack) -> None:
    plan = plan_batch(lengths, ranks, model=MODELS[model], hardware=MACHINES[machine], token_slack=slack)
    layers = layers_of(plan.mask.lengths, None, MODELS[model])
    bound = lower_bound(layers, Weights.of(MODELS[model], MACHINES[machine]), ranks)
    assert bound == plan.forecast.bound and plan.forecast.gap >= 0
    parts = plan_step(
        lengths, ranks, model=MODELS[model], hardware=MACHINES[machine], micro_batches=min(3, len(lengths))
    )
    assert all(m.plan.forecast.gap >= 0 for m in parts)


def test_one_rank_reaches_the_bound() -> None:
    lengths = np.array([5, 700, 33])
    for model in MODELS.values():
        layers, w = layers_of(lengths, None, model), Weights.of(model, H100)
        plan = plan_batch(lengths, 1, model=model, hardware=H100)
        assert plan.forecast.ticks.total.max() == plan.forecast.bound == lower_bound(layers, w, 1)
        starts = (w.forward.stage + w.backward.stage) * model.attention_count
        assert document_ticks(layers, w).sum() == plan.forecast.bound - starts


def test_a_group_without_tokens_waits_for_no_trade() -> None:
    found = trades(np.array([0, 1]), Weights.of(LLAMA, H100), 2)
    assert (found[..., 0] == 0).all() and (found[..., 1] > 0).all()
