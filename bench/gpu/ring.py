"""Slice `ring`: what attention over many ranks computes, beside one launch over all of it.

The steps of all ranks run one after another on the one device, on the keys that they would receive; nothing is sent.
The ratio is the time of one launch over the sum of the ranks' times. Its difference to 1 is the ring tax, which pays
for shorter launches, partial tiles and sums kept in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

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
    field,
    plainly,
    refused,
    verdict,
)
from bench.gpu.machine import Machine
from bench.gpu.rows import Case, Row
from bench.gpu.speed import fastest, rate
from seqpar.kernels import Grads, Kernel, Operands, StepFacts, Sums, acc_dtype, choose, softmax
from seqpar.kernels.memory.upload import upload
from seqpar.plan import TRANSPORTS, Step

TOKENS = 65536
LAYOUTS: dict[str, Callable[[int, int], seqpar.Layout]] = {
    "zigzag": lambda tokens, ranks: seqpar.Layout.zigzag([tokens], ranks),
    "contiguous": seqpar.Layout.contiguous,
    "striped": seqpar.Layout.striped,
}


def ring(tiny: bool) -> list[Case]:
    """The cases: numbers of ranks, layouts and transports. The headline figure comes first."""
    if tiny:
        return [Case("ring", "zigzag, fetch, 2 ranks", partial(_tax, "zigzag", "fetch", 2, True))]
    cases = []
    for ranks in (8, 2, 4, 16):
        for layout in LAYOUTS:
            for transport in ("fetch", "ring", "double_ring", "gather"):
                later = layout != "zigzag" or transport not in ("fetch", "ring")
                cases.append(
                    Case(
                        "ring",
                        f"{layout}, {transport}, {ranks} ranks",
                        partial(_tax, layout, transport, ranks, False),
                        later,
                    )
                )
    assert {c.name.split(", ")[1] for c in cases} == set(TRANSPORTS)
    return cases


def facts_of_step(step: Step, device: torch.device) -> StepFacts:
    """The facts of a step that the schedule passes to a kernel."""
    part = step.part
    there = upload([part.pos, part.lo, part.hi, step.pos], device)
    return StepFacts(*there, step.tiles, lambda: step.segments, lambda key, make: step.memo((device, key), make))


class Rank:
    """The tensors and steps of one rank. numbers: positions of its rows. k, v of a step: the keys that it receives."""

    def __init__(self, plan: seqpar.Plan, rank: int, problem: Problem) -> None:
        s = problem.setup
        row_bytes = plan.row_bytes(s.heads, s.kv_heads, s.dim, s.v_dim, s.dtype.itemsize)
        steps = plan.steps(rank, row_bytes=row_bytes)
        self.numbers = torch.from_numpy(steps[0].part.pos).to(problem.device)
        self.q, self.dout = problem.q[self.numbers], problem.dout[self.numbers]
        self.out = torch.full_like(self.dout, torch.nan)
        self.lse = self.out.new_full((s.heads, len(self.q)), torch.nan, dtype=acc_dtype(s.dtype))
        self.delta = self.dq = torch.empty(0)
        self.steps: list[tuple[Step, StepFacts, Tensor, Tensor]] = []
        for step in steps:
            facts = facts_of_step(step, problem.device)
            at = facts.key_pos.long()
            self.steps.append((step, facts, problem.k[at], problem.v[at]))

    def prepare(self) -> None:
        """Compute delta and clear dq, after a forward."""
        self.delta = softmax.delta(self.dout, self.out, self.steps[0][1]).contiguous()
        self.dq = torch.zeros_like(self.q, dtype=self.lse.dtype)


class Virtual:
    """All ranks of a plan on one device, as a contestant."""

    def __init__(self, plan: seqpar.Plan, kernel: Kernel, problem: Problem) -> None:
        self.kernel, self.problem = kernel, problem
        self.ranks = [Rank(plan, rank, problem) for rank in range(plan.ranks)]
        self.acc = acc_dtype(problem.setup.dtype)
        rows = max(len(rank.q) for rank in self.ranks)
        wide = self.acc == problem.setup.dtype
        self.sums = None if wide else problem.dout.new_empty(rows, *problem.dout.shape[1:], dtype=self.acc)
        keys = max(len(k) for rank in self.ranks for _, _, k, _ in rank.steps)
        s = problem.setup
        self.grads = problem.q.new_zeros(keys, s.kv_heads, s.dim + s.v_dim, dtype=self.acc)

    def forward(self) -> None:
        """Run every step of every rank, as `seqpar.ops.attention.schedule` does."""
        for rank in self.ranks:
            for step, facts, k, v in rank.steps:
                if not (len(k) or step.first or step.last):
                    continue
                acc = rank.out if self.sums is None else self.sums[: len(rank.q)]
                out = rank.out if step.last and self.sums is not None else None
                alone = out is not None and step.first
                x = Operands(rank.q, k, v, facts, self.problem.score)
                self.kernel.forward(x, Sums(None if alone else acc, rank.lse, out, step.first))

    def backward(self) -> None:
        """Run every step of every rank; gradients of keys are added in one buffer."""
        for rank in self.ranks:
            for _, facts, k, v in rank.steps:
                if len(k):
                    self._differentiate(rank, facts, k, v)

    def _differentiate(self, rank: Rank, facts: StepFacts, k: Tensor, v: Tensor) -> None:
        x = Operands(rank.q, k, v, facts, self.problem.score)
        dk, dv = self.grads[: len(k)].split([k.shape[2], v.shape[2]], -1)
        self.kernel.backward(x, Grads(rank.dout, rank.lse, rank.delta, rank.out, rank.dq, dk, dv))

    def prepare(self) -> None:
        """Prepare the arguments of every rank's backward."""
        self.forward()
        for rank in self.ranks:
            rank.prepare()

    def results(self, backward: bool) -> Tensors:
        """The results of the whole batch."""
        p, s = self.problem, self.problem.setup
        self.forward()
        got = {"out": torch.full_like(p.dout, torch.nan)}
        for rank in self.ranks:
            got["out"][rank.numbers] = rank.out
        if backward:
            got["dq"] = torch.full_like(p.q, torch.nan, dtype=self.acc)
            total = p.k.new_zeros(s.tokens, s.kv_heads, s.dim + s.v_dim, dtype=self.acc)
            for rank in self.ranks:
                rank.prepare()
                for _, facts, k, v in rank.steps:
                    self.grads.zero_()
                    self._differentiate(rank, facts, k, v)
                    total[facts.key_pos.long()] += self.grads[: len(k)]
                got["dq"][rank.numbers] = rank.dq
            got["dk"], got["dv"] = total.split([s.dim, s.v_dim], -1)
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


def _tax(layout: str, transport: str, ranks: int, tiny: bool, machine: Machine) -> Iterator[Row]:
    made = {"heads": 4, "kv_heads": 2, "dim": 16, "v_dim": 16, "dtype": torch.float32} if tiny else \
        {"heads": 32, "kv_heads": 8, "dim": 128, "v_dim": 128}  # fmt: skip
    setup = Setup("causal", (64 if tiny else TOKENS,), **made)
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
    plan = seqpar.Plan(whole.problem.made, LAYOUTS[layout](setup.tokens, ranks), transport=transport)
    many = Virtual(plan, kernel, whole.problem)
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
        many.prepare()
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
