"""`bench/gpu` where there is no GPU: a bare machine, runs that end on time, what rows pay for."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import seqpar
from bench.gpu import correct, graphs, lost, magi, nccl, needs, profile, run
from bench.gpu import machine as machines
from bench.gpu.calls import FORWARD, OfKernel, Problem, Setup, errors, field
from bench.gpu.machine import Machine
from bench.gpu.ring import Virtual, virtual
from bench.gpu.rows import Case, Results, Row
from bench.gpu.step import SCHEDULES, Turn
from bench.lib.virtual import Post
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


@pytest.mark.exhaustive
def test_kernels_compile_ahead_for_a_gpu_elsewhere(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "bench.gpu.ahead", "--most", 1, "--processes", 1)
    done = ended(*command, TRITON_CACHE_DIR=str(tmp_path), HOME=str(tmp_path))
    assert done.returncode == 0 and done.stdout.startswith("correct causal 700x700"), done.stdout + done.stderr
    assert {path.stem for path in tmp_path.rglob("*.cubin")} == {"forward", "dq", "dkdv"}


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


def test_cases_are_chosen_by_parts_of_their_names(cases: Any, tmp_path: Path, capsys: Any) -> None:
    path, todo = tmp_path / "rows.jsonl", [Case("own", name, quick) for name in ("one", "two", "two and three")]
    assert cases(todo, "--json", path, "--case", "one", "--case", "three") == 0
    assert [row["case"] for row in rows_of(path)] == ["one", "two and three"]
    for given, said in (
        (("--case", "one", "--case", "four"), "no case has 'four' in its name"),
        (("--without", "flax"), "unknown library flax; there are sdpa_flash, sdpa_cudnn, sdpa_math, flex"),
    ):
        with pytest.raises(SystemExit):
            cases(todo, "--json", path, *given)
        assert said in capsys.readouterr().err


def test_a_library_is_left_out_on_demand() -> None:
    made = {"heads": 2, "kv_heads": 1, "dim": 16, "v_dim": 16, "dtype": torch.float32}
    setup, names = Setup("causal", (64,), **made), []
    for without in ((), ("sdpa_math",)):
        found, _ = field(Machine(rehearsal=True, without=without), setup, backward=False)
        names.append({label.kernel for label in found})
    assert names[0] - names[1] == {"sdpa_math"}


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


class HungPool:
    """Processes of which the first ones fail at their items, and later ones never answer until they are ended.

    The time is up when two of these hang.
    """

    made = hung = 0

    def __init__(self, count: int) -> None:
        self.hangs, HungPool.made = HungPool.made > 0, HungPool.made + 1
        self.futures: list[Future[Any]] = []

    def submit(self, work: Any, item: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.futures.append(future)
        if not self.hangs:
            future.set_exception(RuntimeError("the device is lost"))
        else:
            HungPool.hung += 1
            if HungPool.hung == 2:
                time_is_up()
        return future

    def end(self) -> None:
        for future in self.futures:
            if not future.done():
                future.set_exception(RuntimeError("ended"))


def test_processes_that_hang_when_the_time_is_up_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "_processes", HungPool)
    monkeypatch.setattr(machines, "_end", HungPool.end)
    monkeypatch.setattr(HungPool, "made", 0)
    monkeypatch.setattr(HungPool, "hung", 0)
    machine = Machine(rehearsal=True, minutes=1)
    machine.rehearsal, began = False, time.monotonic()
    with pytest.raises(machines.TimeIsUp), machine.until_the_end():
        machine.spread(str, [1, 2])
    assert time.monotonic() - began < 50 and HungPool.made == 3


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


class OneClock:
    """A device and a host on one clock, in milliseconds. A run takes both for a while, the device after the host."""

    def __init__(self) -> None:
        self.host, self.device = 0.0, 0.0
        self.events: list[Any] = []

    def event(self, enable_timing: bool) -> Any:
        event = SimpleNamespace(at=0.0, synchronize=self.synchronize)
        event.record = lambda: setattr(event, "at", self.issue(0.0))
        event.elapsed_time = lambda other: other.at - event.at
        return event

    def issue(self, ms: float) -> float:
        self.device = max(self.device, self.host) + ms
        return self.device

    def synchronize(self) -> None:
        self.host = max(self.host, self.device)

    def run(self, host: Iterator[float]) -> None:
        self.host += next(host)
        self.issue(1.0)


@pytest.fixture
def on_clock(monkeypatch: pytest.MonkeyPatch) -> tuple[Machine, OneClock]:
    """A machine whose device waits 1 ms in 2,000 cycles."""
    clock, machine = OneClock(), Machine(rehearsal=True)
    machine.rehearsal = False
    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: clock.issue(cycles / 2000))
    monkeypatch.setattr(torch.cuda, "synchronize", clock.synchronize)
    fake = SimpleNamespace(perf_counter=lambda: clock.host / 1e3, monotonic=time.monotonic)
    monkeypatch.setattr(machines, "time", fake)
    return machine, clock


def always(ms: float) -> Iterator[float]:
    while True:
        yield ms


def test_the_device_waits_until_a_slow_host_has_issued_a_run(on_clock: tuple[Machine, OneClock]) -> None:
    machine, clock = on_clock
    hosts = {"fast": always(0.1), "slow": always(7.0)}
    runs = {name: lambda host=host: clock.run(host) for name, host in hosts.items()}
    times, missing = machine.times(runs, most=5)
    assert not missing
    for name, host in ("fast", 0.1), ("slow", 7.0):
        assert times[name].ms == times[name].slowest == pytest.approx(1.0) and times[name].host == pytest.approx(host)
    assert machine.times(runs, ahead=False, most=5)[0]["slow"].ms == pytest.approx(8.0)


def test_a_run_that_the_host_held_up_is_timed_again(on_clock: tuple[Machine, OneClock]) -> None:
    machine, clock = on_clock
    host = iter([7.0, 7.0, 7.0, 40.0, *[7.0] * 50])
    times, _ = machine.times({"run": lambda: clock.run(host)}, most=5)
    assert times["run"].slowest == pytest.approx(1.0)


SETUP = Setup("causal", (48,), 4, 2, 16, 16, torch.float16)


def test_a_backward_pays_for_delta_zeros_and_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(SETUP, torch.device("cpu"))
    calls: list[Grads] = []
    backward = Blockwise.backward

    def noted(self: Blockwise, x: Operands, grads: Grads) -> None:
        assert not (grads.dq.any() or grads.dk.any() or grads.dv.any()), "sums start at zero"
        calls.append(grads)
        backward(self, x, grads)

    monkeypatch.setattr(Blockwise, "backward", noted)
    one = OfKernel(Blockwise(), problem)
    once, again = one.backward(), one.backward()
    for x, y, like in zip(once, again, (problem.q, problem.k, problem.v), strict=True):
        assert x.dtype == like.dtype and x.shape == like.shape and torch.equal(x, y)
    first, second = calls
    assert first.delta.data_ptr() != second.delta.data_ptr() and torch.equal(first.delta, second.delta)


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


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_rank_in_turn_posts_what_its_plan_says_and_receives_the_same_memory_again(name: str) -> None:
    problem = Problem(Setup("causal", (64,), 8, 8, 16, 16, torch.float32), torch.device("cpu"))
    plan = seqpar.Plan(problem.made, seqpar.Layout.zigzag([64], 8), **SCHEDULES[name])
    turn = Turn(plan, 3, problem)
    memory = []
    for _ in range(2):
        turn.step()
        sent = sum(sum(event.sent.values()) for event in turn.tape.stop() if isinstance(event, Post))
        both = [plan.bytes(3, heads=8, kv_heads=8, dim=16, dtype="float32", backward=back) for back in (False, True)]
        assert sent == sum(both) > 0
        memory.append([x.data_ptr() for x in turn.tape._received])
    assert memory[0] == memory[1] and memory[0]


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


def test_a_wrong_layer_is_refused_and_not_timed(tmp_path: Path) -> None:
    path = tmp_path / "nccl.jsonl"
    run_processes(2, wrong_layers, path)
    assert all(
        row["ok"] is False and "not as one GPU" in row["refused"] and "ms" not in row
        for row in rows_of(path)
        if "skipped" not in row
    )


def wrong_layers(comm: Any, path: Path) -> list[Row]:
    forward = nccl.Layer.forward
    with mock.patch.object(nccl.Layer, "forward", lambda self: 1.001 * forward(self)):
        return rehearsed(comm, path, "--slice", "layers")


def test_exchanges_of_a_device_are_nccl_kernels_and_copies_between_devices() -> None:
    names = ("ncclDevKernel_SendRecv(x)", "Memcpy PtoP (Device -> Device)", "attention_kernel", "Memcpy DtoD")
    kinds = ("kernel", "gpu_memcpy", "kernel", "gpu_memcpy")
    events = [{"name": name, "cat": kind} for name, kind in zip(names, kinds)]
    found = [nccl.marked(event)["cat"] for event in events]
    assert found == ["exchange", "exchange", "kernel", "gpu_memcpy"]
    assert nccl.marked({"name": "ncclSend", "cat": "cpu_op"})["cat"] == "cpu_op", "of the host"


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


def test_a_profile_tells_launches_apart_by_their_sums_and_counts_gaps() -> None:
    setup = Setup("causal", (64,), heads=2, kv_heads=1, dim=8, v_dim=8, dtype=torch.float32)
    problem = Problem(setup, torch.device("cpu"))
    many = virtual("zigzag", "ring", 2, Reference(), problem)
    steps = [step for rank in many.ranks for step, *_ in rank.steps]
    assert len(steps) == 4
    events, at = [{"name": "spin_kernel", "cat": "kernel", "ts": 0.0, "dur": 5000.0}], 5000.0
    for step in steps:  # a fill, a gap of a millisecond, and a launch of a microsecond for each pair
        events.append({"name": "fill", "cat": "gpu_memset", "ts": at, "dur": 500.0})
        events.append({"name": "forward", "cat": "kernel", "ts": at + 1500.0, "dur": float(step.area)})
        at += 1500.0 + step.area
    several = profile.kernels(events, rehearsal=False)
    apart, rest = profile.launches(several, FORWARD, many)
    assert [what for what, *_ in apart] == ["forward, own keys, first sums", "forward, received keys, last sums"] * 2
    area = problem.made.area()
    assert sum(pairs for _, pairs, _ in apart) == area and {each.name for each in rest} == {"fill"}
    span = (at - 5000.0) / 1e3
    fill, nothing = profile.rows(rest, "k", FORWARD, whole=several)
    assert fill["what"] == "fill" and fill["launches"] == 4 and fill["ratio"] == pytest.approx(2.0 / span)
    assert nothing["ms"] == pytest.approx(4.0)
    one = [profile.Ran("forward", 0.0, area / 2e3)]  # at twice the rate
    assert [row["ratio"] for row in profile.beside(apart, one, "k", FORWARD, area)] == [pytest.approx(0.5)] * 2
    assert profile.launches(several[:-1], FORWARD, many) == ([], several[:-1])


def test_a_profile_is_rehearsed(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert run.main(["--rehearse", "--slice", "profile", "--case", "ring", "--json", str(path)]) == 0
    found = rows_of(path)
    assert {row["mode"] for row in found} >= {"forward, one launch", "forward, ranks", "backward, ranks"}
    assert all(row["what"] and row["ms"] >= 0 and "error" not in row for row in found if row["what"] != "nothing")


def test_a_plan_that_is_frozen_into_a_graph_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(rehearsal=True)
    assert [row["ok"] for row in graphs.two_plans(SETUP, machine)] == [True]
    handles: list[torch.Tensor] = []

    def frozen(function: Any, **options: object) -> Any:
        def call(*arguments: torch.Tensor) -> torch.Tensor:
            handles.append(arguments[3])
            return function(*arguments[:3], handles[0])

        return call

    monkeypatch.setattr(torch, "compile", frozen)
    (row,) = graphs.two_plans(SETUP, machine)
    assert not row["ok"] and "call 0 with two: out off by" in row["refused"] and "one document" not in row["refused"]


@pytest.mark.parametrize(
    ("binary", "found"),
    [
        ({"registers": 200, "spilled": 0, "shared": 90_000}, None),
        ({"registers": 255, "spilled": 8, "shared": 90_000}, "8 bytes spilled"),
        ({"registers": 200, "spilled": 0, "shared": 300_000}, "300000 bytes of shared memory"),
    ],
)
def test_candidates_that_do_not_fit_are_left_out_by_their_binaries(monkeypatch, binary, found) -> None:
    triton = pytest.importorskip("triton", reason="triton has wheels for Linux only")
    from bench.gpu import binaries, tune
    from seqpar.kernels.triton.config import LaunchConfig

    asked, config = [], LaunchConfig(128, 64, 8, 2, True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(binaries, "compiled", lambda case: asked.append(case) or binary)
    monkeypatch.setattr(triton.runtime.driver, "reset_active", lambda: None)
    row = tune._binary(tune.Candidate("dq", 192, 128, config, False))
    assert row.get("skipped") == found and {name: row[name] for name in binary} == binary
    assert asked == [binaries.Case("dq", 192, 128, "bf16", 90, config)]


def test_the_published_workload_has_its_sizes_and_its_figures() -> None:
    cases = magi.workloads(False)
    assert {case.name for case in cases} == set(magi.PUBLISHED) and {case.tokens for case in cases} == {8192, 16384}
    for case in cases:
        s = case.setup
        assert (s.heads, s.kv_heads, s.dim, s.dtype) == (64, 8, 128, torch.bfloat16)
        mask = case.mask(8 * case.tokens)
        pairs = sum(n * (n + 1) // 2 if "causal" in case.name else n * n for n in mask.lengths)
        assert mask.tokens == 8 * case.tokens and mask.area() == pairs
        quarter = mask.tokens // 4
        assert max(mask.lengths) <= quarter < mask.tokens if "varlen" in case.name else len(mask.lengths) == 1
        published = case.published(8)
        assert len(published) == (8 if case.tokens == 8192 else 0) and not case.published(4)
    assert cases[0].published(16)["MagiAttention, native"] == (652, 545)


def test_the_published_workload_is_rehearsed_beside_the_published_figures(tmp_path: Path) -> None:
    path = tmp_path / "nccl.jsonl"
    run_processes(2, rehearsed, path, "--slice", "magi")
    rows = rows_of(path)
    assert {row["case"] for row in rows} == {"varlen causal, 32 tokens a rank, 2 ranks"}
    modes = {row["mode"] for row in rows}
    assert {f"{plan}, backward" for plan in ("planned", "ring", "ring fast", "fetch", "Ulysses")} <= modes
    ring = next(row for row in rows if row["mode"] == "ring, forward")
    pairs = magi.workloads(True)[0].mask(64).area()
    assert ring["tflops"] * ring["ms"] * 1e9 == pytest.approx(4 * pairs * 8 * 8 / 2)


def test_the_page_has_the_table_of_the_published_workload() -> None:
    assert magi.table([], 8) in (ROOT / "docs" / "gpus.md").read_text()


def test_measured_rows_stand_below_the_published_ones() -> None:
    case = "causal, 8192 tokens a rank, 8 ranks"
    rows = [{"slice": "magi", "case": case, "kernel": "NCCL", "mode": f"ring, {mode}", "tflops": tflops}
            for mode, tflops in (("forward", 1.4), ("forward and backward", 2.0), ("backward", 3.0))]  # fmt: skip
    assert magi.table(rows, 8).splitlines()[-1] == "| seqpar ring, NCCL | not run | 1 / 3 | not run | not run |"
