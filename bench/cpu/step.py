"""Times a causal step over one and two processes, one rank alone, and planning.

``--json`` keeps the figures with machine, versions and commit.

    python -m bench.cpu.step                     # everything, about four minutes on two cores
    python -m bench.cpu.step --tokens 4096 --repeat 3

Timings of one case are interleaved, one of each variant in turn, so that a machine that speeds up or slows down does so
for all of them; medians are compared. Only ratios within one run mean anything.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import seqpar
from bench.lib import records
from seqpar.comm import Comm
from seqpar.kernels import Operands, Score, Sums, call_spec, choose
from seqpar.ops.attention.call import uploaded
from seqpar.testing import run_processes

HEADS, DIM = 8, 64


def packed(tokens: int, seed: int = 0) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output, [tokens, HEADS, DIM] float32."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(tokens, HEADS, DIM, generator=g) for _ in range(4)]


def timed_step(attend: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> float:
    """Seconds of one forward and backward of q, k, v, with the gradient of the output."""
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    start = time.perf_counter()
    attend(q, k, v).backward(tensors[3])
    return time.perf_counter() - start


def sharded_step(comm: Comm, tokens: int, layout: str, transport: str, ulysses: int) -> float:
    """One rank's seconds of a step, all ranks starting together."""
    make = {"contiguous": lambda: seqpar.Layout.contiguous(tokens, comm.size)}.get(layout)
    placed = make() if make else seqpar.Layout.zigzag([tokens], comm.size)
    plan = seqpar.Plan(seqpar.Mask([tokens]), placed, transport=transport, ulysses=ulysses)
    tensors = [seqpar.shard(x, plan, comm.rank) for x in packed(tokens)]
    plan.steps(comm.rank)
    comm.agree("start", {})
    return timed_step(lambda q, k, v: seqpar.attention(q, k, v, plan, comm), *tensors)


def whole_step(tokens: int) -> float:
    """One process with seqpar on a comm of one rank."""
    plan = seqpar.Plan(seqpar.Mask([tokens]), seqpar.Layout.contiguous(tokens, 1))
    comm = seqpar.LocalComm()
    return timed_step(lambda q, k, v: seqpar.attention(q, k, v, plan, comm), *packed(tokens))


