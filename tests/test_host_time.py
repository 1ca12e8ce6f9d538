"""`bench/host_time.py` and the files that measurements write."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bench import host_time
from bench.lib import records


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_a_ratio_is_found_within_its_interval(factor: float) -> None:
    rng = np.random.default_rng(0)
    old = rng.normal(10.0, 0.3, 24)
    middle, low, high = host_time.ratio(old.tolist(), (old * factor * rng.normal(1.0, 0.02, 24)).tolist())
    assert low < factor < high and middle == pytest.approx(factor, abs=0.02)
    assert (low > host_time.BEGINS) == (factor == 1.1)


def test_a_block_has_the_milliseconds_of_the_cpu_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [7.0]
    monkeypatch.setattr(host_time, "time", SimpleNamespace(process_time=lambda: now[0]))  # no other clock is read

    def busy() -> None:
        now[0] += 2e-3

    assert host_time.blocks(busy, calls=2, count=3) == pytest.approx([2.0] * 3)


def test_every_record_of_a_list_has_a_line_of_its_own(tmp_path: Path) -> None:
    rows = [{"case": f"case {n}", "seconds": [0.1] * 30, "of": {"machine": "x"}} for n in range(5)]
    value = {"machine": "a machine", "rows": rows, "runs": [{"machine": "b", "rows": rows}], "numbers": [1.0] * 100}
    path = tmp_path / "new" / "a.json"
    records.write(path, value)
    assert json.loads(path.read_text()) == value
    lines = path.read_text().splitlines()
    assert sum("case 3" in line for line in lines) == 2 and not any("case 2" in x and "case 3" in x for x in lines)
    assert len(lines) < 30


def test_committed_results_are_written_so() -> None:
    paths = sorted((Path(__file__).parent.parent / "bench" / "results").glob("*.json"))
    assert len(paths) > 10
    for path in paths:
        assert path.read_text() == records.text(json.loads(path.read_text())) + "\n", path
