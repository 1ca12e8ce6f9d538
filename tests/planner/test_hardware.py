"""What a machine's figures may be, how they are kept in files, and that the presets say where theirs come from."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from seqpar.planner import AttentionCost, Hardware, Link, ModelShape, plan_batch
from seqpar.planner.hardware import PRESETS, RANGES, p2p_channels

RESULTS = Path(__file__).parents[2] / "bench" / "results"


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_names_its_sources_and_survives_a_file(name: str, tmp_path: Path) -> None:
    hardware = Hardware.preset(name)
    assert hardware.name == name
    assert len(hardware.source) > 60
    hardware.save(tmp_path / "machine.json")
    assert Hardware.load(tmp_path / "machine.json") == hardware == Hardware.from_dict(hardware.to_dict())
    assert hardware.inside.bandwidth > hardware.across.bandwidth


def test_an_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no hardware is called 'tpu'; known: h100, .*seqpar calibrate"):
        Hardware.preset("tpu")


def test_flexsps_constants_come_back() -> None:
    hardware, model = Hardware.preset("a100-flexsp"), ModelShape.preset("gpt-7b")
    tokens = 65_536
    both = sum(
        hardware.attention.seconds(model.pair_flops, area=tokens**2 / 2, queries=0, backward=backward)
        for backward in (False, True)
    )
    assert model.layers * both == pytest.approx(5.128e-9 * tokens**2, rel=1e-3)
    assert 3 * model.linear_flops / hardware.linear_rate == pytest.approx(1.8396e-4, rel=1e-3)
    # 64 ranks: 4 tensors of a layer, forward and backward, at 4.87 GiB/s; 56 of 64 parts leave the node.
    sent = tokens * model.hidden * 2 / 64
    assert hardware.across.seconds(sent * 56 / 64) == pytest.approx(sent / 2**20 / 4.87 / 1e3, rel=1e-6)


@pytest.mark.parametrize(
    ("length", "ranks", "milliseconds"), [(4096, 1, 1.055), (16384, 1, 13.50), (16384, 8, 2.103), (65536, 8, 25.73)]
)
def test_rows_of_the_h100_are_within_13_percent_of_distcas_profile(
    length: int, ranks: int, milliseconds: float
) -> None:
    # FlashAttention-2's own rate, which DistCA's table has, instead of the preset's later kernel.
    fa2 = replace(Hardware.preset("h100").attention, rate=32768 / 9.56e-11)
    mine = length / ranks
    seconds = fa2.seconds(4 * 64 * 128, area=length * mine / 2, queries=mine, keys=length - mine)
    assert seconds * 1e3 == pytest.approx(milliseconds, rel=0.13)


@pytest.mark.parametrize(("size", "microseconds"), [(33554432, 124.4), (268435456, 675.8), (8589934592, 20442.0)])
def test_nvlink_is_within_5_percent_of_nccls_all_gather(size: int, microseconds: float) -> None:
    inside = Hardware.preset("h100").inside
    assert inside.seconds(size * 7 / 8, peers=7) * 1e6 == pytest.approx(microseconds, rel=0.05)


def test_a_peer_gets_the_channels_that_nccl_gives_a_pair() -> None:
    assert [p2p_channels(ranks) for ranks in (1, 2, 3, 4, 8, 16, 64, 72)] == [32, 16, 8, 8, 4, 2, 1, 1]
    machine = Hardware.preset("h100")
    assert machine.among(8) is machine
    for ranks, channels in ((2, 16), (4, 8), (16, 2), (64, 1)):
        link = machine.among(ranks).inside
        assert (link.channels, link.hop) == (channels, pytest.approx(channels * 20.6e9))
    cpu = Hardware.preset("cpu")
    assert cpu.among(4) is cpu
    slow = replace(machine, inside=replace(machine.inside, hop=RANGES["hop"][0]))
    assert slow.among(72).inside.hop == RANGES["hop"][0], "the share of a hop is a rate that a link may have"
    inside = Hardware.preset("h100").inside
    assert inside.channels == 4 and inside.alone == 4 * 20.6e9 < inside.bandwidth
    assert inside.seconds(1e9) == pytest.approx(44e-6 + 1e9 / 82.4e9)
    assert inside.seconds(1e9, peers=2) == pytest.approx(44e-6 + 1e9 / 164.8e9)
    assert inside.seconds(1e9, peers=5) == pytest.approx(44e-6 + 1e9 / 367e9), "five peers fill the link"
    assert Link(latency=0.0, bandwidth=4.0).seconds(8) == Link(latency=0.0, bandwidth=4.0, hop=9.0).seconds(8) == 2.0
    for channels in (0, -1, 2.0, True, "4"):
        with pytest.raises(ValueError, match="channels must be an integer of at"):
            replace(inside, channels=channels)


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "a100-flexsp"])
def test_a_forecast_names_the_kernel_and_the_channels_and_what_nobody_measured(name: str) -> None:
    machine, on_gpus = Hardware.preset(name), name != "cpu"
    for ranks, channels in ((4, 8), (8, 4), (256, 4)):
        plan = plan_batch([9000, 700, 50], ranks, model="tiny", hardware=machine)
        facts, line = plan.forecast.facts(), str(plan.forecast).splitlines()[-1]
        assert f"kernel {machine.kernel}; one peer of a node" in line and line in plan.describe()
        assert facts["kernel"] == machine.kernel and facts["channels"] == (channels if on_gpus else None)
        assert (f"over {channels} NCCL channels" in line) == on_gpus
        assert (f"unmeasured assumptions: {machine.assumed}" in line) == on_gpus
    assert "hop inside a node" in machine.assumed or not on_gpus


def test_an_h200_has_the_coefficients_that_fit_its_record() -> None:
    pytest.importorskip("triton", reason="triton has wheels for Linux only")
    from bench.gpu import waves

    fitted, rows = waves.planned(waves.read(waves.RECORDED))
    assert len(rows) == 26 and max(abs(row.error) for row in rows) < 0.05
    attention = Hardware.preset("h200").attention
    for field in fields(attention):
        preset, found = getattr(attention, field.name), getattr(fitted, field.name)
        assert preset == pytest.approx(found, rel=0.01), field.name


def test_seconds_of_a_call_add_up() -> None:
    attention = AttentionCost(rate=100.0, backward_rate=50.0, piece=0.5, query_pairs=2.0, key_pairs=3.0, stage=0.25)
    call = {"area": 7, "queries": 4, "keys": 5, "pieces": 2, "steps": 3}
    assert attention.seconds(10.0, **call) == pytest.approx(3 * 0.25 + 2 * 0.5 + 10 / 100 * (7 + 8 + 15))
    backward = attention.seconds(10.0, **call, backward=True)
    assert backward == pytest.approx(3 * 0.25 + 2 * 0.5 + 25 / 50 * (7 + 8 + 15))
    assert attention.seconds(10.0, area=7, queries=4) == pytest.approx(0.25 + 0.5 + 10 / 100 * 15)


def test_nothing_sent_takes_no_time() -> None:
    link = Link(latency=1.0, bandwidth=4.0)
    assert link.seconds(0) == 0
    assert link.seconds(8) == 3.0


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), "fast", True, 1e40, 1e-320, 10**400])
def test_figures_that_cannot_be_are_refused(value: object) -> None:
    hardware = Hardware.preset("h100")
    with pytest.raises(ValueError, match="bandwidth must be a number from 1 to 1e\\+30, got"):
        replace(hardware.inside, bandwidth=value)
    with pytest.raises(ValueError, match="backward_rate must be a number from 1 to 1e\\+30, got"):
        replace(hardware.attention, backward_rate=value)
    with pytest.raises(ValueError, match="linear_rate must be a number from 1 to 1e\\+30, got"):
        replace(hardware, linear_rate=value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory": 0}, "memory must be an integer of at least 1"),
        ({"memory": 8e9}, "memory must be an integer"),
        ({"node": 0}, "node must be"),
        ({"reserve": -1}, "reserve must be"),
        ({"reserve": 1 << 60}, "leaves nothing of memory"),
        ({"source": ""}, "source must be a str"),
        ({"inside": 3}, "inside must be a Link"),
    ],
)
def test_machines_that_cannot_be_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(Hardware.preset("cpu"), **change)


def test_a_file_may_leave_out_defaults_and_carry_measurements(tmp_path: Path) -> None:
    data = Hardware.preset("cpu").to_dict() | {"measured": {"rows": [1, 2]}}
    del data["node"], data["reserve"]
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(data))
    assert Hardware.load(path) == Hardware.preset("cpu")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.pop("memory"), "hardware has no memory"),
        (lambda d: d.update(colour="red"), "hardware has unknown keys colour"),
        (lambda d: d["attention"].pop("rate"), "attention has no rate"),
        (lambda d: d["inside"].update(jitter=1.0), "inside has unknown keys jitter"),
        (lambda d: d["inside"].update(channels=1.5), "channels must be an integer of at least 1, got 1.5"),
        (lambda d: d.update(kernel=3), "kernel must be a str, got 3"),
        (lambda d: d.update(across=None), "across must be a mapping"),
        (lambda d: d.update(schema=2), "schema 1, got 2"),
        (lambda d: d["across"].update(bandwidth=-1), "bandwidth must be a number from 1 to 1e.30, got -1"),
    ],
)
def test_files_that_are_no_hardware_are_refused_by_name(tmp_path: Path, edit: object, message: str) -> None:
    data = Hardware.preset("h100").to_dict()
    edit(data)  # type: ignore[operator]
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=f"machine.json is not a hardware file: .*{message}"):
        Hardware.load(path)


def test_the_cpu_is_the_one_that_this_project_measured() -> None:
    hardware = Hardware.preset("cpu")
    rows = json.loads((RESULTS / "cpu_attention.json").read_text(encoding="utf-8"))["rows"]
    rows = [r for r in rows if (r["threads"], r["dtype"], r["dim"]) == (1, "bfloat16", 128) and r["mask"] != "packed"]
    assert len(rows) == 12
    for row in rows:
        tokens, backward = row["tokens"], row["direction"] == "backward"
        area = tokens**2 if row["mask"] == "full" else tokens * (tokens + 1) // 2
        flops = 4 * row["heads"] * row["dim"]
        measured = (2.5 if backward else 1.0) * flops * area / (row["seqpar"] * 1e9)
        predicted = hardware.attention.seconds(flops, area=area, queries=tokens, backward=backward)
        assert predicted == pytest.approx(measured, rel=0.08), row
    ring = json.loads((RESULTS / "comm.json").read_text(encoding="utf-8"))
    for link, name in ((hardware.inside, "ring, shm"), (hardware.across, "ring, gloo")):
        assert link.bandwidth == pytest.approx(ring["gb_per_second"][name] * 1e9 / ring["ranks"], rel=0.01)
