"""`bench/gpu/first_hour.sh` calls what there is, stops in time, and every file that it writes has a reader."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from bench.cpu import timeline
from bench.gpu import decisions, tune
from bench.gpu.rows import Case, Results
from seqpar.planner import Hardware

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "bench" / "gpu" / "first_hour.sh"
PARTS = {
    "one": ["correct", "trees", "accumulate", "speed", "newest", "profile", "ring", "tune", "comm", "rest"],
    "eight": ["nccl", "hops", "comm", "layers", "trace", "lost", "magi", "calibrate"],
    "two": ["two"],
}
FAKE = """#!/bin/sh
env | grep -E '^(NCCL_|CUDA_|TRITON_)' | tr '\\n' ' ' >> "$LOG"
for word; do printf '%s ' "'$word'" >> "$LOG"; done
echo >> "$LOG"
case "$*" in *"$FAILS"*) exit 1 ;; esac
"""


def called(
    tmp_path: Path, *words: str, fails: str = "never"
) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
    """The words of every command that the script gives to Python, none of which runs, after the variables it sets."""
    fake, log = tmp_path / "python", tmp_path / "log"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    log.unlink(missing_ok=True)
    (tmp_path / "kept" / "triton-newest").mkdir(parents=True, exist_ok=True)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("NCCL_", "CUDA_", "TRITON_"))}
    done = subprocess.run(
        ["bash", SCRIPT, *words], capture_output=True, text=True, timeout=60,
        env=clean | {"PYTHON": str(fake), "LOG": str(log), "FAILS": fails},
    )  # fmt: skip
    return done, [shlex.split(line) for line in log.read_text().splitlines()] if log.exists() else []


def after(words: list[str], name: str) -> list[str]:
    return [words[n + 1] for n, word in enumerate(words) if word == name]


@pytest.mark.parametrize("where", PARTS)
def test_every_part_calls_slices_and_cases_that_exist_and_prints_its_rule(where: str, tmp_path: Path) -> None:
    done, commands = called(tmp_path, str(tmp_path / "kept"), where, *["head"] * (where == "two"))
    assert done.returncode == 0, done.stderr
    told = [part for words in commands if "bench.gpu.decisions" in words for part in after(words, "--part")]
    assert list(dict.fromkeys(told)) == PARTS[where]
    assert set(told) <= set(decisions.PARTS)
    run, nccl = import_module("bench.gpu.run"), import_module("bench.gpu.nccl")
    for words in commands:
        at = words.index("-m")
        if words[at + 1] == "torch.distributed.run":
            at += words[at + 1 :].index("-m") + 1
        module, rest = words[at + 1], words[at + 2 :]
        if module == "bench.gpu.run" and "--needs" not in rest:
            names = after(rest, "--slice") or list(run.slices())
            cases = [case.name for name in names for case in run.slices()[name](False)]
            assert all(any(part in name for name in cases) for part in after(rest, "--case")), rest
            assert float(*after(rest, "--minutes")) <= 10
        elif module == "bench.gpu.nccl":
            assert nccl.parser().parse_args(rest).minutes <= 10
        elif module == "bench.cpu.timeline":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sys, "argv", [module, *rest])
                assert timeline.arguments().out.name == "trace.json"


def test_the_first_slices_fit_ten_minutes(tmp_path: Path) -> None:
    _, commands = called(tmp_path, str(tmp_path / "kept"), "one")
    minutes = [float(*after(words, "--minutes")) for words in commands if "--minutes" in words]
    assert sum(minutes[:3]) <= 10 and sum(minutes) <= 50


def test_settings_of_nccl_are_those_of_one_command(tmp_path: Path) -> None:
    _, commands = called(tmp_path, str(tmp_path / "kept"), "eight")
    settings = [
        word for words in commands if "bench.gpu.nccl" in words for word in words if re.match("NCCL_|CUDA_", word)
    ]
    assert settings == ["NCCL_P2P_NVL_CHUNKSIZE=131072", "NCCL_MIN_P2P_NCHANNELS=64", "CUDA_DEVICE_MAX_CONNECTIONS=32"]


def test_the_newest_triton_has_its_own_rows_and_binaries(tmp_path: Path) -> None:
    _, commands = called(tmp_path, str(tmp_path / "kept"), "one")
    (newest,) = [words for words in commands if any(word.endswith("gpu-newest.jsonl") for word in words)]
    assert newest[0].endswith("triton-newest-cache")


def test_a_part_that_fails_is_named_at_the_end_and_stops_none(tmp_path: Path) -> None:
    done, commands = called(tmp_path, str(tmp_path / "kept"), "one", fails="--slice trees")
    assert done.returncode == 1 and done.stdout.splitlines()[-1] == "not right: trees"
    assert "trees ended with exit code 1" in done.stdout and "rest" in commands[-1]


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["one", "--minutes", "8"], "-m bench.gpu.run --json KEPT/gpu.jsonl --minutes 8"),
        (["one", "--needs"], "-m bench.gpu.run --json KEPT/gpu.jsonl --needs"),
        (["one", "--rehearse", "--case", "two plans"], "-m bench.gpu.run --rehearse --case 'two plans'"),
        (["ahead"], "TRITON_CACHE_DIR=KEPT/triton -m bench.gpu.ahead"),
    ],
)
def test_words_go_to_the_command_of_the_rows(words: list[str], command: str, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    done, commands = called(tmp_path, str(kept), *words)
    assert done.returncode == 0 and commands == [shlex.split(command.replace("KEPT", str(kept)))]


def test_wrong_words_print_the_usage() -> None:
    for words in ([], ["folder"], ["/tmp", "three"], ["/tmp", "two"], ["/tmp", "eight", "more"]):
        done = subprocess.run(["bash", SCRIPT, *words], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and "bench/gpu/first_hour.sh FOLDER one" in done.stdout


def test_make_gpu_is_the_part_for_one_gpu() -> None:
    words = ["make", "-n", "gpu", "PYTHON=/usr/bin/some", "ARGS=--minutes 8"]
    said = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=ROOT, check=True).stdout
    assert 'PYTHON="/usr/bin/some" bench/gpu/first_hour.sh bench/results one --minutes 8' in said


def kept(folder: Path) -> None:
    """Every file that the script writes, by the functions that write them."""
    shutil.copyfile(ROOT / "bench" / "results" / "gpu.jsonl", folder / decisions.ROWS)
    rows = decisions.rows_of(folder / decisions.ROWS, "forward", "backward", "tune")
    (folder / decisions.NEWEST).write_text("".join(json.dumps(row | {"tflops": 600.0}) + "\n" for row in rows))
    assert tune.ranking(rows, folder / "gpu.tuning.json") == folder / decisions.TUNING
    figure = {"ms": 1.0, "ms_fastest": 1.0, "ms_slowest": 1.0, "host_ms": 0.1, "baseline": None, "ratio": None}
    layer = figure | {"tflops": 400.0, "ratio": 0.9, "baseline": "one GPU", "exposed_ms": 0.25, "exchanging_ms": 2.0,
                      "computing_ms": 11.0, "computing_alone_ms": 10.0}  # fmt: skip
    for file, variables in ((decisions.NCCL, {"shared": False}), (decisions.NCCL, {"NCCL_MIN_P2P_NCHANNELS": "64"}),
                            (decisions.TWO, {"shared": False})):  # fmt: skip
        results = Results(folder / file, {"device": "rehearsal", "commit": "a", "variables": variables})
        for name, row in (("hops", figure | {"gbps": 367.0}), ("layers", layer), ("open", figure)):
            case = Case(name, f"{name}, 8 ranks", lambda _: ())
            results.add(case, [{"kernel": "NCCL", "mode": "all", **row}])
    case = Case("magi", "varlen causal, 8192 tokens a rank, 8 ranks", lambda _: ())
    both = [{"kernel": "NCCL", "mode": f"fetch, {way}", **figure, "tflops": 300.0} for way in ("forward", "backward")]
    results = Results(folder / decisions.NCCL, {"device": "rehearsal", "commit": "a", "variables": {}})
    results.add(case, both)
    lost = [{"slice": "lost", "case": "killed", "ok": True, "seconds": 1.5, "said": "rank 1"},
            {"slice": "lost", "case": "stopped", "ok": False, "missed": "rank 2 says nothing"}]  # fmt: skip
    (folder / decisions.LOST).write_text("".join(json.dumps(row) + "\n" for row in lost))
    exchange = {"ph": "X", "cat": "exchange", "name": "keys 0", "ts": 10.0, "dur": 2000.0, "pid": "rank 0 7"}
    kernel = {"ph": "X", "cat": "kernel", "name": "forward", "ts": 10.0, "dur": 1000.0, "pid": "rank 0 7"}
    timeline.written([[exchange, kernel], [exchange | {"pid": 1}, kernel | {"pid": 1}]], folder / decisions.TRACE)
    (folder / decisions.HARDWARE).write_text(json.dumps(Hardware.preset("h200").to_dict()))


READ = {
    "correct": "596 checks, 0 wrong",
    "trees": "backward, backward, deterministic: 265 TFLOP/s",
    "accumulate": "2048 rows on 2048 keys: a merge takes 10.2 ns per row, 0.89 of the rate without",
    "speed": "forward, causal 16384, 16 heads of 128, bf16: cudnn 623, triton 518, aten_flash 324 TFLOP/s; the",
    "newest": "causal 16384, 16 heads of 128, bf16, forward: 1.16 of the installed Triton",
    "ring": "zigzag, ring, 8 ranks: triton ",
    "tune": "forward 128: 128x128 warps 8 stages 3",
    "hops": "hops, hops, 8 ranks, all: NCCL 367 GB/s {'NCCL_MIN_P2P_NCHANNELS': '64'}",
    "layers": "layers, 8 ranks, all: NCCL 0.90 of one GPU, 0.25 ms exposed, kernels 1.10 of their time alone",
    "trace": "rank 0: 2.0 ms exchanging, 50% of it hidden",
    "lost": "stopped: MISSED: rank 2 says nothing",
    "magi": "| seqpar fetch, NCCL | not run | not run | not run | 300 / 300 |",
    "calibrate": " TFLOP/s, backward ",
    "two": "layers, 8 ranks, all: NCCL 0.90 of one GPU",
}


def test_every_file_has_a_reader(tmp_path: Path) -> None:
    kept(tmp_path)
    for name, figure in READ.items():
        lines = list(decisions.told(tmp_path, name))
        assert lines[0].startswith(f"-- {name}: ") and any(figure in line for line in lines[1:]), (name, lines)
    assert len(list(decisions.told(tmp_path, "hops"))) == 3, "a row for each setting"


def test_a_folder_without_rows_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert decisions.main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith("--")] == ["   no rows"] * len(decisions.PARTS)


def test_rows_of_the_last_commit_and_try_count(tmp_path: Path) -> None:
    case, row = Case("hops", "8 bytes", lambda _: ()), {"kernel": "NCCL", "mode": "all", "ms": 1.0}
    for commit, gbps in (("a", 1.0), ("b", 2.0), ("b", 3.0)):
        results = Results(tmp_path / decisions.NCCL, {"commit": commit, "variables": {}})
        results.add(case, [row | {"gbps": gbps}])
    assert [row["gbps"] for row in decisions.timed(tmp_path / decisions.NCCL, "hops")] == [3.0]


@pytest.mark.exhaustive  # minutes
@pytest.mark.parametrize("where", PARTS)
def test_the_hour_is_rehearsed_to_its_end(where: str, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        head = [f"localhost:{free.getsockname()[1]}"] if where == "two" else []
    folders = [tmp_path / name for name in ("first", "second")[: 1 + len(head)]]
    words = ["bash", str(SCRIPT), "--rehearse"]
    env = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    runs = [
        subprocess.Popen([*words, str(folder), where, *head], stdout=subprocess.PIPE, text=True, env=env)
        for folder in folders
    ]
    said = [run.communicate(timeout=1800)[0] for run in runs]
    assert [run.returncode for run in runs] == [0] * len(runs), said[0][-2000:]
    told = {part: [list(decisions.told(folder, part)) for folder in folders] for part in PARTS[where]}
    measured = {part for part, each in told.items() if any("   no rows" not in lines for lines in each)}
    # not timed in a rehearsal: libraries on the CPU, a Triton that is not there, rows of the published table
    assert measured >= {*PARTS[where]} - {"speed", "newest", "nccl", "magi"}
