"""What the rows of `bench/gpu/first_hour.sh` decide: for each of its parts the figures, and the rule that reads them.

    python -m bench.gpu.decisions /kept                # all parts whose files are there
    python -m bench.gpu.decisions /kept --part trees

A rule was written before the rows were taken. It names what changes in the package, and from which figure on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from bench.cpu.timeline import Event, summary
from bench.gpu import magi
from bench.gpu.rows import Row, read, wrong
from bench.gpu.run import said
from seqpar.kernels.preference import ON_HOPPER
from seqpar.planner import Hardware

ROWS, NEWEST, NCCL, LOST = "gpu.jsonl", "gpu-newest.jsonl", "nccl.jsonl", "lost.jsonl"
TWO, TRACE, HARDWARE, TUNING = "two-nodes.jsonl", "trace.json", "hardware.json", "gpu.tuning.json"
BY_TORCHRUN = "TORCH_NCCL_ASYNC_ERROR_HANDLING"  # a setting of every row
FOUND = ("tflops", "gbps", "ms")  # a row with one of these has a figure


class Part(NamedTuple):
    """A part of the script. figures: of a folder, a line each; nothing if its rows are not there."""

    rule: str
    figures: Callable[[Path], Iterator[str]]


def rows_of(path: Path, *slices: str) -> list[Row]:
    """Rows of these slices; of each case and its settings those of the last try of the last commit."""
    rows = [row for row in read(path) if row["slice"] in slices]
    last = {_case(row): _run(row) for row in rows}
    return [row for row in rows if _run(row) == last[_case(row)]]


def _case(row: Row) -> tuple[str, ...]:
    return row["slice"], row["case"], json.dumps(row.get("variables"))


def _run(row: Row) -> tuple[object, ...]:
    return row.get("commit"), row.get("sources"), row.get("try")


def settings(row: Row) -> str:
    """The settings of a row that are not the usual ones."""
    every = row.get("variables", {}).items()
    unusual = {name: value for name, value in every if value not in (False, None) and name != BY_TORCHRUN}
    return f" {unusual}" if unusual else ""


def timed(path: Path, *slices: str) -> list[Row]:
    """Those of them that have a figure."""
    return [row for row in rows_of(path, *slices) if any(row.get(name) is not None for name in FOUND)]


def listed(file: str, *slices: str) -> Callable[[Path], Iterator[str]]:
    """Every row of these slices, as the measurement prints it."""

    def figures(folder: Path) -> Iterator[str]:
        for row in rows_of(folder / file, *slices):
            yield f"{row['case']}: {said(row)}{settings(row)}"

    return figures


def checks(folder: Path) -> Iterator[str]:
    """How many checks there are, and those that failed."""
    rows = rows_of(folder / ROWS, "correct")
    if rows:
        yield f"{sum('ok' in row for row in rows)} checks, {sum(map(wrong, rows))} wrong"
    yield from (f"{row['case']}: {said(row)}" for row in rows if wrong(row))


def trees(folder: Path) -> Iterator[str]:
    """Triton's rates on trees."""
    for row in timed(folder / ROWS, "trees"):
        if row["kernel"] == "triton" and row.get("tflops"):
            yield f"{row['case']}, {row['mode']}: {row['tflops']:.0f} TFLOP/s"


def accumulate(folder: Path) -> Iterator[str]:
    """Nanoseconds that a merge costs per query row, and its rate beside a launch without one."""
    rows = timed(folder / ROWS, "accumulate")
    plain = {row["case"]: row["ms"] for row in rows if row["mode"] == "plain"}
    for row in rows:
        if row["mode"] == "accumulating" and row["case"] in plain:
            more = (row["ms"] - plain[row["case"]]) * 1e6 / int(row["case"].split()[0])
            yield f"{row['case']}: a merge takes {more:.1f} ns per row, {row['ratio']:.2f} of the rate without"


