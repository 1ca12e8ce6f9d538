"""What a `GroupComm` and its subs share: the group, its gloo twin, NCCL's communicators, and how a failure spreads.

The first rank to fail writes the root cause to the group's store and hangs up the twin. A rank that waits for it sees
its connection close, reads the cause, raises and hangs up in turn, so a failure reaches every rank at once. But gloo
does not end a send that it had queued when the connection closed, so a rank that only sends to a lost one may raise
after the timeout.
"""

from __future__ import annotations

import logging
import platform
import socket
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from seqpar.comm.arguments import check_arguments, check_descriptors
from seqpar.comm.base import ProcessChannel, WorkBase
from seqpar.comm.failure import Monitor, Owner, RootCause, held_up, then, waited, weakly
from seqpar.comm.header import REMEMBERED
from seqpar.comm.host_pool import HostPool
from seqpar.comm.interrupt import Interrupt
from seqpar.comm.nccl import CUDA, Nccl, check_gpus, gpu_of, node_of, own_backend
from seqpar.comm.protocol import PeerError
from seqpar.comm.rendezvous import Rendezvous, machine
from seqpar.facts.value import is_integer
from seqpar.private import torch as torch_private

log = logging.getLogger("seqpar.comm")

CARRIERS = {"cpu": "gloo", "cuda": "nccl"}  # device type -> the backend that moves its tensors

# gloo's numbers that are not hashes of a header
HEADERS, HANG_UP, FIRST_FREE = 0, 1, 16
NUMBERS = 2**31 - 2**20  # hashes; a pair's tensors count up from one


class GroupChannel(ProcessChannel):
    """The group, its twin and their state, shared by a comm and its subs. Ranks are the group's."""

    cause: tuple[int, str] | None = None
    nccl: Nccl | None = None  # if CUDA tensors can be sent
    nodes: Sequence[int] = ()  # the node of each rank, if pairs inside a node have a lane of their own

    def __init__(
        self, group: dist.ProcessGroup, timeout: float, check: str, private: bool, min_ctas: int | None
    ) -> None:
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
        heard = rendezvous.hear(
            lambda: self._check(check, private, min_ctas), check=check, private=private, min_ctas=min_ctas
        )
        gpus, places = zip(*heard, strict=True)
        check_gpus("GroupComm", gpus)
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
                    backend = own_backend(c10d.PrefixStore("nccl", own_store), self.rank, self.size, timeout, min_ctas)
                else:
                    backend = torch_private.get_backend(group)(CUDA)
                inside = None
                if self.nodes and len(node) > 1:
                    of_node = c10d.PrefixStore(f"nccl/node {node[0]}", own_store)
                    inside = own_backend(of_node, node.index(self.rank), len(node), timeout, min_ctas)
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

    def _check(self, check: str, private: bool, min_ctas: int | None) -> tuple[str, list[str]]:
        """This rank's GPU, "" without NCCL, and its node, see `node_of`. Raises for wrong arguments."""
        check_arguments("GroupComm", self.timeout, check)
        if min_ctas is not None and (not is_integer(min_ctas) or min_ctas < 1 or not private):
            raise ValueError(
                f"GroupComm: min_ctas={min_ctas!r} with private={private}, expected None or an integer of at least 1, "
                "and private=True, as only the comm's own communicators can be set"
            )
        _check_backends(self.backends)
        # per rank a connection, its listener, and what its threads wait on
        check_descriptors("GroupComm", 2 * self.size + 8)
        gpu = "" if self.gpu is None else str(torch.cuda.get_device_properties(self.gpu).uuid)
        return gpu, node_of(machine())

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

    def _give_up(self, work: WorkBase[Any]) -> None:
        self.fail(f"{work.doing}: interrupted by Ctrl-C")

    def _answer(self, work: WorkBase[Any]) -> None:
        """Report the ranks that this one waits for to a rank that asks because its wait has lasted too long."""
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

    def failed(self, doing: str, peer: int, error: RuntimeError, hint: str = "") -> PeerError:
        """The error for one of gloo's while `doing` something that waits for `peer`. hint: of the exchange's tag."""
        log.debug("rank %d: gloo, %s: %s", self.rank, doing, error)
        timed_out = _timed_out(error)
        what = f"waited {self.timeout:g} s for" if timed_out else "lost the connection to"
        if not timed_out:
            reason = f"{doing}: lost the connection to rank {peer}{then(peer, hint)}"
        elif self.look():
            return self.error(f"{doing}, {what} rank {peer}")
        else:
            reason = held_up(doing, self.timeout, self.root_cause.chain(peer), hint=hint)
        # a lost connection often means another rank failed, and that rank is about to write why
        self.fail(reason, grace=0.0 if timed_out else 1.0)
        return self.error(f"{doing}, {what} rank {peer}")

    def interrupted(self, doing: str, error: RuntimeError) -> PeerError:
        """The error for one of NCCL's while `doing` something that waits for all ranks."""
        log.debug("rank %d: NCCL, %s: %s", self.rank, doing, error)
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


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Device type -> backend of a group."""
    pairs = (item.partition(":") for item in dist.get_backend_config(group).split(","))
    return {device: backend for device, _, backend in pairs}


def _check_backends(backends: Mapping[str, str]) -> None:
    """Raise unless tensors can be sent over a group with these backends."""
    if not dist.is_gloo_available():
        raise NotImplementedError("GroupComm: this build of PyTorch has no gloo, which carries the control messages")
    if not {"gloo", "nccl"} & set(backends.values()):
        raise ValueError(f"GroupComm: the group's backends are {backends}, expected gloo for cpu or nccl for cuda")
    if torch.version.hip and "nccl" in backends.values():
        raise NotImplementedError("GroupComm: CUDA tensors on ROCm (RCCL), and only NCCL and gloo are supported")


def _twin(store: Any, rank: int, size: int, timeout: float) -> Any:
    c10d: Any = dist.distributed_c10d
    try:
        return c10d.ProcessGroupGloo(store, rank, size, timedelta(seconds=max(0.001, timeout)))
    except RuntimeError as error:
        raise RuntimeError(
            f"gloo, which carries the control messages, has no connection from host {_resolved()}: "
            f"{str(error).splitlines()[0]}; set GLOO_SOCKET_IFNAME on every host to the network interface that the "
            "other hosts reach"
        ) from None


def _resolved() -> str:
    """This host's name and the address that it has for itself, which gloo gives to the other ranks by default."""
    name = platform.node()
    try:
        return f"{name} ({socket.gethostbyname(name)})"
    except OSError:
        return f"{name} (which does not resolve)"
