"""`GroupComm`: ranks of a `torch.distributed` group, over NCCL for CUDA tensors and gloo for CPU tensors.

Both use point-to-point only. A private gloo twin of the group carries `agree` and all CPU tensors, and private NCCL
communicators CUDA tensors, so that no message meets those of the group's other users:

    CUDA tensors   batched send/recv on `nccl.Nccl`, one batch a round (`protocol.rounds`); on several nodes in two
                   lanes, see `nccl`
    CPU tensors    isend/irecv on the twin; a pair's tensors follow a header of int64, small ones in the same message

gloo matches messages by (pair, number), first in, first out. It ends the process if a message is longer than its
buffer; a shorter one fills the beginning. So there are two kinds of numbers: headers share one number and have buffers
for the longest header, so that a pair in different exchanges finds out from the first header; tensors are numbered by a
hash of their header, so that they never meet the buffer of another exchange. A message costs far more than a few bytes,
so a pair's tensors follow their header in one message if they are small together.

The first rank to fail writes the root cause to the group's store and hangs up the twin. A rank that waits for it sees
its connection close, reads the cause, raises and hangs up in turn, so a failure reaches every rank at once. But gloo
does not end a send that it had queued when the connection closed, so a rank that only sends to a lost one may raise
after the timeout.
"""

from __future__ import annotations

import ctypes
import logging
import platform
import socket
import sys
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence, Set
from datetime import timedelta
from itertools import accumulate
from typing import Any, NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from seqpar.comm.arguments import PATIENCE, check_arguments, check_descriptors
from seqpar.comm.base import Done, ProcessChannel, ProcessComm, WorkBase, held_up, process_group, waited
from seqpar.comm.entry import uncompiled
from seqpar.comm.failure import Monitor, RootCause, weakly
from seqpar.comm.header import HEADER_BYTES, REMEMBERED, WORDS, Header, describe, mismatch
from seqpar.comm.host_pool import HostPool
from seqpar.comm.interrupt import Awaited, Interrupt
from seqpar.comm.nccl import CUDA, Nccl, check_gpus, gpu_of, node_of, own_backend
from seqpar.comm.owner import Owner
from seqpar.comm.protocol import Collectives, PeerError, Round, Stats, Tag, Work, checked_sides, refuse_capture, rounds
from seqpar.comm.rendezvous import Rendezvous, machine
from seqpar.comm.sums import BY_NCCL, NcclSums

log = logging.getLogger("seqpar.comm")

CARRIERS = {"cpu": "gloo", "cuda": "nccl"}  # device type -> the backend that moves its tensors

# gloo's numbers that are not hashes of a header
HEADERS, HANG_UP, FIRST_FREE = 0, 1, 16
NUMBERS = 2**31 - 2**20  # hashes; a pair's tensors count up from one

BESIDE = 1 << 14  # bytes of a pair's tensors up to which they share a message with their header


class _Arrival(NamedTuple):
    """What a rank says of itself in the constructor. gpu: its id, empty without NCCL. node: see `node_of`."""

    gpu: str
    node: list[str]


