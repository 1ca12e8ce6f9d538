"""Checks and times the package on one CUDA device; ``--json`` keeps the result with device, versions and commit.

    python bench/gpu.py --json bench/results/gpu.json

Ranks are threads that share the device. Every plan's outputs and gradients are compared with the dense oracle in
float64 on the CPU; the exit code is 1 if any is off. Then the kernel is timed beside torch's fused attention.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from run import environment

import seqpar
from seqpar.comm import Comm
from seqpar.testing import dense_attention, relative_rms, run_threads

LENGTHS = (301, 7, 1100, 640)
# relative root mean square error that a kernel of each dtype may show against float64, by its rounding unit
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def one_rank(comm: Comm, plan: seqpar.Plan, tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """out, dq, dk, dv of the whole batch, computed by this rank and its peers on the device."""
    q, k, v, g = (seqpar.shard(x, plan, comm.rank).to("cuda", dtype) for x in tensors)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = seqpar.attention(*leaves, plan, comm)
    out.backward(g)
    return [seqpar.unshard(x.detach(), plan, comm).cpu() for x in (out, *(x.grad for x in leaves))]


def correctness() -> list[dict[str, object]]:
    """Errors of every dtype, transport, number of ranks and width."""
    g = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    tensors = [torch.randn(total, h, 64, dtype=torch.float64, generator=g) for h in (6, 2, 2, 6)]
    mask = seqpar.Mask(LENGTHS)
    result = []
    for dtype, transport, (ranks, width) in itertools.product(
        TOLERANCE, ("fetch", "ring", "gather"), ((1, 1), (3, 1), (4, 2), (4, 4))
    ):
        rounded = [x.to(dtype).double().clone() for x in tensors]
        leaves = [x.requires_grad_() for x in rounded[:3]]
        out, _ = dense_attention(*leaves, mask)
        expected = [out.detach(), *torch.autograd.grad(out, leaves, rounded[3])]
        plan = seqpar.Plan(mask, seqpar.Layout.zigzag(LENGTHS, ranks), transport=transport, ulysses=width)
        got = run_threads(ranks, one_rank, plan, tensors, dtype)[0]
        errors = {n: relative_rms(a, b) for n, a, b in zip(("out", "dq", "dk", "dv"), got, expected, strict=True)}
        case = {"dtype": str(dtype), "transport": transport, "ranks": ranks, "ulysses": width}
        result.append({**case, **errors, "ok": max(errors.values()) < TOLERANCE[dtype]})
    return result


def milliseconds(run: Callable[[], object], repeat: int) -> float:
    """Median time on the device."""
    times = []
    for turn in range(repeat + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        if turn:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def speed(tokens: int, repeat: int) -> dict[str, float]:
    """Milliseconds of a causal forward and backward, 16 heads of 128 in bf16."""
    q, k, v, g = (torch.randn(tokens, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    plan, comm = seqpar.Plan(seqpar.Mask([tokens]), seqpar.Layout.contiguous(tokens, 1)), seqpar.LocalComm()

    def ours() -> None:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        seqpar.attention(*leaves, plan, comm).backward(g)

    def theirs() -> None:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        batched = (x.transpose(0, 1)[None] for x in leaves)
        F.scaled_dot_product_attention(*batched, is_causal=True).backward(g.transpose(0, 1)[None])

    return {"seqpar, auto": milliseconds(ours, repeat), "torch sdpa": milliseconds(theirs, repeat)}


def main() -> int:
    """Runs all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available() or torch.version.hip:
        parser.error("this script needs one CUDA device; see `seqpar doctor`")
    checks, times = correctness(), speed(args.tokens, args.repeat)
    table = Table(title=torch.cuda.get_device_name())
    for column in checks[0]:
        table.add_column(column)
    for row in checks:
        table.add_row(*(f"{x:.1e}" if isinstance(x, float) else str(x) for x in row.values()))
    console = Console()
    console.print(table)
    console.print(times)
    if args.json:
        device = {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(environment() | device | {"checks": checks, "milliseconds": times}, indent=2))
    return 0 if all(row["ok"] for row in checks) else 1


if __name__ == "__main__":
    raise SystemExit(main())
