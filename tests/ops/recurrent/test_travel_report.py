"""What `recurrent.describe` and `recurrent.plot` say of a plan is what ranks send."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import seqpar
from seqpar import recurrent
from seqpar.comm import Comm
from seqpar.ops.recurrent.rows import document_runs
from seqpar.plan import Plan
from seqpar.plan.travel import layer_way
from seqpar.plan.travel_report import between, exchanges
from seqpar.testing import run_threads
from tests.cases import examples
from tests.ops.recurrent.cases import Family, plan_of, plans, poisoned

CASE = Family("scalar", beta=True)
LAYER = recurrent.RecurrentLayer(CASE.heads, CASE.dim, CASE.values, CASE.groups, delta=True, taps=3)
BYTES, WIDE = LAYER.bytes("float64", gates="float64"), {"dtype": "float64", "gates": "float64"}


def counted(comm: Comm, plan: Plan, travel: str) -> tuple[int, dict[int, int], int, int]:
    """Exchanges and bytes by peer of the recurrence; bytes with the convolution before it."""
    rows = [poisoned(x, plan, comm.rank) for x in CASE.inputs(plan.mask)[:5]]
    with torch.no_grad():
        recurrent.linear_attention(*rows[:3], plan, comm, decay=rows[3], beta=rows[4], travel=travel)
        alone = comm.stats.exchanges, dict(comm.stats.sent_to)
        channels = LAYER.channels
        mixed = torch.zeros(plan.rows(comm.rank), channels, dtype=torch.float64)
        recurrent.causal_conv1d(mixed, torch.zeros(channels, 3).double(), None, plan, comm)
    return *alone, comm.stats.bytes_sent, comm.stats.bytes_received


@examples(30)
@given(plans(), st.sampled_from(["auto", "gather", "chain", "pipeline", "rows"]))
def test_lines_of_ranks_are_what_they_send(plan, travel) -> None:
    runs, text = document_runs(plan), recurrent.describe(plan, LAYER, **WIDE, travel=travel)
    header, *lines = [line.split() for line in text.replace(",", "").splitlines()[-plan.ranks - 1 :]]
    assert header[:3] == ["rank", "runs", "exchanges"] and len(lines) == plan.ranks
    way = layer_way(runs, BYTES, travel)
    moved, taken = between(runs, BYTES, way), exchanges(runs, way)
    for rank, (count, sent_to, sent, received) in enumerate(run_threads(plan.ranks, counted, plan, travel)):
        assert taken[rank] == count
        assert {peer: size for peer, size in enumerate(moved[:, rank].tolist()) if size} == sent_to
        number, own, steps, *_, out, into = map(int, lines[rank])
        assert (number, own, steps) == (rank, recurrent.runs(plan, rank).counts.size, count)
        assert (out, into) == (sent, received)


WIDE_LAYER, MASK = recurrent.RecurrentLayer(32, 128, 128, taps=4), seqpar.Mask([1 << 13, 1 << 12])
TEXTS = [
    (Plan(MASK, seqpar.Layout.striped(3 << 12, 4)), WIDE_LAYER, "auto", "between them chain in 2 blocks; 5 exchanges"),
    (Plan(MASK, seqpar.Layout.contiguous(3 << 12, 4)), WIDE_LAYER, "chain", "convolution of 4 taps: halo; 1 exchange "),
    (Plan(seqpar.Mask([6, 3]), seqpar.Layout([np.arange(6), np.arange(6, 9)])), LAYER, "auto", "nothing is sent"),
    (Plan(seqpar.Mask([1]), seqpar.Layout.contiguous(1, 1)), LAYER, "auto", "1 document of 1 token on 1 rank"),
    (Plan(seqpar.Mask([1 << 12]), seqpar.Layout.zigzag([1 << 12], 100)), LAYER, "auto", "median"),
]


@pytest.mark.parametrize(("plan", "layer", "travel", "told"), TEXTS, ids=[told for *_, told in TEXTS])
def test_the_text_of_a_plan(plan, layer, travel, told) -> None:
    text = recurrent.describe(plan, layer, travel=travel)
    assert told in text and len(text.splitlines()) <= 15
    alone = recurrent.describe(plan, recurrent.RecurrentLayer.short_convolution(8, taps=3))
    assert "states:" not in alone and "convolution of 3 taps" in alone
    assert "convolution" not in recurrent.describe(plan, recurrent.RecurrentLayer(4, 8, 8))


@pytest.mark.parametrize("travel", ["halo", "pigeon", None, 3])
def test_an_unknown_travel_is_the_verbs_error(travel, tmp_path) -> None:
    plan = plan_of("zigzag", (40, 9, 30), 3)
    error = rf"travel must be one of auto, gather, chain, pipeline, rows, got {travel!r}"
    with pytest.raises(ValueError, match=f"describe: {error}"):
        recurrent.describe(plan, LAYER, travel=travel)
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match=f"plot: {error}"):
        recurrent.plot(plan, LAYER, tmp_path / "x.png", travel=travel)


@pytest.mark.exhaustive
def test_the_picture(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    for layout, travel in (("zigzag", "chain"), ("zigzag", "pipeline"), ("striped", "gather"), ("striped", "rows")):
        path = tmp_path / "new" / f"{layout}-{travel}.png"
        recurrent.plot(plan_of(layout, (40, 9, 30), 3), LAYER, path, travel=travel)
        assert path.stat().st_size > 5000
    many = Plan(seqpar.Mask([5000]), seqpar.Layout.striped(5000, 2))
    recurrent.plot(many, LAYER, tmp_path / "many.svg", travel="gather")
    with pytest.raises(ValueError, match="at most 64 ranks are drawn"):
        recurrent.plot(Plan(seqpar.Mask([100]), seqpar.Layout.contiguous(100, 65)), LAYER, tmp_path / "x.png")
    with pytest.raises(ValueError, match="is not a picture format"):
        recurrent.plot(many, LAYER, tmp_path / "x.nonsense")


def test_what_is_no_plan_or_no_layer_is_named(tmp_path) -> None:
    plan = plan_of("zigzag", (40, 9, 30), 3)
    for other in (None, "x", plan.mask):
        with pytest.raises(TypeError, match="describe: expected a Plan, got"):
            recurrent.describe(other, LAYER)
        with pytest.raises(TypeError, match="plot: expected a RecurrentLayer, got"):
            recurrent.plot(plan, other, tmp_path / "x.png")
