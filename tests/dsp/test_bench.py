"""bench/dsp/step.py: its rehearsal, and what its methods count under one model."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import seqpar
from bench.lib.watched import Watched
from seqpar.comm import Comm, Tag
from seqpar.dsp import rivals
from seqpar.dsp.space import shares
from seqpar.planner import Link
from seqpar.testing import run_threads
from tests.dsp.models import FREE


@pytest.fixture(scope="module")
def bench() -> Any:
    """Modules of bench by name."""
    return import_module


@pytest.fixture(scope="module")
def methods(bench: Any) -> Any:
    return bench("bench.dsp.methods")


@pytest.mark.parametrize("ranks, p, q", [(2, 4, 6), (4, 5, 7), (8, 3, 9)])
@pytest.mark.sampled(3)
def test_dsp_sends_half_of_ulysses_or_less_and_the_bytes_of_the_formula(methods, ranks, p, q, monkeypatch) -> None:
    """A stage always on what it does not mix, which a planner might not choose where sending is cheap."""

    def ways(model, dims, ranks, hardware, element):
        return rivals(model.stages(dims, element), dims, ranks, hardware=hardware)

    monkeypatch.setattr(methods, "ways", ways)
    model = methods.Model("video", 16, 8, 2, ("q", "p"), ffn=1)
    dims = {"b": 1, "p": p, "q": q}
    kinds = ("dsp", "ulysses", "ring", "megatron")
    found = run_threads(ranks, methods.measured, model, dims, FREE, 1, kinds)
    rows = methods.slowest(found)
    assert rows["dsp"]["layouts"] == "p:local q:local p:local q:local"
    assert rows["dsp"]["exchanges"] == 6  # three between four stages, there and back
    sent = {name: sum(row[name]["bytes"] for row in found) for name in kinds}
    assert 2 * sent["dsp"] <= sent["ulysses"] <= sent["megatron"]
    for rank, row in enumerate(found):
        a, b = shares(p, ranks)[rank], shares(q, ranks)[rank]
        there, back = a * (q - b), b * (p - a)
        assert row["dsp"]["bytes"] == 3 * (there + back) * 16 * 4
    for name in kinds:
        assert rows[name]["loss"] == pytest.approx(rows["dsp"]["loss"], rel=1e-4, abs=1e-3)


@pytest.mark.parametrize("ranks", [2, 4])
def test_grouped_heads_are_the_same_model_and_their_bytes_are_counted(methods, ranks, monkeypatch) -> None:
    def ways(model, dims, ranks, hardware, element):
        return rivals(model.stages(dims, element), dims, ranks, hardware=hardware)

    monkeypatch.setattr(methods, "ways", ways)
    model = methods.Model("video", 16, 8, 1, ("q", "p"), groups=4)
    found = run_threads(ranks, methods.measured, model, {"b": 1, "p": 4, "q": 6}, FREE, 1, methods.METHODS)
    rows = methods.slowest(found)
    assert rows.keys() == set(methods.METHODS)
    for name, row in rows.items():
        assert row["loss"] == pytest.approx(rows["replicate"]["loss"], rel=1e-4, abs=1e-3), name
    assert 0 < rows["dsp"]["bytes"] < rows["ulysses"]["bytes"]


def test_clips_are_made_smaller_and_their_text_with_them(bench) -> None:
    clip = bench("bench.dsp.latte").Clip("a clip", 60, 90, 160).fitted(16384)
    assert (clip.height, clip.width, clip.shrunk, clip.space, clip.text) == (22, 40, 4, 220, 8)


def switched(comm: Comm, latte: Any, link: Link) -> tuple[torch.Tensor, float, float]:
    meter = latte.Meter()
    metered = Watched(comm, latte.Metered(meter, latte.Wire(link))).sub(range(comm.size))
    started = time.perf_counter()
    y = seqpar.switch(torch.full((2, 1), float(comm.rank)), metered, split_dim=0, concat_dim=1)
    return y, time.perf_counter() - started, meter.seconds


def test_a_comm_is_held_back_to_a_link_and_its_seconds_are_counted(bench) -> None:
    for y, took, counted in run_threads(2, switched, bench("bench.dsp.latte"), Link(0.05, 1e9)):
        assert y.tolist() == [[0.0, 1.0]]
        assert took >= 0.049  # never sooner, however busy the machine is
        assert 0 < counted <= took


def two(comm: Comm, latte: Any, link: Link) -> float:
    """Seconds of two exchanges that are under way at once."""
    metered = Watched(comm, latte.Metered(latte.Meter(), latte.Wire(link)))
    started = time.perf_counter()
    xs = [torch.zeros(4) for _ in range(4)]
    tags = [Tag(0, metered.next_call(), 0, 0) for _ in range(2)]
    works = [
        metered.exchange({1 - comm.rank: [send]}, {1 - comm.rank: [receive]}, tag=tag)
        for tag, send, receive in zip(tags, xs[:2], xs[2:], strict=True)
    ]
    for work in works:
        work.wait()
    return time.perf_counter() - started


def test_a_link_carries_one_exchange_after_another(bench) -> None:
    for took in run_threads(2, two, bench("bench.dsp.latte"), Link(0.05, 1e9)):
        assert took >= 0.098  # never sooner, however busy the machine is


def cell(share: float, ratio: float, layouts: str = "t:local s:local", frames: int = 5) -> dict[str, Any]:
    figures = {"share": share, "ratio": ratio, "ratio_low": 0.8 * ratio, "ratio_high": 1.2 * ratio, "by_bytes": 1.0}
    same = layouts == "s:ulysses s:local"
    where = {"clip": "a", "batch": 1, "frames": frames, "ranks": 4, "over": "b"}
    return where | {"same": same, "planned": {"layouts": layouts}} | figures


@pytest.mark.parametrize(
    "row, holds",
    [
        (cell(0.1, 1.0), True), (cell(0.1, 0.9), True), (cell(0.1, 0.82), False),
        (cell(0.1, 0.83), True),
        (cell(0.5, 1.31), True), (cell(0.5, 1.29), False), (cell(0.5, 1.0, "s:ulysses s:local"), True),
        (cell(0.5, 1.1, "4x2, s held: t:ulysses s:local"), True), (cell(0.5, 0.7, "s:ring s:local"), False),
        (cell(0.5, 1.1, "s:ulysses s:local t:local", frames=7), False),
        (cell(0.5, 1.1, "4x2, b held: t:local s:local"), False), (cell(0.5, 1.1, "whole:copies s:local"), False),
    ],
)  # fmt: skip
def test_the_promise_is_judged_cell_by_cell(bench, row, holds) -> None:
    found = bench("bench.dsp.grid").verdict([row, cell(0.0, 2.0)])
    assert found["holds"] == holds
    assert (found["slower"] + found["below"] == []) == holds
    shares = any(mode in row["planned"]["layouts"] for mode in ("ulysses", "ring"))
    assert len(found["sharing"]) == (shares and row["frames"] == 5)


def test_a_figure_is_a_median_or_of_all_turns(bench) -> None:
    middle = bench("bench.dsp.grid").middle
    assert middle([3.0, 1.0, 2.0], grouped=False) == (2.0, 1.0, 3.0)
    assert middle([3.0, 1.0, 2.0, 5.0, 6.0], grouped=True) == (3.0, 1.0, 6.0)


@pytest.mark.exhaustive
def test_its_rehearsal(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    command = [sys.executable, "-m", "bench.dsp.step", "--quick", "--repeat", "1", "--json", tmp_path / "dsp.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads((tmp_path / "dsp.json").read_text())
    assert data.keys() >= {"machine", "versions", "commit", "measured", "simulated", "planning_ms", "latte", "verdict"}
    for row in data["simulated"]:
        assert row["seconds"]["dsp"] <= min(row["seconds"].values())
    assert {(row["ranks"], row["over"]) for row in data["latte"]} == {
        (2, "shm"), (2, "gloo"), (2, "slow"), (4, "shm, composed"), (4, "slow, composed"),
    }  # fmt: skip
    for row in data["latte"]:
        assert row["ulysses"]["layouts"] == "s:ulysses s:local s:ulysses s:local"
        assert row["planned"]["loss"] == pytest.approx(row["ulysses"]["loss"], rel=1e-4)
        assert row["ulysses"]["bytes"] > 0