class GroupChannel(ProcessChannel):
    """The group, its twin and their state, shared by a comm and its subs. Ranks are the group's."""

    cause: tuple[int, str] | None = None
    nccl: Nccl | None = None  # if CUDA tensors can be sent
    nodes: Sequence[int] = ()  # the node of each rank, if pairs inside a node have a lane of their own

    def __init__(self, group: dist.ProcessGroup, timeout: float, check: str, private: bool) -> None:
        self.timeout = timeout
        self.rank, self.size = group.rank(), group.size()
        self.backends = _backends(group)
        self.carries = {kind for kind, backend in self.backends.items() if CARRIERS.get(kind) == backend}
        # of this rank, if CUDA tensors can be sent
        uses_nccl = self.backends.get("cuda") == "nccl" and torch.cuda.is_available()
        self.gpu = gpu_of(group) if uses_nccl else None
        self.host_pool = HostPool()
        self.orphans: list[object] = []  # buffers that the twin may still write to after a failure
        c10d: Any = dist.distributed_c10d
        store = group.get_group_store()
        rendezvous = Rendezvous("GroupComm", store, self.rank, self.size, timeout)
        # in the rendezvous, so that no rank waits for one with wrong arguments
        heard = rendezvous.hear(lambda: self._check(check), check=check, private=private)
        ranks = [_Arrival(*found) for found in heard]
        check_gpus("GroupComm", [rank.gpu for rank in ranks])
        places = [rank.node for rank in ranks]
        nodes = [places.index(place) for place in places]
        node = [rank for rank in range(self.size) if nodes[rank] == nodes[self.rank]]
        if private and 1 < len({*nodes}) < self.size:
            self.nodes = nodes
        own_store = c10d.PrefixStore(f"seqpar/GroupComm/{rendezvous.number}", store)

        def connect() -> Any:
            twin = _twin(own_store, self.rank, self.size, timeout)
            if self.gpu is not None:
                torch.cuda.set_device(self.gpu)  # of this thread, which starts on the first one
                if private:
                    # the prefixes keep the keys of NCCL and of the nodes apart from gloo's
                    backend = own_backend(c10d.PrefixStore("nccl", own_store), self.rank, self.size, timeout)
                else:
                    backend = group._get_backend(CUDA)
                inside = None
                if self.nodes and len(node) > 1:
                    of_node = c10d.PrefixStore(f"nccl/node {node[0]}", own_store)
                    inside = own_backend(of_node, node.index(self.rank), len(node), timeout)
                self.nccl = Nccl(backend, owned=private, inside=inside, node=node)
                self.nccl.open(self.gpu, [rank for rank in node if rank != self.rank])
            return twin

        try:
            self._groups: list[Any] = [group, rendezvous.connect(connect), self.orphans]
        except BaseException:
            if self.nccl is not None and self.gpu is not None:
                self.nccl.abort(self.gpu)
            raise
        # gloo's threads must end before the interpreter does, or C++ may end the process for it
        self.owner = Owner(self, self.rank, self._groups)
        self.root_cause = RootCause(own_store, "root cause", self.rank)
        self.monitor = Monitor(timeout, weakly(self.fail, None), weakly(self.look, gone=True))
        self.interrupt = Interrupt(weakly(self._give_up, None), weakly(self._answer, None))
        self.calls = deque(maxlen=REMEMBERED)

    def _check(self, check: str) -> _Arrival:
        """What this rank says of itself. Raises for wrong arguments."""
        check_arguments("GroupComm", self.timeout, check)
        _check_backends(self.backends)
        # per rank a connection, its listener, and what its threads wait on
        check_descriptors("GroupComm", 2 * self.size + 8)
        gpu = "" if self.gpu is None else str(torch.cuda.get_device_properties(self.gpu).uuid)
        return _Arrival(gpu, node_of(machine()))

    @property
    def twin(self) -> Any:
        """The private gloo group."""
        return self._groups[1]

    def fail(self, reason: str, *, grace: float = 0.0) -> None:
        """Mark the group dead for `reason`, unless it has a root cause or gets one within `grace` seconds."""
        if not self.owner.in_own_process or self.cause is not None:
            return
        if sys.is_finalizing():  # without threads, and the connections are closed, as peers have seen
            self.cause = self.rank, reason
            return
        standing = self.root_cause.read(grace) if grace else None
        self.cause = standing or self.root_cause.write(reason)
        self._report(f"{reason}; root cause")
        self._hang_up()
        self._abort_nccl()

    def _give_up(self, work: Awaited) -> None:
        self.fail(f"in {describe(work.tag)}: interrupted by Ctrl-C")

    def _answer(self, work: Awaited) -> None:
        """Tell a rank that asks, since its wait has lasted too long, whom this one waits for."""
        peer = work.awaited()
        try:
            if peer is not None and self.cause is None and self.root_cause.asked():
                self.root_cause.answer(peer)
        except RuntimeError as error:
            log.info("rank %d: the group's store does not answer: %s", self.rank, error)

    def look(self) -> bool:
        """Whether the group is dead, as far as this rank knows or any rank wrote."""
        if self.cause is None and (standing := self.root_cause.read()):
            self.cause = standing
            self._report("root cause")
            self._abort_nccl()
        return self.cause is not None

    def _abort_nccl(self) -> None:
        if self.nccl is not None and self.gpu is not None:
            self.nccl.abort(self.gpu, self.monitor.unwritten())

    def _report(self, what: str) -> None:
        # on a GPU the host may wait for the device, where no error can be raised: this line is all that the user sees
        assert self.cause is not None
        level = logging.INFO if self.nccl is None else logging.ERROR
        log.log(level, "rank %d: %s: rank %d: %s", self.rank, what, *self.cause)

    def close(self) -> None:
        """Let go of the group, and free the comm's own connections. Every rank calls it, after its last wait."""
        self.owner.check()
        self.cause = self.cause or (self.rank, "the comm is closed")
        if self.nccl is not None:
            self.nccl.close()
            self.nccl = None
        self.interrupt.close()
        self.root_cause.close()
        self._groups.clear()

    def failed(self, doing: str, peer: int, error: RuntimeError) -> PeerError:
        """The error for one of gloo's while `doing` something that waits for `peer`."""
        timed_out = _timed_out(error)
        what = f"waited {self.timeout:g} s for" if timed_out else "lost the connection to"
        if not timed_out:
            reason = f"{doing}: lost the connection to rank {peer}"
        elif self.look():
            return self.error(f"{doing}, {what} rank {peer}")
        else:
            reason = held_up(doing, self.timeout, self.root_cause.chain(peer))
        # a lost connection often means another rank failed, and that rank is about to write why
        self.fail(reason, grace=0.0 if timed_out else 1.0)
        return self.error(f"{doing}, {what} rank {peer}")

    def interrupted(self, doing: str, error: RuntimeError) -> PeerError:
        """The error for one of NCCL's while `doing` something that waits for all ranks."""
        if not _timed_out(error):
            self.fail(f"{doing}: {str(error).splitlines()[0]}", grace=1.0)
        elif not self.look():
            present = self.root_cause.roll_call(doing, range(self.size))
            silent = [rank for rank in range(self.size) if rank not in present]
            self.fail(waited(doing, self.timeout, *(silent or [rank for rank in present if rank != self.rank])))
        return self.error(doing)

    def _hang_up(self) -> None:
        if not self._groups:  # as a work is collected in one cycle with its comm
            return
        # gloo cannot close connections (abort does nothing), but closes all of them when a wait times out
        for peer in range(self.size):
            if peer != self.rank:
                buffer = torch.empty(1, device="cpu")
                self.orphans.append(buffer)
                try:
                    self.twin.recv([buffer], peer, HANG_UP).wait(timedelta(milliseconds=1))
                except RuntimeError as error:
                    if _timed_out(error):
                        return


