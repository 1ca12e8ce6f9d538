"""dk and dv in shares: which key tiles are cut, the order of programs, and sums of parts and of whole tiles."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.gpu import waves
from seqpar.facts.mask import Mask
from tests.kernels import cases as suite
from tests.kernels.cases import Case

pytest.importorskip("triton", reason="triton has wheels for Linux only")
from seqpar.kernels import triton as package  # noqa: E402
from seqpar.kernels.triton import Triton, shares, tables  # noqa: E402
from seqpar.kernels.triton.config import LaunchConfig  # noqa: E402

SMALL = Triton(configure=lambda d: LaunchConfig(16, 16, 4, 1))
BASE = Case(queries=60, keys=60, heads=4, kv_heads=2, dim=16, v_dim=24, dtype=torch.float32)


@pytest.fixture
def made(monkeypatch) -> list[shares.KeyShares]:
    """The shares of every launch, of which all that may be are by tile, with cuts from little work on."""
    found: list[shares.KeyShares] = []
    share = shares.shares
    monkeypatch.setattr(tables, "shares", lambda *call: found.append(share(*call)) or found[-1])
    for name, value in (("LEAST", 4.0), ("TAIL", -1.0), ("GAIN", float("inf"))):
        monkeypatch.setattr(shares, name, value)
    monkeypatch.setattr(package, "_processors", lambda device: 2)
    return found


@pytest.mark.parametrize("mask", ["causal", "packed", "bounds", "window", "tree", "ends"])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.sampled(4)
def test_parts_and_whole_tiles_add_to_the_gradients(mask, splits, made) -> None:
    suite.equals_oracle(SMALL, replace(BASE, mask=mask, splits=splits))
    parts = np.concatenate([x.parts for x in made])
    assert all(x.by_tile for x in made) and parts.max() > 1
    assert parts.min() == 1 or splits == 1


def test_cut_tiles_give_the_same_bits_every_time(made) -> None:
    case = replace(BASE, queries=40, keys=40, mask="tree", splits=2)
    runs = []
    for _ in range(2):
        out, lse = suite.run_forward(SMALL, case)
        runs.append(suite.run_backward(SMALL, case, out, lse))
    assert any((x.parts > 1).any() for x in made)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_without_cuts_the_order_of_programs_changes_no_bit(made, monkeypatch) -> None:
    case, runs = replace(BASE, queries=40, keys=40, mask="packed"), []
    monkeypatch.setattr(shares, "LEAST", 1e9)
    monkeypatch.setattr(package, "_processors", lambda device: 1)
    for gain in (0.0, float("inf")):
        monkeypatch.setattr(shares, "GAIN", gain)
        out, lse = suite.run_forward(SMALL, case)
        runs.append(suite.run_backward(SMALL, case, out, lse))
    assert {x.by_tile for x in made} == {False, True} and all((x.parts == 1).all() for x in made)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@given(st.integers(1, 4096), st.integers(0, 4096), st.integers(1, 200))
def test_work_is_split_to_fill_the_processors_and_no_part_is_empty(programs: int, work: int, processors: int) -> None:
    n = shares.evenly(programs, work, processors)
    assert 1 <= n <= max(1, min(work, 16))
    assert n == 1 or programs * (n - 1) < 2 * processors


@pytest.mark.parametrize("name", ["packed magi", "prompt 8,192, 16 answers", "window 1,024, 64 sinks"])
def test_every_part_has_one_row_and_long_ones_come_first(name) -> None:
    by_tile = 0
    for facts in waves.facts(waves.masks()[name]):
        t = facts.tiles(64, 64)
        for kv_heads in (1, 8):
            found = shares.shares(t, kv_heads, 4, waves.PROCESSORS, 2)
            rows = sorted(zip(found.tile.tolist(), found.part.tolist(), strict=True))
            assert rows == [(tile, part) for tile, n in enumerate(found.parts.tolist()) for part in range(n)]
            each = (shares.key_work(t) * 4 / found.parts)[found.tile]
            assert not found.by_tile or (each[1:] <= each[:-1]).all()
            by_tile += found.by_tile
    assert by_tile


def test_visits_that_are_counted_are_those_that_a_launch_makes() -> None:
    for mask in (waves.masks()["prompt and answers"], Mask([900, 40, 1300], window=(200, None), sink_tokens=3)):
        for facts in waves.facts(mask):
            t = facts.tiles(64, 64)
            unit = waves.DKDV._replace(full=1.0, masked=shares.MASKED, skipped=shares.SKIPPED, program=0.0, empty=0.0)
            # by head and uncut, as processors are few
            costs = waves.of_keys(facts, unit, 1, 1, processors=1)
            assert np.allclose(costs, shares.key_work(t)[t.q_order])
