"""Loops of other libraries: what they log on two ranks is what they log in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.programs import Programs

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
CLOSE = {"loss": 2e-6, "grad_norm": 1e-5}  # relative; margins and the like are differences of what is near 1


def cases(printed: str) -> dict[str, dict[str, Any]]:
    """What a program printed of each of its cases."""
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith('{"case"')]
    return {line["case"]: line for line in lines}


def compare(programs: Programs, script: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """Run a program in one process and on two ranks; what it printed there."""
    one = cases(programs.alone(script, folder / "alone"))
    together = cases(programs.ranks(2, script, folder / "together")[0])
    assert one and one.keys() == together.keys()
    said = [line for err in folder.glob("*/*.err") for line in err.read_text().splitlines() if "Warning: " in line]
    ours = [line for line in said if "seqpar" in line or "over ranks" in line or "average_over" in line]
    assert not ours, "a false alarm"
    for name, alone in one.items():
        assert len(alone["steps"]) >= 3 and len({step["loss"] for step in alone["steps"]}) == len(alone["steps"])
        for number, (step, same) in enumerate(zip(alone["steps"], together[name]["steps"], strict=True)):
            assert step.keys() == same.keys()
            for field, value in step.items():
                least = alone.get("cancels", {}).get(field, 0.0 if field in CLOSE else 1.0)
                allowed = CLOSE.get(field, 2e-6) * max(abs(value), least)
                assert abs(same[field] - value) <= allowed, (name, number, field, same[field], value)
        if "evaluation" in alone:
            assert together[name]["evaluation"] == pytest.approx(alone["evaluation"], rel=2e-6)
    return together


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("script", "every_order", "count"),
    [("with_trl", False, 6), ("with_trl", True, 32), ("with_trl_online", False, 5), ("with_trl_online", True, 24)],
)
def test_trainers_of_trl(script: str, every_order: bool, count: int, programs: Programs, tmp_path: Path) -> None:
    """Those that generate or have a reference are the online ones."""
    pytest.importorskip("trl")
    program = PROGRAMS / f"{script}.py"
    if every_order:
        program = tmp_path / "exhaustive.py"
        program.write_text((PROGRAMS / f"{script}.py").read_text())
    found = compare(programs, program, tmp_path)
    assert len(found) == count
    for case in found.values() if not every_order else ():
        assert case["sent"] > 1000, "ranks shared their documents"
        assert "cancels" not in case or case["steps"][0]["reward_std"] > 0, "answers differ"


@pytest.mark.exhaustive
def test_adapters_of_peft_under_accelerate(programs: Programs, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("accelerate")
    compare(programs, PROGRAMS / "with_peft.py", tmp_path)


@pytest.mark.exhaustive
def test_trainer_with_images(programs: Programs, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    assert len(compare(programs, PROGRAMS / "with_images.py", tmp_path)) == 2


def test_trainer_with_the_same_batches_on_every_rank(programs: Programs, tmp_path: Path) -> None:
    """Its num_items_in_batch counts each label once on every rank."""
    pytest.importorskip("accelerate")
    assert len(compare(programs, PROGRAMS / "with_trainer.py", tmp_path)) == 2


def test_ranks_under_trainer_drop_other_features_as_the_pages_say(programs: Programs, tmp_path: Path) -> None:
    """Also, each rank brings examples of its own: all of them in each epoch."""
    pytest.importorskip("accelerate")
    script = PROGRAMS / "trainer_dropout.py"
    advice = "arguments.seed, arguments.data_seed = comm.rank + 1, 0"
    pages = [script, *(ROOT / f"docs/{name}.md" for name in ("transformers", "peft", "troubleshooting"))]
    assert all(advice in " ".join(page.read_text().split()) for page in pages)
    ranks = [json.loads(out.splitlines()[-1]) for out in programs.ranks(2, script, tmp_path)]
    pairs = list(zip(*(rank["dropped"] for rank in ranks), strict=True))
    assert len(pairs) == 4 and all(first != second for first, second in pairs)
    for epoch in (slice(0, 4), slice(4, 8)):
        assert sorted(ranks[0]["examples"][epoch] + ranks[1]["examples"][epoch]) == list(range(8))


def test_ddp_and_averaged_weights_of_lightning(programs: Programs, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    found = compare(programs, PROGRAMS / "with_lightning.py", tmp_path)
    assert len({case["evaluation"] for case in found.values()}) == 3, "weights are averaged"
