"""Sums over all ranks of a group by its backend's collectives: one call of the host, where exchanges take one a peer.

    CPU tensors    `all_reduce` of gloo; of fp16 and bf16 on 2 ranks, since a sum of two is rounded once; on more ranks
                   up to 1 MiB of them is widened to fp32, and more goes by exchanges
    CUDA tensors   NCCL's reduce-scatter and all-gather; fp16 and bf16 are reduced in fp32

Each piece is summed by one rank, or along one ring, so all ranks get the same bits, and the place of an element alone
decides in which order its addends are summed. Collectives have no headers, so ranks must know that they are in the same
call, with tensors of one size: gloo ends the process if a message is longer than its buffer. In gloo's `all_reduce`,
a ring, a rank receives from the next one alone (``gloo/allreduce.cc``, the default algorithm). So where ranks do not
know it yet, each first tells the one before it: one message of a rank, whatever their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from seqpar.comm.base import WorkBase
from seqpar.comm.header import describe
from seqpar.comm.protocol import Stats, Tag, Work, refuse_capture

BY_GLOO = (torch.float32, torch.float64, torch.int32, torch.int64)
BY_NCCL = (torch.float16, torch.bfloat16, *BY_GLOO)
HALVES = BY_NCCL[:2]
WIDENED = 1 << 20  # bytes of 16 bits that gloo sums as 32: twice the bytes, but a few messages less
BLOCK = 1 << 15  # elements that are widened at a time: a cache holds them, and no memory is new


class _Collective(WorkBase[Any]):
    """A collective in progress, and the tensors that it reads and writes."""

    def __init__(self, channel: Any, tag: Tag, stats: Stats, work: dist.Work, tensors: Sequence[Tensor]) -> None:
        super().__init__(channel, tag, stats)
        self._work, self._tensors = work, tensors

    def _finish(self) -> None:
        channel = self._channel
        channel.owner.check()
        watched = channel.interrupt.begin(self._tag)
        try:
            self._work.wait()
        except RuntimeError as error:
            raise channel.interrupted(f"in {describe(self._tag)}", error) from error
        finally:
            if watched:
                channel.interrupt.end()
        if channel.cause is not None:
            raise channel.error(f"in {describe(self._tag)}")

    def _keep(self) -> None:
        self._channel.orphans += [self._work, *self._tensors]


class GlooSums:
    """`Collectives` for CPU tensors, on the gloo twin of a comm's channel."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def meet(self, tag: Tag) -> Work:
        """See `Collectives`."""
        comm = self._comm
        before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        return comm.exchange({before: [torch.ones(1, device="cpu")]}, {after: [torch.empty(1, device="cpu")]}, tag=tag)

    def sum_(self, flat: Tensor, tag: Tag) -> None:
        """See `Collectives`."""
        comm = self._comm
        channel = comm._channel
        channel.check()
        wide = flat.float() if flat.dtype in HALVES and comm.size > 2 else flat
        count(comm.stats, channel, wide[: -(-len(wide) // comm.size)])
        _Collective(channel, tag, comm.stats, channel.twin.allreduce([wide]), [wide]).wait()
        if wide is not flat:
            flat.copy_(wide)


class NcclSums:
    """`Collectives` for CUDA tensors, on the communicator of a channel."""

    def __init__(self, channel: Any, stats: Stats) -> None:
        self._channel, self._stats = channel, stats

    def meet(self, tag: Tag) -> None:
        """See `Collectives`. No message says whether ranks have met."""

    def sum_(self, flat: Tensor, tag: Tag) -> None:
        """See `Collectives`."""
        refuse_capture(tag)
        channel, nccl = self._channel, self._channel.nccl
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
        count(self._stats, channel, tensors[0].view(channel.size, -1)[channel.rank])
        ranges = [(x.data_ptr(), x.nbytes) for x in tensors]
        channel.monitor.watch([work], f"in {describe(tag)} for all ranks", ranges)
        _Collective(channel, tag, self._stats, work, tensors).wait()


def count(stats: Stats, channel: Any, piece: Tensor) -> None:
    """Count a collective in which each rank sends a piece to every other one."""
    peers = {peer: [piece] for peer in range(channel.size) if peer != channel.rank}
    stats.count(peers, peers)


def add_in_order(addends: Sequence[Tensor], out: Tensor) -> None:
    """Write the sum of 1-D addends, in order, into `out`, which may be one of them; the first may be overwritten too.

    fp16 and bf16 are summed in fp32.
    """
    if out.dtype in HALVES and out.device.type == "cpu" and len(out) > BLOCK:
        for first, *parts in zip(*(torch.split(x, BLOCK) for x in (out, *addends))):
            add_in_order(parts, first)
        return
    total = addends[0].to(torch.float32 if out.dtype in HALVES else out.dtype)
    for x in addends[1:-1]:
        total += x
    torch.add(total, addends[-1], out=out)
