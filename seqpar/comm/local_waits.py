"""The waits between ranks in a world of `LocalComm`, and what its ranks do, in words."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from seqpar.comm.protocol import INSIDE, LANES, Tag

# the world ranks of a sub in its own order, () for the whole world; part of every key, so that messages of a sub never
# match its parent's
Scope = tuple[int, ...]


@dataclass(eq=False)
class RoundsLeft:
    """The unfinished part of one rank's exchange; shared by its rounds and its `Work`."""

    rank: int
    rounds_left: int
    # for CUDA tensors
    stream: Any = None  # the posting stream
    ready: Any = None  # an event: the tensors to send are written
    copied: list[Any] = field(default_factory=list)  # events after the copies from and to the tensors


@dataclass(eq=False)
class PostedRound:
    """One round of one rank's exchange, an entry of its queue. Peers are world ranks; matched messages are removed."""

    rank: int
    key: tuple[Scope, Tag, tuple[int, int, int]]
    sends: dict[int, list[Tensor]]
    recvs: dict[int, list[Tensor]]
    progress: RoundsLeft
    posted: float
    moving: int = 0  # messages matched but not yet copied

    def needs(self, peer: int) -> bool:
        """Whether a message from or to `peer` is still unmatched."""
        return peer in self.sends or peer in self.recvs

    def __str__(self) -> str:
        scope, tag, (lane, *number) = self.key
        among = f" among ranks {list(scope)}" if scope else ""
        inside = " inside a node" if lane == INSIDE else ""
        return f"{tag}{among}{inside}" + (f" round {number}" if any(number) else "")


@dataclass(eq=False)
class Agreement:
    """An agreement or gathering of some ranks. calls: rank -> its call. claims: each rank's contribution."""

    ranks: Sequence[int]
    calls: dict[int, str] = field(default_factory=dict)
    claims: dict[int, Any] = field(default_factory=dict)

    @property
    def missing(self) -> list[int]:
        """The ranks that have not arrived."""
        return [rank for rank in self.ranks if rank not in self.claims]


class Waits:
    """The queues of all ranks, and the ranks that wait.

    The queue of a rank in a lane has the number ``lane * size + rank``.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.queues: list[deque[PostedRound]] = [deque() for _ in range(len(LANES) * size)]
        self.agreeing: dict[int, Agreement] = {}  # per rank that waits for others to agree
        self.waiting: dict[int, RoundsLeft] = {}  # per rank that waits for an exchange

    def blockers(self, number: int) -> list[int]:
        """The queues whose heads lack a message that the head of this one needs."""
        if not self.queues[number]:
            return []
        head = self.queues[number][0]
        return [number - head.rank + peer for peer in sorted(head.sends.keys() | head.recvs.keys())]

    def awaited(self, rank: int) -> list[int]:
        """The ranks that a waiting rank needs in order to continue: they have not called agree, or have not posted."""
        if rank in self.agreeing:
            return self.agreeing[rank].missing
        return [
            peer % self.size
            for number in self._stuck(rank)
            for peer in self.blockers(number)
            if not any(entry.key == self.queues[number][0].key and entry.needs(rank) for entry in self.queues[peer])
        ]

    def _stuck(self, rank: int) -> list[int]:
        """The queues of a rank that hold rounds of the exchange that it waits for."""
        progress = self.waiting.get(rank)
        mine = range(rank, len(self.queues), self.size)
        return [number for number in mine if any(entry.progress is progress for entry in self.queues[number])]

    def describe_cycle(self, cycle: Sequence[tuple[int, int]]) -> str:
        """The waits of a cycle in words."""
        size = self.size
        return "; ".join(f"rank {a % size} in {self._place(a)} waits for rank {b % size}" for a, b in cycle)

    def chain(self, rank: int) -> str:
        """The chain of waits from `rank` to its end, in words: 'in call 3 .. for rank 1, which ..'."""
        number, size = next(iter(self._stuck(rank)), rank), self.size
        text = f"in {self.queues[number][0]}" if self.queues[number] else "for nothing"
        seen = {number}
        while blockers := self.blockers(number):
            number = blockers[0]
            several = f" (and {len(blockers) - 1} more)" if len(blockers) > 1 else ""
            waits = number % size in self.agreeing or self.queues[number]
            state = f"is in {self._place(number)}" if waits else "has posted nothing more"
            text += f" for rank {number % size}{several}, which {state}"
            if number in seen:
                break
            seen.add(number)
        return text

    def _place(self, number: int) -> str:
        """Where the rank of a queue is, in words."""
        if number in self.agreeing:
            return f"the {self.agreeing[number].calls[number]}"
        stuck = [number] if self.queues[number] else self._stuck(number)
        return str(self.queues[stuck[0]][0])


def cycle_through(start: int, awaited: Callable[[int], list[int]]) -> list[tuple[int, int]]:
    """A cycle of waits through `start` as edges (waiting, waited for), or []."""
    came_from: dict[int, int] = {}
    stack = [start]
    while stack:
        number = stack.pop()
        for peer in awaited(number):
            if peer == start:
                edges = [(number, start)]
                while edges[0][0] != start:
                    edges.insert(0, (came_from[edges[0][0]], edges[0][0]))
                return edges
            if peer not in came_from:
                came_from[peer] = number
                stack.append(peer)
    return []


def copy_rows(source: Sequence[Tensor], target: Sequence[Tensor]) -> None:
    """Copy tensors of a message to the receiver's."""
    # inference mode may write both ordinary tensors and those that the receiver created in inference mode
    with torch.inference_mode():
        for src, dst in zip(source, target, strict=True):
            dst.copy_(src)


def fill_nan(x: Tensor) -> None:
    """Fill a tensor that is to be received with NaN."""
    # PyTorch fills no float4, and all bits set are NaN in the dtypes of a byte that have one there
    if x.itemsize == 1:
        x.view(torch.uint8).fill_(0xFF)
    else:
        x.fill_(torch.nan)
