"""The head trade: tokens for heads on entry to attention, and back on exit (Ulysses, Jacobs et al. 2023).

Outside, a member of a group of ranks holds all heads of its rows; inside, it holds its share of the heads of all
members' rows, in position order::

    member 0   rows A, heads 0 1         inside 0   rows A B, head 0
    member 1   rows B, heads 0 1    ->   inside 1   rows A B, head 1

The way out is the way in with the roles swapped: each is the adjoint of the other, and a key head that several shares
read gets the sum of their gradients. Any widths and heads work. Width 1 sends nothing, and copies nothing if rows are
in position order.

All tensors of a trade go in one exchange. A `direct` comm moves each from source to destination. On other comms,
tensors with the same rows form one message per peer, side by side; they stay side by side inside, so that rows that are
consecutive inside arrive in place.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod

import numpy as np
from torch import Tensor

from seqpar.ops.attention.call import Call, Phase
from seqpar.ops.attention.rows import take
from seqpar.ops.core.device import profile_range
from seqpar.ops.move.pack import Message, Place, post, rows_of
from seqpar.plan import Part, Rows, Trade
from seqpar.plan.steps import count

PIECES = 4  # on a direct comm, a member's rows may be split into this many pieces, each consecutive inside


@dataclass(frozen=True, eq=False)
class Leg:
    """One tensor of a trade: ``x [rows, heads, ...]``, its side (query or key rows), and every member's heads.

    target, summed: on the way out, the local tensor to write, and whether members' parts are added to it.
    """

    x: Tensor
    trade: Trade
    shares: Sequence[slice]
    target: Tensor | None = None
    summed: bool = False

    @property
    def kept(self) -> bool:
        """Whether the written rows have the bits of x, neither added nor cast."""
        return not self.summed and (self.target is None or self.target.dtype == self.x.dtype)

    @property
    def outside(self) -> Tensor:
        """The local tensor, with all heads."""
        return self.x if self.target is None else self.target

    def empty(self, call: Call, rows: int, share: int, *, kept: bool) -> Tensor:
        """Memory for rows of one share's heads. kept: for backward."""
        heads = self.shares[share]
        shape = rows, heads.stop - heads.start, *self.x.shape[2:]
        return call.comm.empty(shape, self.x.dtype, call.signature.device, kept=kept)


def enter(
    call: Call, phase: Phase, part: Part, legs: Sequence[Leg], *, kept: bool = False
) -> Callable[[], list[Tensor]]:
    """Post the way in. The returned function waits and returns the inside tensors, in the order of the legs.

    kept: the inside tensors outlive the call, for backward.
    """
    at = call.uploaded.rows
    if part.width == 1:
        local = [take(leg.x, at(leg.trade.local)) for leg in legs]
        return lambda: local
    me = part.members[part.share]
    sends, recvs = _sides(part), _sides(part)
    inside: dict[Leg, Tensor] = {}
    with profile_range("post trade in", part.width):
        for group in _groups(call, part, legs):
            whole, tensors = _side_by_side(call, group, part.share, kept=kept)
            inside |= zip(group, tensors, strict=True)
            for share, member in enumerate(part.members):
                if member == me:
                    sends[me].append([_outside(call, leg, share) for leg in group])
                    recvs[me].append([rows_of(inside[leg], at(leg.trade.dest[me])) for leg in group])
                    continue
                for piece, _ in _pieces(call, part, group, me):
                    sends[member].append([_outside(call, leg, share, piece) for leg in group])
                recvs[member] += [[rows_of(whole, at(rows))] for _, rows in _pieces(call, part, group, member)]
        finish = post(call.comm, sends, recvs, call.message(phase, part.width))

    def arrived() -> list[Tensor]:
        with profile_range("wait trade in", part.width):
            finish()
        return [inside[leg] for leg in legs]

    return arrived


