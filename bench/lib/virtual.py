"""Ranks that run one after another: their computing is timed, and their exchanges are composed afterwards.

A rank runs its steps through the product's own path on a `Tape`, a comm that sends nothing. Memory for received tensors
holds random numbers, and the tape records all events in order, with the CPU time between them::

    Run 12 ms | Post K1 | Run 31 ms | Wait K1 | Post K2 | Run 30 ms | Wait K2 | ...

`compose` puts the tapes of all ranks on one clock. An exchange starts on a rank when the rank and all its peers have
posted it and the rank's earlier exchanges have ended. It takes the link's latency, plus the larger of the bytes sent
and received over the link's bandwidth. Computing continues meanwhile, until the wait.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqpar.comm import Comm, Tag, Work
from seqpar.comm.arguments import subset
from seqpar.comm.entry import ThreadEntry
from seqpar.comm.protocol import Stats
from seqpar.planner import Link

NOISE = 1 << 20  # random numbers that fill the memory for received tensors


class Run(NamedTuple):
    """Computing, in seconds of CPU time."""

    seconds: float


class Post(NamedTuple):
    """The start of an exchange: bytes by peer."""

    tag: Tag
    sent: dict[int, int]
    received: dict[int, int]


class Wait(NamedTuple):
    """The end of an exchange."""

    tag: Tag


Event = Run | Post | Wait


class Tape:
    """A comm that is the only rank of a virtual world, and the events of its run."""

    direct, check_every = True, "batch"  # as of `ShmComm`

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.stats, self.entry = rank, size, Stats(), ThreadEntry()
        self.agreed: dict[int, None] = {}
        self.events: list[Event] = []
        self._noise: dict[torch.dtype, Tensor] = {}
        self._calls = 0
        self._since = time.thread_time()

    def start(self) -> None:
        """Forget all events; the clock runs from now on."""
        self.events, self._calls = [], 0
        self._since = time.thread_time()

    def stop(self) -> list[Event]:
        """The events since `start`."""
        self._note()
        return self.events

    def _note(self, *events: Event) -> None:
        self.events += [Run(time.thread_time() - self._since), *events]
        self._since = time.thread_time()

    def exchange(
        self, sends: Mapping[int, Sequence[Tensor]], recvs: Mapping[int, Sequence[Tensor]], *, tag: Tag
    ) -> Work:
        """The work of an exchange, which is recorded."""
        self._note()
        post = Post(tag, _sizes(sends), _sizes(recvs))  # a comm does not ask for these
        moves = bool(post.sent or post.received)
        self.events += [post] if moves else []
        self._since = time.thread_time()
        return _TapeWork(self, tag, moves=moves)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, kept: bool = False) -> Tensor:
        """Memory that holds random numbers, as if peers had written them; the clock stops meanwhile."""
        self._note()
        if dtype not in self._noise:
            # by numpy, as a stage under way refuses PyTorch's random numbers
            self._noise[dtype] = torch.from_numpy(np.random.default_rng(0).normal(0.0, 0.5, NOISE)).to(dtype)
        made, noise = torch.empty(tuple(shape), dtype=dtype, device=device), self._noise[dtype]
        for part in made.view(-1).split(NOISE):
            part.copy_(noise[: part.numel()])
        self._since = time.thread_time()
        return made

    def sums(self, like: Tensor) -> None:
        """None: sums go by exchanges."""

    def sub(self, ranks: Sequence[int]) -> Comm:
        """A comm of some of the ranks, renumbered, whose events go on this tape."""
        return _Sub(self, subset(self.rank, self.size, ranks))

    def check(self) -> None:
        """Nothing."""

    def next_call(self) -> int:
        """The number of the verb that starts now, the same on the tapes of all ranks."""
        self._calls += 1
        return self._calls

    def agree(self, what: str, facts: Mapping[str, object], error: Exception | None = None) -> None:
        """Raise the error if there is one."""
        if error is not None:
            raise error

    def gather(self, what: str, value: Any, error: Exception | None = None) -> list[Any]:
        """Nothing: what runs on a tape needs no values of others."""
        raise NotImplementedError(f"gather of {what}: a tape is one rank of a whole world")

    def abort(self, reason: str) -> None:
        """Nothing: nobody waits."""

    def close(self) -> None:
        """Nothing: it has no connections."""


class _Sub:
    """A tape as some of its ranks see it; verbs are numbered as on the whole tape."""

    def __init__(self, tape: Tape, ranks: list[int]) -> None:
        self._tape, self._ranks = tape, ranks
        self.rank, self.size = ranks.index(tape.rank), len(ranks)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def exchange(
        self, sends: Mapping[int, Sequence[Tensor]], recvs: Mapping[int, Sequence[Tensor]], *, tag: Tag
    ) -> Work:
        """The work of an exchange, which is recorded."""
        there, here = ({self._ranks[peer]: xs for peer, xs in side.items()} for side in (sends, recvs))
        return self._tape.exchange(there, here, tag=tag)

    def sub(self, ranks: Sequence[int]) -> Comm:
        """A comm of some of these ranks."""
        return self._tape.sub([self._ranks[rank] for rank in subset(self.rank, self.size, ranks)])


class _TapeWork:
    """The `Work` of an exchange on a `Tape`."""

    def __init__(self, tape: Tape, tag: Tag, *, moves: bool) -> None:
        self._tape, self._tag, self._moves = tape, tag, moves

    def wait(self) -> None:
        if self._moves:
            self._tape._note(Wait(self._tag))
            self._moves = False


def _sizes(side: Mapping[int, Sequence[Tensor]]) -> dict[int, int]:
    """Bytes by peer, without peers that get none."""
    sizes = {peer: sum(x.numel() * x.element_size() for x in tensors) for peer, tensors in side.items()}
    return {peer: size for peer, size in sizes.items() if size}


def least(tapes: Sequence[Sequence[Event]]) -> list[Event]:
    """One tape from several of the same program on one rank, in which each stretch of computing takes its least time.

    Other programs on the machine only add to a time. Ranks run at different times, so at every exchange some other
    disturbed rank would delay all the rest.
    """
    found: list[Event] = []
    for events in zip(*tapes, strict=True):
        runs = [event.seconds for event in events if isinstance(event, Run)]
        if len(runs) not in (0, len(events)):
            raise ValueError(f"tapes of different programs: {events}")
        found.append(Run(min(runs)) if runs else events[0])
    return found


def compose(tapes: Sequence[Sequence[Event]], link: Link) -> list[float]:
    """The seconds after which each rank ends. Raises ValueError for tapes whose exchanges do not match."""
    world = _World([_Rank(events) for events in tapes], link)
    while any([world.advance(rank) for rank in range(len(tapes))]):
        pass
    for number, rank in enumerate(world.ranks):
        if rank.at < len(rank.events):
            raise ValueError(f"rank {number} waits for posts that never come, in {rank.events[rank.at]}")
    return [rank.now for rank in world.ranks]


@dataclass(eq=False)
class _Rank:
    """A rank. at: its next event. posted: times of exchanges that have not ended. free: the end of the last one."""

    events: Sequence[Event]
    at: int = 0
    now: float = 0.0
    free: float = 0.0
    posted: dict[Tag, float] = field(default_factory=dict)


@dataclass(eq=False)
class _World:
    """All ranks. posts: the times of posts by rank and tag. through: the ends of exchanges by rank."""

    ranks: list[_Rank]
    link: Link
    posts: dict[tuple[Tag, int], tuple[float, Post]] = field(default_factory=dict)
    through: dict[tuple[Tag, int], float] = field(default_factory=dict)

    def advance(self, number: int) -> bool:
        """Advance a rank as far as possible; returns whether it advanced."""
        rank, before = self.ranks[number], self.ranks[number].at
        while rank.at < len(rank.events):
            event = rank.events[rank.at]
            if isinstance(event, Run):
                rank.now += event.seconds
            elif isinstance(event, Post):
                self.posts[event.tag, number] = rank.now, event
                rank.posted[event.tag] = rank.now
            elif self._settle(number, event.tag):
                rank.now = max(rank.now, self.through[event.tag, number])
            else:
                break
            rank.at += 1
        return rank.at > before

    def _settle(self, number: int, tag: Tag) -> bool:
        """Set the end of an exchange and of earlier ones, if all peers have posted them; returns whether it is set."""
        rank = self.ranks[number]
        while tag in rank.posted:
            first = next(iter(rank.posted))
            post = self.posts[first, number][1]
            peers = post.sent.keys() | post.received.keys()
            if any((first, peer) not in self.posts for peer in peers):
                return False
            for peer, size in post.sent.items():
                expected = self.posts[first, peer][1].received.get(number)
                if expected != size:
                    raise ValueError(f"{first}: rank {number} sends {size} bytes, rank {peer} expects {expected}")
            start = max(rank.free, rank.posted.pop(first), *(self.posts[first, peer][0] for peer in peers))
            size = max(sum(post.sent.values()), sum(post.received.values()))
            self.through[first, number] = rank.free = start + self.link.seconds(size)
        return True
