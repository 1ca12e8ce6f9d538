"""32-bit words in device memory, on which the streams of ranks wait for each other."""

from __future__ import annotations

LINE = 64  # bytes between words, so that two writers never share a cache line
WRAP, FIRST = 1 << 32, (1 << 32) - 48  # epochs wrap soon after the first messages, so that every run crosses the wrap
AHEAD = 1 << 30  # more messages than a comm ever has in flight


def epoch(number: int) -> int:
    """The value of a word at message `number` of a pair."""
    return (FIRST + 1 + number) % WRAP


def reached(seen: int, expected: int) -> bool:
    """Whether a word is at or past an epoch, by a signed difference of 32 bits."""
    return (seen - expected) % WRAP < WRAP // 2


class SignalWords:
    """Offsets of the words of one of `size` ranks, in bytes from the beginning of its memory; `bytes` is their size.

    All but the poison, which is 0, start just before the epoch of message 0.
    """

    def __init__(self, size: int) -> None:
        self.size, self.poison = size, 4 * size * LINE
        self.count = self.poison // 4
        self.bytes = -(-(self.poison + LINE) // 4096) * 4096

    def arrival(self, peer: int) -> int:
        """Written by a peer: its bytes have arrived."""
        return peer * LINE

    def credit(self, peer: int) -> int:
        """Written by a peer: its buffer may be written."""
        return (self.size + peer) * LINE

    def sent(self, peer: int) -> int:
        """Written by the rank itself: its bytes are at the peer."""
        return (2 * self.size + peer) * LINE

    def lane(self, peer: int) -> int:
        """Written by a peer: its buffer for pieces may be written again."""
        return (3 * self.size + peer) * LINE

    def name(self, word: int) -> tuple[str, int]:
        """The meaning of a word in errors, and the peer."""
        kind, peer = divmod(word // LINE, self.size)
        what = ("what rank {} sends", "room at rank {}", "the copy to rank {}", "room for a piece at rank {}")[kind]
        return what.format(peer), peer
