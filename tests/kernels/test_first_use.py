"""The first use of a kernel on a machine, with stand-ins for libraries and the CPU as the device."""

from __future__ import annotations

import json
import re
import threading
import time
import warnings
from dataclasses import replace

import pytest
import torch

import seqpar
from seqpar.comm import LocalComm
from seqpar.kernels import KERNELS, CallSpec, Operands, choose, explain, first_use, order, preference
from seqpar.kernels.blockwise import Blockwise
from seqpar.kernels.first_use import FirstUse, wrong
from seqpar.kernels.triton import Triton
from seqpar.kernels.vendor import Segmented
from seqpar.ops.attention.signature import Signature
from seqpar.testing import run_threads
from tests.kernels.test_vendor import Flash, Squares

CPU = torch.device("cpu")
CALL = CallSpec("cuda", 90, torch.bfloat16, heads=32, kv_heads=8, dim=64, v_dim=64, merges=False)
CALLS = {
    "bf16": CALL,
    "merged": replace(CALL, merges=True, fast=True),
    "tree, fp16": replace(CALL, until=True, merges=True, dtype=torch.float16),
    "forward, one key head each": replace(CALL, heads=8, grads=False),
    "fp32": replace(CALL, dtype=torch.float32),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("kernel", [Segmented(Flash()), Segmented(Squares()), Blockwise()], ids=lambda k: k.name)
def test_a_kernel_that_is_right_passes(kernel, call) -> None:
    assert wrong(kernel, call, CPU) is None


@pytest.mark.parametrize("option", ["softcap", "alibi", "dropout"])
def test_scores_that_are_not_just_products(option) -> None:
    assert wrong(Blockwise(), replace(CALL, **{option: True}), CPU) is None


class Spoilt(Flash):
    """One that is wrong in one tensor, and there perhaps only for one kind of mask, and in one row."""

    def __init__(self, where: str, kind: str = "") -> None:
        super().__init__()
        self.where, self.kind = where, kind

    def _spoil(self, name, x, call):
        kind = "window" if call.left >= 0 else "causal" if call.causal else "full"
        if name == self.where and self.kind in ("", kind):
            x = x.clone()
            x.select(1 if name == "lse" else 0, 7).mul_(1.5)
        return x

    def attend(self, q, k, v, call, scale):
        out, lse = super().attend(q, k, v, call, scale)
        return self._spoil("out", out, call), self._spoil("lse", lse, call)

    def differentiate(self, q, k, v, given, call, scale, deterministic):
        grads = super().differentiate(q, k, v, given, call, scale, deterministic)
        return tuple(self._spoil(name, x, call) for name, x in zip(("dq", "dk", "dv"), grads, strict=True))


@pytest.mark.parametrize("kind", ["full", "causal", "window"])
@pytest.mark.parametrize("where", ["out", "lse", "dq", "dk", "dv"])
def test_one_wrong_row_under_one_kind_of_mask_is_found(where, kind) -> None:
    found = wrong(Segmented(Spoilt(where, kind)), CALL, CPU)
    assert found.startswith(f"with a {kind} mask, ") and (where in found or where in ("out", "lse")), found


def test_a_position_kernel_that_is_wrong_on_trees_alone_is_found() -> None:
    class Deaf(Blockwise):
        """It does not hear where keys end."""

        def forward(self, x, into):
            super().forward(replace_facts(x), into)

    def replace_facts(x):
        return Operands(x.q, x.k, x.v, replace(x.facts, until=None), x.score)

    assert wrong(Deaf(), CALL, CPU) is None
    assert wrong(Deaf(), replace(CALL, until=True), CPU).startswith("with a tree mask, out is off by ")


def test_results_that_are_not_numbers_are_found() -> None:
    class NaN(Flash):
        def differentiate(self, *arguments):
            return tuple(torch.full_like(x, torch.nan) for x in super().differentiate(*arguments))

    assert wrong(Segmented(NaN()), CALL, CPU) == "with a full mask, dq is off by nan"


def test_gradients_that_the_kernel_leaves_to_another_are_that_ones() -> None:
    assert wrong(Segmented(Spoilt("dq"), borrows=True), CALL, CPU) is None


def test_short_segments_of_a_check_are_computed_by_the_library() -> None:
    """In a call they would go to the position kernel."""
    library = Spoilt("out")
    library.rows_per_segment = library.rows_per_call = 512
    assert wrong(Segmented(library), CALL, CPU) is not None and library.rows_per_segment == 512


def test_a_check_takes_at_most_50_ms() -> None:
    def once() -> float:
        began = time.process_time()
        assert wrong(Segmented(Flash()), CALL, CPU) is None
        return time.process_time() - began

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert min(once() for _ in range(5)) < 0.05
    finally:
        torch.set_num_threads(threads)


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """A file of the driver's version."""
    path = tmp_path / "version"
    path.write_text("NVRM version: 570.1\n")
    monkeypatch.setattr(first_use, "DRIVER", path)
    return path


@pytest.fixture
def counted(monkeypatch):
    """The kernels that were checked."""
    checked = []

    def counting(kernel, call, device):
        checked.append(kernel.name)
        return wrong(kernel, call, device)

    monkeypatch.setattr(first_use, "wrong", counting)
    return checked


def process(tmp_path) -> FirstUse:
    """What another process begins with."""
    return FirstUse(str(tmp_path / "cache" / "kernels.json"), "cpu")


def test_an_outcome_is_remembered_until_the_driver_changes(tmp_path, driver, counted) -> None:
    right, bad = Segmented(Flash()), Segmented(Spoilt("dv"))
    bad.name = "bad"
    first = process(tmp_path)
    assert first.fault(right, CALL) is None and first.fault(right, replace(CALL, heads=16)) is None
    with pytest.warns(
        UserWarning, match='kernel="auto" passes over bad, which is wrong on this machine: with a full m'
    ):
        assert "dv is off" in first.fault(bad, CALL)
    with warnings.catch_warnings():  # one warning is enough
        warnings.simplefilter("error")
        assert "dv is off" in first.fault(bad, CALL) and first.fault(bad, replace(CALL, dim=32, v_dim=32))
    assert counted == ["flash", "bad", "bad"]
    second = process(tmp_path)
    with pytest.warns(UserWarning, match="cache/kernels.json"):
        assert second.fault(right, CALL) is None and "dv is off" in second.fault(bad, CALL)
    assert len(counted) == 3
    driver.write_text("NVRM version: 575.0\n")
    assert process(tmp_path).fault(right, CALL) is None and len(counted) == 4
    assert len(json.loads((tmp_path / "cache" / "kernels.json").read_text())) == 4


@pytest.mark.parametrize("obstacle", ["folder", "text", "driver"])
def test_where_it_cannot_be_remembered_each_process_checks(obstacle, tmp_path, driver, counted) -> None:
    if obstacle == "folder":
        (tmp_path / "cache").write_text("not a folder")
    elif obstacle == "text":
        (tmp_path / "cache" / "kernels.json").mkdir(parents=True)
    else:
        driver.unlink()
    for _ in range(2):
        assert process(tmp_path).fault(Segmented(Flash()), CALL) is None
    assert counted == ["flash", "flash"]


def test_a_file_that_is_not_one_is_replaced(tmp_path, driver, counted) -> None:
    for text in ("", "[1", "3", '{"a": 1}'):
        path = tmp_path / "cache" / "kernels.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        assert process(tmp_path).fault(Segmented(Flash()), CALL) is None
        assert process(tmp_path).fault(Segmented(Flash()), CALL) is None
    assert len(counted) == 4


def test_a_library_that_raises_is_checked_again_by_the_next_process(tmp_path, driver, counted) -> None:
    class Full(Flash):
        def attend(self, *arguments):
            raise RuntimeError("out of memory")

    for _ in range(2):
        with pytest.warns(UserWarning, match="it fails: RuntimeError: out of memory"):
            process(tmp_path).fault(Segmented(Full()), CALL)
    assert counted == ["flash", "flash"]


def test_modes_of_the_caller_do_not_reach_the_check(tmp_path) -> None:
    with torch.inference_mode(), torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
        assert process(tmp_path).fault(Segmented(Flash()), CALL) is None


def test_on_the_cpu_nothing_is_checked_or_written(tmp_path, driver, counted) -> None:
    asked = process(tmp_path)
    for kernel in KERNELS:
        assert asked.fault(kernel, replace(CALL, device="cpu")) is None
    assert asked.fault(Blockwise(), CALL) is None, "plain torch is right on every device"
    assert not counted and not (tmp_path / "cache").exists() and not asked._found


@pytest.fixture
def stand_ins(monkeypatch, tmp_path):
    """A machine whose libraries are stand-ins, best first: flash, squares. Other kernels are plain torch."""
    monkeypatch.setattr(Triton, "refuses", lambda self, spec: "triton is not here")
    monkeypatch.setattr(preference, "VENDORS", (Segmented(Squares()), Segmented(Flash())))
    monkeypatch.setitem(preference.PLACES, 90, ("flash", "squares"))
    monkeypatch.setitem(preference.UNMEASURED, 90, ("flash",))
    monkeypatch.setattr(preference, "FIRST_USE", process(tmp_path))


def test_auto_takes_the_place_of_a_figure_once_the_kernel_is_right(stand_ins, monkeypatch, tmp_path) -> None:
    assert order(CALL)[:2] == ("squares", "flash")
    assert choose("auto", CALL).name == "flash"
    assert order(CALL)[:2] == ("flash", "squares")
    assert order(replace(CALL, dtype=torch.float16))[:2] == ("squares", "flash"), "a check is valid for its kind"
    monkeypatch.setattr(preference, "FIRST_USE", process(tmp_path))
    monkeypatch.setattr(preference, "VENDORS", (Segmented(Squares()), Segmented(Spoilt("dk"))))
    with pytest.warns(UserWarning, match="passes over flash"):
        assert choose("auto", CALL).name == "squares"
    assert order(CALL)[:2] == ("squares", "flash")
    told = dict(line.split(maxsplit=1) for line in explain(CALL).splitlines())
    assert told["flash"].startswith("by name; its first check on this machine failed: with a full mask, dk is off")
    assert told["squares"] == "chosen by auto"
    assert choose("flash", CALL).name == "flash", "who names a kernel gets it"


def test_a_library_is_passed_over_with_the_kernel_that_computes_its_rest(stand_ins, monkeypatch) -> None:
    class WithRest(Segmented):
        def specialised_for(self, spec):
            rest = Segmented(Spoilt("out"))
            rest.name = "rest"
            return Segmented(self.library, rest=rest)

    monkeypatch.setattr(preference, "VENDORS", (WithRest(Flash()), Segmented(Squares())))
    with pytest.warns(UserWarning, match="passes over rest"):
        assert choose("auto", CALL).name == "squares"


class OfRanks:
    """A `FirstUse` for each thread. wrong: rank -> kernels that fail their check on it."""

    def __init__(self, wrong: dict[int, tuple[str, ...]]) -> None:
        self.wrong, self.own = wrong, threading.local()

    def begin(self, rank: int) -> None:
        self.own.rank, self.own.faults = rank, {}

    def known(self, name, call):
        return self.own.faults.get((name, call), "not checked")

    def fault(self, kernel, call):
        found = "out is off" if kernel.name in self.wrong.get(self.own.rank, ()) else None
        return self.own.faults.setdefault((kernel.name, call), found)


def taken_by_ranks(wrong, monkeypatch, caplog, capability=lambda rank: 90) -> tuple[list[set[str]], list[list[int]]]:
    """The kernels that 3 ranks take in three calls with a plan each, and how often each rank gathers for each call."""
    asked, spec = OfRanks(wrong), Signature.spec
    monkeypatch.setattr(preference, "FIRST_USE", asked)
    monkeypatch.setattr(
        Signature, "spec",
        lambda self, plan: replace(spec(self, plan), device="cuda", capability=capability(asked.own.rank)),
    )  # fmt: skip

    def run(comm: LocalComm) -> list[int]:
        asked.begin(comm.rank)
        gather, counts, draw = comm.gather, [], torch.Generator().manual_seed(3)
        comm.gather = lambda *a, **b: counts.append(counts.pop() + 1) or gather(*a, **b)
        q, k, v = (torch.randn(24, 2, 8, generator=draw, dtype=torch.float64) for _ in range(3))
        expected = seqpar.testing.dense_attention(q, k, v, seqpar.Mask([24]))[0]
        for _ in range(3):
            counts.append(0)
            plan = seqpar.Plan(seqpar.Mask([24]), seqpar.Layout.contiguous(24, 3), transport="gather")
            shards = [seqpar.shard(x, plan, comm.rank) for x in (q, k, v)]
            out = seqpar.attention(*shards, plan, comm, accuracy="fast")
            torch.testing.assert_close(out, seqpar.shard(expected, plan, comm.rank), rtol=0, atol=1e-12)
        return counts

    with caplog.at_level("DEBUG", logger="seqpar.ops"):
        caplog.clear()
        counts = run_threads(3, run)
    said = [re.search(r"call (\d+), .*, (\w+)$", record.getMessage()) for record in caplog.records]
    kernels: dict[str, set[str]] = {}
    for found in filter(None, said):
        kernels.setdefault(found[1], set()).add(found[2])
    return list(kernels.values()), counts


@pytest.mark.parametrize(
    ("faults", "taken", "gathers"),
    [
        ({}, "flash", 1),
        ({1: ("flash",)}, "squares", 2),
        ({1: ("flash",), 2: ("squares",)}, "blockwise", 3),
        ({0: ("flash", "squares"), 2: ("flash",)}, "blockwise", 2),
    ],
)
def test_a_kernel_that_failed_on_one_rank_is_passed_over_on_all(
    faults, taken, gathers, stand_ins, monkeypatch, caplog
) -> None:
    """Ranks agree in the first call of a kind, and in no later one."""
    kernels, counts = taken_by_ranks(faults, monkeypatch, caplog)
    assert kernels == [{taken}] * 3
    assert counts == [[gathers, 0, 0]] * 3


def test_ranks_whose_gpus_have_different_best_kernels_are_told(stand_ins, monkeypatch, caplog) -> None:
    monkeypatch.setitem(preference.PLACES, 100, ("squares", "flash"))
    with pytest.raises(ValueError, match="attention: ranks differ in kernel: 'flash' on ranks 0, 2; 'squares' on ran"):
        taken_by_ranks({}, monkeypatch, caplog, capability=lambda rank: 100 if rank == 1 else 90)
