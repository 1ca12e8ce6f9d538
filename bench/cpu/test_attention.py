"""Times attention steps, forward and backward: on one process, and on two of one thread each."""

from __future__ import annotations

import pytest
import torch

import seqpar
from bench.cpu.step import packed, sharded_step, timed_step
from seqpar.testing import run_processes

TOKENS = 4096


def test_one_rank(benchmark) -> None:
    plan = seqpar.Plan(seqpar.Mask([TOKENS]), seqpar.Layout.contiguous(TOKENS, 1))
    comm, tensors = seqpar.LocalComm(), packed(TOKENS)
    torch.set_num_threads(1)
    seconds = benchmark.pedantic(
        timed_step, (lambda q, k, v: seqpar.attention(q, k, v, plan, comm), *tensors), rounds=5, warmup_rounds=1
    )
    assert seconds > 0


@pytest.mark.parametrize("transport", ["fetch", "ring", "gather"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_two_processes(benchmark, layout, transport) -> None:
    arguments = (2, sharded_step, TOKENS, layout, transport, 1)
    seconds = benchmark.pedantic(run_processes, arguments, rounds=5, warmup_rounds=1)
    assert len(seconds) == 2
