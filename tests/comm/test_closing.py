"""After its end a comm holds no group: `destroy_process_group` ends the store, and a new group can begin."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from seqpar import Comm, LocalComm, ShmComm, native
from seqpar.comm import PeerError
from seqpar.testing import run_processes, run_threads
from seqpar.train import all_sum

WITHOUT_SHM = native.missing()
KINDS = ["gloo", pytest.param("shm", marks=pytest.mark.skipif(WITHOUT_SHM is not None, reason=WITHOUT_SHM or ""))]

SCRIPT = """
    import gc, os, socket, sys, threading, time, torch, torch.distributed as dist
    from datetime import timedelta
    from pathlib import Path
    from seqpar import GroupComm, ShmComm
    from seqpar.train import all_sum

    gc.disable()
    kept, found, at = [], [], ("127.0.0.1", int(os.environ["MASTER_PORT"]))
    for kind, closes in ((GroupComm, True), (GroupComm, False), *[(ShmComm, True)] * int(sys.argv[1])):
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        comm = kind(timeout=60)
        total = float(all_sum(torch.ones(1), comm))
        if closes:
            comm.close()
            kept.append(comm)
        del comm
        dist.barrier()
        dist.destroy_process_group()
        listens, ended = False, Path(sys.argv[2]) / str(len(found))
        if int(os.environ["RANK"]) == 0:
            with socket.socket() as probe:
                listens = probe.connect_ex(at) == 0
            ended.touch()
        while not ended.exists():  # else rank 1 may join the store that rank 0 has yet to end
            time.sleep(0.01)
        for thread in threading.enumerate():
            if thread is not threading.main_thread():
                thread.join(60.0)
        found.append((total, listens, threading.active_count()))
    print(found)
"""


def test_a_new_group_begins_where_rank_0_kept_the_store_of_the_one_before(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    kept = socket.socket()  # while it is bound, the port is given to nobody who asks for any
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("127.0.0.1", 0))
    port = str(kept.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(int(WITHOUT_SHM is None)), tmp_path], text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=Path(__file__).parents[2],
            env=os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for process in ranks:
            out, err = process.communicate(timeout=600)
            assert out.strip() == str([(2.0, False, 1)] * (3 if WITHOUT_SHM is None else 2)), err
    finally:
        kept.close()
        for process in ranks:
            process.kill()


def dropped(comm: Comm) -> bool:
    """Whether the channel of another comm lives on without it."""
    mine = type(comm)()  # type: ignore[call-arg]
    all_sum(torch.ones(1), mine)
    channel = weakref.ref(mine._channel)  # type: ignore[attr-defined]
    gc.disable()
    try:
        del mine
        return channel() is not None
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", KINDS)
def test_a_comm_ends_without_the_garbage_collector(kind: str) -> None:
    assert run_processes(2, dropped, comm=kind) == [False, False]


def closed(comm: Comm) -> list[str]:
    """What verbs of another comm say once it is closed."""
    mine: Any = type(comm)()
    all_sum(torch.ones(1), mine)
    mine.close()
    said = []
    mine.close()
    for verb in (mine.check, lambda: mine.agree("x", {}), lambda: all_sum(torch.ones(1), mine)):
        with pytest.raises(PeerError) as raised:
            verb()
        said.append(str(raised.value))
    assert mine.empty((70_000,), torch.uint8, torch.device("cpu")).shape == (70_000,)
    return said


@pytest.mark.parametrize("kind", KINDS)
def test_every_verb_says_that_the_comm_is_closed(kind: str) -> None:
    for rank, said in enumerate(run_processes(2, closed, comm=kind)):
        assert said == [f"rank {rank}: the comm is closed; the comm is dead"] * 3


def closed_threads(comm: Comm) -> list[str]:
    """What verbs of a closed `LocalComm` say."""
    with pytest.raises(
        ValueError, match=r"comm of ranks \[0, 1\] of another comm is closed with it; close that comm, on"
    ):
        comm.sub([0, 1]).close()
    x = torch.ones(1)
    assert float(all_sum(x, comm)) == 2.0
    comm.close()
    comm.close()
    said = []
    for verb in (
        comm.check,
        lambda: comm.agree("x", {}),
        lambda: all_sum(x, comm),
        lambda: all_sum(x, comm.sub([0, 1])),
    ):
        with pytest.raises(PeerError) as raised:
            verb()
        said.append(str(raised.value).replace(" cannot go on", "").replace("; root cause:", ":"))
    return said


def test_a_local_comm_is_closed_as_well() -> None:
    for rank, said in enumerate(run_threads(2, closed_threads)):
        assert said == [f"rank {rank}: the comm is closed; the comm is dead"] * 4
    LocalComm().close()


def closed_after_a_failure(comm: Comm) -> str:
    """What a rank of another comm that died says once it has closed it."""
    mine: Any = type(comm)()
    with pytest.raises((PeerError, ValueError)):
        try:
            if comm.rank == 1:
                mine.abort("a test")
            all_sum(torch.ones(1), mine)
        finally:
            mine.close()
    mine.close()
    with pytest.raises(PeerError) as raised:
        mine.check()
    return str(raised.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_dead_comm_is_closed_by_each_rank(kind: str) -> None:
    for said in run_processes(2, closed_after_a_failure, comm=kind):
        assert "rank 1: a test; the comm is dead" in said


def outlives(comm: ShmComm) -> list[float]:
    """A tensor of the pool, after its comm was closed on all ranks."""
    mine = ShmComm()
    x = mine.empty((3,), torch.float32, torch.device("cpu")).fill_(comm.rank)
    mine.close()
    comm.agree("closed", {})
    return [float(v) for v in x + 1]


@pytest.mark.skipif(WITHOUT_SHM is not None, reason=WITHOUT_SHM or "")
def test_tensors_keep_their_memory_after_close() -> None:
    assert run_processes(2, outlives, comm="shm") == [[1.0] * 3, [2.0] * 3]