def flash_step(tokens: int) -> float:
    """One process with torch's fused CPU operator."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
        out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads_first, 0.0, True)
        return out[0].transpose(0, 1)

    return timed_step(attend, *packed(tokens))


def scaling(tokens: int, repeat: int, tick: Callable[[], None]) -> dict[str, list[float]]:
    """A causal attention step over one process with two threads and over two processes with one thread each."""
    variants: dict[str, Callable[[], float]] = {
        "1 process, 2 threads, seqpar": lambda: whole_step(tokens),
        "1 process, 2 threads, torch flash": lambda: flash_step(tokens),
    }
    cases = [("zigzag", "fetch", 1, "shm"), ("zigzag", "ring", 1, "shm"), ("contiguous", "fetch", 2, "shm")]
    for layout, transport, ulysses, comm in (*cases, ("zigzag", "fetch", 1, "gloo")):
        method = transport if ulysses == 1 else f"Ulysses {ulysses}"
        step = partial(run_processes, 2, sharded_step, tokens, layout, transport, ulysses, comm=comm)
        variants[f"2 processes over {comm}, {layout}, {method}"] = lambda step=step: max(step())
    times: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(repeat + 1):
        for name, run in variants.items():
            seconds = run()
            if turn:  # the first turn warms up
                times[name].append(seconds)
            tick()
    return times


def size_one(repeat: int) -> dict[str, list[float]]:
    """Seconds of `seqpar.attention` on one rank, and of its kernel alone on the same tensors; forward."""
    tokens = 128
    q, k, v, _ = packed(tokens)
    plan = seqpar.Plan(seqpar.Mask([tokens]), seqpar.Layout.contiguous(tokens, 1))
    comm = seqpar.LocalComm()
    score = Score(DIM**-0.5)
    kernel = choose("auto", call_spec(q, k, v, score, grads=False, deterministic=True, merges=False))
    facts = uploaded(plan, plan.steps(0), q.device).facts[0][0]
    operands = Operands(q, k, v, facts, score)
    out, lse = torch.empty_like(q), torch.empty(HEADS, tokens)
    times: dict[str, list[float]] = {"attention, one rank": [], "kernel alone": []}
    with torch.no_grad():
        for _ in range(200 * repeat):
            start = time.perf_counter()
            seqpar.attention(q, k, v, plan, comm)
            middle = time.perf_counter()
            kernel.forward(operands, Sums(out, lse, None, first=True))
            times["attention, one rank"].append(middle - start)
            times["kernel alone"].append(time.perf_counter() - middle)
    return times


def planning(repeat: int) -> dict[str, list[float]]:
    """Seconds to plan for one of 64 ranks: 1,048,576 tokens in 2,000 documents, with fetch, on one core."""
    tokens, ranks = 1 << 20, 64
    lengths = np.random.default_rng(0).lognormal(5, 1.5, 2000)
    lengths = np.maximum(1, (lengths * tokens / lengths.sum()).astype(int))
    lengths[np.argmax(lengths)] += tokens - lengths.sum()
    layouts = {
        "contiguous": lambda: seqpar.Layout.contiguous(tokens, ranks),
        "zigzag": lambda: seqpar.Layout.zigzag(lengths, ranks),
        "striped": lambda: seqpar.Layout.striped(tokens, ranks),
    }
    times: dict[str, list[float]] = {}
    for _ in range(repeat):
        for name, layout in layouts.items():
            for rank in (0, ranks - 1):
                start = time.perf_counter()
                plan = seqpar.Plan(seqpar.Mask(lengths), layout())
                for step in plan.steps(rank):
                    step.bands[0].tiles(128, 128)
                plan.rope_positions(rank)
                times.setdefault(f"{name}, rank {rank}", []).append(time.perf_counter() - start)
    return times


def table(title: str, times: dict[str, list[float]], base: str | None = None) -> Table:
    """Medians and spreads as a table; with a base also speeds relative to it."""
    result = Table(title=title, title_justify="left")
    result.add_column("case")
    for column in ("median", "fastest", "slowest", *(["speed"] if base else [])):
        result.add_column(column, justify="right")
    for name, seconds in times.items():
        cells = [f"{x * 1e3:,.2f} ms" for x in (statistics.median(seconds), min(seconds), max(seconds))]
        if base:
            cells.append(f"{statistics.median(times[base]) / statistics.median(seconds):.2f}")
        result.add_row(name, *cells)
    return result


def main() -> None:
    """Measure all cases and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of the attention step")
    parser.add_argument("--repeat", type=int, default=5, help="timings of each variant")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    console = Console()
    torch.set_num_threads(2)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("attention steps", total=6 * (args.repeat + 1))
        steps = scaling(args.tokens, args.repeat, lambda: progress.advance(task))
    torch.set_num_threads(1)
    one, plans = size_one(args.repeat), planning(args.repeat)
    base = min(list(steps)[:2], key=lambda name: statistics.median(steps[name]))
    title = f"Causal attention step, {args.tokens:,} tokens, {HEADS} heads of {DIM}, fp32, forward and backward"
    console.print(table(title, steps, base))
    console.print(table("A comm of one rank, forward, 128 tokens", one))
    console.print(table("Planning 1,048,576 tokens, 64 ranks, 2,000 documents, fetch", plans))
    if args.json:
        figures = {"tokens": args.tokens, "attention": steps, "one_rank": one, "planning": plans}
        medians = {k: {n: statistics.median(t) for n, t in v.items()} for k, v in figures.items() if k != "tokens"}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        speeds = {n: statistics.median(steps[base]) / statistics.median(t) for n, t in steps.items()}
        result = {"tokens": args.tokens, "baseline": base, "speed": speeds, "median_seconds": medians}
        records.write(args.json, records.environment() | result)
        console.print(f"written to {args.json}")


if __name__ == "__main__":
    main()
