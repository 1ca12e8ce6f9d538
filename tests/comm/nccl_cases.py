"""What a rank does in tests of NCCL's part, over gloo: GPUs are numbers, and their tensors the CPU's."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import seqpar
from seqpar.comm import Comm, GroupComm, PeerError, base, group_channel, nccl
from seqpar.comm.over_nccl import NcclSums
from seqpar.comm.protocol import Sides
from seqpar.testing import dense_attention
from seqpar.train import sums, sync_gradients
from tests.cases import Case
from tests.comm.cases import as_on_gpus, sparse, tag, until
from tests.comm.over_gloo import OverGloo
from tests.ops.cases import TOLERANCE, inputs, poisoned


def own_backend(store: Any, rank: int, size: int, timeout: float, min_ctas: int | None = None) -> OverGloo:
    """What stands for a communicator of the comm's own."""
    c10d: Any = dist.distributed_c10d
    return OverGloo(c10d.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout)))


@contextmanager
def with_gpus() -> Iterator[None]:
    """A machine of GPUs, in a group that has NCCL. Every process starts on GPU 0."""
    current = [0]
    with (
        mock.patch.object(group_channel, "_backends", lambda given: {"cpu": "gloo", "cuda": "nccl"}),
        mock.patch.object(group_channel, "gpu_of", lambda given: torch.device("cpu")),
        mock.patch.object(group_channel, "own_backend", own_backend),
        mock.patch.multiple(
            torch.cuda,
            is_available=lambda: True,
            set_device=lambda device: current.__setitem__(0, device) if isinstance(device, int) else None,
            get_device_properties=lambda device: SimpleNamespace(uuid=f"GPU-{current[0]}"),
        ),
    ):
        yield


def on_one_gpu(comm: Comm) -> str:
    """The error of a comm whose first two ranks use one GPU; the last one has its own."""
    with with_gpus():
        torch.cuda.set_device(max(0, comm.rank - 1))
        try:
            GroupComm(timeout=60.0)
        except ValueError as error:
            return str(error)
    return "nothing was noticed"


def under_capture(comm: Comm) -> tuple[str, bool]:
    """The error of an exchange over NCCL while a CUDA graph is captured, and whether the comm lives."""
    x, other = torch.zeros(2), 1 - comm.rank
    said, as_on_a_gpu = "nothing was noticed", Sides({other: [x]}, {}, {torch.device("cuda")})
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
        with mock.patch.object(base, "checked_sides", lambda *sides, direct: as_on_a_gpu):
            comm._channel.carries = {"cuda"}
            try:
                comm.exchange({other: [x]}, {}, tag=tag(0))
            except NotImplementedError as error:
                said = str(error)
        comm._channel.carries = {"cpu"}
        comm.exchange({other: [x + comm.rank]}, {other: [x]}, tag=tag(1)).wait()
    return said, bool((x == other).all())


def on_gpus(given: Any = None, **options: Any) -> GroupComm:
    """A comm whose ranks have a GPU each, and send CPU tensors as if these were on it."""
    with with_gpus():
        torch.cuda.set_device(dist.get_rank())
        comm = GroupComm(given, **{"timeout": 60.0, **options})
    comm._channel.carries = {"cpu", "cuda"}
    return comm


def swap(comm: GroupComm, call: int) -> list[float]:
    """What a rank gets from both neighbours over NCCL."""
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    got = torch.zeros(2)
    sends, recvs = {after: [torch.full((2,), float(comm.rank))]}, {before: [got]}
    comm._post_cuda(sends, recvs, tag(call)).wait()
    return got.tolist()


