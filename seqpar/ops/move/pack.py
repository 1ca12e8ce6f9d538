"""An exchange of rows and slices with any strides: packed and unpacked in at most one pass each.

A `direct` comm moves them from source to destination. For other comms, sources that are not contiguous are packed for
all peers by one call of `copy` into one buffer, and messages that cannot be received in place are unpacked by one
more::

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

ALIGNMENT = 64  # alignment in bytes of messages in a buffer: a CPU's cache line, a GPU's vector


class Place(NamedTuple):
    """A tensor, or some of its rows by number. Numbers are as in `Pair`."""

    x: Tensor
    rows: Tensor | None = None

    @property
    def shape(self) -> list[int]:
        """The shape of its elements."""
        return [len(self.x if self.rows is None else self.rows), *self.x.shape[1:]] if self.x.dim() else []


Message = Sequence[Place]  # one dtype: one place, or several [rows, ...] sent side by side as [rows, widths]
Side = Mapping[int, Sequence[Message]]


def rows_of(x: Tensor, rows: slice | Tensor) -> Place:
    """The place of some rows of a tensor."""
    return Place(x[rows]) if isinstance(rows, slice) else Place(x, rows)


def moved(dst: Place, src: Place) -> Pair:
    """The copy from one place to another."""
    return Pair(dst.x, src.x, dst.rows, src.rows)


def post(comm: Comm, sends: Side, recvs: Side, own: Sequence[Pair], tag: Tag) -> Callable[[], None]:
    """Post an exchange of messages, by peer. The returned function waits until all are in place.

    own: this rank's local copies. No two messages or copies write the same elements.
    """
    if not sends and not recvs:
        copy(own)
        return lambda: None
    sent, packed = _tensors(comm, sends, torch.empty)
    received, parts = _tensors(comm, recvs, comm.empty)
    copy([moved(part, place) for part, place in packed])
    work = comm.exchange(sent, received, tag=tag)
    unpacked = [moved(place, part) for part, place in parts]
    if not unpacked:  # else they are one call
        copy(own)

    def finish() -> None:
        work.wait()
        if unpacked:
            copy([*unpacked, *own])

    return finish


def _tensors(
    comm: Comm, side: Side, empty: Callable[..., Tensor]
) -> tuple[dict[int, list[Tensor]], list[tuple[Place, Place]]]:
    """The tensors to exchange, and for those in a buffer, the view of each place."""
    packed = [message for messages in side.values() for message in messages if not _travels(comm, message)]
    if not packed:
        return {peer: [message[0].x for message in messages] for peer, messages in side.items()}, []
    buffers = _buffers(packed, empty)
    tensors: dict[int, list[Tensor]] = {}
    parts: list[tuple[Place, Place]] = []
    for peer, messages in side.items():
        tensors[peer] = []
        for message in messages:
            if _travels(comm, message):
                tensors[peer].append(message[0].x)
                continue
            found = next(buffers[message[0].x.dtype])
            tensors[peer].append(found)
            first = 0
            for place in message:
                width = prod(place.shape[1:])
                part = found if len(message) == 1 else found[:, first : first + width].view(place.shape)
                parts.append((Place(part), place))
                first += width
    return tensors, parts


def _travels(comm: Comm, message: Message) -> bool:
    """Whether a message is a tensor that the comm can send, or receive into, without a copy."""
    if len(message) > 1 or message[0].rows is not None:
        return False
    x = message[0].x
    return x.is_contiguous() or (comm.direct and x.dim() <= DIMS)


def _shape(message: Message) -> list[int]:
    shapes = [place.shape for place in message]
    return shapes[0] if len(shapes) == 1 else [shapes[0][0], sum(prod(shape[1:]) for shape in shapes)]


def _buffers(messages: Sequence[Message], empty: Callable[..., Tensor]) -> dict[torch.dtype, Iterator[Tensor]]:
    """Memory for messages, dtype -> in their order; messages of one dtype are side by side."""
    shapes: dict[torch.dtype, list[list[int]]] = {}
    for message in messages:
        shapes.setdefault(message[0].x.dtype, []).append(_shape(message))
    found = {}
    for dtype, several in shapes.items():
        line = ALIGNMENT // dtype.itemsize
        edges = list(accumulate((-(-prod(shape) // line) for shape in several), initial=0))
        lines = empty((edges[-1], line), dtype=dtype, device=messages[0][0].x.device)
        pieces = zip(pairwise(edges), several, strict=True)
        found[dtype] = iter([lines[a:b].view(-1)[: prod(shape)].view(shape) for (a, b), shape in pieces])
    return found
