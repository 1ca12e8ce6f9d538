"""`PeerComm`: ranks on the GPUs of one node, which write straight into each other's memory; see `channel`."""

from __future__ import annotations

from collections.abc import Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from seqpar.comm.arguments import PATIENCE
from seqpar.comm.base import CommBase, WorkBase, process_group
from seqpar.comm.local import LocalComm
from seqpar.comm.peer.channel import PeerChannel
from seqpar.comm.peer.cuda import Cuda
from seqpar.comm.peer.memory import agreed
from seqpar.comm.peer.pieces import PeerExchange
from seqpar.comm.protocol import Contribution, PeerError, Sides, Stats, Tag, Work, refuse_capture
from seqpar.comm.shm import ShmComm


class _PeerWork(WorkBase[PeerChannel]):
    def __init__(self, channel: PeerChannel, exchange: PeerExchange, stats: Stats) -> None:
        super().__init__(channel, exchange.tag, stats)
        self._exchange = exchange

    def _finish(self) -> None:
        self._channel.meet(self._exchange)
        with self._channel.lock:
            self._channel.follow(self._exchange)
        # later work on this stream may reuse the memory
        del self._exchange

    def _keep(self) -> None:
        self._channel.orphans.append(self._exchange)


class PeerComm(CommBase[PeerChannel]):
    """A rank on a GPU of this machine; several may share one. See `Comm`, and the module for how it works.

    group: a `ProcessGroup`, a 1-D `DeviceMesh`, or None for the default group: processes of one machine. device: this
    rank's, by default the current one. pool_bytes: device memory that peers can write, for `empty` and for tensors
    received outside it; 1/8 is reserved for messages that do not fit in the rest and are sent in pieces. timeout:
    seconds after which a wait fails. check: how often verbs compare their arguments over the ranks. signals: how
    streams signal, see `Cuda`.

    A collective constructor. CPU tensors are sent over the hosts' comm, in exchanges without CUDA tensors. A sub shares
    its parent's `stats`, whose `sent_to` counts by the parent's ranks. The pool lives until `close`, or until the
    process ends, since memory that others map must not be freed.

    Raises: NotImplementedError, on every rank, if one rank's GPU cannot map another's memory, and where `Cuda` does;
    ValueError where `ShmComm` does.
    """

    direct = True

    def __init__(
        self,
        group: Any = None,
        *,
        device: torch.device | str | int | None = None,
        pool_bytes: int = 1 << 29,
        timeout: float = PATIENCE,
        check: str = "batch",
        signals: str = "auto",
    ) -> None:
        control = ShmComm(process_group("PeerComm", group), timeout=timeout, check=check)
        with agreed(control):
            cuda = Cuda(device, signals=signals)
        self._begin(control, cuda, pool_bytes, timeout)

    @classmethod
    def world(
        cls,
        size: int,
        *,
        devices: Sequence[torch.device | str | int] | None = None,
        pool_bytes: int = 1 << 26,
        timeout: float = 60.0,
        signals: str = "auto",
    ) -> list[PeerComm]:
        """One comm for each of `size` ranks in this process; give each to its own thread.

        devices: one per rank, by default the current device for all. The other arguments apply to every rank.
        """
        if devices is not None and len(devices) != size:
            raise ValueError(f"PeerComm.world: {len(devices)} devices for {size} ranks, expected one each")
        cudas = [Cuda(None if devices is None else devices[rank], signals=signals) for rank in range(size)]
        controls = LocalComm.world(size, timeout=timeout)
        with ThreadPoolExecutor(size) as threads:
            return list(
                threads.map(lambda control, cuda: cls.over(control, cuda, pool_bytes, timeout), controls, cudas)
            )

    @classmethod
    def over(cls, control: ShmComm | LocalComm, cuda: Any, pool_bytes: int, timeout: float) -> PeerComm:
        """The comm of a rank whose host alone uses `control`. A collective."""
        comm = cls.__new__(cls)
        comm._begin(control, cuda, pool_bytes, timeout)
        return comm

    def _begin(self, control: ShmComm | LocalComm, cuda: Any, pool_bytes: int, timeout: float) -> None:
        self._control = control
        # ranks count and agree over the control comm
        self._join(
            PeerChannel(control, cuda, pool_bytes, timeout), (), control.stats, control._counters, control.check_every
        )

    def sub(self, ranks: Sequence[int]) -> PeerComm:
        """The same memory for some of the ranks, renumbered."""
        view = super().sub(ranks)
        view._control = self._control.sub(ranks)
        return view

    def _admit(self, devices: Set[torch.device], tag: Tag) -> None:
        cuda = self._channel.cuda
        if not (devices <= {cuda.device} or devices == {torch.device("cpu")}):
            raise ValueError(
                f"exchange: tensors on {sorted(map(str, devices))}; expected all of them on {cuda.device}, the device "
                f"of rank {self.rank}'s PeerComm, or all on the CPU"
            )
        if cuda.device in devices:
            refuse_capture(tag, captured=cuda.capturing())

    def _post(self, sides: Sides, tag: Tag, stats: Stats) -> Work:
        channel = self._channel
        if channel.cuda.device not in sides.devices:
            return self._control._post(sides, tag, stats)
        try:
            posted = channel.post(self._scope_id, tag, sides.sends, sides.recvs)
        except RuntimeError as error:
            if not isinstance(error, PeerError):
                channel.fail(f"posting {tag}: {error}")
            raise
        stats.staged_bytes += posted.staged_bytes
        return _PeerWork(channel, posted, stats)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, kept: bool = False) -> Tensor:
        """Memory of the pool, which peers write directly, while there is room; else ordinary memory, which they cannot.

        kept: always ordinary memory, as the results of a training step would fill the pool layer by layer.

        A block is free when its last tensor is gone; other streams get it in stream order: see `DevicePool`.
        """
        channel = self._channel
        if torch.device(device) != channel.cuda.device:
            return self._control.empty(shape, dtype, device, kept=kept)
        block = None
        if not kept and not channel.poisoned.is_set():
            block = channel.pool.take(tuple(shape), dtype, channel.cuda.current())
        return torch.empty(tuple(shape), dtype=dtype, device=device) if block is None else block

    def _met(self, form: str, what: str, own: Contribution, hint: str) -> list[bytes]:
        """See `CommBase`: a collective of the hosts' comm; exchanges that were posted go on meanwhile."""
        try:
            with self._channel.progressing():
                return self._control._met(form, what, own, hint)
        except PeerError:
            self._channel.check(f"agreeing on {what}")
            raise

    def close(self) -> None:
        """Free the pool, whose tensors must not be in use, and let go of the group, before `destroy_process_group`.

        A collective; afterwards the comm is dead. A comm that is dead before keeps its pool: peers may write to it.
        """
        self._refuse_sub()
        if self._channel.cause is None:
            self._channel.close()
        if isinstance(self._control, ShmComm):
            self._control.close()
