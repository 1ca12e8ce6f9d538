"""Exchanges of CUDA tensors over NCCL, and their sums over all ranks of a group, by reduce-scatter and all-gather.

A sum takes one call of the host, an exchange one a peer. fp16 and bf16 are reduced in fp32. Each piece is summed by one
rank, or along one ring, so all ranks get the same bits, and the place of an element alone decides in which order its
addends are summed. No message says whether ranks are in the same call, with tensors of one size: they must know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from seqpar.comm.base import WorkBase
from seqpar.comm.group_channel import GroupChannel
from seqpar.comm.header import describe
from seqpar.comm.protocol import Round, Stats, Tag, refuse_capture

HALVES = (torch.float16, torch.bfloat16)
BY_NCCL = (*HALVES, torch.float32, torch.float64, torch.int32, torch.int64)


class NcclWork(WorkBase[GroupChannel]):
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
            channel.fail(f"{self.doing}: {error}")
        if channel.cause is not None:
            raise channel.error(self.doing)
        self._works, self._tensors = [], []

    def _keep(self) -> None:
        self._channel.orphans += [*self._works, *self._tensors]


class _Collective(WorkBase[GroupChannel]):
    """A collective in progress, and the tensors that it reads and writes."""

    def __init__(
        self, channel: GroupChannel, tag: Tag, stats: Stats, work: dist.Work, tensors: Sequence[Tensor]
    ) -> None:  # fmt: skip
        super().__init__(channel, tag, stats)
        self._work, self._tensors = work, tensors

    def _finish(self) -> None:
        channel = self._channel
        channel.owner.check()
        listened = channel.interrupt.begin(self)
        try:
            self._work.wait()
        except RuntimeError as error:
            raise channel.interrupted(self.doing, error) from None
        finally:
            channel.interrupt.end(listened)
        if channel.cause is not None:
            raise channel.error(self.doing)

    def _keep(self) -> None:
        self._channel.orphans += [self._work, *self._tensors]


class NcclSums:
    """`Collectives` for CUDA tensors, on the communicator of a channel."""

    def __init__(self, channel: GroupChannel, stats: Stats) -> None:
        self._channel, self._stats = channel, stats

    def sum_(self, flat: Tensor, tag: Tag) -> None:
        """See `Collectives`."""
        refuse_capture(tag)
        channel, nccl = self._channel, self._channel.nccl
        assert nccl is not None
        wide = flat.float() if flat.dtype in HALVES else flat
        own = flat.view(channel.size, -1)[channel.rank]
        total = wide.view(channel.size, -1)[channel.rank]
        self._run(tag, lambda: nccl.reduce_scatter(total, wide), (wide,))
        if wide is not flat:
            own.copy_(total)
        self._run(tag._replace(stage=tag.stage + 1), lambda: nccl.all_gather(flat, own), (flat,))

    def _run(self, tag: Tag, post: Any, tensors: Sequence[Tensor]) -> None:
        channel = self._channel
        channel.check()
        work = post()
        piece = tensors[0].view(channel.size, -1)[channel.rank]
        others = {peer: [piece] for peer in range(channel.size) if peer != channel.rank}
        self._stats.count(others, others)
        ranges = [(x.data_ptr(), x.nbytes) for x in tensors]
        channel.monitor.watch([work], f"in {describe(tag)} for all ranks", ranges)
        _Collective(channel, tag, self._stats, work, tensors).wait()
