"""Slice `ring`: what attention over many ranks computes, beside one launch over all of it.

The steps of all ranks run one after another on the one device, on the keys that they would receive; nothing is sent.
The ratio is the time of one launch over the sum of the ranks' times. Its difference to 1 is the ring tax, which pays
for shorter launches, partial tiles and sums kept in float32, and for what the schedule does around its launches: sums
that are allocated and zeroed, delta, gradients that are zeroed, added where they arrive and cast. It leaves out packing
for peers, the share of the device that NCCL takes, and the host: see slice `step` and `bench/gpu/nccl.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

import seqpar
from bench.gpu.calls import (
    BACKWARD,
    FORWARD,
    TOLERANCE,
    Contestant,
    Label,
    OfKernel,
    Problem,
    Setup,
    Tensors,
    asked,
    errors,
    facts_of_band,
    field,
    plainly,
    refused,
    verdict,
)
from bench.gpu.machine import Machine
from bench.gpu.rows import Case, Row
from bench.gpu.speed import fastest, rate
from seqpar.kernels import Grads, Kernel, Operands, StepFacts, Sums, acc_dtype, choose, softmax
from seqpar.kernels.memory.copy import Pair, add
from seqpar.plan import TRANSPORTS, Step

TOKENS = 65536
STAGE, LARGE_STAGE = 64 << 20, 256 << 20  # bytes of a fetched stage: as plans have them by default, and more
LAYOUTS: dict[str, Callable[[int, int], seqpar.Layout]] = {
    "zigzag": lambda tokens, ranks: seqpar.Layout.zigzag([tokens], ranks),
    "contiguous": seqpar.Layout.contiguous,
    "striped": seqpar.Layout.striped,
}


def ring(tiny: bool) -> list[Case]:
    """The cases: numbers of ranks, layouts and transports. The headline figure comes first."""
    if tiny:
        return [Case("ring", "zigzag, fetch, 2 ranks", partial(_tax, "zigzag", "fetch", 2, STAGE, True))]
    large = partial(_tax, "zigzag", "fetch", 8, LARGE_STAGE, False)
    cases = [Case("ring", f"zigzag, fetch, 8 ranks, stages of {LARGE_STAGE >> 20} MiB", large)]
    for ranks in (8, 2, 4, 16):
        for layout in LAYOUTS:
            for transport in ("fetch", "ring", "double_ring", "gather"):
                later = layout != "zigzag" or transport not in ("fetch", "ring")
                cases.append(
                    Case(
                        "ring",
                        f"{layout}, {transport}, {ranks} ranks",
                        partial(_tax, layout, transport, ranks, STAGE, False),
                        later,
                    )
                )
    assert {c.name.split(", ")[1] for c in cases} == set(TRANSPORTS)
    return cases


def setup_of(tiny: bool) -> Setup:
    """The call whose rows the ranks share."""
    made = {"heads": 4, "kv_heads": 2, "dim": 16, "v_dim": 16, "dtype": torch.float32} if tiny else \
        {"heads": 32, "kv_heads": 8, "dim": 128, "v_dim": 128}  # fmt: skip
    return Setup("causal", (64 if tiny else TOKENS,), **made)


class Rank:
    """The tensors and steps of one rank. numbers: positions of its rows. k, v of a step: the keys that it receives.

    places: of a step's keys in the gradients of all ranks; None if they are the rank's own, ``home``.
    """

    def __init__(self, plan: seqpar.Plan, rank: int, problem: Problem, slots: Tensor) -> None:
        s = problem.setup
        row_bytes = plan.row_bytes(s.heads, s.kv_heads, s.dim, s.v_dim, s.dtype.itemsize)
        steps = plan.steps(rank, row_bytes=row_bytes)
        self.numbers = torch.from_numpy(steps[0].part.pos).to(problem.device)
        self.q, self.dout = problem.q[self.numbers], problem.dout[self.numbers]
        first = int(slots[self.numbers[0]]) if len(self.numbers) else 0
        self.home = slice(first, first + len(self.numbers))
        self.out = self.lse = self.dq = torch.empty(0)
        self.steps: list[tuple[Step, StepFacts, Tensor, Tensor, Tensor | None]] = []
        for step in steps:
            (band,) = step.bands
            facts = facts_of_band(band, problem.device)
            at = facts.key_pos.long()
            self.steps.append((step, facts, problem.k[at], problem.v[at], None if step.local else slots[at]))


class Virtual:
    """All ranks of a plan on one device, as a contestant."""

    def __init__(self, plan: seqpar.Plan, kernel: Kernel, problem: Problem) -> None:
        self.kernel, self.problem = kernel, problem
        self.acc = acc_dtype(problem.setup.dtype)
        # rows of the gradients of all ranks by position: those of one rank follow each other
        order = torch.from_numpy(np.concatenate([plan.layout.positions(rank) for rank in range(plan.ranks)]))
        self.slots = torch.empty_like(order)
        self.slots[order] = torch.arange(len(order))
        self.slots = self.slots.to(problem.device)
        self.ranks = [Rank(plan, rank, problem, self.slots) for rank in range(plan.ranks)]
        self.sums: tuple[Tensor, ...] = ()

    def forward(self) -> None:
        """Run every step of every rank, as `seqpar.ops.attention.schedule` does."""
        wide = self.acc == self.problem.setup.dtype
        for rank in self.ranks:
            rank.out = torch.zeros_like(rank.dout)
            rank.lse = rank.out.new_full((rank.q.shape[1], len(rank.q)), -torch.inf, dtype=self.acc)
            acc = rank.out if wide else None
            for step, facts, k, v, _ in rank.steps:
                if not (len(k) or step.first or step.last):
                    continue
                if acc is None and not (step.first and step.last):
                    acc = (torch.empty_like if step.first else torch.zeros_like)(rank.out, dtype=self.acc)
                out = rank.out if step.last and not wide else None
                x = Operands(rank.q, k, v, facts, self.problem.score)
                self.kernel.forward(x, Sums(acc, rank.lse, out, step.first))

    def backward(self) -> None:
        """Run every step of every rank, as the schedule does; gradients are added to their owners' sums."""
        p, s = self.problem, self.problem.setup
        homes = p.q.new_zeros(s.tokens, s.kv_heads, s.dim + s.v_dim, dtype=self.acc)
        found = []
        for rank in self.ranks:
            delta = softmax.delta(rank.dout, rank.out, rank.steps[0][1]).contiguous()
            rank.dq = torch.zeros_like(rank.q, dtype=self.acc)
            for _, facts, k, v, places in rank.steps:
                if not len(k):
                    continue
                grads = homes[rank.home] if places is None else torch.zeros_like(homes[: len(k)])
                dk, dv = grads.split([s.dim, s.v_dim], -1)
                x = Operands(rank.q, k, v, facts, p.score)
                self.kernel.backward(x, Grads(rank.dout, rank.lse, delta, rank.out, rank.dq, dk, dv))
                if places is not None:
                    add(Pair(homes, grads, dst_rows=places))
            found.append(rank.dq.to(s.dtype))
        self.sums = (homes, homes.to(s.dtype), *found)

    def results(self, backward: bool) -> Tensors:
        """The results of the whole batch. Gradients are the sums, not rounded."""
        p, s = self.problem, self.problem.setup
        self.forward()
        got = {"out": torch.full_like(p.dout, torch.nan)}
        for rank in self.ranks:
            got["out"][rank.numbers] = rank.out
        if backward:
            self.backward()
            got["dq"] = torch.full_like(p.q, torch.nan, dtype=self.acc)
            for rank in self.ranks:
                got["dq"][rank.numbers] = rank.dq
            got["dk"], got["dv"] = self.sums[0][self.slots].split([s.dim, s.v_dim], -1)
        return got


