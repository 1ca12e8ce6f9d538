"""Words of 32 bits in a device's memory, by which the streams of ranks wait for each other."""

from __future__ import annotations

LINE = 64  # bytes from word to word, so that two writers never share a line
WRAP, FIRST = 1 << 32, (1 << 32) - 48  # soon after the first message epochs wrap, so that every run has seen it
AHEAD = 1 << 30  # messages that no comm has in flight


def epoch(number: int) -> int:
    """What a word holds at message `number` of a pair."""
    return (FIRST + 1 + number) % WRAP


def reached(seen: int, expected: int) -> bool:
    """Whether a word is at or past an epoch, by a signed difference of 32 bits."""
    return (seen - expected) % WRAP < WRAP // 2


class SignalWords:
    """Where the words of one of `size` ranks lie, in bytes from the beginning of its memory; `bytes` of it are taken.

    All but the poison, which is 0, begin just before the epoch of message 0.
    """

    def __init__(self, size: int) -> None:
        self.size, self.poison = size, 3 * size * LINE
        self.count = self.poison // 4
        self.bytes = -(-(self.poison + LINE) // 4096) * 4096

    def arrival(self, peer: int) -> int:
        """Written by a peer: its bytes are there."""
        return peer * LINE

    def credit(self, peer: int) -> int:
        """Written by a peer: its buffer may be written."""
        return (self.size + peer) * LINE

    def sent(self, peer: int) -> int:
        """Written by the rank itself: its bytes are at the peer."""
        return (2 * self.size + peer) * LINE

    def name(self, word: int) -> tuple[str, int]:
        """What a word tells of, as an error says it, and the peer."""
        kind, peer = divmod(word // LINE, self.size)
        what = ("what rank {} sends", "room at rank {}", "the copy to rank {}")[kind]
        return what.format(peer), peer
