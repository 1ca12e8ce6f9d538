"""Replays batches of published length distributions under every policy and prints the time of each.

    python -m bench.planner.simulate                                   # every cell
    python -m bench.planner.simulate --quick                           # under a minute
    python -m bench.planner.simulate --ranks 64 --policies seqpar,laminar --distributions wlb --sensitivity
    python -m bench.planner.simulate --json bench/results/simulate.json --resume --plot simulate.png

A cell is a machine, a number of ranks and a distribution; its batches are the same for all policies. Figures are times
over the bound that no layout beats, computing alone (`seqpar.planner.bound`), under the planner's cost model, which
also decides: plans are compared, not systems. Free-running ranks wait for their groups only; in lockstep, as
FSDP's collectives have it, every layer takes what the slowest rank takes. A rival's knob is the best of a sweep for
the cell, for each of the two; `seqpar` is told which of the two, and has no other. Its figures are split: the time
above the bound without transfers, and the exposed part of transfers. Policies are in `policies`, costs in `schedules`,
published results in `published`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.lib import lengths as published
from bench.lib import records
from bench.planner.policies import POLICIES
from bench.planner.schedules import Case, run
from seqpar.planner import Hardware, ModelShape

# tokens of a rank, so that it has eight documents or more in the mean, and the longest document, as the sources have it
DISTRIBUTIONS = {
    "wikipedia": (32768, 196608), "prolong": (32768, 196608), "wlb": (40960, 131072), "magi": (32768, 196608),
    "megatron": (32768, 8192),
}  # fmt: skip
BATCHES = {"seqpar": {8: 200, 64: 200, 512: 200, 4096: 50}, "rival": {8: 50, 64: 20, 512: 3, 4096: 1}}
MICRO = 0.01  # fixed seconds of a micro-batch
Change = Callable[[Hardware], Hardware]


class Cell(NamedTuple):
    """The setting of a figure."""

    hardware: str
    ranks: int
    distribution: str
    variant: str = ""


def _links(factor: float) -> Change:
    def change(machine: Hardware) -> Hardware:
        links = {n: getattr(machine, n) for n in ("inside", "across")}
        return replace(machine, **{n: replace(x, bandwidth=x.bandwidth * factor) for n, x in links.items()})

    return change


def _rows(factor: float) -> Change:
    def change(machine: Hardware) -> Hardware:
        a = machine.attention
        rows = {n: getattr(a, n) * factor for n in ("query_pairs", "key_pairs")}
        return replace(machine, attention=replace(a, **rows))

    return change


# the machine's differences, and the seconds of a micro-batch
VARIANTS: dict[str, tuple[Change, float]] = {
    "": (lambda machine: machine, MICRO),
    "micro-batch 0 ms": (lambda machine: machine, 0.0),
    "micro-batch 60 ms": (lambda machine: machine, 0.06),
    "bandwidth x0.5": (_links(0.5), MICRO),
    "bandwidth x2": (_links(2), MICRO),
    "shards at no cost": (_rows(0), MICRO),
    "shards at twice the cost": (_rows(2), MICRO),
}


def batch(name: str, ranks: int, index: int) -> np.ndarray:
    """Lengths of one batch of a distribution: as many documents as fill the ranks, the last cut."""
    each, longest = DISTRIBUTIONS[name]
    tokens, rng = each * ranks, np.random.default_rng([index, ranks])
    drawn = np.empty(0, np.int64)
    while drawn.sum() < tokens:
        many = max(64, tokens // 800)
        if name == "megatron":
            more = published.from_megatron(many, rng)
        else:
            more = published.from_histogram(*published.HISTOGRAMS[name], many, rng)
        drawn = np.append(drawn, np.minimum(more, longest))
    found = np.diff(np.minimum(np.cumsum(drawn), tokens), prepend=0)
    return found[found > 0]


def case_of(cell: Cell, index: int) -> Case:
    """A batch of a cell on its machine: Llama-8B, layers recomputed."""
    change, micro = VARIANTS[cell.variant]
    machine = change(Hardware.preset(cell.hardware))
    shape = replace(ModelShape.preset("llama-8b"), recompute="full")
    return Case.of(batch(cell.distribution, cell.ranks, index), cell.ranks, shape, machine, micro=micro)


def replay(cell: Cell, index: int, names: Sequence[str]) -> dict[str, Any]:
    """The figures of each policy.

    They are the mean seconds of placing with a knob, and by knob: free, lockstep and imbalance over the bound; and
    rounds and rows.
    """
    case, result = case_of(cell, index), {}
    for name in names:
        policy, figures, seconds = POLICIES[name], {}, 0.0
        knobs = policy.knobs(case)
        for knob in knobs:
            start = time.perf_counter()
            micros = policy.place(case, knob)
            seconds += time.perf_counter() - start
            if micros is not None:
                found = run(case, micros, policy.ways)
                over = [x / case.bound for x in (found.free, found.lockstep, found.imbalance)]
                figures[str(knob)] = [*over, found.rounds, found.rows]
        result[name] = {"seconds": seconds / len(knobs), "figures": figures}
    return result


def summary(name: str, replayed: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Figures of a policy in a cell, with the knob that is best for it; None if no knob holds every batch."""
    every = [item["figures"] for item in replayed]
    if POLICIES[name].each:
        best = [[min(f.values(), key=lambda x: x[way]) for f in every if f] for way in (0, 1)]
        knobs = ["of each batch"] * 2
        if len(best[0]) < len(every):
            return None
    else:
        shared = [knob for knob in every[0] if all(knob in f for f in every)]
        if not shared:
            return None
        knobs = [min(shared, key=lambda knob: sum(f[knob][way] for f in every)) for way in (0, 1)]
        best = [[f[knob] for f in every] for knob in knobs]
    free, lock = [x[0] for x in best[0]], [x[1] for x in best[1]]
    return {
        "policy": name, "batches": len(every), "knob": knobs[0], "lockstep_knob": knobs[1],
        "free": [round(x, 5) for x in free], "lockstep": [round(x, 5) for x in lock],
        "free_mean": float(np.mean(free)), "free_max": max(free),
        "lockstep_mean": float(np.mean(lock)), "lockstep_max": max(lock),
        "imbalance_mean": float(np.mean([x[2] for x in best[0]])) - 1,
        "exposed_mean": float(np.mean([x[0] - x[2] for x in best[0]])),
        "rounds_max": max(x[3] for x in best[0]), "rows_max": max(x[4] for x in best[0]),
        "place_seconds": float(np.mean([item["seconds"] for item in replayed])),
    }  # fmt: skip


