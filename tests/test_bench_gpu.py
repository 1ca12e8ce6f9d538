"""`bench/gpu` where there is no GPU: a bare machine, runs that end on time, what rows pay for."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import seqpar
from bench.gpu import correct, lost, magi, nccl, needs, run
from bench.gpu.calls import OfKernel, Problem, Setup, errors
from bench.gpu.machine import Machine
from bench.gpu.ring import Virtual
from bench.gpu.rows import Case, Row
from seqpar import native
from seqpar.kernels import Blockwise, Grads, Operands
from seqpar.kernels.reference import Reference
from seqpar.testing import run_processes

ROOT = Path(__file__).resolve().parent.parent


def ended(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    bare = {"PATH": "/usr/bin:/bin", **environment}
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120, cwd=ROOT, env=bare)


def rows_of(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


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


@pytest.mark.exhaustive
def test_what_a_bare_machine_lacks_is_not_imported() -> None:
    """Neither by the commands, which make all their cases, nor by the checks of comms that they run."""
    lacking = ("pytest", "rich", "scipy", "einops", "matplotlib", "setuptools", "hypothesis", "triton")
    code = f"""import sys
sys.path.insert(0, {str(ROOT)!r})
sys.modules.update(dict.fromkeys({lacking}))
import bench.gpu.lost, bench.gpu.nccl, bench.gpu.run, tests.comm.device, tests.comm.peer_cases
assert all([make(False) for make in bench.gpu.run.slices().values()]) and bench.gpu.nccl.slices(False, 8)"""
    done = ended(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """A run of `bench.gpu.run` on cases of the test's own."""

    def call(found: list[Case], *arguments: object) -> int:
        monkeypatch.setattr(run, "slices", lambda: {"own": lambda tiny: found})
        monkeypatch.setattr(run, "RESERVE", 0.0)
        return run.main(["--rehearse", *map(str, arguments)])

    return call


def time_is_up() -> None:
    """The time of a run is up now; a shorter one might be before it has begun on a busy machine."""
    signal.setitimer(signal.ITIMER_REAL, 0.01)


def quick(machine: Machine) -> Iterator[Row]:
    yield {"kernel": "k", "mode": "quick", "ok": True}


def slow(machine: Machine) -> Iterator[Row]:
    yield {"kernel": "k", "mode": "first", "ok": True}
    assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 60
    time_is_up()
    try:
        time.sleep(30.0)
    except Exception:
        yield {"kernel": "k", "mode": "second", "ok": False}


