"""DSP as planned beside Ulysses, ring and Megatron's sequence parallelism: bytes, messages and time of a step.

    python -m bench.dsp.step                      # about a quarter of an hour on two cores
    python -m bench.dsp.step --quick              # a rehearsal
    python -m bench.dsp.step --json bench/results/dsp.json --plot docs/dsp.png

Measured, all methods in turns on the same weights, forward and backward, with the planner's figures of the machine
measured before:

  - `LatteTransformer3DModel` of diffusers, fewer and narrower blocks, over published clips (`dsp_grid.py`): as planned
    beside Ulysses, with what a step takes in exchanges, and whether it is as fast everywhere, and 1.3 times as fast
    where Ulysses spends a third of its step in exchanges;
  - models of one block for each dimension, narrower than published ones, on 2, 4 and 8 processes that share memory and
    two cores: the slowest rank's median. "waiting" is the part of a step that a rank spends in waits of exchanges.

Losses of all methods are compared. Simulated: the published shapes with the planner's model of an H100 cluster on 8 to
256 GPUs, whole at both ends; there planned has grids to choose from too. Exit code 1 if losses differ, or the promise
does not hold.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.dsp.grid import FASTER, THIRD, grid, table, told, verdict
from bench.dsp.latte import Row
from bench.dsp.machine import machine
from bench.dsp.methods import MEASURED, METHODS, Model, measured, megatron_seconds, slowest, ways
from bench.lib import records
from seqpar.dsp import plan_stages
from seqpar.dsp.costs import Costs
from seqpar.planner import Hardware
from seqpar.testing import run_processes

PAIR, VIDEO, FULL = ("q", "p"), ("q", "p"), ("pq",)
# p, q are time and space, or the two residues of a pair
SMALL = (
    (Model("video", 256, 16, 1, VIDEO), [(1, 1, 1024), (2, 5, 256), (1, 16, 256), (1, 51, 64)]),
    (Model("video, 4 queries a key head", 256, 16, 1, VIDEO, groups=4), [(1, 16, 256)]),
    (Model("pairs", 128, 4, 2, PAIR, ffn=2), [(1, 48, 48), (1, 31, 31)]),
    (Model("full 3-D", 256, 16, 1, FULL), [(1, 5, 64)]),
)
QUICK = (
    (Model("video", 32, 4, 1, VIDEO), [(1, 5, 12)]),
    (Model("video, 2 queries a key head", 32, 4, 1, VIDEO, groups=2), [(1, 5, 12)]),
    (Model("full 3-D", 32, 4, 1, FULL), [(1, 3, 5)]),
)
# OpenSora's STDiT3-XL/2 and Latte-XL/2 at 28 pairs of 1152, Evoformer's 48 layers of pairs at 128
PUBLISHED = (
    (
        Model("OpenSora", 1152, 16, 28, VIDEO),
        [(1, 1, 4096), (1, 16, 1024), (1, 51, 1560), (1, 80, 1024), (1, 204, 3600)],
    ),
    (Model("Latte", 1152, 16, 14, VIDEO), [(2, 16, 256), (2, 16, 1024)]),
    (Model("pair stack", 128, 4, 48, PAIR, ffn=2), [(1, 384, 384), (1, 1024, 1024)]),
    (Model("full 3-D", 3072, 24, 28, FULL), [(1, 16, 1560), (1, 33, 3600)]),
)


def dims_of(clip: Sequence[int]) -> dict[str, int]:
    return dict(zip("bpq", clip))


def measure(quick: bool, repeat: int, console: Console) -> list[Row]:
    rows = []
    for ranks in (2,) if quick else (2, 4, 8):
        hardware = machine(ranks, "shm", 2 if quick else 5).hardware
        for model, clips in QUICK if quick else SMALL:
            for clip in clips:
                found = run_processes(
                    ranks, measured, model, dims_of(clip), hardware, repeat, MEASURED, comm="shm", timeout=120.0
                )
                by_method = slowest(found)
                rows += [
                    {"model": model.name, "width": model.width, "clip": clip, "ranks": ranks, "method": name} | row
                    for name, row in by_method.items()
                ]
                show(rows[-len(by_method) :], console)
    return rows


def show(rows: list[Row], console: Console) -> None:
    first = rows[0]
    title = f"{first['model']} {first['width']} wide, b p q = {first['clip']}, {first['ranks']} ranks"
    table = Table("method", "ms", "waiting", "KiB sent", "messages", "exchanges", "layouts", title=title)
    for row in rows:
        table.add_row(
            row["method"], f"{row['seconds'] * 1e3:.1f}", f"{row['waiting']:.0%}", f"{row['bytes'] / 1024:,.0f}",
            str(row["messages"]), str(row["exchanges"]), row["layouts"],
        )  # fmt: skip
    console.print(table)
    by = {row["method"]: row for row in rows}
    if by["dsp"]["bytes"] and by.get("ulysses", {}).get("bytes"):
        console.print(f"bytes of Ulysses / DSP: {by['ulysses']['bytes'] / by['dsp']['bytes']:.2f}, ", end="")
        console.print(f"time: {by['ulysses']['seconds'] / by['dsp']['seconds']:.2f}")


def simulate(hardware: Hardware, gpus: Sequence[int]) -> list[Row]:
    """Seconds of a step in bf16, by the planner's cost model."""
    rows = []
    for model, clips in PUBLISHED:
        for clip in clips:
            for ranks in gpus:
                dims = dims_of(clip)
                seconds = {name: plan.seconds for name, plan in ways(model, dims, ranks, hardware, 2, None).items()}
                seconds["megatron"] = megatron_seconds(model, Costs(dims, ranks, hardware), 2)
                rows.append({"model": model.name, "clip": clip, "ranks": ranks, "seconds": seconds})
    return rows


