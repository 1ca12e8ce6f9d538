"""How the ranks of one machine find each other's memory: over the group's store, before there is anything faster."""

from __future__ import annotations

import json
import os
import platform
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from seqpar.comm.header import hash63
from seqpar.comm.protocol import PeerError

T = TypeVar("T")

PATIENCE = 300.0  # seconds, of a rank whose timeout is none


def machine() -> list[str]:
    """What processes that can map each other's memory have in common, and the name a reader knows it by last."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        processes = os.readlink("/proc/self/ns/pid")
    except OSError:
        boot = processes = ""
    return [boot, processes, platform.node()]


class Meeting:
    """The ranks of a group while they make something together: each says what it has, and hears what all have.

    name: of what is made, for errors; store: the group's; timeout: seconds to wait for a rank. Each rank writes a token
    of this meeting beside those that it sees of the others, again whenever one changes, and goes on when all have
    written the same: so every rank is here now, and whoever missed a meeting or left one early is here for this one.

    Raises: PeerError naming the ranks that did not come in time.
    """

    def __init__(self, name: str, store: Any, rank: int, size: int, timeout: float) -> None:
        self._name, self._store, self._rank, self._size = name, store, rank, size
        # a wrong timeout is for the first round to tell everyone
        self._timeout = float(timeout) if isinstance(timeout, (int, float)) and timeout > 0 else PATIENCE
        self.number = hash63(self._gather())
        self._rounds = 0

    def _gather(self) -> list[str]:
        """The tokens of all ranks, by rank."""
        keys = [f"seqpar/{self._name}/present/{rank}" for rank in range(self._size)]
        own, written, pause = secrets.token_hex(8), None, 0.001
        deadline = time.monotonic() + self._timeout
        while True:
            found = [
                json.loads(self._store.get(key)) if rank != self._rank and self._store.check([key]) else None
                for rank, key in enumerate(keys)
            ]
            tokens = [each[rank] if each else "" for rank, each in enumerate(found)]
            tokens[self._rank] = own
            if tokens != written:
                self._store.set(keys[self._rank], json.dumps(tokens))
                written, pause = tokens, 0.001
            if all(each == tokens for rank, each in enumerate(found) if rank != self._rank):
                return tokens
            if time.monotonic() > deadline:
                # who has written this token has been here
                raise self._missed([r for r, x in enumerate(found) if r != self._rank and (not x or own not in x)])
            time.sleep(pause)
            pause = min(2 * pause, 0.02)

    def _missed(self, missing: list[int]) -> PeerError:
        return PeerError(
            f"{self._name}: rank {self._rank} waited {self._timeout:g} s for ranks {missing} to come to its "
            "constructor, which is collective"
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
        self._rounds += 1
        keys = [f"seqpar/{self._name}/{self.number}/{self._rounds}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], json.dumps(own))
        try:
            # also with an error: who is at the next meeting already cannot be found here
            self._store.wait(keys, timedelta(seconds=self._timeout))
        except RuntimeError as raised:
            raise self._missed([rank for rank, key in enumerate(keys) if not self._store.check([key])]) from raised
        if error is not None:
            raise error
        answers = [json.loads(self._store.get(key)) for key in keys]
        for rank, answer in enumerate(answers):
            if "error" in answer:
                kind = ValueError if answer["value"] else RuntimeError
                raise kind(f"{self._name}: rank {rank} could not take part: {answer['error']}")
        return [answer["made"] for answer in answers]