def _timed_out(error: RuntimeError) -> bool:
    # gloo has one type of error for everything
    return "timed out" in str(error).lower()


def _completed(work: dist.Work) -> bool:
    """Whether a work was waited for with success; gloo does not tell earlier."""
    try:
        return bool(work.is_completed())
    except RuntimeError:
        return False


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Device type -> backend of a group."""
    pairs = (item.partition(":") for item in dist.get_backend_config(group).split(","))
    return {device: backend for device, _, backend in pairs}


class _GlooMessage(NamedTuple):
    """A message of a gloo exchange that `wait` waits for; if it has an expectation, a header to compare with it.

    beside: the tensors whose bytes follow that header.
    """

    work: dist.Work
    peer: int
    buffer: Tensor
    expected: bytes = b""
    beside: Sequence[Tensor] = ()


class _Announced(NamedTuple):
    """A pair's tensors as messages: beside the header, in one message with it, or apart, numbered from `number`."""

    header: bytes
    beside: Sequence[Tensor]
    apart: Sequence[Tensor]
    number: int


def _announced(scope: int, tag: Tag, tensors: Sequence[Tensor], *, mutual: bool) -> _Announced:
    """The messages of a pair's tensors. mutual: whether the peers send to each other in this exchange.

    A rank that only sends learns from its tensors that nobody receives them; a header is received by any exchange.
    """
    header, count = Header.of(scope, tag, tensors), 0
    if mutual:
        count = bisect_right(list(accumulate([x.nbytes for x in tensors])), BESIDE)
    if count:
        # another number: an exchange that expects the tensors apart would wait for them in vain
        header = header._replace(signature=header.signature ^ 1)
    message = WORDS.pack(*header)
    return _Announced(message, tensors[:count], tensors[count:], FIRST_FREE + crc32(message) % NUMBERS)


