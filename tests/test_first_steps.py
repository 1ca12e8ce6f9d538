"""What the first page that a newcomer follows says of its programs, which tests/test_docs.py runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.programs import Programs

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "first-steps.md").read_text(encoding="utf-8")
LOOK, ALONE, CHECK = re.findall(r"^```python script\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
(SHARDED,) = re.findall(r"^```python program\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
(SHOWN,) = re.findall(r"^```text\n(step 0 .*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def losses(printed: str) -> list[float]:
    """The losses of steps 0, 1, ..."""
    steps = re.findall(r"^step (\d+) loss (\S+)$", printed, re.MULTILINE)
    assert [int(step) for step, _ in steps] == [0, 1, 2, 3], printed
    return [float(loss) for _, loss in steps]


def test_the_last_of_contiguous_ranks_has_seven_times_the_work_of_the_first(programs: Programs, tmp_path: Path) -> None:
    script = tmp_path / "look.py"
    script.write_text(LOOK.replace("Layout.zigzag([TOKENS], 4)", "Layout.contiguous(TOKENS, 4)"))
    rows = re.findall(r"^ +[0-3] +250 +250 +([\d,]+)", programs.alone(script, tmp_path), re.MULTILINE)
    area = [int(row.replace(",", "")) for row in rows]
    assert round(area[3] / area[0]) == 7


def test_a_mean_over_rows_of_a_rank_is_too_large_by_the_number_of_ranks(programs: Programs, tmp_path: Path) -> None:
    assert "too large by about a factor of `comm.size`" in PAGE
    script = tmp_path / "sharded.py"
    script.write_text(
        SHARDED.replace("cross_entropy(logits, labels, valid=lengths[0])", "F.cross_entropy(logits, labels)")
    )
    assert losses(programs.ranks(2, script, tmp_path / "2")[0])[0] == pytest.approx(2 * losses(SHOWN)[0], rel=1e-2)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("valid=sum(lengths)", "valid=len(labels)"),
        ("torch.from_numpy(plan.rope_positions(comm.rank))", "torch.arange(len(mine))"),
    ],
)
def test_the_comparison_finds_a_mistake(right: str, wrong: str, programs: Programs, tmp_path: Path) -> None:
    script = tmp_path / "check.py"
    assert right in CHECK
    script.write_text(CHECK.replace(right, wrong))
    assert programs.alone(script, tmp_path).strip() == "False"
