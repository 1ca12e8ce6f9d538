"""`bench/cpu/sequence.py`: its search, its budget, and a rehearsal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINUX = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is read from /proc")


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    from bench.cpu import sequence

    return sequence


@pytest.mark.parametrize(
    ("base", "slope", "curve"), [(0, 1000, 0), (10**6, 700, 0), (10**7, 3, 0), (0, 1, 1), (9 * 10**7, 100, 0.01)]
)
def test_the_longest_that_fits_is_found_in_few_steps(bench: ModuleType, base: int, slope: int, curve: float) -> None:
    memory, granule = 10**8, 256
    tried = []

    def peak(tokens: int) -> int:
        tried.append(tokens)
        return int(base + slope * tokens + curve * tokens**2)

    found = bench.longest(peak, memory, granule)
    assert found % granule == 0 and peak(found) <= memory < peak(found + granule)
    assert len(tried) <= 20, tried


def test_nothing_fits_and_no_time(bench: ModuleType) -> None:
    assert bench.longest(lambda _: 11, 10, 256) == 0
    assert bench.longest(lambda tokens: tokens if tokens < 1000 else None, 10**6, 256) is None


def test_a_budget_leaves_out_what_would_end_too_late(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def run(tokens: int, ranks: int) -> object:
        now[0] += tokens**2
        return bench.Row(tokens, ranks, tokens**2, tokens**2, 0, 0.0)

    monkeypatch.setattr(bench, "run", run)
    monkeypatch.setattr(bench, "time", SimpleNamespace(monotonic=lambda: now[0]))
    budget = bench.Budget(100.0)
    assert [budget.run(tokens, 1) is not None for tokens in (2, 4, 8, 16, 3)] == [True, True, True, False, True]
    now[0] = 101.0
    assert budget.run(1, 2) is None


@LINUX
@pytest.mark.exhaustive
def test_a_rehearsal(tmp_path: Path) -> None:
    path = tmp_path / "sequence.json"
    flags = "--lengths 64 128 --tokens 64 --ranks 1 2 --memory 1000000 --granule 64 --budget 0 --json"
    done = subprocess.run(
        [sys.executable, "-m", "bench.cpu.sequence", *flags.split(), path],
        capture_output=True, text=True, timeout=600, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "no time" in done.stdout
    found = json.loads(path.read_text())
    assert found.keys() >= {"machine", "versions", "commit", "model", "memory_mib"}
    first, second = found["growing"]
    assert first["sharded"] == first["whole"] and first["sharded"]["peak_bytes"] > 0
    assert second["tokens"] == 128 and second["ranks"] == 2
    assert [row["ranks"] for row in found["fitting"]] == [1, 2]