def _headed(header: bytes, beside: Sequence[Tensor]) -> Tensor:
    """A header and the bytes of tensors, as one message."""
    message = torch.empty(HEADER_BYTES + sum([x.nbytes for x in beside]), dtype=torch.uint8, device="cpu")
    at = message.data_ptr()
    ctypes.memmove(at, header, HEADER_BYTES)
    at += HEADER_BYTES
    for x in beside:
        ctypes.memmove(at, x.data_ptr(), x.nbytes)
        at += x.nbytes
    return message


class _GlooWork(WorkBase[GroupChannel]):
    """`Work` of an exchange of CPU tensors, posted by the constructor; peers are the group's ranks."""

    def __init__(
        self, channel: GroupChannel, scope: int, tag: Tag, sends: Mapping[int, list[Tensor]],
        recvs: Mapping[int, list[Tensor]], stats: Stats | None,
    ) -> None:  # fmt: skip
        super().__init__(channel, tag, stats)
        self._messages: list[_GlooMessage] = []
        channel.calls.append(tag)
        twin, later, peer = channel.twin, [], -1
        try:
            # headers come first, both in posting and in waiting
            for peer, tensors in recvs.items():
                header, beside, apart, number = _announced(scope, tag, tensors, mutual=peer in sends)
                buffer = torch.empty(HEADER_BYTES + BESIDE, dtype=torch.uint8, device="cpu")
                work = twin.recv([buffer], peer, HEADERS)
                self._messages.append(_GlooMessage(work, peer, buffer, header, beside))
                for n, x in enumerate(apart, number):
                    later.append(_GlooMessage(twin.recv([x], peer, n), peer, x))
            for peer, tensors in sends.items():
                header, beside, apart, number = _announced(scope, tag, tensors, mutual=peer in recvs)
                buffer = _headed(header, beside)
                later.append(_GlooMessage(twin.send([buffer], peer, HEADERS), peer, buffer))
                for n, x in enumerate(apart, number):
                    later.append(_GlooMessage(twin.send([x], peer, n), peer, x))
        except RuntimeError as error:
            raise channel.failed(f"posting {describe(tag)}", peer, error) from error
        finally:
            self._messages += later  # kept if a work that could not be posted is dropped

    def _finish(self) -> None:
        channel = self._channel
        channel.owner.check()
        deadline = time.monotonic() + channel.timeout
        listened = channel.interrupt.begin(self)
        try:
            for message in self._messages:
                if channel.cause is not None:
                    raise channel.error(f"in {describe(self._tag)}, waiting for rank {message.peer}")
                try:
                    message.work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
                except RuntimeError as error:
                    raise channel.failed(f"in {describe(self._tag)}", message.peer, error) from error
                if message.expected:
                    self._land(message)
        finally:
            channel.interrupt.end(listened)
        self._messages = []

    def awaited(self) -> int | None:
        """The peer of the first message that has not come, or gone; None if that is over. From any thread."""
        return next((message.peer for message in self._messages if not _completed(message.work)), None)

    def _land(self, message: _GlooMessage) -> None:
        """Compare a header, and copy the bytes after it to their tensors.

        Works in any autograd mode of the reader, as in gloo.
        """
        channel, peer, at = self._channel, message.peer, message.buffer.data_ptr()
        header = ctypes.string_at(at, HEADER_BYTES)
        if header != message.expected:
            sent, expected = Header(*WORDS.unpack(header)), Header(*WORDS.unpack(message.expected))
            doing = f"in {describe(self._tag)}"
            why = mismatch(peer, sent, channel.rank, expected, self._tag, channel.calls, channel.refused)
            channel.fail(f"{doing}: {why}")
            raise channel.error(f"{doing}, receiving from rank {peer}")
        at += HEADER_BYTES
        for x in message.beside:
            ctypes.memmove(x.data_ptr(), at, x.nbytes)
            at += x.nbytes

    def _keep(self) -> None:
        self._channel.orphans += self._messages
        self._messages = []


