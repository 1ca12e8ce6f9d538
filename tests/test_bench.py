"""The tools of `bench` run: one small call of each, and what a measurement of wrong results does."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import seqpar
from bench import bits, host_time, shape
from bench.lib.corpus.groups import GROUPS, cases, outcome
from seqpar import native
from seqpar.kernels import Blockwise
from seqpar.planner import Hardware
from seqpar.testing import run_processes
from tests.interpreting import patched_once  # noqa: F401  of what rehearsals launch

ROOT = Path(__file__).resolve().parent.parent


def called(name: str, *words: object) -> int:
    """What a module's main returns when it is given these words."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *map(str, words)])
        return import_module(name).main() or 0


def rehearsed(path: Path, *words: str) -> tuple[int, list[dict[str, Any]]]:
    """What a rehearsal of the measurements on GPUs returns and writes."""
    code = import_module("bench.gpu.run").main(["--rehearse", "--json", str(path), *words])
    return code, [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.exhaustive
def test_rows_of_every_slice_say_what_ran_where(tmp_path: Path) -> None:
    code, rows = rehearsed(tmp_path / "rows.jsonl")
    assert code == 0 and {row["slice"] for row in rows} == set(import_module("bench.gpu.run").slices())
    for row in rows:
        assert row.keys() >= {"slice", "case", "kernel", "mode", "device", "versions", "commit", "sources"}
        assert "error" not in row and "lost" not in row and row.keys() & {"ms", "ok", "skipped"}, row


def test_generation_is_timed_with_either_cache() -> None:
    generation = import_module("bench.cpu.generation")
    for dtype in (torch.float32, torch.bfloat16):
        assert generation.kernel(300, 1, dtype).keys() == {"seqpar", "torch", "torch, rows a page apart"}
    for split in (True, False):
        wall, cpu = generation.decode(seqpar.LocalComm(), 1, 100, 2, split, (32, 64))
        assert wall > 0 and cpu > 0


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    forward = Blockwise.forward

    def slightly_off(self: Blockwise, x: Any, into: Any) -> None:
        forward(self, x, into)
        for written in (into.acc, into.out):
            if written is not None:
                written.mul_(1.0001)

    monkeypatch.setattr(Blockwise, "forward", slightly_off)
    code, rows = rehearsed(tmp_path / "rows.jsonl", "--slice", "forward")
    wrong = [row for row in rows if row["kernel"] == "blockwise"]
    assert code == 1 and wrong and all(row["ok"] is False and "ms" not in row for row in wrong)
    assert any("ms" in row for row in rows if row["kernel"] == "reference")


def test_a_machine_without_torch_says_what_is_missing() -> None:
    """`bench.gpu.run` installs nothing, and is called on machines of others."""
    words = [sys.executable, "-S", "-m", "bench.gpu.run", "--rehearse"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=ROOT, env={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stdout.startswith("needs:") and "torch, numpy, einops, triton" in done.stdout.splitlines()[-1]


@pytest.mark.exhaustive
def test_what_a_bare_machine_lacks_is_not_imported() -> None:
    """Neither by the commands, which make all their cases, nor by the checks of comms that they run."""
    lacking = ("pytest", "rich", "scipy", "matplotlib", "setuptools", "hypothesis", "triton")
    code = f"""import sys
sys.modules.update(dict.fromkeys({lacking}))
import bench.gpu.lost, bench.gpu.nccl, bench.gpu.run, tests.comm.device, tests.comm.peer_cases
assert all([make(False) for make in bench.gpu.run.slices().values()]) and bench.gpu.nccl.slices(False, 8)"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=ROOT)


def over_gloo(comm: Any, path: Path, *names: str) -> list[dict[str, Any]]:
    """What `bench.gpu.nccl` measures on one rank, over gloo."""
    nccl = import_module("bench.gpu.nccl")
    torch.set_num_threads(1)
    words = [word for name in names for word in ("--slice", name)]
    return nccl.measured(comm, nccl.parser().parse_args(["--rehearse", "--json", str(path), *words]))


@pytest.mark.parametrize(
    "names", [("hops", "all-to-alls", "sums", "agree"), pytest.param(("layers",), marks=pytest.mark.exhaustive)]
)
def test_transfers_over_several_gpus_are_rehearsed_and_not_taken_twice(names: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "nccl.jsonl"
    run_processes(2, over_gloo, path, *names)
    text = path.read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert {row["slice"] for row in rows if "ms" in row} == set(names) and not any("error" in row for row in rows)
    assert run_processes(2, over_gloo, path, *names) == [[], []] and path.read_text() == text


@pytest.mark.exhaustive  # processes of its own
def test_lost_ranks_are_rehearsed(tmp_path: Path) -> None:
    path = tmp_path / "lost.jsonl"
    assert import_module("bench.gpu.lost").main(["--rehearse", "--timeout", "4", "--json", str(path)]) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["case"], row["ok"]) for row in rows] == [("killed", True), ("stopped", True)]


def test_a_profile_is_rehearsed(tmp_path: Path) -> None:
    code, rows = rehearsed(tmp_path / "rows.jsonl", "--slice", "profile", "--case", "ring")
    assert code == 0 and {row["mode"] for row in rows} >= {"forward, one launch", "forward, ranks", "backward, ranks"}


def test_the_page_has_the_table_of_the_published_workload() -> None:
    assert import_module("bench.gpu.magi").table([], 8) in (ROOT / "docs" / "gpus.md").read_text()


def test_a_trace_of_a_call_shows_what_lies_under_computation(tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    assert called("bench.cpu.timeline", "--tokens", 256, "--calls", 1, "--out", out) == 0
    names = {event.get("name", "") for event in json.loads(out.read_text())["traceEvents"]}
    for what in ("seqpar compute", "seqpar differentiate"):
        assert any(name.startswith(what) for name in names), what


def test_tapes_note_the_bytes_that_plans_predict() -> None:
    planned, v = import_module("bench.planner.planned"), import_module("bench.lib.virtual")
    small = replace(planned.SHAPE, hidden=32, heads=4, kv_heads=4, dim=8, ffn=16)
    blocks, machine = planned.blocks_of(small), Hardware.preset("cpu")
    for name, plan in planned.plans([300, 20, 5, 41], 4, small, machine).items():
        for rank in range(4):
            tape = planned.recorded(planned.Layers(plan, rank, small, blocks), v.Tape(rank, 4))
            sent = sum(sum(event.sent.values()) for event in tape if isinstance(event, v.Post))
            assert sent == sum(plan.bytes(rank, heads=4, kv_heads=4, dim=8, backward=b) for b in (False, True)), name


def test_the_simulator_writes_what_it_shows_and_resumes(tmp_path: Path) -> None:
    path = tmp_path / "simulate.json"
    words = ["--ranks", "8", "--hardware", "h100", "--distributions", "wlb", "--batches", "2", "--json", str(path)]
    simulate = import_module("bench.planner.simulate")
    simulate.main([*words, "--policies", "seqpar,laminar"])
    simulate.main([*words, "--policies", "seqpar,laminar,wlb", "--resume"])
    rows = json.loads(path.read_text())["rows"]
    assert [row["policy"] for row in rows] == ["seqpar", "laminar", "wlb"]
    assert all(1 <= row["free_mean"] <= row["free_max"] for row in rows)


@pytest.mark.skipif(native.missing() is not None, reason=native.missing() or "")
def test_what_users_write_by_hand_is_exact_and_timed_beside_seqpar() -> None:
    peers = import_module("bench.peers.attention")
    case = import_module("bench.peers.case").Case((64, 32), heads=4, kv_heads=1, dim=8, causal=True)
    by_hand = tuple(title for title in peers.PEERS if "by hand" in title or "process" in title or "documents" in title)
    outcomes = run_processes(2, peers.measure, case, 2, by_hand, ("fetch", "Ulysses"))[0]
    assert len(outcomes) == 5 + 2 * 2
    for title, found in outcomes.items():
        assert found.error < 1e-5 and all(0 < t.forward < t.both for t in found.turns), title


@pytest.mark.parametrize("group", list(GROUPS))
def test_every_group_of_bits_has_cases(group: str) -> None:
    assert len(cases(group)) >= 10


def test_a_changed_bit_is_found_and_names_its_case(monkeypatch: pytest.MonkeyPatch) -> None:
    group, merge = cases("merge"), seqpar.merge
    old = {"merge": {name: outcome(case) for name, case in group.items()}}
    monkeypatch.setattr(seqpar, "merge", lambda *x: tuple(y + 4 * torch.finfo(y.dtype).eps for y in merge(*x)))
    _, different, broken = bits.compare(old, {"merge": {name: outcome(case) for name, case in group.items()}})
    assert different and all(line.startswith("merge: merge") for line in different) and not broken


def test_functions_are_counted_once_and_only_those_of_seqpar() -> None:
    x, positions, frequencies = torch.zeros(4, 2, 8), torch.arange(4), torch.ones(4)
    names = shape.entered(lambda: [seqpar.rotary(x, positions, frequencies) for _ in range(3)])
    assert sum(name.endswith(" rotary") for name in names) == 1 and len(names) == len(set(names))
    assert shape.entered(lambda: torch.ones(3).sum()) == []


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_a_ratio_of_times_is_found_within_its_interval(factor: float) -> None:
    rng = np.random.default_rng(0)
    old = rng.normal(10.0, 0.3, 24)
    middle, low, high = host_time.ratio(old.tolist(), (old * factor * rng.normal(1.0, 0.02, 24)).tolist())
    assert low < factor < high and middle == pytest.approx(factor, abs=0.02)
    assert (low > host_time.BEGINS) == (factor == 1.1)
