"""Work of some ranks in children of this process, under a limit of memory that is enforced; Linux only.

Libraries are loaded before. A limit is on a rank's data (RLIMIT_DATA) beyond what it has after `ready`. Blocks of more
than 64 KiB go back to the system at once, by glibc's variables, so that memory that is resident is memory in use.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

EXCEEDED = 9  # exit code of a rank without memory
GLIBC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}


class Ran(NamedTuple):
    """The most bytes that a rank had beyond those after `ready`, and what its work returned."""

    peak: int
    result: Any


def restarted(module: str) -> None:
    """Start this program again with glibc's variables, which are read when a process starts, unless they are set."""
    if not GLIBC.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], os.environ | GLIBC)
    torch.set_num_threads(1)


def run(
    work: Callable[[int], Any], *, ready: Callable[[int], Any] = int, ranks: int = 1, limit: int | None = None
) -> list[Ran] | None:
    """What ranks return from work(rank), as JSON; None if one of them was not given all the memory that it asked for.

    ready(rank) runs before the limit is set. Raises RuntimeError if a rank fails otherwise.
    """
    pipes, children = [os.pipe() for _ in range(ranks)], []
    for rank, (_, writing) in enumerate(pipes):
        if not (child := os.fork()):
            _in_child(rank, work, ready, limit, writing)
        os.close(writing)
        children.append(child)
    texts = []
    for reading, _ in pipes:
        with os.fdopen(reading) as pipe:
            texts.append(pipe.read())
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if EXCEEDED in codes:
        return None
    if any(codes):
        raise RuntimeError(f"ranks ended with exit codes {codes}")
    return [Ran(*json.loads(text)) for text in texts]


def _in_child(rank: int, work: Callable[[int], Any], ready: Callable[[int], Any], limit: int | None, to: int) -> None:
    code = 1
    try:
        ready(rank)
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (_status("VmData") + limit,) * 2)
        result = work(rank)
        os.write(to, json.dumps([_status("VmHWM") - before, result]).encode())
        code = 0
    except (MemoryError, RuntimeError) as error:
        code = EXCEEDED if isinstance(error, MemoryError) or "allocate memory" in str(error) else 1
        if code == 1 and limit is None:
            traceback.print_exc()
    finally:
        os._exit(code)


def _status(what: str) -> int:
    """Bytes of this process: VmData now, VmRSS in memory, VmHWM the most in memory since it was reset."""
    found = re.search(rf"^{what}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10