class _NcclWork(WorkBase[GroupChannel]):
    """`Work` of an exchange of CUDA tensors, posted in rounds, in order, by the constructor.

    NCCL has its own streams. An exchange starts when the current stream reaches its posting, and overlaps with later
    launches. `wait` makes the current stream wait and returns at once, since it passes no timeout (unless
    TORCH_NCCL_BLOCKING_WAIT is set). Tensors are held until then: the allocator reuses freed memory in the order of the
    stream that waited, which must be the one that allocated it. If the comm dies meanwhile, tensors that have not
    arrived become NaN before those waits end.
    """

    def __init__(self, channel: GroupChannel, tag: Tag, parts: Sequence[Round]) -> None:
        super().__init__(channel, tag, None)
        assert channel.nccl is not None
        self._works: list[Any] = []
        self._tensors: list[Tensor] = []
        for part in parts:
            sends, recvs = part.sends, part.recvs
            for tensors in (*sends.values(), *recvs.values()):
                self._tensors += tensors
            work = channel.nccl.post(sends, recvs, part.lane)
            self._works.append(work)
            ranges = [(x.data_ptr(), x.nbytes) for tensors in recvs.values() for x in tensors]
            channel.monitor.watch([work], f"in {describe(tag)} for ranks {sorted(sends.keys() | recvs.keys())}", ranges)

    def _finish(self) -> None:
        channel = self._channel
        channel.owner.check()
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            channel.fail(f"in {describe(self._tag)}: {error}")
        if channel.cause is not None:
            raise channel.error(f"in {describe(self._tag)}")
        self._works, self._tensors = [], []

    def _keep(self) -> None:
        self._channel.orphans += [*self._works, *self._tensors]


