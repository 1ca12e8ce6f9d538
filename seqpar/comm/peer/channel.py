"""The channel of a `PeerComm`: streams of GPUs write straight into each other's memory, see `seqpar.comm.peer`."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from seqpar import native
from seqpar.comm.arguments import check_pool
from seqpar.comm.base import Channel
from seqpar.comm.failure import Monitor, Owner, parsed_cause, waited, weakly
from seqpar.comm.header import REMEMBERED, Header, mismatch
from seqpar.comm.peer.cuda import row_major
from seqpar.comm.peer.memory import PeerMemory, agreed
from seqpar.comm.peer.pieces import CUT, HALVES, CutPiece, Flight, Lane, PeerExchange, box, cut, lane_bytes, plain
from seqpar.comm.peer.pool import ALIGNMENT, DevicePool
from seqpar.comm.peer.signals import AHEAD, FIRST, SignalWords, epoch, reached
from seqpar.comm.protocol import DEAD, DIMS, Comm, PeerError, Tag
from seqpar.comm.shm.comm import lost

log = logging.getLogger("seqpar.comm")

_Side = Mapping[int, Sequence[Tensor]]


class PeerChannel(Channel):
    """The connection that a comm and its subs share. Ranks are the control comm's.

    One thread at a time uses it, under `lock`; the monitor and its threads only touch words and the cause.
    """

    def __init__(self, control: Comm, cuda: Any, pool_bytes: int, timeout: float) -> None:
        with agreed(control):
            check_pool("PeerComm", pool_bytes)
        self.control, self.cuda, self.timeout = control, cuda, timeout
        self.rank, self.size = control.rank, control.size
        self.words, self.ops, self.lock = SignalWords(self.size), native.ops(), threading.RLock()
        self.owner = Owner(self, self.rank, [control])
        self.calls: deque[Tag] = deque(maxlen=REMEMBERED)
        self.mail = self.ops.shm_open(self.rank, self.size, ALIGNMENT)
        self.end = weakref.finalize(self, self.ops.shm_close, self.mail)
        peers = [peer for peer in range(self.size) if peer != self.rank]
        part = lane_bytes(pool_bytes, len(peers))
        lanes = len(peers) * HALVES * part
        pool_bytes = max(pool_bytes - lanes, ALIGNMENT)
        whole, address = self.words.bytes + pool_bytes + lanes, list(self.ops.shm_address(self.mail))
        self.memory = PeerMemory(control, cuda, whole, self.words.count, FIRST, address)
        self.bases, self.base = self.memory.bases, self.memory.bases[self.rank]
        self._open_mail(self.memory.mails)
        self.pool = DevicePool(cuda, self.base + self.words.bytes, pool_bytes)
        wheres = [pool_bytes + HALVES * part * n for n in range(len(peers))]
        self.lanes = {peer: Lane(self.pool.at + at, at, part) for peer, at in zip(peers, wheres, strict=True)}
        # streams of one priority may share a hardware queue: a wait for peers must not hold up compute, and a release
        # must not queue behind the waits
        self.copies = {peer: cuda.stream(-1) for peer in peers}
        self.credits, self.landing, self.private = cuda.stream(-1), cuda.stream(-1), cuda.stream(-5)
        self.posted, self.pushed = dict.fromkeys(peers, 0), dict.fromkeys(peers, 0)  # offers so far, made and used
        self.cut = dict.fromkeys(peers, 0)  # pieces pushed so far
        self.offers: dict[int, deque[tuple[list[int], int, list[int]] | CutPiece]] = {peer: deque() for peer in peers}
        self.pushing: deque[PeerExchange] = deque()
        self.flying: deque[Flight] = deque()
        self.orphans: list[object] = []  # tensors that streams may still use after a failure
        self.cramped = False  # whether a message had to come in pieces
        self.poisoned = threading.Event()
        self.closing, self.closed = threading.Lock(), False  # held while streams get orders to release
        self.monitor = Monitor(timeout, weakly(self._stuck, None), weakly(self._look, gone=True))

    def _open_mail(self, addresses: Sequence[list[int]]) -> None:
        with agreed(self.control):
            for peer, address in enumerate(addresses):
                if peer != self.rank:
                    self.ops.shm_map(self.mail, peer, address)
        self.ops.shm_ready(self.mail)

    def close(self) -> None:
        """Free the memory. Every rank calls it, after its last wait."""
        self.check("closing")
        streams = (*self.copies.values(), self.credits, self.landing, self.private)
        for stream in (*streams, self.cuda.current()):
            self.cuda.record(stream).synchronize()
        self.control.agree("PeerComm.close", {})
        # nothing is left that would have to be released
        self.poisoned.set()
        self.ops.shm_fail(self.mail, "the comm is closed")
        with self.closing:
            self.closed = True
        self.cuda.record(self.private).synchronize()
        self.pool.close()
        self.memory.close()
        for stream in streams:
            self.cuda.end(stream)

    def post(self, scope: int, tag: Tag, sends: _Side, recvs: _Side) -> PeerExchange:
        """Make the current stream give its credits, notify peers, and push everything that peers already wait for."""
        self.calls.append(tag)
        with self.lock:
            stream, work = self.cuda.current(), PeerExchange(tag)
            work.sources = [x for several in sends.values() for x in several]
            work.targets = [x for several in recvs.values() for x in several]
            credits = {}
            for peer, several in recvs.items():
                header = Header.of(scope, tag, several)
                for index, x in enumerate(several):
                    self._receive(work, x, stream, peer, [*header, index])
                work.arrivals[peer] = self.posted[peer]
                credits[self.bases[peer] + self.words.credit(self.rank)] = epoch(self.posted[peer] - 1)
            for peer, several in sends.items():
                header = Header.of(scope, tag, several)
                work.sends[peer] = deque(([*header, index], x) for index, x in enumerate(several))
            work.ready = self.cuda.record(stream)
            if credits:
                self.cuda.follow(self.credits, work.ready)
                self.cuda.write(self.credits, credits)
            self.pushing.append(work)
            self.progress()
            return work

    def _receive(self, work: PeerExchange, target: Tensor, stream: Any, peer: int, words: list[int]) -> None:
        """Queue offers for a message: of its tensor, of a block of the pool if peers cannot write it, or of pieces."""
        place: Tensor | None = target
        if not self.pool.owns(target):
            work.staged_bytes += target.nbytes
            place = self.pool.take(target.shape, target.dtype, stream)
            if place is None:
                self._receive_pieces(work, target, peer, words)
                return
            work.staged.append((target, place))
        assert place is not None
        work.blocks.append(place)
        strides = list(place.stride()) if place.dim() <= DIMS else []
        self.offers[peer].append((words, place.data_ptr() - self.pool.at, strides))
        self.posted[peer] += 1

    def _receive_pieces(self, work: PeerExchange, target: Tensor, peer: int, words: list[int]) -> None:
        whole, most = plain(target), self.lanes[peer].bytes
        if not self.cramped:
            self.cramped = True
            log.warning(
                "rank %d: the pool of %d bytes has no room for the %d that %s receives from rank %d: they arrive "
                "in pieces of %d, which are sent only while both ranks wait; give PeerComm a larger pool_bytes",
                self.rank, self.pool.size, target.nbytes, work.name, peer, most,
            )  # fmt: skip
        for begin, elements in cut(whole.shape, whole.dtype, most):
            self.offers[peer].append(
                CutPiece(words, self.posted[peer], box(whole, begin, elements), begin, elements, work)
            )
            self.posted[peer] += 1
            work.pieces += 1

    def progress(self) -> None:
        """Copy pieces that arrived, make the offers that there is room for, and push what peers offered, in order."""
        for peer, offers in self.offers.items():
            if self.lanes[peer].flying:
                self._land(peer)
            while offers:
                item = offers[0]
                if not (
                    self._offer_piece(peer, item)
                    if isinstance(item, CutPiece)
                    else self.ops.shm_offer(self.mail, peer, *item)
                ):
                    break
                offers.popleft()
        while self.pushing:
            work = self.pushing[0]
            for peer in list(work.sends):
                self._push(work, peer)
            if work.sends:
                return
            self.pushing.popleft()

    @contextlib.contextmanager
    def progressing(self) -> Iterator[None]:
        """While this thread waits for other hosts, another one continues the exchanges that are left, if any are."""
        with self.lock:
            self.progress()
            left = self._left()
        if not left:
            yield
            return
        done = threading.Event()
        threading.Thread(target=self._progress_until, args=(done,), name="seqpar comm push", daemon=True).start()
        try:
            yield
        finally:
            done.set()

    def _left(self) -> bool:
        """Whether a host has more to do for the exchanges that were posted."""
        lanes = any([lane.flying for lane in self.lanes.values()])
        return bool(self.pushing) or lanes or any(self.offers.values())

    def _progress_until(self, done: threading.Event) -> None:
        try:
            while self.cause is None:
                seen = self.ops.shm_bell(self.mail)
                with self.lock:
                    if done.is_set():
                        return
                    self.progress()
                    if not self._left():
                        return
                self.ops.shm_wait(self.mail, seen, 0.1)
        except RuntimeError as error:
            if not isinstance(error, PeerError):  # which is told already
                self.fail(f"continuing exchanges during an agreement: {error}")

    def _offer_piece(self, peer: int, piece: CutPiece) -> bool:
        """Whether there was room for a piece, in the peer's buffer and in the mailbox."""
        offer = self.lanes[peer].offer(piece)
        if offer is None or not self.ops.shm_offer(self.mail, peer, *offer):
            return False
        self.lanes[peer].fly(piece)
        return True

    def _land(self, peer: int) -> None:
        """Copy the pieces whose pushes the peer's host has launched out of their buffer."""
        lane, words, arrived = self.lanes[peer], self.words, self.ops.shm_arrived(self.mail, peer)
        while lane.flying and lane.flying[0][0].number < arrived:
            piece, block = lane.flying.popleft()
            self.cuda.follow(self.landing, piece.work.ready)
            self._wait(self.landing, {self.base + words.arrival(peer): epoch(piece.number)}, heeds_poison=True)
            self.cuda.copy(self.landing, [piece.target], [block])
            self.cuda.write(self.landing, {self.bases[peer] + words.lane(self.rank): epoch(lane.landed)})
            lane.landed += 1
            piece.work.pieces -= 1
            if not piece.work.pieces:
                piece.work.landed = self.cuda.record(self.landing)

    def _push(self, work: PeerExchange, peer: int) -> None:
        queue, stream = work.sends[peer], self.copies[peer]
        while queue and (offer := self.ops.shm_offer_of(self.mail, peer)):
            words, source = queue[0]
            taken, where, strides = offer[: len(words)], offer[len(words)], offer[len(words) + 1 :]
            if taken != words:
                sent, offered = Header(*words[:-1]), Header(*taken[:-1])
                self.fail(f"in {work.name}: {mismatch(self.rank, sent, peer, offered, work.tag, self.calls)}")
                raise self.error(f"in {work.name}, sending to rank {peer}")
            if peer not in work.begun:
                work.begun.add(peer)
                self.cuda.follow(stream, work.ready)
            at, at_peer = epoch(self.pushed[peer]), self.bases[peer] + self.words.bytes + where
            self.pushed[peer] += 1
            if strides[0] != CUT:
                queue.popleft()
                if peer not in work.credited:  # all whole messages of an exchange are credited at once
                    work.credited.add(peer)
                    self._wait(stream, {self.base + self.words.credit(peer): at}, heeds_poison=False)
                if source.dim() > DIMS:
                    source, strides = source.view(-1), [1]
                self.cuda.push(stream, at_peer, strides[: source.dim()], source)
            elif self._push_piece(peer, at, at_peer, source, *strides[1:3]):
                queue.popleft()
            if not queue:
                theirs, own_word = self.bases[peer] + self.words.arrival(self.rank), self.base + self.words.sent(peer)
                self.cuda.write(stream, {theirs: at, own_word: at})
                work.sent[peer] = self.pushed[peer]
                del work.sends[peer]
            self.ops.shm_arrive(self.mail, peer)

    def _push_piece(self, peer: int, at: int, at_peer: int, source: Tensor, begin: int, elements: int) -> bool:
        """Push a piece of a message; whether it is the last one."""
        stream, part = self.copies[peer], box(plain(source), begin, elements)
        # the half was free before the first pieces, and is once the piece before the last one has been copied out
        self._wait(stream, {self.base + self.words.lane(peer): epoch(self.cut[peer] - HALVES)}, heeds_poison=False)
        self.cut[peer] += 1
        self.cuda.push(stream, at_peer, row_major(part.shape), part)
        self.cuda.write(stream, {self.bases[peer] + self.words.arrival(self.rank): at})
        return begin + elements == source.numel()

    def meet(self, work: PeerExchange) -> None:
        """Return when all hosts have launched their part of an exchange. The channel stays usable while this sleeps.

        Raises: PeerError, after the timeout naming a rank that has not.
        """
        deadline = time.monotonic() + self.timeout
        gone: dict[int, str] = {}
        while True:
            with self.lock:
                seen = self.ops.shm_bell(self.mail)
                self.progress()
                late = [peer for peer, count in work.arrivals.items() if self.ops.shm_arrived(self.mail, peer) < count]
                late += [peer for peer in work.sends if peer not in late]
            if not late and not work.pieces:
                return
            if not late:
                continue  # the last pieces came after they were looked for
            doing = f"in {work.name}, waiting for rank {late[0]}"
            self.check(doing)
            left = deadline - time.monotonic()
            # a lost rank may have done its part before: look once more
            if still := [peer for peer in late if peer in gone]:
                self.fail(f"in {work.name}: lost rank {still[0]}, {gone[still[0]]}")
            elif left <= 0:
                self.fail(waited(f"in {work.name}", self.timeout, late[0]))
            else:
                gone = {peer: why for peer in late if (why := lost(self.mail, peer))}
                # the control comm has no bell
                self.ops.shm_wait(self.mail, seen, min(left, 0.1))
                continue
            raise self.error(doing)

    def follow(self, work: PeerExchange) -> None:
        """Make the current stream wait for an exchange whose hosts have met; mark its tensors if the comm is dead."""
        stream, base, words = self.cuda.current(), self.base, self.words
        arrivals = {base + words.arrival(peer): epoch(count - 1) for peer, count in work.arrivals.items()}
        sent = {base + words.sent(peer): epoch(count - 1) for peer, count in work.sent.items()}
        if sent:
            self._wait(stream, sent, heeds_poison=False)
        if arrivals:
            self._wait(stream, arrivals, heeds_poison=True)
            if work.landed is not None:
                self.cuda.follow(stream, work.landed)
            if work.staged:
                self.cuda.copy(stream, [target for target, _ in work.staged], [block for _, block in work.staged])
            self.cuda.blank(stream, base + words.poison, work.targets)
        self._used(stream, [*work.sources, *work.targets, *work.blocks])
        while self.flying and self.flying[0].is_completed():
            self.flying.popleft()
        self.flying.append(Flight(self.cuda.record(stream), arrivals | sent, work.name))
        self.monitor.watch([self.flying[-1]], f"in {work.name} for ranks {sorted({*work.arrivals, *work.sent})}")

    def _wait(self, stream: Any, words: Mapping[int, int], *, heeds_poison: bool) -> None:
        self.cuda.wait(stream, words, 2 * self.timeout, self.base + self.words.poison, heeds_poison)

    def _used(self, stream: Any, tensors: Sequence[Tensor]) -> None:
        """Tell that memory last used by other streams may be reused once `stream` gets here.

        `stream` has waited for the copies, so naming it covers their streams too.
        """
        owned = [self.pool.owns(x) for x in tensors]
        self.pool.used([x for x, own in zip(tensors, owned, strict=True) if own], stream)
        self.cuda.used([x for x, own in zip(tensors, owned, strict=True) if not own], stream)

    @property
    def cause(self) -> tuple[int, str] | None:
        """The (rank, reason) that killed the comm, None while it is usable."""
        if not self.end.alive:
            return self.rank, "the comm was dropped"
        text = self.ops.shm_cause(self.mail)
        if not text:
            try:
                self.control.check()
                return None
            except PeerError as error:
                self.ops.shm_fail(self.mail, str(error))
                text = self.ops.shm_cause(self.mail)
        return parsed_cause(text)

    def check(self, doing: str = "cannot go on") -> None:
        """Raise PeerError if the comm is dead, or in a process forked from the rank's."""
        self.owner.check()
        if self.cause is not None:
            self.poison()
            raise self.error(doing)

    def fail(self, reason: str) -> None:
        """Make this rank's reason the root cause, unless there is one, and report it to all ranks. Not in a fork."""
        # a work collected in one cycle with its comm comes after the end: peers read there that it closed
        if not (self.owner.in_own_process and self.end.alive):
            return
        self.ops.shm_fail(self.mail, reason)
        assert self.cause is not None
        first, reason = self.cause
        self.poison()
        self.control.abort(reason if first == self.rank else f"rank {first}: {reason}")

    def poison(self) -> None:
        """Mark the memory of all ranks, then release this rank's streams. Needs no lock and waits for nothing.

        Waits for arrivals end at once, after the mark that makes the received tensors NaN. A copy without its credit
        stays where it is, since its target may be in use: the peer's stream, released in the same way, gives the
        credit. If that takes another timeout, or the peer's process is gone, the copy is released too. Until then its
        source is not overwritten either, since only the copy writes `sent`: what arrives late is right. A waiting
        kernel, see `Cuda`, releases itself after two timeouts, poisoned; a copy then continues too, since a copy engine
        cannot look at a word.
        """
        if self.poisoned.is_set():
            return
        self.poisoned.set()
        log.info("rank %d: the comm is dead: %s", self.rank, self.cause)
        threading.Thread(target=self._let_go, name="seqpar comm release", daemon=True).start()

    def _let_go(self) -> None:
        begun, waited = time.monotonic(), 0.0
        try:
            ended = [peer for peer in self.copies if self.ops.shm_ended(self.mail, peer)]
            bases = [base for rank, base in enumerate(self.bases) if rank not in ended]
            if not self._order({base + self.words.poison: 1 for base in bases}):
                return
            ends = [
                Flight(self.cuda.record(stream), {}) for stream in (*self.copies.values(), self.credits, self.landing)
            ]
            while not all(item.is_completed() for item in (*self.flying, *ends)):
                words = {self.base + self.words.arrival(p): epoch(n + AHEAD) for p, n in self.posted.items()}
                for peer, number in self.pushed.items():
                    if waited > self.timeout or self.ops.shm_ended(self.mail, peer):
                        words[self.base + self.words.credit(peer)] = epoch(number + AHEAD)
                        words[self.base + self.words.lane(peer)] = epoch(self.cut[peer] + AHEAD)
                # repeatedly: a late peer may overwrite it with a smaller epoch
                if not self._order(words) or waited >= 2 * self.timeout:
                    return
                time.sleep(0.02)
                waited = time.monotonic() - begun
        except RuntimeError as error:
            log.warning("rank %d: the device no longer accepts work: %s", self.rank, error)

    def _order(self, words: Mapping[int, int]) -> bool:
        """Write words past all waits, unless the memory is freed."""
        with self.closing:
            if not self.closed:
                self.cuda.write(self.private, words)
            return not self.closed

    def _look(self) -> bool:
        """Whether the comm is dead; it is if a process has ended for whose rank a stream waits."""
        if self.cause is None:
            ended = [peer for peer in self.copies if self.ops.shm_ended(self.mail, peer)]
            if ended and (missing := [word for word in self._missing() if word[1] in ended]):
                what, _, call = missing[0]
                self.fail(f"in {call}: {what} does not arrive, because its process has ended")
        if self.cause is not None:
            self.poison()
        return self.poisoned.is_set()

    def _stuck(self, reason: str) -> None:
        """Fail: a stream does not continue."""
        missing = ", ".join(what for what, *_ in self._missing()) or "a stream"
        self.fail(
            f"{reason}: {missing} did not arrive{DEAD}; give the comm a longer timeout if the devices' earlier work "
            "takes that long"
        )

    def _missing(self) -> list[tuple[str, int, str]]:
        """(what, peer, call) of the words that the earliest wait of a stream waits for."""
        flight = next((item for item in list(self.flying) if not item.is_completed()), None)
        if flight is None:
            return []
        seen = self.cuda.read(self.base, self.words.count, self.private)
        words = [(at - self.base, expected) for at, expected in flight.words.items()]
        return [(*self.words.name(at), flight.call) for at, e in words if not reached(seen[at // 4], e)]
