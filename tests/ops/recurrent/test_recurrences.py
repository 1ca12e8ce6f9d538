"""`linear_attention` and `channel_scan` beside their definitions on one device, by every way of travel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import seqpar
from seqpar import recurrent
from seqpar.comm import Comm, LocalComm
from seqpar.facts.mask import Mask
from seqpar.ops.recurrent.rows import document_runs
from seqpar.plan import Plan
from seqpar.plan.travel import layer_way, state_bytes
from seqpar.plan.travel_report import exchanges
from seqpar.testing import COMMS, run_processes, run_threads
from tests.cases import LAYOUTS, examples
from tests.ops.recurrent.cases import (
    FAMILIES,
    SCANS,
    WAYS,
    Family,
    Recurrence,
    Scan,
    agrees,
    blocks,
    on_a_rank,
    plan_of,
    plans,
    poisoned,
    put,
)  # fmt: skip

CASES = {f"{decay}{'-delta' * beta}": Family(decay, beta, initial=True) for decay, beta in FAMILIES}
CASES |= {name: SCANS[name] for name in ("selective", "alone")}
every_case = pytest.mark.parametrize("name", CASES)
every_way = pytest.mark.parametrize("travel", WAYS)


@every_case
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("travel", ["auto", *WAYS])
@pytest.mark.sampled(9)
def test_every_way_under_layouts(name, layout, travel) -> None:
    with blocks(2 if layout == "zigzag" else 4):
        agrees(plan_of(layout, (1, 9, 2, 17), 3), CASES[name], travel=travel)


families = st.builds(
    lambda family, initial, strength, heads: Family(*family, initial, strength, *heads),
    st.sampled_from(FAMILIES), st.booleans(), st.sampled_from([0.0, 0.3, 80.0]),
    st.sampled_from([(1, 1), (1, 3), (1, 4), (2, 4), (3, 3), (2, 8)]),
)  # fmt: skip
scans = st.builds(
    replace, st.sampled_from(list(SCANS.values())), strength=st.sampled_from([0.0, 0.3, 80.0]),
    channels=st.integers(1, 4), dims=st.integers(1, 3),
)  # fmt: skip


@pytest.mark.parametrize("cases", [families, scans], ids=["families", "scans"])
@examples(100)
@given(plans(), st.data(), st.sampled_from(["auto", *WAYS]), st.sampled_from([1, 2, 3, 8]), st.integers(0, 9))
def test_ranks_compute_what_one_device_does(cases, plan, data, travel, most, seed) -> None:
    kernel = data.draw(st.sampled_from(["auto", "chunked" if cases is families else "steps", "reference"]))
    with blocks(most):
        agrees(plan, data.draw(cases), seed=seed, travel=travel, kernel=kernel)


@pytest.mark.parametrize("cut", range(13))
def test_three_documents_cut_at_every_place(cut) -> None:
    ranks = (2, 3)[cut % 2]
    shards = [np.zeros(0, int)] * ranks
    shards[0], shards[-1] = np.arange(cut), np.arange(cut, 12)
    for n, case in enumerate(CASES.values()):
        with blocks(4):
            agrees(Plan(Mask((5, 3, 4)), seqpar.Layout(shards)), case, travel=WAYS[(cut + n) % 4])


@pytest.mark.exhaustive
@every_case
@pytest.mark.parametrize("travel", ["auto", *WAYS])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
def test_three_documents_cut_at_every_two_places(name, travel, ranks) -> None:
    for cut in range(13):
        for other in (cut, 12):
            shards = [np.zeros(0, int)] * ranks
            shards[0], shards[-1] = np.arange(cut), np.arange(cut, other)
            shards[ranks // 2] = np.concatenate([shards[ranks // 2], np.arange(other, 12)])
            shards = shards if ranks > 1 else [np.arange(12)]
            with blocks(4):
                agrees(Plan(Mask((5, 3, 4)), seqpar.Layout(shards)), CASES[name], travel=travel)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [*(Family(*f, dim=16, values=16, groups=1, heads=1, unit=True) for f in FAMILIES),
                                  Scan(SCANS["selective"].given, dims=16)], ids=str)  # fmt: skip
def test_a_long_document(case) -> None:
    agrees(plan_of("contiguous", (65_536,), 4), case)


@pytest.mark.parametrize(
    "case", [Family("scalar", beta=True, unit=True), Family("channel"), SCANS["selective"]], ids=str
)
@every_way
@pytest.mark.sampled(2)
def test_documents_of_several_chunks_and_groups(case, travel, monkeypatch) -> None:
    monkeypatch.setitem(seqpar.kernels.recurrent.steps.AT_ONCE, "cpu", 1000)
    with blocks(2):
        agrees(plan_of("blocks" if travel == "pipeline" else "zigzag", (150, 70, 300), 2), case, travel=travel)


@every_way
@pytest.mark.parametrize("name", ["scalar-delta", "selective"])
def test_late_messages(name, travel) -> None:
    with blocks(4):
        agrees(plan_of("zigzag", (9, 14), 3), CASES[name], partial(run_threads, delay=0.002), travel=travel)


@pytest.mark.parametrize("name", ["scalar-delta", "selective"])
@pytest.mark.parametrize("travel", ["auto", *WAYS])
@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.sampled(2)
def test_over_processes(name, travel, comm) -> None:
    agrees(plan_of("zigzag", (9, 20, 3), 3), CASES[name], partial(run_processes, comm=comm), travel=travel)


def repeated(comm: Comm, plan: Plan, case: Recurrence, travel: str) -> list[list[Tensor]]:
    """Output and gradients of a plain call, under both kinds of checkpoint, and of the op that graphs call."""
    found = []
    for kind in ("plain", "checkpoint", "reentrant", *["op"] * isinstance(case, Family)):
        inputs = case.inputs(plan.mask)
        mine = [poisoned(x, plan, comm.rank) for x in inputs[: case.rows]] + inputs[case.rows :]
        layer: Callable[..., Tensor] = lambda *x: case.call([*x], plan, comm, travel=travel)  # noqa: E731
        if kind == "op":
            given = [x is not None and x.requires_grad for x in mine]
            named = [seqpar.bind(plan, comm)], None, False, "auto", travel, False, given
            out = torch.ops.seqpar.linear_attention(*mine, *named)[0]
        else:
            out = layer(*mine) if kind == "plain" else checkpoint(layer, *mine, use_reentrant=kind == "reentrant")
        out.square().sum().backward()
        found.append([out.detach(), *(x.grad for x in mine[: case.rows] if x is not None)])
    return found


@every_way
@pytest.mark.parametrize("case", [Family(beta=True), Scan()], ids=["family", "scan"])
def test_checkpoints_and_graphs_take_every_way(case, travel) -> None:
    with blocks(4):
        for plain, *others in run_threads(2, repeated, plan_of("blocks", (9, 7), 2), case, travel):
            for other in others:
                assert all(torch.equal(x, y) for x, y in zip(plain, other, strict=True))


def ones(case: Recurrence, mask: Mask) -> list[Tensor]:
    """Gradients of output and final states."""
    return [torch.ones_like(x) for x in case.definition(case.inputs(mask), mask)]


def test_documents_that_no_two_ranks_share_move_nothing() -> None:
    plan = Plan(Mask((9, 9, 5, 5)), seqpar.Layout([np.arange(18), np.arange(18, 28)]))
    for case in (Family("channel", beta=True), SCANS["selective"]):
        for *_, counts in run_threads(2, on_a_rank, plan, case, 0, torch.float64, ones(case, plan.mask), {}):
            assert counts == [(0, 0, 0)] * 2


@every_case
@every_way
@pytest.mark.parametrize("value", [3.0, torch.nan])
@pytest.mark.sampled(6)
def test_a_document_changes_no_bit_of_another(name, travel, value) -> None:
    plan, case, inside, runs = plan_of("blocks", (5, 6, 7), 2), CASES[name], torch.arange(5, 11), []
    for changed in (False, True):

        class Changed(type(case)):  # type: ignore[misc]
            def inputs(self, *arguments: Any, changed: bool = changed) -> list[Tensor | None]:
                tensors = super().inputs(*arguments)
                for n, x in enumerate(tensors[: self.rows] if changed else ()):
                    if x is not None:  # decays are at most 0, and of a scan with rates at least
                        x[7] = -value if n == 3 and name != "selective" else value
                return tensors

        own = Changed(**{f.name: getattr(case, f.name) for f in fields(case)})
        results = run_threads(2, on_a_rank, plan, own, 0, torch.float64, ones(case, plan.mask), {"travel": travel})
        parts = [torch.zeros_like(x) for x in (ones(case, plan.mask)[0], case.inputs(plan.mask)[2])]
        for rank, (out, _, grads, _) in enumerate(results):
            for total, part in zip(parts, (out, grads[2]), strict=True):
                put(total, part, plan, rank)
        runs.append(parts)
    for before, after in zip(*runs, strict=True):
        same = (before == after).flatten(1).all(1)
        same[inside] = True
        assert same.all()
    assert not torch.equal(runs[0][0][inside], runs[1][0][inside])


@examples(60)
@given(plans(), st.sampled_from(["auto", *WAYS]), st.sampled_from([1, 2, 4]), families | scans)
def test_bytes_and_exchanges_are_what_is_predicted(plan, travel, most, case) -> None:
    layer, runs = case.layer().bytes("float64", gates="float64", device="cpu"), document_runs(plan)
    weights = ones(case, plan.mask)
    with blocks(most):
        way = layer_way(runs, layer, travel)
        expected, taken = state_bytes(runs, layer, way), exchanges(runs, way)
        results = run_threads(plan.ranks, on_a_rank, plan, case, 0, torch.float64, weights, {"travel": travel})
    for rank, (*_, ((sent, received, times), (sent_back, received_back, _))) in enumerate(results):
        assert (sent, received) == (expected.sent[rank], expected.received[rank])
        assert isinstance(case, Scan) or (sent, received) == (received_back, sent_back)
        assert travel == "rows" or times <= taken[rank] <= way.steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_fewer_bits_are_summed_in_fp32(dtype) -> None:
    plan, case = plan_of("zigzag", (40, 90, 30), 3), SCANS["selective"]
    agrees(plan, case, dtype=dtype, tolerance=1e-5 if dtype is torch.float32 else 2e-2)


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
