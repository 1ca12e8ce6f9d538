"""Slice `comm`: `PeerComm` on one GPU: its tests, with ranks as threads and as processes, and its rates.

On one device a copy between ranks is one inside its memory: the rates show the path's cost, not NVLink's bandwidth.
Ranks that are processes take turns on the device, so that they are only checked. Where there are several GPUs, a
million small messages between all of them check that no flag arrives before its data.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.gpu.machine import Machine
from bench.gpu.rows import Case, Row
from bench.gpu.speed import rate

ROOT = Path(__file__).resolve().parents[2]
ON_DEVICE = "tests/comm/test_peer_device.py"
SUITES = {
    "device": f"{ON_DEVICE} -k test_words or test_what_a_dead",
    "threads, signals of the driver": f"{ON_DEVICE} -k TestThreadsDriver",
    "threads, signals by kernels": f"{ON_DEVICE} -k TestThreadsKernels",
    "2 processes": f"{ON_DEVICE} -k TestTwoProcesses",
    "4 processes": f"{ON_DEVICE} -k TestFourProcesses",
}
RANKS = {  # name -> (run by processes, ranks, signals)
    "2 threads, signals of the driver": (False, 2, "driver"),
    "4 threads, signals of the driver": (False, 4, "driver"),
    "4 threads, signals by kernels": (False, 4, "kernel"),
    "2 processes": (True, 2, "driver"),
    "4 processes": (True, 4, "driver"),
}
MESSAGES, STRESS_SECONDS = 1_000_000, 500.0  # small messages, and how long they may take
SANITIZED = "test_words or test_what_a_dead or (TestThreadsDriver and (adjoint or any_strides))"


def comm(tiny: bool) -> list[Case]:
    """The cases: the extension first, as everything else needs it, then the checks, then the timings."""
    found = [Case("comm", "build", _build)]
    found += [Case("comm", f"checks, {name}", partial(_checks, *how)) for name, how in RANKS.items()]
    found.append(Case("comm", "checks, a stream that stops", _stalled))
    found += [Case("comm", f"small messages, signals: {how}", partial(_stressed, how)) for how in ("auto", "kernel")]
    found += [Case("comm", f"suite, {name}", partial(_suite, tests)) for name, tests in SUITES.items()]
    found += [Case("comm", tool, partial(_sanitized, tool)) for tool in ("memcheck", "racecheck")]
    for size in (1 << 12,) if tiny else (1 << 16, 1 << 20, 1 << 24, 1 << 28):
        found.append(Case("comm", f"push, {size} bytes", partial(_pushes, size)))
        found.append(Case("comm", f"exchange, {size} bytes", partial(_exchange, size)))
    return found


def _build(machine: Machine) -> Iterator[Row]:
    row = {"kernel": "PeerComm", "mode": "build"}
    if machine.rehearsal:
        yield {**row, "skipped": "a rehearsal takes the extension as it is"}
        return
    yield {**row, **_ran([sys.executable, "setup.py", "build_ext", "--inplace"])}


def _checks(processes: bool, size: int, signals: str, machine: Machine) -> Iterator[Row]:
    """The checks that need no pytest; a rehearsal runs them on the tests' model of a device."""
    from seqpar.testing import run_processes, run_threads
    from tests.comm.device import on_model
    from tests.comm.peer_cases import CHECKS, on_device

    run = partial(run_processes, comm="shm") if processes else run_threads
    for name, check in CHECKS.items():
        row = {"kernel": "PeerComm", "mode": "checks", "what": name}
        if machine.rehearsal and check.on_device:
            yield {**row, "skipped": "it needs a device"}
            continue
        on, options = (on_model, {}) if machine.rehearsal else (on_device, signals)
        carried = () if machine.rehearsal else (check.carried,)
        try:
            results = run(size, on, check.case, check.arguments, 30.0, options, *carried, timeout=30.0)
            yield {**row, **({"ok": True} if check.right(results) else {"ok": False, "missed": str(results)[:600]})}
        except Exception as error:
            yield {**row, "ok": False, "missed": f"{type(error).__name__}: {error}"[:600]}


def _stalled(machine: Machine) -> Iterator[Row]:
    """Rows that say whether stalled waits on a device are let go, and their tensors marked."""
    row = {"kernel": "PeerComm", "mode": "checks"}
    if machine.rehearsal:
        yield {**row, "skipped": "it needs a device"}
        return
    from seqpar.testing import run_threads
    from tests.comm.peer_cases import on_device, stalled, was_let_go

    for signals in ("driver", "kernel"):
        results = run_threads(2, on_device, stalled, (), 1.0, signals, False, timeout=20.0)
        verdict = {"ok": True} if was_let_go(results) else {"ok": False, "missed": str(results)[:600]}
        yield {**row, "what": f"signals: {signals}", **verdict}


def _stressed(signals: str, machine: Machine) -> Iterator[Row]:
    """Whether each of many small messages between all GPUs arrived before its flag; a rehearsal sends a few."""
    from seqpar.testing import run_processes, run_threads
    from tests.comm.device import on_model
    from tests.comm.peer_cases import all_right, on_own_device, stressed

    row, size = {"kernel": "PeerComm", "mode": f"small messages, signals: {signals}"}, torch.cuda.device_count()
    if machine.rehearsal:
        results = run_threads(2, on_model, stressed, (200,), 30.0, {}, timeout=30.0)
    elif size < 2:
        yield {**row, "skipped": "it needs two GPUs"}
        return
    else:
        results = run_processes(
            size, on_own_device, stressed, (MESSAGES,), 60.0, signals, comm="shm", timeout=STRESS_SECONDS
        )
    wrong = sum(wrong for wrong, _ in results)
    what = f"{results[0][1]} exchanges of {len(results)} ranks, {wrong} with a wrong element"
    yield {**row, **({"ok": True, "what": what} if all_right(results) else {"ok": False, "missed": what})}


