"""bench/dsp.py: its rehearsal, and what its methods count under one model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from seqpar.dsp import rivals
from seqpar.dsp.space import shares
from seqpar.testing import run_threads
from tests.dsp.models import FREE

BENCH = Path(__file__).resolve().parent.parent.parent / "bench"


@pytest.fixture(scope="module")
def methods() -> Iterator[Any]:
    """The module of bench."""
    sys.path.insert(0, str(BENCH))
    yield import_module("dsp_methods")
    sys.path.remove(str(BENCH))


@pytest.mark.parametrize("ranks, p, q", [(2, 4, 6), (4, 5, 7), (8, 3, 9)])
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


def test_its_rehearsal(tmp_path: Path) -> None:
    command = [sys.executable, BENCH / "dsp.py", "--quick", "--repeat", "1", "--json", tmp_path / "dsp.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads((tmp_path / "dsp.json").read_text())
    assert data.keys() >= {"machine", "versions", "commit", "measured", "simulated", "planning_ms"}
    for row in data["simulated"]:
        assert row["seconds"]["dsp"] <= min(row["seconds"].values())
