"""The first page that a newcomer follows: its programs run as they stand, and print what it says."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.programs import Programs, programs

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "first-steps.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"^```python program of (.*?)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
LOSS = re.compile(r"^step (\d+) loss (\S+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def run() -> Iterator[Programs]:
    with programs("torch._dynamo") as found:
        yield found


def losses(printed: str) -> list[float]:
    """The losses of steps 0, 1, ..."""
    steps = LOSS.findall(printed)
    assert [int(step) for step, _ in steps] == [0, 1, 2, 3], printed
    return [float(loss) for _, loss in steps]


def test_it_has_no_other_programs() -> None:
    assert set(BLOCKS) == {"one process", "one device", "two processes"}
    assert PAGE.count("```python") == len(BLOCKS)


def test_ranks_as_threads_give_what_pytorch_gives(run: Programs, tmp_path: Path) -> None:
    script = tmp_path / "look.py"
    script.write_text(BLOCKS["one process"])
    assert "1000 tokens over 4 ranks" in run.alone(script, tmp_path)
    uneven = BLOCKS["one process"].replace("Layout.zigzag([TOKENS], 4)", "Layout.contiguous(TOKENS, 4)")
    script.write_text(uneven)
    rows = re.findall(r"^ +[0-3] +250 +250 +([\d,]+)", run.alone(script, tmp_path), re.MULTILINE)
    area = [int(row.replace(",", "")) for row in rows]
    assert round(area[3] / area[0]) == 7, "the page says seven times"


def test_the_sharded_model_trains_as_on_one_device(run: Programs, tmp_path: Path) -> None:
    alone, sharded = tmp_path / "alone.py", tmp_path / "sharded.py"
    alone.write_text(BLOCKS["one device"])
    sharded.write_text(BLOCKS["two processes"])
    expected = losses(run.alone(alone, tmp_path))
    assert losses(run.ranks(2, sharded, tmp_path / "2")[0]) == pytest.approx(expected, rel=1e-5)
    shown = re.findall(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert losses(shown[0]) == pytest.approx(expected, rel=1e-3), "what the page shows"


def test_its_commands_run() -> None:
    (block,) = re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    commands = [command for line in block.splitlines() for command in line.split(" && ")]
    extras = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("[project.optional-dependencies]")[1]
    for words in map(shlex.split, commands):
        if words[0] == "pip":  # tests/test_install.py installs
            assert all(f"\n{extra} = [" in extras for extra in re.findall(r"\[(.*)\]", words[-1]))
        elif words[0] == "seqpar":
            subprocess.run([sys.executable, "-m", *words], check=True, cwd=ROOT, capture_output=True, timeout=600)
        else:
            assert " ".join(words) in ("python3 -m venv .venv", "source .venv/bin/activate"), words
