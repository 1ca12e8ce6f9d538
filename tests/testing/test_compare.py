"""`compare` finds each mistake that raises nothing by the name of what differs, and reports none of right programs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from seqpar.cli import main
from seqpar.comm import Comm
from seqpar.testing import compare, run_threads
from tests.testing.loops import RIGHT, WRONG, Plain, PositionsFromZero, train


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_is_equal(name: str) -> None:
    loop = RIGHT[name]
    found = compare(partial(train, loop), steps=loop.steps, processes=loop.processes)
    assert found.equal, found
    names = {name for name, _ in loop(None).model().named_parameters()}
    assert {row.name for row in found.rows if row.kind == "weight"} == names


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_found_by_name(name: str) -> None:
    loop = WRONG[name]
    found = compare(partial(train, loop), steps=loop.steps, processes=loop.processes)
    assert not found.equal
    assert loop.seen in {row.name or row.kind for row in found.rows if row.ranks}, found


def test_there_are_programs_enough() -> None:
    assert len(RIGHT) >= 20 and len(WRONG) >= 30


def test_the_largest_difference_stands_first_and_names_its_ranks() -> None:
    found = compare(partial(train, PositionsFromZero), ranks=3)
    times = [row.difference / row.allowed for row in found.rows]
    assert times == sorted(times, reverse=True) and times[0] > 1e6
    assert all(row.ranks == (0, 1, 2) and not row.apart for row in found.rows if row.ranks)
    lines = str(found).splitlines()
    wrong = sum(bool(row.ranks) for row in found.rows)
    assert lines[0] == f"3 ranks against one: {wrong} of {len(found.rows)} values differ"
    assert f"{found.rows[0].kind} {found.rows[0].name}" in lines[2] and lines[2].endswith("0, 1, 2")


def test_ranks_that_disagree_are_named() -> None:
    def program(comm: Comm) -> Iterator[tuple[nn.Module, float]]:
        model = nn.Linear(2, 2)
        for p in model.parameters():
            nn.init.constant_(p, 1.0)
        if comm.rank == 1:
            nn.init.zeros_(model.bias)
        yield model, 1.0

    found = compare(program, ranks=3)
    assert [(row.kind, row.name, row.ranks, row.apart) for row in found.rows if row.ranks or row.apart] == [
        ("weight", "bias", (1,), (1,))
    ]
    assert "1 (1 not as rank 0)" in str(found)


def test_a_gradient_that_a_rank_lacks_counts_as_zero() -> None:
    def program(comm: Comm) -> Iterator[tuple[nn.Module, float]]:
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        model.weight.grad = torch.ones(2, 2) if comm.rank == 0 else None
        model.bias.grad = torch.zeros(2) if comm.rank == 0 else None
        yield model, 1.0

    found = compare(program)
    assert [(row.name, row.ranks) for row in found.rows if row.ranks] == [("weight", (1,))]


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_equal(broken: float) -> None:
    def program(comm: Comm) -> Iterator[tuple[nn.Module, float]]:
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        nn.init.constant_(model.bias, broken)
        yield model, broken

    found = compare(program)
    assert [(row.kind, row.name) for row in found.rows if row.ranks == (0, 1)] == [("loss", ""), ("weight", "bias")]
    assert str(found).startswith("2 ranks against one: 2 of 3 values differ")


def test_a_parameter_that_a_rank_lacks_differs() -> None:
    def program(comm: Comm) -> Iterator[tuple[nn.Module, float]]:
        torch.manual_seed(0)
        yield nn.Linear(2, 2, bias=comm.rank == 0), 1.0

    assert [(row.name, row.ranks) for row in compare(program).rows if row.ranks] == [("bias", (1,))]


def test_a_rank_that_fails_is_reported_by_its_own_error() -> None:
    def program(comm: Comm) -> Iterator[Any]:
        if comm.rank == 1:
            raise KeyError("of rank 1")
        comm.agree("step", {"one": 1})
        yield nn.Linear(2, 2), 0.0

    with pytest.raises(KeyError, match="of rank 1"):
        compare(program)


def test_what_is_no_such_program_is_refused() -> None:
    with pytest.raises(TypeError, match="program returned int, expected a generator"):
        compare(lambda comm: 3)  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match=r"program yielded Linear, expected \(model, loss\)"):
        compare(lambda comm: (nn.Linear(1, 1) for _ in range(1)))  # type: ignore[misc]
    with pytest.raises(ValueError, match="program yielded 2 times, expected steps=3"):
        compare(partial(train, Plain), steps=3)
    with pytest.raises(ValueError, match="ranks"):
        compare(partial(train, Plain), ranks=1)


def test_ranks_in_turns_have_random_numbers_of_their_own() -> None:
    def rank(comm: Comm) -> list[Tensor]:
        torch.manual_seed(comm.rank)
        found = []
        for _ in range(3):
            found.append(torch.rand(2))
            comm.gather("turn", comm.rank)
        return found

    before = torch.get_rng_state()
    for seed, found in enumerate(run_threads(3, rank, turns=True)):
        generator = torch.Generator().manual_seed(seed)
        torch.testing.assert_close(found, [torch.rand(2, generator=generator) for _ in range(3)])
    assert torch.equal(torch.get_rng_state(), before)


MODULE = """
import torch
from torch import nn

def program(comm):
    model = nn.Linear(2, 1, dtype=torch.float64)
    nn.init.constant_(model.weight, {weight})
    yield model, 0.5
"""


def test_the_command_ends_with_1_if_a_value_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "right_one.py").write_text("import torch\ntorch.manual_seed(0)\n" + MODULE.format(weight="1.0"))
    (tmp_path / "wrong_one.py").write_text(MODULE.format(weight="float(comm.size)"))
    assert main(["compare", "right_one:program", "--ranks", "3"]) == 0
    assert "3 ranks against one: all 3 values agree" in capsys.readouterr().out
    assert main(["compare", "wrong_one:program"]) == 1
    assert "weight weight" in capsys.readouterr().out.splitlines()[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing_here:program"], "no module 'nothing_here' here or on Python's path"),
        (["seqpar:program"], "module 'seqpar' has no 'program'"),
        (["program"], "program is 'program', expected module:program"),
        (["seqpar:Plan", "--ranks", "1"], "--ranks must be at least 2, got 1"),
    ],
)
def test_the_command_refuses_what_it_cannot_run(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *words]) == 2
    assert message in capsys.readouterr().err
