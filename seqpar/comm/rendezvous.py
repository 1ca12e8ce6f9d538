"""The rendezvous of a group's ranks, which create a comm together: over the group's store, before any faster way."""

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

from seqpar.comm.arguments import PATIENCE, is_timeout
from seqpar.comm.header import hash63
from seqpar.comm.protocol import PeerError

T = TypeVar("T")

GRACE = 5.0  # seconds by which ranks may differ when they give up


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

    name: of the object to create, for errors. store: the group's. timeout: seconds to wait for a rank. Each rank writes
    a token of this meeting with the tokens that it sees of the others, again at every change, and continues when all
    have written the same. So all ranks are present, even one that missed an earlier meeting or left it early.

    Raises: PeerError naming the ranks that did not come in time; also from the methods.
    """

    def __init__(self, name: str, store: Any, rank: int, size: int, timeout: Any) -> None:
        self._name, self._store, self._rank, self._size = name, store, rank, size
        # the first round reports a wrong timeout to all ranks
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
                # whoever wrote this token has been in this meeting
                raise self._missed([r for r, x in enumerate(lists) if r != self._rank and (not x or own not in x)])
        raise AssertionError("polls end with a raise")

    def _polls(self, seconds: float | None = None) -> Iterator[bool]:
        """True while time is left, then once False, with pauses in between."""
        deadline, pause = time.monotonic() + (self._timeout if seconds is None else seconds), 0.001
        while time.monotonic() <= deadline:
            yield True
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
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
            ) from error

    def _missed(self, missing: list[int]) -> PeerError:
        return PeerError(
            f"{self._name}: rank {self._rank} waited {self._timeout:g} s for ranks {missing} to come to its "
            "constructor, which is collective; make it on every rank of the group"
        )

    def hear(self, make: Callable[[], T]) -> list[T]:
        """The results of `make` on every rank, by rank; they must be JSON values.

        Raises: on every rank if it raised on any: on that rank the error itself, on others ValueError (for a
        ValueError) or RuntimeError quoting it. PeerError naming the ranks that did not come in time.
        """
        error: Exception | None = None
        own: dict[str, Any]
        try:
            own = {"made": make()}
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
            # a rank that takes longer than this has left
            answers = self._swap({} if done else {"lost": lost}, min(self._timeout, GRACE))
        if losses := [(*answer["lost"], rank) for rank, answer in enumerate(answers) if "lost" in answer]:
            _, why, rank = min(losses)
            raise RuntimeError(f"{self._name}: rank {rank} could not connect to the others: {why}")
        return results.get()

    def _swap(self, own: dict[str, Any], seconds: float | None = None) -> list[dict[str, Any]]:
        """Every rank's contribution to this round, by rank. seconds: to wait, by default the timeout."""
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
