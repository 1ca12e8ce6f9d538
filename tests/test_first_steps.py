"""What the first page that a newcomer follows says of its programs, which tests/test_docs.py runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.programs import Programs, programs

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "first-steps.md").read_text(encoding="utf-8")
LOOK, ALONE = re.findall(r"^```python script\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
(SHARDED,) = re.findall(r"^```python program\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
(SHOWN,) = re.findall(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def run() -> Iterator[Programs]:
    with programs("torch._dynamo") as found:
        yield found


def losses(printed: str) -> list[float]:
    """The losses of steps 0, 1, ..."""
    steps = re.findall(r"^step (\d+) loss (\S+)$", printed, re.MULTILINE)
    assert [int(step) for step, _ in steps] == [0, 1, 2, 3], printed
    return [float(loss) for _, loss in steps]


def test_the_last_of_contiguous_ranks_has_seven_times_the_work_of_the_first(run: Programs, tmp_path: Path) -> None:
    script = tmp_path / "look.py"
    script.write_text(LOOK.replace("Layout.zigzag([TOKENS], 4)", "Layout.contiguous(TOKENS, 4)"))
    rows = re.findall(r"^ +[0-3] +250 +250 +([\d,]+)", run.alone(script, tmp_path), re.MULTILINE)
    area = [int(row.replace(",", "")) for row in rows]
    assert round(area[3] / area[0]) == 7


def test_the_sharded_model_trains_as_the_one_before(run: Programs, tmp_path: Path) -> None:
    alone, sharded = tmp_path / "alone.py", tmp_path / "sharded.py"
    alone.write_text(ALONE)
    sharded.write_text(SHARDED)
    expected = losses(run.alone(alone, tmp_path))
    assert losses(run.ranks(2, sharded, tmp_path / "2")[0]) == pytest.approx(expected, rel=1e-5)
    assert losses(SHOWN) == pytest.approx(expected, rel=1e-3)


def test_it_installs_an_extra_that_exists() -> None:
    extras = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("[project.optional-dependencies]")[1]
    asked = re.findall(r"^pip install '\.\[(\w+)\]'$", PAGE, re.MULTILINE)
    assert asked and all(f"\n{extra} = [" in extras for extra in asked)
