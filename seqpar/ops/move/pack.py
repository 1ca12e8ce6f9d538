"""An exchange of rows and slices with any strides: packed and unpacked in at most one pass each, or summed.

A `direct` comm moves them from source to destination. For other comms, sources that are not contiguous are packed for
all peers by one call of `copy` into one buffer, and messages that cannot be received in place are unpacked by one
more. On every comm, messages to be summed or cast arrive in a buffer first::

    rank 0   x [2, 4] -> sends {1: x[:, 2:]}    pack  x[:, 2:] -> buffer    exchange    unpack  buffer -> y[:, :2]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from seqpar.comm import Comm, Tag
from seqpar.comm.protocol import DIMS
from seqpar.kernels.memory.copy import Pair, copy
from seqpar.kernels.memory.rows import add_, place

ALIGNMENT = 64  # alignment in bytes of messages in a buffer: a CPU's cache line, a GPU's vector


class Place(NamedTuple):
    """A tensor, or some of its rows by number. Numbers are as in `Pair`.

    Of a destination, dtype: that of the message, if it is to be cast to x's; summed: whether the message is added.
    """

    x: Tensor
    rows: Tensor | None = None
    dtype: torch.dtype | None = None
    summed: bool = False

    @property
    def shape(self) -> list[int]:
        """The shape of its elements."""
        return [len(self.x if self.rows is None else self.rows), *self.x.shape[1:]] if self.x.dim() else []

    @property
    def travels_as(self) -> torch.dtype:
        """The dtype of the message."""
        return self.dtype or self.x.dtype

    @property
    def copied(self) -> bool:
        """Whether a message is written there with its own bits."""
        return not self.summed and (self.dtype is None or self.dtype == self.x.dtype)


Message = Sequence[Place]  # one dtype: one place, or several [rows, ...] sent side by side as [rows, widths]
Side = Mapping[int, Sequence[Message]]


def rows_of(x: Tensor, rows: slice | Tensor) -> Place:
    """The place of some rows of a tensor."""
    return Place(x[rows]) if isinstance(rows, slice) else Place(x, rows)


def post(comm: Comm, sends: Side, recvs: Side, tag: Tag) -> Callable[[], None]:
    """Post an exchange of messages, by peer. The returned function waits until all are in place.

    A rank's messages to itself are local copies. Messages are summed in the order of recvs, in the dtype of the
    destination. Nothing else writes the elements that a message writes or is added to.
    """
    own_copies: list[Pair] = []
    own: list[tuple[int, Place, Place]] = []
    for theirs, mine in zip(sends.get(comm.rank, ()), recvs.get(comm.rank, ())):
        for source, destination in zip(theirs, mine):
            if destination.copied:
                own_copies.append(_moved(destination, source))
            else:
                own.append((comm.rank, source, destination))
    if comm.size == 1 and not own:
        copy(own_copies)
        return lambda: None
    sent, sources = _buffers(comm, sends, torch.empty)
    received, destinations = _buffers(comm, recvs, comm.empty)
    copy([_moved(part, source) for _, part, source in sources])
    work = comm.exchange(sent, received, tag=tag) if sent or received else None
    late = any(destination.copied for *_, destination in destinations)
    if not late:  # otherwise `finish` makes all copies in one call
        copy(own_copies)

    def finish() -> None:
        if work is not None:
            work.wait()
        if late:
            copy([*(_moved(where, part) for _, part, where in destinations if where.copied), *own_copies])
        rest = own + [arrival for arrival in destinations if not arrival[2].copied]
        if rest:
            order = {peer: n for n, peer in enumerate(recvs)}
            for _, source, destination in sorted(rest, key=lambda arrival: order[arrival[0]]):
                _combine(source, destination)

    return finish


def _moved(dst: Place, src: Place) -> Pair:
    return Pair(dst.x, src.x, dst.rows, src.rows)


def _combine(src: Place, dst: Place) -> None:
    """Add one place to another, or cast it."""
    values = src.x if src.rows is None else src.x.index_select(0, src.rows)
    rows = slice(None) if dst.rows is None else dst.rows
    if dst.summed:
        add_(dst.x, rows, values)
    else:
        place(values, rows, dst.x)


def _buffers(
    comm: Comm, side: Side, empty: Callable[..., Tensor]
) -> tuple[dict[int, list[Tensor]], list[tuple[int, Place, Place]]]:
    """The tensors to exchange; and for each part of a buffer the peer, the part and the place it stands for."""
    side = {peer: messages for peer, messages in side.items() if peer != comm.rank}
    packed = [message for messages in side.values() for message in messages if not _travels(comm, message)]
    if not packed:
        return {peer: [message[0].x for message in messages] for peer, messages in side.items()}, []
    buffers = _memory(packed, empty)
    tensors: dict[int, list[Tensor]] = {}
    parts: list[tuple[int, Place, Place]] = []
    for peer, messages in side.items():
        tensors[peer] = []
        for message in messages:
            if _travels(comm, message):
                tensors[peer].append(message[0].x)
                continue
            buffer = next(buffers[message[0].travels_as])
            tensors[peer].append(buffer)
            first = 0
            for where in message:
                width = prod(where.shape[1:])
                part = buffer if len(message) == 1 else buffer[:, first : first + width].view(where.shape)
                parts.append((peer, Place(part), where))
                first += width
    return tensors, parts


def _travels(comm: Comm, message: Message) -> bool:
    """Whether a message is a tensor that the comm can send, or receive into, without a copy."""
    if len(message) > 1 or message[0].rows is not None or not message[0].copied:
        return False
    x = message[0].x
    return x.is_contiguous() or (comm.direct and x.dim() <= DIMS)


def _shape(message: Message) -> list[int]:
    shapes = [place.shape for place in message]
    return shapes[0] if len(shapes) == 1 else [shapes[0][0], sum(prod(shape[1:]) for shape in shapes)]


def _memory(messages: Sequence[Message], empty: Callable[..., Tensor]) -> dict[torch.dtype, Iterator[Tensor]]:
    """Memory for messages, dtype -> in their order; messages of one dtype are side by side."""
    shapes: dict[torch.dtype, list[list[int]]] = {}
    for message in messages:
        shapes.setdefault(message[0].travels_as, []).append(_shape(message))
    found = {}
    for dtype, several in shapes.items():
        line = ALIGNMENT // dtype.itemsize
        edges = list(accumulate((-(-prod(shape) // line) for shape in several), initial=0))
        lines = empty((edges[-1], line), dtype=dtype, device=messages[0][0].x.device)
        pieces = zip(pairwise(edges), several, strict=True)
        found[dtype] = iter([lines[a:b].view(-1)[: prod(shape)].view(shape) for (a, b), shape in pieces])
    return found
