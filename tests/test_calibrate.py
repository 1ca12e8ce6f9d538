"""What `seqpar calibrate` times and writes: the emulated rank computes its share of a plan, refusals are named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import seqpar
import seqpar.launch
from seqpar.cli import calibrate, main, measure
from seqpar.planner import Hardware, ModelShape

ROOT = Path(__file__).parent.parent
TINY = ModelShape.preset("tiny")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """A rank's thread, as in the command; the others' number comes back afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.exhaustive
def test_a_machine_is_measured_and_its_file_loads(tmp_path: Path) -> None:
    out = tmp_path / "machine.json"
    command = [sys.executable, "-m", "seqpar", "calibrate", "--quick", "--device", "cpu", "--out", str(out), "--json"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env, cwd=tmp_path)
    # A machine that is busy with something else may spoil a fit, and the command must say so.
    spoilt = (
        "measure again on an idle machine",
        "are no slower for more bytes",
        "no slower for more pairs",
    )
    if done.returncode == 2 and any(words in done.stderr for words in spoilt):
        assert not out.exists()
        return
    assert done.returncode == 0, done.stderr
    hardware = Hardware.load(out)
    data = json.loads(out.read_text())
    assert json.loads(done.stdout) == data
    assert hardware.node == os.cpu_count()
    assert hardware.source.startswith("measured by seqpar calibrate on ")
    assert 1e7 < hardware.attention.rate < 1e14
    assert 1e7 < hardware.linear_rate < 1e14
    assert hardware.inside.bandwidth > 1e5 < hardware.across.bandwidth
    assert 0 <= hardware.hidden <= 1 and data["hidden"] == hardware.hidden
    measured = data["measured"]
    assert set(measured["errors"]) == set(measured["rows"]) == {"attention", "linear", "inside", "across"}
    assert all(0 <= each["mean"] <= 0.25 for each in measured["errors"].values())
    assert measured["versions"]["torch"] == torch.__version__
    assert measured["model"] == "tiny"
    assert measured["kernel"] in seqpar.kernels.available()


@pytest.mark.parametrize("case", measure.cases(256), ids=str)
def test_the_facts_of_a_case_are_those_of_its_plan(case: measure.Case) -> None:
    attended = measure.TimedCase(case, TINY, CPU)
    facts, plan = attended.facts, attended.plan
    mask = seqpar.Mask(case.lengths, window=(case.window, None))
    lo, hi = mask.bounds(plan.layout.positions(0))
    assert facts["area"] == (hi - lo).sum()
    assert facts["queries"] == plan.layout.tokens(0) == attended.tensors[0].shape[0]
    assert facts["keys"] <= mask.tokens - facts["queries"]
    # Of zigzag shards rank 0 has a head and a tail.
    assert facts["pieces"] == len(case.lengths) * (1 if case.ranks == 1 else 2)
    assert (facts["keys"] == 0) == (case.ranks == 1)
    assert facts["steps"] == 1 if case.ranks == 1 else facts["steps"] >= 2
    assert all(seconds > 0 for seconds in attended.run())


def test_more_steps_are_made_of_the_same_keys() -> None:
    few, many = (measure.TimedCase(measure.Case((512,), 8, steps), TINY, CPU).facts for steps in (2, 9))
    assert few["steps"] < many["steps"]
    assert {k: v for k, v in few.items() if k != "steps"} == {k: v for k, v in many.items() if k != "steps"}


@pytest.mark.parametrize("model", ["tiny", "gpt-7b", "mixtral-8x7b", "deepseek-v3"])
def test_a_block_counts_the_matrices_that_it_multiplies(model: str) -> None:
    shape = replace(
        ModelShape.preset(model), hidden=64, dim=32, v_dim=None, ffn=96, heads=2, kv_heads=1, q_rank=None,
        kv_rank=None, rope_dim=0, latents=False,
    )  # fmt: skip
    if shape.experts:
        shape = replace(shape, expert_ffn=16)
    block = measure.DecoderBlock(shape)
    x = torch.randn(5, 64)
    assert block(x).shape == (5, 64)
    if not shape.experts:
        assert block.flops == 3 * shape.linear_flops // shape.layers


def test_a_link_gets_more_turns_while_its_fit_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fake(ranks: int, fn: object, sizes: tuple[int, ...], turns: int, cuda: bool, *, timeout: float) -> list:
        calls.append(ranks)
        # Unseen sizes take far too long in the first round, and as long as they should afterwards.
        slow = [5.0 if len(calls) == 1 and size in calibrate.SIZES["cpu"][1] else 1.0 for size in sizes]
        turns = 1 if len(calls) == 1 else 4
        return [{"inside": [[s * (1e-4 + size / 1e9)] * turns for size, s in zip(sizes, slow)]}] * ranks

    monkeypatch.setattr(seqpar.launch, "run_processes", fake)
    fits, rows = calibrate._links(CPU, 3, quick=True)
    assert calls == [3, 3]
    assert fits["inside"].value.bandwidth == pytest.approx(1e9)
    assert len(rows["inside"]) == 7

    def hopeless(ranks: int, fn: object, sizes: tuple[int, ...], *_: object, timeout: float) -> list:
        calls.append(ranks)
        return [{"inside": [[1 / size] for size in sizes]}]

    monkeypatch.setattr(seqpar.launch, "run_processes", hopeless)
    with pytest.raises(ValueError, match="inside: the measured exchanges are no slower for more bytes"):
        calibrate._links(CPU, 2, quick=True)
    assert len(calls) == 2 + calibrate.ROUNDS


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ranks", "1"], "--ranks must be 2 to "),
        (["--model", "huge"], "no model is called 'huge'"),
        (["--out", "nowhere/at/all.json"], "is not a directory"),
        (["--device", "cuda"], "torch sees none"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if "cuda" in flags:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    elif "--device" not in flags:
        flags = [*flags, "--device", "cpu"]
    assert main(["calibrate", *flags]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_refused_fit_writes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("attention: the fit is off by 40%")

    monkeypatch.setattr(calibrate, "measured", refuse)
    assert main(["calibrate", "--device", "cpu", "--out", str(tmp_path / "x.json")]) == 2
    assert "seqpar calibrate: attention: the fit is off by 40%" in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()


def test_the_table_says_what_is_above_5_percent_and_what_was_not_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    errors = {
        "attention": {"mean": 0.061, "unseen": [0.1, -0.022]},
        "linear": {"mean": 0.02, "unseen": [-0.02]},
        "inside": {"mean": 0.03, "unseen": [0.03]},
    }
    about = {"model": "tiny", "kernel": "native", "errors": errors}
    calibrate.show(Hardware.preset("cpu").to_dict() | {"measured": about})
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()[2:6]}
    assert "6.1%, at most 10.0%" in lines["attention"] and lines["attention"].endswith("above 5%")
    assert "435.0 GFLOP/s" in lines["linear"] and lines["linear"].endswith("2.0%, at most 2.0%")
    assert "3.51 GB/s after 300 us" in lines["inside"]
    assert lines["across"].endswith("not measured: as inside")
