"""`LocalComm`: ranks as threads of one process, under the rules of the strictest transport.

The model is grouped NCCL point-to-point on one stream. Every rank has a queue of posted rounds, and only the head of a
queue is active. A message moves when its sender's head and its receiver's head both hold it, under the same tag and
round. A head is popped when all its messages have moved. With several nodes, as in `GroupComm`, pairs inside a node
have a stream of their own and so a queue of their own: see `protocol.rounds`. Situations that would hang on NCCL are
named here:

    both heads hold a message of one pair under different tags       -> tag mismatch
    the heads wait for each other in a circle                        -> cycle, found when its last edge is posted
    one waits for an exchange that a peer does not post, as the peer waits for it to agree -> cycle, found at once
    a peer posts nothing                                             -> timeout, naming the end of the chain of waits

A message is copied from the sender's live memory `delay` seconds after both ends were posted, by whichever thread posts
or waits next; until then the receive buffer holds NaN. So a read before the wait, or a sent tensor overwritten before
it, gives a wrong answer instead of a lucky one.

On CUDA, where ranks share a device but perhaps not a stream, an exchange belongs to the stream that posts it:

    copy    on the receiver's stream, after the sender's work at the time of posting
    wait    the waiting stream follows the copies from and to its rank; until then the world holds their memory

Tests check this on streams that record their order; it has not been run on a device.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from seqpar.comm.arguments import check_timeout
from seqpar.comm.base import COMPARING, GATHERING, Channel, CommBase, WorkBase
from seqpar.comm.failure import in_some_comm
from seqpar.comm.local_waits import Agreement, PostedRound, RoundsLeft, Scope, Waits, copy_rows, cycle_through, fill_nan
from seqpar.comm.protocol import (
    DEAD,
    Comm,
    Contribution,
    PeerError,
    Sides,
    Stats,
    Tag,
    Work,
    raise_first,
    refuse_capture,
    rounds,
)
from seqpar.facts.value import integer

log = logging.getLogger("seqpar.comm")

KINDS = {COMPARING: "agreement on", GATHERING: "gathering of"}


@dataclass(order=True)
class _Move:
    """A matched message, due at a time of the monotonic clock."""

    due: float
    number: int
    sender: PostedRound = field(compare=False)
    receiver: PostedRound = field(compare=False)
    source: list[Tensor] = field(compare=False)
    target: list[Tensor] = field(compare=False)


class _World:
    """The queues of all ranks, see `Waits`. One lock guards everything; a rank waits on its own condition."""

    def __init__(
        self, size: int, timeout: float, delays: Sequence[float], *, direct: bool, nodes: Sequence[int]
    ) -> None:
        self.size, self.timeout, self.delays, self.direct, self.nodes = size, timeout, delays, direct, nodes
        # re-entrant: the garbage collector may run a dropped work's __del__ inside any locked section
        self.lock = threading.RLock()
        self.wakeups = [threading.Condition(self.lock) for _ in range(size)]
        self.waits = Waits(size)
        self.queues = self.waits.queues
        self.moves: list[_Move] = []
        self.numbers = itertools.count()
        self.agreements: dict[tuple[Scope, int], Agreement] = {}
        self.failure: tuple[int, str] | None = None
        self.held: dict[RoundsLeft, list[Tensor]] = {}  # CUDA tensors of exchanges before their wait

    def fail(self, rank: int, reason: str) -> None:
        """Make (rank, reason) the root cause, unless there is one, and wake every rank."""
        with self.lock:
            if self.failure is None:
                self.failure = (rank, reason)
                log.info("rank %d: %s", rank, reason)
                for wakeup in self.wakeups:
                    wakeup.notify_all()

    def give_up(self, rank: int, doing: str) -> NoReturn:
        """Raise the error of a rank that found the world dead while it was `doing` something."""
        assert self.failure is not None
        raise PeerError.quoting(rank, doing, *self.failure)

    def post(self, entries: Sequence[PostedRound]) -> None:
        """Append the rounds of one exchange to the rank's queues, and move all messages that can move."""
        rank, progress = entries[0].rank, entries[0].progress
        with self.lock:
            if self.failure is not None:
                self.give_up(rank, f"cannot post {entries[0]}")
            if progress.stream is not None:
                sides = (side for entry in entries for side in (entry.sends, entry.recvs))
                self.held[progress] = [tensor for side in sides for tensor in _all(side)]
            idle = [number for number in {*map(self._number, entries)} if not self.queues[number]]
            for entry in entries:
                self.queues[self._number(entry)].append(entry)
            self._advance(idle)
            if idle and self.failure is not None:
                self.give_up(rank, f"posted {entries[0]}")

    def wait(self, progress: RoundsLeft) -> None:
        """Return when the exchange is complete; meanwhile move any rank's due messages."""
        rank, chain = progress.rank, self.waits.chain
        with self.lock:
            deadline = time.monotonic() + self.timeout
            self.waits.waiting[rank] = progress
            try:
                while progress.rounds_left:
                    self._idle(rank, deadline, lambda: f"waiting {chain(rank)}", lambda: chain(rank))
            finally:
                del self.waits.waiting[rank]
            if progress.stream is not None:
                current = torch.cuda.current_stream(progress.stream.device)
                for event in progress.copied:
                    current.wait_event(event)
                # afterwards: later work on this stream may reuse the memory
                self.held.pop(progress, None)

    def _idle(self, rank: int, deadline: float, doing: Callable[[], str], awaits: Callable[[], str]) -> None:
        """Move due messages, or sleep until something happens; give up if nothing can help this rank.

        doing, awaits: return what it does, and what it has awaited if the time is up, in words.
        """
        now = time.monotonic()
        if self.failure is not None:
            self.give_up(rank, doing())
        elif self.moves and self.moves[0].due <= now:
            self._deliver(now)
        elif now >= deadline:
            self.fail(rank, f"waited {self.timeout:g} s {awaits()}")
        elif not self._fail_of_cycle(rank, self.waits.awaited):
            until = min(deadline, self.moves[0].due) if self.moves else deadline
            self.wakeups[rank].wait(until - now)

    def agree(
        self, rank: int, ranks: Sequence[int], key: tuple[Scope, int], claim: Any, *, kind: str, what: str, hint: str
    ) -> list[Any]:
        """The claims of all `ranks`, in that order, once all have arrived. kind: of call, equal on all ranks."""
        with self.lock:
            agreement = self.agreements.setdefault(key, Agreement(ranks))
            call = f"{kind} {what}"
            for peer, its_call in agreement.calls.items():
                if not its_call.startswith(kind):
                    pair = f"rank {peer} is in the {its_call}, rank {rank} in the {call}"
                    self.fail(rank, f"ranks {peer} and {rank} make different calls: {pair}")
                    self.give_up(rank, f"in the {call}")
            agreement.calls[rank], agreement.claims[rank] = call, claim
            for peer in ranks:
                self.wakeups[peer].notify_all()
            deadline = time.monotonic() + self.timeout
            self.waits.agreeing[rank] = agreement
            then = f"{DEAD}; {hint}" if hint else ""

            def doing() -> str:
                return f"agreeing on {what} and waiting for ranks {agreement.missing}"

            def awaits() -> str:
                return f"for ranks {agreement.missing} to agree on {what}{then}"

            try:
                while agreement.missing:
                    self._idle(rank, deadline, doing, awaits)
            finally:
                del self.waits.agreeing[rank]
            self.agreements.pop(key, None)
            return [agreement.claims[peer] for peer in ranks]

    def _number(self, entry: PostedRound) -> int:
        """The number of a round's queue."""
        return entry.key[2][0] * self.size + entry.rank

    def _advance(self, changed: list[int]) -> None:
        """Match and move messages from the heads of the `changed` queues on; then look for cycles in new heads."""
        fresh = set(changed)
        while changed and self.failure is None:
            number = changed.pop()
            if not self.queues[number]:
                continue
            fresh.add(number)
            head = self.queues[number][0]
            lane = number // self.size * self.size
            heads = [queue[0] for queue in self.queues[lane : lane + self.size] if queue]
            met = [peer for peer in heads if head.needs(peer.rank) or peer.needs(head.rank)]
            for peer in met:
                self._match(head, peer)
                self._match(peer, head)
            changed += [self._number(entry) for entry in [head, *met] if self._pop_if_done(entry)]
        for number in fresh:
            if self.failure is None:
                self._fail_of_cycle(number, self.waits.blockers)

    def _match(self, sender: PostedRound, receiver: PostedRound) -> None:
        """Move the messages between two heads that both hold."""
        sends, recvs = receiver.rank in sender.sends, sender.rank in receiver.recvs
        if self.failure is not None or not (sends or recvs if sender.key == receiver.key else sends and recvs):
            return
        pair = f"rank {sender.rank} is in {sender}, rank {receiver.rank} in {receiver}"
        if sender.key != receiver.key:
            self.fail(sender.rank, f"ranks {sender.rank} and {receiver.rank} make different calls: {pair}")
            return
        source, target = sender.sends.get(receiver.rank, []), receiver.recvs.get(sender.rank, [])
        sent, expected = ([f"{str(t.dtype)[6:]}{list(t.shape)}" for t in several] for several in (source, target))
        if sent != expected:
            what = f"rank {sender.rank} sends {sent} to rank {receiver.rank}, which receives {expected}"
            self.fail(sender.rank, f"{what}; {pair}")
            return
        del sender.sends[receiver.rank], receiver.recvs[sender.rank]
        delay = self.delays[sender.key[2][0]]
        if not delay:
            _move(sender.progress, receiver.progress, source, target)
        else:
            sender.moving += 1
            receiver.moving += 1
            due = max(sender.posted, receiver.posted) + delay
            heapq.heappush(self.moves, _Move(due, next(self.numbers), sender, receiver, source, target))
            for wakeup in self.wakeups:
                wakeup.notify_all()

    def _deliver(self, now: float) -> None:
        changed: list[int] = []
        while self.moves and self.moves[0].due <= now:
            move = heapq.heappop(self.moves)
            _move(move.sender.progress, move.receiver.progress, move.source, move.target)
            for entry in (move.sender, move.receiver):
                entry.moving -= 1
                if self._pop_if_done(entry):
                    changed.append(self._number(entry))
        if changed:
            self._advance(changed)

    def _pop_if_done(self, entry: PostedRound) -> bool:
        """Remove a head from its queue if all its messages have moved; returns whether it did."""
        queue = self.queues[self._number(entry)]
        if entry.sends or entry.recvs or entry.moving or not queue or queue[0] is not entry:
            return False
        queue.popleft()
        entry.progress.rounds_left -= 1
        if not entry.progress.rounds_left:
            self.wakeups[entry.rank].notify_all()
        return True

    def _fail_of_cycle(self, start: int, awaited: Callable[[int], list[int]]) -> bool:
        """Whether ranks, or heads of queues, wait for each other in a cycle through this one: then the root cause."""
        cycle = cycle_through(start, awaited)
        if cycle:
            self.fail(
                start % self.size, f"the ranks wait for each other in a cycle: {self.waits.describe_cycle(cycle)}"
            )
        return bool(cycle)


