"""NCCL for `GroupComm`: one GPU for each rank, and communicators of the comm's own.

The comm's own communicator has a stream of high priority, so that a transfer waits for at most one block of an
attention kernel that fills the GPU, and nothing of the group's other users stands between two exchanges. Its ranks meet
over the group's store under a key of the comm, as those of the gloo twin do, so no other rank takes part. torch's
`new_group(use_local_synchronization=True)` would not do: it names a group by the number of groups that this process is
in, so ranks that differ in that never connect; and with a group bound to a device it splits the default group's
communicator, in which all ranks of the job must take part.

In a communicator over several nodes each pair of ranks has as few channels as a network card needs, whatever the links
of the pair carry. So on several nodes each one has a communicator for the pairs inside it:

    lane      pairs                  communicator       stream
    ACROSS    of different nodes     of all ranks       its own
    INSIDE    of one node            of that node       its own

An exchange may be in both lanes. Neither waits for the other: a stream waits for what the rank's current stream held
when a batch was posted, and the current one for both lanes of an exchange. Every rank posts the exchanges of a comm in
one order, and of each those across nodes first. So the batches of all ranks have one order that holds in both lanes,
and the first one that is not complete has nothing left to wait for, whether the device runs two kernels of NCCL next to
each other or starts them one by one as they were posted.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from seqpar.comm.failure import Range
from seqpar.comm.protocol import ACROSS, INSIDE
from seqpar.private import torch as torch_private

CUDA = torch.device("cuda")
log = logging.getLogger("seqpar.comm")
MARKING = 5.0  # seconds for marking memory before an abort
_open: set[Nccl] = set()  # communicators of comms, until they are closed or the process ends


def gpu_of(group: Any) -> torch.device:
    """The GPU that this rank uses: the one that the group is bound to, else the current one."""
    bound = group.bound_device_id
    return torch.device("cuda", torch.cuda.current_device()) if bound is None else torch.device(bound)


def check_gpus(name: str, gpus: Sequence[str]) -> None:
    """Raise ValueError, beginning with `name`, if ranks share a GPU, which NCCL refuses. gpus: an id for each rank."""
    for gpu in gpus:
        ranks = [rank for rank, other in enumerate(gpus) if other == gpu]
        if gpu and len(ranks) > 1:
            raise ValueError(
                f"{name}: ranks {', '.join(map(str, ranks))} all use GPU {gpu}, expected a GPU for each rank; call "
                'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before you make the comm'
            )


def node_of(machine: Sequence[str]) -> list[str]:
    """What ranks of one node have in common, as NCCL sees it: the boot of the kernel, and the host's name."""
    return [machine[0], machine[-1]]


def own_backend(store: Any, rank: int, size: int, timeout: float, min_ctas: int | None = None) -> Any:
    """A new NCCL backend of torch for these ranks, on a stream of high priority.

    timeout: seconds after which the comm gives up a wait; torch's watchdog, which ends the process, comes later.
    min_ctas: see `GroupComm`.
    """
    c10d: Any = dist.distributed_c10d
    options = c10d.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    if min_ctas is not None:
        options.config.min_ctas = int(min_ctas)
    torch_private.set_timeout(options, timedelta(seconds=2 * timeout + 60))
    return c10d.ProcessGroupNCCL(store, rank, size, options)


