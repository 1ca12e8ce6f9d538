"""The measurements of `seqpar calibrate`: one rank's attention under many plans, linear layers, exchanges."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import seqpar
from seqpar.comm import Comm, GroupComm, LocalComm, ShmComm, Tag, Work, shm
from seqpar.comm.base import CompletedWork
from seqpar.kernels import Score, call_spec, choose
from seqpar.plan.steps import count
from seqpar.planner import ModelShape
from seqpar.planner.calibration import AttentionTiming, ExchangeTiming, LinearTiming

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A batch and its plan; rank 0 is timed. steps: about how many steps its keys should arrive in."""

    lengths: tuple[int, ...]
    ranks: int = 1
    steps: int = 1
    window: int | None = None
    unseen: bool = False


def cases(longest: int) -> list[Case]:
    """Batches with documents of up to about `longest` tokens: one or many, whole or sharded, in few steps or many."""
    n = longest
    drawn = np.random.default_rng(0).lognormal(0.0, 1.0, (2, 12))
    mixes = [tuple(np.maximum(x / x.sum() * 2 * n, 16).astype(int).tolist()) for x in drawn]
    fitted = [
        *(Case((n // parts,) * parts) for parts in (1, 2, 4, 8)),
        *(Case((n // parts,) * (parts // 4)) for parts in (4, 16, 32)),
        Case((n,), window=n // 16),
        *(Case((2 * n,), ranks, steps) for ranks, steps in ((4, 1), (8, 1), (8, 4), (16, 2))),
        Case((n,) * 2, 8, 2),
        Case((n // 2,) * 8, 8),
        Case((n // 4,) * 16, 4, 3),
        Case(mixes[0]),
    ]
    unseen = [
        Case((3 * n // 4,)),
        Case((n // 6,) * 6),
        Case(mixes[1]),
        Case((3 * n // 4,) * 2, window=n // 12),
        Case((3 * n // 2,), 4),
        Case((2 * n, n), 12, 3),
        Case(tuple(2 * x for x in mixes[1]), 4, 2),
    ]
    return fitted + [Case(c.lengths, c.ranks, c.steps, c.window, unseen=True) for c in unseen]


class SingleRankComm(LocalComm):
    """A comm with rank 0 alone, which computes its share of a plan; exchanges bring nothing and take no time.

    Receive buffers hold random numbers: the time does not depend on their values, except for NaN.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.check_every = size, "batch"
        self._made: dict[object, tuple[Tensor, Tensor]] = {}

    def exchange(
        self, sends: Mapping[int, Sequence[Tensor]], recvs: Mapping[int, Sequence[Tensor]], *, tag: Tag
    ) -> Work:
        """Nothing."""
        return CompletedWork()

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, kept: bool = False) -> Tensor:
        """One of two tensors of that shape, in turns: at most two are in use at once."""
        key = (tuple(shape), dtype, device)
        if key not in self._made:
            one, other = (torch.randn(tuple(shape), device=device).mul_(0.5).to(dtype) for _ in range(2))
            self._made[key] = (one, other)
        self._made[key] = self._made[key][::-1]
        return self._made[key][0]

    def sub(self, ranks: Sequence[int]) -> SingleRankComm:
        """This comm: in a plan with one rank per head group no other rank exchanges with it."""
        return self

    def gather(self, what: str, value: Any, error: Exception | None = None, **_: Any) -> list[Any]:
        """This rank's value in place of every rank's; raises the error if there is one."""
        return super().gather(what, value, error) * self.size


def stopwatch(device: torch.device) -> Callable[[], Callable[[], float]]:
    """``start() -> stop() -> seconds`` of computation. On CUDA: events on the current stream.

    On a CPU: the CPU time of this thread, which does all the work. A rank has a core to itself, but a busy machine
    interrupts it.
    """
    return _events if device.type == "cuda" else partial(_clock, time.thread_time)


def _clock(now: Callable[[], float]) -> Callable[[], float]:
    begun = now()
    return lambda: now() - begun


def _events() -> Callable[[], float]:
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()

    def stop() -> float:
        ended.record()
        ended.synchronize()
        return begun.elapsed_time(ended) / 1e3

    return stop


def kernel_for(model: ModelShape, device: torch.device) -> str:
    """The kernel that "auto" chooses where a row's keys come in several steps, as in every sharded batch."""
    q, k, v = (torch.empty(1, *shape, dtype=getattr(torch, model.dtype), device=device) for shape in shapes(model))
    return choose("auto", call_spec(q, k, v, Score(1.0), grads=True, deterministic=True, merges=True)).name


def shapes(model: ModelShape) -> list[tuple[int, int]]:
    """(heads, dim) of queries, keys and values."""
    return [(model.heads, model.dim), (model.kv_heads, model.dim), (model.kv_heads, model.values)]


class TimedCase:
    """A case with its plan and tensors, ready to be timed."""

    def __init__(self, case: Case, model: ModelShape, device: torch.device) -> None:
        model = replace(model, latents=False)  # the kernel's own work: keys and values as it takes them
        self.kernel = kernel_for(model, device)
        mask = seqpar.Mask(case.lengths, window=(case.window, None))
        layout = seqpar.Layout.zigzag(case.lengths, case.ranks)
        self.case, self.comm, self.device = case, SingleRankComm(case.ranks), device
        dtype = getattr(torch, model.dtype)
        whole = seqpar.Plan(mask, layout)
        fetched = sum(count(rows) for step in whole.steps(0) for rows in step.recvs.values())
        # Stages sized for the wanted number of steps; the first step has the rank's own keys.
        stage = max(1, -(-fetched // max(case.steps - 1, 1))) * model.row_bytes
        self.plan = seqpar.Plan(mask, layout, stage_bytes=stage)
        steps = self.plan.steps(0, row_bytes=model.row_bytes)
        positions = layout.positions(0)
        starts = np.cumsum(case.lengths)
        documents = np.searchsorted(starts, positions, side="right")
        breaks = (np.diff(positions) != 1) | (np.diff(documents) != 0)
        self.facts: dict[str, float] = {
            "flops": model.pair_flops,
            "area": sum(step.area for step in steps),
            "queries": len(positions),
            "keys": sum(count(rows) for step in steps for rows in step.recvs.values()),
            "pieces": 1 + int(breaks.sum()),
            "steps": len(steps),
        }
        rows = len(positions)
        self.tensors = [torch.randn(rows, *shape, device=device).to(dtype).requires_grad_() for shape in shapes(model)]
        self.dout = torch.randn(rows, model.heads, model.values, device=device).to(dtype)

    def run(self) -> tuple[float, float]:
        """Seconds of forward and of backward through `seqpar.attention`."""
        start = stopwatch(self.device)
        stop = start()
        out = seqpar.attention(*self.tensors, self.plan, self.comm, kernel=self.kernel)
        forward = stop()
        stop = start()
        torch.autograd.grad(out, self.tensors, self.dout)
        return forward, stop()


def longest_document(model: ModelShape, device: torch.device, seconds: float, most: int) -> int:
    """Tokens, a power of two up to `most`, of a document whose forward takes about that many seconds."""
    length = 256
    while length < most:
        probe = TimedCase(Case((length,)), model, device)
        probe.run()
        if min(probe.run()[0] for _ in range(3)) > seconds / 3:
            break
        length *= 2
    return length


def attention(
    model: ModelShape, device: torch.device, budget: float, longest: int, tick: Callable[[float], None]
) -> list[tuple[Case, list[AttentionTiming]]]:
    """For every case the median of its forward and of its backward."""
    attended = [TimedCase(case, model, device) for case in cases(longest)]
    found = interleaved([a.run for a in attended], budget, tick)
    rows = []
    for a, times in zip(attended, found, strict=True):
        medians = [statistics.median(each) for each in zip(*times, strict=True)]
        rows.append(
            (a.case, [AttentionTiming(**a.facts, backward=b, seconds=s) for b, s in zip((False, True), medians)])
        )
    return rows


class DecoderBlock(torch.nn.Module):
    """A layer without attention: norms, projections, ffn and residuals; experts are one ffn of their joint width."""

    def __init__(self, model: ModelShape) -> None:
        super().__init__()
        h, out = model.hidden, model.heads * model.values
        sparse = (model.active_experts + model.shared_experts) * model.expert_ffn
        self.width, self.out, self.gated = (model.ffn if model.dense_count else sparse), out, model.gated
        kv = model.kv_heads * (model.dim + model.values)
        shapes = {
            "qkv": (max(model.heads * model.dim + kv, out), h),
            "project": (h, out),
            "up": ((2 if model.gated else 1) * self.width, h),
            "down": (h, self.width),
        }
        self.weights = torch.nn.ParameterDict(
            {
                name: torch.nn.Parameter(torch.randn(shape, device="cpu") * shape[1] ** -0.5)
                for name, shape in shapes.items()
            }
        )
        self.flops = 3 * 2 * sum(w.numel() for w in self.weights.values())  # of one token, forward and backward

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> the same."""
        w = self.weights
        heads = F.linear(F.rms_norm(x, x.shape[-1:]), w["qkv"])[:, : self.out]
        x = x + F.linear(heads, w["project"])
        wide = F.linear(F.rms_norm(x, x.shape[-1:]), w["up"])
        if self.gated:
            gate, up = wide.chunk(2, dim=-1)
            return x + F.linear(F.silu(gate) * up, w["down"])
        return x + F.linear(F.gelu(wide), w["down"])


def linear(
    model: ModelShape, device: torch.device, budget: float, sizes: Sequence[int], tick: Callable[[float], None]
) -> list[LinearTiming]:
    """Median seconds of a layer's forward and backward, for each number of tokens."""
    dtype = getattr(torch, model.dtype)
    block = DecoderBlock(model).to(device, dtype)

    def run(x: Tensor, dout: Tensor) -> tuple[float]:
        stop = stopwatch(device)()
        torch.autograd.grad(block(x), [x, *block.parameters()], dout)
        return (stop(),)

    inputs = [[torch.randn(n, model.hidden, device=device).to(dtype) for _ in range(2)] for n in sizes]
    found = interleaved([partial(run, x.requires_grad_(), dout) for x, dout in inputs], budget, tick)
    return [LinearTiming(block.flops * n, statistics.median(s for (s,) in each)) for n, each in zip(sizes, found)]


def interleaved(
    runs: Sequence[Callable[[], Any]], budget: float, tick: Callable[[float], None], least: int = 3
) -> list[list[Any]]:
    """The results of each run: all runs take turns, round after round, until the budget in seconds is spent."""
    for run in runs:
        run()
    found: list[list[Any]] = [[] for _ in runs]
    begun = last = time.perf_counter()
    while last - begun < budget or len(found[0]) < least:
        for run, kept in zip(runs, found, strict=True):
            kept.append(run())
            now = time.perf_counter()
            tick(now - last)
            last = now
    return found


def hidden(comm: Comm, size: int, turns: int, cuda: bool) -> float:
    """On each process: the fraction of a hop of `size` bytes hidden behind equally long matrix products."""
    link, device = _comms(comm, cuda)["inside"], torch.device("cuda", comm.rank) if cuda else CPU
    a, x, y = torch.randn(256, 256, device=device), *(link.empty((size,), torch.uint8, device).fill_(1) for _ in "xy")
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    def timed(number: int, products: int, *, moves: bool) -> float:
        comm.agree("turn", {})
        stop = _events() if cuda else _clock(time.perf_counter)
        work = link.exchange({after: [x]}, {before: [y]}, tag=Tag(0, number, 0, 0)) if moves else None
        for _ in range(products):
            torch.mm(a, a)
        if work is not None:
            work.wait()
        return stop()

    first = [[timed(n, 1, moves=False), timed(n, 0, moves=True)] for n in range(5)]
    product, hop = (statistics.median(each) for each in zip(*first[1:]))
    products = comm.gather("products", max(1, round(hop / product)))[0]
    found = []
    for n in range(5, 5 + 2 * turns, 2):
        hop, computed = timed(n, 0, moves=True), timed(n, products, moves=False)
        found.append((hop + computed - timed(n + 1, products, moves=True)) / min(hop, computed))
    return min(1.0, max(0.0, statistics.median(found)))


def _comms(comm: Comm, cuda: bool) -> dict[str, Comm]:
    """The device's transports, by the link that they measure."""
    if cuda:
        torch.cuda.set_device(comm.rank)
        return {"inside": GroupComm(dist.new_group(backend="nccl"))}
    return {"inside": comm} if shm.missing() else {"inside": ShmComm(timeout=60.0), "across": comm}


def exchanges(comm: Comm, sizes: Sequence[int], turns: int, cuda: bool) -> dict[str, list[list[float]]]:
    """On each process: link -> size -> seconds of every turn of a hop around a ring, over the device's transports."""
    comms, device = _comms(comm, cuda), torch.device("cuda", comm.rank) if cuda else CPU
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    found: dict[str, list[list[float]]] = {name: [[] for _ in sizes] for name in comms}
    buffers = {
        (name, size): [c.empty((size,), torch.uint8, device).fill_(1) for _ in range(2)]
        for name, c in comms.items()
        for size in sizes
    }
    for turn in range(turns + 1):
        for (name, c), (at, size) in ((x, y) for x in comms.items() for y in enumerate(sizes)):
            x, y = buffers[name, size]
            comm.agree("turn", {})
            stop = _events() if cuda else _clock(time.perf_counter)
            c.exchange({after: [x]}, {before: [y]}, tag=Tag(0, turn, at, 0)).wait()
            if turn:
                found[name][at].append(stop())
    return found


def pooled(
    ranks: Sequence[Mapping[str, list[list[float]]]], more: Sequence[Mapping[str, list[list[float]]]]
) -> list[dict[str, list[list[float]]]]:
    """The results of `exchanges`, by rank, with the turns of one more run appended."""
    return [
        {name: [a + b for a, b in zip(sizes, others[name], strict=True)] for name, sizes in rank.items()}
        for rank, others in zip(ranks, more, strict=True)
    ]


def links(ranks: Iterable[Mapping[str, list[list[float]]]], sizes: Sequence[int]) -> dict[str, list[ExchangeTiming]]:
    """Link -> for each size, the median over turns of the slowest rank's seconds."""
    of = list(ranks)
    return {
        name: [
            ExchangeTiming(size, statistics.median(map(max, zip(*(rank[name][at] for rank in of), strict=True))))
            for at, size in enumerate(sizes)
        ]
        for name in of[0]
    }
