"""Measures the plan of `plan_batch` beside fixed ones: forward and backward of a decoder's layers on three batches.

    python -m bench.planner.planned                 # about four minutes on two cores
    python -m bench.planner.planned --quick         # a rehearsal on short documents
    python -m bench.planner.planned --hardware hardware.json --json bench/results/planned.json

First the machine is measured as `seqpar calibrate` does, unless --hardware gives it. The batches are files of Python's
standard library, a byte a token: one long document, two long ones among short ones, short ones alone. Methods:

    auto            plan_batch(lengths, ranks, model=..., hardware=..., token_slack=0.5)
    ring            zigzag, keys passed round the ranks
    Ulysses         contiguous, all ranks trade tokens for heads
    gather          zigzag, every rank gathers the keys it sees parts of
    data parallel   whole documents, the costliest first to the rank with least to do

Every core is a rank, a pinned process of one thread over `ShmComm`; the time is that of the slowest rank. Worlds of 4
and 8 ranks run one rank after another, their exchanges composed (`virtual.py`); so does the world of processes, which
says how far the composition can be trusted. Methods take turns. Medians stand with intervals of order statistics that
hold the true median with at least 90 %; where two overlap neither method is called faster. Exit code 1 if auto is
more than 5 % slower than the best fixed method on a batch, or less than 1.3 times as fast as the worst over all three.
"""

from __future__ import annotations

import argparse
import heapq
import os
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import seqpar
from bench.lib import records
from bench.lib.interval import interval
from bench.lib.virtual import Event, Tape, compose
from seqpar.cli.calibrate import measured as calibrated
from seqpar.comm import Comm, ShmComm
from seqpar.plan.steps import count
from seqpar.planner import Hardware, ModelShape, plan_batch
from seqpar.planner.cost import Weights, counted, ticks
from seqpar.testing import run_processes

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from decoder import Block, Config  # noqa: E402
from demo import corpus  # noqa: E402

SHAPE = ModelShape("bench", hidden=512, layers=1, heads=8, kv_heads=8, dim=64, ffn=1408, vocab=1)
VIRTUAL = (4, 8)
CLOSE, FASTER = 1.05, 1.3
BUSY = 0.5  # processes on the machine above which times of processes mean little
AUTO = "auto"
METHODS = (AUTO, "ring", "Ulysses", "gather", "data parallel")