class Whole:
    """The whole batch in one launch: by the kernel, which gives the results, and by the fastest other library."""

    def __init__(self, machine: Machine, setup: Setup, kernel: Kernel) -> None:
        self.problem = Problem(setup, machine.device)
        self.one = OfKernel(kernel, self.problem)
        self.expected = self.one.results(True)
        self.vendors = {mode: self._vendor(machine, mode == BACKWARD) for mode in (FORWARD, BACKWARD)}

    def _vendor(self, machine: Machine, back: bool) -> tuple[Label, Contestant] | None:
        """The fastest kernel of other libraries in this direction, or None."""
        setup, ready = self.problem.setup, {}
        for label, make in field(machine, setup, backward=back)[0].items():
            own = label.kernel in ("triton", "blockwise", "reference", "flex")
            if not own and not refused(machine, label, setup, make, backward=back):
                ready[label] = make(self.problem, True)
        times, _ = machine.times({label: c.backward if back else c.forward for label, c in ready.items()})
        best = fastest(times) if times else None
        return None if best is None else (best, ready[best])


def virtual(
    layout: str, transport: str, ranks: int, kernel: Kernel, problem: Problem, stage_bytes: int = STAGE
) -> Virtual:
    """All ranks of a layout and a transport."""
    layout_of_all = LAYOUTS[layout](problem.setup.tokens, ranks)
    plan = seqpar.Plan(problem.made, layout_of_all, transport=transport, stage_bytes=stage_bytes)
    return Virtual(plan, kernel, problem)


