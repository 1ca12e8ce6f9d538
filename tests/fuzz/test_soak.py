"""The soak of bench/cpu/soak.py, for a few seconds: it runs every verb and nothing that it counts grows."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.exhaustive
def test_a_few_seconds_of_every_verb_leave_nothing_behind(tmp_path):
    path = tmp_path / "soak.json"
    command = [sys.executable, "-m", "bench.cpu.soak", "--rehearse", "--ranks", "2", "--json", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = json.loads(path.read_text())["ranks"]
    assert len(ranks) == 2 and all(count for count in ranks[0]["ran"].values())
