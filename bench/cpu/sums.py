"""Sums over ranks beside `all_reduce` over gloo: gradients of a model, and one tensor.

    python -m bench.cpu.sums --json bench/results/sums.json      # 2 and 4 processes, about six minutes on two cores

A row is a set of gradients in fp32 or bf16, of some bytes in all, summed by `sync_gradients` and by what a user would
write: the gradients flattened, `all_reduce`, and copied back; or one tensor by `all_sum` and by `all_reduce` of a copy.
Ours move over gloo too, or over shared memory (`PeerComm`). Both take turns, in an order that changes, between the same
processes; a time is that of the slowest rank, from a barrier on. The ratio is that of a pair's times, ours over theirs,
its median and the interval that has the true median in 90 of 100 runs.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn

from bench.lib import records
from bench.lib.interval import interval
from seqpar.comm import Comm, GroupComm
from seqpar.testing import run_processes
from seqpar.train import all_sum, sync_gradients

WARM = 3  # pairs that are not counted
PARAMETERS = 24


def model(total: int, dtype: torch.dtype) -> list[nn.Parameter]:
    """Parameters of some bytes in all: large ones, as matrices are, in turns with small ones, as biases are."""
    elements = total // dtype.itemsize
    small = min(64, elements // PARAMETERS)
    large = 2 * elements // PARAMETERS - small
    return [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in (large, small) * (PARAMETERS // 2)]


def reduced(parameters: list[nn.Parameter]) -> None:
    """What a user would write: one `all_reduce` of all gradients."""
    grads = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    dist.all_reduce(flat)
    pieces = flat.split([grad.numel() for grad in grads])
    torch._foreach_copy_(grads, [piece.view_as(grad) for piece, grad in zip(pieces, grads)])


class Pair(NamedTuple):
    """Ours and theirs, each to be called again and again, and a backward before each call, outside of its time."""

    before: Callable[[], object]
    ours: Callable[[], object]
    theirs: Callable[[], object]

    @classmethod
    def of(cls, comm: Comm, what: str, total: int, dtype: torch.dtype) -> Pair:
        """A sum of `total` bytes."""
        if what == "all_sum":
            x = torch.rand(max(1, total // dtype.itemsize), dtype=dtype)
            return cls(lambda: None, lambda: all_sum(x, comm), lambda: dist.all_reduce(x.clone()))
        several = model(total, dtype)

        def backward() -> None:
            for p in several:
                p.grad = torch.rand_like(p)

        return cls(backward, partial(sync_gradients, several, comm), partial(reduced, several))


def measured(comm: Comm, over: str, what: str, total: int, dtype: torch.dtype, pairs: int) -> list[tuple[float, float]]:
    """Seconds of ours and of theirs, by pair, of the slowest rank."""
    torch.set_num_threads(1)
    if over == "gloo":
        comm = GroupComm()  # as a user makes it: ranks compare a kind of call once
    comm.check_every = "batch"
    pair = Pair.of(comm, what, total, dtype)
    ways = pair.ours, pair.theirs
    rows = []
    for number in range(WARM + pairs):
        seconds = [0.0, 0.0]
        for index in (0, 1) if number % 2 else (1, 0):
            pair.before()
            dist.barrier()
            start = time.perf_counter()
            ways[index]()
            seconds[index] = time.perf_counter() - start
        slowest = torch.tensor(seconds)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        rows.append((float(slowest[0]), float(slowest[1])))
    return rows[WARM:]


def row(over: str, ranks: int, what: str, total: int, dtype: torch.dtype, pairs: int) -> dict[str, Any]:
    """One row of the table."""
    times = run_processes(ranks, measured, over, what, total, dtype, pairs, comm=over, timeout=600.0)[0]
    ratios = [ours / theirs for ours, theirs in times]
    low, high = interval(ratios)
    ours, theirs = (statistics.median(column) * 1e3 for column in zip(*times))
    return {
        "over": over, "what": what, "ranks": ranks, "bytes": total, "dtype": str(dtype).removeprefix("torch."),
        "pairs": pairs, "ours_ms": round(ours, 3), "all_reduce_ms": round(theirs, 3),
        "ratio": round(statistics.median(ratios), 3), "interval": [round(low, 3), round(high, 3)],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--over", nargs="+", default=["gloo", "shm"], choices=["gloo", "shm"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--bytes", type=int, nargs="+", default=[1 << 12, 1 << 18, 1 << 20, 1 << 22, 1 << 23, 1 << 25])
    parser.add_argument("--what", nargs="+", default=["sync_gradients", "all_sum"])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    rows = []
    for case in itertools.product(args.over, args.ranks, args.what, args.dtype, args.bytes):
        over, ranks, what, dtype, total = case
        rows.append(row(over, ranks, what, total, getattr(torch, dtype), args.pairs))
        Console().print(rows[-1])
    if args.json:
        records.write(args.json, records.environment() | {"rows": rows})


if __name__ == "__main__":
    main()