@pytest.mark.parametrize(("name", "keys"), [("blockwise", 2), ("reference", 2), ("blockwise", 40)])
def test_a_kernel_that_is_wrong_is_refused(name: str, keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a right one exceeds the tolerance, as with two keys."""
    kind = {"blockwise": Blockwise, "reference": Reference}[name]
    check = correct.Check(name, queries=300, keys=keys, heads=2, kv_heads=1)
    assert correct.judged(check, torch.device("cpu"))["ok"]

    class Wrong(kind):  # type: ignore[misc,valid-type]
        def backward(self, x: Operands, grads: Grads) -> None:
            super().backward(x, grads)
            grads.dq.mul_(1.1)

    monkeypatch.setattr(correct, "kernels", lambda: {name: Wrong()})
    found = correct.judged(check, torch.device("cpu"))
    assert not found["ok"] and "dq off by" in found["refused"]


def test_a_case_that_the_time_cut_off_is_tried_again(cases: Any, tmp_path: Path) -> None:
    path, todo = tmp_path / "rows.jsonl", [Case("own", "slow", slow), Case("own", "quick", quick)]
    assert cases(todo, "--json", path, "--minutes", 1) == 0
    assert [(row["case"], row["mode"], row.get("cut")) for row in rows_of(path)] == [
        ("slow", "first", None), ("slow", "", "the time was up"),
    ]  # fmt: skip
    assert cases(todo, "--json", path, "--minutes", 1) == 0
    assert [row["case"] for row in rows_of(path)] == ["slow"] * 4
    # cut off twice, it lets the other one go first
    assert cases(todo, "--json", path, "--minutes", 1) == 0
    assert [row["case"] for row in rows_of(path)][4:] == ["quick", "slow", "slow"]
    assert cases([Case("own", "slow", quick), todo[1]], "--json", path) == 0
    assert cases(todo, "--json", path) == 0
    assert [row["case"] for row in rows_of(path)][7:] == ["slow"], "a whole try counts, and there is no other"


SETUP = Setup("causal", (48,), 4, 2, 16, 16, torch.float16)


@pytest.mark.parametrize("transport", ["ring", "fetch"])
def test_ranks_in_turn_return_what_one_launch_does_however_often_they_run(transport: str) -> None:
    problem = Problem(SETUP, torch.device("cpu"))
    plan = seqpar.Plan(problem.made, seqpar.Layout.zigzag([48], 4), transport=transport)
    many = Virtual(plan, Blockwise(), problem)
    expected = OfKernel(Blockwise(), problem.wide()).results(True)
    for _ in range(2):
        got = many.results(True)
        assert max(errors(got, {name: expected[name] for name in got}).values()) < 3e-3
    assert {x.dtype for x in many.sums} == {torch.float16, torch.float32}, "sums of keys, and casts"


def rehearsed(comm: Any, path: Path, *arguments: str) -> list[Row]:
    """What `bench.gpu.nccl` measures on one rank, over gloo."""
    torch.set_num_threads(1)
    flags = ["--rehearse", "--json", str(path), *arguments]
    return nccl.measured(comm, nccl.parser().parse_args(flags))


CARRIED = {"gloo"} | ({"ShmComm"} if native.missing() is None else set())


def test_transfers_and_agreements_are_rehearsed_over_gloo_and_not_taken_twice(tmp_path: Path) -> None:
    path = tmp_path / "nccl.jsonl"
    flags = [word for name in ("hops", "all-to-alls", "sums", "agree", "open") for word in ("--slice", name)]
    assert run_processes(2, rehearsed, path, *flags)[1], "the other rank knows of its rows too"
    rows = rows_of(path)
    timed = {(row["slice"], row["kernel"], row["mode"]) for row in rows if "ms" in row}
    assert timed == {("hops", name, mode) for name in CARRIED for mode in ("one pair", "all")} | {
        ("all-to-alls", name, "all") for name in CARRIED
    } | {("sums", name, "all_sum") for name in CARRIED} | {("agree", "agree", "device idle")}
    for row in rows:
        assert row["device"] == "rehearsal" and row["commit"] and "variables" in row and "error" not in row
        if row["slice"] in ("hops", "all-to-alls") and "skipped" not in row:
            bytes = 5 * 4096 // (1 if row["slice"] == "hops" else 2)
            assert row["gbps"] * row["ms"] * 1e6 == pytest.approx(bytes)
    assert run_processes(2, rehearsed, path, *flags) == [[], []] and rows_of(path) == rows


def test_layers_are_right_and_their_exchanges_are_taken_from_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "nccl.jsonl"
    run_processes(2, rehearsed, path, "--slice", "layers")
    rows = [row for row in rows_of(path) if "skipped" not in row]
    modes = {f"{schedule}, {mode}" for schedule in nccl.SCHEDULES for mode in ("forward", "forward and backward")}
    assert {(row["kernel"], row["mode"]) for row in rows} == {(name, mode) for name in CARRIED for mode in modes}
    for row in rows:
        assert row["baseline"] == "one GPU" and row["ratio"] == pytest.approx(row["one_gpu_ms"] / (2 * row["ms"]))
        assert 0 <= row["exposed_ms"] <= row["exchanging_ms"] and row["exchanging_ms"] > 0 < row["computing_ms"]
        assert ("backward" in row["mode"]) == ("computing_alone_ms" in row) and row.get("computing_alone_ms", 1.0) > 0


def test_a_rank_that_no_other_names_is_a_fault() -> None:
    named = (1.5, "in attention, call 2 stage 1: lost the connection to rank 1; the comm is dead")
    late = (20.0, "waited 20 s in call 6 phase 0 for ranks [1]; the comm is dead")
    assert lost.verdict({0: named, 2: late}, [0, 2]) == {"ok": True, "seconds": 20.0, "said": named[1]}
    silent = (None, "ended with exit code -6 and said nothing")
    assert lost.verdict({0: named, 2: silent}, [0, 2, 3]) == {
        "ok": False, "missed": f"rank 3 has said nothing; rank 2: {silent[1]}",
    }  # fmt: skip
    assert not lost.verdict({0: (1.0, "lost the connection to rank 12")}, [0])["ok"]


@pytest.mark.exhaustive  # processes of its own
def test_lost_ranks_are_rehearsed(tmp_path: Path) -> None:
    path = tmp_path / "lost.jsonl"
    assert lost.main(["--rehearse", "--timeout", "4", "--json", str(path)]) == 0
    assert [(row["case"], row["ok"]) for row in rows_of(path)] == [("killed", True), ("stopped", True)]


def test_a_profile_is_rehearsed(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert run.main(["--rehearse", "--slice", "profile", "--case", "ring", "--json", str(path)]) == 0
    found = rows_of(path)
    assert {row["mode"] for row in found} >= {"forward, one launch", "forward, ranks", "backward, ranks"}
    assert all(row["what"] and row["ms"] >= 0 and "error" not in row for row in found if row["what"] != "nothing")


def test_the_page_has_the_table_of_the_published_workload() -> None:
    assert magi.table([], 8) in (ROOT / "docs" / "gpus.md").read_text()
