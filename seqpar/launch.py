"""Ranks on this machine: run a function on threads of this process, or on processes of a group.

`seqpar calibrate` and the tests use it; for training, launch ranks with torchrun.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import pickle
import queue
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from seqpar.comm import GroupComm, LocalComm, PeerError, ShmComm

COMMS: dict[str, Callable[..., Any]] = {"gloo": GroupComm, "shm": ShmComm}
# modules that ranks are forked with; a program adds its own before the first `run_processes`. The last of these is what
# torch loads at the first call of a verb.
PRELOADED = ["torch.distributed", "seqpar.launch", "torch.fx.experimental.symbolic_shapes"]
_pools: dict[tuple[int, bool], _Pool] = {}  # world size, whether on GPUs -> idle processes, kept for the next call


def run_threads(
    size: int, fn: Callable[..., Any], *args: Any, delay: float | tuple[float, float] = 0.0, timeout: float = 60.0,
    direct: bool = True, node: int | None = None, turns: bool = False,
) -> list[Any]:  # fmt: skip
    """The results of ``fn(comm, *args)`` by rank, on `size` threads that are the ranks of a `LocalComm.world`.

    delay, timeout, direct, node: as in `LocalComm.world`. turns: one rank runs until it waits for another, then the
    next does, and each has random numbers of torch, NumPy and Python of its own, as processes have; they begin where
    the caller's are, which stay as they are. Otherwise threads share torch's generator: use your own.
    Where torch computes with one thread (``torch.set_num_threads(1)``, best for the small tensors of tests), the ranks
    share one core on Linux, where they would otherwise wait for each other at Python's lock.

    Raises: after all ranks have ended, the first of their exceptions that is not a PeerError, as one of these usually
    reports another rank's failure; the first PeerError if there are no others.
    """
    comms = LocalComm.world(size, timeout=timeout, delay=delay, direct=direct, node=node)
    finished: queue.Queue[tuple[int, Any, BaseException | None]] = queue.Queue()
    core = _own_core() if size > 1 and torch.get_num_threads() == 1 else None
    world, drawn = comms[0]._world, _drawn() if turns else None
    if turns:
        world.wakeups = [_Turns(world.lock) for _ in comms]

    def rank_main(comm: LocalComm) -> None:
        if core is not None:
            with suppress(OSError):  # where a container forbids it, ranks are slower
                os.sched_setaffinity(0, {core})  # of this thread alone
        # otherwise all ranks' backward passes share one engine thread, and a waiting rank blocks its peer
        with torch.autograd.set_multithreading_enabled(False), world.lock if turns else nullcontext():
            if drawn is not None:
                _draw_on(drawn)
            try:
                finished.put((comm.rank, fn(comm, *args), None))
            except BaseException as error:
                # queued before the abort, so that the first failure comes first in the queue
                finished.put((comm.rank, None, error))
                comm.abort(f"{type(error).__name__}: {error}")

    threads = [
        threading.Thread(target=rank_main, args=(comm,), name=f"rank {comm.rank}", daemon=True) for comm in comms
    ]
    for thread in threads:
        thread.start()
    results: dict[int, Any] = {}
    errors: list[BaseException] = []
    try:
        for _ in comms:
            rank, result, error = finished.get(timeout=timeout + 10 if errors else None)
            results[rank] = result
            if error is not None:
                errors.append(error)
    except queue.Empty:
        pass  # a rank hangs outside the comm: report the first failure instead
    except BaseException:
        comms[0].abort("the caller was interrupted")
        raise
    finally:
        if drawn is not None:
            _draw_on(drawn)
    if errors:
        raise _root(errors)
    return [results[rank] for rank in range(size)]


class _Turns(threading.Condition):
    """A rank's wait, in which others run and draw. Ranks hold its lock, the world's, at all other times."""

    def wait(self, timeout: float | None = None) -> bool:
        """As of every condition; afterwards this rank's random numbers go on where they were."""
        drawn = _drawn()
        try:
            return super().wait(timeout)
        finally:
            _draw_on(drawn)


