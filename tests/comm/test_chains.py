"""A rank that waits too long names the rank that holds everyone up, though it waits for another one itself."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from seqpar import Comm, native
from seqpar.comm import PeerError, failure
from seqpar.comm.protocol import DEAD
from seqpar.comm.shm import comm as shm
from seqpar.comm.shm.board import PEER
from seqpar.testing import run_processes
from tests.comm.cases import _is_dead, impatient, tag, until

WITHOUT_SHM = native.missing()
KINDS = ["gloo", pytest.param("shm", marks=pytest.mark.skipif(WITHOUT_SHM is not None, reason=WITHOUT_SHM or ""))]


def another(comm: Comm, timeout: float, impatient_ranks: Sequence[int]) -> Any:
    """Another comm, some of whose ranks give up after a time from now on; the constructor had all it needed."""
    mine: Any = type(comm)(timeout=120.0)  # type: ignore[call-arg]
    if mine.rank in impatient_ranks:
        impatient(mine, timeout)
    comm.agree("all have another", {})
    return mine


def awaits(mine: Any, peer: int, after: float = 0.0) -> str:
    """What the error says of a wait for a message that does not come."""
    time.sleep(after)
    # ranks that wait have more time to tell whom they wait for: the machine may be busy
    with mock.patch.object(failure, "ANSWERING", 2.0), mock.patch.object(shm, "BEATING", 2.0):
        with pytest.raises(PeerError) as raised:
            mine.exchange({}, {peer: [torch.empty(1)]}, tag=tag(mine.rank)).wait()
        return str(raised.value)


def in_a_row(comm: Comm) -> str:
    """Each rank waits for the next one, the later the higher its number; the last one does not come."""
    mine = another(comm, 3.0, [0])
    if mine.rank < mine.size - 1:
        return awaits(mine, mine.rank + 1, 0.5 * mine.rank)
    until(lambda: _is_dead(mine))
    return ""


@pytest.mark.parametrize(("size", "through"), [(3, "rank 1 waits"), (4, "ranks 1, 2 wait")])
@pytest.mark.parametrize("kind", KINDS)
def test_the_rank_that_holds_all_up_is_named(kind: str, size: int, through: str) -> None:
    expected = f"waited 3 s for rank {size - 1}, for which {through} too; the comm is dead; make every rank take part"
    first, *others, _ = run_processes(size, in_a_row, comm=kind)
    assert first.startswith("rank 0: in call") and expected in first and f"if rank {size - 1} only needs" in first
    assert all(f"root cause: rank 0: in call {first.partition(' call ')[2]}" in text for text in others)


def behind(comm: Comm) -> str:
    """Rank 2 waits for rank 0, which waits for rank 1, which does not come."""
    mine = another(comm, 2.0, [0, 2])
    if mine.rank != 1:
        return awaits(mine, 1 - mine.rank // 2, 0.5 * mine.rank)
    until(lambda: _is_dead(mine))
    return ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_whose_peer_asks_others_does_not_take_it_for_lost(kind: str) -> None:
    first, _, behind_it = run_processes(3, behind, comm=kind)
    assert "waited 2 s for rank 1" in first and first.startswith("rank 0: in call")
    assert f"root cause: {first.partition(DEAD)[0]}" in behind_it


def stopped(comm: Comm) -> str:
    """Rank 1 is stopped while it waits for rank 2."""
    process = comm.gather("processes", os.getpid())[1]
    mine = another(comm, 3.0, [0])
    if mine.rank == 0:
        return awaits(mine, 1)
    if mine.rank == 1:
        threading.Timer(0.5, os.kill, (process, signal.SIGSTOP)).start()
        return awaits(mine, 2)
    try:
        until(lambda: _is_dead(mine))
    finally:
        os.kill(process, signal.SIGCONT)
    return ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_was_stopped_while_it_waits_is_named_itself(kind: str) -> None:
    first, second, _ = run_processes(3, stopped, comm=kind)
    assert "waited 3 s for rank 1" in first and ", for which" not in first
    assert "root cause: rank 0: in call" in second


def in_a_circle(comm: Comm) -> str:
    """Each rank waits for the next one."""
    return awaits(another(comm, 2.0, range(comm.size)), (comm.rank + 1) % comm.size)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_wait_for_each_other_name_the_next_one(kind: str) -> None:
    for rank, text in enumerate(run_processes(3, in_a_circle, comm=kind)):
        cause = re.search(r"root cause: rank (\d)", text)
        first = int(cause[1]) if cause else rank
        assert f"waited 2 s for rank {(first + 1) % 3}" in text and ", for which" not in text


def waits_over(comm: Comm) -> list[int]:
    """The words of shared memory after waits that were long enough to write one."""
    mine: Any = type(comm)(timeout=60.0)  # type: ignore[call-arg]
    board = mine._channel.board
    for _ in range(2):
        if comm.rank == 1:
            until(lambda: board.read()[0] & PEER)
        mine.agree("late", {})
    comm.agree("all have waited", {})
    return [word % 2**32 for word in board.read()] + [int(board.read()[0] > 0)]


@pytest.mark.skipif(WITHOUT_SHM is not None, reason=WITHOUT_SHM or "")
def test_a_wait_that_is_over_leaves_no_word() -> None:
    assert run_processes(2, waits_over, comm="shm") == [[0, 0, 1]] * 2
