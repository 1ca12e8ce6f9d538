"""Trading tokens for heads on entry to attention and back on exit (Ulysses, Jacobs et al. 2023), any widths and heads.

Outside, a member of a group of ranks holds all heads of its rows; inside, it holds its share of the heads of all
members' rows, in position order::

    member 0   rows A, heads 0 1         inside 0   rows A B, head 0
    member 1   rows B, heads 0 1    ->   inside 1   rows A B, head 1

The way out is the way in with the roles swapped, so each is the adjoint of the other; a key head that several shares
read gets the sum of their gradients. Width 1 sends nothing, and copies nothing where rows lie in position order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from seqpar.comm import Comm, Tag
from seqpar.ops.rows import index, take
from seqpar.plan import Part, Trade
from seqpar.plan.steps import count


@dataclass(frozen=True)
class Leg:
    """One tensor of a trade: ``x [rows, heads, ...]``, whether it has query or key rows, and every member's heads.

    target, summed: on the way out the local tensor to write, and whether members' parts are added to it.
    """

    x: Tensor
    trade: Trade
    shares: Sequence[slice]
    target: Tensor | None = None
    summed: bool = False


def enter(comm: Comm, tag: Tag, part: Part, legs: Sequence[Leg]) -> Callable[[], list[Tensor]]:
    """Posts the way in; what it returns waits and gives the inside tensors, in the order of the legs."""
    device = legs[0].x.device
    local = [take(leg.x, index(part, leg.trade.mine, device)) for leg in legs]
    received: dict[int, list[Tensor]] = {}
    work = None
    if part.width > 1:
        sends: dict[int, list[Tensor]] = {}
        own = part.members[part.share]
        for share, member in enumerate(part.members):
            if member == own:
                continue
            sends[member] = [x[:, leg.shares[share]].contiguous() for leg, x in zip(legs, local, strict=True)]
            received[member] = [_space(comm, leg, count(leg.trade.dest[member]), part.share) for leg in legs]
        work = comm.exchange(sends, received, tag=tag)

    def inside() -> list[Tensor]:
        if work is None:
            return local
        work.wait()
        result = []
        for n, leg in enumerate(legs):
            y = leg.x.new_empty(leg.trade.rows, _width(leg, part.share), *leg.x.shape[2:])
            y[index(part, leg.trade.dest[own], device)] = local[n][:, leg.shares[part.share]]
            for member, pieces in received.items():
                y[index(part, leg.trade.dest[member], device)] = pieces[n]
            result.append(y)
        return result

    return inside


def leave(comm: Comm, tag: Tag, part: Part, legs: Sequence[Leg]) -> Callable[[], None]:
    """Posts the way out of inside tensors; what it returns waits and writes the legs' targets, members in order."""
    device = legs[0].x.device
    received: dict[int, list[Tensor]] = {}
    work = None
    own = part.members[part.share]
    if part.width > 1:
        sends: dict[int, list[Tensor]] = {}
        for share, member in enumerate(part.members):
            if member == own:
                continue
            sends[member] = [take(leg.x, index(part, leg.trade.dest[member], device)).contiguous() for leg in legs]
            received[member] = [_space(comm, leg, count(leg.trade.mine), share) for leg in legs]
        work = comm.exchange(sends, received, tag=tag)

    def written() -> None:
        if work is not None:
            work.wait()
        for n, leg in enumerate(legs):
            rows = index(part, leg.trade.mine, device)
            for share, member in enumerate(part.members):
                if member == own:
                    piece = take(leg.x, index(part, leg.trade.dest[own], device))
                else:
                    piece = received[member][n]
                heads = leg.shares[share]
                assert leg.target is not None
                leg.target[rows, heads] = leg.target[rows, heads] + piece if leg.summed else piece.to(leg.target.dtype)

    return written


def _width(leg: Leg, share: int) -> int:
    return leg.shares[share].stop - leg.shares[share].start


def _space(comm: Comm, leg: Leg, rows: int, share: int) -> Tensor:
    """Memory for rows of one share's heads."""
    return comm.empty((rows, _width(leg, share), *leg.x.shape[2:]), leg.x.dtype, leg.x.device)
