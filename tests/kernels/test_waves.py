"""The simulator of launches, held to the rows of an H200."""

from __future__ import annotations

import numpy as np
import pytest

from bench.gpu import waves
from bench.gpu.rows import read


@pytest.fixture(scope="module")
def rows():
    return read(waves.RECORDED)


def test_launches_that_accumulate_are_modelled_within_6_percent(rows) -> None:
    modelled = list(waves.accumulated(rows))
    assert len(modelled) == 24
    assert not [x for x in modelled if abs(x.error) > 0.06]


def test_one_causal_document_and_the_race_of_a_tree_are_modelled_within_2_percent(rows) -> None:
    with waves.recorded_tables():
        causal = [x for x in waves.single(rows, ["causal"]) if x.case.startswith("causal 16384")]
        raced = list(waves.raced(rows))
    assert [x.mode for x in causal] == [x.mode for x in raced] == ["forward", "backward"]
    assert not [x for x in causal + raced if abs(x.error) > 0.02]


def test_the_first_free_slot_takes_the_next_program() -> None:
    one = waves.DQ  # 8 warps: a program a multiprocessor
    long, short = [10.0] * waves.PROCESSORS, [1.0] * waves.PROCESSORS
    assert waves.makespan(np.array(long), one) == 10
    assert waves.makespan(np.array(short + long), one) == 11
    assert waves.makespan(np.array([*long, 1.0, 1.0]), one) == 11


def test_a_program_without_a_neighbour_is_faster() -> None:
    two = waves.DKDV
    assert waves.makespan(np.array([10.0] * waves.PROCESSORS), two) == pytest.approx(10 * two.alone)
    assert waves.makespan(np.array([10.0] * 2 * waves.PROCESSORS), two) == 10
    uneven = np.repeat([10.0, 4.0], waves.PROCESSORS)
    assert waves.makespan(uneven, two) == pytest.approx(4 + 6 * two.alone)


@pytest.mark.parametrize(
    ("mask", "kv_heads", "least"),
    [("prompt and answers", 8, 0.93), ("window and sinks", 8, 0.97), ("prompt 8,192, 16 answers", 1, 0.80)],
)
def test_dk_and_dv_use_most_of_the_device(mask, kv_heads, least) -> None:
    assert waves.key_use(waves.masks()[mask], kv_heads) >= least


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("mask", waves.masks())
@pytest.mark.sampled(12)
def test_no_launch_of_dk_and_dv_uses_less_of_the_device_than_by_head(mask, kv_heads) -> None:
    now = waves.key_use(waves.masks()[mask], kv_heads)
    with waves.recorded_tables():
        assert now >= waves.key_use(waves.masks()[mask], kv_heads)