class Nccl:
    """The communicators of a comm as exchanges need them. owned: whether they are the comm's own, or the group's.

    backend: of all ranks. inside: of the ranks of this node, `node`, if the pairs inside a node have a lane of their
    own; None for a rank that is alone on its node.

    Owned ones live until `close` or `abort`, or until the process ends: an exchange may still run on the device when
    the comm is collected.
    """

    def __init__(self, backend: Any, *, owned: bool, inside: Any = None, node: Sequence[int] = ()) -> None:
        self._backend, self._owned = backend, owned
        self._lanes = {ACROSS: backend} if inside is None else {ACROSS: backend, INSIDE: inside}
        self._places = {rank: place for place, rank in enumerate(node)}
        if owned:
            _open.add(self)
            self._at_exit = weakref.finalize(self, _abort, os.getpid(), [*self._lanes.values()])

    def open(self, gpu: torch.device, peers: Sequence[int]) -> None:
        """Connect all ranks, as point-to-point between some of them needs, and set up the transports to peers.

        peers: the other ranks of this node.
        """
        one = torch.ones(1, dtype=torch.int64, device=gpu)
        for backend in self._lanes.values():
            backend.allreduce([one]).wait()
        if peers:
            lane = INSIDE if INSIDE in self._lanes else ACROSS
            self.post(dict.fromkeys(peers, [one]), {peer: [torch.empty_like(one)] for peer in peers}, lane).wait()
        # the kernel of `mark`: CUDA loads a kernel at its first launch, for which it may wait for the device
        one.view(torch.uint8).fill_(255)
        one.item()

    def post(
        self, sends: Mapping[int, Sequence[Tensor]], recvs: Mapping[int, Sequence[Tensor]], lane: int = ACROSS
    ) -> Any:
        """One batch of messages of a lane, as a work of torch; peers are the group's ranks. Tensors are contiguous.

        They travel as bytes, since NCCL lacks some dtypes.
        """
        backend = self._lanes[lane]
        torch_private.start_coalescing(backend)()
        try:
            for move, side in ((backend.send, sends), (backend.recv, recvs)):
                for peer, tensors in side.items():
                    for x in tensors:
                        move([x.view(-1).view(torch.uint8)], self._places[peer] if lane == INSIDE else peer, 0)
        finally:
            # also after an error: an open batch would swallow the next one
            work = torch_private.end_coalescing(backend)()
        return work

    def reduce_scatter(self, out: Tensor, flat: Tensor) -> Any:
        """Write this rank's piece of the sum of flat tensors, which it may be, as a work of torch."""
        return torch_private.reduce_scatter_base(self._backend)(out, flat)

    def all_gather(self, flat: Tensor, own: Tensor) -> Any:
        """Fill a flat tensor with the pieces of all ranks, as a work of torch."""
        return torch_private.allgather_base(self._backend)(flat, own)

    def abort(self, gpu: torch.device, unwritten: Sequence[Range] = ()) -> None:
        """End the kernels that wait for other ranks, so that the host returns, unless others use the communicator.

        unwritten: the memory that they were to write, which is marked first.
        """
        if self._owned and self in _open:
            _open.discard(self)
            if unwritten:
                # a thread, so that the host ends these kernels even if the device starts no other
                marking = threading.Thread(target=mark, args=(gpu, unwritten), daemon=True)
                marking.start()
                marking.join(MARKING)
            self._at_exit()

    def close(self) -> None:
        """Free the communicators, unless others use them. A collective."""
        if self._owned and self in _open:
            _open.discard(self)
            self._at_exit.detach()
            for backend in self._lanes.values():
                backend.shutdown()


def mark(gpu: torch.device, ranges: Sequence[Range]) -> None:
    """Set all bits of this memory, NaN in floating point, while the GPU's other streams wait.

    The kernels that read it come after those that wait, so a loss that is computed from what never came is NaN, and
    looks like a fault. The memory is the comm's own until then: the allocator reuses it in the order of the streams.
    """
    try:
        stream = torch.cuda.Stream(gpu, priority=-1) if gpu.type == "cuda" else None  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            for at, size in ranges:
                # addresses, as a comm holds no tensor that its caller has dropped
                storage = torch_private.construct_storage_from_data_pointer(at, gpu, size)
                torch.empty(0, dtype=torch.uint8, device=gpu).set_(storage).fill_(255)
        if stream is not None:
            stream.synchronize()
    except RuntimeError as error:
        log.warning("tensors that have not arrived on %s are not marked: %s", gpu, error)


def _abort(process: int, backends: Sequence[Any]) -> None:
    if os.getpid() == process:
        # as one: NCCL frees memory when it ends a communicator, for which CUDA waits for the kernels of the other one
        torch_private.group_start(backends[0])()
        try:
            for backend in backends:
                backend.abort()
        finally:
            torch_private.group_end(backends[0])()
    else:
        # a fork has none of the threads that the destructors would wait for
        for backend in backends:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))