def speed(folder: Path) -> Iterator[str]:
    """The order of kernels by their rate in the longest causal call, beside that of `auto`."""
    for name in ("forward", "backward"):
        rows = [
            row for row in timed(folder / ROWS, name) if "causal 16384" in row["case"] and row["kernel"] in ON_HOPPER
        ]
        for case in dict.fromkeys(row["case"] for row in rows):
            best = {row["kernel"]: row["tflops"] for row in rows if row["case"] == case}
            ranked = sorted(best, key=lambda kernel: -best[kernel])
            same = ranked == [kernel for kernel in ON_HOPPER if kernel in best]
            figures = ", ".join(f"{kernel} {best[kernel]:.0f}" for kernel in ranked)
            yield f"{name}, {case}: {figures} TFLOP/s; {'the order of auto' if same else 'NOT the order of auto'}"


def newest(folder: Path) -> Iterator[str]:
    """Triton's kernels with the newest Triton beside those with the installed one."""
    before = {
        (row["case"], row["mode"]): row["tflops"] for row in timed(folder / ROWS, "forward", "backward")
        if row["kernel"] == "triton"
    }  # fmt: skip
    for row in timed(folder / NEWEST, "forward", "backward"):
        key = row["case"], row["mode"]
        if row["kernel"] == "triton" and key in before:
            yield f"{row['case']}, {row['mode']}: {row['tflops'] / before[key]:.2f} of the installed Triton"


def tuned(folder: Path) -> Iterator[str]:
    """The best candidate of each direction beside the shipped one."""
    path = folder / TUNING
    for name, best in json.loads(path.read_text()).items() if path.exists() else ():
        yield f"{name}: {best[0]['what']}, {best[0]['ratio']:.3f} of the shipped one"


def hops(folder: Path) -> Iterator[str]:
    """GB/s of the largest message, by comm, pairs and settings."""
    rows = [row for row in timed(folder / NCCL, "hops", "all-to-alls") if row.get("gbps")]
    for row in sorted(rows, key=lambda row: (row["slice"], row["case"], row["mode"], -row["gbps"])):
        yield f"{row['slice']}, {row['case']}, {row['mode']}: {row['kernel']} {row['gbps']:.0f} GB/s{settings(row)}"


def layers(file: str) -> Callable[[Path], Iterator[str]]:
    """The share of one GPU's rate, what is exposed, and the slow-down of kernels while messages move."""

    def figures(folder: Path) -> Iterator[str]:
        for row in timed(folder / file, "layers"):
            alone = row.get("computing_alone_ms")
            slower = f", kernels {row['computing_ms'] / alone:.2f} of their time alone" if alone else ""
            of = f"{row['kernel']} {row['ratio']:.2f} of one GPU, {row['exposed_ms']:.2f} ms exposed{slower}"
            yield f"{row['case']}, {row['mode']}: {of}{settings(row)}"

    return figures


def traced(folder: Path) -> Iterator[str]:
    """What each rank's exchanges lie under. The process of an event begins with its rank."""
    path = folder / TRACE
    ranks: dict[str, list[Event]] = {}
    for event in json.loads(path.read_text())["traceEvents"] if path.exists() else ():
        ranks.setdefault(str(event.get("pid")).removeprefix("rank ").split()[0], []).append(event)
    for rank, events in sorted(ranks.items()):
        times = summary(events)
        if times["exchanging"]:
            yield f"rank {rank}: {times['exchanging']:.1f} ms exchanging, {times['overlap share']:.0%} of it hidden"


def lost(folder: Path) -> Iterator[str]:
    """How soon a lost rank is named."""
    for row in read(folder / LOST):
        yield f"{row['case']}: " + (f"named after {row['seconds']:.1f} s" if row["ok"] else f"MISSED: {row['missed']}")


def published(folder: Path) -> Iterator[str]:
    """The table of the published workload."""
    rows = rows_of(folder / NCCL, "magi")
    if any(row.get("tflops") for row in rows):
        yield from magi.table(rows, 8).splitlines()


def calibrated(folder: Path) -> Iterator[str]:
    """The rates and links that were measured."""
    if (folder / HARDWARE).exists():
        found = Hardware.load(folder / HARDWARE)
        rate, back = found.attention.rate / 1e12, found.attention.backward_rate / 1e12
        yield f"attention {rate:.2f} TFLOP/s, backward {back:.2f}; links {found.inside.bandwidth / 1e9:.2f} GB/s"


