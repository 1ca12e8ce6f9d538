"""A small measurement of each part of `bench`; `bench/gpu/run.py` rehearses every slice and times nothing wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from seqpar import native
from seqpar.kernels import Blockwise
from seqpar.planner import Hardware
from seqpar.testing import run_processes
from tests.interpreting import patched_once  # noqa: F401  of what rehearsals launch

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


def test_a_trace_of_a_call_shows_what_lies_under_computation(ran: Ran, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    code, printed = ran("bench.cpu.timeline", "--tokens", 256, "--calls", 1, "--out", out)
    assert code == 0
    names = {event.get("name", "") for event in json.loads(out.read_text())["traceEvents"]}
    for what in ("seqpar compute", "seqpar differentiate"):
        assert any(name.startswith(what) for name in names), what
    assert "%" in printed


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
