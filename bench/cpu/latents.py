"""Latent attention beside attention on expanded keys: time of a step over shared memory and over a slow link.

    python -m bench.cpu.latents                 # about a quarter of an hour on two idle cores
    python -m bench.cpu.latents --tokens 512    # a rehearsal
    python -m bench.cpu.latents --largest       # what `return_max_logit` costs instead

Two processes, each on a core of its own, compute forward and backward in turns, with the dims of DeepSeek-V2-Lite: 16
heads of 128 + 64, values of 128, latents of 512. The expanded keys are made by the same products, outside the call, and
sent. A step takes as long as its slower rank; ratios are of medians over turns. The slow link is simulated, as in
`bench.dsp.step`: it is held back until a step with expanded keys takes twice as long as over shared memory. Processor
time is that of both ranks. Exit code 1 if latents take more than 1.15 of the time over shared memory, or are less than
1.3 times as fast over the slow link.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial
from statistics import median

import torch
from torch import Tensor

import seqpar
from bench.dsp.latte import Meter, Metered, Wire, cores, in_turns
from bench.lib.watched import Watched
from bench.planner.planned import pinned
from seqpar import Comm, Layout, LocalComm, Mask, Plan
from seqpar.planner import Link
from seqpar.testing import run_processes

HEADS, NOPE, ROTATED, VALUE, RANK, RANKS = 16, 128, 64, 128, 512, 2
DTYPES = (torch.float32, torch.bfloat16)
MOST, LEAST = 1.15, 1.3  # of the time over shared memory; times as fast over the slow link
HELD = 2.0  # times the step over shared memory, with expanded keys
Turn = tuple[float, float]  # seconds by the clock and of the processor


def step(comm: Comm, plan: Plan, dtype: torch.dtype, *, latents: bool) -> None:
    """Forward and backward of one rank."""
    rows, g = plan.rows(comm.rank), torch.Generator().manual_seed(comm.rank)

    def made(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=g) * 0.1).to(dtype).requires_grad_()

    q, latent, rotated = made(rows, HEADS, NOPE + ROTATED), made(rows, RANK), made(rows, ROTATED)
    g.manual_seed(9)
    w_k, w_v = made(HEADS, NOPE, RANK), made(HEADS, VALUE, RANK)
    if latents:
        out = seqpar.latent_attention(q, latent, rotated, w_k, w_v, plan, comm)
    else:
        nope, values = ((latent @ w.flatten(0, 1).t()).unflatten(1, w.shape[:2]) for w in (w_k, w_v))
        keys = torch.cat([nope, rotated[:, None].expand(-1, HEADS, -1)], -1)
        out = seqpar.attention(q, keys, values, plan, comm)
    out.sum().backward()


def measured(
    comm: Comm, tokens: int, dtype: torch.dtype, turns: int, bandwidth: float | None, ways: Sequence[bool]
) -> dict[bool, tuple[list[Turn], int]]:
    """Of this rank, with latents and without: the time of each turn, and the bytes sent in one."""
    torch.set_num_threads(1)
    plan = Plan(Mask([tokens * RANKS]), Layout.zigzag([tokens * RANKS], RANKS))
    found: dict[bool, tuple[list[Turn], int]] = {}
    with pinned(cores()[comm.rank % len(cores())]):
        used = comm if bandwidth is None else Watched(comm, Metered(Meter(), Wire(Link(0.0, bandwidth))))
        for latents in ways:  # which also fills caches
            comm.stats.reset()
            step(used, plan, dtype, latents=latents)
            found[latents] = [], comm.stats.bytes_sent
        for latents in in_turns(ways, turns):
            comm.gather("a turn", 0)
            wall, cpu = time.perf_counter(), time.process_time()
            step(used, plan, dtype, latents=latents)
            found[latents][0].append((time.perf_counter() - wall, time.process_time() - cpu))
    return found


def compared(
    tokens: int, dtype: torch.dtype, turns: int, bandwidth: float | None = None, ways: Sequence[bool] = (True, False)
) -> dict[bool, tuple[float, float, int]]:
    """With latents and without: medians of a step's seconds and processor seconds, and the bytes of all ranks."""
    ranks = run_processes(RANKS, measured, tokens, dtype, turns, bandwidth, ways, comm="shm", timeout=120.0)
    found = {}
    for latents in ways:
        each, sent = zip(*(rank[latents] for rank in ranks), strict=True)
        wall = median(max(wall for wall, _ in turn) for turn in zip(*each, strict=True))
        found[latents] = wall, median(sum(cpu for _, cpu in turn) for turn in zip(*each, strict=True)), sum(sent)
    return found


def slow(tokens: int, dtype: torch.dtype, seconds: float, sent: int) -> float:
    """The bandwidth over which a step with expanded keys takes `HELD` times so many seconds."""
    wire = (HELD - 1) * seconds  # what it takes beside computing, if nothing is hidden
    for _ in range(4):
        took = compared(tokens, dtype, 3, sent / RANKS / wire, [False])[False][0]
        if abs(took / seconds - HELD) < 0.05:
            break
        wire += HELD * seconds - took
    return sent / RANKS / wire


def largest(tokens: int, turns: int) -> None:
    """Print the processor time of forward that also returns the largest scores, beside forward's."""
    plan, comm = Plan(Mask([tokens]), Layout.contiguous(tokens, 1)), LocalComm()
    for dtype in DTYPES:
        q, k, v = (torch.randn(tokens, 8, VALUE).to(dtype) for _ in range(3))
        took: dict[bool, list[float]] = {True: [], False: []}
        for wanted in in_turns([True, False], turns + 1):
            before = time.process_time()
            seqpar.attention(q, k, v, plan, comm, return_max_logit=wanted)
            took[wanted].append(time.process_time() - before)
        with_it, without = (median(x[1:]) for x in took.values())
        print(f"{dtype}: {with_it / without:.2f} of the processor time of forward", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="of each rank")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--largest", action="store_true", help="only what return_max_logit costs")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if args.largest:
        largest(args.tokens, args.turns)
        return 0
    kept = True
    for dtype in DTYPES:
        run = partial(compared, args.tokens, dtype, args.turns)
        found = run()
        (wall, cpu, few), (seconds, without, many) = found[True], found[False]
        kept &= wall / seconds <= MOST
        print(
            f"{dtype}: {many / few:.2f} times fewer bytes; shared memory: {wall / seconds:.2f} of the time, "
            f"{cpu / without:.2f} of the processor time ({seconds:.2f} s with expanded keys)", flush=True,
        )  # fmt: skip
        bandwidth = slow(args.tokens, dtype, seconds, many)
        held = run(bandwidth)
        kept &= held[False][0] / held[True][0] >= LEAST
        print(
            f"{dtype}: link of {bandwidth / 1e6:.0f} MB/s, over which expanded keys take "
            f"{held[False][0] / seconds:.2f} times as long: {held[False][0] / held[True][0]:.2f} times as fast",
            flush=True,
        )  # fmt: skip
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
