"""`ShmComm`: ranks that are processes of one machine, and write into each other's memory.

Every rank has a mailbox and a pool, both mapped by all others; memory from `empty` is in the pool. A message takes one
copy, made by its sender, from source to destination, whatever their strides::

    receiver   posts: tells the sender the destination of message n of this pair, if a slot is free       credit  n
    sender     posts too: compares the headers, copies, tells the receiver                                arrival n
    receiver   waits: sees the arrival, and may reuse the slot                       details: csrc/shm/mailbox.h

Only `wait` waits, asleep on this rank's own memory. Credits are written and bytes move whenever this rank is inside the
comm: posting, waiting or agreeing. A receive buffer outside the pool gets a stand-in in the pool and one more copy,
counted in `stats.staged_bytes`.

The first rank to fail writes the cause into shared memory, which each rank checks before it sleeps and whenever it
wakes, and into the group's store. A waiting rank also polls whether the awaited process is alive.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from seqpar import native
from seqpar.comm.arguments import PATIENCE, check_arguments, check_descriptors, check_pool
from seqpar.comm.base import ProcessChannel, ProcessComm, WorkBase, process_group
from seqpar.comm.failure import Owner, RootCause, held_up, parsed_cause, then
from seqpar.comm.header import REMEMBERED, Header, describe, mismatch
from seqpar.comm.protocol import Sides, Stats, Tag, Work
from seqpar.comm.rendezvous import Rendezvous, machine
from seqpar.comm.shm.board import Board

log = logging.getLogger("seqpar.comm")

POOL_BYTES = 64 << 30  # address space, not memory: pages are allocated when touched
SLICE = 0.05  # seconds between two checks that peers are alive
BEATING = 1.0  # seconds in which a rank that waits has beaten, however busy the machine is
NOTHING_OFFERED, OTHER_HEADER = 0, 2  # answers of shm_push; 1: the bytes moved


def missing() -> str | None:
    """Why `ShmComm` cannot be used on this machine, or None."""
    if sys.platform != "linux":
        return f"it needs memory files and futexes of Linux, this is {sys.platform}; use GroupComm"
    return native.missing()


def lost(end: int, peer: int) -> str:
    """Why nothing more will come from a peer to this end of shared memory, or ''."""
    ops = native.ops()
    if ops.shm_ended(end, peer):
        return "whose process has ended"
    return "which closed its comm" if ops.shm_has_left(end, peer) else ""


@dataclass(eq=False)
class _MessagesLeft:
    """The number of messages of an exchange that have not moved; shared by them and the exchange's `Work`."""

    tag: Tag
    left: int = 0

    @property
    def name(self) -> str:
        """The exchange in words."""
        return describe(self.tag)


@dataclass(eq=False)
class _ShmMessage:
    """One tensor to send or receive, with the words that both ends must share."""

    words: list[int]
    tensor: Tensor
    progress: _MessagesLeft


