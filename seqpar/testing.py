"""Ranks for tests: a function run on every rank, as threads or as processes of this machine."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

from seqpar.comm import LocalComm

# --- ranks as threads -------------------------------------------------------------------------------------------------


def run_threads(size: int, fn: Callable[..., Any], *args: Any, delay: float = 0.0, timeout: float = 60.0) -> list[Any]:
    """The results of ``fn(comm, *args)`` by rank, on `size` threads that are the ranks of one `LocalComm.world`.

    delay, timeout: seconds, as in `LocalComm.world`. Threads share the global random generator: pass generators.

    Raises: the exception of the rank that failed first; the others are aborted and joined before.
    """
    comms = LocalComm.world(size, timeout=timeout, delay=delay)
    finished: queue.Queue[tuple[int, Any, BaseException | None]] = queue.Queue()

    def rank_main(comm: LocalComm) -> None:
        # otherwise the backward passes of all ranks share one engine thread, and a rank that waits blocks its peer
        with torch.autograd.set_multithreading_enabled(False):
            try:
                finished.put((comm.rank, fn(comm, *args), None))
            except BaseException as error:
                # queued before the abort, so that the first failure is the first in the queue
                finished.put((comm.rank, None, error))
                comm.abort(f"{type(error).__name__}: {error}")

    threads = [
        threading.Thread(target=rank_main, args=(comm,), name=f"rank {comm.rank}", daemon=True) for comm in comms
    ]
    for thread in threads:
        thread.start()
    results: dict[int, Any] = {}
    first: BaseException | None = None
    try:
        for _ in comms:
            rank, result, error = finished.get(timeout=timeout + 10 if first else None)
            results[rank] = result
            first = first or error
    except queue.Empty:
        pass  # a rank hangs outside the comm: the first failure says more than that
    except BaseException:
        comms[0].abort("the caller was interrupted")
        raise
    if first is not None:
        raise first
    return [results[rank] for rank in range(size)]