def _drawn() -> tuple[Any, ...]:
    """How far the random numbers of torch, NumPy and Python have been drawn."""
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return torch.get_rng_state(), on_gpus, np.random.get_state(), random.getstate()


def _draw_on(drawn: tuple[Any, ...]) -> None:
    """Go on drawing random numbers from there."""
    on_cpu, on_gpus, of_numpy, of_python = drawn
    torch.set_rng_state(on_cpu)
    torch.cuda.set_rng_state_all(on_gpus)
    np.random.set_state(of_numpy)
    random.setstate(of_python)


def _root(errors: list[BaseException]) -> BaseException:
    """The first error that is not a PeerError, which usually reports another rank's failure; else the first."""
    return next((error for error in errors if not isinstance(error, PeerError)), errors[0])


def _own_core() -> int | None:
    """The core that the calling thread runs on; None where the system does not say."""
    if sys.platform != "linux":
        return None
    with open("/proc/thread-self/stat", encoding="utf-8") as file:
        return int(file.read().rpartition(")")[2].split()[36])


def run_processes(
    size: int, fn: Callable[..., Any], *args: Any, comm: str = "gloo", timeout: float = 60.0
) -> list[Any]:
    """The results of ``fn(comm, *args)`` by rank, on `size` processes of one group.

    fn: a function of an importable module. fn, args and results are pickled. comm: "gloo" for a `GroupComm` of all
    processes, "shm" for a `ShmComm`, "nccl" for a `GroupComm` whose rank r has GPU r. timeout: seconds after which a
    wait of the comm fails; the whole call may take four times as long, and at least two minutes. The processes are kept
    for the next call of the same size, unless one of them failed or died.

    Raises: ValueError for an unknown comm; NotImplementedError for "nccl" without a GPU for each rank; the exception of
    the rank that failed first, with its remote traceback as the cause; RuntimeError naming a rank whose process died;
    TimeoutError naming the ranks that did not return.
    """
    if comm not in (*COMMS, "nccl"):
        raise ValueError(f"run_processes: comm={comm!r}, expected one of {[*COMMS, 'nccl']}")
    on_gpus = comm == "nccl"
    if on_gpus and (missing := missing_gpus(size)):
        raise NotImplementedError(f'run_processes: comm="nccl": {missing}')
    pool = _pools.pop((size, on_gpus), None)
    if pool is None or not pool.alive():
        if pool is not None:
            pool.close()
        pool = _Pool(size, on_gpus=on_gpus)
    try:
        results = pool.run(fn, args, comm, timeout)
    except BaseException:
        pool.close()
        raise
    _pools[size, on_gpus] = pool
    return results


def missing_gpus(size: int) -> str | None:
    """What this machine lacks for `size` ranks of ``comm="nccl"``, None if nothing."""
    if not dist.is_nccl_available():
        return "this build of PyTorch has no NCCL"
    found = torch.cuda.device_count()
    return None if found >= size else f"{size} ranks take a GPU each, and this machine has {found}"