class GroupComm(ProcessComm[GroupChannel]):
    """The ranks of a process group. See `Comm` for the methods, and the module for how it works.

    group: a `ProcessGroup`, a 1-D `DeviceMesh` (of a larger mesh: ``mesh["cp"]``), or None for the default group.
    timeout: seconds after which a wait fails. check: how often verbs compare their arguments over the ranks, "batch"
    (once per plan and signature) or "call"; kept as `check_every`. private: CUDA tensors go over NCCL communicators of
    the comm's own, one of all ranks and, on several nodes, one of each node, which nothing else delays and which are
    aborted if a rank hangs; False shares the group's, which saves their memory.

    A collective constructor: every rank of the group calls it. A sub shares its parent's `stats`, whose `sent_to`
    counts by the parent's ranks.

    Raises: ValueError for a group that this process is not in or that has neither gloo nor NCCL, and if ranks share a
    GPU; NotImplementedError on ROCm.
    """

    def __init__(
        self, group: Any = None, *, timeout: float = PATIENCE, check: str = "batch", private: bool = True
    ) -> None:
        channel = GroupChannel(process_group("GroupComm", group), timeout, check, private)
        self._join(channel, (), Stats(), {}, check)

    @uncompiled
    def exchange(
        self, sends: Mapping[int, Sequence[Tensor]], recvs: Mapping[int, Sequence[Tensor]], *, tag: Tag
    ) -> Work:
        """Post one exchange: see `Comm.exchange`. All its tensors are CUDA or all are CPU tensors.

        Raises: NotImplementedError while a CUDA graph is captured; otherwise as `Comm.exchange`.
        """
        sends, recvs, devices = checked_sides(self.rank, self._ranks, sends, recvs)
        types, channel = {device.type for device in devices}, self._channel
        if len(types) > 1 or not types <= channel.carries:
            raise _wrong_devices(types, channel.backends)
        channel.check()
        if not types:
            return Done()
        if "cuda" in types:
            refuse_capture(tag)
        self.stats.count(sends, recvs)
        if "cpu" in types:
            return _GlooWork(channel, self._scope_id, tag, sends, recvs, self.stats)
        return self._post_cuda(sends, recvs, tag)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, kept: bool = False) -> Tensor:
        """Uninitialised memory of this process; on the CPU memory of earlier verbs, unless it is kept."""
        if kept or torch.device(device).type != "cpu":
            return super().empty(shape, dtype, device)
        return self._channel.host_pool.empty(shape, dtype)

    def sums(self, like: Tensor) -> Collectives | None:
        """Sums of CUDA tensors by NCCL over all ranks of the group: see `Comm.sums`."""
        if self._scope or like.device.type != "cuda" or self._channel.nccl is None or like.dtype not in BY_NCCL:
            return None
        return NcclSums(self._channel, self.stats)

    def _post_cuda(self, sends: Mapping[int, list[Tensor]], recvs: Mapping[int, list[Tensor]], tag: Tag) -> _NcclWork:
        """An exchange over NCCL; peers are the group's ranks."""
        channel = self._channel
        return _NcclWork(channel, tag, rounds(channel.rank, channel.size, sends, recvs, channel.nodes))

    def _post_control(self, sends: Mapping[int, list[Tensor]], recvs: Mapping[int, list[Tensor]], tag: Tag) -> Work:
        # on the twin, whatever the group's backend
        return _GlooWork(self._channel, self._scope_id, tag, self._in_group(sends), self._in_group(recvs), None)


def _twin(store: Any, rank: int, size: int, timeout: float) -> Any:
    """The private gloo group."""
    c10d: Any = dist.distributed_c10d
    try:
        return c10d.ProcessGroupGloo(store, rank, size, timedelta(seconds=max(0.001, timeout)))
    except RuntimeError as error:
        raise RuntimeError(
            f"gloo, which carries the control messages, has no connection from host {_resolved()}: "
            f"{str(error).splitlines()[0]}; set GLOO_SOCKET_IFNAME on every host to the network interface that the "
            "other hosts reach"
        ) from error


def _resolved() -> str:
    """This host's name and the address that it has for itself, which gloo gives to the other ranks by default."""
    name = platform.node()
    try:
        return f"{name} ({socket.gethostbyname(name)})"
    except OSError:
        return f"{name} (which does not resolve)"


def _wrong_devices(types: Set[str], backends: Mapping[str, str]) -> ValueError:
    """The error for tensors on devices that the group's backends do not serve."""
    if len(types) > 1:
        return ValueError(f"exchange: tensors on devices {sorted(types)}; expected all of them on one type of device")
    (device,) = types
    return ValueError(
        f"exchange: tensors on device {device} in a group whose backend for it is {backends.get(device, 'none')}; "
        "expected CPU tensors on gloo or CUDA tensors on nccl: init_process_group('cpu:gloo,cuda:nccl') has both"
    )


def _check_backends(backends: Mapping[str, str]) -> None:
    """Raise unless tensors can be sent over a group with these backends."""
    if not dist.is_gloo_available():
        raise NotImplementedError("GroupComm: this build of PyTorch has no gloo, which carries the control messages")
    if not {"gloo", "nccl"} & set(backends.values()):
        raise ValueError(f"GroupComm: the group's backends are {backends}, expected gloo for cpu or nccl for cuda")
    if torch.version.hip and "nccl" in backends.values():
        raise NotImplementedError("GroupComm: CUDA tensors on ROCm (RCCL), and only NCCL and gloo are supported")
