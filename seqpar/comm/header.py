"""What says which messages belong together: the words that sender and receiver must have in common."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from seqpar.comm.protocol import Tag

# phases of tags that are not a verb's
AGREEING, WARMING = -1, -2


def hash63(value: object) -> int:
    """63 bits of a value's `repr`, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "big") >> 1


def describe(tag: Tag) -> str:
    """A tag in words."""
    if tag.phase in (AGREEING, WARMING):
        return f"{'agreement' if tag.phase == AGREEING else 'warm-up'} {tag.call} stage {tag.stage}"
    return str(tag)


class Header(NamedTuple):
    """What one rank sends to another in an exchange, or expects from it there. All of it fits int64."""

    scope: int
    digest: int
    call: int
    phase: int
    stage: int
    tensors: int
    bytes: int
    signature: int

    @classmethod
    def of(cls, scope: int, tag: Tag, tensors: Sequence[Tensor]) -> Header:
        """The header of a pair's tensors in the exchange `tag` of the ranks that hash to `scope`, 0 for all ranks."""
        size = sum(t.numel() * t.element_size() for t in tensors)
        return cls(scope, *tag, len(tensors), size, hash63([(t.dtype, tuple(t.shape)) for t in tensors]))

    def unlike(self, expected: Header, sender: int, receiver: int) -> str:
        """The reason for an error: `sender` has this header, `receiver` the other one."""
        note = "" if self[:-1] != expected[:-1] else " (same bytes, other shapes or dtypes)"
        return (
            f"ranks {sender} and {receiver} do not meet: rank {sender} sent for {self}, "
            f"rank {receiver} receives for {expected}{note}"
        )

    def __str__(self) -> str:
        tag = describe(Tag(self.digest, self.call, self.phase, self.stage))
        among = f" in sub {self.scope:x}" if self.scope else ""
        return f"{tag}{among} with {self.tensors} tensors of {self.bytes} bytes"
