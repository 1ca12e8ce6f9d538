"""The rank that each rank waits for, in memory that all ranks map, for a rank that has waited too long.

The awaited rank may itself wait for another one, which is the one to name. A rank writes its word while it waits, and
only after a while; it changes the beat in it each time, since the word of a rank that was stopped stays as it was.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence

BEAT, PEER = 1 << 32, (1 << 32) - 1  # of a word: its beats, and one more than the awaited rank


class Board:
    """The words of `size` ranks; rank 0 makes their memory, and the others map it at its `address`."""

    def __init__(self, rank: int, size: int, address: Sequence[int] = ()) -> None:
        self._rank = rank
        file = os.open("/proc/{}/fd/{}".format(*address), os.O_RDWR) if address else os.memfd_create("seqpar")
        # closes the file if it is still open
        self.mapped = weakref.finalize(self, os.close, file)
        if not address:
            os.ftruncate(file, 8 * size)
        self._words = (ctypes.c_uint64 * size).from_buffer(mmap.mmap(file, 8 * size))
        self.address = [os.getpid(), file]  # until `mapped` is called, since all ranks have mapped it

    def beat(self, peer: int) -> None:
        """Write that this rank waits for a peer."""
        self._words[self._rank] = (self._words[self._rank] // BEAT + 1) % BEAT * BEAT + peer + 1

    def clear(self) -> None:
        """Write that this rank no longer waits."""
        self._words[self._rank] = self._words[self._rank] // BEAT * BEAT

    def read(self) -> list[int]:
        """The words, for `chain` to see which have changed since."""
        return list(self._words)

    def chain(self, peer: int, before: Sequence[int]) -> list[int]:
        """Ranks from an awaited one on: each has waited for the next one since `before`, but the last has not.

        Only `peer` if they wait for each other in a cycle, or if nothing was read before.
        """
        found, words = [peer], self.read()
        while before and words[found[-1]] != before[found[-1]] and (after := words[found[-1]] & PEER):
            if after - 1 in (self._rank, *found):
                return [peer]
            found.append(after - 1)
        return found