def show_simulated(rows: list[Row], console: Console) -> None:
    table = Table("model", "b p q", "GPUs", *METHODS, "ulysses / dsp", title="Simulated step on H100, milliseconds")
    for row in rows:
        seconds = row["seconds"]
        times = [f"{seconds[name] * 1e3:.1f}" if name in seconds else "-" for name in METHODS]
        ratio = f"{seconds['ulysses'] / seconds['dsp']:.2f}" if "ulysses" in seconds else "-"
        table.add_row(row["model"], str(row["clip"]), str(row["ranks"]), *times, ratio)
    console.print(table)


def planning() -> float:
    """The least milliseconds in which the planner plans 100 stages with 4 dimensions."""
    stages = Model("many", 1152, 16, 50, VIDEO).stages({"b": 2, "p": 16, "q": 3600}, 2)
    best = math.inf
    for _ in range(20):
        started = time.process_time()
        plan_stages(stages, {"b": 2, "p": 16, "q": 3600, "h": 16}, 8, end=None)
        best = min(best, time.process_time() - started)
    return best * 1e3


def plot(data: Row, path: Path) -> None:
    from matplotlib.figure import Figure

    models = list(dict.fromkeys((row["model"], tuple(row["clip"])) for row in data["simulated"]))
    columns = 4
    lines = -(-(len(models) + 1) // columns)
    figure: Any = Figure(figsize=(4 * columns, 3 * lines), layout="constrained")
    latte, *axes = figure.subplots(lines, columns, squeeze=False).flatten()
    for over in dict.fromkeys(row["over"] for row in data["latte"]):
        rows = [row for row in data["latte"] if row["over"] == over]
        latte.plot([r["share"] for r in rows], [r["ratio"] for r in rows], "o", markersize=3, label=over)
    latte.plot([0, THIRD, THIRD, 1], [1, 1, FASTER, FASTER], "k:", linewidth=1)
    latte.set(title="Latte, measured", xlabel="exchanges' part of the Ulysses step", ylabel="Ulysses / planned")
    latte.legend(fontsize=7)
    for axis, (name, clip) in zip(axes, models):
        rows = [r for r in data["simulated"] if r["model"] == name and tuple(r["clip"]) == clip]
        for method in METHODS:
            at = [(r["ranks"], r["seconds"][method] * 1e3) for r in rows if method in r["seconds"]]
            axis.plot(*zip(*at), marker="o", label=method) if at else None
        axis.set(title=f"{name} {clip}", xlabel="GPUs", ylabel="ms of a step", yscale="log")
        axis.set_xscale("log", base=2)
        axis.set_xticks(ranks := sorted({r["ranks"] for r in rows}), map(str, ranks))
    axes[0].legend(fontsize=7)
    for axis in axes[len(models) :]:
        axis.set_visible(False)
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to see it run")
    parser.add_argument("--repeat", type=int, help="turns (default: 5, with --quick 2)")
    parser.add_argument("--hardware", default="h100", help="a preset, for the simulation")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--plot", type=Path, help="file for the picture of both")
    args = parser.parse_args(arguments)
    console = Console(width=None if os.isatty(1) else 180)
    load, repeat = os.getloadavg()[0], args.repeat or (2 if args.quick else 5)
    with console.status("Latte") as status:
        latte, machines = grid(
            args.quick, repeat, lambda row: status.update(f"Latte: {row['clip']} over {row['over']}")
        )
    console.print(table(latte))
    found = verdict(latte)
    told(found, console)
    rows = measure(args.quick, repeat, console)
    simulated = simulate(Hardware.preset(args.hardware), (8,) if args.quick else (8, 16, 32, 64, 128, 256))
    show_simulated(simulated, console)
    milliseconds = planning()
    console.print(f"planning 100 stages x 4 dimensions: {milliseconds:.2f} ms of CPU; load at the start {load:.1f}")
    data = records.environment() | {
        "latte": latte, "verdict": found, "machines": machines,
        "load": load, "planning_ms": milliseconds, "measured": rows, "hardware": args.hardware, "simulated": simulated,
    }  # fmt: skip
    if args.json:
        records.write(args.json, data)
    if args.plot:
        plot(data, args.plot)
    wrong = [f"of {row['method']}: {row}" for row in rows if not same(row, rows)]
    wrong += [f"of Latte: {row}" for row in latte if not close(row["planned"]["loss"], row["ulysses"]["loss"])]
    for what in wrong:
        console.print(f"the loss differs {what}")
    return 1 if wrong or not (found["holds"] or args.quick) else 0


def same(row: Row, rows: list[Row]) -> bool:
    """Whether a loss equals that of DSP on the same clip and ranks, up to rounding in fp32."""
    keys = ("model", "clip", "ranks")
    (base,) = [r["loss"] for r in rows if r["method"] == "dsp" and all(r[k] == row[k] for k in keys)]
    return close(row["loss"], base)


def close(a: float, b: float) -> bool:
    """Whether losses are equal up to rounding in fp32."""
    return abs(a - b) <= 1e-3 * max(1.0, abs(b))


if __name__ == "__main__":
    raise SystemExit(main())
