"""The simulator: costs are the planner's, every policy places every document, none is below the bound."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpar import plan_batch
from seqpar.planner import Hardware, ModelShape
from tests.cases import examples

SHAPE = replace(ModelShape.preset("llama-8b"), layers=2)
LENGTHS = st.lists(st.sampled_from([1, 7, 100, 900, 3000, 40_000, 90_000]), min_size=24, max_size=60)
NAMES = ["seqpar", "static ring", "static ulysses", "homogeneous", "megatron", "megatron hybrid", "wlb", "bytescale",
         "laminar", "dispatch", "bytes first", "flexsp"]  # fmt: skip


def module(name: str) -> ModuleType:
    return import_module(name)


def case(lengths: list[int], ranks: int, hardware: str = "h100", **options):
    machine = replace(Hardware.preset(hardware), memory=1 << 50)
    return module("bench.planner.schedules").Case.of(lengths, ranks, SHAPE, machine, **options)


@pytest.mark.parametrize("name", NAMES)
@examples(8)
@given(LENGTHS, st.sampled_from([2, 8, 16]), st.sampled_from(["h100", "h100-100g"]))
def test_every_policy_places_every_document_and_none_beats_the_bound(
    name: str, lengths: list[int], ranks: int, hardware: str
) -> None:
    if name == "flexsp" and find_spec("scipy") is None:
        pytest.skip("needs scipy")
    policy, schedules = module("bench.planner.policies").POLICIES[name], module("bench.planner.schedules")
    c = case(lengths, ranks, hardware, micro=0.001, room=max(-(-2 * sum(lengths) // ranks), 8192))
    found = []
    for knob in policy.knobs(c)[:3]:
        knob = (*knob[:2], 0.2) if name == "flexsp" else knob
        micros = policy.place(c, knob)
        if micros is not None:
            # raises unless each document is placed once, within the rows
            found.append(schedules.run(c, micros, policy.ways))
    assert all(c.bound <= o.imbalance <= o.free and c.bound <= o.lockstep and o.rows <= c.room for o in found)
    assert found or name not in ("seqpar", "static ulysses", "laminar")


def test_the_plan_costs_what_it_predicts() -> None:
    lengths = [90_000, 30_000, *[700] * 100]
    c = case(lengths, 16)
    policies = module("bench.planner.policies")
    for lockstep in policies.POLICIES["seqpar"].knobs(c):
        found = module("bench.planner.schedules").run(c, policies.POLICIES["seqpar"].place(c, lockstep))
        options = {"token_slack": policies.SLACK, "lockstep": lockstep}
        forecast = plan_batch(lengths, 16, model=SHAPE, hardware=c.machine, **options).forecast
        assert found.free == forecast.ticks.total.max() and c.bound == forecast.bound


def test_the_command_writes_what_it_shows_and_resumes(tmp_path: Path, capsys) -> None:
    path, picture = tmp_path / "simulate.json", tmp_path / "simulate.png"
    flags = ["--ranks", "8", "--hardware", "h100", "--distributions", "wlb", "--batches", "2", "--json", str(path)]
    module("bench.planner.simulate").main([*flags, "--policies", "seqpar,laminar"])
    module("bench.planner.simulate").main(
        [*flags, "--policies", "seqpar,laminar,wlb", "--resume", "--plot", str(picture)]
    )
    data = json.loads(path.read_text())
    assert data.keys() >= {"machine", "versions", "commit", "settings"} and picture.stat().st_size > 1000
    assert [row["policy"] for row in data["rows"]] == ["seqpar", "laminar", "wlb"]
    for row in data["rows"]:
        assert row["batches"] == 2 and 1 <= row["free_mean"] <= row["free_max"]
        assert row["free_mean"] == pytest.approx(1 + row["imbalance_mean"] + row["exposed_mean"])
    assert "laminar" in capsys.readouterr().out
