"""Mutated hardware files: each is a machine for which batches are planned, or is refused by its name and what is wrong.

``judged(17, folder)`` is case 17.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from seqpar import Hardware, plan_batch
from seqpar.planner.hardware import PRESETS
from tests.fuzz.planned import assert_planned, refused

CASES, ALL, BLOCK = 60, 5000, 100
LENGTHS = np.array([9000, 700, 50, 4000, 20, 33])

ODD: tuple[Any, ...] = (
    0, 1, -1, 7, True, False, None, "", "x", "1e9", [], {}, [1.0], 0.0, -0.0, 0.5, 1e-320, 1e-30, 1.0, 1e6, 1e12, 1e20,
    1e30, 1.1e30, 1e40, 1e308, float("nan"), float("inf"), -float("inf"), 2**31, 2**62, 2**63, 2**70, 10**400,
)  # fmt: skip
TEXTS = ("", "{", "[]", "null", "1", '"x"', "{}", "[" * 100_000, '{"a":' * 50_000, "9" * 5000, "\ufeff{}", "{'a': 1}")


def mutated(draw: Random) -> bytes:
    """The text of a file: a preset's, with some values, names or bytes that are others."""
    data = Hardware.preset(draw.choice(sorted(PRESETS))).to_dict()
    values = [*ODD, *(value for value in data.values() if not isinstance(value, dict))]
    if draw.random() < 0.05:
        return draw.choice(TEXTS).encode()
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        place = draw.choice([data, *(part for part in data.values() if isinstance(part, dict) and part)])
        name = draw.choice(sorted(place))
        change = draw.choice(["odd", "odd", "odd", "scaled", "scaled", "gone", "more", "other"])
        if change == "odd":
            place[name] = draw.choice(ODD)
        elif change == "scaled" and isinstance(place[name], (int, float)) and abs(place[name]) < 1e60:
            place[name] *= 10.0 ** draw.uniform(-40, 40)
        elif change == "gone":
            del place[name]
        elif change == "more":
            place[draw.choice(["measured", "colour", "schema", "", "rate"])] = draw.choice(ODD)
        else:
            place[name] = draw.choice(values)
    text = bytearray(json.dumps(data).encode())
    if draw.random() < 0.1:
        text[draw.randrange(len(text))] = draw.randrange(256)
    return bytes(text[: draw.randrange(len(text))] if draw.random() < 0.03 else text)


def judged(number: int, folder: Path) -> str:
    """How the case of a number ends: "planned", or "refused" and why. Raises AssertionError for any other end."""
    path = folder / f"{number}.json"
    path.write_bytes(mutated(Random(number)))
    try:
        try:
            machine = Hardware.load(path)
        except ValueError as error:
            assert str(error).startswith(f"{path} is not a hardware file: "), error
            return refused(error)
        assert Hardware.from_dict(machine.to_dict()) == machine
        for ranks in (1, 3, 16):
            try:
                plan = plan_batch(LENGTHS, ranks, model="tiny", hardware=machine)
            except ValueError as error:
                assert "GB" in str(error) or "tokens on" in str(error), error  # too little memory
                return refused(error)
            assert_planned(plan, LENGTHS, ranks)
    except Exception as error:
        text = path.read_bytes()[:3000]
        raise AssertionError(f"judged({number}, folder): {type(error).__name__}: {error}\n{text!r}") from error
    return "planned"


def test_mutated_files_are_machines_or_refused(tmp_path: Path) -> None:
    ends = [judged(number, tmp_path) for number in range(CASES)]
    assert 5 <= ends.count("planned") < CASES, ends


@pytest.mark.exhaustive
@pytest.mark.parametrize("block", range(0, ALL, BLOCK))
def test_all_mutated_files_are_machines_or_refused(block: int, tmp_path: Path) -> None:
    assert all(judged(number, tmp_path) for number in range(block, block + BLOCK))
