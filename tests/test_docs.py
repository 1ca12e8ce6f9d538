"""Every page of docs/ holds a program that runs as it stands, and trains on two ranks as on one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
TABLES = {"migration"}  # pages of facts, without a program
PROGRAM = re.compile(r"^```python program\n(.*?)^```", re.MULTILINE | re.DOTALL)
CLOSE = 1e-5


def losses(script: Path, ranks: int) -> list[tuple[int, float]]:
    """(step, loss) of every line ``step N loss X`` that a program prints on so many ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), script]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=script.parent, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{ranks} ranks:\n{done.stdout[-2000:]}\n{done.stderr[:8000]}"
    found = re.findall(r"^step (\d+) loss (\S+)$", done.stdout, re.MULTILINE)
    return [(int(step), float(loss)) for step, loss in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_one_program(page: Path) -> None:
    assert len(PROGRAM.findall(page.read_text())) == (page.stem not in TABLES)


@pytest.mark.parametrize("page", [p for p in PAGES if p.stem not in TABLES], ids=lambda page: page.stem)
def test_its_program_trains_on_two_ranks_as_on_one(page: Path, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.findall(page.read_text())[0])
    one, two = losses(script, 1), losses(script, 2)
    assert len(one) >= 3 and [step for step, _ in one] == list(range(len(one)))
    assert len({loss for _, loss in one}) == len(one), "it trains"
    for (step, expected), (same_step, loss) in zip(one, two, strict=True):
        assert step == same_step and abs(loss - expected) <= CLOSE * abs(expected), (step, loss, expected)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_its_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target
