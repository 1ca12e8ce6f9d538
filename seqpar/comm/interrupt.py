"""Ctrl-C during a wait in C++ code, which Python would only notice after the wait."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any


class Interrupt:
    """Watches for Ctrl-C while the main thread waits, between `begin` and `end`.

    give_up: ends the wait; called on another thread with the awaited object. Nothing is watched on other threads, which
    get no signals, nor if the program has its own handler of Ctrl-C, since it may continue afterwards.
    """

    def __init__(self, give_up: Callable[[Any], None]) -> None:
        self._give_up = give_up
        self._files: tuple[int, int] | None = None
        self._stop: Callable[[], object] = lambda: None
        self._awaited: Any = None
        self._before = -1  # the wake-up file descriptor of someone else

    def begin(self, awaited: Any) -> bool:
        """Start watching; returns whether it does. If so, `end` must follow."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return False
        reading, writing = self._files or self._start()
        self._awaited = awaited
        self._before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        return True

    def end(self) -> None:
        """Stop watching."""
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
