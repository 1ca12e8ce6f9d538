"""Agreement of many ranks: by pairs, in rounds that double whom a rank knows of, with what few ranks say."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from bench.lib.counting import CountingComm, CountingWorld
from seqpar import Comm, native
from seqpar.comm import PeerError, base
from seqpar.testing import run_processes
from tests.comm import cases

SIZES = (2, 3, 5, 8, 13, 32)


@pytest.fixture(autouse=True)
def in_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "DIRECT", 1)


def told(size: int, call: Any) -> list[Any]:
    """What a call returns on each rank, or raises, in words; the comm lives afterwards."""

    def rank(comm: CountingComm) -> Any:
        try:
            found = call(comm)
        except (TypeError, ValueError) as error:
            found = f"{type(error).__name__}: {error}"
        comm.agree("afterwards", {})
        return found

    return CountingWorld(size).run(rank)


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_hears_of_every_other_one(size: int) -> None:
    heard = [{rank} for rank in range(size)]
    stages = sorted({stage for rank in range(size) for stage, _ in base.pairs(rank, size)})
    assert len(stages) <= math.ceil(math.log2(size)) + 1
    for stage in stages:
        meet = {rank: peer for rank in range(size) for s, peer in base.pairs(rank, size) if s == stage}
        assert all(meet[peer] == rank for rank, peer in meet.items())
        heard = [heard[rank] | heard[meet.get(rank, rank)] for rank in range(size)]
    assert all(known == set(range(size)) for known in heard)


@pytest.mark.parametrize("size", SIZES)
def test_agreeing_takes_24_bytes_a_round(size: int) -> None:
    world = CountingWorld(size)
    world.run(lambda comm: comm.agree("attention", {"heads": 8}))
    assert max(world.messages.values()) <= math.ceil(math.log2(size)) + 1
    assert all(world.bytes[rank] == 24 * world.messages[rank] for rank in range(size))


@pytest.mark.parametrize("size", SIZES)
def test_gathering_returns_every_ranks_value(size: int) -> None:
    for most in (3, 5000):  # some hundred bytes, and more than travel along

        def values(comm: CountingComm, most: int = most) -> Any:
            return comm.gather("lengths", list(range(comm.rank % 4, most)), facts={"heads": 8})

        assert told(size, values) == [[list(range(rank % 4, most)) for rank in range(size)]] * size


@pytest.mark.parametrize("size", SIZES[1:])
def test_what_differs_is_named_on_every_rank(size: int) -> None:
    last = size - 1

    def heads(comm: CountingComm) -> None:
        comm.agree("attention", {"heads": 4 if comm.rank == last else 8, "dim": 64})

    for text in told(size, heads):
        assert text.startswith("ValueError: attention: ranks differ in heads: 8 on ranks 0") and "4 on rank" in text

    def facts(comm: CountingComm) -> None:
        comm.gather("a forward", comm.rank, facts={"heads": 4 if comm.rank == last else 8})

    assert all("a forward: ranks differ in heads" in text for text in told(size, facts))

    def refuses(comm: CountingComm) -> None:
        comm.agree("attention", {}, TypeError("q is a list") if comm.rank == 1 else None)

    quoted = "ValueError: attention: rank 1 refused its arguments: TypeError: q is a list"
    assert told(size, refuses) == ["TypeError: q is a list" if rank == 1 else quoted for rank in range(size)]

    def all_refuse(comm: CountingComm) -> None:
        comm.gather("lengths", 1, ValueError("none"))

    assert told(size, all_refuse) == ["ValueError: none"] * size

    def mixed(comm: CountingComm) -> None:
        comm.gather("a loss", [1]) if comm.rank == 1 else comm.agree("a forward", {})

    for text in told(size, mixed):
        assert re.search(
            r"ranks differ in the call: a forward \(comparing arguments\).*; a loss \(gathering\) on", text
        )


@pytest.mark.parametrize("size", SIZES[1:])
def test_what_one_rank_cannot_tell_is_its_error_everywhere(size: int) -> None:
    for rank, texts in enumerate(told(size, cases.untold)):
        assert ["rank 1 refused its arguments" in text for text in texts] == [rank != 1] * 4


def test_subs_agree_among_themselves() -> None:
    def rank(comm: CountingComm) -> list[int]:
        mine = [r for r in range(comm.size) if r % 3 == comm.rank % 3]
        return comm.sub(mine).gather("thirds", comm.rank)

    assert told(11, rank) == [[r for r in range(11) if r % 3 == rank % 3] for rank in range(11)]


def agrees(comm: Comm) -> Any:
    """Both ways between processes, and what differs."""
    base.DIRECT = 1
    comm.agree("attention", {"heads": 8})
    found = comm.gather("ranks", comm.rank), comm.gather("much", "x" * 30_000 * (comm.rank + 1))[-1][:3]
    with pytest.raises(ValueError, match="ranks differ in heads: 8 on ranks 0, 1; 9 on rank 2"):
        comm.agree("attention", {"heads": 8 + comm.rank // 2})
    comm.agree("afterwards", {})
    return found


def silent(comm: Comm, folder: Path) -> None:
    """Rank 2 does something else; rank 1 waits for rank 0, which waits for it."""
    base.DIRECT = 1
    comm.agree("before", {})
    if comm.rank == 2:
        return cases.until(lambda: all((folder / other).exists() for other in "01"))
    cases.impatient(comm, 1.0)
    comm.agree("attention", {"heads": 8})


KINDS = ["gloo", pytest.param("shm", marks=pytest.mark.skipif(native.missing() is not None, reason="not compiled"))]


@pytest.mark.parametrize("kind", KINDS)
def test_processes_agree_in_rounds(kind: str) -> None:
    assert run_processes(3, agrees, comm=kind) == [([0, 1, 2], "xxx")] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_whoever_does_not_come_is_named_by_all_who_wait(kind: str, tmp_path: Path) -> None:
    with pytest.raises(PeerError):
        run_processes(3, cases.witness, tmp_path, silent, tmp_path, comm=kind)
    for rank in range(2):
        text = (tmp_path / str(rank)).read_text()
        assert f"PeerError: rank {rank}" in text
        assert "in attention (comparing arguments): waited 1 s for rank 2" in text
