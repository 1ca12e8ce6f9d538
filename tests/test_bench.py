"""`bench/gpu/run.py` where there is no GPU: its rehearsal runs every slice, resumes, times nothing wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from seqpar import native
from seqpar.comm import Tag
from seqpar.kernels import Blockwise
from seqpar.planner import Hardware
from seqpar.testing import run_processes
from tests.interpreting import patched_once  # noqa: F401  of what rehearsals launch

ROOT = Path(__file__).resolve().parent.parent
INTERPRETED = find_spec("triton") is not None and not torch.cuda.is_available()  # as conftest.py asks for
SLICES = {
    "correct",
    "trees",
    "recurrent",
    "ceilings",
    "forward",
    "backward",
    "accumulate",
    "ring",
    "step",
    "small",
    "auto",
    "comm",
    "host",
    "tune",
}
ORIGIN = {"device", "versions", "commit", "sources"}

Row = dict[str, Any]


@pytest.fixture(scope="module")
def modules() -> Any:
    """Import of a module of bench."""
    return import_module


Ran = Callable[..., tuple[int, str]]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ran:
    """What a module's main returns when it is given these words, and what it prints."""

    def call(name: str, *words: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        code = import_module(name).main() or 0
        return code, capsys.readouterr().out

    return call


def rehearse(*words: object) -> int:
    """What a rehearsal returns."""
    return import_module("bench.gpu.run").main(["--rehearse", *map(str, words)])


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.skipif(native.missing() is not None, reason=native.missing() or "")
@pytest.mark.exhaustive
def test_the_comms_are_timed_beside_each_other(ran: Ran, tmp_path: Path) -> None:
    path = tmp_path / "comm.json"
    flags = ["--ranks", "2", "--bytes", "65536", "--repeat", "2", "--hops", "3", "--json", path]
    code, printed = ran("bench.cpu.comm", *flags)
    assert code in (0, 1)
    found = json.loads(path.read_text())
    assert found.keys() >= {"machine", "versions", "commit", "bytes"}
    assert found["over_gloo"].keys() == {"ring", "all-to-all"}
    assert found["gb_per_second"]["ring, shm"] > 0 and "all-to-all" in printed


@pytest.mark.skipif(native.missing() is not None, reason=native.missing() or "")
def test_recurrences_are_timed_beside_fallbacks_and_products(ran: Ran, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "recurrent.json"
    flags = ["--tokens", "128", "--heads", "1", "--dim", "16", "--repeat", "1", "--json", path]
    assert ran("bench.cpu.recurrent", *flags)[0] in (0, 1)
    found = json.loads(path.read_text())
    assert found.keys() >= {"machine", "versions", "commit", "threads"} and len(found["rows"]) == 14
    assert {row["fallback"] for row in found["rows"] if "ratio" in row} == {"mamba2", "qwen3_next", "kimi_linear"}
    assert all(row["of_products"] > 0 and row["gflop"] > 0 for row in found["rows"])


@pytest.mark.exhaustive
def test_a_tree_is_timed_beside_separate_sequences(ran: Ran, tmp_path: Path) -> None:
    path = tmp_path / "shared_prefix.json"
    flags = ["--ranks", 2, "--prompt", 64, "--answers", 16, 24, "--short", 32, "--long", 128, "--turns", 2]
    assert ran("bench.cpu.shared_prefix", *flags, "--json", path)[0] in (0, 1)
    (row,) = json.loads(path.read_text())["rows"]
    assert row["tokens"] == {"separate": 64 * 2 + 16 + 24, "tree": 64 + 16 + 24}
    assert row["predicted"][0] > 1 and row["speedup"][0] > 0 and len(row["share"]) == 3


@pytest.mark.exhaustive
def test_states_are_timed_beside_ulysses_and_rows(ran: Ran, tmp_path: Path) -> None:
    path = tmp_path / "states.json"
    flags = ["--ranks", "2", "--tokens", "256", "--heads", "2", "--dim", "8", "--turns", "1", "--sweep", "2", "64"]
    flags += ["--travel", "pipeline"]
    assert ran("bench.cpu.states", *flags, "--families", "delta rule", "--json", path)[0] == 0
    found = json.loads(path.read_text())
    assert found.keys() >= {"machine", "versions", "commit", "held_bytes_per_second"}
    assert [(each["link"], each["travel"]) for each in found["rows"]] == [
        ("loopback", "pipeline"),
        ("held", "pipeline"),
    ]
    state, row = 2 * 8 * 8 * 4, 2 * 4 * (4 * 8 + 2)  # one state each way; q, k, v, out, decay and beta
    for each in found["rows"]:
        ways = each["ways"]
        assert ways["states"]["bytes"] == 2 * state and ways["ulysses"]["bytes"] == 2 * 128 * row // 2
        assert ways["rows"]["bytes"] > ways["ulysses"]["bytes"] and ways["states"]["seconds"] > 0
    for each in found["crossovers"]:
        assert each["formula"] == round(2 * state / row) == 4 and each["bytes"] == [2, 64]


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "rows.jsonl"
    assert rehearse("--json", path) == 0
    return path


@pytest.mark.exhaustive
def test_rows_of_every_slice_say_what_ran_where(rehearsed) -> None:
    rows = read(rehearsed)
    assert {row["slice"] for row in rows} == SLICES
    for row in rows:
        assert row.keys() >= {"slice", "case", "kernel", "mode"} | ORIGIN
        assert row["device"] == "rehearsal" and row["versions"]["torch"] == torch.__version__ and row["commit"]
        assert "error" not in row and "lost" not in row, row
        assert row.keys() & {"ms", "ok", "skipped"}
        if "ms" in row:
            assert row.keys() & {"tflops", "gbps"} and row.keys() >= {"baseline", "ratio"}
            assert 0 < row["ms_fastest"] <= row["ms"] <= row["ms_slowest"]
    measured = {row["slice"] for row in rows if "ms" in row or "ok" in row}
    assert SLICES - measured <= (set() if INTERPRETED else {"tune"})


@pytest.mark.exhaustive
def test_every_kernel_that_can_run_here_is_checked_and_timed(rehearsed) -> None:
    rows = read(rehearsed)
    here = {"native", "aten", "blockwise", "reference"} | ({"triton"} if INTERPRETED else set())
    assert {row["kernel"] for row in rows if row["slice"] == "correct" and row.get("ok")} >= here
    for slice in ("forward", "backward"):
        assert {row["kernel"] for row in rows if row["slice"] == slice and "ms" in row} == here | {"sdpa_math"}


@pytest.mark.exhaustive
def test_packed_rows_have_the_cover_and_the_causal_rate(rehearsed) -> None:
    packed = [row for row in read(rehearsed) if row["case"].startswith("magi") and "ms" in row]
    assert packed
    for row in packed:
        assert 0 < row["cover"] <= 1
        assert row["of_causal_and_cover"] == pytest.approx(row["tflops"] / (row["causal_tflops"] * row["cover"]))


@pytest.mark.exhaustive
def test_trees_have_their_cover_and_what_they_save(rehearsed) -> None:
    rows = [row for row in read(rehearsed) if row["slice"] == "trees" and row["kernel"] == "triton"]
    shared = [row for row in rows if row["mode"] == "prompt for each answer"]
    assert {row["case"].split()[-1] for row in shared} == ({"forward", "backward"} if INTERPRETED else set())
    assert all(row["baseline"] == "packed" and row["ratio"] > 0 for row in shared)
    assert all(0 < row["cover"] <= 1 for row in rows if row not in shared)


@pytest.mark.exhaustive
def test_a_second_call_measures_nothing_twice(rehearsed) -> None:
    before = rehearsed.read_text()
    assert rehearse("--json", rehearsed) == 0 and rehearsed.read_text() == before


@pytest.mark.exhaustive
def test_a_line_that_was_cut_off_is_measured_again_and_no_other(rehearsed, tmp_path) -> None:
    path, lines = tmp_path / "rows.jsonl", rehearsed.read_text().splitlines()
    last = [n for n, line in enumerate(lines) if json.loads(line)["slice"] == "ceilings"][-1]
    path.write_text("\n".join(lines[:last] + lines[last + 1 :]) + "\n" + lines[last][:40])
    assert rehearse("--slice", "ceilings", "--json", path) == 0
    added = path.read_text().splitlines()[len(lines) :]
    assert [json.loads(line)["case"] for line in added] == [json.loads(lines[last])["case"]]


@pytest.mark.exhaustive
def test_rows_of_other_sources_do_not_count(rehearsed, modules, tmp_path) -> None:
    rows = modules("bench.gpu.rows")
    path = tmp_path / "rows.jsonl"
    path.write_text(rehearsed.read_text())
    origin = {name: read(path)[0][name] for name in ORIGIN}
    case = rows.Case("ceilings", next(r["case"] for r in read(path) if r["slice"] == "ceilings"), lambda machine: [])
    assert rows.Results(path, origin).done(case)
    assert not rows.Results(path, origin | {"sources": "other"}).done(case)


@pytest.mark.exhaustive
def test_nothing_starts_when_the_time_is_up(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "bench.gpu.run", "--rehearse", "--minutes", "0", "--json", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0 and "stopped before the time is up" in done.stdout and not path.exists()


def test_what_it_cannot_do_it_says(modules, capsys) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    for said, words in (("needs one CUDA device", []), ("unknown slice magic", ["--rehearse", "--slice", "magic"])):
        with pytest.raises(SystemExit) as left:
            modules("bench.gpu.run").main(words)
        assert left.value.code == 2 and said in capsys.readouterr().err


def slightly_off(forward: Any) -> Any:
    def wrong(self: Blockwise, x: Any, into: Any) -> None:
        forward(self, x, into)
        for written in (into.acc, into.out):
            if written is not None:
                written.mul_(1.0001)

    return wrong


@pytest.mark.parametrize("slices", [["forward"], ["correct", "forward"]], ids=" ".join)
@pytest.mark.sampled(2)
def test_what_is_wrong_is_not_timed(slices, modules, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(Blockwise, "forward", slightly_off(Blockwise.forward))
    path = tmp_path / "rows.jsonl"
    assert rehearse("--json", path, *(word for name in slices for word in ("--slice", name))) == 1
    rows = [row for row in read(path) if row["slice"] == "forward" and row["kernel"] == "blockwise"]
    assert rows and all(row["ok"] is False and "off by" in row["refused"] and "ms" not in row for row in rows)
    assert any("ms" in row for row in read(path) if row["kernel"] == "reference")


@pytest.mark.exhaustive
def test_operations_are_counted_over_attended_pairs(rehearsed, modules) -> None:
    calls, speed = modules("bench.gpu.calls"), modules("bench.gpu.speed")
    assert calls.flops(10, 3, 128, 64) == 2 * 10 * 3 * (128 + 64)
    assert calls.flops(10, 3, 128, 64, backward=True) == 2.5 * calls.flops(10, 3, 128, 64)
    for setup, _ in speed.setups(True):
        lo, hi = setup.mask().bounds(np.arange(setup.tokens))
        pairs = int((hi - lo).sum())
        for slice, factor in ("forward", 1.0), ("backward", 2.5):
            rows = [r for r in read(rehearsed) if (r["slice"], r["case"]) == (slice, str(setup)) and "ms" in r]
            assert rows
            for row in rows:
                work = factor * 2 * pairs * setup.heads * (setup.dim + setup.v_dim)
                assert row["tflops"] * 1e9 * row["ms"] == pytest.approx(work)


def test_the_full_run_has_the_cases_that_are_promised(modules) -> None:
    speed, ring = modules("bench.gpu.speed"), modules("bench.gpu.ring")
    setups = [setup for setup, _ in speed.setups(False)]
    assert {s.dim for s in setups} == {64, 96, 128, 192, 256} and {s.heads for s in setups} == {8, 16, 32}
    assert {s.tokens for s in setups if len(s.lengths) == 1} == {1 << n for n in range(12, 18)}
    assert {s.name for s in setups} == {"causal", "full", "window", *modules("bench.lib.lengths").NAMES}
    names = {tuple(case.name.split(", ")) for case in ring.ring(False)}
    assert {n[0] for n in names} == {"contiguous", "zigzag", "striped"}
    assert {n[2] for n in names} == {f"{p} ranks" for p in (2, 4, 8, 16)}


def test_a_trace_of_a_call_shows_what_lies_under_computation(ran: Ran, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    code, printed = ran("bench.cpu.timeline", "--tokens", 256, "--calls", 1, "--out", out)
    assert code == 0
    names = {event.get("name", "") for event in json.loads(out.read_text())["traceEvents"]}
    for what in ("seqpar compute", "seqpar differentiate"):
        assert any(name.startswith(what) for name in names), what
    assert "%" in printed


@pytest.mark.exhaustive
def test_plans_are_measured_beside_fixed_ones(tmp_path: Path) -> None:
    if native.missing() is not None or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("it needs the compiled extension and two cores")
    path = tmp_path / "planned.json"
    flags = ["--quick", "--tokens", "1024", "--repeat", "1", "--hardware", "cpu", "--json", path]
    done = subprocess.run(
        [sys.executable, "-m", "bench.planner.planned", *flags], capture_output=True, text=True, timeout=2400, cwd=ROOT
    )
    assert done.returncode in (0, 1), done.stderr[-2000:]
    found = json.loads(path.read_text())
    assert found.keys() >= {"machine", "versions", "commit", "composition_error", "hardware"}
    assert len(found["batches"]) == 3 and found["ranks"].keys() >= {"4", "8"}
    for world in found["ranks"].values():
        for row in world["cells"].values():
            assert row.keys() == {"auto", "ring", "Ulysses", "gather", "data parallel"}
            assert all(0 < c["low"] <= c["median"] <= c["high"] and c["predicted"] > 0 for c in row.values())
        assert world["speedup_over_worst"] > 0 and world["beside_best"].keys() == found["batches"].keys()
    assert "auto: " in done.stdout and "composed instead of measured" in done.stdout


def test_an_exchange_hides_behind_computing_and_no_longer(modules) -> None:
    v, second = modules("bench.lib.virtual"), modules("seqpar.planner").Link(latency=0.5, bandwidth=2.0)
    tag = Tag(1, 1, 1, 1)

    def tape(me: int, before: float, meanwhile: float, size: int = 3) -> Any:
        post = v.Post(tag, {1 - me: size}, {1 - me: 3})
        return [v.Run(before), post, v.Run(meanwhile), v.Wait(tag), v.Run(1.0)]

    assert v.compose([tape(0, 0.0, 5.0), tape(1, 1.0, 4.0)], second) == [6.0, 6.0]
    # the exchange of 2 seconds starts when the second has posted it
    assert v.compose([tape(0, 0.0, 0.5), tape(1, 1.0, 0.5)], second) == [4.0, 4.0]
    with pytest.raises(ValueError, match="rank 0 sends 4 bytes, rank 1 expects 3"):
        v.compose([tape(0, 0.0, 1.0, size=4), tape(1, 0.0, 1.0)], second)
    with pytest.raises(ValueError, match="rank 0 waits for posts that never come"):
        v.compose([tape(0, 0.0, 1.0), [v.Run(1.0)]], second)


def test_the_least_of_tapes_is_that_of_each_stretch(modules) -> None:
    v = modules("bench.lib.virtual")
    wait = v.Wait(Tag(0, 1, 0, 0))
    tapes = [[v.Run(a), wait, v.Run(b)] for a, b in ((1.0, 9.0), (2.0, 1.0), (6.0, 2.0))]
    assert v.least(tapes) == [v.Run(1.0), wait, v.Run(1.0)]
    with pytest.raises(ValueError, match="tapes of different programs"):
        v.least([tapes[0], [wait, v.Run(1.0), wait]])


def test_tapes_note_the_bytes_that_plans_predict(modules) -> None:
    planned, v = modules("bench.planner.planned"), modules("bench.lib.virtual")
    shape = replace(planned.SHAPE, hidden=32, heads=4, kv_heads=4, dim=8, ffn=16)
    blocks, machine = planned.blocks_of(shape), Hardware.preset("cpu")
    for name, plan in planned.plans([300, 20, 5, 41], 4, shape, machine).items():
        tapes = []
        for rank in range(4):
            tape = v.Tape(rank, 4)
            tapes.append(planned.recorded(planned.Layers(plan, rank, shape, blocks), tape))
            sent = sum(sum(event.sent.values()) for event in tapes[-1] if isinstance(event, v.Post))
            assert sent == sum(plan.bytes(rank, heads=4, kv_heads=4, dim=8, backward=b) for b in (False, True)), name
        seconds = v.compose(tapes, machine.inside)
        computed = [sum(event.seconds for event in tape if isinstance(event, v.Run)) for tape in tapes]
        assert all(a >= b > 0 for a, b in zip(seconds, computed)), name
        assert planned.predicted(plan, shape, machine) > 0


def test_intervals_are_as_wide_as_few_runs_ask_for(modules) -> None:
    interval = modules("bench.lib.interval").interval
    assert interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert interval([5.0, 1.0, 4.0, 2.0, 3.0]) == (1.0, 5.0)
    assert interval([float(x) for x in range(8)]) == (1.0, 6.0)


def test_a_verdict_counts_overlaps_as_equal_and_sums_over_batches(modules) -> None:
    cell, verdict = modules("bench.planner.planned").Cell, modules("bench.planner.planned").verdict
    fast, slow = cell(1.0, 0.9, 1.1, 1.0), cell(4.0, 3.9, 4.1, 4.0)
    near, behind = cell(1.08, 1.05, 1.2, 1.0), cell(1.2, 1.15, 1.3, 1.2)
    assert verdict({"a": {"auto": near, "ring": fast, "gather": slow}})["holds"]
    rest = {"ring": fast, "gather": slow}
    found = verdict({"a": {"auto": near} | rest, "b": {"auto": behind} | rest})
    assert found["beside_best"]["a"]["holds"] and not found["beside_best"]["b"]["holds"] and not found["holds"]
    assert found["worst"] == "gather" and found["speedup_over_worst"] == pytest.approx(8.0 / 2.28)
    assert not verdict({"a": {"auto": fast, "ring": near}})["holds"]  # nothing gained over the worst


@pytest.mark.skipif(native.missing() is not None, reason=native.missing() or "")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.sampled(2)
def test_what_users_write_by_hand_is_exact_and_timed_beside_seqpar(modules, causal) -> None:
    peers, cases = modules("bench.peers.attention"), modules("bench.peers.case")
    case = cases.Case((64, 32), heads=4, kv_heads=1, dim=8, causal=causal)
    by_hand = tuple(title for title in peers.PEERS if "by hand" in title or "process" in title or "documents" in title)
    outcomes = run_processes(2, peers.measure, case, 3, (*by_hand, "PyTorch context_parallel"), ("fetch", "Ulysses"))[0]
    refused = outcomes.pop("PyTorch context_parallel")
    assert refused.turns == [] and "no packed documents" in refused.refusal
    assert len(outcomes) == 5 + 2 * 2
    for title, outcome in outcomes.items():
        assert outcome.error < 1e-5, title
        assert len(outcome.turns) == 3 and all(0 < t.forward < t.both for t in outcome.turns)
    rows = peers.rows_of(outcomes)
    best = min((row for row in rows if row.method.startswith("seqpar")), key=lambda row: row.both_ms)
    assert best.both == (1.0, 1.0, 1.0)
    assert peers.table("", rows).row_count == len(rows)


def test_a_faster_peer_and_an_inexact_row_are_faults(modules) -> None:
    peers, case = modules("bench.peers.attention"), modules("bench.peers.case").Case((64,))
    turns = [[peers.Turn(ms / 2, ms) for ms in (base, base + 0.1, base + 0.2)] for base in (5.0, 6.0, 7.0)]
    outcome, nan = peers.Outcome, float("nan")
    outcomes = {
        "a": outcome(turns[0], 1e-7), "b": outcome(turns[2], 1e-2), "c": outcome([], nan, "ValueError: no"),
        "seqpar fetch, gloo": outcome(turns[1], 1e-7), "seqpar ring, gloo": outcome(turns[2], 1e-2),
    }  # fmt: skip
    a_is_faster, ring_is_wrong = peers.faults(case, peers.rows_of(outcomes))
    assert a_is_faster.startswith("a takes 0.8") and ring_is_wrong == "seqpar ring, gloo is not exact: 0.01"


def test_a_long_record_reads_back_as_it_was_written(modules, tmp_path) -> None:
    records, path = modules("bench.lib.records"), tmp_path / "new" / "record.json"
    rows = [{"name": "a" * 100, "runs": [[1.5, 2.5], [3.5]]}, {"name": "b" * 100, "runs": []}]
    value = {"ranks": {4: rows, 8: []}, "empty": {}}
    records.write(path, value)
    assert json.loads(path.read_text()) == {"ranks": {"4": rows, "8": []}, "empty": {}}
    assert len(path.read_text().splitlines()) > 4
