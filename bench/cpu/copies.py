"""Packing and unpacking on this CPU in GB/s, read and written, beside a contiguous copy of as many bytes by torch.

    python -m bench.cpu.copies                              # everything, about three minutes on two cores
    python -m bench.cpu.copies --bytes 64 --threads 1 --repeat 5 --json copies.json

A rank packs the pieces of a tensor [tokens, peers, row] for all peers, as `switch` does and a head trade on its way in,
and unpacks what they sent; "q k v" are three tensors; q has four times the heads. Without the compiled
extension these are torch's copies, one for each piece: `--torch` times them anyway. Timings of a case are interleaved,
and the fastest of each are compared: other programs take memory bandwidth from one call and not from the next.
Exit code 1 if anything was below 0.8 of the contiguous copy.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from bench.lib import records
from seqpar.kernels.memory import copy as copies
from seqpar.kernels.memory.copy import Pair, copy

LEAST = 0.8  # of the contiguous copy
TENSORS = {"x": (1,), "q k v": (4, 1, 1)}  # heads of a piece


class Case(NamedTuple):
    """A copy to measure: one row of the table. mib: MiB copied."""

    threads: int
    tensors: str
    mib: int
    row: int
    peers: int


def memory(size: int) -> Tensor:
    """Memory that was written once. Unwritten memory is a single page of zeros, which never leaves the cache."""
    return torch.ones(size, dtype=torch.uint8)


def pairs_of(case: Case) -> tuple[list[Pair], list[Pair], int]:
    """The packing call, the unpacking call, and the bytes that each copies."""
    heads = TENSORS[case.tensors]
    tokens = (case.mib << 20) // (case.row * case.peers * sum(heads))
    pack: list[Pair] = []
    unpack: list[Pair] = []
    for n in heads:
        whole, buffer, back = (memory(tokens * case.peers * n * case.row) for _ in range(3))
        pieces = buffer.view(case.peers, tokens, n, case.row)
        for peer in range(case.peers):
            mine, theirs = (x.view(tokens, case.peers, n, case.row)[:, peer] for x in (whole, back))
            pack.append(Pair(pieces[peer], mine))
            unpack.append(Pair(theirs, pieces[peer]))
    return pack, unpack, sum(pair.src.numel() for pair in pack)


def each(pairs: list[Pair]) -> None:
    """The same copies by torch."""
    for pair in pairs:
        pair.dst.copy_(pair.src)


def measured(case: Case, repeat: int, with_torch: bool) -> dict[str, object]:
    """One row; the variants are timed in turns."""
    torch.set_num_threads(case.threads)
    pack, unpack, size = pairs_of(case)
    src, dst = memory(size), memory(size)

    def contiguous() -> Tensor:
        return dst.copy_(src)

    calls = {"contiguous": contiguous, "pack": lambda: copy(pack), "unpack": lambda: copy(unpack)}
    if with_torch:
        calls |= {"torch pack": lambda: each(pack), "torch unpack": lambda: each(unpack)}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeat + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if turn:  # the first turn warms up
                times[name].append(time.perf_counter() - start)
    rates = {name: 2 * size / min(t) / 1e9 for name, t in times.items()}
    return case._asdict() | rates | {"ratio": min(rates["pack"], rates["unpack"]) / rates["contiguous"]}


def table(rows: list[dict[str, object]]) -> Table:
    """The rows as a table to print."""
    result = Table(title="packing and unpacking, GB/s read and written", title_justify="left", box=None)
    names = [name for name in rows[0] if name != "ratio"]
    for name in (*names, "worst / contiguous"):
        result.add_column(name, justify="right")
    for row in rows:
        cells = [f"{row[n]:.1f}" if isinstance(row[n], float) else str(row[n]) for n in names]
        result.add_row(*cells, f"{row['ratio']:.2f}")
    return result


def main() -> int:
    """Measure all cases and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--bytes", type=int, nargs="+", default=[64, 256], help="MiB that are copied")
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 256, 1024, 4096], help="bytes of a head's row")
    parser.add_argument("--peers", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--repeat", type=int, default=15, help="timings of each variant")
    parser.add_argument("--torch", action="store_true", help="torch's copies of each piece, too")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    console, rows = Console(width=120), []
    todo = [Case(*case) for case in product(args.threads, TENSORS, args.bytes, args.rows, args.peers)]
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for case in progress.track(todo, description="copies"):
            rows.append(measured(case, args.repeat, args.torch))
    console.print(table(rows))
    below = [row for row in rows if row["ratio"] < LEAST]  # type: ignore[operator]
    if args.json:
        compiled = copies.native.missing() is None
        records.write(args.json, records.environment() | {"compiled": compiled, "rows": rows})
        console.print(f"written to {args.json}")
    console.print(f"below {LEAST} of a contiguous copy in {len(below)} of {len(rows)} cases")
    return 1 if below else 0


if __name__ == "__main__":
    sys.exit(main())