def _move(sender: RoundsLeft, receiver: RoundsLeft, source: Sequence[Tensor], target: Sequence[Tensor]) -> None:
    """Copy now, or on CUDA when the receiver's stream reaches the copy, on whichever thread this is."""
    stream = sender.stream if receiver.stream is None else receiver.stream
    if stream is None:
        copy_rows(source, target)
        return
    if sender.ready is not None:
        stream.wait_event(sender.ready)
    with torch.cuda.stream(stream):
        copy_rows(source, target)
    copied = stream.record_event()
    sender.copied.append(copied)
    receiver.copied.append(copied)


def _all(side: Mapping[int, Sequence[Tensor]]) -> Iterable[Tensor]:
    return itertools.chain.from_iterable(side.values())


def _stream(tensors: Iterable[Tensor]) -> Any:
    """The current stream of the tensors' CUDA device, None for CPU tensors."""
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    return None if device is None else torch.cuda.current_stream(device)


class _LocalChannel(Channel):
    """One rank's end of a world."""

    def __init__(self, world: _World, rank: int) -> None:
        self.world, self.rank, self.size, self.closed = world, rank, world.size, False

    @property
    def cause(self) -> tuple[int, str] | None:
        return (self.rank, "the comm is closed") if self.closed else self.world.failure

    def fail(self, reason: str) -> None:
        self.world.fail(self.rank, reason)

    def close(self) -> None:
        self.closed = True


