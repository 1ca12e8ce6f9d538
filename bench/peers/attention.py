"""Attention of seqpar beside what a user would take instead, in one run: forward, and forward plus backward.

    python -m bench.peers.attention                                     # all cases on 2 and 4 ranks, an hour and more
    python -m bench.peers.attention --cases 8K --ranks 2 --rounds 7 --json bench/results/peers.json

Methods by hand, libraries and seqpar's plans over gloo and shared memory take turns, in reversed order every second
round; a time is that of the slowest rank. Each method first runs once untimed, and its output and gradients are
compared with those of torch's operator on the whole batch. A method that does not run, or a peer that is not exact,
shows its error and is not timed; so does a library that is not installed. DeepSpeed, without its own kernels:

    export DS_BUILD_OPS=0 PYTHONPATH=out/deepspeed
    pip install --no-deps --no-build-isolation --target out/deepspeed deepspeed==0.19.8 hjson ninja msgpack py-cpuinfo

The ratio of a method is to the fastest of seqpar's, per round: its median and an interval. Exit code 1 if a peer is
faster than all of seqpar's beyond its interval, or if one of seqpar's rows is not exact.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

import seqpar
from bench.lib import records
from bench.lib.interval import interval
from bench.peers import by_hand, libraries
from bench.peers.case import Case, Method, whole
from seqpar import native
from seqpar.testing import relative_rms, run_processes

PACKED = (1728, 1216, 1024, 832, 704, 576, 512, 448, 384, 320, 256, 192)  # multiples of 64, 8,192 tokens together
CASES = {
    "1K": Case((1024,)),
    "4K": Case((4096,)),
    "4K 8/2x128": Case((4096,), kv_heads=2, dim=128),
    "4K bf16": Case((4096,), dtype=torch.bfloat16),
    "4K 8/2x128 bf16": Case((4096,), kv_heads=2, dim=128, dtype=torch.bfloat16),
    "4K full": Case((4096,), causal=False),
    "8K": Case((8192,)),
    "8K packed": Case(PACKED),
    "8K packed bf16": Case(PACKED, dtype=torch.bfloat16),
    "16K": Case((16384,)),
    "short packed": Case((128,) * 16),
    "short packed bf16": Case((128,) * 16, dtype=torch.bfloat16),
}
PEERS: dict[str, Callable[[Case, int, int], Method]] = {
    "one process": by_hand.one_process,
    "whole documents": by_hand.whole_documents,
    "by hand: all-gather": by_hand.all_gather,
    "by hand: Ulysses": by_hand.ulysses,
    "by hand: ring": by_hand.ring,
    "DeepSpeed Ulysses": libraries.deepspeed,
    "PyTorch context_parallel": libraries.context_parallel,
    "diffusers Ulysses": libraries.diffusers,
}
PLANS = ("fetch", "ring", "Ulysses", "planned")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # relative RMS


class Turn(NamedTuple):
    """Seconds of the slowest rank."""

    forward: float
    both: float


class Outcome(NamedTuple):
    """What a method did with a case: its turns and its largest relative error, or why it did not run."""

    turns: list[Turn]
    error: float
    refusal: str = ""


def plan_of(name: str, case: Case, size: int) -> seqpar.Plan:
    """One of seqpar's plans."""
    mask, zigzag = seqpar.Mask(case.lengths, causal=case.causal), seqpar.Layout.zigzag(case.lengths, size)
    if name == "planned":
        return seqpar.plan_batch(case.lengths, size, masks=mask, node=size, token_slack=0.5)
    if name == "Ulysses":
        return seqpar.Plan(mask, seqpar.Layout.contiguous(case.tokens, size), ulysses=size)
    return seqpar.Plan(mask, zigzag, transport=name)


def by_seqpar(name: str, comm: seqpar.Comm) -> Callable[[Case, int, int], Method]:
    """A plan over a comm as a method."""

    def method(case: Case, rank: int, size: int) -> Method:
        plan = plan_of(name, case, size)
        return Method(plan.layout.positions(rank), lambda q, k, v: seqpar.attention(q, k, v, plan, comm))

    return method


def shards(case: Case, rows: np.ndarray[Any, Any]) -> list[Tensor]:
    """This rank's rows of q, k, v, which want gradients, and of the output's gradient."""
    at = torch.from_numpy(rows)
    q, k, v, dout = (x[at] for x in case.tensors())
    return [x.requires_grad_() for x in (q, k, v)] + [dout]


def reference(case: Case) -> list[Tensor]:
    """Output and gradients of the whole batch, by torch's operator in fp32."""
    q, k, v, dout = (x.float() for x in case.tensors())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = whole(*leaves, case.documents(), case.causal)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def slowest(*seconds: float) -> list[float]:
    """The largest of each over the ranks."""
    values = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return values.tolist()