def leave(call: Call, phase: Phase, part: Part, legs: Sequence[Leg]) -> Callable[[], None]:
    """Post the way out. The returned function waits and writes the legs' targets, in the order of the members."""
    at = call.uploaded.rows
    me = part.members[part.share]
    sends, recvs = _sides(part), _sides(part)
    with profile_range("post trade out", part.width):
        for group in _groups(call, part, legs):
            for share, member in enumerate(part.members):
                if member == me:
                    sends[me].append([rows_of(leg.x, at(leg.trade.dest[me])) for leg in group])
                    recvs[me].append([_outside(call, leg, share) for leg in group])
                    continue
                for _, rows in _pieces(call, part, group, member):
                    sends[member].append([rows_of(leg.x, at(rows)) for leg in group])
                for piece, _ in _pieces(call, part, group, me):
                    recvs[member].append([_outside(call, leg, share, piece) for leg in group])
        finish = post(call.comm, sends, recvs, call.message(phase, part.width))

    def written() -> None:
        with profile_range("wait trade out", part.width):
            finish()

    return written


def _sides(part: Part) -> dict[int, list[Message]]:
    """Empty lists of messages by member, this rank among them."""
    return {member: [] for member in part.members}


def _groups(call: Call, part: Part, legs: Sequence[Leg]) -> list[list[Leg]]:
    """Legs that share a message: on a comm that is not direct, those with the same rows and dtype."""
    if call.comm.direct:
        return [[leg] for leg in legs]
    alike = part.memo("same rows", lambda: _same_rows(part.q, part.kv))
    found: dict[Hashable, list[Leg]] = {}
    for leg in legs:
        found.setdefault((alike or leg.trade is part.q, leg.x.dtype, leg.kept), []).append(leg)
    return list(found.values())


def _same_rows(a: Trade, b: Trade) -> bool:
    """Whether each member's tokens have the same rows inside."""
    pairs = ((a.dest[member], b.dest[member]) for member in a.dest)
    return all(isinstance(x, slice) == isinstance(y, slice) and np.array_equal(x, y) for x, y in pairs)


def _side_by_side(call: Call, group: Sequence[Leg], share: int, *, kept: bool) -> tuple[Tensor, list[Tensor]]:
    """Memory for the inside rows of a message's legs, and each leg's view of it."""
    rows = group[0].trade.rows
    if len(group) == 1:
        (leg,) = group
        whole = leg.empty(call, rows, share, kept=kept)
        return whole, [whole]
    shapes = [(heads.stop - heads.start, *leg.x.shape[2:]) for leg in group for heads in [leg.shares[share]]]
    ends = list(accumulate(map(prod, shapes), initial=0))
    whole = call.comm.empty((rows, ends[-1]), group[0].x.dtype, call.signature.device, kept=kept)
    columns = zip(pairwise(ends), shapes, strict=True)
    return whole, [whole[:, a:b].view(rows, *shape) for (a, b), shape in columns]


def _pieces(call: Call, part: Part, group: Sequence[Leg], member: int) -> list[tuple[slice, Rows]]:
    """The pieces in which a member's rows move: the rows of the piece, and their rows inside."""
    trade, direct = group[0].trade, call.comm.direct
    return part.memo(("pieces", id(trade), member, direct), lambda: _cut(trade.dest[member], direct))  # type: ignore[no-any-return]


def _cut(rows: Rows, direct: bool) -> list[tuple[slice, Rows]]:
    if isinstance(rows, slice) or not direct:
        return [(slice(0, count(rows)), rows)]
    edges = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
    if len(edges) > PIECES + 1:
        return [(slice(0, len(rows)), rows)]
    return [(slice(a, b), slice(int(rows[a]), int(rows[a]) + b - a)) for a, b in pairwise(edges)]


def _outside(call: Call, leg: Leg, share: int, piece: slice = slice(None)) -> Place:
    """A share's heads of this rank's rows of a part, or of one piece."""
    x, local, rows = leg.outside[:, leg.shares[share]], leg.trade.local, None
    if isinstance(local, slice):
        first, last, _ = piece.indices(count(local))
        x = x[local.start + first : local.start + last]
    else:
        rows = call.uploaded.rows(local)[piece]
    return Place(x, rows, None if leg.x.dtype == x.dtype else leg.x.dtype, leg.summed)
