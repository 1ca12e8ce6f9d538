"""Headers: the words that sender and receiver of matching messages must share."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from seqpar.comm.protocol import DEAD, Tag

# the phase of tags that belong to no verb
AGREEING = -1

REMEMBERED = 4096  # exchanges whose tags a channel remembers


def hash63(value: object) -> int:
    """63 bits of a value's `repr`, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "big") >> 1


def describe(tag: Tag) -> str:
    """A tag in words."""
    if tag.phase == AGREEING:
        return tag.name or f"another call's agreement, number {tag.call}"
    return str(tag)


WORDS = struct.Struct("8q")  # a header as bytes
HEADER_BYTES = WORDS.size


class Header(NamedTuple):
    """The announcement of one rank's messages to another in an exchange, sent or expected. All words fit int64."""

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
        """The header of a pair's tensors in the exchange `tag`. scope: a hash of the sub's ranks, 0 for all ranks."""
        signature = _signature(tuple([(x.dtype, x.shape) for x in tensors]))
        return cls(scope, *tag[:4], len(tensors), sum([x.nbytes for x in tensors]), signature)


@lru_cache(maxsize=4096)
def _signature(tensors: tuple[tuple[torch.dtype, torch.Size], ...]) -> int:
    return hash63([(dtype, tuple(shape)) for dtype, shape in tensors])


def mismatch(
    sender: int, sent: Header, receiver: int, expected: Header, own: Tag, before: Iterable[Tag],
    refused: Callable[[int, Header], str] = lambda rank, header: "",
) -> str:  # fmt: skip
    """The reason for an error: `sender` and `receiver` have different headers.

    own, before: this rank's exchange and those it posted before; a header of the same verb is named like them, by the
    number of its part if this rank has not come to that. refused: returns why a rank refused the call of a header, or
    "".
    """
    for rank, header in ((sender, sent), (receiver, expected)):
        if why := refused(rank, header):
            return (
                f"rank {rank} {why}{DEAD}, since ranks had agreed on such a call before; give "
                'what it expects, or use a comm with check="call", which remains usable'
            )
    names = {(tag.digest, tag.phase): tag.name for tag in before if tag.phase >= 0}
    verbs = {digest: name.partition(" (")[0] for (digest, _), name in names.items() if name}

    def words(header: Header) -> str:
        tag = Tag(header.digest, header.call, header.phase, header.stage)
        name = own.name if tag.numbers == own.numbers else names.get((tag.digest, tag.phase), "")
        if not name and tag.digest in verbs and tag.phase >= 0:
            name = f"{verbs[tag.digest]} (part {tag.phase})"
        among = f" in sub {header.scope:x}" if header.scope else ""
        return f"{describe(tag._replace(name=name))}{among}, with {header.tensors} tensors of {header.bytes} bytes"

    note = ""
    if sent[:-1] == expected[:-1]:
        note = " (same bytes, other shapes or dtypes)"
    elif sent.digest != expected.digest and (sent.call, sent.phase) == (expected.call, expected.phase):
        note = " (the same call, with another plan, dtype, number of heads or option)"
    return (
        f"ranks {sender} and {receiver} make different calls: rank {sender} sent for {words(sent)}, rank {receiver} "
        f"receives for {words(expected)}{note}{DEAD}; make the same calls in the same order on all ranks, with equal "
        'plans, dtypes and heads, which a comm with check="call" compares and names'
    )
