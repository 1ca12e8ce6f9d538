"""How a command ends where nobody reads it, where the disk is full and after Ctrl-C: exit codes and what it says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seqpar import launch
from seqpar.cli import failed, main, plan

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(os.name != "posix", reason="pipes and /dev/full are POSIX")

# Commands in forks of one process, each with an output of its own and the end that a process of its own has.
SCRIPT = """
import json, os, signal, sys
import seqpar.cli, seqpar.plan.plot
from matplotlib.figure import Figure
from seqpar import launch
from seqpar.cli import calibrate

def closed():
    reading, writing = os.pipe()
    os.close(reading)
    return writing

def interrupted(*args, **options):
    os.kill(os.getpid(), signal.SIGINT)

def interrupted_at_a_terminal(*args, **options):
    os.killpg(0, signal.SIGINT)  # the ranks that measure links get it too

def code_and_errors(into, argv):
    file = open(sys.argv[1], "w+")
    if not (pid := os.fork()):
        os.dup2(closed() if into == "closed" else os.open(into, os.O_WRONLY), 1)
        os.dup2(file.fileno(), 2)
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background job of a shell ignores
        Figure.savefig = interrupted
        launch._Pool.run = interrupted_at_a_terminal
        calibrate.measured = lambda model, device, ranks, quick: calibrate._links(device, ranks, quick)
        sys.exit(seqpar.cli.main(argv))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    file.seek(0)
    return code, file.read()

print(json.dumps([code_and_errors(*case) for case in json.loads(sys.argv[2])]))
"""
SMALL = ["plan", "--lengths", "9,9", "--model", "tiny"]
PRINTING = [SMALL, ["plan", "--random", "600", "--ranks", "64", "--model", "tiny", "--json"], ["doctor"]]
USAGE = ["plan", "--help"]
FULL = "cannot write to standard output: No space left on device\n"


@pytest.mark.exhaustive
def test_no_end_of_a_command_is_a_traceback(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawing = [*SMALL, "--plot", str(tmp_path / "x.png")]
    measuring = ["calibrate", "--device", "cpu", "--out", str(tmp_path / "hardware.json")]
    cases = [(into, argv) for into in ("closed", "/dev/full") for argv in (*PRINTING, USAGE)]
    cases += [("/dev/null", argv) for argv in (drawing, measuring)]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "errors"), json.dumps(cases)],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *closed, small, large, doctor, usage, drawn, measured = json.loads(done.stdout)
    assert closed[:3] == [[141, ""]] * 3
    assert drawn == measured == [130, ""] and not (tmp_path / "hardware.json").exists()
    assert small == large == [1, f"seqpar plan: {FULL}"] and doctor == [1, f"seqpar doctor: {FULL}"]
    # argparse passes over what it cannot write
    assert closed[3] in ([0, ""], [141, ""]) and usage in ([0, ""], [1, f"seqpar: {FULL}"])


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="/proc and the server of forks are Linux's")
def test_ctrl_c_never_reaches_a_rank_that_is_being_forked() -> None:
    script = """
import multiprocessing
from multiprocessing import forkserver
from seqpar.launch import serve_forks
serve_forks(multiprocessing.get_context("forkserver"))
print(open(f"/proc/{forkserver._forkserver._forkserver_pid}/status").read())
"""
    status = subprocess.check_output(
        [sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True, timeout=120
    )
    blocked = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigBlk:")), 16)
    assert blocked & 1 << (signal.SIGINT - 1)


def test_ctrl_c_while_ranks_start_ends_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    pools, start = [], launch._Pool._start

    def interrupted(pool: launch._Pool, *args: Any) -> None:
        pools.append(pool)
        os.kill(os.getpid(), signal.SIGINT)
        start(pool, *args)

    monkeypatch.setattr(launch._Pool, "_start", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores Ctrl-C
    try:
        with pytest.raises(KeyboardInterrupt):
            launch._Pool(2, on_gpus=False)
        assert len(pools) == 2 and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert not any(process.is_alive() for process in pools[0].processes)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, ""),
        (MemoryError("Unable to allocate 9 TiB"), 1, "not enough memory: Unable to allocate 9 TiB"),
        (OSError(11, "Resource temporarily unavailable"), 1, "[Errno 11] Resource temporarily unavailable"),
        (OSError(28, "No space left on device"), 1, FULL.strip()),
        (ValueError("two\nlines"), 2, "two lines"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_ends_a_command_is_one_line_and_a_code(
    error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def raising(*args: object) -> None:
        raise error

    monkeypatch.setattr(plan, "planned", raising)
    assert main(SMALL) == code
    assert capsys.readouterr().err == (f"seqpar plan: {said}\n" if said else "")


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "planned", lambda args: [].missing)
    with pytest.raises(AttributeError):
        main(SMALL)


def test_without_any_output_a_command_still_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main(SMALL) == 0
    assert failed("seqpar", MemoryError()) == 1


def test_a_name_that_is_no_text_is_printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    show: Callable[..., None] = lambda *args, **options: None  # noqa: E731
    monkeypatch.setattr("seqpar.plan.plan.Plan.plot", show)
    with open(tmp_path / "out", "w", encoding="ascii") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert main([*SMALL, "--plot", str(tmp_path / "\udcff.png")]) == 0
    assert (tmp_path / "out").read_text().endswith("\\udcff.png\n")