def batches(tokens: int) -> dict[str, list[int]]:
    """The lengths of real files, by name of the batch; each batch has about so many tokens."""
    lengths = sorted(len(text) for _, text in corpus())
    short = [n for n in lengths if n <= tokens // 8]
    short = [short[i] for i in np.random.default_rng(0).permutation(len(short))]
    long = heapq.nsmallest(2, lengths, key=lambda n: abs(n - tokens // 3))
    return {
        "one long document": [min(lengths, key=lambda n: abs(n - tokens))],
        "long and short": [*long, *_filling(short, tokens - sum(long))],
        "many short": _filling(short, tokens),
    }


def _filling(lengths: Sequence[int], tokens: int) -> list[int]:
    """The lengths, in their order, that still fit into so many tokens."""
    chosen = []
    for length in lengths:
        if length <= tokens:
            chosen.append(length)
            tokens -= length
    return chosen


def plans(lengths: Sequence[int], ranks: int, shape: ModelShape, hardware: Hardware) -> dict[str, seqpar.Plan]:
    """The plan of each method."""
    mask, zigzag = seqpar.Mask(lengths), seqpar.Layout.zigzag(lengths, ranks)
    return {
        AUTO: plan_batch(lengths, ranks, model=shape, hardware=hardware, node=ranks, token_slack=0.5),
        "ring": seqpar.Plan(mask, zigzag, transport="ring"),
        "Ulysses": seqpar.Plan(mask, seqpar.Layout.contiguous(sum(lengths), ranks), ulysses=ranks),
        "gather": seqpar.Plan(mask, zigzag, transport="gather"),
        "data parallel": seqpar.Plan(mask, whole_documents(lengths, ranks, shape, hardware)),
    }


def whole_documents(lengths: Sequence[int], ranks: int, shape: ModelShape, hardware: Hardware) -> seqpar.Layout:
    """The plan of whole documents: the costliest first, each to the rank with least work."""
    w = Weights.of(shape, hardware)
    tokens = np.asarray(lengths, np.int64)
    cost = (w.row + shape.layers * w.both.query) * tokens + shape.layers * w.both.pair * (tokens * (tokens + 1) // 2)
    start = np.cumsum(tokens) - tokens
    load, shards = [(0, rank) for rank in range(ranks)], [[] for _ in range(ranks)]
    for document in np.argsort(-cost, kind="stable").tolist():
        least, rank = heapq.heappop(load)
        shards[rank].append(np.arange(start[document], start[document] + tokens[document]))
        heapq.heappush(load, (least + int(cost[document]), rank))
    return seqpar.Layout([np.sort(np.concatenate([*shard, np.empty(0, np.int64)])) for shard in shards])


def predicted(plan: seqpar.Plan, shape: ModelShape, hardware: Hardware) -> float:
    """Seconds of the slowest rank by the planner's cost model, which knows "fetch" and Ulysses.

    A ring counts as fetch with the keys of all hops and a stage for each. Gathered keys come before any computing and
    their gradients after it, so nothing hides them.
    """
    w = Weights.of(shape, hardware)
    layers = [(plan.mask, shape.layers)]
    found = counted(layers, plan.layout, widths=plan.widths, node=plan.ranks, forwarded=False)
    if plan.transport == "fetch":
        return int(ticks(found, w, stage_bytes=plan.stage_bytes).total.max()) * w.second
    (part,) = found.masks[0]
    steps = [plan.steps(rank, row_bytes=shape.row_bytes) for rank in range(plan.ranks)]
    moved = [
        [sum(count(r) for s in each for r in getattr(s, side).values()) for each in steps]
        for side in ("recvs", "sends")
    ]
    keys, sent = (np.array(each, np.int64) for each in moved)
    if plan.transport == "ring":
        hops = max(1, max(len(each) for each in steps) - 1)
        stage_bytes = max(1, -(-int(keys.max()) // hops)) * shape.row_bytes
        part = part._replace(tally=part.tally._replace(keys=keys, sent=sent))
        return int(ticks(found._replace(masks=[[part]]), w, stage_bytes=stage_bytes).total.max()) * w.second
    t = part.tally
    zero = np.zeros_like(keys)
    part = part._replace(tally=t._replace(near=t.near + t.far, far=zero, merging=zero, keys=zero, sent=zero))
    alone = ticks(found._replace(masks=[[part]]), w, stage_bytes=plan.stage_bytes).total
    wire = np.maximum(keys, sent) * (2 * w.inside.key + w.inside.grad) + 3 * w.inside.latency * (keys + sent > 0)
    return int((alone + shape.layers * (wire + w.both.key * keys)).max()) * w.second


class Layers:
    """A rank's share of a step: its rows through the blocks of a decoder, forward and backward."""

    def __init__(self, plan: seqpar.Plan, rank: int, shape: ModelShape, blocks: Sequence[Block]) -> None:
        self.plan, self.blocks = plan, blocks
        dtype, generator = getattr(torch, shape.dtype), torch.Generator().manual_seed(rank)
        x, self.dout = (torch.randn(plan.rows(rank), shape.hidden, generator=generator).to(dtype) for _ in range(2))
        self.x = x.requires_grad_()
        frequency = 10_000.0 ** (-torch.arange(0, shape.dim, 2, dtype=torch.float64) / shape.dim)
        self.angles = (torch.from_numpy(plan.rope_positions(rank))[:, None] * frequency).float()

    def run(self, comm: Comm) -> None:
        """Run one forward and backward; gradients of the weights are computed and dropped."""
        x = self.x
        for block in self.blocks:
            x = block(x, self.angles, lambda q, k, v: seqpar.attention(q, k, v, self.plan, comm))
        torch.autograd.grad(x, [self.x, *(p for block in self.blocks for p in block.parameters())], self.dout)


def blocks_of(shape: ModelShape) -> list[Block]:
    """The blocks of a decoder, with the same weights on every rank."""
    torch.manual_seed(0)
    config = Config(dim=shape.hidden, heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.dim, hidden=shape.ffn)
    return [Block(config).to(getattr(torch, shape.dtype)) for _ in range(shape.layers)]


@dataclass(frozen=True)
class Job:
    """The task of a process: a batch, the model, the machine, the cores, and a file that grows by a byte a run."""

    lengths: tuple[int, ...]
    shape: ModelShape
    hardware: Hardware
    cores: tuple[int, ...]
    ticks: str

    def plans(self, ranks: int) -> dict[str, seqpar.Plan]:
        return plans(self.lengths, ranks, self.shape, self.hardware)

    def tick(self) -> None:
        with open(self.ticks, "ab") as file:
            file.write(b".")


def real(comm: Comm, job: Job, turns: int) -> dict[str, list[float]]:
    """Seconds of this rank by method and turn, over shared memory. A first turn warms up and does not count."""
    with pinned(job.cores[comm.rank]):
        shm, blocks = ShmComm(timeout=60.0), blocks_of(job.shape)
        layers = {name: Layers(plan, comm.rank, job.shape, blocks) for name, plan in job.plans(comm.size).items()}
        found: dict[str, list[float]] = {name: [] for name in layers}
        for turn in range(turns + 1):
            for name, each in layers.items():
                shm.agree("start", {})
                start = perf_counter()
                each.run(shm)
                if turn:
                    found[name].append(perf_counter() - start)
                if comm.rank == 0:
                    job.tick()
    return found


@dataclass(frozen=True)
class World:
    """A number of virtual ranks, the methods that run on them, and the number of turns."""

    ranks: int
    methods: tuple[str, ...]
    turns: int

    @property
    def runs(self) -> int:
        return (self.turns + 1) * len(self.methods)


def virtual(comm: Comm, job: Job, worlds: Sequence[World]) -> dict[tuple[int, str], list[float]]:
    """Composed seconds by ranks and method, one for each turn. Each process runs its share of the worlds."""
    found: dict[tuple[int, str], list[float]] = {}
    with pinned(job.cores[comm.rank]):
        blocks = blocks_of(job.shape)
        for world in worlds[comm.rank :: comm.size]:
            plans = job.plans(world.ranks)
            tapes = [Tape(rank, world.ranks) for rank in range(world.ranks)]
            layers = {n: [Layers(plans[n], t.rank, job.shape, blocks) for t in tapes] for n in world.methods}
            for turn in range(world.turns + 1):
                for name, ranks in layers.items():
                    events = [recorded(each, tape) for each, tape in zip(ranks, tapes, strict=True)]
                    if turn:
                        found.setdefault((world.ranks, name), []).append(max(compose(events, job.hardware.inside)))
                    job.tick()
    return found


def recorded(layers: Layers, tape: Tape) -> list[Event]:
    """The events of one rank's run."""
    tape.start()
    layers.run(tape)
    return tape.stop()


@contextmanager
def pinned(core: int) -> Iterator[None]:
    """Pin this process to one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@dataclass(frozen=True)
class Cell:
    """The seconds of a method on a batch: a median with its interval, and the prediction of the cost model."""

    median: float
    low: float
    high: float
    predicted: float

    @property
    def error(self) -> float:
        """The error of the prediction, as a part of the measured time."""
        return self.predicted / self.median - 1

    def overlaps(self, other: Cell) -> bool:
        """Whether the intervals overlap, so that neither is called faster."""
        return self.low <= other.high and other.low <= self.high


def cell(seconds: Sequence[float], predicted: float) -> Cell:
    """The cell of some runs."""
    return Cell(statistics.median(seconds), *interval(seconds), predicted)


Cells = dict[str, dict[str, Cell]]  # batch -> method -> cell


def verdict(cells: Cells) -> dict[str, object]:
    """Figures of auto beside the best fixed method of each batch, and beside the worst one over all."""
    best = {}
    for batch, row in cells.items():
        name = min((n for n in row if n != AUTO), key=lambda n: row[n].median)
        ratio = row[AUTO].median / row[name].median
        best[batch] = {"best": name, "ratio": ratio, "holds": ratio <= CLOSE or row[AUTO].overlaps(row[name])}
    sums = {n: sum(row[n].median for row in cells.values()) for n in next(iter(cells.values()))}
    worst = max(sums, key=lambda n: sums[n])
    speedup = sums[worst] / sums[AUTO]
    errors = [abs(c.error) for row in cells.values() for c in row.values()]
    return {
        "beside_best": best, "worst": worst, "speedup_over_worst": speedup, "model_error": statistics.mean(errors),
        "holds": all(b["holds"] for b in best.values()) and speedup >= FASTER,
    }  # fmt: skip


def table(title: str, cells: Cells, found: dict[str, object]) -> Table:
    """Measured and predicted seconds side by side."""
    result = Table(title=title, title_justify="left")
    result.add_column("batch")
    result.add_column("method")
    for column in ("ms", "90 % interval", "of best", "predicted", "error"):
        result.add_column(column, justify="right", no_wrap=True)
    for batch, row in cells.items():
        best = row[found["beside_best"][batch]["best"]]
        for index, (name, c) in enumerate(row.items()):
            spread = f"{c.low * 1e3:,.0f} - {c.high * 1e3:,.0f}"
            figures = (f"{c.median * 1e3:,.1f}", spread, f"{c.median / best.median:.3f}", f"{c.predicted * 1e3:,.1f}")
            style, last = "bold" if name == AUTO else None, index == len(row) - 1
            result.add_row("" if index else batch, name, *figures, f"{c.error:+.1%}", style=style, end_section=last)
    return result


def said(found: dict[str, object]) -> str:
    """A verdict as text."""
    parts = [
        f"{batch}: {b['ratio']:.3f} of {b['best']} ({'holds' if b['holds'] else 'DOES NOT HOLD'})"
        for batch, b in found["beside_best"].items()
    ]
    speed = found["speedup_over_worst"]
    parts.append(f"{speed:.2f} times as fast as {found['worst']} ({'holds' if speed >= FASTER else 'DOES NOT HOLD'})")
    return "auto: " + "; ".join(parts) + f"; the model is off by {found['model_error']:.1%} on average"


@contextmanager
def bar(console: Console, what: str, total: int) -> Iterator[str]:
    """A file, and a progress bar that shows its number of bytes."""
    with (
        tempfile.NamedTemporaryFile() as file,
        Progress(console=console, transient=True, disable=not console.is_terminal, refresh_per_second=2) as progress,
    ):
        task, over = progress.add_task(what, total=total), threading.Event()

        def follow() -> None:
            while not over.wait(0.5):
                progress.update(task, completed=os.stat(file.name).st_size)

        thread = threading.Thread(target=follow)
        thread.start()
        try:
            yield file.name
        finally:
            over.set()
            thread.join()


def machine(given: str | None, shape: ModelShape, ranks: int, *, quick: bool) -> tuple[Hardware, dict[str, object]]:
    """The hardware, given or measured here; and the errors of its fits if it was measured."""
    if given is None:
        data = calibrated(shape, torch.device("cpu"), ranks=ranks, quick=quick)
        errors = {name: error["mean"] for name, error in data["measured"].pop("errors").items()}
        return Hardware.from_dict({k: v for k, v in data.items() if k != "measured"}), errors
    return (Hardware.load(given) if Path(given).suffix == ".json" else Hardware.preset(given)), {}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print everything; returns 0 if the requirements hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", help="a preset, or a .json of `seqpar calibrate`; by default it is measured")
    parser.add_argument("--tokens", type=int, help="of a batch, about (default: 6144, with --quick 2048)")
    parser.add_argument("--repeat", type=int, help="turns over real ranks (default: 8, with --quick 3)")
    parser.add_argument("--quick", action="store_true", help="short documents and few repeats, to see it run")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args(arguments)
    tokens, repeat = args.tokens or (2048 if args.quick else 6144), args.repeat or (3 if args.quick else 8)
    cores = tuple(sorted(os.sched_getaffinity(0)))
    if len(cores) < 2:
        parser.error("it needs two cores: ranks of processes run at the same time")
    load = os.getloadavg()[0]
    hardware, fits = machine(args.hardware, SHAPE, len(cores), quick=args.quick)
    # CPU time varies less than wall time
    worlds = [World(ranks, METHODS, max(min(2, repeat), repeat - 3)) for ranks in VIRTUAL if ranks != len(cores)]
    # the check by method, so that processes have about equal work
    worlds += [World(len(cores), (name,), max(1, repeat // 4)) for name in METHODS]
    seconds: dict[int, dict[str, dict[str, list[float]]]] = {}  # ranks -> batch -> method -> of each turn
    composed: dict[str, dict[str, list[float]]] = {}
    chosen = batches(tokens)
    runs = len(METHODS) * (repeat + 1) + sum(world.runs for world in worlds)
    # wide enough for the tables if there is no terminal
    console = Console() if sys.stdout.isatty() else Console(width=110)
    with bar(console, "layers", runs * len(chosen)) as file:
        for batch, lengths in chosen.items():
            job = Job(tuple(lengths), SHAPE, hardware, cores, file)
            by_rank = run_processes(len(cores), real, job, repeat, timeout=300.0)
            slowest = {name: list(map(max, zip(*(r[name] for r in by_rank), strict=True))) for name in METHODS}
            seconds.setdefault(len(cores), {})[batch] = slowest
            for share in run_processes(len(cores), virtual, job, worlds, timeout=300.0):
                for (ranks, name), each in share.items():
                    of = composed if ranks == len(cores) else seconds.setdefault(ranks, {})
                    of.setdefault(batch, {})[name] = each
    return report(console, args.json, Figures(tokens, len(cores), chosen, load, hardware, fits, seconds, composed))


@dataclass(frozen=True)
class Figures:
    """All measured figures.

    load: processes that ran on the machine before. seconds: ranks -> batch -> method -> one for each turn. composed:
    the same, with as many ranks as cores.
    """

    tokens: int
    cores: int
    batches: dict[str, list[int]]
    load: float
    hardware: Hardware
    fits: dict[str, object]
    seconds: dict[int, dict[str, dict[str, list[float]]]]
    composed: dict[str, dict[str, list[float]]]

    def cells(self, ranks: int) -> Cells:
        """Every method on every batch, in order."""
        found: Cells = {}
        for batch, lengths in self.batches.items():
            made, each = plans(lengths, ranks, SHAPE, self.hardware), self.seconds[ranks][batch]
            found[batch] = {n: cell(each[n], predicted(made[n], SHAPE, self.hardware)) for n in METHODS}
        return found

    def composition(self) -> dict[str, dict[str, float]]:
        """The error of composed times against processes, with as many ranks as cores: batch -> method."""
        real = self.seconds[self.cores]
        return {
            batch: {n: statistics.median(each[n]) / statistics.median(real[batch][n]) - 1 for n in METHODS}
            for batch, each in self.composed.items()
        }


def report(console: Console, path: Path | None, figures: Figures) -> int:
    """Print everything and write it where asked; returns 0 if the requirements hold."""
    model = f"{SHAPE.layers} layer of {SHAPE.hidden}, {SHAPE.heads} heads of {SHAPE.dim}, {SHAPE.dtype}"
    rows: dict[str, object] = {}
    holds = True
    for ranks in sorted(figures.seconds):
        cells = figures.cells(ranks)
        found = verdict(cells)
        kind = "processes" if ranks == figures.cores else "virtual ranks"
        console.print(table(f"{ranks} {kind}, {figures.tokens:,} tokens, {model}, forward and backward", cells, found))
        console.print(said(found))
        rows[str(ranks)] = {"cells": {b: {n: asdict(c) for n, c in r.items()} for b, r in cells.items()}} | found
        holds = holds and bool(found["holds"])
    errors = figures.composition()
    off = [x for row in errors.values() for x in row.values()]
    console.print(
        f"composed instead of measured, {figures.cores} ranks: off by {statistics.mean(map(abs, off)):.1%} on "
        f"average, {min(off):+.1%} to {max(off):+.1%}; fits of the machine: {figures.fits or figures.hardware.source}"
    )
    if figures.load > BUSY:
        console.print(
            f"the machine was busy ({figures.load:.1f} processes before the start): measure again on a quiet one"
        )
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        result = records.environment() | {
            "tokens": figures.tokens, "model": asdict(SHAPE), "batches": figures.batches, "ranks": rows,
            "composition_error": errors, "hardware": figures.hardware.to_dict(), "fit_errors": figures.fits,
            "load": figures.load, "seconds": figures.seconds, "composed": figures.composed, "holds": holds,
        }  # fmt: skip
        records.write(path, result)
        console.print(f"written to {path}")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
