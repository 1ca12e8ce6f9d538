"""Slice `recurrent`: kernels of recurrences, forward and backward, beside PyTorch's products in chunks.

Each is first held to the reference in float64 on two short runs; one that is wrong is not timed. ``tflops`` counts the
work that `bench.cpu.recurrent` states, in chunks of 64 rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from bench.gpu.calls import short
from bench.gpu.machine import Machine
from bench.gpu.rows import Case, Row
from bench.gpu.speed import rate
from seqpar.kernels.recurrent import KERNELS, Recurrence, RecurrentKernel, RecurrentSpec
from seqpar.kernels.recurrent.fla import fault

TIMED = ("chunked", "fla")
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Call:
    """A recurrence over runs of rows, with a decay for each row and head. beta: by the delta rule."""

    name: str
    beta: bool
    runs: tuple[int, ...]
    heads: int
    dim: int

    def spec(self, device: torch.device) -> RecurrentSpec:
        """The spec by which kernels decide whether they can compute the call."""
        return RecurrentSpec(device.type, DTYPE, self.dim, self.dim, "scalar", self.beta)

    @property
    def flops(self) -> int:
        """Multiply-adds, twice, in forward and backward, as in bench.cpu.recurrent."""
        dim = self.dim
        return sum(self.runs) * self.heads * 3 * (6 * dim**2 + 256 * dim if self.beta else 4 * dim**2 + 128 * dim)

    def run(self, kernel: RecurrentKernel, device: torch.device) -> Callable[[], object]:
        """A function that computes out and its gradients, from no entering state."""
        rows, heads, dim, wide = sum(self.runs), self.heads, self.dim, torch.float32
        q, k, v = (torch.randn(rows, heads, dim, device=device).mul_(dim**-0.5).to(DTYPE) for _ in range(3))
        decay, strength = -torch.rand(rows, heads, device=device), torch.rand(rows, heads, device=device)
        leaves = [x.requires_grad_() for x in (q, k, v, decay, strength)[: 5 if self.beta else 4]]
        tables = kernel.tables(np.array(self.runs), np.zeros(0, np.int64), device)
        entering, dout = torch.zeros(len(self.runs), heads, dim, dim, device=device), torch.randn_like(v)

        def both() -> object:
            given = [x.to(wide) if kernel.casts else x for x in (q, k, v)]
            x = Recurrence(given[0], given[1], given[2], decay, strength if self.beta else None, dim**-0.5)
            out, _ = kernel.compute(kernel.prepare(x, tables), entering)
            return torch.autograd.grad(out.to(DTYPE), leaves, dout)

        return both


def calls(tiny: bool) -> list[Call]:
    """State spaces and the gated delta rule, in one run and in many."""
    rows, heads, dim, many = (32, 1, 16, 2) if tiny else (16384, 16, 128, 64)
    counts = {"one run": (rows,), f"{many} runs": (rows // many,) * many}
    return [
        Call(f"{family}, {name}, {rows} rows", beta, runs, heads, dim)
        for family, beta in (("state space", False), ("gated delta rule", True))
        for name, runs in counts.items()
    ]


def recurrent(tiny: bool) -> list[Case]:
    """The cases of all calls."""
    return [Case("recurrent", call.name, partial(_timed, call)) for call in calls(tiny)]


def _timed(call: Call, machine: Machine) -> Iterator[Row]:
    spec = call.spec(machine.device)
    runs: dict[str, Callable[[], object]] = {}
    for name in TIMED:
        kernel = KERNELS[name]
        why = kernel.refuses(spec)
        if why is not None:
            yield {"kernel": name, "mode": "", "skipped": why}
            continue
        wrong = fault(kernel, spec)
        yield {"kernel": name, "mode": "", "what": "two short runs", "ok": wrong is None, "why": wrong}
        if wrong is None:
            runs[name] = call.run(kernel, machine.device)
    times, missing = machine.times(runs, most=30)
    for name in runs:
        row: Row = {"kernel": name, "mode": f"forward and backward, {short(DTYPE)}", "baseline": "chunked"}
        if name in missing:
            yield row | missing[name]
            continue
        ratio = times["chunked"].ms / times[name].ms if "chunked" in times else None
        yield row | rate(times[name], flops=call.flops) | {"ratio": ratio}
