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

import torch
from torch import Tensor

from seqpar.kernels.rows import add_, pack, place
from seqpar.ops.call import Call, Phase, named
from seqpar.ops.rows import entering, leaving, take
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


def enter(call: Call, phase: Phase, part: Part, legs: Sequence[Leg]) -> Callable[[], list[Tensor]]:
    """Posts the way in; what it returns waits and gives the inside tensors, in the order of the legs."""
    at = call.uploaded.rows
    if part.width == 1:
        local = [take(leg.x, at(leg.trade.mine)) for leg in legs]
        return lambda: local
    sends: dict[int, list[Tensor]] = {}
    recvs: dict[int, list[Tensor]] = {}
    own = part.members[part.share]
    with named("post trade in", part.width):
        arriving = [entering(part, leg.trade) for leg in legs]
        buffers = [_space(call, leg, leg.trade.rows, part.share) for leg in legs]
        for share, member in enumerate(part.members):
            pieces = [buffer[each.of[member]] for buffer, each in zip(buffers, arriving, strict=True)]
            if member == own:
                for leg, piece in zip(legs, pieces, strict=True):
                    pack([leg.x[:, leg.shares[share]]], at(leg.trade.mine), piece.flatten(1))
                continue
            sends[member] = [take(leg.x[:, leg.shares[share]], at(leg.trade.mine)).contiguous() for leg in legs]
            recvs[member] = pieces
        work = call.comm.exchange(sends, recvs, tag=call.tag(phase, part.width))

    def inside() -> list[Tensor]:
        with named("wait trade in", part.width):
            work.wait()
        result = []
        for buffer, each in zip(buffers, arriving, strict=True):
            x = buffer
            if each.rows is not None:
                x = torch.empty_like(buffer)
                place(buffer, at(each.rows), x)
            result.append(x)
        return result

    return inside


def leave(call: Call, phase: Phase, part: Part, legs: Sequence[Leg]) -> Callable[[], None]:
    """Posts the way out of inside tensors; what it returns waits and writes the legs' targets, members in order."""
    at = call.uploaded.rows
    own = part.members[part.share]
    recvs: dict[int, list[Tensor]] = {}
    work = None
    if part.width > 1:
        sends: dict[int, list[Tensor]] = {member: [] for member in part.members if member != own}
        with named("post trade out", part.width):
            for leg in legs:
                parcels = leaving(part, leg.trade)
                source = leg.x if parcels.rows is None else take(leg.x, at(parcels.rows))
                for member, rows in parcels.of.items():
                    sends[member].append(source[rows].contiguous())
            for share, member in enumerate(part.members):
                if member != own:
                    recvs[member] = [_space(call, leg, count(leg.trade.mine), share) for leg in legs]
            work = call.comm.exchange(sends, recvs, tag=call.tag(phase, part.width))

    def written() -> None:
        if work is not None:
            with named("wait trade out", part.width):
                work.wait()
        for n, leg in enumerate(legs):
            assert leg.target is not None
            for share, member in enumerate(part.members):
                piece = take(leg.x, at(leg.trade.dest[own])) if member == own else recvs[member][n]
                target, rows = leg.target[:, leg.shares[share]], at(leg.trade.mine)
                if leg.summed:
                    add_(target, rows, piece)
                else:
                    place(piece, rows, target)

    return written


def _space(call: Call, leg: Leg, rows: int, share: int) -> Tensor:
    """Memory for rows of one share's heads."""
    heads = leg.shares[share]
    return call.comm.empty((rows, heads.stop - heads.start, *leg.x.shape[2:]), leg.x.dtype, call.device)
