"""timm for scripts of tests: it lies in a folder of its own beside the environment, as pyproject.toml explains."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

FOLDER = Path(sys.prefix) / "timm"  # `make setup` puts it there
BEGINNING = """
import sys, torch
sys.path.append({folder!r})
try:
    torch.ops.load_library({folder!r} + "/torchvision/_C.so")
except OSError:  # it is built for another torch, and torchvision cannot be imported without these two
    torch.library.define("torchvision::nms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    torch.library.define("torchvision::qnms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def beginning() -> str:
    """The first lines of a script that imports timm afterwards; without it the test is skipped."""
    if not (FOLDER / "timm").is_dir():
        pytest.skip(f"{FOLDER} has no timm; make setup installs it")
    return BEGINNING.format(folder=str(FOLDER))