PARTS = {
    # one GPU
    "correct": Part("A kernel with a wrong row is not timed; report it, and name the release in its adapter.", checks),
    "trees": Part(
        "A backward of a tree at 300 TFLOP/s or more (265 before) confirms that dk and dv are cut by work; below, the "
        "simulator of bench.gpu.waves is wrong and its coefficients are fitted again.", trees,
    ),
    "accumulate": Part(
        "The planner's cost of a merged row follows the figure at 2,048 rows. A producer that fetches the next tile "
        "during the epilogue is worth writing if a merge keeps less than 0.9 of the rate there.", accumulate,
    ),
    "speed": Part(
        "ON_HOPPER in seqpar/kernels/preference.py, and the planner's presets, follow these rates. An own forward in "
        "Gluon is worth writing while triton stays below 0.85 of the fastest.", speed,
    ),
    "newest": Part(
        "Above 1.02 in both directions, constraints name the newest Triton; below 0.98 in one, docs/gpus.md advises "
        "the older one.", newest,
    ),
    "profile": Part(
        "If a launch of the ring takes 50 us more than its pairs and rows explain, clocks under load are the cause and "
        "nothing changes; if 'nothing' has 5 % of the pass, the host is late and the launches are to be batched.",
        listed(ROWS, "profile"),
    ),
    "ring": Part(
        "Before: 0.66 forward and 0.94 of a step, of one rank with the whole batch. The default of stage_bytes follows "
        "the faster of 64 and 256 MiB; the planner counts the ratio.", listed(ROWS, "step", "ring"),
    ),
    "rest": Part("Call the script again until no case is left.", checks),
    "tune": Part("A candidate above 1.02 of the shipped one replaces it, if it spills little in all versions.", tuned),
    "comm": Part(
        "All tests of PeerComm pass. On several GPUs, a message that comes after its flag means signals=\"kernel\".",
        listed(ROWS, "comm"),
    ),
    # eight GPUs
    "nccl": Part("Nothing that goes over NCCL is timed before these tests pass.", lambda folder: iter(())),
    "hops": Part(
        "The planner's links follow `one pair` and `all`. A setting that gains 10 % in `all` becomes the advice of "
        "docs/nodes.md; if min_ctas does, it becomes GroupComm's default inside a node. If PeerComm has 1.3 of NCCL's "
        "rate, docs/choose.md names it first inside a node.", hops,
    ),
    "layers": Part(
        "Exposed times above 5 % of a layer: choose by them between NCCL, PeerComm, --shared and 32 connections. If "
        "kernels need more than 1.1 of their time alone, a grid that leaves multiprocessors free is worth writing. If "
        "PeerComm on torch's symmetric memory is as fast as on csrc/peer, csrc/peer can go.", layers(NCCL),
    ),
    "trace": Part(
        "Exchanges that are hidden by less than 0.8: the trace shows whether NCCL's kernel starts beside attention's "
        "or after it; after it, PeerComm is the default inside a node.", traced,
    ),
    "lost": Part("A rank that is lost is named by all others within the timeout and 15 s.", lost),
    "magi": Part("The table goes to docs/gpus.md.", published),
    "calibrate": Part("A preset further than 20 % from these figures is corrected.", calibrated),
    # two nodes
    "two": Part(
        "The planner's link between nodes follows `hops`; docs/nodes.md says which transports ran across nodes.",
        lambda folder: (line for of in (listed(TWO, "open", "hops"), layers(TWO)) for line in of(folder)),
    ),
}  # fmt: skip


def told(folder: Path, name: str) -> Iterator[str]:
    """The lines of a part: its figures, and its rule."""
    part = PARTS[name]
    yield f"-- {name}: {part.rule}"
    yield from (f"   {line}" for line in list(part.figures(folder)) or ["no rows"])


def main(arguments: list[str] | None = None) -> int:
    """Print the figures and the rules."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--part", action="append", choices=list(PARTS), help="default: all")
    args = parser.parse_args(arguments)
    for name in args.part or PARTS:
        print(*told(args.folder, name), sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
