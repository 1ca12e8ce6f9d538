"""A longer sequence on more ranks: step time and peak memory of a rank, and the longest sequence that fits.

    python -m bench.cpu.sequence --json bench/results/sequence.json      # a few minutes on two cores
    python -m bench.cpu.sequence --lengths 512 1024 --tokens 512 --memory 24 --budget 60    # a rehearsal

One document is trained on by the decoder of examples/: forward, backward, the sum of the gradients over the ranks, and
AdamW, in fp32. First the sequence grows at constant tokens a rank, beside one process that holds all of it. Then the
longest sequence is looked for whose step adds at most --memory MiB to each of 1, 2 and 4 ranks: the step is run at
every length tried, and the answer is one that fits where the next longer one, a granule on, does not.

Ranks are processes of one thread over gloo. There are more of them than cores, so the time of a rank is its own CPU
time, without waiting; the wall time is in the figures. Memory is the most that was resident at once, less what was
before the step. A case that would end after --budget seconds, by the square of its length, is left out and shown as
such. Exit code 1 if a loss is not that of one process to 1e-5.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import seqpar
from bench.lib import records
from seqpar.comm import Comm
from seqpar.testing import run_processes
from seqpar.train import cross_entropy, sync_gradients

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from decoder import BYTES, Config, Decoder  # noqa: E402

MODEL = Config(dim=128, layers=2, heads=2, kv_heads=2, head_dim=32, hidden=352)
LENGTHS = (4096, 8192, 16384, 32768, 65536)
RANKS = (1, 2, 4)
MIB = 1 << 20


@dataclass(frozen=True)
class Row:
    """Figures of one step: the time of the slowest rank, and the memory of the rank that takes most."""

    tokens: int
    ranks: int
    cpu_seconds: float
    wall_seconds: float
    peak_bytes: int
    loss: float


def resident(what: str) -> int:
    """Bytes of this process in memory: VmRSS now, VmHWM the most since the last reset."""
    found = re.search(rf"^{what}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def forget_peak() -> None:
    """Return free memory to the system, and reset the peak."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def measured(comm: Comm, tokens: int) -> tuple[float, float, int, float]:
    """CPU and wall seconds, added bytes and share of the loss, of the second step that this rank makes."""
    step(comm, 8 * comm.size)
    forget_peak()
    before = resident("VmRSS")
    comm.agree("start", {})
    wall, cpu = time.perf_counter(), time.process_time()
    loss = step(comm, tokens)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return cpu, wall, resident("VmHWM") - before, loss