def turn(method: Method, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Turn:
    """One forward and backward, which leaves the gradients in q, k and v."""
    q.grad = k.grad = v.grad = None
    torch.set_num_threads(method.threads)
    dist.barrier()
    start = time.perf_counter()
    if dout.numel():
        out = method.attend(q, k, v)
        middle = time.perf_counter()
        out.backward(dout)
    else:  # a rank without rows, whose peers may need it
        middle = start
    end = time.perf_counter()
    torch.set_num_threads(1)
    return Turn(*slowest(middle - start, end - start))


def error_of(method: Method, expected: list[Tensor], tensors: list[Tensor]) -> float:
    """The largest error of output and gradients on any rank, after a first turn."""
    turn(method, *tensors)
    at, found = torch.from_numpy(method.rows), 0.0
    if len(at):
        q, k, v, _ = tensors
        got = [method.attend(q, k, v).detach(), *(x.grad for x in (q, k, v))]
        found = max(relative_rms(x, y[at]) for x, y in zip(got, expected, strict=True))
    return slowest(found)[0]


def measure(
    comm: seqpar.Comm, case: Case, rounds: int, peers: tuple[str, ...], plans: tuple[str, ...]
) -> dict[str, Outcome]:
    """These peers and plans of seqpar on one case, in turns, on this rank; every rank returns the same."""
    expected = reference(case)
    comms = {"gloo": comm} | ({} if native.missing() else {"shm": seqpar.ShmComm()})
    builders = {title: PEERS[title] for title in peers}
    for kind, carrier in comms.items():
        builders |= {f"seqpar {plan}, {kind}": by_seqpar(plan, carrier) for plan in plans}
    running: dict[str, tuple[Method, list[Tensor]]] = {}
    outcomes: dict[str, Outcome] = {}
    for title, build in builders.items():
        try:
            method = build(case, comm.rank, comm.size)
            tensors = shards(case, method.rows)
            error = error_of(method, expected, tensors)
        except Exception as refusal:  # every rank has the same
            text = " ".join(f"{type(refusal).__name__}: {refusal}".split())
            outcomes[title] = Outcome([], float("nan"), text[:200])
            continue
        if not title.startswith("seqpar") and not error <= TOLERANCE[case.dtype]:
            outcomes[title] = Outcome([], error, f"not exact: relative error {error:.0e}")
            continue
        running[title], outcomes[title] = (method, tensors), Outcome([], error)
    for n in range(rounds):
        for title in list(running)[:: -1 if n % 2 else 1]:
            method, tensors = running[title]
            outcomes[title].turns.append(turn(method, *tensors))
    return outcomes


class Row(NamedTuple):
    """A method beside the fastest of seqpar's: ratios as (median, low, high)."""

    method: str
    forward_ms: float
    both_ms: float
    forward: tuple[float, float, float]
    both: tuple[float, float, float]
    error: float
    refusal: str = ""


def rows_of(outcomes: dict[str, Outcome]) -> list[Row]:
    """The table of a case."""

    def best(side: int) -> list[float]:
        ours = [o for title, o in outcomes.items() if title.startswith("seqpar") and o.turns]
        least = min(ours, key=lambda o: statistics.median(t[side] for t in o.turns))
        return [t[side] for t in least.turns]

    def ratios(outcome: Outcome, side: int) -> tuple[float, float, float]:
        values = [t[side] / b for t, b in zip(outcome.turns, best(side), strict=True)]
        return statistics.median(values), *interval(values)

    rows = []
    for title, o in outcomes.items():
        if not o.turns:
            nan = float("nan")
            rows.append(Row(title, nan, nan, (nan,) * 3, (nan,) * 3, nan, o.refusal))
            continue
        medians = [1e3 * statistics.median(t[side] for t in o.turns) for side in (0, 1)]
        rows.append(Row(title, *medians, ratios(o, 0), ratios(o, 1), o.error))
    return rows


def table(title: str, rows: list[Row]) -> Table:
    """The methods that ran, the fastest first; the interval is of the ratio with backward."""
    drawn = Table(title=title, title_justify="left", box=None)
    for column in ("method", "forward ms", "x", "both ms", "x", "interval", "error"):
        drawn.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for row in sorted((row for row in rows if not row.refusal), key=lambda row: row.both_ms):
        median, low, high = row.both
        drawn.add_row(
            row.method, f"{row.forward_ms:.1f}", f"{row.forward[0]:.2f}", f"{row.both_ms:.1f}", f"{median:.2f}",
            f"{low:.2f} to {high:.2f}", f"{row.error:.0e}",
        )  # fmt: skip
    return drawn


def faults(case: Case, rows: list[Row]) -> list[str]:
    """What does not hold: a peer that is faster than the best of seqpar's, a row of seqpar's that is not exact."""
    found = []
    for row in rows:
        ours = row.method.startswith("seqpar")
        if ours and not row.error <= TOLERANCE[case.dtype]:
            found.append(f"{row.method} is not exact: {row.refusal or row.error}")
        if not ours and row.both[2] < 1:
            found.append(f"{row.method} takes {row.both[0]:.2f} of the time of the best of seqpar's")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE", help=", ".join(CASES)
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS), help="of seqpar")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    console, result, wrong = Console(), [], []
    for ranks in args.ranks:
        for name in args.cases:
            case, chosen = CASES[name], (tuple(args.peers), tuple(args.plans))
            rows = rows_of(run_processes(ranks, measure, case, args.rounds, *chosen, timeout=900.0)[0])
            title = f"{ranks} ranks, {case.name}"
            console.print(table(title, rows))
            for row in rows:
                if row.refusal:
                    console.print(f"{row.method} is not timed: {row.refusal}", markup=False, style="dim")
            wrong += [f"{title}: {fault}" for fault in faults(case, rows)]
            result += [{"ranks": ranks, "case": name} | row._asdict() for row in rows]
            if args.json:  # after every case, as a run takes long
                records.write(args.json, records.environment() | {"rounds": args.rounds, "rows": result})
    for fault in wrong:
        console.print(fault)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
