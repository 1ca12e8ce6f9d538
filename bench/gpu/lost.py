"""How soon the other ranks name one that dies, or hangs, in a backward.

    python -m bench.gpu.lost                        # NCCL, on all GPUs of this machine
    python -m bench.gpu.lost --rehearse             # three ranks over gloo on the CPU

Ranks run steps of attention in a ring. In the backward of the third step rank 1 is killed, and in a second run stopped.
Every other rank must raise `PeerError` that names it, before the timeout of the comm and a few seconds more have gone
by; a rank that ends without (torch's watchdog ends a process that hangs on NCCL) has failed. Seconds are those of the
last rank, since the fault. Exit code 1: a rank was late, or silent.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import signal
import sys
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import seqpar
from bench.gpu.machine import Machine
from bench.gpu.rows import Row

LOST = 1  # the rank
FAULTS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
GRACE = 15.0  # seconds after the comm's timeout in which a rank must have raised


def rank_main(
    rank: int, size: int, port: int, fault: str, timeout: float, rehearse: bool, began: Any, parent: Connection
) -> None:
    """One rank: steps until the lost one is named."""
    torch.set_num_threads(1)
    if not rehearse:
        torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, size, is_master=False)  # type: ignore[attr-defined]
    dist.init_process_group("gloo" if rehearse else "cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=size)
    comm = seqpar.GroupComm(timeout=timeout)
    rows, heads, dim = (8, 2, 8) if rehearse else (4096, 32, 128)
    layout = seqpar.Layout.zigzag([size * rows], size)
    plan = seqpar.Plan(seqpar.Mask([size * rows]), layout, transport="ring")
    dtype, device = (torch.float32, "cpu") if rehearse else (torch.bfloat16, "cuda")
    tensors = [torch.randn(rows, heads, dim, dtype=dtype, device=device) for _ in range(4)]

    def end(gradient: torch.Tensor) -> None:
        began.value = time.monotonic()
        os.kill(os.getpid(), FAULTS[fault])

    try:
        for step in range(1_000_000):
            q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
            out = seqpar.attention(q, k, v, plan, comm)
            if rank == LOST and step == 2:
                out.register_hook(end)
            out.backward(tensors[3])
            if not rehearse:
                torch.cuda.synchronize()
            comm.check()
    except seqpar.PeerError as error:
        parent.send((time.monotonic() - began.value, str(error)))
        parent.close()
    os._exit(0)  # the communicator of a group with a lost rank cannot be ended in order


def lose(fault: str, size: int, timeout: float, *, rehearse: bool) -> Row:
    """The row of one run."""
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    began = context.Value("d", 0.0)
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    ranks = [
        context.Process(
            target=rank_main, args=(rank, size, store.port, fault, timeout, rehearse, began, pipes[rank][1]),
            daemon=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    for process in ranks:
        process.start()
    for _, writing in pipes:
        writing.close()
    deadline, heard = time.monotonic() + 120.0, {}
    waiting = {reading: rank for rank, (reading, _) in enumerate(pipes) if rank != LOST}
    while waiting:
        if began.value:
            deadline = min(deadline, began.value + timeout + GRACE)
        if time.monotonic() > deadline:
            break
        for reading in wait(list(waiting), 0.2):
            rank = waiting.pop(reading)
            try:
                heard[rank] = reading.recv()  # type: ignore[call-arg]
            except EOFError:
                ranks[rank].join(5.0)
                heard[rank] = None, f"ended with exit code {ranks[rank].exitcode} and said nothing"
    for process in ranks:
        process.kill()
    return {"kernel": "gloo" if rehearse else "NCCL", "mode": fault, "ranks": size, "timeout_s": timeout,
            **verdict(heard, [rank for rank in range(size) if rank != LOST])}  # fmt: skip


def verdict(heard: dict[int, tuple[float | None, str]], others: list[int]) -> Row:
    """Whether all other ranks named the lost one, and after how many seconds. heard: by rank, seconds and an error."""
    faults = [f"rank {rank} has said nothing" for rank in others if rank not in heard]
    for rank, (seconds, error) in sorted(heard.items()):
        if seconds is None or not re.search(rf"\brank {LOST}\b|\branks \[{LOST}\]", error):
            faults.append(f"rank {rank}: {error}")
    if faults:
        return {"ok": False, "missed": "; ".join(faults)[:600]}
    return {"ok": True, "seconds": max(seconds or 0.0 for seconds, _ in heard.values()), "said": heard[others[0]][1]}


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 1 if a rank was late, or silent."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds, of the comm (default: %(default)s)")
    parser.add_argument("--fault", choices=list(FAULTS), action="append", help="default: each")
    parser.add_argument("--json", type=Path, help="file to which rows are added")
    parser.add_argument("--rehearse", action="store_true", help="three ranks over gloo on the CPU")
    args = parser.parse_args(arguments)
    size = 3 if args.rehearse else torch.cuda.device_count()
    if size < 2:
        parser.error(f"this machine has {size} GPUs, expected two or more, or --rehearse")
    origin, right = Machine(rehearsal=args.rehearse).origin(None), True
    for fault in args.fault or FAULTS:
        row = lose(fault, size, args.timeout, rehearse=args.rehearse)
        right &= row["ok"]
        print(f"{fault:10}{row.get('seconds', float('nan')):6.1f} s  {row.get('missed') or row['said']}", flush=True)
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps({"slice": "lost", "case": fault, **row, **origin}) + "\n")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