def step(comm: Comm, tokens: int) -> float:
    """One training step on a document; returns this rank's share of its loss."""
    torch.manual_seed(0)
    model = Decoder(MODEL, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    plan = seqpar.Plan(seqpar.Mask([tokens]), seqpar.Layout.zigzag([tokens], comm.size))
    rows = torch.from_numpy(plan.layout.positions(comm.rank))
    document = torch.randint(BYTES, (tokens + 1,), generator=torch.Generator().manual_seed(tokens))
    logits = model(document[rows], rows, lambda q, k, v: seqpar.attention(q, k, v, plan, comm))
    loss = cross_entropy(logits, document[rows + 1], valid=tokens)
    loss.backward()
    sync_gradients(model.parameters(), comm)
    optimizer.step()
    return loss.item()


def run(tokens: int, ranks: int) -> Row:
    """One step of a sequence on several processes."""
    cpu, wall, peak, loss = zip(*run_processes(ranks, measured, tokens, timeout=600.0))
    return Row(tokens, ranks, max(cpu), max(wall), max(peak), sum(loss))


class Budget:
    """Runs steps until the time is over; the first step runs in any case."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        self.seen: dict[int, Row] = {}  # ranks -> the longest so far

    def run(self, tokens: int, ranks: int) -> Row | None:
        """The figures of a step, or None if it would end too late."""
        if seen := self.seen.get(ranks):
            expected = seen.wall_seconds * (tokens / seen.tokens) ** 2
            if time.monotonic() + expected > self.end:
                return None
        elif self.seen and time.monotonic() > self.end:
            return None
        row = run(tokens, ranks)
        if seen is None or tokens >= seen.tokens:
            self.seen[ranks] = row
        return row


def longest(peak: Callable[[int], int | None], memory: int, granule: int) -> int | None:
    """The most tokens, in granules, whose peak is at most `memory`, while that of one granule more is above it.

    peak: bytes by tokens, about linear, or None to give up; then this returns None. 0 if nothing fits.
    """
    fits, fails = 0, 0
    known: list[tuple[int, int]] = []
    tokens = granule
    while not fails or fails - fits > granule:
        found = peak(tokens)
        if found is None:
            return None
        known.append((tokens, found))
        if found <= memory:
            fits = tokens
        else:
            fails = tokens
        if len(known) > 1:
            (a, x), (b, y) = sorted(known)[-2:] if not fails else sorted(known, key=lambda k: abs(k[1] - memory))[:2]
            slope = (y - x) / (b - a)
            guess = b + (memory - y) / slope if slope > 0 else 2 * tokens
        else:
            guess = 2 * tokens
        most = fails - granule if fails else 4 * fits
        tokens = min(max(int(guess) // granule * granule, fits + granule), most)
    return fits


def growing(lengths: list[int], tokens: int, budget: Budget) -> list[dict[str, Any]]:
    """The rows of growing lengths: the step with constant tokens a rank, and that of one process."""
    rows = []
    for length in lengths:
        ranks = length // tokens
        sharded = budget.run(length, ranks)
        whole = sharded if ranks == 1 else budget.run(length, 1)
        rows.append({"tokens": length, "ranks": ranks, "sharded": sharded, "whole": whole})
    return rows


def fitting(ranks: list[int], memory: int, granule: int, budget: Budget) -> list[dict[str, Any]]:
    """The rows of numbers of ranks: the longest sequence that fits, None if the time was over."""

    def peak(tokens: int, ranks: int) -> int | None:
        row = budget.run(tokens, ranks)
        return None if row is None else row.peak_bytes

    return [{"ranks": n, "tokens": longest(lambda tokens, n=n: peak(tokens, n), memory, granule * n)} for n in ranks]


def tables(grown: list[dict[str, Any]], fits: list[dict[str, Any]], args: argparse.Namespace) -> list[Table]:
    """The measured rows as two tables to print."""
    first = Table(title=f"One document, {args.tokens:,} tokens a rank: a rank's step", title_justify="left")
    for column in ("tokens", "ranks", "CPU s", "one process", "peak MiB", "one process"):
        first.add_column(column, justify="right")
    for row in grown:
        pair = (row["sharded"], row["whole"])
        seconds = ["no time" if each is None else f"{each.cpu_seconds:.2f}" for each in pair]
        peaks = ["" if each is None else f"{each.peak_bytes / MIB:,.0f}" for each in pair]
        first.add_row(f"{row['tokens']:,}", str(row["ranks"]), *seconds, *peaks)
    second = Table(title=f"The longest document whose step adds at most {args.memory:,} MiB", title_justify="left")
    for column in ("ranks", "tokens", "times one rank"):
        second.add_column(column, justify="right")
    for row in fits:
        one, tokens = fits[0]["tokens"], row["tokens"]
        times = f"{tokens / one:.2f}" if tokens and one else ""
        second.add_row(str(row["ranks"]), "no time" if tokens is None else f"{tokens:,}", times)
    return [first, second]


def main() -> None:
    """Measure both parts and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="tokens of the sequences")
    parser.add_argument("--tokens", type=int, default=LENGTHS[0], help="of a rank")
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS), help="that share the longest sequence")
    parser.add_argument("--memory", type=int, default=192, help="MiB that a step may add to a rank")
    parser.add_argument("--granule", type=int, default=256, help="tokens a rank to which the longest is found")
    parser.add_argument("--budget", type=float, default=900.0, help="seconds")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    if not Path("/proc/self/clear_refs").exists():
        parser.error("the peak of memory is read from /proc: Linux only")
    if odd := [length for length in args.lengths if length % args.tokens]:
        parser.error(f"--lengths {odd} are not multiples of --tokens {args.tokens}")
    console = Console()
    budget = Budget(args.budget)
    grown = growing(args.lengths, args.tokens, budget)
    fits = fitting(args.ranks, args.memory * MIB, args.granule, budget)
    for each in tables(grown, fits, args):
        console.print(each)
    if args.json:
        plain = [row | {k: row[k] and asdict(row[k]) for k in ("sharded", "whole")} for row in grown]
        figures = {"model": asdict(MODEL), "memory_mib": args.memory, "granule": args.granule}
        result = records.environment() | figures | {"growing": plain, "fitting": fits}
        records.write(args.json, result)
        console.print(f"written to {args.json}")
    pairs = [(row["sharded"], row["whole"]) for row in grown if row["sharded"] and row["whole"]]
    sys.exit(any(abs(a.loss - b.loss) > 1e-5 * b.loss for a, b in pairs))


if __name__ == "__main__":
    main()
