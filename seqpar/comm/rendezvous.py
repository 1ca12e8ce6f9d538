"""How the ranks of a group make a comm together: over the group's store, before there is anything faster."""

from __future__ import annotations

import json
import os
import platform
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from seqpar.comm.arguments import is_timeout
from seqpar.comm.header import hash63
from seqpar.comm.protocol import PeerError

T = TypeVar("T")

PATIENCE = 300.0  # seconds, of a rank whose timeout is none
GRACE = 5.0  # seconds that ranks may be apart when they give up


def machine() -> list[str]:
    """What processes that can map each other's memory have in common, and the name a reader knows it by last."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        processes = os.readlink("/proc/self/ns/pid")
    except (FileNotFoundError, PermissionError):
        boot = processes = ""
    return [boot, processes, platform.node()]


class Rendezvous:
    """The ranks of a group while they make something together: each says what it has, and hears what all have.

    name: of what is made, for errors; store: the group's; timeout: seconds to wait for a rank. Each rank writes a token
    of this meeting beside those that it sees of the others, again whenever one changes, and goes on when all have
    written the same: so every rank is here now, and whoever missed a meeting or left one early is here for this one.

    Raises: PeerError naming the ranks that did not come in time, also in what follows.
    """

    def __init__(self, name: str, store: Any, rank: int, size: int, timeout: Any) -> None:
        self._name, self._store, self._rank, self._size = name, store, rank, size
        # a wrong timeout is for the first round to tell everyone
        self._timeout = float(timeout) if is_timeout(timeout) else PATIENCE
        self._rounds = 0
        with self._held():
            self.number = hash63(self._gather())

    def _gather(self) -> list[str]:
        """The tokens of all ranks, by rank."""
        keys = [f"seqpar/{self._name}/present/{rank}" for rank in range(self._size)]
        own, written = secrets.token_hex(8), None
        for left in self._polls():
            lists = [
                json.loads(self._store.get(key)) if rank != self._rank and self._store.check([key]) else None
                for rank, key in enumerate(keys)
            ]
            tokens = [tokens_seen[rank] if tokens_seen else "" for rank, tokens_seen in enumerate(lists)]
            tokens[self._rank] = own
            if tokens != written:
                self._store.set(keys[self._rank], json.dumps(tokens))
                written = tokens
            if all(tokens_seen == tokens for rank, tokens_seen in enumerate(lists) if rank != self._rank):
                return tokens
            if not left:
                # who has written this token has been here
                raise self._missed([r for r, x in enumerate(lists) if r != self._rank and (not x or own not in x)])
        raise AssertionError("polls end with a raise")

    def _polls(self, seconds: float | None = None) -> Iterator[bool]:
        """Whether there is time left, again and again: until there is none, and once more."""
        deadline, pause = time.monotonic() + (self._timeout if seconds is None else seconds), 0.001
        while time.monotonic() <= deadline:
            yield True
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        yield False

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Says who holds the store if it does not answer."""
        try:
            yield
        except dist.DistError as error:
            raise PeerError(
                f"{self._name}: rank {self._rank} lost the store of the group while it waited for the other ranks: the "
                "process that holds it has ended, which is rank 0 unless a launcher keeps the store "
                f"({str(error).splitlines()[0]})"
            ) from error

    def _missed(self, missing: list[int]) -> PeerError:
        return PeerError(
            f"{self._name}: rank {self._rank} waited {self._timeout:g} s for ranks {missing} to come to its "
            "constructor, which is collective; make it on every rank of the group"
        )

    def hear(self, make: Callable[[], T]) -> list[T]:
        """What `make` returned on every rank, by rank; it must be made of what JSON knows.

        Raises: on every rank if it raised on any: here the error itself, elsewhere one that quotes it, ValueError for a
        ValueError and RuntimeError for others. PeerError naming the ranks that did not come in time.
        """
        error: Exception | None = None
        own: dict[str, Any]
        try:
            own = {"made": make()}
        except Exception as raised:
            error = raised
            own = {"error": f"{type(raised).__name__}: {raised}", "value": isinstance(raised, ValueError)}
        with self._held():
            # also with an error: who is at the next meeting already cannot be found here
            answers = self._swap(own)
        if error is not None:
            raise error
        for rank, answer in enumerate(answers):
            if "error" in answer:
                kind = ValueError if answer["value"] else RuntimeError
                raise kind(f"{self._name}: rank {rank} could not take part: {answer['error']}")
        return [answer["made"] for answer in answers]

    def connect(self, make: Callable[[], T]) -> T:
        """What `make` returns, which waits for the same of all other ranks, and returned there too.

        It runs on a thread of its own, so that Ctrl-C need not wait for it.

        Raises: RuntimeError quoting the rank where it failed first, PeerError naming the ranks that left.
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
            # who is at it longer than this has left
            answers = self._swap({} if done else {"lost": lost}, min(self._timeout, GRACE))
        if losses := [(*answer["lost"], rank) for rank, answer in enumerate(answers) if "lost" in answer]:
            _, why, rank = min(losses)
            raise RuntimeError(f"{self._name}: rank {rank} could not connect to the others: {why}")
        return results.get()

    def _swap(self, own: dict[str, Any], seconds: float | None = None) -> list[dict[str, Any]]:
        """What every rank wrote in this round, by rank; waits for `seconds`, else for the timeout."""
        self._rounds += 1
        keys = [f"seqpar/{self._name}/{self.number}/{self._rounds}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], json.dumps(own))
        missing = list(range(self._size))
        for left in self._polls(seconds):
            missing = [rank for rank in missing if not self._store.check([keys[rank]])]
            if not missing:
                break
            if not left:
                raise self._missed(missing)
        return [json.loads(self._store.get(key)) for key in keys]
