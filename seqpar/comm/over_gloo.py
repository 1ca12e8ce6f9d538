"""Exchanges of CPU tensors over the gloo twin of a `GroupComm`.

gloo matches messages by (pair, number), first in, first out. It ends the process if a message is longer than its
buffer; a shorter one fills the beginning. So there are two kinds of numbers: headers share one number and have buffers
for the longest header, so that a pair in different exchanges finds out from the first header; tensors are numbered by a
hash of their header, so that they are never received by another exchange. A message costs far more than a few bytes, so
a pair's tensors follow their header in one message if they are small together.
"""

from __future__ import annotations

import ctypes
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import accumulate
from typing import NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from seqpar.comm.base import WorkBase
from seqpar.comm.failure import completed
from seqpar.comm.group_channel import FIRST_FREE, HEADERS, NUMBERS, GroupChannel
from seqpar.comm.header import HEADER_BYTES, WORDS, Header, describe, mismatch
from seqpar.comm.protocol import Stats, Tag

BESIDE = 1 << 14  # bytes of a pair's tensors up to which they share a message with their header


class _GlooMessage(NamedTuple):
    """A message of a gloo exchange that `wait` waits for; if it has an expectation, a header to compare with it.

    beside: the tensors whose bytes follow that header.
    """

    work: dist.Work
    peer: int
    buffer: Tensor
    expected: bytes = b""
    beside: Sequence[Tensor] = ()


class _Announced(NamedTuple):
    """A pair's tensors as messages: beside the header, in one message with it, or apart, numbered from `number`."""

    header: bytes
    beside: Sequence[Tensor]
    apart: Sequence[Tensor]
    number: int


def _announced(scope: int, tag: Tag, tensors: Sequence[Tensor], *, mutual: bool) -> _Announced:
    """The messages of a pair's tensors. mutual: whether the peers send to each other in this exchange.

    A rank that only sends learns from its tensors that they are not received; a header is received by any exchange.
    """
    header, count = Header.of(scope, tag, tensors), 0
    if mutual:
        count = bisect_right(list(accumulate([x.nbytes for x in tensors])), BESIDE)
    if count:
        # another number: an exchange that expects the tensors apart would wait for them in vain
        header = header._replace(signature=header.signature ^ 1)
    message = WORDS.pack(*header)
    return _Announced(message, tensors[:count], tensors[count:], FIRST_FREE + crc32(message) % NUMBERS)


def _headed(header: bytes, beside: Sequence[Tensor]) -> Tensor:
    """A header and the bytes of tensors, as one message."""
    message = torch.empty(HEADER_BYTES + sum([x.nbytes for x in beside]), dtype=torch.uint8, device="cpu")
    at = message.data_ptr()
    ctypes.memmove(at, header, HEADER_BYTES)
    at += HEADER_BYTES
    for x in beside:
        ctypes.memmove(at, x.data_ptr(), x.nbytes)
        at += x.nbytes
    return message


class GlooWork(WorkBase[GroupChannel]):
    """`Work` of an exchange of CPU tensors, posted by the constructor; peers are the group's ranks."""

    def __init__(
        self, channel: GroupChannel, scope: int, tag: Tag, sends: Mapping[int, list[Tensor]],
        recvs: Mapping[int, list[Tensor]], stats: Stats,
    ) -> None:  # fmt: skip
        super().__init__(channel, tag, stats)
        self._messages: list[_GlooMessage] = []
        channel.calls.append(tag)
        twin, later, peer = channel.twin, [], -1
        try:
            # headers come first, both in posting and in waiting
            for peer, tensors in recvs.items():
                header, beside, apart, number = _announced(scope, tag, tensors, mutual=peer in sends)
                buffer = torch.empty(HEADER_BYTES + BESIDE, dtype=torch.uint8, device="cpu")
                work = twin.recv([buffer], peer, HEADERS)
                self._messages.append(_GlooMessage(work, peer, buffer, header, beside))
                for n, x in enumerate(apart, number):
                    later.append(_GlooMessage(twin.recv([x], peer, n), peer, x))
            for peer, tensors in sends.items():
                header, beside, apart, number = _announced(scope, tag, tensors, mutual=peer in recvs)
                buffer = _headed(header, beside)
                later.append(_GlooMessage(twin.send([buffer], peer, HEADERS), peer, buffer))
                for n, x in enumerate(apart, number):
                    later.append(_GlooMessage(twin.send([x], peer, n), peer, x))
        except RuntimeError as error:
            raise channel.failed(f"posting {describe(tag)}", peer, error, tag.hint) from None
        finally:
            self._messages += later  # kept if a work that could not be posted is dropped

    def _finish(self) -> None:
        channel = self._channel
        channel.owner.check()
        deadline = time.monotonic() + channel.timeout
        listened = channel.interrupt.begin(self)
        try:
            for message in self._messages:
                if channel.cause is not None:
                    raise channel.error(f"{self.doing}, waiting for rank {message.peer}")
                try:
                    message.work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
                except RuntimeError as error:
                    raise channel.failed(self.doing, message.peer, error, self.tag.hint) from None
                if message.expected:
                    self._land(message)
        finally:
            channel.interrupt.end(listened)
        self._messages = []

    def awaited(self) -> int | None:
        """The peer of the first message that has not come, or gone; None if that is over. From any thread."""
        return next((message.peer for message in self._messages if not completed(message.work)), None)

    def _land(self, message: _GlooMessage) -> None:
        """Compare a header, and copy the bytes after it to their tensors.

        Works in any autograd mode of the reader, as in gloo.
        """
        channel, peer, at = self._channel, message.peer, message.buffer.data_ptr()
        header = ctypes.string_at(at, HEADER_BYTES)
        if header != message.expected:
            sent, expected = Header(*WORDS.unpack(header)), Header(*WORDS.unpack(message.expected))
            why = mismatch(peer, sent, channel.rank, expected, self.tag, channel.calls, channel.refused)
            channel.fail(f"{self.doing}: {why}")
            raise channel.error(f"{self.doing}, receiving from rank {peer}")
        at += HEADER_BYTES
        for x in message.beside:
            ctypes.memmove(x.data_ptr(), at, x.nbytes)
            at += x.nbytes

    def _keep(self) -> None:
        self._channel.orphans += self._messages
        self._messages = []
