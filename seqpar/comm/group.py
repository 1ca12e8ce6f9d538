"""`GroupComm`: ranks of a `torch.distributed` group, over NCCL for CUDA tensors and gloo for CPU tensors.

Both use point-to-point only. A private gloo twin of the group carries `agree` and all CPU tensors, and private NCCL
communicators CUDA tensors, so that no message meets those of the group's other users:

    CUDA tensors   batched send/recv on `nccl.Nccl`, one batch a round (`protocol.rounds`); on several nodes in two
                   lanes, see `nccl`
    CPU tensors    isend/irecv on the twin; a pair's tensors follow a header of int64, small ones in the same message
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from seqpar.comm.arguments import PATIENCE
from seqpar.comm.base import ProcessComm, process_group
from seqpar.comm.group_channel import GroupChannel
from seqpar.comm.over_gloo import GlooWork
from seqpar.comm.over_nccl import BY_NCCL, NcclSums, NcclWork
from seqpar.comm.protocol import Collectives, Sides, Stats, Tag, Work, refuse_capture, rounds


class GroupComm(ProcessComm[GroupChannel]):
    """The ranks of a process group. See `Comm` for the methods, and the module for how it works.

    group: a `ProcessGroup`, a 1-D `DeviceMesh` (of a larger mesh: ``mesh["cp"]``), or None for the default group.
    timeout: seconds after which a wait fails. check: how often verbs compare their arguments over the ranks, "batch"
    (once per plan and signature) or "call"; kept as `check_every`. private: whether CUDA tensors use the comm's own
    NCCL communicators (one of all ranks and, on several nodes, one of each node), which no other collective delays and
    which are aborted if a rank hangs; False uses the group's communicator, which saves memory. min_ctas: the fewest
    blocks of the GPU that NCCL gives an operation of the comm's own communicators (`ncclConfig_t.minCTAs`), which
    attention then lacks; by NCCL's sources (2.30) also the channels of a pair. None leaves it to NCCL. Not yet tried.

    A collective constructor: every rank of the group calls it. An exchange has CUDA tensors or CPU tensors, not both. A
    sub shares its parent's `stats`, whose `sent_to` counts by the parent's ranks.

    Raises: ValueError for a group that this process is not in or that has neither gloo nor NCCL, and if ranks share a
    GPU; NotImplementedError on ROCm.
    """

    def __init__(
        self, group: Any = None, *, timeout: float = PATIENCE, check: str = "batch", private: bool = True,
        min_ctas: int | None = None,
    ) -> None:  # fmt: skip
        channel = GroupChannel(process_group("GroupComm", group), timeout, check, private, min_ctas)
        self._join(channel, (), Stats(), {}, check)

    def _admit(self, devices: Set[torch.device], tag: Tag) -> None:
        types = {device.type for device in devices}
        if len(types) > 1 or not types <= self._channel.carries:
            raise _wrong_devices(types, self._channel.backends)
        if "cuda" in types:
            refuse_capture(tag)

    def _post(self, sides: Sides, tag: Tag, stats: Stats) -> Work:
        sends, recvs, devices = sides
        if next(iter(devices)).type == "cpu":  # control messages go so, whatever the group's backend
            return GlooWork(self._channel, self._scope_id, tag, sends, recvs, stats)
        return self._post_cuda(sends, recvs, tag)

    def _post_cuda(self, sends: Mapping[int, list[Tensor]], recvs: Mapping[int, list[Tensor]], tag: Tag) -> NcclWork:
        channel = self._channel
        return NcclWork(channel, tag, rounds(channel.rank, channel.size, sends, recvs, channel.nodes))

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


def _wrong_devices(types: Set[str], backends: Mapping[str, str]) -> ValueError:
    if len(types) > 1:
        return ValueError(f"exchange: tensors on devices {sorted(types)}; expected all of them on one type of device")
    (device,) = types
    return ValueError(
        f"exchange: tensors on device {device} in a group whose backend for it is {backends.get(device, 'none')}; "
        "expected CPU tensors on gloo or CUDA tensors on nccl: init_process_group('cpu:gloo,cuda:nccl') has both"
    )