class _LocalWork(WorkBase[_LocalChannel]):
    def __init__(self, channel: _LocalChannel, tag: Tag, stats: Stats, progress: RoundsLeft) -> None:
        super().__init__(channel, tag, stats)
        self._progress = progress

    def _finish(self) -> None:
        self._channel.world.wait(self._progress)


class LocalComm(CommBase[_LocalChannel]):
    """A rank that is a thread, or a single rank. See `Comm` for the methods, and the module for the rules.

    `LocalComm()` is a single rank; `LocalComm.world(size)` creates the ranks of a world. A sub shares its parent's
    `stats`, whose `sent_to` counts by the parent's ranks.
    """

    def __init__(self) -> None:
        self._join(_LocalChannel(_World(1, 60.0, (0.0, 0.0), direct=True, nodes=()), 0), (), Stats(), {}, "call")

    @classmethod
    def world(
        cls, size: int, *, timeout: float = 60.0, delay: float | tuple[float, float] = 0.0, direct: bool = True,
        node: int | None = None,
    ) -> list[LocalComm]:  # fmt: skip
        """One comm for each of `size` ranks; give each to its own thread.

        timeout: seconds after which a wait fails. delay: seconds that a message takes once both ends are posted, or two
        such numbers, for pairs of different nodes and inside a node. direct: whether tensors may have any strides, see
        `Comm.direct`; a `GroupComm` only takes contiguous ones. node: this many consecutive ranks are a node, and
        exchanges inside nodes do not wait for those across; by default all ranks are one node.

        Raises: ValueError for a size or node that is not an integer of at least 1, or a timeout that is not positive.
        """
        size = integer("LocalComm.world: size", size, 1)
        if node is not None:
            node = integer("LocalComm.world: node", node, 1)
        check_timeout("LocalComm.world", timeout)
        nodes = () if node is None else [rank // node for rank in range(size)]
        delays = delay if isinstance(delay, tuple) else (delay, delay)
        world = _World(size, timeout, delays, direct=direct, nodes=nodes)
        comms = [cls.__new__(cls) for _ in range(size)]
        for rank, comm in enumerate(comms):
            comm._join(_LocalChannel(world, rank), (), Stats(), {}, "call")
        return comms

    def _join(
        self, channel: _LocalChannel, scope: Scope, stats: Stats, counters: dict[object, Any], check_every: str
    ) -> None:
        super()._join(channel, scope, stats, counters, check_every)
        self._world, self.direct = channel.world, channel.world.direct

    def _post(self, sides: Sides, tag: Tag, stats: Stats) -> Work:
        """See `CommBase`. A mismatch or a cycle that the exchange completes raises PeerError here."""
        sends, recvs, _ = sides
        stream = _stream(itertools.chain(_all(sends), _all(recvs)))
        if stream is not None:
            refuse_capture(tag)
        with torch.inference_mode():
            for tensor in _all(recvs):
                if tensor.is_floating_point():
                    fill_nan(tensor)
        me = self._channel.rank
        parts = rounds(me, self._channel.size, sends, recvs, self._world.nodes)
        ready = None if stream is None else stream.record_event()
        progress = RoundsLeft(me, len(parts), stream, ready)
        work = _LocalWork(self._channel, tag, stats, progress)
        now = time.monotonic()
        self._world.post([PostedRound(me, (self._scope, tag, p.key), p.sends, p.recvs, progress, now) for p in parts])
        return work

    def _met(self, form: str, what: str, own: Contribution, hint: str) -> list[bytes]:
        key, kind = (self._scope, next(self._counter("agree"))), KINDS[form]
        found = self._world.agree(self._channel.rank, self._ranks, key, own, kind=kind, what=what, hint=hint)
        raise_first([each.claim for each in found], own.error)
        return [each.packed for each in found]


_warned: weakref.WeakSet[Comm] = weakref.WeakSet()  # comms that `warn_alone` has named


def warn_alone(comm: Comm, who: str, *, stacklevel: int) -> None:
    """Warn once of a `LocalComm()` where torch.distributed has several processes, which would all compute alone.

    Not if this process is in a comm of processes too, as that of a program that compares with one rank.
    """
    if type(comm) is not LocalComm or comm._world.size > 1 or not (dist.is_available() and dist.is_initialized()):
        return
    if dist.get_world_size() == 1 or in_some_comm() or comm in _warned:
        return
    _warned.add(comm)
    warnings.warn(
        f"{who}: LocalComm() is one rank, but torch.distributed has {dist.get_world_size()} processes, and each would "
        "compute alone; give seqpar.GroupComm(), or seqpar.GroupComm(group) of this process if one is meant",
        stacklevel=stacklevel,
    )
