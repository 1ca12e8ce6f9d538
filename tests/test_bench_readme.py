"""`bench/README.md` maps each claim to its command and its record, and leaves none out."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / "bench"
ROWS = re.findall(r"^\| (.+) \| (`.+) \| (.+) \|$", (BENCH / "README.md").read_text(), re.MULTILINE)


def module_of(command: str) -> Path | None:
    """The file that a command runs as a module, if it does."""
    words = shlex.split(command)
    return ROOT / f"{words[words.index('-m') + 1].replace('.', '/')}.py" if "-m" in words else None


def commands() -> list[str]:
    return [command for _, cell, _ in ROWS for command in re.findall(r"`([^`]+)`", cell)]


def targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_every_command_can_be_run() -> None:
    assert len(ROWS) > 25
    for command in commands():
        first, *rest = shlex.split(command)
        if first.endswith(".sh"):
            assert os.access(ROOT / first, os.X_OK), command
        elif first == "make":
            assert rest[0] in targets(), command
        elif first == "seqpar":
            assert (ROOT / "seqpar" / "cli" / f"{rest[0]}.py").is_file(), command
        elif " -m pytest " in command:
            assert (ROOT / shlex.split(command)[-1]).is_file(), command
        else:
            path = module_of(command)
            assert path is not None and "__main__" in path.read_text(), command


def test_every_record_exists_and_is_some_claims() -> None:
    named = {name for _, _, cell in ROWS for name in re.findall(r"`([^`]+)`", cell)}
    assert named == {path.name for path in (BENCH / "results").iterdir()}
    assert all(cell == "-" or cell.startswith("`") for _, _, cell in ROWS)
