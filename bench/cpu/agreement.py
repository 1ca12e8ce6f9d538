"""Messages of agreements, gathers and constructors: counted for 2 to 1,024 ranks, the first two timed over gloo.

    python -m bench.cpu.agreement --json bench/results/agreement.json

One agreement on equal facts and one gather of 64 bytes are counted: messages, bytes and rounds of the rank with most,
each in one round to all ranks and in rounds that double. Processes time both ways in turn, within one run.

A constructor meets over the group's store: the messages and bytes of the rank with most and of all ranks, without the
questions that a rank asks in vain while it waits for others, and without the addresses that gloo then reads to connect.
Seconds follow from a model, in which all ranks come at once: the busiest rank waits 100 us for the answer to each
message, and the store serves all messages in turn, 10 us each, and all bytes at 1 GB/s; the larger of the two.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console

import seqpar
from bench.lib import records
from bench.lib.counting import CountedStore, CountingComm, CountingWorld
from seqpar.comm import base, rendezvous

WAYS = {"to all": 1 << 30, "doubling": 1}
KINDS = {
    "agree": lambda comm: comm.agree("attention", {"heads": 8}),
    "gather": lambda comm: comm.gather("lengths", bytes(64)),
}  # fmt: skip


def counted(size: int, way: str, kind: str) -> dict[str, Any]:
    """Messages, bytes and rounds of the rank with most."""
    base.DIRECT = WAYS[way]
    world = CountingWorld(size)
    call: Any = KINDS[kind]

    def rank(comm: CountingComm) -> None:
        call(comm)

    world.run(rank)
    most = {name: max(getattr(world, name).values()) for name in ("messages", "bytes", "rounds")}
    return {"ranks": size, "way": way, "kind": kind} | most | {"all messages": sum(world.messages.values())}


def met(size: int) -> dict[str, Any]:
    """Messages and bytes of a constructor's meeting, in which ranks say of themselves what `GroupComm`'s do."""
    store = dist.HashStore()
    stores = [CountedStore(store) for _ in range(size)]
    place = ["f" * 36, "node"]
    failures: list[BaseException] = []
    rendezvous.GRACE = 600.0  # threads of one process take turns

    def rank(number: int) -> None:
        try:
            meeting = rendezvous.Rendezvous("GroupComm", stores[number], number, size, 600.0)
            meeting.hear(lambda: [f"GPU-{uuid.UUID(int=number)}", place, True])
            meeting.connect(lambda: number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    messages, moved = [x.messages for x in stores], [x.bytes for x in stores]
    seconds = max(max(messages) * 1e-4, sum(messages) * 1e-5 + sum(moved) * 1e-9)
    return {
        "ranks": size, "kind": "constructor", "messages": max(messages), "bytes": max(moved),
        "all messages": sum(messages), "all bytes": sum(moved), "seconds by the model": round(seconds, 4),
    }  # fmt: skip


def timed(rank: int, size: int, port: int, repeats: int, results: Any) -> None:
    """Median milliseconds, of wall time and of the processor time of all ranks, by way and kind."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=size)
    comm = seqpar.GroupComm()
    found: dict[tuple[str, str], list[tuple[float, float]]] = {(w, k): [] for w in WAYS for k in KINDS}
    for repeat in range(repeats + 3):
        for (way, kind), times in found.items():
            base.DIRECT = WAYS[way]
            dist.barrier()
            wall, spent = time.perf_counter(), time.process_time()
            KINDS[kind](comm)  # type: ignore[no-untyped-call]
            wall, spent = time.perf_counter() - wall, time.process_time() - spent
            total = torch.tensor([spent])
            dist.all_reduce(total)
            if repeat >= 3:
                times.append((wall * 1e3, float(total) * 1e3))
    if rank == 0:
        results.put([
            {"ranks": size, "way": way, "kind": kind, "repeats": repeats,
             "wall_ms": round(statistics.median(wall for wall, _ in times), 3),
             "cpu_ms_of_all": round(statistics.median(spent for _, spent in times), 3)}
            for (way, kind), times in found.items()
        ])  # fmt: skip
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 8, 9, 16, 64, 100, 256, 1024])
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    rows = [met(size) for size in args.ranks]
    rows += [
        counted(size, way, kind)
        for size in args.ranks for way in WAYS for kind in KINDS if way == "doubling" or size <= 64
    ]  # fmt: skip
    context = mp.get_context("spawn")
    for size in args.processes:
        results = context.Queue()
        ranks = mp.spawn(timed, (size, 29500 + os.getpid() % 2000, args.repeats, results), nprocs=size, join=False)
        rows += results.get(timeout=600)
        while not ranks.join():
            pass
    for row in rows:
        Console().print(row)
    if args.json:
        records.write(args.json, records.environment() | {"rows": rows})


if __name__ == "__main__":
    main()
