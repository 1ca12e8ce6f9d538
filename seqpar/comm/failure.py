"""How ranks learn that a group is dead: a root cause in its store, and a monitor of works that cannot time out.

A fork of a rank's process has its memory and connections, but is not a rank: see `Owner`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from seqpar.comm.protocol import DEAD, PeerError

log = logging.getLogger("seqpar.comm")

T = TypeVar("T")

Range = tuple[int, int]  # of memory: its address and bytes

ANSWERING = 1.2  # seconds in which a rank that waits has answered whom it waits for: two of its looks


def weakly(method: Callable[..., T], gone: T) -> Callable[..., T]:
    """A bound method as a function that does not keep its object alive, and returns `gone` after that object's end.

    What a channel gives to a part of its own must not hold the channel: a cycle would keep the group's store until the
    garbage collector runs, and rank 0 of a new group listens at the same port.
    """
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> T:
        found = reference()
        return gone if found is None else found(*arguments)

    return call


def parsed_cause(text: str) -> tuple[int, str]:
    """The rank and the reason of a root cause, which is written as both with a space between."""
    rank, _, reason = text.partition(" ")
    return int(rank), reason


class RootCause:
    """The reason for a group's death, in its store: the first rank to write it wins.

    A dead store neither hangs nor hides an error: each access takes at most `patience` seconds, and a failed one counts
    as empty.
    """

    def __init__(self, store: Any, key: str, rank: int, *, patience: float = 2.0) -> None:
        self._store, self._key, self._rank, self._patience = store, key, rank, patience

    def close(self) -> None:
        """Let go of the store."""
        self._store = None

    def write(self, reason: str) -> tuple[int, str]:
        """The valid (rank, reason): this one, unless another rank was first."""
        own = f"{self._rank} {reason}"
        found = self._patiently(lambda: self._store.compare_set(self._key, "", own))
        return parsed_cause(found.decode() if found else own)

    def read(self, grace: float = 0.0) -> tuple[int, str] | None:
        """The (rank, reason) in the store, after waiting up to `grace` seconds for one."""
        deadline = time.monotonic() + min(grace, self._patience)
        text = self._patiently(lambda: self._poll(deadline, ANSWERING if grace else 0.0))
        return parsed_cause(text.decode()) if text else None

    def roll_call(self, name: str, ranks: Sequence[int], grace: float = 1.0) -> set[int]:
        """The ranks among these that answer within `grace` seconds, including this one."""
        keys = {rank: f"{self._key}/{name}/{rank}" for rank in ranks}
        deadline = time.monotonic() + grace
        self._patiently(lambda: self._store.set(keys[self._rank], "here"))

        def listen() -> set[int]:
            here: set[int] = set()
            while len(here) < len(keys) and time.monotonic() < deadline:
                here |= {rank for rank, key in keys.items() if rank not in here and self._store.check([key])}
                time.sleep(0.02)
            return here

        return self._patiently(listen) or {self._rank}

    def chain(self, peer: int) -> list[int]:
        """Ranks from an awaited one on: each says that it waits for the next one, but the last does not answer.

        Only `peer` if they wait for each other in a cycle, or if the store does not answer.
        """
        found, deadline = [peer], time.monotonic() + ANSWERING

        def follow() -> list[int]:
            self.answer(peer)
            self._store.set(f"{self._key}/asked", "")
            while time.monotonic() < deadline:
                key = f"{self._key}/waits/{found[-1]}"
                if not self._store.check([key]):
                    time.sleep(0.02)
                    continue
                after = int(self._store.get(key))
                if after in (self._rank, *found):
                    return [peer]
                found.append(after)
            return found

        return self._patiently(follow) or [peer]

    def asked(self) -> bool:
        """Whether some rank has asked for the chain of waits. Blocks on the store; not for a thread others wait on."""
        return bool(self._store.check([f"{self._key}/asked"]))

    def answer(self, peer: int) -> None:
        """Report the ranks that this one waits for, on the calling thread."""
        self._store.set(f"{self._key}/waits/{self._rank}", str(peer))

    def note_refusal(self, agreement: str, why: str) -> None:
        """Write why this rank refuses a call, before it sends word of it: others may not compare that call."""
        self._patiently(lambda: self._store.set(f"{self._key}/refused/{agreement}/{self._rank}", why))

    def refusal(self, agreement: str, rank: int) -> str:
        """Why a rank refused a call, or ""."""
        key = f"{self._key}/refused/{agreement}/{rank}"
        found = self._patiently(lambda: bytes(self._store.get(key)) if self._store.check([key]) else b"")
        return (found or b"").decode()

    def _poll(self, deadline: float, asking: float) -> bytes | None:
        """The cause, if it comes before the deadline, or `asking` seconds later where a rank asks others before."""
        while not self._store.check([self._key]):
            late = time.monotonic() - deadline
            if late >= asking or (late >= 0 and not self.asked()):
                return None
            time.sleep(0.02)
        return bytes(self._store.get(self._key))

    def _patiently(self, access: Callable[[], T]) -> T | None:
        # at the end of the process a thread would never start, and this one would wait for it
        if self._store is None or sys.is_finalizing():
            return None
        box: list[T] = []

        def run() -> None:
            try:
                box.append(access())
            except RuntimeError as error:
                log.info("rank %d: the group's store does not answer: %s", self._rank, error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(self._patience + 1.0)
        return box[0] if box else None


class Monitor:
    """Watches works that cannot time out by themselves, in the order of posting, on its own thread.

    A work has `timeout` seconds from the completion of the previous one. After that, or if the work failed,
    `fail(reason)` is called. While a work is outstanding, `look()` returns about once a second whether the group is
    dead. The thread ends after a while without works.
    """

    def __init__(
        self, timeout: float, fail: Callable[[str], object], look: Callable[[], bool], *, poll: float = 0.05
    ) -> None:
        self._timeout, self._fail, self._look, self._poll = timeout, fail, look, poll
        self._changed = threading.Condition()
        self._outstanding: deque[tuple[Sequence[Any], str, Sequence[Range]]] = deque()
        self._running = False

    def watch(self, works: Sequence[Any], waiting: str, ranges: Sequence[Range] = ()) -> None:
        """Watch works (objects with ``is_completed()``). waiting: what they wait for, for the error.

        ranges: the memory that they write.
        """
        with self._changed:
            self._outstanding.append((works, waiting, ranges))
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="seqpar comm monitor", daemon=True).start()
            self._changed.notify()

    def unwritten(self) -> list[Range]:
        """The memory of works that are not complete."""
        with self._changed:
            outstanding = list(self._outstanding)
        return [
            place for works, _, ranges in outstanding if not all(completed(work) for work in works) for place in ranges
        ]

    def _run(self) -> None:
        since = looked = time.monotonic()
        while True:
            with self._changed:
                if not self._outstanding:
                    self._changed.wait(5.0)
                    since = looked = time.monotonic()
                if not self._outstanding:
                    self._running = False
                    return
                works, waiting, _ = self._outstanding[0]
            now = time.monotonic()
            try:
                over = all(work.is_completed() for work in works)
            except RuntimeError as error:
                return self._end(f"failed {waiting}: {error}")
            if over:
                with self._changed:
                    self._outstanding.popleft()
                since = looked = now
            elif now - since >= self._timeout:
                return self._end(f"waited {self._timeout:g} s {waiting}")
            elif now - looked >= 1.0 and self._look():
                return self._end(None)
            else:
                looked = now if now - looked >= 1.0 else looked
                time.sleep(self._poll)

    def _end(self, reason: str | None) -> None:
        try:
            if reason is not None:
                self._fail(reason)
        finally:
            with self._changed:
                self._outstanding.clear()
                self._running = False


def completed(work: Any) -> bool:
    """Whether a work is complete; one that failed is not."""
    try:
        return bool(work.is_completed())
    except RuntimeError:
        return False


_owners: weakref.WeakSet[Owner] = weakref.WeakSet()


def in_some_comm() -> bool:
    """Whether this process is a rank of a comm of processes."""
    return any(owner.in_own_process for owner in _owners)


class Owner:
    """The process that created a comm.

    holder: the object that keeps a comm alive. held: resources released with it, at the latest when the process ends. A
    fork never releases them: destructors of torch.distributed wait for threads that a fork does not have.
    """

    def __init__(self, holder: object, rank: int, held: list[object]) -> None:
        self._process, self._rank = os.getpid(), rank
        weakref.finalize(holder, _let_go, self._process, held)
        _owners.add(self)

    @property
    def in_own_process(self) -> bool:
        """Whether this is the owner, not a fork of it."""
        return os.getpid() == self._process

    def check(self) -> None:
        """Raise PeerError in a fork."""
        if os.getpid() != self._process:
            raise PeerError(
                f"the comm of rank {self._rank} belongs to process {self._process}, not to a fork of it; use it in "
                "that process alone"
            )


def _let_go(process: int, held: list[object]) -> None:
    if os.getpid() == process:
        held.clear()
    else:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


def then(peer: int, hint: str) -> str:
    """How the reason for an error ends if a peer was lost in an exchange with this hint."""
    return f"{DEAD}; see in the log of rank {peer} why it ended, or {hint}" if hint else ""


def waited(doing: str, timeout: float, *peers: int, more: str = "", hint: str = "") -> str:
    """The reason for an error: a rank was `doing` something that needs peers, for longer than the timeout."""
    who = f"rank{'s' if len(peers) > 1 else ''} {', '.join(map(str, peers))}"
    hint = hint or (
        "make every rank take part in this call, as often as the others, or give the comm a longer timeout if "
        f"{who} only needs more time"
    )
    return f"{doing}: waited {timeout:g} s for {who}{more}{DEAD}; {hint}"


def held_up(doing: str, timeout: float, chain: Sequence[int], more: str = "", hint: str = "") -> str:
    """The reason for an error, as `waited`, where ranks wait for each other: the last one of the chain is to blame.

    more: what the first one has to do, in words, if it is the last one too.
    """
    *through, last = chain
    if through:
        s, wait = ("s", "wait") if len(through) > 1 else ("", "waits")
        more = f", for which rank{s} {', '.join(map(str, through))} {wait} too"
    return waited(doing, timeout, last, more=more, hint=hint)
