"""Beside a wait in C++ code: Ctrl-C, which Python would only notice after it, and a look now and then."""

from __future__ import annotations

import os
import select
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any

from seqpar.comm.base import WorkBase

LOOKING = 0.5  # seconds between two looks


class Interrupt:
    """A thread that runs during the waits between `begin` and `end`.

    give_up: ends the wait after Ctrl-C; called on that thread with the awaited object. Nobody listens for Ctrl-C while
    other threads wait, which get no signals, nor if the program has its own handler, since it may continue afterwards.
    look: called on that thread with the awaited object from time to time, once a wait has lasted that long.
    """

    def __init__(self, give_up: Callable[[WorkBase[Any]], object], look: Callable[[WorkBase[Any]], object]) -> None:
        self._give_up, self._look = give_up, look
        self._files: tuple[int, int] | None = None
        self._stop: Callable[[], object] = lambda: None
        self._awaited: WorkBase[Any] | None = None
        self._seen = 0  # the id of what was awaited at the last look
        self._before = -1  # the wake-up file descriptor of someone else

    def begin(self, awaited: WorkBase[Any]) -> bool:
        """Start watching; `end` must follow, with what this returns: whether Ctrl-C is listened for."""
        _, writing = self._files or self._start()
        self._awaited = awaited
        if threading.current_thread() is not threading.main_thread():
            return False
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return False
        self._before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        return True

    def end(self, listened: bool) -> None:
        """Stop watching."""
        self._awaited = None
        if listened:
            signal.set_wakeup_fd(self._before)

    def close(self) -> None:
        """End the thread."""
        self._stop()
        self._files = None

    def _start(self) -> tuple[int, int]:
        self._files = reading, writing = os.pipe()
        os.set_blocking(writing, False)
        # closing the writing end ends the thread
        self._stop = weakref.finalize(self, os.close, writing)
        threading.Thread(target=_watch, args=(reading, weakref.ref(self)), name="seqpar Ctrl-C", daemon=True).start()
        return self._files

    def heard(self, signals: bytes) -> None:
        """Handle the numbers of signals that arrived."""
        if self._before != -1:
            os.write(self._before, signals)
        if signal.SIGINT in signals and (awaited := self._awaited) is not None:
            self._give_up(awaited)

    def idle(self) -> None:
        """Look at a wait that stands since the last look."""
        awaited, seen = self._awaited, self._seen
        self._seen = id(awaited)
        if awaited is not None and seen == id(awaited):
            self._look(awaited)


def _watch(reading: int, interrupt: weakref.ref[Interrupt]) -> None:
    listening = select.poll()
    listening.register(reading, select.POLLIN)
    while True:
        signals = os.read(reading, 64) if listening.poll(1000 * LOOKING) else None
        target = interrupt()
        if signals == b"" or target is None:
            break
        if signals is None:
            target.idle()
        else:
            target.heard(signals)
        del target
    os.close(reading)
