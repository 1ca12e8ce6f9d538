"""`token_log_probs` beside `linear_cross_entropy`: seconds of forward and of a step, and what entropy costs.

    python -m bench.cpu.log_probs --json bench/results/log_probs.json      # one thread, two minutes

Both compute the logits of 1,024 rows, a chunk at a time: the loss sums them up and knows its gradient in forward, the
log-probabilities have a factor for each row that only backward brings. A step is forward and backward, with a weight
that trains or with a frozen one, whose gradient nobody makes. Both take turns, in an order that changes, by the
processor's time; the ratio is that of a pair's times, ours over the loss's, its median and the interval that has the
true median in 90 of 100 runs. Rows with entropy say what it costs: as a figure to look at, and as a part of the loss,
with a gradient.

Exit code 1 if a row without entropy takes more than its limit: 1.1 forward, 1.45 for a step, 1.1 with a frozen weight.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.lib import records
from bench.lib.interval import interval
from seqpar.train import linear_cross_entropy, token_log_probs

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Kind(NamedTuple):
    """A case to time. trained: whether the weight trains. used: whether the loss has entropies. limit: of the ratio."""

    name: str
    backward: bool
    trained: bool = False
    entropy: bool = False
    used: bool = False
    limit: float | None = None


KINDS = (
    Kind("forward", False, limit=1.1),
    Kind("step", True, trained=True, limit=1.45),
    Kind("step, frozen weight", True, limit=1.1),
    Kind("forward, entropy", False, entropy=True),
    Kind("step, entropy beside the loss", True, trained=True, entropy=True),
    Kind("step, frozen weight, entropy beside the loss", True, entropy=True),
    Kind("step, entropy in the loss", True, trained=True, entropy=True, used=True),
    Kind("step, frozen weight, entropy in the loss", True, entropy=True, used=True),
)


def pair(kind: Kind, rows: int, dim: int, vocabulary: int, dtype: torch.dtype) -> list[Callable[[], object]]:
    """Ours and the loss, each to be called again and again."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, dim, generator=g).to(dtype).requires_grad_(kind.backward)
    weight = (torch.randn(vocabulary, dim, generator=g) * dim**-0.5).to(dtype).requires_grad_(kind.trained)
    labels, factors = torch.randint(vocabulary, (rows,), generator=g), torch.randn(rows, generator=g)
    leaves = [x for x in (hidden, weight) if x.requires_grad]

    def ours() -> Tensor:
        if not kind.entropy:
            return token_log_probs(hidden, weight, labels) @ factors
        log_probs, entropies = token_log_probs(hidden, weight, labels, entropy=True)
        return log_probs @ factors + (0.01 * entropies.sum() if kind.used else 0.0)

    def loss() -> Tensor:
        return linear_cross_entropy(hidden, weight, labels, valid=rows)

    def call(f: Callable[[], Tensor]) -> None:
        out = f()
        if kind.backward:
            torch.autograd.grad(out, leaves)

    return [lambda: call(ours), lambda: call(loss)]


def seconds(f: Callable[[], object]) -> float:
    """The processor's time of one call."""
    begin = time.process_time()
    f()
    return time.process_time() - begin


def measured(kind: Kind, sizes: tuple[int, int, int], dtype: str, repeat: int) -> dict[str, object]:
    """A row: medians of both, and the ratio of pairs."""
    both = pair(kind, *sizes, DTYPES[dtype])
    for f in both:
        f()
    times: list[list[float]] = [[], []]
    for turn in range(repeat):
        for which in (0, 1) if turn % 2 else (1, 0):
            times[which].append(seconds(both[which]))
    ratios = [ours / theirs for ours, theirs in zip(*times, strict=True)]
    return {
        "dtype": dtype, "case": kind.name, "ours": statistics.median(times[0]), "loss": statistics.median(times[1]),
        "ratio": statistics.median(ratios), "interval": interval(ratios), "limit": kind.limit,
    }  # fmt: skip


def main(flags: Sequence[str] | None = None) -> int:
    """Measure all cases and print them; 1 if one takes more than its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs=3, default=(1024, 512, 16384), help="rows, model dim, vocabulary")
    parser.add_argument("--dtypes", nargs="+", default=["fp32"], choices=list(DTYPES), help="of hidden and weight")
    parser.add_argument("--repeat", type=int, default=7, help="timings of each")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args(flags)
    table = Table(title=f"{args.sizes[0]:,} rows of {args.sizes[1]}, a vocabulary of {args.sizes[2]:,}, one thread")
    for column in ("dtype", "case", "ours", "loss", "ratio", "interval", "limit"):
        table.add_column(column)
    rows = [measured(kind, tuple(args.sizes), dtype, args.repeat) for dtype in args.dtypes for kind in KINDS]
    for row in rows:
        low, high = row["interval"]
        limit = "" if row["limit"] is None else f"{row['limit']}"
        table.add_row(
            row["dtype"], row["case"], f"{row['ours']:.3f} s", f"{row['loss']:.3f} s", f"{row['ratio']:.2f}",
            f"{low:.2f} to {high:.2f}", limit,
        )  # fmt: skip
    Console().print(table)
    if args.json:
        records.write(args.json, records.environment() | {"sizes": list(args.sizes), "rows": rows})
    return int(any(row["limit"] is not None and row["ratio"] > row["limit"] for row in rows))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
