"""Ranks as processes, one of which meets a fault somewhere in a run of every verb; and what the ranks make of it."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist

import seqpar
from seqpar import launch
from seqpar.comm import PeerError
from seqpar.comm.rendezvous import Rendezvous
from seqpar.data import share
from seqpar.train import sync_gradients

TIMEOUT = 2.5  # seconds, of the comms, where a fault may show only then
MARGIN = 40.0  # seconds that a busy machine may take beside it
FAULTS = ("kill", "stop", "pause", "sleep", "oversleep", "fork", "exception", "exit", "interrupt")
HARMLESS = ("pause", "sleep", "fork")
NOTICED = ("kill", "exception", "exit", "interrupt")  # over shared memory, once its constructor is done
FIRST_VERB = 6  # events before it are the constructor's
EVENTS = 60  # a run has about as many


@dataclass(frozen=True)
class Schedule:
    """What happens: to which rank, before or after which of its dealings with the comm."""

    seed: int

    @property
    def parts(self) -> tuple[str, int, str, int, int]:
        """Comm, ranks, fault, the rank that meets it, and the event at which it does."""
        draw = random.Random(self.seed)
        kinds = ["gloo", "shm"] if seqpar.native.missing() is None else ["gloo"]
        size = draw.randint(2, 4)
        # every third in the constructor
        event = draw.randrange(FIRST_VERB) if draw.random() < 0.3 else draw.randrange(FIRST_VERB, EVENTS)
        return draw.choice(kinds), size, draw.choice(FAULTS), draw.randrange(size), event

    def __str__(self) -> str:
        kind, size, fault, victim, event = self.parts
        return f"seed {self.seed}: {kind}, {size} ranks, {fault} on rank {victim} at event {event}"


def verbs(comm):
    """What two turns of every verb give on this rank."""
    plan = seqpar.Plan(seqpar.Mask([9, 15]), seqpar.Layout.striped(24, comm.size))
    to = seqpar.Layout.contiguous(24, comm.size)
    found = []
    for turn in range(2):
        generator = torch.Generator().manual_seed(turn)
        q, k, v = (
            seqpar.shard(torch.randn(24, 2, 4, generator=generator, dtype=torch.float64), plan, comm.rank)
            for _ in range(3)
        )
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        comm.agree("a turn", {"turn": turn})
        ranks = comm.gather("ranks", comm.rank)
        out = seqpar.attention(q, k, v, plan, comm)
        out.square().sum().backward()
        moved = seqpar.relayout(out.detach(), comm, src=plan.layout, dst=to)
        wide = seqpar.switch(torch.full((2, comm.size), float(comm.rank)), comm, split_dim=1, concat_dim=0)
        weight = torch.zeros(5, dtype=torch.float64, requires_grad=True)
        weight.grad = torch.full((5,), comm.rank + 1.0, dtype=torch.float64)
        sync_gradients([weight], comm)
        ids = torch.arange(8)[None] + comm.rank
        mine = share({"input_ids": ids, "labels": ids}, comm)
        tensors = [out, q.grad, k.grad, v.grad, moved, wide, weight.grad, mine.tensors["input_ids"]]
        found += [torch.tensor(ranks), *(x.detach().clone() for x in tensors)]
    return found


class Fault:
    """Strikes at the n-th event of this process."""

    def __init__(self, what: str, event: int) -> None:
        self.what, self.left = what, event

    def tick(self) -> None:
        """Count an event."""
        if threading.current_thread() is threading.main_thread():
            self.left -= 1
            if self.left == -1:
                self.strike()

    def strike(self) -> None:
        """Do what the schedule says."""
        own = os.getpid()
        if self.what == "kill":
            os.kill(own, signal.SIGKILL)
        elif self.what in ("stop", "pause"):
            os.kill(own, signal.SIGSTOP)
        elif self.what == "sleep":
            time.sleep(0.3)
        elif self.what == "oversleep":
            time.sleep(TIMEOUT + 1.5)
        elif self.what == "exception":
            raise KeyError("no such layer")
        elif self.what == "exit":
            sys.exit(3)
        elif self.what == "interrupt":
            threading.Timer(0.02, os.kill, (own, signal.SIGINT)).start()
        elif self.what == "fork":
            self.fork()

    comm = None

    def fork(self) -> None:
        """A child that uses the comm and must hear that it is no rank."""
        child = os.fork()
        if not child:
            code = 0
            try:
                if self.comm is not None:
                    self.comm.agree("in a fork", {})
                    code = 2
            except PeerError as error:
                code = 0 if "not to a fork of it" in str(error) else 3
            finally:
                os._exit(code)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            raise AssertionError("a fork was taken for a rank")

    def around(self, owner: type, name: str):
        """Ticks before and after a method."""
        method = getattr(owner, name)

        def call(*args, **named):
            self.tick()
            result = method(*args, **named)
            self.tick()
            return result

        return mock.patch.object(owner, name, call)


def rank_main(rank: int, size: int, port: int, schedule: Schedule, pipe) -> None:
    """One rank's process: sends ("right", tensors) or (type of the error, its text)."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # see `launch.serve_forks`
    kind, _, what, victim, event = schedule.parts
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    store.set(f"joined {rank}", "")
    make = launch.COMMS[kind]
    if rank == victim:
        # faults are the comm's: torch's own group, in which others may still be connecting, has none
        store.wait([f"joined {other}" for other in range(size)])
        fault = Fault(what, event)
        works = {"gloo": seqpar.comm.over_gloo.GlooWork, "shm": seqpar.comm.shm.comm._ShmWork}
        dealings = (Rendezvous, "_gather"), (Rendezvous, "_swap"), (make, "exchange"), (make, "_post_control")
        for owner, name in (*dealings, (works[kind], "wait")):
            fault.around(owner, name).start()
    comm = None
    try:
        patient = what in HARMLESS or (what in NOTICED and kind == "shm" and event >= FIRST_VERB)
        comm = make(timeout=3 * TIMEOUT + MARGIN if patient else TIMEOUT, check="call")
        if rank == victim:
            fault.comm = comm
        answer = ("right", [x.numpy() for x in verbs(comm)])
    except BaseException as error:
        answer = (type(error).__name__, str(error))
        if comm is not None and not isinstance(error, PeerError):
            comm.abort(f"{answer[0]}: {error}")
    pipe.send(answer)
    pipe.close()
    os._exit(0)


