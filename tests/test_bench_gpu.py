"""`bench/gpu` where there is no GPU: a bare machine, runs that end on time, what rows pay for."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import needs, run
from bench.gpu.machine import Machine
from bench.gpu.rows import Case, Results, Row

ROOT = Path(__file__).resolve().parent.parent


def ended(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    bare = {"PATH": "/usr/bin:/bin", **environment}
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120, cwd=ROOT, env=bare)


def rows_of(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- a bare machine ---------------------------------------------------------------------------------------------------


def test_make_gpu_installs_nothing_and_takes_any_python(tmp_path: Path) -> None:
    bare = ended("make", "-n", "gpu", f"VENV={tmp_path}").stdout
    assert bare.split()[1:] == ["python3", "-m", "bench.gpu.run"] and "pip" not in bare
    assert bare.startswith(f'PYTHONPATH="{ROOT}')
    assert "/opt/python -m" in ended("make", "-n", "gpu", "PYTHON=/opt/python").stdout
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    assert f"{tmp_path}/bin/python -m" in ended("make", "-n", "gpu", f"VENV={tmp_path}").stdout


def test_a_machine_without_torch_says_so_first() -> None:
    done = ended(sys.executable, "-S", "-m", "bench.gpu.run", "--rehearse")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "needs:"
    for name in ("torch", "numpy"):
        assert any(line.split()[:3] == [name, "not", "installed"] and "nothing runs" in line for line in lines)
    assert lines[-1].startswith("missing: ") and "torch, numpy, triton" in lines[-1]


def test_what_is_missing_is_named_with_what_goes_without_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("CC", "CXX", "CUDACXX", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(needs.shutil, "which", lambda name: None)
    monkeypatch.setattr(needs.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    versions = {"torch": "2.13.0+cu130", "numpy": "2.1", "setuptools": "69.5.1", "pytest": "9.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise needs.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(needs, "version", version)
    missing = {need.name: need for need in needs.needs() if not need.ok}
    assert list(missing) == ["triton", "C compiler", "Python.h", "setuptools", "C++ compiler", "nvcc", "matplotlib"]
    assert not any(need.stops for need in missing.values())
    assert missing["setuptools"].state == "69.5.1, older than 70.1"
    assert "Triton's kernels" in missing["C compiler"].lost and "PeerComm" in missing["nvcc"].lost


def test_an_old_nvcc_does_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvcc = tmp_path / "nvcc"
    monkeypatch.setenv("CUDACXX", str(nvcc))
    for release, ok in (("12.4", False), ("12.8", True), ("13.0", True)):
        nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
        nvcc.chmod(0o755)
        assert needs._nvcc("").ok is ok, release


# --- runs that end on time --------------------------------------------------------------------------------------------


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """A run of `bench.gpu.run` on cases of the test's own."""

    def call(found: list[Case], *arguments: object) -> int:
        monkeypatch.setattr(run, "slices", lambda: {"own": lambda tiny: found})
        monkeypatch.setattr(run, "RESERVE", 0.0)
        return run.main(["--rehearse", *map(str, arguments)])

    return call


def quick(machine: Machine) -> Iterator[Row]:
    yield {"kernel": "k", "mode": "quick", "ok": True}


def slow(machine: Machine) -> Iterator[Row]:
    yield {"kernel": "k", "mode": "first", "ok": True}
    try:
        time.sleep(30.0)
    except Exception:
        yield {"kernel": "k", "mode": "second", "ok": False}


def test_a_case_that_the_time_cut_off_is_tried_again(cases: Any, tmp_path: Path) -> None:
    path, todo = tmp_path / "rows.jsonl", [Case("own", "slow", slow), Case("own", "quick", quick)]
    began = time.monotonic()
    assert cases(todo, "--json", path, "--minutes", 0.3 / 60) == 0
    assert time.monotonic() - began < 10
    assert [(row["case"], row["mode"], row.get("cut")) for row in rows_of(path)] == [
        ("slow", "first", None), ("slow", "", "the time was up"),
    ]  # fmt: skip
    assert cases(todo, "--json", path, "--minutes", 0.3 / 60) == 0
    assert [row["case"] for row in rows_of(path)] == ["slow"] * 4
    # cut off twice, it lets the other one go first
    assert cases(todo, "--json", path, "--minutes", 0.3 / 60) == 0
    assert [row["case"] for row in rows_of(path)][4:] == ["quick", "slow", "slow"]
    assert cases([Case("own", "slow", quick), todo[1]], "--json", path) == 0
    assert cases(todo, "--json", path) == 0
    assert [row["case"] for row in rows_of(path)][7:] == ["slow"], "a whole try counts, and there is no other"


def test_what_failed_runs_twice_and_what_failed_once_does_not_run_thrice(tmp_path: Path) -> None:
    results, case = Results(tmp_path / "rows.jsonl", {}), Case("own", "one", quick)
    assert not results.done(case)
    results.add(case, [{"kernel": "", "mode": "", "error": "RuntimeError: no"}])
    assert not results.done(case)
    results.add(case, quick(Machine(rehearsal=True)))
    assert results.done(case)
    other = Case("own", "other", quick)
    for _ in range(2):
        assert not results.done(other)
        results.add(other, [{"kernel": "k", "mode": "", "ok": False}])
    assert results.done(other)


def test_a_run_goes_on_from_a_copy_of_earlier_rows(cases: Any, tmp_path: Path) -> None:
    old, new = tmp_path / "old.jsonl", tmp_path / "kept" / "new.jsonl"
    one, two = Case("own", "one", quick), Case("own", "two", quick)
    assert cases([one], "--json", old) == 0
    kept = old.read_text()
    assert cases([one, two], "--json", new, "--rows", old) == 0
    assert [row["case"] for row in rows_of(new)] == ["one", "two"] and old.read_text() == kept
    assert cases([one, two], "--json", new, "--rows", tmp_path / "never read") == 0
