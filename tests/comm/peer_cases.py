"""What ranks of a `PeerComm` do on a device, and whether it was right; without pytest, for `bench/gpu` as well."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from seqpar.comm import PeerComm, PeerError
from seqpar.comm.peer.cuda import Cuda
from tests.comm import cases
from tests.comm.cases import tag


class Carried:
    """A comm for CPU tensors that sends them over the device, so that the suite runs as it is."""

    def __init__(self, comm, device):
        self._comm, self._device = comm, device

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def __copy__(self):
        return self if copy.copy(self._comm) is self._comm else None

    def __deepcopy__(self, memo):
        return self if copy.deepcopy(self._comm, memo) is self._comm else None

    def __reduce__(self):
        return self._comm.__reduce__()

    def sub(self, ranks):
        return Carried(self._comm.sub(ranks), self._device)

    def exchange(self, sends, recvs, *, tag):
        device = self._device
        sent = {peer: [x.to(device) for x in several] for peer, several in sends.items()}
        got = {peer: [self._memory(x, i, device) for i, x in enumerate(several)] for peer, several in recvs.items()}
        return CarriedWork(self._comm.exchange(sent, got, tag=tag), got, recvs)

    def _memory(self, like, index, device):
        """As much in the pool as elsewhere."""
        make = self._comm.empty if index % 2 else lambda shape, dtype, at: torch.empty(shape, dtype=dtype, device=at)
        return make(like.shape, like.dtype, device)


class CarriedWork:
    def __init__(self, work, got, recvs):
        self._work, self._got, self._recvs = work, got, recvs

    def wait(self):
        self._work.wait()
        for peer, several in self._recvs.items():
            for x, y in zip(several, self._got[peer], strict=True):
                x.copy_(y)


def on_device(control, fn, args, timeout, signals, carried=True):
    """``fn(comm, *args)`` on a `PeerComm` of the current device."""
    comm = PeerComm.over(control, Cuda(signals=signals), 1 << 26, timeout)
    with torch.cuda.stream(torch.cuda.Stream()):
        return fn(Carried(comm, comm._channel.cuda.device) if carried else comm, *args)


def on_own_device(control, fn, args, timeout, signals):
    """``fn(comm, *args)`` on a `PeerComm` of the GPU with the rank's number."""
    torch.cuda.set_device(control.rank)
    return on_device(control, fn, args, timeout, signals, False)


def over_nccl(comm, fn, *args):
    """``fn(comm, *args)`` on a `GroupComm` whose CPU tensors go over the GPUs of its ranks."""
    return fn(Carried(comm, comm._channel.gpu), *args)


def strided(comm):
    """Transposed and sliced tensors into others, in the pool and elsewhere."""
    device, other = comm._channel.cuda.device, comm.rank ^ 1
    x = torch.arange(24.0, device=device).reshape(2, 3, 4) + 100 * comm.rank
    deep = torch.full((2,) * 8, comm.rank, dtype=torch.int16, device=device)
    sends = [x.permute(2, 1, 0), x[:, ::2, 1:3], x.permute(2, 1, 0), deep]
    recvs = [
        comm.empty((4, 3, 2), x.dtype, device),
        comm.empty((2, 2, 4), x.dtype, device)[..., ::2].transpose(0, 1),
        torch.empty(2, 3, 4, device=device).permute(2, 1, 0),
        comm.empty((2,) * 8, deep.dtype, device),
    ]
    comm.exchange({other: sends}, {other: recvs}, tag=tag(0)).wait()
    expected = [sent - 100 * comm.rank + 100 * other for sent in sends[:3]] + [torch.full_like(deep, other)]
    return [torch.equal(a, b) for a, b in zip(recvs, expected, strict=True)], comm.stats.staged_bytes


def rotate(comm):
    """A ring on streams that are late by turns, in two slots that are overwritten as soon as they may be."""
    after, before, found = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size, []
    device = comm._channel.cuda.device
    slots = [comm.empty((1 << 18,), torch.float32, device) for _ in range(2)]
    sent = torch.empty(1 << 18, device=device)
    for n in range(20):
        torch.cuda._sleep(100_000 * ((n + comm.rank) % 3))
        sent.fill_(100.0 * comm.rank + n)
        work = comm.exchange({after: [sent]}, {before: [slots[n % 2]]}, tag=tag(n))
        work.wait()
        sent.fill_(-1.0)
        found.append(torch.stack([slots[n % 2].min(), slots[n % 2].max()]))
        slots[n % 2].fill_(-2.0)
    return torch.stack(found).tolist()


SIZES = (1, 3, 32, 127, 1024, 4096)  # elements of 4 bytes: small, so that a flag is close behind its data


