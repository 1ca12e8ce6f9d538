"""A folder with an older commit and its native extension, from which Python can import; kept for the next call."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def commit_of(name: str) -> str:
    """The hash of a commit. Raises: SystemExit for a name that git does not know."""
    answer = subprocess.run(["git", "rev-parse", "--verify", f"{name}^{{commit}}"], cwd=ROOT, capture_output=True)
    if answer.returncode:
        raise SystemExit(f"--before {name}: not a commit here: {answer.stderr.decode().strip()}")
    return answer.stdout.decode().strip()


def cache() -> Path:
    """The folder of old trees and their results: this user's, in the system's folder of temporary files."""
    folder = Path(tempfile.gettempdir()) / f"seqpar-before-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def tree(name: str) -> Path:
    """The tree of a commit, with ``seqpar._C`` where it can be built. Takes a minute at the first call."""
    commit = commit_of(name)
    folder = cache() / commit[:12]
    with (cache() / f"{commit[:12]}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / ".complete").exists():
            print(f"building {commit[:12]} in {folder}", file=sys.stderr, flush=True)
            folder.mkdir(exist_ok=True)
            archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
            subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
            build(folder)
            (folder / ".complete").touch()
    return folder


def build(folder: Path) -> None:
    """Build the native extension of a tree in place, unless it is newer than its sources."""
    built = [path.stat().st_mtime for path in folder.glob("seqpar/_C*")]
    sources = [path.stat().st_mtime for path in (folder / "csrc").rglob("*")]
    if built and max(built) > max(sources):
        return
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    subprocess.run(command, cwd=folder, check=True, env=os.environ | {"SEQPAR_CUDA": "0"}, stdout=sys.stderr)


def environment(*folders: Path) -> dict[str, str]:
    """The environment of a process that imports from these folders first."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders)), "PYTHONDONTWRITEBYTECODE": ""}
