"""Slice `recurrent`: kernels of recurrences, forward and backward, beside PyTorch's products in chunks.

Each is first held to the reference in float64 on two short runs; one that is wrong is not timed. ``tflops`` counts the
work that `bench.cpu.recurrent` states, in chunks of 64 rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from bench.gpu.calls import short
from bench.gpu.machine import Machine
from bench.gpu.rows import Case, Row
from bench.gpu.speed import rate
from seqpar.kernels.recurrent import KERNELS, Recurrence, RecurrentKernel, RecurrentSpec
from seqpar.kernels.recurrent.vendor.trial import fault

TIMED = ("chunked", "triton", "fla")


def work(dim: int, *, beta: bool) -> int:
    """Multiply-adds, twice, of a row and head in forward and backward, as in bench.cpu.recurrent."""
    return 3 * (6 * dim**2 + 256 * dim if beta else 4 * dim**2 + 128 * dim)


def recurrent(tiny: bool) -> list[Case]:
    """State spaces and the gated delta rule, in one run and in many."""
    rows, heads, dim, many = (32, 1, 16, 2) if tiny else (16384, 16, 128, 64)
    counts = {"one run": [rows], f"{many} runs": [rows // many] * many}
    return [
        Case("recurrent", f"{family}, {name}, {rows} rows", partial(_timed, beta, runs, heads, dim))
        for family, beta in (("state space", False), ("gated delta rule", True))
        for name, runs in counts.items()
    ]


def _timed(beta: bool, runs: list[int], heads: int, dim: int, machine: Machine) -> Iterator[Row]:
    dtype, device = torch.bfloat16, machine.device
    spec = RecurrentSpec(device.type, dtype, dim, dim, "scalar", beta)
    calls: dict[str, Callable[[], object]] = {}
    for name in TIMED:
        kernel = KERNELS[name]
        why = kernel.refuses(spec)
        if why is not None:
            yield {"kernel": name, "mode": "", "skipped": why}
            continue
        wrong = fault(kernel, spec)
        yield {"kernel": name, "mode": "", "what": "two short runs", "ok": wrong is None, "why": wrong}
        if wrong is None:
            calls[name] = _call(kernel, beta, runs, heads, dim, device, dtype)
    times, missing = machine.times(calls, most=30)
    for name in calls:
        row: Row = {"kernel": name, "mode": f"forward and backward, {short(dtype)}", "baseline": "chunked"}
        if name in missing:
            yield row | missing[name]
            continue
        ratio = times["chunked"].ms / times[name].ms if "chunked" in times else None
        yield row | rate(times[name], flops=sum(runs) * heads * work(dim, beta=beta)) | {"ratio": ratio}


def _call(
    kernel: RecurrentKernel, beta: bool, runs: list[int], heads: int, dim: int, device: torch.device, dtype: torch.dtype
) -> Callable[[], object]:
    """out and its gradients, from no entering state."""
    rows, wide = sum(runs), torch.float32
    q, k, v = (torch.randn(rows, heads, dim, device=device).mul_(dim**-0.5).to(dtype) for _ in range(3))
    decay, strength = -torch.rand(rows, heads, device=device), torch.rand(rows, heads, device=device)
    leaves = [x.requires_grad_() for x in (q, k, v, decay, strength)[: 5 if beta else 4]]
    tables = kernel.tables(np.array(runs), np.zeros(0, np.int64), device)
    entering, dout = torch.zeros(len(runs), heads, dim, dim, device=device), torch.randn_like(v)

    def call() -> object:
        given = [x.to(wide) if kernel.casts else x for x in (q, k, v)]
        x = Recurrence(given[0], given[1], given[2], decay, strength if beta else None, dim**-0.5)
        out, _ = kernel.compute(kernel.prepare(x, tables), entering)
        return torch.autograd.grad(out.to(dtype), leaves, dout)

    return call
