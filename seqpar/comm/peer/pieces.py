"""Messages that do not fit in the pool: they are sent in pieces, through a small buffer for each peer.

The receiver cuts a message when it posts it, and offers a piece once one half of the buffer is free. The sender pushes
the pieces that it is offered, so ranks need not know how much room the others have. A piece is a range of a tensor's
elements in row-major order, and a box of the tensor: a range of one dim, one index of every dim before it, all of those
after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqpar import native
from seqpar.comm.peer.cuda import row_major
from seqpar.comm.peer.pool import ALIGNMENT
from seqpar.comm.protocol import DIMS, Tag

CUT = -1  # the first stride of an offer for a piece; two numbers follow: its first element and its number of elements
SHARE = 8  # 1/8 of the memory that peers write is for pieces
HALVES = 2  # one is written while the other is copied out


class CutPiece(NamedTuple):
    """A piece that is still to be offered, or has been and not arrived. number: of the pair's offers; words: header."""

    words: list[int]
    number: int
    target: Tensor
    begin: int
    elements: int
    work: Any


@dataclass
class Lane:
    """A peer's buffer: `HALVES` parts of `bytes` each, used in turns, from address `at`, `where` bytes into the memory.

    flying: pieces that were offered and not copied out yet, with their place in the buffer.
    """

    at: int
    where: int
    bytes: int
    offered: int = 0
    landed: int = 0
    flying: deque[tuple[CutPiece, Tensor]] = field(default_factory=deque)

    def offer(self, piece: CutPiece) -> tuple[list[int], int, list[int]] | None:
        """The offer for a piece, in the next half; None while both are taken."""
        if len(self.flying) == HALVES:
            return None
        return piece.words, self.where + self._offset(), [CUT, piece.begin, piece.elements]

    def fly(self, piece: CutPiece) -> None:
        """Note that the peer knows of the last offer."""
        target = piece.target
        strides = row_major(target.shape)
        block = native.ops().peer_view(
            self.at + self._offset(), list(target.shape), strides, target.dtype, target.device
        )
        self.flying.append((piece, block))
        self.offered += 1

    def _offset(self) -> int:
        return self.offered % HALVES * self.bytes


def lane_bytes(pool_bytes: int, peers: int) -> int:
    """The size of a part of each peer's buffer, for a comm with so much memory; any element fits."""
    return max(pool_bytes // SHARE // (HALVES * max(1, peers)) // ALIGNMENT, 1) * ALIGNMENT


def plain(x: Tensor) -> Tensor:
    """A tensor as both sides cut it: of 1 to `DIMS` dims."""
    return x if 0 < x.dim() <= DIMS else x.view(-1)


def cut(shape: Sequence[int], dtype: torch.dtype, most: int) -> list[tuple[int, int]]:
    """The (first element, number of elements) of each piece of at most that many bytes; an element fits."""
    whole = below = prod(shape)
    for size in shape:
        below //= size  # elements of one index of this dim
        if below * dtype.itemsize <= most:
            break
    row, step = below * size, below * (most // (below * dtype.itemsize))
    return [(a, min(step, begin + row - a)) for begin in range(0, whole, row) for a in range(begin, begin + row, step)]


def box(x: Tensor, begin: int, elements: int) -> Tensor:
    """The view of such a piece."""
    while (below := x.numel() // x.shape[0]) > elements:
        x, begin = x[begin // below], begin % below
    return x[begin // below : (begin + elements) // below]


@dataclass(eq=False)
class PeerExchange:
    """One exchange in progress, with all its tensors. Peers are the channel's ranks."""

    tag: Tag
    ready: Any = None  # event: tensors to send are written, tensors to receive may be
    sends: dict[int, deque[tuple[list[int], Tensor]]] = field(default_factory=dict)  # tensors still to be pushed
    begun: set[int] = field(default_factory=set)  # peers whose copy stream has waited for its credit
    credited: set[int] = field(default_factory=set)  # those where whole messages may be written
    arrivals: dict[int, int] = field(default_factory=dict)  # peer -> offers to it that will have been used
    sent: dict[int, int] = field(default_factory=dict)
    blocks: list[Tensor] = field(default_factory=list)  # of the pool, received into
    staged: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (target, block)
    staged_bytes: int = 0
    pieces: int = 0  # that have not been copied out of their buffers
    landed: Any = None  # event: all pieces have been
    sources: list[Tensor] = field(default_factory=list)
    targets: list[Tensor] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The exchange in words."""
        return str(self.tag)


class Flight(NamedTuple):
    """Waits of a stream for a call, address of a word -> epoch; they are over when `event` is."""

    event: Any
    words: dict[int, int]
    call: str = ""

    def is_completed(self) -> bool:
        """Whether the waits are over."""
        return bool(self.event.query())