def outcomes(schedule: Schedule) -> tuple[dict[int, tuple], float]:
    """What each rank sent, without those that sent nothing, and the seconds that the last one took."""
    _, size, what, victim, _ = schedule.parts
    context = multiprocessing.get_context("forkserver")
    launch.serve_forks(context)
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    ranks, pipes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe()
        ranks.append(context.Process(target=rank_main, args=(rank, size, store.port, schedule, theirs), daemon=True))
        ranks[-1].start()
        theirs.close()
        pipes.append(ours)
    start = time.monotonic()
    found: dict[int, tuple] = {}
    waiting = dict(enumerate(pipes))
    expected = size - (what in ("kill", "stop"))
    while waiting and time.monotonic() < start + 3 * TIMEOUT + MARGIN:
        for pipe in multiprocessing.connection.wait(list(waiting.values()), 0.1):
            rank = pipes.index(pipe)
            del waiting[rank]
            try:
                found[rank] = pipe.recv()
            except EOFError:
                continue
        if what == "stop" and len(found) >= expected:
            break
        if what == "pause" and stopped(ranks[victim].pid):
            time.sleep(0.2)
            os.kill(ranks[victim].pid, signal.SIGCONT)
    taken = time.monotonic() - start
    for process in ranks:
        process.kill()
        process.join(10)
    return found, taken


def stopped(pid: int) -> bool:
    """Whether a process is stopped."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def complaints(schedule: Schedule) -> list[str]:
    """What ranks did that they must not: hang, be wrong, or fail with an error that is not ours or names nobody."""
    _, size, what, victim, _ = schedule.parts
    found, seconds = outcomes(schedule)
    expected = launch.run_threads(size, verbs)
    wrong = []
    for rank in range(size):
        own = rank == victim
        if rank not in found:
            if not (own and what in ("kill", "stop")):
                wrong.append(f"rank {rank} did not end in {seconds:.0f} s")
            continue
        kind, result = found[rank]
        if kind == "right":
            same = len(result) == len(expected[rank]) and all(
                torch.allclose(torch.from_numpy(a).double(), b.double(), atol=1e-12)
                for a, b in zip(result, expected[rank])
            )
            wrong += [] if same else [f"rank {rank} is wrong"]
        elif what in HARMLESS:
            wrong.append(f"rank {rank} failed: {kind}: {result}")
        elif own and kind in ("KeyError", "SystemExit", "KeyboardInterrupt"):
            continue
        elif kind not in ("PeerError", "RuntimeError") or (kind == "RuntimeError" and "Comm: rank" not in result):
            wrong.append(f"rank {rank}: not an error of ours: {kind}: {result}")
        elif not own and not named(victim, what, rank, result):
            wrong.append(f"rank {rank} does not name rank {victim}: {kind}: {result}")
    return wrong


def named(victim: int, what: str, rank: int, text: str) -> bool:
    """Whether an error names the rank at fault; of one that is only late, it may name one that waits for that."""
    if f"rank {victim}" in text or f"ranks [{victim}" in text or f", {victim}" in text:
        return True
    return what in ("stop", "oversleep") and "waited" in text