class ShmChannel(ProcessChannel):
    """This rank's end of the shared memory with its messages in progress, shared by a comm and its subs.

    Ranks are the group's. The queues of a dead group keep their tensors: peers may still write to them.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float, check: str, pool_bytes: int) -> None:
        self.rank, self.size, self.timeout = group.rank(), group.size(), timeout
        self._cause: tuple[int, str] | None = None
        store = group.get_group_store()
        rendezvous = Rendezvous("ShmComm", store, self.rank, self.size, timeout)
        self.root_cause = RootCause(store, f"seqpar/ShmComm/{rendezvous.number}/root cause", self.rank)
        self._meet(rendezvous, check, pool_bytes)
        self._group: list[object] = [group]
        self.owner, self.pool_bytes = Owner(self, self.rank, self._group), pool_bytes
        # re-entrant: the garbage collector may run a dropped work's __del__ inside a locked section
        self.lock = threading.RLock()
        peers = [rank for rank in range(self.size) if rank != self.rank]
        self.sending: dict[int, deque[_ShmMessage]] = {peer: deque() for peer in peers}
        self.receiving: dict[int, deque[_ShmMessage]] = {peer: deque() for peer in peers}
        self.uncredited: dict[int, deque[_ShmMessage]] = {peer: deque() for peer in peers}
        self.arrived = dict.fromkeys(peers, 0)
        self.calls = deque(maxlen=REMEMBERED)

    def _meet(self, rendezvous: Rendezvous, check: str, pool_bytes: int) -> None:
        def make() -> tuple[list[str], list[int], list[int]]:
            # in the rendezvous, so that no rank waits for one with wrong arguments
            check_arguments("ShmComm", self.timeout, check)
            check_pool("ShmComm", pool_bytes)
            # every rank's process, mailbox and pool
            check_descriptors("ShmComm", 3 * self.size + 8)
            if why := missing():
                raise NotImplementedError(f"ShmComm: {why}")
            self.ops = native.ops()
            with self._explained(pool_bytes):
                self.end = self.ops.shm_open(self.rank, self.size, pool_bytes)
                self._release = weakref.finalize(self, self.ops.shm_close, self.end)
                if self.rank == 0:
                    self.board = Board(0, self.size)
            return machine(), self.ops.shm_address(self.end), self.board.address if self.rank == 0 else []

        def map_all() -> None:
            for rank, (_, address, _) in enumerate(ends):
                if rank != self.rank:
                    with self._explained(pool_bytes):
                        self.ops.shm_map(self.end, rank, address)
            if self.rank:
                with self._explained(pool_bytes):
                    self.board = Board(self.rank, self.size, ends[0][2])

        ends = rendezvous.hear(make, check=check)
        elsewhere = [rank for rank, (where, *_) in enumerate(ends) if where[:2] != ends[0][0][:2]]
        if elsewhere:
            names = sorted({ends[rank][0][2] for rank in elsewhere})
            raise ValueError(
                f"ShmComm: ranks {elsewhere} run on {names}, rank 0 on {ends[0][0][2]}, expected one machine and one "
                "container, whose processes can map each other's memory; use GroupComm"
            )
        rendezvous.hear(map_all)
        self.board.mapped()
        self.ops.shm_ready(self.end)

    @property
    def closed(self) -> bool:
        """Whether the memory was let go."""
        return not self._release.alive

    @contextlib.contextmanager
    def _explained(self, pool_bytes: int) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, OSError) as error:
            raise RuntimeError(
                f"ShmComm: rank {self.rank} of {self.size} with pool_bytes={pool_bytes}: {error}; give a smaller "
                "pool_bytes where address space is short, or use GroupComm where ranks are of several users"
            ) from None

    @property
    def cause(self) -> tuple[int, str] | None:
        """The (rank, reason) that killed the group, or None."""
        if self._cause is None and (text := self.ops.shm_cause(self.end)):
            self._cause = parsed_cause(text)
            log.info("rank %d: root cause: rank %d: %s", self.rank, *self._cause)
        return self._cause

    def fail(self, reason: str) -> None:
        """Mark the group dead for `reason`, unless it has a root cause."""
        # a work collected in one cycle with its comm comes after the end: peers read there that it closed
        if self.owner.in_own_process and not self.closed and self.cause is None:
            log.info("rank %d: %s", self.rank, reason)
            self.ops.shm_fail(self.end, reason)
            rank, _, _ = self.ops.shm_cause(self.end).partition(" ")
            if rank in ("", str(self.rank)):
                self.root_cause.write(reason)

    def close(self) -> None:
        """Let go of the group and the mapped memory. Every rank calls it, after its last wait."""
        self.owner.check()
        self._cause = self.cause or (self.rank, "the comm is closed")
        self._release()
        self.root_cause.close()
        self._group.clear()

    def empty(self, shape: Sequence[int], dtype: torch.dtype, *, spare: bool = False) -> Tensor | None:
        """Memory of the pool, or None if it is full. spare: also from the part that is kept for messages."""
        return self.ops.shm_empty(self.end, list(shape), dtype, dtype.itemsize, spare)

    def post(self, sends: Iterator[tuple[int, _ShmMessage]], recvs: Iterator[tuple[int, _ShmMessage]]) -> None:
        """Queue messages, (peer, message), and move everything that can move."""
        with self.lock:
            for queues, messages in (((self.receiving, self.uncredited), recvs), ((self.sending,), sends)):
                for peer, message in messages:
                    message.progress.left += 1
                    for queue in queues:
                        queue[peer].append(message)
            self.progress()

    def progress(self) -> None:
        """Handle arrivals, write credits, and push the messages that peers gave credit for. Needs the lock.

        Raises: PeerError if a peer expects a message other than the next one to it.
        """
        ops, end = self.ops, self.end
        for peer, queue in self.receiving.items():
            if queue:
                arrived = ops.shm_arrived(end, peer)
                for _ in range(arrived - self.arrived[peer]):
                    queue.popleft().progress.left -= 1
                self.arrived[peer] = arrived
                waiting = self.uncredited[peer]
                while waiting and ops.shm_credit(end, peer, waiting[0].words, waiting[0].tensor):
                    waiting.popleft()
        for peer, queue in self.sending.items():
            while queue:
                answer = ops.shm_push(end, peer, queue[0].words, queue[0].tensor)
                if answer == NOTHING_OFFERED:
                    break
                if answer == OTHER_HEADER:
                    self._fail_to_meet(peer, queue[0])
                queue.popleft().progress.left -= 1

    def _fail_to_meet(self, peer: int, message: _ShmMessage) -> None:
        expected = Header(*self.ops.shm_offered(self.end, peer)[:-1])
        sent, doing = Header(*message.words[:-1]), f"in {message.progress.name}"
        why = mismatch(self.rank, sent, peer, expected, message.progress.tag, self.calls, self.refused)
        self.fail(f"{doing}: {why}")
        raise self.error(f"{doing}, sending to rank {peer}")

    def finish(self, progress: _MessagesLeft) -> None:
        """Return when all messages of an exchange have moved.

        Raises: PeerError after the timeout, if a peer is lost, or if the group is dead.
        """
        self.owner.check()
        start = looked = time.monotonic()
        before: list[int] = []
        try:
            while True:
                # any write after this line makes the wait below return at once
                bell = self.ops.shm_bell(self.end)
                with self.lock:
                    dead = self.cause is not None
                    if not dead:
                        self.progress()
                    if not progress.left:
                        return
                    if dead:
                        raise self.error(f"in {progress.name}, waiting for {self._first_awaited(progress)}")
                now = time.monotonic()
                if now - looked >= SLICE:
                    looked = now
                    if not before and now - start >= self.timeout - BEATING:
                        before = self.board.read()
                    self._look(progress, now - start, before)
                self.ops.shm_wait(self.end, bell, SLICE)
        finally:
            if looked != start:
                self.board.clear()

    def _look(self, progress: _MessagesLeft, seconds: float, before: Sequence[int]) -> None:
        """Fail if an awaited peer is gone, or was awaited for too long; tell the board otherwise.

        before: what the board said a while ago, if that is almost so long.
        """
        with self.lock:
            for peer, _ in self._awaited(progress):
                if why := lost(self.end, peer):
                    # it may have done its part before it was lost
                    self.progress()
                    if progress.left:
                        return self.fail(f"in {progress.name}: lost rank {peer}, {why}{then(peer, progress.tag.hint)}")
            if not progress.left:
                return
            peer, *_ = self._awaited(progress)[0]
            self.board.beat(peer)
            if seconds >= self.timeout:
                does = self._first_awaited(progress).removeprefix(f"rank {peer}")
                chain, hint = self.board.chain(peer, before), progress.tag.hint
                self.fail(held_up(f"in {progress.name}", self.timeout, chain, does, hint))

    def _awaited(self, progress: _MessagesLeft) -> list[tuple[int, bool]]:
        """The peers that an exchange waits for, each with whether it has to send."""
        sides = ((self.receiving, True), (self.sending, False))
        waiting = [(peer, side, queue) for queues, side in sides for peer, queue in queues.items()]
        return [(peer, side) for peer, side, queue in waiting if any(m.progress is progress for m in queue)]

    def _first_awaited(self, progress: _MessagesLeft) -> str:
        """The first peer that an exchange waits for, and its part, in words."""
        (peer, sends), *others = self._awaited(progress)
        more = f" (and {len(others)} more)" if others else ""
        does = "send" if sends else "receive"
        return f"rank {peer} to {does}{more}"


class _ShmWork(WorkBase[ShmChannel]):
    """`Work` of an exchange; `staged` has pairs of a tensor to receive and its stand-in in the pool."""

    def __init__(
        self, channel: ShmChannel, progress: _MessagesLeft, staged: list[tuple[Tensor, Tensor]], stats: Stats
    ) -> None:
        super().__init__(channel, progress.tag, stats)
        self._progress, self._staged = progress, staged

    def _finish(self) -> None:
        self._channel.finish(self._progress)
        # inference mode may write both ordinary tensors and those created in inference mode
        with torch.inference_mode():
            for target, stand_in in self._staged:
                target.copy_(stand_in)
        self._staged = []


class ShmComm(ProcessComm[ShmChannel]):
    """Ranks that are processes of one machine, for CPU tensors. See `Comm` for the methods.

    group: a `ProcessGroup`, a 1-D `DeviceMesh` (of a larger mesh: ``mesh["cp"]``), or None for the default group; only
    its store is used. timeout: seconds after which a wait fails. check: how often verbs compare their arguments over
    the ranks, "batch" (once per plan and signature) or "call"; kept as `check_every`. pool_bytes: how much memory of
    `empty` peers can write at once; by default the machine's, at most 64 GiB. It takes only address space until it is
    used. A little more is reserved for messages, so that ranks can agree and stage small tensors while the pool is
    full.

    Memory from `empty`, where results of verbs are too, is shared: a fork that writes to it changes its parent's, and
    sees what its parent writes later, so give it a clone. All processes need the same user and pid namespace. Bytes
    only move while a rank is inside the comm, posting, waiting or agreeing.

    A collective constructor: every rank of the group calls it. A sub shares its parent's `stats`, whose `sent_to`
    counts by the parent's ranks. Tensors may have any strides, and up to 6 dims if they are not contiguous.

    Raises: ValueError for a group without this process or whose ranks do not share a machine, and on all ranks for
    invalid arguments of one; NotImplementedError without the compiled extension; RuntimeError quoting a rank that could
    not take part; PeerError naming ranks that did not take part.
    """

    direct = True

    def __init__(
        self, group: Any = None, *, timeout: float = PATIENCE, check: str = "batch", pool_bytes: int | None = None
    ) -> None:
        if pool_bytes is None:
            pool_bytes = min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), POOL_BYTES)
        self._join(ShmChannel(process_group("ShmComm", group), timeout, check, pool_bytes), (), Stats(), {}, check)

    def _admit(self, devices: Set[torch.device], tag: Tag) -> None:
        if others := [device for device in devices if device.type != "cpu"]:
            raise ValueError(f"exchange: a tensor on {others[0]}; ShmComm moves CPU tensors: use GroupComm over nccl")

    def _post(self, sides: Sides, tag: Tag, stats: Stats) -> Work:
        """See `CommBase`. A mismatch that the exchange completes raises PeerError here."""
        self._channel.calls.append(tag)
        channel, progress, staged = self._channel, _MessagesLeft(tag), []
        targets = {}
        for peer, tensors in sides.recvs.items():
            targets[peer] = [t if channel.ops.shm_owns(channel.end, t) else self._stand_in(t, tag) for t in tensors]
            staged += [(t, own) for t, own in zip(tensors, targets[peer]) if own is not t]
        stats.staged_bytes += sum([x.nbytes for x, _ in staged])
        channel.post(self._messages(sides.sends, tag, progress), self._messages(targets, tag, progress))
        return _ShmWork(channel, progress, staged, stats)

    def _messages(
        self, side: Mapping[int, list[Tensor]], tag: Tag, progress: _MessagesLeft
    ) -> Iterator[tuple[int, _ShmMessage]]:
        for peer, tensors in side.items():
            header = Header.of(self._scope_id, tag, tensors)
            for index, tensor in enumerate(tensors):
                yield peer, _ShmMessage([*header, index], tensor, progress)

    def _stand_in(self, tensor: Tensor, tag: Tag) -> Tensor:
        channel = self._channel
        stand_in = channel.empty(tensor.shape, tensor.dtype, spare=True)
        if stand_in is None:
            # the peers of this exchange are waiting already
            channel.fail(
                f"in {describe(tag)}: a tensor of {tensor.nbytes} bytes to receive is not in the pool of shared "
                f"memory, and the pool is full; give ShmComm a larger pool_bytes than {channel.pool_bytes}"
            )
            raise channel.error(f"in {describe(tag)}")
        return stand_in

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, kept: bool = False) -> Tensor:
        """Uninitialised memory that peers write; ordinary memory for one rank, in a fork, or if the pool is full."""
        if device.type != "cpu":
            raise ValueError(f"empty: a tensor on {device}; ShmComm moves CPU tensors: use GroupComm over nccl")
        # a fork has the parent's pool, but not the parent's knowledge of it
        pooled = self.size > 1 and self._channel.owner.in_own_process and not self._channel.closed
        tensor = self._channel.empty(shape, dtype) if pooled else None
        return torch.empty(tuple(shape), dtype=dtype, device="cpu") if tensor is None else tensor
