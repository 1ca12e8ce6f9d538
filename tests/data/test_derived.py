"""`prefetch` derives what the first layer with a plan needs: steps, tile tables, and memory for one upload of all."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from typing import Any

import pytest
import torch

import seqpar
from seqpar import Mask, Plan
from seqpar.comm import Comm
from seqpar.data import prefetch
from seqpar.kernels.memory.upload import UploadBuffer
from seqpar.kernels.triton import Triton
from seqpar.ops.attention import op
from seqpar.ops.core.precompute import RecentCalls
from seqpar.plan import steps as plan_steps
from seqpar.plan.derive import Derived
from seqpar.testing import run_threads

pytest.importorskip("triton", reason="triton has wheels for Linux only")

prefetching = sys.modules["seqpar.data.prefetch"]  # the name of the module in its package is the function
TOKENS = 48


def ring(lengths: Any, ranks: int) -> Plan:
    return Plan(Mask(lengths), seqpar.Layout.zigzag(lengths, ranks), transport="ring")


def steps(comm: Comm, counts: dict[str, Counter[str]]) -> list[list[torch.Tensor]]:
    """Gradients of two layers for each of three batches, on tiles of 64 in Triton's interpreter."""
    ids = torch.arange(TOKENS)[None]
    batches = [{"input_ids": ids + 100 * comm.rank + step} for step in range(3)]
    found = []
    for step, share in enumerate(prefetch(batches, comm, plan=ring)):
        threading.current_thread().name = f"rank {comm.rank} step {step}"
        g = torch.Generator().manual_seed(step)
        rows = len(share.positions)
        leaves = [torch.randn(rows, 1, 8, generator=g).requires_grad_() for _ in range(3)]
        for _ in range(2):
            seqpar.attention(*leaves, share.plan, comm, kernel="triton").sum().backward()
        found.append([x.grad for x in leaves])
        threading.current_thread().name = f"rank {comm.rank} between"
    return found


@pytest.mark.parametrize("derives", [True, False])
@pytest.mark.sampled(2)
def test_after_prefetch_a_call_derives_nothing_and_uploads_once(derives: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: dict[str, Counter[str]] = {}

    def counted(owner: Any, name: str) -> None:
        before = getattr(owner, name)

        def call(*given: Any, **named: Any) -> Any:
            counts.setdefault(threading.current_thread().name, Counter())[name] += 1
            return before(*given, **named)

        monkeypatch.setattr(owner, name, call)

    turn = threading.RLock()  # Triton's interpreter replaces functions of a module while it runs

    def one_by_one(name: str) -> None:
        before = getattr(Triton, name)

        def call(*given: Any) -> None:
            with turn:
                before(*given)

        monkeypatch.setattr(Triton, name, call)

    one_by_one("forward")
    one_by_one("backward")
    for owner, name in (
        (Derived, "_routes"), (plan_steps, "tile_tables"), (op, "recipe_of"), (UploadBuffer, "sent"),
    ):  # fmt: skip
        counted(owner, name)
    if not derives:
        monkeypatch.setattr(prefetching, "recent_attention", RecentCalls(0))
    found = run_threads(2, steps, counts)
    for rank in range(2):
        first, *later = (counts[f"rank {rank} step {step}"] for step in range(3))
        assert first["recipe_of"] == 1 and first["tile_tables"] > 1 < first["sent"], "nobody knew the calls to come"
        # the second batch was planned before the first call
        if derives:
            assert later[1] == {"sent": 1}
        else:
            assert later[1] == first
    if derives:
        monkeypatch.setattr(prefetching, "recent_attention", RecentCalls(0))
        for one, other in zip(found, run_threads(2, steps, counts), strict=True):
            assert all(torch.equal(x, y) for a, b in zip(one, other, strict=True) for x, y in zip(a, b, strict=True))
