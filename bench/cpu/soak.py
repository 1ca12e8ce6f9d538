"""Minutes of random verbs over processes: memory, descriptors, threads and shared memory must not grow.

    python -m bench.cpu.soak                      10 minutes, 3 ranks, GroupComm and ShmComm in turn
    python -m bench.cpu.soak --rehearse           a few seconds

Writes bench/results/soak.json: every sample of every rank, and the growth from the end of the first third to the end.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

import seqpar
from bench.lib import records
from seqpar.comm import GroupComm, ShmComm
from seqpar.testing import run_processes
from seqpar.train import sync_gradients

RESULTS = Path(__file__).parents[1] / "results" / "soak.json"


def counts() -> dict[str, float]:
    """The resources of this process: MiB resident, open files, threads, and mappings of memory files."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "rss_mib": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "tasks": len(os.listdir("/proc/self/task")),
        "shared_maps": sum("memfd" in line for line in maps),
    }


def attend(comm: Any, draw: random.Random) -> None:
    """Attention of a random batch, forward and backward."""
    lengths = [draw.randint(1, 200) for _ in range(draw.randint(1, 5))]
    tokens = sum(lengths)
    layout = draw.choice((seqpar.Layout.striped, seqpar.Layout.contiguous))(tokens, comm.size)
    plan = seqpar.Plan(seqpar.Mask(lengths), layout)
    q, k, v = (torch.randn(plan.rows(comm.rank), 4, 16, requires_grad=True) for _ in range(3))
    seqpar.attention(q, k, v, plan, comm).sum().backward()


def move(comm: Any, draw: random.Random) -> None:
    """A relayout of random rows and a switch."""
    tokens = draw.randint(1, 500)
    src, dst = seqpar.Layout.striped(tokens, comm.size), seqpar.Layout.contiguous(tokens, comm.size)
    seqpar.relayout(torch.randn(src.tokens(comm.rank), 8), comm, src=src, dst=dst)
    seqpar.switch(torch.randn(draw.randint(1, 9) * 4, 4 * comm.size)[:4], comm, split_dim=1, concat_dim=0)


def reduce(comm: Any, draw: random.Random) -> None:
    """A sum of random gradients over ranks."""
    several = [torch.zeros(draw.randint(1, 5000), requires_grad=True) for _ in range(draw.randint(1, 4))]
    for p in several:
        p.grad = torch.ones_like(p)
    sync_gradients(several, comm)


def talk(comm: Any, draw: random.Random) -> None:
    """An agreement and a gather of random values."""
    comm.agree("a turn", {"number": draw.random()})
    comm.gather("numbers", list(range(draw.randint(0, 500))))


def differ(comm: Any, draw: random.Random) -> None:
    """An agreement on different values, which must fail on all ranks."""
    try:
        comm.agree("a turn", {"rank": comm.rank})
    except ValueError:
        return
    raise AssertionError("ranks that differ agreed")


def soak(first: Any, seconds: float, samples: int) -> dict[str, Any]:
    """Random verbs on comms that are replaced now and then: this rank's counts and how often each verb ran."""
    draw, ran, kinds = random.Random(0), dict.fromkeys(("comms", "attend", "move", "reduce", "talk", "differ"), 0), 0
    begun, found = time.monotonic(), []
    comm = first
    while True:
        # rank 0 has the clock
        passed = first.gather("seconds", time.monotonic() - begun)[0]
        if passed >= len(found) * seconds / samples:
            # earlier comms are freed, so that samples are comparable
            comm = first
            found.append({"seconds": round(passed, 1), **counts()})
        if passed >= seconds and all(ran.values()):  # the draws, so the counts, are those of all ranks
            return {"ran": ran, "samples": found}
        if draw.random() < 0.2:
            kinds += 1
            ran["comms"] += 1
            comm = (ShmComm if seqpar.native.missing() is None and kinds % 2 else GroupComm)(timeout=120.0)
        for _ in range(draw.randint(1, 12)):
            verb = draw.choice((attend, move, reduce, talk, differ))
            ran[verb.__name__] += 1
            verb(comm, draw)


def growth(samples: list[dict[str, float]]) -> dict[str, float]:
    """How much each count grew between the end of the first third and the end."""
    early, last = samples[len(samples) // 3], samples[-1]
    return {name: round(last[name] - early[name], 1) for name in last if name != "seconds"}


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 1 if descriptors, threads or shared memory have grown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--rehearse", action="store_true", help="a few seconds, written nowhere unless --json says so")
    options = parser.parse_args(arguments)
    seconds = 4.0 if options.rehearse else options.minutes * 60
    ranks = run_processes(options.ranks, soak, seconds, 6 if options.rehearse else 40, timeout=max(120.0, seconds))
    grown = [growth(rank["samples"]) for rank in ranks]
    for rank, (found, more) in enumerate(zip(ranks, grown)):
        print(f"rank {rank}: first {found['samples'][0]}, last {found['samples'][-1]}, grown {more}")
    print(f"ran {ranks[0]['ran']}")
    if not options.rehearse or options.json != RESULTS:
        report = {**records.environment(), "seconds": seconds, "ranks": ranks, "grown": grown}
        records.write(options.json, report)
    counted = ("descriptors", "threads", "tasks", "shared_maps")
    return int(any(more[name] > 2 for more in grown for name in counted))


if __name__ == "__main__":
    sys.exit(main())
