"""bench/dsp/step.py: its rehearsal, and what its methods count under one model."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from seqpar.dsp import rivals
from seqpar.dsp.space import shares
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
