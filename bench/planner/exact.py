"""How close the planner and its bound are: small batches are planned exactly and by `plan_batch`, under one cost model.

    python -m bench.planner.exact --seconds 10 --json bench/results/exact.json

A token stands for a block of 4,096: on this file's machine its attention weighs as much as a block's on an H100, links
are free, and documents share no heads, so that the exact program and the planner choose among the same plans. Columns
are ticks of the slowest rank above the bound: the least that HiGHS proved possible, the best plan that it found, and
`plan_batch`. Batches are log-normal, of at most 12 blocks a document.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.lib import records
from bench.planner.optimum import optimum
from seqpar.planner import Hardware, Link, ModelShape, plan_batch
from seqpar.planner.problem import Problem

BLOCK = 4096
MODEL = ModelShape.preset("llama-8b")


def coarse() -> Hardware:
    """An H100 on which a token weighs as much as a block."""
    h100 = Hardware.preset("h100")
    a, free = h100.attention, Link(0.0, 1e30)
    costs = {name: getattr(a, name) / BLOCK for name in ("rate", "backward_rate", "query_pairs", "key_pairs", "stage")}
    attention = dataclasses.replace(a, **costs)
    return dataclasses.replace(h100, attention=attention, inside=free, across=free, memory=1 << 50)


def case(ranks: int, documents: int, seed: int, seconds: float) -> dict[str, Any]:
    """The figures of one random batch."""
    rng = np.random.default_rng([ranks, documents, seed])
    lengths = np.minimum(rng.lognormal(0.5, 1.0, documents).astype(int) + 1, 12)
    options: dict[str, Any] = {"model": MODEL, "hardware": coarse()}
    began = time.perf_counter()
    best = optimum(Problem.of(lengths, ranks, **options), seconds=seconds)
    spent = time.perf_counter() - began
    bound, found = best.plan.forecast.bound, int(best.plan.forecast.ticks.total.max())
    planned = int(plan_batch(lengths, ranks, node=1, **options).forecast.ticks.total.max())
    if not bound <= best.least <= min(found, planned):
        raise RuntimeError(f"{lengths.tolist()} on {ranks} ranks: {bound}, {best.least}, {found}, {planned}")
    return {
        "ranks": ranks, "documents": documents, "seed": seed, "blocks": int(lengths.sum()),
        "least": best.least / bound - 1, "exact": found / bound - 1, "plan": planned / bound - 1, "seconds": spent,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 6, 8])
    parser.add_argument("--documents", type=int, nargs="+", default=[4, 8, 12, 20])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10.0, help="for HiGHS, a case")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    table = Table("ranks", "documents", "blocks", "proven", "exact", "plan_batch", "s", title="above the bound")
    rows = []
    for ranks in args.ranks:
        for documents in args.documents:
            for seed in range(args.seeds):
                row = case(ranks, documents, seed, args.seconds)
                rows.append(row)
                figures = (f"{row[name]:.2%}" for name in ("least", "exact", "plan"))
                table.add_row(str(ranks), str(documents), str(row["blocks"]), *figures, f"{row['seconds']:.1f}")
    console = Console()
    console.print(table)
    means = {name: float(np.mean([row[name] for row in rows])) for name in ("least", "exact", "plan")}
    console.print("mean above the bound: " + ", ".join(f"{name} {mean:.2%}" for name, mean in means.items()))
    if args.json:
        records.write(args.json, records.environment() | {"mean": means, "rows": rows})
        console.print(f"written to {args.json}")


if __name__ == "__main__":
    main()