def _tax(layout: str, transport: str, ranks: int, stage_bytes: int, tiny: bool, machine: Machine) -> Iterator[Row]:
    setup = setup_of(tiny)
    call = asked(setup, machine, grads=True, deterministic=True, merges=True)
    kernel = choose("auto", call)
    label = Label(kernel.name, "checked before a ring")
    row = refused(machine, label, setup, plainly(kernel), backward=True)
    if row:
        yield row
        return
    if setup not in machine.known:
        machine.known[setup] = Whole(machine, setup, kernel)
    whole = machine.known[setup]
    many = virtual(layout, transport, ranks, kernel, whole.problem, stage_bytes)
    found = errors(many.results(True), whole.expected)
    off = verdict(found, TOLERANCE[setup.dtype])
    if off:
        yield {
            "kernel": kernel.name,
            "mode": FORWARD,
            "ok": False,
            "refused": f"not as one launch: {off}",
            "errors": found,
        }
        return
    for mode in (FORWARD, BACKWARD):
        yield from _compare(machine, mode, many, whole)


def _compare(machine: Machine, mode: str, many: Virtual, whole: Whole) -> Iterator[Row]:
    back, name, vendor = mode == BACKWARD, many.kernel.name, whole.vendors[mode]
    if back:
        many.forward()
    runs: dict[str, Contestant] = {"ranks": many, "one launch": whole.one} | ({"vendor": vendor[1]} if vendor else {})
    times, missing = machine.times({n: r.backward if back else r.forward for n, r in runs.items()}, seconds=0.8)
    yield from ({"kernel": name, "mode": f"{mode}, {n}", **why} for n, why in missing.items())
    if "ranks" not in times or "one launch" not in times:
        return
    row = rate(times["ranks"], flops=many.problem.flops(backward=back))
    row |= {"baseline": f"{name}, one launch", "ratio": times["one launch"].ms / times["ranks"].ms,
            "one_launch_ms": times["one launch"].ms, "launches": sum(len(r.steps) for r in many.ranks)}  # fmt: skip
    if vendor and "vendor" in times:
        row |= {"vendor": ", ".join(vendor[0]), "vendor_ms": times["vendor"].ms,
                "vendor_ratio": times["vendor"].ms / times["ranks"].ms}  # fmt: skip
    yield {"kernel": name, "mode": mode, **row}
