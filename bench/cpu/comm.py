"""Bandwidth of ShmComm beside gloo between processes of this machine: ring hops and all-to-alls, in GB/s.

    python -m bench.cpu.comm                        # 4 processes, 16 MB, about a minute on two cores
    python -m bench.cpu.comm --ranks 2 --bytes 65536 --repeat 20

A ring hop sends a tensor of `--bytes` to the next rank and takes one from the one before; an all-to-all sends every
other rank its share of such a tensor. Both comms live in the same processes and take turns, and so does a plain copy of
as many bytes by every process at once, which is what one copy a message cannot beat. Figures are bytes that all ranks
received over the time of the slowest; medians are compared. Exit code 1 if ShmComm is not 3 times as fast as gloo.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench.lib import records
from seqpar import native
from seqpar.comm import Comm, ShmComm, Tag
from seqpar.testing import run_processes

LEAST = 3.0
CPU = torch.device("cpu")


def ring_hops(comm: Comm, size: int, number: int, hops: int) -> int:
    """The bytes that this rank receives in some hops of two buffers around the ring."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    x, y = buffers(comm, (size,))
    for hop in range(hops):
        comm.exchange({after: [x]}, {before: [y]}, tag=Tag(0, number, 0, hop)).wait()
        x, y = y, x
    return hops * size


def all_to_alls(comm: Comm, size: int, number: int, hops: int) -> int:
    """The bytes that this rank receives in some all-to-alls."""
    x, y = buffers(comm, (comm.size, size // comm.size))
    peers = [peer for peer in range(comm.size) if peer != comm.rank]
    for hop in range(hops):
        comm.exchange({p: [x[p]] for p in peers}, {p: [y[p]] for p in peers}, tag=Tag(0, number, 1, hop)).wait()
        x, y = y, x
    return hops * len(peers) * x[0].numel()


def copies(comm: Comm, size: int, number: int, hops: int) -> int:
    """The bytes that this process copies within its own memory."""
    x, y = buffers(comm, (size,))
    for _ in range(hops):
        native.ops().copy_([y], [x], [None], [None])
        x, y = y, x
    return hops * size


PATTERNS = {"ring": ring_hops, "all-to-all": all_to_alls, "copy": copies}
CASES = [("ring", "gloo"), ("ring", "shm"), ("all-to-all", "gloo"), ("all-to-all", "shm"), ("copy", "shm")]
_kept: dict[tuple[int, tuple[int, ...]], tuple[torch.Tensor, torch.Tensor]] = {}


def buffers(comm: Comm, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors for all turns. They are written once, since the first touch of a page costs time."""
    if (id(comm), shape) not in _kept:
        _kept[id(comm), shape] = tuple(comm.empty(shape, torch.uint8, CPU).fill_(comm.rank) for _ in range(2))
    return _kept[id(comm), shape]


def turns(gloo: Comm, size: int, repeat: int, hops: int) -> list[list[tuple[int, float]]]:
    """This rank's (bytes, seconds) of every turn of every case. The first turn warms up and does not count."""
    comms = {"gloo": gloo, "shm": ShmComm(timeout=60.0)}
    found: list[list[tuple[int, float]]] = [[] for _ in CASES]
    for turn in range(repeat + 1):
        for case, (pattern, carrier) in enumerate(CASES):
            comms["shm"].agree("start", {})
            start = time.perf_counter()
            received = PATTERNS[pattern](comms[carrier], size, turn, hops)
            if turn:
                found[case].append((received, time.perf_counter() - start))
    return found


def main() -> int:
    """Measure all cases and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="processes")
    parser.add_argument("--bytes", type=int, default=16 << 20, help="of a rank's tensor")
    parser.add_argument("--repeat", type=int, default=9, help="turns of each case")
    parser.add_argument("--hops", type=int, default=20, help="exchanges in a turn")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    ranks = run_processes(args.ranks, turns, args.bytes, args.repeat, args.hops, timeout=60.0)
    rates: dict[tuple[str, str], list[float]] = {}
    for case, key in enumerate(CASES):
        for each in zip(*(rank[case] for rank in ranks)):
            rates.setdefault(key, []).append(sum(b for b, _ in each) / max(s for _, s in each) / 1e9)
    medians = {key: statistics.median(each) for key, each in rates.items()}
    ratios = {pattern: medians[pattern, "shm"] / medians[pattern, "gloo"] for pattern in ("ring", "all-to-all")}
    table = Table(title=f"GB/s over {args.ranks} processes, {args.bytes:,} bytes a rank", title_justify="left")
    for column in ("pattern", "comm", "median", "least", "most", "over gloo"):
        table.add_column(column, justify="left" if column in ("pattern", "comm") else "right")
    for (pattern, carrier), each in rates.items():
        figures = [f"{x:.2f}" for x in (statistics.median(each), min(each), max(each))]
        if pattern != "copy":
            figures.append(f"{medians[pattern, carrier] / medians[pattern, 'gloo']:.2f}")
        table.add_row(pattern, carrier if pattern != "copy" else "none", *figures)
    Console().print(table)
    if args.json:
        settings = {"ranks": args.ranks, "bytes": args.bytes, "repeat": args.repeat, "hops": args.hops}
        figures = {f"{pattern}, {carrier}": rate for (pattern, carrier), rate in medians.items()}
        records.write(args.json, records.environment() | settings | {"gb_per_second": figures, "over_gloo": ratios})
    return 0 if min(ratios.values()) >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