def of_a_mesh(comm: Comm, folder: Path) -> Any:
    """Ranks 1 and 3 make a comm and use it, while 0 and 2 do something else until that is done."""
    pairs = [dist.new_group(ranks) for ranks in ([1, 3], [0, 1])]  # so rank 1 is in more groups than rank 3
    if comm.rank % 2 == 0:
        until(lambda: all((folder / other).exists() for other in "13"))
        return "elsewhere"
    mine = on_gpus(pairs[0])
    assert mine._channel.nccl is not None
    backend = mine._channel.nccl._backend
    opened = set(backend.peers)
    found = swap(mine, 0), sorted(opened), mine._channel.nccl in nccl._open
    mine.close()
    try:
        mine.agree("afterwards", {})
    except PeerError as error:
        (folder / str(comm.rank)).touch()
        return *found, backend.calls, mine._channel.nccl in nccl._open, str(error)
    return "a closed comm agreed"


def shares(comm: Comm, differs: bool) -> Any:
    """A comm that shares the group's communicator does not end it; all ranks share or none."""
    made: list[Any] = []

    class Noted(nccl.Nccl):
        def __init__(self, backend: Any, *, owned: bool, **nodes: Any) -> None:
            made.append((backend, owned))
            super().__init__(OverGloo(backend), owned=owned, **nodes)

    with mock.patch.object(group_channel, "Nccl", Noted), mock.patch.object(group_channel, "CUDA", torch.device("cpu")):
        try:
            mine = on_gpus(private=differs and comm.rank == 0)
        except ValueError as error:
            return str(error)
    assert mine._channel.nccl is not None
    found = swap(mine, 0)
    mine.abort("a test")
    same = made[0][0] is dist.group.WORLD._get_backend(torch.device("cpu"))
    return found, made[0][1], same, mine._channel.nccl._backend.calls


def summed(comm: Comm, dtype: torch.dtype) -> tuple[list[list[float]], int]:
    """Gradients summed over NCCL, of which the first rank has not all; bytes that this rank sent."""
    mine = on_gpus()
    several = [torch.nn.Parameter(torch.zeros(n, dtype=dtype)) for n in (3, 40, 5)]
    for index, p in enumerate(several):
        if index + comm.rank:
            p.grad = torch.full_like(p, 256.0 if comm.rank == 1 else 0.75)
    with (
        mock.patch.object(mine, "sums", lambda like: NcclSums(mine._channel, mine.stats)),
        mock.patch.object(sums, "FEW", 0),  # as on a GPU, where nothing goes by pairs
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
    ):
        mine.stats.reset()
        # as in a program, whose waits listen for Ctrl-C
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        sync_gradients(several, mine, bucket_bytes=100)
        assert signal.set_wakeup_fd(-1) == -1
        signal.signal(signal.SIGINT, before)
    return [p.grad.unique().tolist() for p in several if p.grad is not None], mine.stats.bytes_sent


def hangs(comm: Comm) -> tuple[bool, list[str], str]:
    """Rank 1 posts nothing, and rank 0's host waits for its device: whether that ends, what it logs and raises.

    The tensor that does not arrive has become NaN before the wait ends, and the one that did has not.
    """
    mine, lines = on_gpus(), []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("seqpar.comm").addHandler(handler)
    assert mine._channel.nccl is not None
    backend, ended, seen = mine._channel.nccl._backend, True, list[bool]()
    if comm.rank == 0:
        backend.stuck, mine._channel.monitor._timeout = True, 1.0
        missing, arrived = torch.zeros(3), torch.zeros(3)
        backend.before_end = lambda: seen.append(bool(missing.isnan().all()))
        mine._post_cuda({}, {1: [missing]}, tag(6)).wait()
        complete = SimpleNamespace(is_completed=lambda: True)
        mine._channel.monitor.watch([complete], "for nobody", [(arrived.data_ptr(), arrived.nbytes)])
        ended = backend.ended.wait(60) and seen == [True] and not arrived.any()
    try:
        mine.agree("the next step", {})
    except PeerError as error:
        logging.getLogger("seqpar.comm").removeHandler(handler)
        return ended and backend.calls == ["group", "abort", "end"], lines, str(error)
    return ended, lines, "nothing was noticed"


def on_nodes(hosts: str, given: Any = None, **options: Any) -> GroupComm:
    """A comm as `on_gpus` makes it, whose rank r is on the host with the r-th letter."""
    rank = dist.get_rank(given)
    with mock.patch.object(group_channel, "machine", lambda: ["a boot", "", hosts[rank]]):
        return on_gpus(given, **options)


