"""Records of measurements: the origin of figures, and files with one record a line."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import seqpar

WIDTH = 160  # of an entry that stays on one line


def environment() -> dict[str, Any]:
    """The machine, versions, commit and time of new figures."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    versions = {"seqpar": seqpar.__version__, "torch": torch.__version__, "python": sys.version.split()[0]}
    for name in ("numpy", "scipy", "transformers", "diffusers", "deepspeed"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "machine": f"{_processor()}, {os.cpu_count()} cores, {platform.system()}",
        "versions": versions,
        "commit": git.stdout.strip(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def text(value: Any) -> str:
    """JSON in which every element of a list, and every short value, has a line of its own."""
    line = json.dumps(value)
    if not isinstance(value, (dict, list)) or len(line) <= WIDTH:
        return line
    if isinstance(value, dict):
        return "{\n" + ",\n".join(f"{json.dumps(str(key))}: {text(item)}" for key, item in value.items()) + "\n}"
    if not any(isinstance(item, (dict, list)) for item in value):
        return line
    return "[\n" + ",\n".join(text(item) if _holds_records(item) else json.dumps(item) for item in value) + "\n]"


def _holds_records(item: Any) -> bool:
    """Whether an element of a list has records of its own: a run with its rows."""
    lists = item.values() if isinstance(item, dict) else ()
    return any(isinstance(inner, list) and any(isinstance(row, (dict, list)) for row in inner) for inner in lists)


def write(path: Path, value: Any) -> None:
    """Write a record, or several in lists, in a folder that need not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text(value) + "\n")