def batches_of(name: str, ranks: int, given: int | None) -> int:
    """Batches that a policy gets in a cell of so many ranks."""
    policy = POLICIES[name]
    if ranks > policy.most or (name == "flexsp" and find_spec("scipy") is None):
        return 0
    table = BATCHES["seqpar" if name == "seqpar" else "rival"]
    size = min((n for n in table if n >= ranks), default=max(table))
    many = table[size] if given is None else min(given, table[size]) if name != "seqpar" else given
    return max(1, many // 25) if policy.slow else many


def cell_rows(cell: Cell, names: Sequence[str], given: int | None, pool: Any, note: Callable[[], None]) -> list[dict]:
    """The rows of a cell, one for each policy."""
    many = {name: batches_of(name, cell.ranks, given) for name in names}
    jobs = [pool(replay, cell, i, [n for n in names if many[n] > i]) for i in range(max(many.values()))]
    done = []
    for job in jobs:
        done.append(job())
        note()
    rows = []
    for name in names:
        row = summary(name, [d[name] for d in done if name in d]) if many[name] else None
        if row is None:
            row = {"policy": name, "skipped": "too many ranks" if not many[name] else "no knob holds every batch"}
        rows.append(cell._asdict() | row)
    return rows


def lower(row: dict[str, Any], ours: dict[str, Any], way: str) -> bool:
    """Whether a rival is below seqpar in the mean over the batches of both."""
    return float(np.mean(row[way])) < float(np.mean(ours[way][: row["batches"]]))


def tables(rows: list[dict[str, Any]], way: str, title: str) -> tuple[Table, int, int]:
    """A line for each cell, a column for each policy; and how many rivals there are, and how many are lower."""
    names = list(dict.fromkeys(row["policy"] for row in rows))
    shown = Table("ranks", "lengths", *(f"[bold]{n}[/]" if n == "seqpar" else n for n in names), title=title)
    rivals = ahead = 0
    for key, group in by_cell(rows):
        ours = next((r for r in group if r["policy"] == "seqpar" and "skipped" not in r), None)
        cells = []
        for row in group:
            if "skipped" in row:
                cells.append("-")
                continue
            text = f"{row[way + '_mean']:.3f}"
            if row["policy"] == "seqpar":
                text = f"[bold]{text}[/] ({row[way + '_max']:.3f})"
            elif ours:
                rivals += 1
                if lower(row, ours, way):
                    ahead += 1
                    text = f"[yellow]{text} <[/]"
            cells.append(text)
        shown.add_row(str(key[1]), " ".join(filter(None, (key[2], key[3]))), *cells)
    shown.caption = (
        "time / bound, mean over batches (seqpar: and largest); "
        f"< is lower than seqpar on the same batches: {ahead} of {rivals}"
    )
    return shown, rivals, ahead


def ours_table(rows: list[dict[str, Any]], hardware: str) -> Table:
    """A table of the causes of seqpar's time above the bound."""
    shown = Table(
        "ranks", "lengths", "batches", "mean", "largest", "imbalance", "exposed", "placing, ms",
        title=f"seqpar on {hardware}: time / bound, and its shortfall",
    )  # fmt: skip
    for row in rows:
        if row["policy"] == "seqpar" and "skipped" not in row:
            shown.add_row(
                str(row["ranks"]), " ".join(filter(None, (row["distribution"], row["variant"]))), str(row["batches"]),
                f"{row['free_mean']:.4f}", f"{row['free_max']:.4f}", f"{row['imbalance_mean']:.2%}",
                f"{row['exposed_mean']:.2%}", f"{row['place_seconds'] * 1e3:,.0f}",
            )  # fmt: skip
    return shown


def by_cell(rows: list[dict[str, Any]]) -> Iterator[tuple[Cell, list[dict[str, Any]]]]:
    """The rows of each cell."""
    cells = list(dict.fromkeys(Cell(*(row[f] for f in Cell._fields)) for row in rows))
    for cell in cells:
        yield cell, [row for row in rows if Cell(*(row[f] for f in Cell._fields)) == cell]


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """A panel for each machine and number of ranks: every policy's mean over the bound by distribution."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows if "skipped" not in row and not row["variant"]]
    panels = list(dict.fromkeys((row["hardware"], row["ranks"]) for row in rows))
    names = list(dict.fromkeys(row["policy"] for row in rows))
    columns = min(4, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(4.2 * columns, 3.6 * lines), squeeze=False, sharey=True)
    colors = plt.get_cmap("tab20")
    for axis, panel in zip(axes.flat, panels):
        mine = [row for row in rows if (row["hardware"], row["ranks"]) == panel]
        order = list(dict.fromkeys(row["distribution"] for row in mine))
        for at, name in enumerate(names):
            points = [(order.index(r["distribution"]), r["free_mean"] - 1) for r in mine if r["policy"] == name]
            if points:
                strong = (
                    {"s": 60, "zorder": 3, "color": "black"} if name == "seqpar" else {"s": 22, "color": colors(at)}
                )
                axis.scatter(*zip(*points), label=name, **strong)
        axis.set(yscale="log", title=f"{panel[0]}, {panel[1]} ranks", xticks=range(len(order)))
        axis.set_xticklabels(order, rotation=30)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("time above the bound")
    for axis in list(axes.flat)[len(panels) :]:
        axis.remove()
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="lower center", ncols=3 * columns, fontsize="small")
    figure.tight_layout(rect=(0, 0.24 / lines, 1, 1))
    figure.savefig(path, dpi=130)


def settings() -> dict[str, Any]:
    """The settings that all cells share."""
    return {"model": "llama-8b, recompute full", "micro_seconds": MICRO, "distributions": DISTRIBUTIONS}


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def listed(text: str) -> list[str]:
        return text.split(",")

    parser.add_argument("--ranks", type=listed, default=["8", "64", "512", "4096"], help="numbers of ranks")
    parser.add_argument("--hardware", type=listed, default=["h100", "h100-100g"], help="presets of the planner")
    parser.add_argument("--distributions", type=listed, default=list(DISTRIBUTIONS))
    parser.add_argument("--policies", type=listed, default=list(POLICIES), help=", ".join(POLICIES))
    parser.add_argument("--batches", type=int, help="of a cell; rivals get at most so many. Default: by ranks")
    parser.add_argument("--sensitivity", action="store_true", help="64 ranks under other costs as well")
    parser.add_argument(
        "--quick", action="store_true", help="few batches of 8 and 64 ranks on one machine, without slow policies"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", type=Path, help="file for the figures, written after every cell")
    parser.add_argument("--resume", action="store_true", help="keep the cells that the file has")
    parser.add_argument("--plot", type=Path, help="file for a picture")
    args = parser.parse_args(given)
    for what, known in (("policies", POLICIES), ("distributions", DISTRIBUTIONS)):
        unknown = set(getattr(args, what)) - set(known)
        if unknown:
            parser.error(f"--{what}: {', '.join(sorted(unknown))} unknown; known: {', '.join(known)}")
    if args.resume and not args.json:
        parser.error("--resume needs --json, the file with the cells that are done")
    if args.quick:
        args.ranks, args.hardware, args.batches = ["8", "64"], args.hardware[:1], args.batches or 2
        args.policies = [name for name in args.policies if not POLICIES[name].slow]
    return args


def cells_of(args: argparse.Namespace) -> list[Cell]:
    """The cells that are asked for."""
    cells = [Cell(h, int(n), d) for h in args.hardware for n in args.ranks for d in args.distributions]
    if args.sensitivity:
        cells += [Cell(args.hardware[0], 64, d, v) for v in VARIANTS if v for d in args.distributions]
    return cells


def kept(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of an earlier run."""
    if not (args.resume and args.json.exists()):
        return []
    data = json.loads(args.json.read_text())
    if data["settings"] != json.loads(json.dumps(settings())):
        raise SystemExit(f"{args.json} is of other settings, {data['settings']}; give another file or leave --resume")
    return data["rows"]


def written(path: Path | None, rows: list[dict[str, Any]]) -> None:
    """Write the figures."""
    if path:
        records.write(path, records.environment() | {"settings": settings(), "rows": rows})


def simulate(args: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Rows of all cells."""
    rows = kept(args)
    have = {(Cell(*(r[f] for f in Cell._fields)), r["policy"]) for r in rows}
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    pool = ProcessPoolExecutor(args.jobs) if args.jobs > 1 else None

    def submit(work: Callable, *rest: Any) -> Callable[[], Any]:
        return pool.submit(work, *rest).result if pool else lambda: work(*rest)

    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        for cell in cells_of(args):
            names = [name for name in args.policies if (cell, name) not in have]
            many = max((batches_of(n, cell.ranks, args.batches) for n in names), default=0)
            task = progress.add_task(" ".join(map(str, cell)), total=many)
            if many:
                rows += cell_rows(cell, names, args.batches, submit, lambda task=task: progress.advance(task))
                written(args.json, rows)
            progress.remove_task(task)
    if pool:
        pool.shutdown()
    return rows


def main(given: Sequence[str] | None = None) -> None:
    """Runs the cells and shows them."""
    args = arguments(given)
    console = Console(width=None if sys.stdout.isatty() else 200)
    if find_spec("scipy") is None and "flexsp" in args.policies:
        console.print("flexsp is left out: it needs scipy (pip install scipy)")
    rows = simulate(args, console)
    for hardware in dict.fromkeys(row["hardware"] for row in rows):
        mine = [row for row in rows if row["hardware"] == hardware]
        if "seqpar" in args.policies:
            console.print(ours_table(mine, hardware))
        for way, name in (("free", "free-running"), ("lockstep", "lockstep")):
            console.print(tables(mine, way, f"{hardware}, {name}")[0])
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
