"""Compares `plan_batch` with that of another tree, in pairs: CPU time, and the distance of plans from the bound.

    git worktree add ../before COMMIT
    python -m bench.planner.planning_against ../before --json bench/results/planning.json
    python -m bench.planner.planning_against ../before --random 300        # closeness alone, of random batches

A process of each tree plans each batch, in turn, so that both see the same machine. For each number of ranks and
documents it prints median CPU milliseconds over batches of five published distributions, and by which part of the bound
this tree's plan is worse at most. Then come the gaps to the bound of batches of 8,192 tokens a rank on 8 ranks.
The exit status is 1 if a plan is worse by more than 0.005. ``--json`` keeps one run of each processor in the file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.lib import lengths as published
from bench.lib import records
from bench.planner.planning import drawn

RANKS, DOCUMENTS = (2, 4, 8), (1, 8, 32, 128, 512)
WORSE = 0.005
MACHINES = ("h100", "a100", "h100-100g", "cpu")
MODELS = ("llama-8b", "gpt-7b", "qwen3-30b-a3b", "gemma3-27b", "tiny")


class Batch(NamedTuple):
    """The planned batch."""

    lengths: list[int]
    ranks: int
    hardware: str = "h100"
    model: str = "llama-8b"
    node: int | None = None


class Planner:
    """A process that plans with the package of a tree."""

    def __init__(self, tree: Path) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), "--serve", str(tree.resolve())]
        path = {"PYTHONPATH": f"{tree.resolve()}{os.pathsep}{Path(__file__).parents[2]}", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | path
        )

    def plan(self, batch: Batch) -> tuple[float, float]:
        """CPU milliseconds, and the gap to the bound."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(batch) + "\n")
        self._process.stdin.flush()
        milliseconds, gap = json.loads(self._process.stdout.readline())
        return milliseconds, gap


def serve(tree: Path) -> None:
    """Plan each batch that comes in on a line, and answer with milliseconds and gap."""
    import seqpar
    from seqpar.planner import Hardware, plan_batch

    if Path(seqpar.__file__).resolve().parents[1] != tree:
        raise SystemExit(f"expected the package of {tree}, got {seqpar.__file__}")
    from dataclasses import replace

    machines = {name: replace(Hardware.preset(name), memory=1 << 60) for name in MACHINES}
    for line in sys.stdin:
        batch = Batch(*json.loads(line))
        start = time.process_time()
        plan = plan_batch(
            batch.lengths, batch.ranks, hardware=machines[batch.hardware], model=batch.model, node=batch.node
        )
        spent = (time.process_time() - start) * 1e3
        print(json.dumps([spent, plan.forecast.gap]), flush=True)


def cells(batches: int) -> list[tuple[tuple[int, int], list[Batch]]]:
    """The cells: batches of each distribution, for each number of ranks and documents."""
    return [
        (
            (ranks, documents),
            [
                Batch(drawn(name, documents, seed).tolist(), ranks)
                for name in published.NAMES
                for seed in range(batches)
            ],
        )
        for ranks in RANKS
        for documents in DOCUMENTS
    ]


def at_random(count: int, seed: int) -> list[Batch]:
    """Batches of any distribution, equal documents and one giant among them, on any machine, for any model."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        documents, kind = int(rng.choice([1, 2, 3, 5, 8, 12, 20, 32, 64, 128, 256, 512])), int(rng.integers(7))
        if kind == 6:
            batch = np.full(documents, int(rng.choice([100, 1000, 8000])))
        else:
            batch = drawn((*published.NAMES, "wikipedia")[kind], documents, int(rng.integers(1 << 30)))
        if kind == 5:
            batch[0] = batch.sum()
        hardware, model = str(rng.choice(MACHINES)), str(rng.choice(MODELS))
        found.append(
            Batch(batch.tolist(), int(rng.choice([2, 3, 4, 6, 8, 8, 16])), hardware, model, int(rng.choice([8, 4, 1])))
        )
    return found


def full(name: str, batches: int) -> list[Batch]:
    """Batches of a distribution with as many documents as fill 8,192 tokens on each of 8 ranks."""
    return [Batch(published.packed(name, 8 * 8192, seed).tolist(), 8) for seed in range(batches)]


def compared(before: Planner, now: Planner, batches: list[Batch]) -> dict[str, Any]:
    """The medians of both trees, their quotient, and by how much this tree's gaps differ."""
    pairs = [(before.plan(batch), now.plan(batch)) for batch in batches]
    old, new = (statistics.median(pair[side][0] for pair in pairs) for side in (0, 1))
    worse = [pair[1][1] - pair[0][1] for pair in pairs]
    gaps = [[pair[side][1] for pair in pairs] for side in (0, 1)]
    means, most = ([round(value(side), 5) for side in gaps] for value in (statistics.mean, max))
    return {
        "batches": len(batches), "before_ms": round(old, 3), "now_ms": round(new, 3), "part": round(new / old, 3),
        "most_worse": round(max(worse), 5), "mean_worse": round(statistics.mean(worse), 5),
        "mean_gaps": means, "largest_gaps": most,
    }  # fmt: skip


def keep(path: Path, run: dict[str, Any]) -> None:
    """Write a run to a file of runs, in place of the run of the same machine."""
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    runs = [other for other in runs if other["machine"] != run["machine"]] + [run]
    records.write(path, {"runs": runs})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other tree")
    parser.add_argument("--batches", type=int, default=5, help="of each distribution")
    parser.add_argument("--random", type=int, default=300, help="random batches for closeness")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.before)
        return 0
    before, now = Planner(args.before), Planner(Path(__file__).parents[2])
    for planner in (before, now):
        planner.plan(Batch([100, 20], 2))  # the first call also pays for set-up
    table = Table("ranks", "documents", "batches", "before, ms", "now, ms", "part", "most worse", title="CPU ms")
    rows = []
    for (ranks, documents), batches in cells(args.batches):
        rows.append({"ranks": ranks, "documents": documents} | compared(before, now, batches))
        table.add_row(*map(str, list(rows[-1].values())[:7]))
    drawn_at_random = compared(before, now, at_random(args.random, args.seed))
    table.add_row("2 to 16", "1 to 512", *map(str, list(drawn_at_random.values())[:5]))
    gaps = Table(
        "distribution", "batches", "mean before, now", "most before, now", title="Gap, 8 ranks of 8,192 tokens"
    )
    filled = []
    for name in published.NAMES:
        filled.append({"distribution": name} | compared(before, now, full(name, 5 * args.batches)))
        gaps.add_row(name, *(str(filled[-1][key]) for key in ("batches", "mean_gaps", "largest_gaps")))
    console = Console()
    console.print(table, gaps)
    if args.json:
        keep(args.json, records.environment() | {"rows": rows, "random": drawn_at_random, "filled": filled})
    return int(max(row["most_worse"] for row in (*rows, drawn_at_random, *filled)) > WORSE)


if __name__ == "__main__":
    raise SystemExit(main())
