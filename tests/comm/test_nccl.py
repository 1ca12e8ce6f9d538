"""NCCL's part of `GroupComm`, on the CPU."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from seqpar.comm.nccl import gpu_of
from seqpar.testing import run_processes
from tests.comm import nccl_cases

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").rglob("*.py"))]
STARTS = re.compile(r"init_process_group\((?!.*store=)")


def test_ranks_that_share_a_gpu_are_named_on_every_rank() -> None:
    for text in run_processes(3, nccl_cases.on_one_gpu):
        assert text.startswith("GroupComm: ranks 0, 1 all use GPU GPU-0, expected a GPU for each rank; call torch.cuda")


def test_a_group_that_is_bound_to_a_gpu_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert gpu_of(SimpleNamespace(bound_device_id=None)) == torch.device("cuda", 1)
    assert gpu_of(SimpleNamespace(bound_device_id=torch.device("cuda", 3))) == torch.device("cuda", 3)


def test_an_exchange_in_a_graph_under_capture_is_refused() -> None:
    for text, right in run_processes(2, nccl_cases.under_capture):
        assert text.startswith("exchange: call 0 phase 0 stage 0 with plan 5eed in a CUDA graph under capture")
        assert right, "CPU tensors have nothing to do with it"


@pytest.mark.parametrize(
    "path", [p for p in PAGES if STARTS.search(p.read_text())], ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_whoever_starts_a_group_hears_of_the_device(path: Path) -> None:
    blocks = re.findall(r"^```\w+.*?^```", path.read_text(), re.MULTILINE | re.DOTALL) or [path.read_text()]
    for block in blocks:
        assert not STARTS.search(block) or "torch.cuda.set_device(" in block