def stressed(comm, messages):
    """Small messages between all pairs, about as many in all, with contents that only they have.

    How many exchanges brought a wrong element, by a counter on the device, and how many there were.
    """
    device, peers = comm._channel.cuda.device, [peer for peer in range(comm.size) if peer != comm.rank]
    exchanges = -(-messages // (comm.size * len(peers)))
    slots = [comm.empty((len(peers), max(SIZES)), torch.int32, device) for _ in range(2)]
    sent = [torch.empty((comm.size, max(SIZES)), dtype=torch.int32, device=device) for _ in range(2)]
    ramp, wrong = torch.arange(max(SIZES), dtype=torch.int32, device=device), torch.zeros((), device=device)
    # what a rank sends to a rank in an exchange: n * pairs + sender * size + receiver, and the element's number
    to_ranks = ramp + torch.arange(comm.size, dtype=torch.int32, device=device)[:, None] + comm.rank * comm.size
    from_peers = ramp + torch.tensor(peers, dtype=torch.int32, device=device)[:, None] * comm.size + comm.rank
    for n in range(exchanges):
        size, pairs = SIZES[n % len(SIZES)], n * comm.size**2
        x, y = sent[n % 2][:, :size], slots[n % 2][:, :size]
        torch.add(to_ranks[:, :size], pairs, out=x)
        recvs = {peer: [y[i]] for i, peer in enumerate(peers)}
        comm.exchange({peer: [x[peer]] for peer in peers}, recvs, tag=tag(n)).wait()
        wrong += (y != from_peers[:, :size] + pairs).any()
    return int(wrong), exchanges


def stalled(comm):
    """Rank 1's stream is away for some seconds before it posts. Many streams, so that they share queues.

    Seconds that the host took, what was received, the error that says so.
    """
    device, other = comm._channel.cuda.device, 1 - comm.rank
    for stream in [torch.cuda.Stream() for _ in range(32)]:
        with torch.cuda.stream(stream):
            torch.zeros(1, device=device)
    x, y = torch.ones(1 << 16, device=device), comm.empty((1 << 16,), torch.float32, device)
    comm.exchange({other: [x]}, {other: [y]}, tag=tag(0)).wait()
    torch.cuda.current_stream().synchronize()
    if comm.rank == 1:
        comm._channel.monitor._timeout = 20.0
        for _ in range(4):
            torch.cuda._sleep(1 << 31)
    start = time.monotonic()
    comm.exchange({other: [x]}, {other: [y]}, tag=tag(1)).wait()
    seconds = time.monotonic() - start
    torch.cuda.current_stream().synchronize()
    for _ in range(30):
        try:
            comm.check()
        except PeerError as error:
            return seconds, [bool(y.isnan().all()), bool((y == 1).all())], str(error)
        time.sleep(0.1)
    return seconds, [], "nothing was noticed"


def was_let_go(results):
    """Whether the host went on at once, rank 0 got NaN, and both ranks name the call and rank 1.

    What rank 1 had launched already comes all the same, later: `stalled` looks for it after it looked for NaN.
    """
    said = [text for _, _, text in results]
    named = all("in call 1 " in text and "what rank 1 sends" in text and "did not arrive" in text for text in said)
    (first, given, _), (second, late, _) = results
    return named and max(first, second) < 0.5 and given[0] and any(late)


class Check(NamedTuple):
    """A case, its arguments, and what its results by rank must be. carried: it has CPU tensors."""

    case: Callable[..., Any]
    arguments: tuple[Any, ...]
    right: Callable[[list[Any]], bool]
    carried: bool = True
    on_device: bool = False  # what the model does not have


def _as_counted(results):
    return all(wrong == [] and counted == predicted for wrong, counted, predicted, _ in results)


def _adjoint(results):
    forward, backward = (sum(each[i] for each in results) for i in range(2))
    return forward != 0 and abs(forward - backward) <= 1e-12 * abs(forward)


def _rotated(results):
    size = len(results)
    return results == [[[100.0 * ((rank - 1) % size) + n] * 2 for n in range(20)] for rank in range(size)]


def all_right(results):
    """Whether ranks had as many exchanges and none that was wrong."""
    return len({*results}) == 1 and results[0][0] == 0 and results[0][1] > 0


CHECKS = {
    "random exchanges": Check(cases.sparse, (1, 12), _as_counted),
    "many messages": Check(cases.sparse, (1, 1, 1.0, 120), _as_counted),
    "adjoint": Check(cases.adjoint, (6,), _adjoint),
    "any strides": Check(strided, (), lambda results: results == [([True] * 4, 96)] * len(results), carried=False),
    "small messages": Check(stressed, (600,), all_right, carried=False),
    "late streams": Check(rotate, (), _rotated, carried=False, on_device=True),
}
