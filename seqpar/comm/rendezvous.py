"""The rendezvous of a group's ranks, which create a comm together: over the group's store, before any faster way."""

from __future__ import annotations

import json
import os
import platform
import queue
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from seqpar.comm.arguments import PATIENCE, is_timeout
from seqpar.comm.header import hash63
from seqpar.comm.protocol import Claim, PeerError, raise_first

T = TypeVar("T")

FAN = 8  # ranks right below one in the tree of a round
LEFT = "left"  # the state of a meeting that a rank has left before all had come
GRACE = 5.0  # seconds by which ranks may differ when they give up
LEAVING = 60.0  # seconds after its own connection in which a rank waits for those of others, at most its timeout


def machine() -> list[str]:
    """Identifiers shared by processes that can map each other's memory; the last one is the name for readers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        processes = os.readlink("/proc/self/ns/pid")
    except (FileNotFoundError, PermissionError):
        boot = processes = ""
    return [boot, processes, platform.node()]


class Rendezvous:
    """A meeting of a group's ranks: each rank contributes something and receives all contributions.

    name: of the object to create, for errors. store: the group's. timeout: seconds to wait for a rank.

    Meetings have numbers, and the store counts who comes. The last rank to call opens a meeting, and a rank that leaves
    before that ends it for all, in one atomic write each; the others go on to the next one. So all ranks are present in
    an open meeting, even one that missed an earlier one or left it early. Contributions go up a tree of ranks and come
    down in one piece: a rank sends and asks for a few messages, however many ranks there are.

    Raises: PeerError naming the ranks that did not come in time; also from the methods.
    """

    def __init__(self, name: str, store: Any, rank: int, size: int, timeout: Any) -> None:
        self._name, self._store, self._rank, self._size = name, store, rank, size
        # the first round reports a wrong timeout to all ranks
        self._timeout = float(timeout) if is_timeout(timeout) else PATIENCE
        self._rounds = 0
        with self._held():
            self.number = hash63(self._gather())

    def _gather(self) -> str:
        """A token of the meeting in which all ranks are."""
        key, polls, seen = f"seqpar/{self._name}/meeting", self._polls(self._timeout), {self._rank}
        meeting = self._settle(key, "", "0")
        while True:
            at = f"seqpar/{self._name}/meetings/{meeting}"
            token = self._attend(at, polls)
            following = str(int(meeting) + 1)
            self._settle(key, meeting, following)
            if token != LEFT:
                return token
            present = {rank for rank in range(self._size) if self._store.check([f"{at}/{rank}"])}
            seen |= present
            if not next(polls, False):
                everyone = set(range(self._size))
                raise self._missed(sorted(everyone - seen or everyone - present), self._timeout)
            meeting = self._settle(key, meeting, following)

    def _attend(self, at: str, polls: Iterator[bool]) -> str:
        """The token of a meeting when all ranks have come, or `LEFT`."""
        state = f"{at}/state"
        self._store.set(f"{at}/{self._rank}", "here")
        if self._store.add(f"{at}/count", 1) == self._size:
            return self._settle(state, "", secrets.token_hex(8))
        try:
            for left in polls:
                if self._store.check([state]):
                    return str(self._store.get(state).decode())
                if not left:
                    break
        except BaseException:
            self._settle(state, "", LEFT)
            raise
        return self._settle(state, "", LEFT)

    def _settle(self, key: str, before: str, after: str) -> str:
        """The value of a key, `after` if it was `before`; an unset one counts as empty."""
        return str((self._store.compare_set(key, before, after) or after.encode()).decode())

    def _polls(self, seconds: float) -> Iterator[bool]:
        """True while time is left, then once False, with pauses in between."""
        deadline, pause = time.monotonic() + seconds, 0.001
        while time.monotonic() <= deadline:
            yield True
            time.sleep(pause)
            pause = min(2 * pause, max(0.02, 1e-4 * self._size))  # one store answers all ranks
        yield False

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Names the likely owner of the store if the store does not answer."""
        try:
            yield
        except dist.DistError as error:
            raise PeerError(
                f"{self._name}: rank {self._rank} lost the store of the group while it waited for the other ranks: the "
                "process that holds it has ended, which is rank 0 unless a launcher keeps the store "
                f"({str(error).splitlines()[0]})"
            ) from None

    def _missed(self, missing: list[int], seconds: float) -> PeerError:
        return PeerError(
            f"{self._name}: rank {self._rank} waited {seconds:g} s for ranks {missing} to call its "
            "constructor, which is collective; make it on every rank of the group"
        )

    def hear(self, make: Callable[[], T], **alike: object) -> list[T]:
        """The results of `make` on every rank, by rank; they must be JSON values. alike: arguments of the constructor.

        Raises: on every rank if it raised on any: on that rank the error itself, on others ValueError (for a
        ValueError) or RuntimeError quoting it. ValueError if ranks differ in one of `alike`. PeerError naming the ranks
        that did not come in time.
        """
        error: Exception | None = None
        own: dict[str, Any]
        try:
            own = {"made": make(), "claim": Claim.of(self._name, alike, None)}
        except Exception as raised:
            error = raised
            own = {"error": f"{type(raised).__name__}: {raised}", "value": isinstance(raised, ValueError)}
        with self._held():
            # after an error too: a rank that is already at the next meeting cannot be met here
            answers = self._swap(own)
        if error is not None:
            raise error
        for rank, answer in enumerate(answers):
            if "error" in answer:
                kind = ValueError if answer["value"] else RuntimeError
                raise kind(f"{self._name}: rank {rank} could not take part: {answer['error']}")
        raise_first([Claim(*answer["claim"]) for answer in answers], None)
        return [answer["made"] for answer in answers]

    def connect(self, make: Callable[[], T]) -> T:
        """The result of `make`, which waits for the same of all other ranks and has returned on all of them.

        It runs on its own thread, so that Ctrl-C need not wait for it.

        Raises: RuntimeError quoting the rank that failed first; PeerError naming the ranks that left.
        """
        start, results, failures = time.monotonic(), queue.SimpleQueue[T](), queue.SimpleQueue[tuple[float, str]]()

        def run() -> None:
            try:
                results.put(make())
            except RuntimeError as error:
                failures.put((time.monotonic() - start, str(error).splitlines()[0]))

        thread = threading.Thread(target=run, name=f"seqpar {self._name} connects", daemon=True)
        thread.start()
        thread.join(self._timeout + GRACE)
        done = not results.empty()
        lost = (self._timeout, "the connection was not made in time") if failures.empty() else failures.get()
        with self._held():
            answers = self._swap({} if done else {"lost": lost}, min(self._timeout, LEAVING))
        if losses := [(*answer["lost"], rank) for rank, answer in enumerate(answers) if "lost" in answer]:
            _, why, rank = min(losses)
            raise RuntimeError(f"{self._name}: rank {rank} could not connect to the others: {why}")
        return results.get()

    def _swap(self, own: dict[str, Any], seconds: float | None = None) -> list[dict[str, Any]]:
        """Every rank's contribution to this round, by rank. seconds: to wait, by default the timeout."""
        self._rounds += 1
        seconds = self._timeout if seconds is None else seconds
        at, polls = f"seqpar/{self._name}/{self.number}/{self._rounds}", self._polls(seconds)
        self._store.set(f"{at}/here/{self._rank}", "")
        known = [(self._rank, own)]
        for child in children(self._rank, self._size):
            known += self._awaited(at, str(child), polls, seconds)
        known.sort(key=lambda pair: pair[0])
        self._store.set(f"{at}/{self._rank or 'all'}", zlib.compress(json.dumps(known).encode()))
        return [contribution for _, contribution in self._awaited(at, "all", polls, seconds)]

    def _awaited(self, at: str, who: str, polls: Iterator[bool], seconds: float) -> list[tuple[int, dict[str, Any]]]:
        """What a rank has written for itself and all below it in the tree, or the first one for all."""
        for left in polls:
            if self._store.check([f"{at}/{who}"]):
                contributions: list[tuple[int, dict[str, Any]]] = json.loads(
                    zlib.decompress(self._store.get(f"{at}/{who}"))
                )
                return contributions
            if not left:
                break
        missing = [rank for rank in range(self._size) if not self._store.check([f"{at}/here/{rank}"])]
        raise self._missed(missing or [0 if who == "all" else int(who)], seconds)


def children(rank: int, size: int) -> range:
    """The ranks right below one in the tree of a round."""
    return range(min(FAN * rank + 1, size), min(FAN * rank + FAN + 1, size))
