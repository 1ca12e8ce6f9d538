"""The scripts of a user before and after: five lines differ at most, and what they print is the same."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

from tests.programs import Programs

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = ROOT / "examples" / "huggingface"
NAMES = ("loop", "with_accelerate", "with_trainer", "with_images", "with_trl")


def changes(name: str) -> list[str]:
    """Lines of the unified diff from one device to all ranks that add or remove something; first lines are titles."""
    alone, together = ((SCRIPTS / f"{each}.py").read_text().splitlines()[1:] for each in (f"{name}_alone", name))
    lines = difflib.unified_diff(alone, together, lineterm="", n=0)
    return [line for line in lines if line[0] in "+-" and not line.startswith(("+++", "---"))]


def losses(printed: str) -> dict[str, float]:
    return {name: float(x) for name, x in re.findall(r"^(step \d+ loss|evaluation loss) (\S+)$", printed, re.MULTILINE)}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled(5)
def test_a_few_lines_differ_and_no_loss_does(name: str, programs: Programs, tmp_path: Path) -> None:
    if name == "with_trl":
        pytest.importorskip("trl")
    added = [line for line in changes(name) if line.strip() != "+"]
    assert 0 < len(added) <= 5 and all(line.startswith("+") for line in added), added
    one = losses(programs.alone(SCRIPTS / f"{name}_alone.py", tmp_path / "alone"))
    ranks = [losses(printed) for printed in programs.ranks(2, SCRIPTS / f"{name}.py", tmp_path / "together")]
    assert len(one) >= 4 and len(ranks) == 2 and ranks[0].keys() == one.keys()
    for step, expected in one.items():
        for loss in (rank[step] for rank in ranks if rank):  # Trainer and accelerate print on rank 0 alone
            assert abs(loss - expected) <= 1e-6 * abs(expected), (step, loss, expected)


def test_the_readme_and_the_pages_show_the_diffs() -> None:
    pages = "".join(
        (ROOT / name).read_text() for name in ("README.md", "docs/transformers.md", "docs/vision.md", "docs/trl.md")
    )
    shown = re.findall(r"^```diff\n(.*?)^```", pages, re.MULTILINE | re.DOTALL)
    for name in NAMES:
        lines = [line for line in changes(name) if line.strip() != "+"]
        assert any([x for x in block.splitlines() if x[:1] in ("+", "-")] == lines for block in shown), name
