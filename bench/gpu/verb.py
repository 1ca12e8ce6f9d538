"""Slices `auto` and `host`: calls as users make them, with the host's time in them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

import seqpar
from bench.gpu.calls import (
    FORWARD,
    PLAIN,
    Label,
    OfKernel,
    Problem,
    Setup,
    asked,
    fitted,
    kernels,
    plainly,
    refused,
    short,
)
from bench.gpu.machine import Machine, Timing, unable
from bench.gpu.rows import Case, Row
from bench.gpu.speed import rate
from bench.lib import lengths
from seqpar.kernels import choose
from seqpar.testing import run_threads

STEP = "forward and backward"


class Verb:
    """`seqpar.attention` of a problem on one rank."""

    def __init__(self, problem: Problem, *, kernel: str = "auto", deterministic: bool = True) -> None:
        self.problem, self.options = problem, {"kernel": kernel, "deterministic": deterministic}
        layout = seqpar.Layout.contiguous(problem.setup.tokens, 1)
        self.plan, self.comm = seqpar.Plan(problem.made, layout), seqpar.LocalComm()

    def forward(self) -> None:
        """Run the forward without gradients."""
        with torch.no_grad():
            seqpar.attention(self.problem.q, self.problem.k, self.problem.v, self.plan, self.comm, **self.options)

    def step(self) -> None:
        """Run forward and backward."""
        p = self.problem
        leaves = [x.detach().requires_grad_() for x in (p.q, p.k, p.v)]
        seqpar.attention(*leaves, self.plan, self.comm, **self.options).backward(p.dout)


def auto(tiny: bool) -> list[Case]:
    """The cases of `auto`: calls above and below a millisecond."""
    if tiny:
        made = {"heads": 2, "kv_heads": 1, "dim": 16, "v_dim": 16, "dtype": torch.float32}
        setups = [Setup("causal", (64,), **made)]
    else:
        made = {"heads": 16, "kv_heads": 16, "dim": 128, "v_dim": 128}
        long = [Setup("causal", (16384,), **made), Setup("full", (8192,), **made, causal=False)]
        long.append(Setup("magi", tuple(lengths.packed("magi", 32768).tolist()), **made))
        brief = [Setup("causal", (n,), **made) for n in (1024, 2048)] + [Setup("window", (4096,), **made, window=1024)]
        small = [Setup("causal", (16384,), **(made | {"heads": 32, "kv_heads": 8, "dim": 64, "v_dim": 64}))]
        setups = long + brief + small
    return [
        Case("auto", f"{setup}{'' if deterministic else ', any order'}", partial(_auto, setup, deterministic))
        for setup in setups
        for deterministic in (True, False)
    ]


def _auto(setup: Setup, deterministic: bool, machine: Machine) -> Iterator[Row]:
    problem = Problem(setup, machine.device)
    verb = Verb(problem, deterministic=deterministic)
    for mode in (FORWARD, STEP):
        grads = mode == STEP
        call = asked(setup, machine, grads=grads, deterministic=deterministic)
        chosen = choose("auto", call).name
        direct: dict[str, OfKernel] = {}
        for name, kernel in kernels().items():
            if (
                kernel.refuses(call)
                or kernel.accuracy_loss(call)
                or (name in PLAIN and name != chosen and not machine.rehearsal)
            ):
                continue
            fit = fitted(kernel, call)
            row = refused(machine, Label(name, f"{mode}, alone"), setup, plainly(fit), backward=grads)
            if row:
                yield row
            else:
                direct[name] = OfKernel(fit, problem)
        reason = machine.doubt("auto", short(setup.dtype), setup.dim, setup.v_dim)
        if chosen not in direct or reason:
            yield {"kernel": "auto", "mode": mode, "chosen": chosen, "ok": False,
                   "refused": reason or f"auto takes {chosen}, which is not right"}  # fmt: skip
            continue
        runs: dict[str, Callable[[], object]] = {"auto": verb.step if grads else verb.forward}
        runs |= {name: one.step if grads else one.forward for name, one in direct.items()}
        times, missing = machine.times(runs, ahead=False, seconds=1e9, most=20)
        yield from ({"kernel": name, "mode": mode, **why} for name, why in missing.items())
        yield from _against(times, problem.flops() * (3.5 if grads else 1.0), mode, chosen)


def _against(times: dict[str, Timing], work: float, mode: str, chosen: str) -> Iterator[Row]:
    """The verb beside the fastest kernel called directly; the other kernels are recorded too."""
    direct = {name: t for name, t in times.items() if name != "auto"}
    if "auto" not in times or not direct:
        return
    best = min(direct, key=lambda name: direct[name].ms)
    for name, timing in times.items():
        about = {"chosen": chosen} if name == "auto" else {"what": "called directly"}
        yield {"kernel": name, "mode": mode, **rate(timing, flops=work), "baseline": f"{best}, called directly",
               "ratio": direct[best].ms / timing.ms, **about}  # fmt: skip


def host(tiny: bool) -> list[Case]:
    """The cases of `host`: the time of a call before the device begins, and that the host never waits."""
    calls, tokens = (3, 64) if tiny else (200, 256)
    return [
        Case("host", f"{tokens} tokens", partial(_host, tokens, calls)),
        Case("host", "no synchronisation", partial(_never_waits, 64 if tiny else 2048)),
    ]


def _host(tokens: int, calls: int, machine: Machine) -> Iterator[Row]:
    """Times of calls so small that the device is idle again before the next one."""
    wide = torch.float32 if machine.rehearsal else torch.bfloat16
    problem = Problem(Setup("causal", (tokens,), 2, 2, 64, 64, wide), machine.device)
    verb, leaves = Verb(problem), [x.transpose(0, 1)[None] for x in (problem.q, problem.k, problem.v)]
    chosen = choose("auto", asked(problem.setup, machine, grads=True, deterministic=True))
    direct = OfKernel(chosen, problem)

    def sdpa() -> None:
        with torch.no_grad():
            torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)

    runs: dict[tuple[str, str], Callable[[], object]] = {
        ("auto", FORWARD): verb.forward,
        ("auto", STEP): verb.step,
        (chosen.name, FORWARD): direct.forward,
        (chosen.name, STEP): direct.step,
        ("sdpa", FORWARD): sdpa,
    }
    times: dict[tuple[str, str], list[float]] = {label: [] for label in runs}
    for turn in range(calls + 3):
        for label, run in runs.items():
            machine.wait()
            began = time.perf_counter()
            run()
            if turn >= 3:
                times[label].append((time.perf_counter() - began) * 1e3)
    base = statistics.median(times["sdpa", FORWARD])
    for (kernel, mode), taken in times.items():
        ms = statistics.median(taken)
        yield {"kernel": kernel, "mode": f"host, {mode}", "ms": ms, "ms_fastest": min(taken), "ms_slowest": max(taken),
               "runs": len(taken), "tflops": None, "baseline": "sdpa, forward", "ratio": base / ms}  # fmt: skip


def _never_waits(tokens: int, machine: Machine) -> Iterator[Row]:
    """Run forward and backward, a plan's first call too, in a mode in which torch raises where the host would wait."""
    wide = torch.float32 if machine.rehearsal else torch.bfloat16
    problem = Problem(Setup("causal", (tokens,), 4, 2, 64, 64, wide), machine.device)
    for ranks, transport, ulysses in ((1, "fetch", 1), (2, "fetch", 1), (2, "ring", 1), (2, "fetch", 2)):
        row = {"kernel": "auto", "mode": f"{ranks} ranks, {transport}, Ulysses {ulysses}", "baseline": None}
        run_threads(ranks, _steps, *_sharded(problem, ranks, transport, ulysses))  # compilation may wait
        if machine.rehearsal:
            yield row | {"skipped": "the CPU has nothing to wait for"}
            continue
        fresh = _sharded(problem, ranks, transport, ulysses)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run_threads(ranks, _steps, *fresh)
            row["ok"] = True
        except Exception as error:
            row |= {"ok": False, "refused": next(iter(unable(error).values()))}
        finally:
            torch.cuda.set_sync_debug_mode("default")
        yield row


def _sharded(
    problem: Problem, ranks: int, transport: str, ulysses: int
) -> tuple[seqpar.Plan, list[list[torch.Tensor]]]:
    """A new plan, and every rank's q, k, v and gradient of the output."""
    layout = seqpar.Layout.zigzag([problem.setup.tokens], ranks)
    plan = seqpar.Plan(problem.made, layout, transport=transport, ulysses=ulysses)
    tensors = (problem.q, problem.k, problem.v, problem.dout)
    return plan, [[seqpar.shard(x, plan, rank) for x in tensors] for rank in range(ranks)]


def _steps(comm: seqpar.LocalComm, plan: seqpar.Plan, shards: list[list[torch.Tensor]]) -> None:
    """One rank's first step with a plan, and one more."""
    *tensors, dout = shards[comm.rank]
    leaves = [x.detach().requires_grad_() for x in tensors]
    for _ in range(2):
        seqpar.attention(*leaves, plan, comm).backward(dout)
