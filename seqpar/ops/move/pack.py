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
from operator import itemgetter
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


def rows_of(x: Tensor, rows: slice | Tensor, *, summed: bool = False) -> Place:
    """The place of some rows of a tensor."""
    return Place(x[rows], summed=summed) if isinstance(rows, slice) else Place(x, rows, summed=summed)


def post(
    comm: Comm, sends: Side, recvs: Side, tag: Tag, *, empty: Callable[..., Tensor] | None = None
) -> Callable[[], None]:
    """Post an exchange of messages, by peer. The returned function waits until all are in place.

    A rank's messages to itself are local copies. Messages are summed in ascending order of peers, in the dtype of the
    destination. Nothing else writes the elements that a message writes or is added to. empty: allocates the buffer of
    messages that do not arrive in place, as ``torch.empty`` would; by default the comm does.

    Raises: ValueError if the rank sends itself more or fewer messages than it receives.
    """
    own = [
        (comm.rank, source, destination)
        for sent, received in zip(sends.get(comm.rank, ()), recvs.get(comm.rank, ()), strict=True)
        for source, destination in zip(sent, received, strict=True)
    ]
    leaving, sources = _buffers(comm, sends, torch.empty)
    arriving, arrivals = _buffers(comm, recvs, empty or comm.empty)
    copy([Pair(part.x, source.x, src_rows=source.rows) for _, part, source in sources])
    work = comm.exchange(leaving, arriving, tag=tag) if leaving or arriving else None
    own_copies, late_copies = (
        [Pair(dst.x, src.x, dst.rows, src.rows) for _, src, dst in several if not (dst.summed or dst.dtype)]
        for several in (own, arrivals)
    )
    rest = [arrival for arrival in [*own, *arrivals] if arrival[2].summed or arrival[2].dtype]
    if not late_copies:  # otherwise `finish` makes all copies in one call
        copy(own_copies)

    def finish() -> None:
        if work is not None:
            work.wait()
        if late_copies:
            copy(late_copies + own_copies)
        for _, source, destination in sorted(rest, key=itemgetter(0)):
            _combine(source, destination)

    return finish


def _combine(src: Place, dst: Place) -> None:
    """Add one place to another, or cast it."""
    values = src.x if src.rows is None else src.x.index_select(0, src.rows)
    rows = slice(None) if dst.rows is None else dst.rows
    if dst.summed:
        add_(dst.x, rows, values)
    else:
        place(values, rows, dst.x)


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
            whole = len(message) == 1 and rows is None and dtype is None and not summed
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
        first = 0
        for where in message:
            shape = where.x.shape[1:]
            width = prod(shape)
            parts.append((peer, Place(buffer[:, first : first + width].view(len(buffer), *shape)), where))
            first += width
    for peer in tensors:
        tensors[peer] = [buffers.get(id(message), message[0].x) for message in side[peer]]
    return tensors, parts


def _memory(messages: Sequence[Message], empty: Callable[..., Tensor]) -> list[Tensor]:
    """Memory for messages; those of one dtype are side by side in one piece."""
    shapes: dict[torch.dtype, list[list[int]]] = {}
    dtypes = [message[0].dtype or message[0].x.dtype for message in messages]
    for dtype, message in zip(dtypes, messages, strict=True):
        x, rows, *_ = message[0]
        shape = [*x.shape] if rows is None else [len(rows), *x.shape[1:]]
        if len(message) > 1:
            shape = [shape[0], sum([prod(where.x.shape[1:]) for where in message])]
        shapes.setdefault(dtype, []).append(shape)
    pieces: dict[torch.dtype, Iterator[Tensor]] = {}
    for dtype, several in shapes.items():
        line = ALIGNMENT // dtype.itemsize
        edges = list(accumulate((-(-prod(shape) // line) for shape in several), initial=0))
        lines = empty((edges[-1], line), dtype=dtype, device=messages[0][0].x.device)
        cuts = zip(pairwise(edges), several, strict=True)
        pieces[dtype] = iter([lines[a:b].view(-1)[: prod(shape)].view(shape) for (a, b), shape in cuts])
    return [next(pieces[dtype]) for dtype in dtypes]
