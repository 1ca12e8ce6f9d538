"""Counts the messages of agreements. Ranks are threads, so there may be more of them than cores."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from seqpar.comm import PeerError
from seqpar.comm.base import ProcessChannel, ProcessComm
from seqpar.comm.failure import RootCause
from seqpar.comm.protocol import Sides, Stats, Tag, Work

T = TypeVar("T")
TIMEOUT = 60.0
STACK = 1 << 18  # bytes of a thread's stack


class CountingWorld:
    """The shared state of ranks. messages, bytes: sent by each rank. rounds: exchanges that each has waited for."""

    def __init__(self, size: int, timeout: float = TIMEOUT) -> None:
        self.size, self.timeout = size, timeout
        self.messages: Counter[int] = Counter()
        self.bytes: Counter[int] = Counter()
        self.rounds: Counter[int] = Counter()
        self._queues: dict[tuple[int, int], SimpleQueue[Any]] = {}
        self.cause: tuple[int, str] | None = None
        self.store = dist.HashStore()

    def queue(self, sender: int, receiver: int) -> SimpleQueue[Any]:
        """The messages from one rank to another."""
        # in one step: a defaultdict may make two queues for two threads that ask at once
        return self._queues.setdefault((sender, receiver), SimpleQueue())

    def comm(self, rank: int) -> CountingComm:
        """The comm of a rank."""
        comm = CountingComm.__new__(CountingComm)
        comm._join(_Channel(self, rank), (), Stats(), {}, "batch")
        return comm

    def run(self, call: Callable[[CountingComm], T]) -> list[T]:
        """The results of a call on every rank; each rank is a thread. The first error of a rank is raised again."""
        results: dict[int, Any] = {}
        errors: list[BaseException] = []

        def one(rank: int) -> None:
            try:
                results[rank] = call(self.comm(rank))
            except BaseException as error:
                errors.append(error)

        before = threading.stack_size(STACK)
        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        threading.stack_size(before)
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [results[rank] for rank in range(self.size)]


class CountedStore:
    """A store as one rank uses it. messages, bytes: of its calls, without those that ask for a key in vain."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.messages = self.bytes = 0

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> Any:
            found = getattr(self._store, name)(*given)
            if not (name == "check" and found is False):
                self.messages += 1
                self.bytes += sum(len(x) for x in (*given, found) if isinstance(x, (str, bytes)))
            return found

        return call


class _Channel(ProcessChannel):
    """One rank's end of a world."""

    def __init__(self, world: CountingWorld, rank: int) -> None:
        self.world, self.rank, self.size, self.timeout = world, rank, world.size, world.timeout
        self.owner: Any = SimpleNamespace(check=lambda: None)
        self.root_cause = RootCause(world.store, "root cause", rank)

    @property
    def cause(self) -> tuple[int, str] | None:
        return self.world.cause

    def fail(self, reason: str) -> None:
        self.world.cause = self.world.cause or (self.rank, reason)


class CountingComm(ProcessComm[_Channel]):
    """A rank of a `CountingWorld`."""

    def _post(self, sides: Sides, tag: Tag, stats: Stats) -> Work:
        world, me = self._channel.world, self._channel.rank
        for peer, several in sides.sends.items():
            world.messages[me] += 1
            world.bytes[me] += sum(x.nbytes for x in several)
            world.queue(me, peer).put((tag.numbers, [x.clone() for x in several]))
        return _CountingWork(world, me, sides.recvs, tag)


class _CountingWork:
    """The work that a rank waits for."""

    def __init__(self, world: CountingWorld, me: int, recvs: Mapping[int, list[Tensor]], tag: Tag) -> None:
        self._world, self._me, self._recvs, self._tag = world, me, recvs, tag

    def wait(self) -> None:
        self._world.rounds[self._me] += 1
        for peer, several in self._recvs.items():
            try:
                numbers, sent = self._world.queue(peer, self._me).get(timeout=self._world.timeout)
            except Empty:
                raise PeerError(f"waited for rank {peer}") from None
            assert numbers == self._tag.numbers, (numbers, self._tag)
            for x, y in zip(several, sent, strict=True):
                x.copy_(y)
