"""The scripts of a user before and after: five lines differ at most, and what they print is the same."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "examples" / "huggingface"
NAMES = ("loop", "with_accelerate", "with_trainer")


def changes(name: str) -> list[str]:
    """Lines of the unified diff from one device to all ranks that add or remove something; first lines are titles."""
    alone, together = ((SCRIPTS / f"{each}.py").read_text().splitlines()[1:] for each in (f"{name}_alone", name))
    lines = difflib.unified_diff(alone, together, lineterm="", n=0)
    return [line for line in lines if line[0] in "+-" and not line.startswith(("+++", "---"))]


def started(*command: object) -> subprocess.Popen[str]:
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    words = [str(word) for word in (sys.executable, *command)]
    return subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(process: subprocess.Popen[str]) -> str:
    """What a process printed; it must succeed."""
    out, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors[-4000:]
    return out


def losses(printed: str) -> dict[str, float]:
    return {name: float(x) for name, x in re.findall(r"^(step \d+ loss|evaluation loss) (\S+)$", printed, re.MULTILINE)}


@pytest.mark.parametrize("name", NAMES)
def test_a_few_lines_differ_and_no_loss_does(name: str, tmp_path: Path) -> None:
    added = [line for line in changes(name) if line.strip() != "+"]
    assert 0 < len(added) <= 5 and all(line.startswith("+") for line in added), added
    alone = started(SCRIPTS / f"{name}_alone.py")
    # A file for every rank: torchrun's ranks write their lines unbuffered, into one another.
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    together = started(*launcher, "--log-dir", tmp_path, "--redirects", 1, SCRIPTS / f"{name}.py")
    one = losses(finished(alone))
    finished(together)
    ranks = [losses(path.read_text()) for path in sorted(tmp_path.rglob("stdout.log"))]
    assert len(one) >= 4 and len(ranks) == 2 and ranks[0].keys() == one.keys()
    for step, expected in one.items():
        for loss in (rank[step] for rank in ranks if rank):  # Trainer and accelerate print on rank 0 alone
            assert abs(loss - expected) <= 1e-6 * abs(expected), (step, loss, expected)


def test_the_readme_shows_the_diffs() -> None:
    shown = re.findall(r"^```diff\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    for name in NAMES:
        lines = [line for line in changes(name) if line.strip() != "+"]
        assert any([x for x in block.splitlines() if x[:1] in ("+", "-")] == lines for block in shown), name
