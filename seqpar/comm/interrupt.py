"""Ctrl-C in a wait of C++ code, which Python would only see when the wait is over."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any


class Interrupt:
    """Watches for Ctrl-C while the main thread waits, between `begin` and `end`.

    give_up: what makes the wait end; called on a thread of its own with what the wait is for. Nothing is watched on
    other threads, which get no signals, or where the program handles Ctrl-C in its own way, as it may go on after it.
    """

    def __init__(self, give_up: Callable[[Any], None]) -> None:
        self._give_up = give_up
        self._files: tuple[int, int] | None = None
        self._awaited: Any = None
        self._before = -1  # the file that somebody else wants to be woken by

    def begin(self, awaited: Any) -> bool:
        """Whether it watches from here on; then `end` must follow."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return False
        reading, writing = self._files or self._start()
        self._awaited = awaited
        self._before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        return True

    def end(self) -> None:
        """Watch no longer."""
        signal.set_wakeup_fd(self._before)

    def _start(self) -> tuple[int, int]:
        self._files = reading, writing = os.pipe()
        os.set_blocking(writing, False)
        # closing the end that is written to ends the thread
        weakref.finalize(self, os.close, writing)
        threading.Thread(target=_watch, args=(reading, weakref.ref(self)), name="seqpar Ctrl-C", daemon=True).start()
        return self._files

    def heard(self, signals: bytes) -> None:
        """Take in the numbers of signals that came."""
        if self._before != -1:
            os.write(self._before, signals)
        if signal.SIGINT in signals:
            self._give_up(self._awaited)


def _watch(reading: int, interrupt: weakref.ref[Interrupt]) -> None:
    while signals := os.read(reading, 64):
        target = interrupt()
        if target is None:
            break
        target.heard(signals)
        del target
    os.close(reading)