class _Pool:
    """Processes that form one default group. The store is in this process, so that it outlives every rank."""

    def __init__(self, size: int, *, on_gpus: bool) -> None:
        method = "forkserver" if sys.platform == "linux" else "spawn"
        context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            serve_forks(context)
        self.store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=300), wait_for_workers=False)
        self.processes, self.pipes = [], []
        try:
            with uninterrupted():
                for rank in range(size):
                    self._start(context, rank, size, on_gpus)
        except BaseException:
            self.close()
            raise

    def _start(self, context: Any, rank: int, size: int, on_gpus: bool) -> None:
        ours, theirs = context.Pipe()
        process = context.Process(target=_worker, args=(rank, size, self.store.port, on_gpus, theirs), daemon=True)
        process.start()
        theirs.close()
        self.processes.append(process)
        self.pipes.append(ours)

    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], comm: str, timeout: float) -> list[Any]:
        message = pickle.dumps((sys.path, comm, timeout, pickle.dumps((fn, args))))
        for pipe in self.pipes:
            pipe.send_bytes(message)
        results: dict[int, Any] = {}
        errors: list[BaseException] = []
        waiting = dict(enumerate(self.pipes))
        deadline = time.monotonic() + max(120.0, 4 * timeout)
        while waiting:
            ready = wait(list(waiting.values()), max(0.0, deadline - time.monotonic()))
            if not ready:
                errors.append(TimeoutError(f"ranks {sorted(waiting)} did not return in time"))
                break
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                result, error = self._answer(rank, waiting.pop(rank))
                results[rank] = result
                if error is not None:
                    # the other ranks get one timeout to notice the failure
                    deadline = min(deadline, time.monotonic() + timeout + 5.0)
                    errors.append(error)
        if errors:
            raise _root(errors)
        return [results[rank] for rank in range(len(self.pipes))]

    def _answer(self, rank: int, pipe: Connection) -> tuple[Any, BaseException | None]:
        """The result or the error that a rank sent back."""
        try:
            result, error, trace = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError):
            process = self.processes[rank]
            process.join(5.0)
            return None, RuntimeError(f"rank {rank}: its process died with exit code {process.exitcode}")
        if error is not None:
            error.__cause__ = RuntimeError(f"on rank {rank}:\n{trace}")
        return result, error

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        deadline = time.monotonic() + 0.2
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        # all at once: a rank that is still joining the group would print that it lost another one
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(5.0)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C takes effect after the block: while a process starts, it would leave a process that is not recorded."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is None:  # others cannot set handlers, nor restore one of C
        yield
        return
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        for number in pressed[:1]:
            signal.raise_signal(number)


def serve_forks(context: Any) -> None:
    """Start the server that ranks are forked from, unless it runs, with the modules and the path that ranks need."""
    from multiprocessing import forkserver, resource_tracker  # not on every system

    context.set_forkserver_preload(PRELOADED)
    before = os.environ.get("PYTHONPATH")
    # before Python 3.12 the server does not inherit this process's sys.path
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    # Ctrl-C at a terminal reaches all processes: this one handles it and ends the others. The tracker goes first, since
    # whoever starts it unblocks SIGINT.
    resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


@atexit.register
def _close_pools() -> None:
    while _pools:
        _pools.popitem()[1].close()


def _worker(rank: int, size: int, port: int, on_gpus: bool, pipe: Connection) -> None:
    """One rank: joins the default group, then runs functions until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):  # blocked by `serve_forks`
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    gc.freeze()  # or a garbage collection would walk all that ranks are forked with, and so copy it
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=300))
    if on_gpus:
        torch.cuda.set_device(rank)
    backend = "cpu:gloo,cuda:nccl" if on_gpus else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=300))
    while True:
        try:
            path, name, timeout, call = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError):
            os._exit(0)
        sys.path[:] = path
        pipe.send_bytes(_outcome(name, timeout, call))


def _outcome(name: str, timeout: float, call: bytes) -> bytes:
    """The pickled (result, error, traceback) of one call, on a comm of its own."""
    comm = None
    try:
        comm = COMMS.get(name, GroupComm)(timeout=timeout, check="call")
        fn, args = pickle.loads(call)
        answer = pickle.dumps((fn(comm, *args), None, ""))
        if name == "nccl":
            comm.close()  # a communicator takes hundreds of MB of the GPU
        return answer
    except BaseException as error:
        if comm is not None:
            comm.abort(f"{type(error).__name__}: {error}")
        trace = traceback.format_exc()
        try:
            answer = pickle.dumps((None, error, trace))
            pickle.loads(answer)
        except Exception:
            answer = pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}"), trace))
        return answer
