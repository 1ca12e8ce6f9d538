"""The examples as a reader runs them: under torchrun and alone, with their verdicts and exit codes."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from seqpar import native
from seqpar.planner import Hardware
from tests.programs import Programs

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
METHODS = ("ring", "ulysses", "switch", "long_context", "shared_prefix")
TINY = ("--steps", "2", "--tokens", "512")
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
    "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    "OMP_NUM_THREADS": "1",
}


def torchrun(ranks: int, script: str, *args: object) -> list[str]:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks)
    return [str(word) for word in (*launcher, EXAMPLES / script, *args)]


def alone(script: str, *args: object) -> list[str]:
    return [str(word) for word in (sys.executable, EXAMPLES / script, *args)]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.sampled(3)
def test_a_method_agrees_with_dense_attention(name: str, ranks: int, programs: Programs, tmp_path: Path) -> None:
    script = EXAMPLES / f"{name}.py"
    printed = [programs.alone(script, tmp_path)] if ranks == 1 else programs.ranks(ranks, script, tmp_path)
    assert any("PASS" in text for text in printed) and not any("FAIL" in text for text in printed)
    assert not any("Warning" in path.read_text() for path in tmp_path.glob("*.err"))
    if name == "long_context" and ranks == 2:
        halo = 100 * 2 * 2 * 32 * 4  # window, key heads, keys and values, head dim, bytes
        for rank, (text, received) in enumerate(zip(printed, (0, halo))):
            assert re.search(rf"rank {rank} of 2, .* received {received:,} bytes", text)


def test_a_pipeline_of_two_stages_agrees_with_one_process(programs: Programs, tmp_path: Path) -> None:
    printed = programs.ranks(4, EXAMPLES / "pipeline.py", tmp_path)
    assert all(re.match(rf"PASS: stage {n // 2}, rank {n % 2} of 2, ", text) for n, text in enumerate(printed))
    assert not any("Warning" in path.read_text() for path in tmp_path.glob("*.err"))


@pytest.mark.parametrize(
    "flags",
    [
        (),
        pytest.param(("--ranks", "2"), marks=pytest.mark.exhaustive),
        pytest.param(
            ("--layout", "striped", "--transport", "ring", "--dtype", "bfloat16", "--comm", "gloo"),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(("--model", "hybrid"), marks=pytest.mark.exhaustive),
        pytest.param(("--model", "hybrid", "--layout", "zigzag", "--dtype", "bfloat16"), marks=pytest.mark.exhaustive),
        pytest.param(
            ("--layout", "contiguous", "--transport", "gather", "--ulysses", "2", "--dtype", "float64"),
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=" ".join,
)
def test_the_demo_trains_as_one_process_does(flags: tuple[str, ...], programs: Programs, tmp_path: Path) -> None:
    picture = tmp_path / "new" / "demo.png"
    words = (*TINY, *flags, "--out", picture)
    if "--ranks" in flags:  # the demo starts them
        done = run(alone("demo.py", *words))
        assert done.returncode == 0, done.stdout + done.stderr
        printed = done.stdout
    else:
        printed = programs.ranks(2, EXAMPLES / "demo.py", tmp_path, *words)[0]
    lines = [line for line in printed.rstrip().splitlines() if not line.startswith("Starting ")]
    shared = "gloo" not in flags and native.missing() is None
    carrier = r"ShmComm \(shared memory\)" if shared else r"GroupComm \(gloo"
    assert re.match(rf"2 ranks, \w+ layout, \w+ over {carrier}", lines[1])
    assert lines[-3].startswith("PASS: largest loss difference")
    assert "over 2 steps (tolerance" in lines[-3]
    assert lines[-2].startswith("shown: 2 ranks trained ") and lines[-1].startswith("next: seqpar plan --help ")
    assert len(re.findall(r"^ +\d+ +\d+\.\d{7} +\d+\.\d{7} .*\d ms .*\d MB +\d+ on \d", printed, re.MULTILINE)) == 2
    moved, predicted = re.search(r"bytes moved: (\S+); predicted by the plans: (\S+)", printed).groups()
    assert moved == predicted != "0"
    assert re.search(r"planning: [\d.]+ ms of a loader thread per batch, one batch ahead", printed)
    assert ("above a lower bound" in printed) == ("--layout" not in flags)
    assert "\x1b" not in printed, "colour belongs on a terminal only"
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("launcher", ["torchrun", "python"])
@pytest.mark.exhaustive
def test_ctrl_c_leaves_no_process_behind(launcher: str, tmp_path: Path) -> None:
    flags = ("--steps", "10000", "--tokens", "512", "--out", tmp_path / "marker.png")
    command = torchrun(2, "demo.py", *flags) if launcher == "torchrun" else alone("demo.py", "--ranks", 2, *flags)
    process = subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        for line in process.stdout:
            # the second step, or a later one, is done: every rank is at work. What others print may come before it
            if re.search(r"\b[1-9]\d* +\d+\.\d{7} +\d+\.\d{7} ", line):
                break
        assert len(named(tmp_path)) == 3, "the launcher and two ranks"
        # a terminal signals its foreground group, a supervisor its child alone
        (os.killpg if launcher == "python" else os.kill)(process.pid, signal.SIGINT)
        rest = process.communicate(timeout=300)[0]
        assert process.returncode != 0
        assert "PASS" not in rest
        deadline = time.monotonic() + 60
        while named(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not named(tmp_path), rest
    finally:
        for left in {process.pid, *named(tmp_path)} if process.poll() is None else named(tmp_path):
            os.kill(left, signal.SIGKILL)
        process.wait()


def named(path: Path) -> list[int]:
    """Processes with `path` in their command line."""
    if not Path("/proc/self/cmdline").exists():
        # ww: the whole line, however narrow the terminal is said to be
        ps = ["ps", "-A", "-ww", "-o", "pid=,args="]
        lines = subprocess.run(ps, capture_output=True, text=True, check=True).stdout
        return [int(line.split()[0]) for line in lines.splitlines() if str(path) in line]
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if str(path).encode() in (process / "cmdline").read_bytes():
                found.append(int(process.name))
    return found


@pytest.fixture(scope="module")
def demo() -> Iterator[ModuleType]:
    sys.path.insert(0, str(EXAMPLES))
    try:
        spec = importlib.util.spec_from_file_location("demo_under_test", EXAMPLES / "demo.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(EXAMPLES))


def test_batches_are_whole_documents_of_exactly_the_budget(demo: ModuleType) -> None:
    documents = [(f"{size}.py", bytes(i % 256 for i in range(size))) for size in (5, 900, 40, 3, 90, 30)]
    stream, again = (demo.batches(documents, tokens=100, seed=1) for _ in range(2))
    for _ in range(20):
        batch = next(stream)
        assert batch.lengths == next(again).lengths
        assert sum(batch.lengths) == len(batch.tokens) == len(batch.positions) == 100
        whole = [f"{length - 1}.py" == name for name, length in zip(batch.names, batch.lengths)]
        assert all(whole[:-1]), "only what fills the batch up is cut"


@pytest.mark.parametrize("layout", ["planned", "zigzag"])
@pytest.mark.sampled(2)
def test_plans_are_made_a_batch_ahead_in_a_thread(demo: ModuleType, layout: str, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    args = demo.arguments(["--layout", layout, "--steps", "4", "--tokens", "3000"])
    made: list[tuple[str, int]] = []
    plan_for = demo.plan_for

    def noted(batch, *rest):
        made.append((threading.current_thread().name, len(made)))
        return plan_for(batch, *rest)

    monkeypatch.setattr(demo, "plan_for", noted)
    stream = demo.load(args, ranks=4, rank=1)
    for index, loaded in enumerate(stream):
        deadline = time.monotonic() + 120
        while len(made) < min(index + 2, 4) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(made) == min(index + 2, 4), "the next plan is made while this one is in use"
        assert loaded.plan == plan_for(loaded.batch, args, 4) and loaded.planning > 0
        assert loaded.plan.mask.lengths.tolist() == list(loaded.batch.lengths)
        assert (loaded.plan.forecast is not None) == (layout == "planned")
    assert index == 3 and all(name.startswith("loader") for name, _ in made)
    assert not any(thread.name.startswith("loader") for thread in threading.enumerate())


def test_a_batch_that_does_not_fit_ends_the_demo(demo: ModuleType, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    path = tmp_path / "small.json"
    dataclasses.replace(Hardware.preset("cpu"), memory=1 << 26).save(path)
    args = demo.arguments(["--hardware", str(path), "--ranks", "1", "--tokens", "200000"])
    with pytest.raises(SystemExit, match="demo: no row fits"):
        next(demo.load(args, ranks=1, rank=0))


def test_labels_are_shifted_inside_documents(demo: ModuleType) -> None:
    batch = demo.pack([("a", b"xyz"), ("b", b"q")])
    assert batch.tokens.tolist() == [demo.START, *b"xyz", demo.START, *b"q"]
    assert batch.labels.tolist() == [*b"xyz", demo.IGNORED, *b"q", demo.IGNORED]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1]
    assert batch.valid == 4


def test_the_verdict_fails_where_it_should(demo: ModuleType) -> None:
    good = demo.Row(
        sharded=3.0, reference=3.0, nudged=3.0 + 1e-6, bytes_moved=8, bytes_predicted=8, seconds=1,
        reference_seconds=1, planning=0.01,
    )  # fmt: skip
    assert demo.verdict([good, good], "float32")[0]
    for change in ({"sharded": 3.0001}, {"sharded": float("nan")}, {"bytes_moved": 7}):
        for rows in ([good, dataclasses.replace(good, **change)], [dataclasses.replace(good, **change), good]):
            passed, line = demo.verdict(rows, "float32")
            assert not passed and line.startswith("FAIL"), change


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ranks", "3"], "--ranks 3 contradicts torchrun, which started 2 processes"),
        (["--layout", "zigzag", "--ulysses", "3"], "--ulysses 3 does not divide the 2 ranks"),
        (["--tokens", "1"], "--tokens 1 is too small; it must be at least 2"),
        (["--transport", "ring"], "--transport is the planner's choice; it goes with another --layout"),
        (["--layout", "striped", "--hardware", "h100"], "--hardware is for --layout planned"),
    ],
)
def test_flags_that_cannot_be_are_refused(
    flags: list[str], message: str, demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as raised:
        demo.arguments(flags)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err
