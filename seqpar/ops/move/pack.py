"""An exchange of rows and slices with any strides: packed and unpacked in at most one pass each, or summed.

A `direct` comm moves them from source to destination. For other comms, sources that are not contiguous are packed for
all peers by one call of `copy` into one buffer, and messages that cannot be received in place are unpacked by one
more. On every comm, messages to be summed or cast arrive in a buffer first::

    rank 0   x [2, 4] -> sends {1: x[:, 2:]}    pack  x[:, 2:] -> buffer    exchange    unpack  buffer -> y[:, :2]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from seqpar.comm import Comm, Tag
from seqpar.comm.protocol import DIMS
from seqpar.kernels.memory.copy import Pair, add, cast, copy

ALIGNMENT = 64  # alignment in bytes of messages in a buffer: a CPU's cache line, a GPU's vector


class Place(NamedTuple):
    """A tensor, or some of its rows by number. Numbers are as in `Pair`.

    Of a destination, dtype: that of the message, if it differs from x's and is to be cast; summed: whether the message
    is added.
    """

    x: Tensor
    rows: Tensor | None = None
    dtype: torch.dtype | None = None
    summed: bool = False


# One dtype: one place, or several [rows, ...] sent side by side as [rows, widths]. Peers may share a message object,
# which is then packed once.
Message = Sequence[Place]
Side = Mapping[int, Sequence[Message]]
Arrival = tuple[int, Place, Place]  # the peer, where its message lies, and where it belongs


def some_of(x: Tensor, rows: slice) -> Tensor:
    """Consecutive rows of a tensor; the tensor itself if they are all, since a view takes the host microseconds."""
    return x if rows.stop - rows.start == x.shape[0] else x[rows]


def rows_of(x: Tensor, rows: slice | Tensor) -> Place:
    """The place of some rows of a tensor."""
    return Place(some_of(x, rows)) if isinstance(rows, slice) else Place(x, rows)


def packed(comm: Comm, sends: Side) -> dict[int, list[Tensor]]:
    """The tensors that are sent: messages as they lie where the comm can send them so, and copies of the others."""
    tensors, sources = _buffers(comm, sends, torch.empty)
    if sources:
        copy([Pair(part.x, source.x, src_rows=source.rows) for _, part, source in sources])
    return tensors


def post(comm: Comm, sends: Side, recvs: Side, tag: Tag) -> Callable[[], None]:
    """Post an exchange of messages, by peer. The returned function waits until all are in place.

    A rank's messages to itself are local copies. Messages are summed in ascending order of peers, in the dtype of the
    destination. Nothing else writes the elements that a message writes or is added to.

    Raises: ValueError if the rank sends itself more or fewer messages than it receives.
    """
    own = [
        (comm.rank, source, destination)
        for sent, received in zip(sends.get(comm.rank, ()), recvs.get(comm.rank, ()), strict=True)
        for source, destination in zip(sent, received, strict=True)
    ]
    own_copies, rest = _copies(own) if own else ([], own)
    if comm.size == 1 and not rest:
        copy(own_copies)
        return lambda: None
    leaving = packed(comm, sends)
    arriving, arrivals = _buffers(comm, recvs, comm.empty)
    work = comm.exchange(leaving, arriving, tag=tag) if leaving or arriving else None
    late_copies, late_rest = _copies(arrivals) if arrivals else ([], arrivals)
    if not late_copies:  # otherwise `finish` makes all copies in one call
        copy(own_copies)

    def finish() -> None:
        if work is not None:
            work.wait()
        if late_copies:
            copy(late_copies + own_copies)
        for _, src, dst in sorted(rest + late_rest, key=itemgetter(0)):
            (add if dst.summed else cast)(Pair(dst.x, src.x, dst.rows, src.rows))

    return finish


def _copies(arrivals: Sequence[Arrival]) -> tuple[list[Pair], list[Arrival]]:
    """Messages that are written with their own bits; and the others, which are summed or cast."""
    copies: list[Pair] = []
    rest: list[Arrival] = []
    for arrival in arrivals:
        _, src, dst = arrival
        if dst.summed or dst.dtype is not None:
            rest.append(arrival)
        else:
            copies.append(Pair(dst.x, src.x, dst.rows, src.rows))
    return copies, rest


def _buffers(comm: Comm, side: Side, empty: Callable[..., Tensor]) -> tuple[dict[int, list[Tensor]], list[Arrival]]:
    """The tensors to exchange; and for each part of a buffer the peer, the part and the place it stands for."""
    tensors: dict[int, list[Tensor]] = {}
    packed: dict[int, tuple[int, Message]] = {}
    for peer, messages in side.items():
        if peer == comm.rank:
            continue
        tensors[peer] = [message[0].x for message in messages]
        for message in messages:
            x, rows, dtype, summed = message[0]
            # One that the comm can send, or receive into, without a copy.
            whole = rows is None and dtype is None and not summed and len(message) == 1
            if not (whole and (x.is_contiguous() or (comm.direct and x.dim() <= DIMS))):
                packed[id(message)] = peer, message
    if not packed:
        return tensors, []
    buffers = dict(zip(packed, _memory([message for _, message in packed.values()], empty), strict=True))
    parts: list[Arrival] = []
    for buffer, (peer, message) in zip(buffers.values(), packed.values(), strict=True):
        if len(message) == 1:
            parts.append((peer, Place(buffer), message[0]))
            continue
        shapes = [where.x.shape[1:] for where in message]
        columns = torch.split_with_sizes(buffer, [shape.numel() for shape in shapes], 1)
        for where, column, shape in zip(message, columns, shapes, strict=True):
            parts.append((peer, Place(column.view(buffer.shape[0], *shape)), where))
    for peer in tensors:
        tensors[peer] = [buffers.get(id(message), message[0].x) for message in side[peer]]
    return tensors, parts


def _memory(messages: Sequence[Message], empty: Callable[..., Tensor]) -> list[Tensor]:
    """Memory for messages; those of one dtype are side by side in one piece, each at a multiple of `ALIGNMENT`."""
    lines: dict[torch.dtype, int] = {}
    pieces: list[tuple[torch.dtype, int, list[int]]] = []
    for message in messages:
        x, rows, cast_from, _ = message[0]
        dtype = cast_from or x.dtype
        shape = [*x.shape] if rows is None else [rows.shape[0], *x.shape[1:]]
        if len(message) > 1:
            shape = [shape[0], sum([where.x.shape[1:].numel() for where in message])]
        first = lines.get(dtype, 0)
        pieces.append((dtype, first, shape))
        lines[dtype] = first + -(-prod(shape) * dtype.itemsize // ALIGNMENT)
    device = messages[0][0].x.device
    memory = {
        dtype: empty((count, ALIGNMENT // dtype.itemsize), dtype=dtype, device=device).view(-1)
        for dtype, count in lines.items()
    }
    starts = ((dtype, first * (ALIGNMENT // dtype.itemsize), shape) for dtype, first, shape in pieces)
    return [memory[dtype][start : start + prod(shape)].view(shape) for dtype, start, shape in starts]