def _suite(tests: str, machine: Machine) -> Iterator[Row]:
    row = {"kernel": "PeerComm", "mode": "tests"}
    if machine.rehearsal:
        yield {**row, "skipped": "it needs a device"}
    else:
        yield {**row, **_pytest(tests)}


def _sanitized(tool: str, machine: Machine) -> Iterator[Row]:
    row = {"kernel": "PeerComm", "mode": f"compute-sanitizer {tool}"}
    found = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if machine.rehearsal or not Path(found).is_file():
        yield {**row, "skipped": "there is no compute-sanitizer"}
        return
    options = ["--tool", tool, "--error-exitcode", "9", "--target-processes", "all"]
    yield {**row, **_pytest(f"{ON_DEVICE} -k {SANITIZED}", found, *options)}


def _pytest(tests: str, *before: str) -> Row:
    path, _, chosen = tests.partition(" -k ")
    # without the project's settings, which need plugins that this machine may lack
    bare = ["--noconftest", "-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={ROOT}"]
    command = [*before, sys.executable, "-m", "pytest", path, "-q", "--tb=line", *bare, "-k", chosen]
    return _ran(command, r"\d+ (?:passed|failed|error)")


def _ran(command: list[str], counted: str | None = None) -> Row:
    """Whether a command succeeded; if not, its last lines. counted: a pattern that its output must have."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, env=environment)
    except subprocess.TimeoutExpired:
        return {"ok": False, "missed": "not done after 400 s"}
    said = done.stdout + done.stderr
    if counted and "No module named pytest" in said:
        return {"skipped": "there is no pytest"}
    last = " ".join(said.split())
    if done.returncode == 0 and (counted is None or re.search(counted, said)):
        return {"ok": True, "what": last[-80:]}
    return {"ok": False, "missed": last[-600:]}


def _device(machine: Machine, rank: int = 0, size: int = 1) -> Any:
    """The device that `PeerComm` drives, or its tests' model of one."""
    if not machine.rehearsal:
        from seqpar.comm.peer.cuda import Cuda

        return Cuda()
    from tests.comm.device import Model

    return Model(rank, size)


def _pushes(size: int, machine: Machine) -> Iterator[Row]:
    """Rates of a copy stream beside torch's copy of as many bytes: contiguous rows, and heads into their places."""
    cuda = _device(machine)
    at = cuda.allocate(size, 0, 0)
    flat = torch.empty(size // 2, dtype=torch.bfloat16, device=machine.device).normal_()
    target = torch.empty_like(flat)
    heads = flat.view(-1, 8, 64)  # this rank's rows of 8 heads; a peer gets every second one
    part, strides = heads[:, ::2], [8 * 64, 64, 1]
    runs: dict[str, tuple[Callable[[], object], int]] = {
        "contiguous": (lambda: cuda.push(cuda.current(), at, [1], flat), 2 * flat.nbytes),
        "strided": (lambda: cuda.push(cuda.current(), at, strides, part), flat.nbytes),
    }
    for mode, (run, moved) in runs.items():
        half = slice(0, moved // 4)
        times, missing = machine.times({"PeerComm": run, "copy": partial(target[half].copy_, flat[half])}, most=50)
        row = {"kernel": "PeerComm", "mode": mode}
        if missing:
            yield {**row, **next(iter(missing.values()))}
            continue
        ratio = times["copy"].ms / times["PeerComm"].ms
        yield {**row, **rate(times["PeerComm"], bytes=moved), "baseline": "copy", "ratio": ratio}
    cuda.free(at)


def _exchange(size: int, machine: Machine) -> Iterator[Row]:
    """Times of two ranks that are threads and swap tensors, the host's time included, beside two copies by torch."""
    from concurrent.futures import ThreadPoolExecutor

    from seqpar.comm import LocalComm, PeerComm, Tag

    with ThreadPoolExecutor(2) as ranks:
        cudas = [_device(machine, rank, 2) for rank in range(2)]
        pool = max(4 * size, 1 << 20)
        made = lambda control, cuda: PeerComm.over(control, cuda, pool, 20.0)  # noqa: E731
        comms = list(ranks.map(made, LocalComm.world(2), cudas))
        sent = [torch.ones(size // 4, device=machine.device) for _ in comms]
        got = [comm.empty((size // 4,), torch.float32, machine.device) for comm in comms]

        def swap(comm: PeerComm) -> None:
            peer, tag = 1 - comm.rank, Tag(0, comm.next_call(), 0, 0)
            comm.exchange({peer: [sent[comm.rank]]}, {peer: [got[comm.rank]]}, tag=tag).wait()

        def copies() -> None:
            for x, y in zip(sent, got):
                y.copy_(x)

        runs = {"PeerComm": lambda: list(ranks.map(swap, comms)), "copy": copies}
        times, missing = machine.times(runs, ahead=False, most=50)
        row = {"kernel": "PeerComm", "mode": "two ranks, with the host"}
        if missing:
            yield {**row, **next(iter(missing.values()))}
            return
        ratio = times["copy"].ms / times["PeerComm"].ms
        yield {**row, **rate(times["PeerComm"], bytes=4 * size), "baseline": "copy", "ratio": ratio}
        got.clear()
        list(ranks.map(PeerComm.close, comms))
