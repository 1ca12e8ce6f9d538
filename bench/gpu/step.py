"""Slice `step`: `seqpar.attention` on the ranks of a plan, one after another: device and host apart.

Every rank runs the package's own schedule on a comm that sends nothing and whose received tensors hold random numbers.
So its time has launches, sums, casts, packing for peers and adding for them, but nothing of NCCL. ``ms`` is the sum of
the ranks' times on the device; the ratio is the time of one rank with the whole batch over that sum. ``host_ms`` is the
time in which the host issues the slowest rank's call: where it exceeds that rank's ``rank_ms``, the host is the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import seqpar
from bench.gpu.calls import FORWARD, Problem, Setup, short
from bench.gpu.machine import Machine, Timing
from bench.gpu.rows import Case, Row
from bench.gpu.speed import rate
from bench.gpu.verb import STEP, Verb
from bench.lib.virtual import Tape

SCHEDULES: dict[str, dict[str, Any]] = {
    "ring": {"transport": "ring"}, "fetch": {"transport": "fetch"}, "Ulysses": {"ulysses": 8},
    "Ulysses 2, ring 4": {"transport": "ring", "ulysses": 2},
}  # fmt: skip
RANKS = 8
ROWS = (8192, 2048)  # a rank's


class Lone(Tape):
    """A tape on any device, which takes contiguous tensors as NCCL does. Received tensors are prepared once."""

    direct = False

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._received: list[Tensor] = []
        self._next = 0

    def start(self) -> None:
        """Begin a call, which receives what the call before did."""
        super().start()
        self._next = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, kept: bool = False) -> Tensor:
        """Memory that holds random numbers, as if peers had written them."""
        if self._next == len(self._received):
            self._received.append(torch.randn(tuple(shape), device=device).to(dtype))
        tensor = self._received[self._next]
        if (tensor.shape, tensor.dtype) != (torch.Size(shape), dtype):
            raise ValueError(f"received tensor {self._next} is {tuple(tensor.shape)}, was asked for as {tuple(shape)}")
        self._next += 1
        return tensor


class Turn:
    """The call of one rank. accuracy: as of `seqpar.attention`."""

    def __init__(self, plan: seqpar.Plan, rank: int, problem: Problem, accuracy: str = "exact") -> None:
        self.plan, self.tape, self.accuracy = plan, Lone(rank, plan.ranks), accuracy
        tensors = (problem.q, problem.k, problem.v, problem.dout)
        self.q, self.k, self.v, self.dout = (seqpar.shard(x, plan, rank) for x in tensors)

    def forward(self) -> None:
        """Run the forward without gradients."""
        self.tape.start()
        with torch.no_grad():
            seqpar.attention(self.q, self.k, self.v, self.plan, self.tape, accuracy=self.accuracy)

    def step(self) -> None:
        """Run forward and backward."""
        self.tape.start()
        leaves = [x.detach().requires_grad_() for x in (self.q, self.k, self.v)]
        seqpar.attention(*leaves, self.plan, self.tape, accuracy=self.accuracy).backward(self.dout)


def step(tiny: bool) -> list[Case]:
    """The cases: schedules, at lengths where the device is the limit and where the host may be.

    Those in several steps also with ``accuracy="fast"``, which takes the kernels of other libraries.
    """
    if tiny:
        made = {"heads": 8, "kv_heads": 8, "dim": 16, "v_dim": 16, "dtype": torch.float32}
        setups = [Setup("causal", (64,), **made)]
    else:
        made = {"heads": 32, "kv_heads": 8, "dim": 128, "v_dim": 128}
        setups = [Setup("causal", (RANKS * rows,), **made) for rows in ROWS]
    ways = [(name, "exact") for name in SCHEDULES] + [(name, "fast") for name in ("ring", "fetch")]
    return [
        Case("step", f"{name}, {accuracy}, {s}", partial(_step, name, accuracy, s), later=name == "Ulysses 2, ring 4")
        for s in setups
        for name, accuracy in ways
    ]


def _step(name: str, accuracy: str, setup: Setup, machine: Machine) -> Iterator[Row]:
    if known := machine.doubt("auto", short(setup.dtype), setup.dim, setup.v_dim):
        yield {"kernel": "auto", "mode": STEP, "ok": False, "refused": known}
        return
    problem = Problem(setup, machine.device)
    plan = seqpar.Plan(problem.made, seqpar.Layout.zigzag([setup.tokens], RANKS), **SCHEDULES[name])
    turns, one = [Turn(plan, rank, problem, accuracy) for rank in range(RANKS)], Verb(problem)
    for mode in (FORWARD, STEP):
        runs: dict[Any, Callable[[], object]] = {
            rank: turn.step if mode == STEP else turn.forward for rank, turn in enumerate(turns)
        }
        runs["one"] = one.step if mode == STEP else one.forward
        times, missing = machine.times(runs, seconds=2.0, most=10)
        yield from ({"kernel": "auto", "mode": f"{mode}, rank {n}", **why} for n, why in missing.items())
        if not missing:
            work = problem.flops() * (3.5 if mode == STEP else 1.0)
            yield {"kernel": "auto", "mode": mode, **_of_ranks([times[n] for n in range(RANKS)], times["one"], work)}


def _of_ranks(ranks: list[Timing], one: Timing, work: float) -> Row:
    """The fields of a row of all ranks."""
    whole = Timing(
        sum(t.ms for t in ranks), sum(t.fastest for t in ranks), sum(t.slowest for t in ranks),
        min(t.runs for t in ranks), max(t.host for t in ranks),
    )  # fmt: skip
    row = rate(whole, flops=work)
    return row | {"rank_ms": max(t.ms for t in ranks), "baseline": "one rank", "ratio": one.ms / whole.ms,
                  "one_rank_ms": one.ms, "one_rank_host_ms": one.host}  # fmt: skip
