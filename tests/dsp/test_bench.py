"""The rehearsal of bench/dsp/step.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


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