def lanes_of(comm: GroupComm) -> list[OverGloo]:
    """The communicators of a comm: of all ranks, and of its node if there is one."""
    assert comm._channel.nccl is not None
    return [*comm._channel.nccl._lanes.values()]


def of_nodes(comm: Comm, folder: Path) -> Any:
    """Some ranks make a comm over several nodes and use it, while rank 3 does something else until that is done.

    Returns what was wrong, the peers of both lanes, and what the end of the comm called on each.
    """
    members = dist.new_group([0, 1, 2, 4])
    if comm.rank == 3:
        until(lambda: all((folder / other).exists() for other in "0124"))
        return "elsewhere"
    mine = on_nodes("abac", members)
    lanes = lanes_of(mine)
    # the constructor has opened the way to the ranks of the node
    opened = [sorted(lane.peers) for lane in lanes]
    for lane in lanes:
        lane.peers.clear()
    wrong, counted, predicted, _ = as_on_gpus(mine, sparse, 3, 12)
    used = [sorted(lane.peers) for lane in lanes]
    (mine.abort if comm.rank < 2 else lambda reason: mine._channel.close())("a test")
    (folder / str(comm.rank)).touch()
    return wrong, counted == predicted, opened, used, [lane.calls for lane in lanes]


def hangs_inside(comm: Comm) -> tuple[list[list[str]], str]:
    """A rank posts nothing to its node while both lanes have work: how that ends on each lane, and the error."""
    mine = on_nodes("aab")
    lanes = lanes_of(mine)
    if comm.rank == 0:
        mine._channel.monitor._timeout = 1.0
        lanes[1].stuck = True
        across, inside = torch.zeros(3), torch.zeros(3)
        mine._post_cuda({2: [torch.ones(3)]}, {1: [inside], 2: [across]}, tag(6)).wait()
        assert across.tolist() == [2.0] * 3, "one lane does not wait for the other"
        assert lanes[1].ended.wait(60)
    if comm.rank == 2:
        mine._post_cuda({0: [torch.full((3,), 2.0)]}, {0: [torch.zeros(3)]}, tag(6)).wait()
    try:
        mine.agree("the next step", {})
    except PeerError as error:
        return [lane.calls for lane in lanes], str(error)
    return [], "nothing was noticed"


def attention(comm: Comm, case: Case) -> list[str]:
    """The results and gradients of a case that differ from those of one device."""
    plan, device = case.plan(), getattr(comm._channel, "gpu", None) or torch.device("cpu")
    *given, dout, _ = (x.to(device) for x in inputs(plan, (4, 2), (16, 16), case.seed))
    sides = ("q", "kv", "kv")
    whole = [x.clone().requires_grad_() for x in given]
    mine = [poisoned(x, plan, comm.rank, side).requires_grad_() for x, side in zip(given, sides, strict=True)]
    expected, _ = dense_attention(*whole, plan.mask)
    expected.backward(dout)
    out = seqpar.attention(*mine, plan, comm)
    out.backward(seqpar.shard(dout, plan, comm.rank))
    pairs = {"out": (out, expected, "q")}
    for name, x, y, side in zip(("dq", "dk", "dv"), mine, whole, sides, strict=True):
        pairs[name] = (x.grad, y.grad, side)
    wrong = []
    for name, (x, y, side) in pairs.items():
        rows = torch.from_numpy(plan.positions(comm.rank, side) >= 0)
        error = x.detach()[rows].double() - seqpar.shard(y.detach(), plan, comm.rank, side=side)[rows].double()
        # of the whole, as a rank's part may be zero up to rounding
        if not error.norm() <= TOLERANCE * y.double().norm():
            wrong.append(name)
    return wrong


def attention_on_nodes(comm: Comm, case: Case, hosts: str) -> list[str]:
    """`attention` over a comm of several nodes."""
    return as_on_gpus(on_nodes(hosts), attention, case)  # type: ignore[no-any-return]
