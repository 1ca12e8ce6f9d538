"""Measures the planner's figures of this machine, with the kernels and comms of `bench.dsp.step`.

All ranks measure at once. Computing is timed in CPU seconds, times the number of ranks that share a core; exchanges are
timed by the wall clock. The least of several CPU times counts, since other programs only add to them, and the median of
everything else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import median

import torch
from torch.nn import functional as F

import seqpar
from bench.dsp.latte import DIM, HEADS, PAIRS, PUBLISHED, WIDTH, Clip, Machine, Meter, Metered, Ready, Wire, cores
from bench.lib.virtual import Run, Tape
from bench.lib.watched import Watched
from bench.planner.planned import pinned
from seqpar.comm import Comm, LocalComm
from seqpar.dsp import Space, attention_plan, begin_switch
from seqpar.plan import Plan
from seqpar.planner import Hardware, Link
from seqpar.planner.hardware import BACKWARD, AttentionCost
from seqpar.testing import run_processes

LARGE = 1 << 20  # elements of a switch that measures bandwidth
FEW, MANY = 16, 256  # keys of a row of attention
ROWS = 4096  # of queries


def figures(comm: Comm, repeat: int) -> dict[str, float]:
    """The figures of a rank while all ranks work."""
    torch.set_num_threads(1)
    shared = max(1.0, comm.size / len(cores()))  # read before this process is pinned to one core
    with pinned(cores()[comm.rank % len(cores())]):
        found = attending(repeat)
        found |= {"linear": linear(found, repeat)} | ring(comm.size, found, repeat) | called(comm.size, repeat)
        for name in ("forward", "backward", "linear"):
            found[name] /= shared
        for name in ("step", "verb", "cold"):
            found[name] *= shared
        return found | wire(comm, repeat) | {"hidden": hidden(comm, repeat)}


def behind(comm: Comm, link: Link, repeat: int) -> float:
    """`hidden` for exchanges that a simulated link delays."""
    torch.set_num_threads(1)
    with pinned(cores()[comm.rank % len(cores())]):
        return hidden(Watched(comm, Metered(Meter(), Wire(link))), repeat)


def cpu(run: Callable[[], object], repeat: int, between: Callable[[], object] = lambda: None) -> float:
    """The least CPU seconds of a call; a first run fills caches and does not count. between: called before each run."""
    run()
    took = []
    for _ in range(repeat):
        between()
        started = time.thread_time()
        run()
        took.append(time.thread_time() - started)
    return min(took)


def attending(repeat: int) -> dict[str, float]:
    """Operations a second of attention, forward and backward; and the cost of a row beside its pairs, in pairs."""
    took = {}
    for keys in (FEW, MANY):
        q, k, v = (torch.randn(ROWS // keys, HEADS, keys, DIM, requires_grad=True) for _ in range(3))
        out = F.scaled_dot_product_attention(q, k, v)
        grad = torch.randn_like(out)
        forward = cpu(lambda: F.scaled_dot_product_attention(q, k, v), repeat)  # noqa: B023
        backward = cpu(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True), repeat)  # noqa: B023
        took[keys] = forward, backward
    few, many = sum(took[FEW]), sum(took[MANY])
    pairs = max(0.0, (MANY - FEW) * few / max(many - few, 1e-9) - FEW)
    flops = 4.0 * WIDTH * ROWS * (MANY + pairs)
    return {"forward": flops / took[MANY][0], "backward": BACKWARD * flops / took[MANY][1], "pairs": pairs}


def seconds(found: Mapping[str, float], pairs: float) -> float:
    """Seconds of attention over this many pairs, forward and backward."""
    return 4.0 * WIDTH * pairs * (1 / found["forward"] + BACKWARD / found["backward"])


def linear(found: Mapping[str, float], repeat: int) -> float:
    """Operations a second of the model's linear layers with all that surrounds them, but for attention."""
    clip = Clip("calibration", 16, 16, 16)
    ready = Ready(LocalComm(), clip)
    rows = clip.frames * clip.space
    blocks = (*ready.model.transformer_blocks, *ready.model.temporal_transformer_blocks)
    flops = 6.0 * rows * sum(p.numel() for block in blocks for p in block.parameters() if p.dim() > 1)
    beside = seconds(found, PAIRS * rows * (clip.space + clip.frames + 2 * found["pairs"]))
    return flops / max(cpu(ready.step, repeat) - beside, 1e-9)


def ring(ranks: int, found: Mapping[str, float], repeat: int) -> dict[str, float]:
    """The costs of a ring beside those of one call: seconds of a step, and of a fetched row, in pairs."""

    def beyond(documents: int, keys: int) -> float:
        tape = Tape(0, ranks)
        space = Space({"d": documents, "t": keys}, tape)
        rows = attention_plan(space, "d t c", ("t",), "t")
        plan = Plan(rows.mask, rows.layout, transport="ring")
        own = documents * space.local("t")["t"]
        x = [torch.randn(own, HEADS, DIM, requires_grad=True) for _ in range(3)]
        grad, took = torch.randn(own, HEADS, DIM), []
        for _ in range(repeat + 1):
            tape.start()
            torch.autograd.grad(seqpar.attention(*x, plan, tape), x, grad)
            took.append(sum(event.seconds for event in tape.stop() if isinstance(event, Run)))
        return min(took[1:]) - seconds(found, own * (keys + found["pairs"]))

    step = max(0.0, beyond(1, ranks)) / (2 * (ranks - 1))
    rows = ROWS - ROWS / ranks
    fetched = (beyond(ROWS // MANY, MANY) - 2 * (ranks - 1) * step) / (rows * seconds(found, 1.0))
    return {"step": step, "fetched": max(0.0, fetched)}


def called(ranks: int, repeat: int) -> dict[str, float]:
    """Seconds of one switch verb, one way.

    cold: measure the verb after other work, as in a model, and not right after another verb.
    """
    tape = Tape(0, ranks)
    space = Space({"t": ranks, "s": ranks}, tape)
    x = torch.randn(1, ranks, WIDTH, requires_grad=True)

    def switched() -> None:
        (y,) = begin_switch([x], space, ["t s c"], "t", "s").wait()
        torch.autograd.grad(y.sum(), x)

    model = Ready(LocalComm(), Clip("a little", 4, 16, 16))
    return {"verb": cpu(switched, 4 * repeat) / 2, "cold": cpu(switched, 2 * repeat, model.step) / 2}


def wire(comm: Comm, repeat: int) -> dict[str, float]:
    """Seconds of the smallest switch, and bytes a second of a large one beyond that."""
    took = []
    for rows in (comm.size, comm.size * -(-LARGE // (comm.size * WIDTH))):
        x, each = torch.randn(1, rows, comm.size, WIDTH), []
        for _ in range(3 * repeat):
            comm.gather("a turn", 0)
            started = time.perf_counter()
            seqpar.switch(x, comm, split_dim=1, concat_dim=2)
            each.append(time.perf_counter() - started)
        took.append((x.nbytes * (1 - 1 / comm.size), median(each)))
    (_, latency), (size, large) = took
    return {"latency": latency, "bandwidth": size / max(large - latency, 1e-9)}


def hidden(comm: Comm, repeat: int) -> float:
    """The fraction of a switch that is hidden by computing of about the same length, 0 to 1."""
    size = comm.size
    space = Space({"t": size, "s": size * -(-LARGE // (size * WIDTH))}, comm)
    x, a = torch.randn(1, space.dims["s"], WIDTH), torch.randn(WIDTH, WIDTH)

    def timed(count: int, *, moves: bool) -> float:
        comm.gather("a turn", 0)
        started = time.perf_counter()
        pending = begin_switch([x], space, ["t s c"], "t", "s") if moves else None
        for _ in range(count):
            a @ a
        if pending is not None:
            pending.wait()
        return time.perf_counter() - started

    switch, many = (median(timed(n, moves=n == 0) for _ in range(repeat)) for n in (0, 100))
    count = max(comm.gather("as long", max(1, round(100 * switch / many))))
    turns = [(timed(0, moves=True), timed(count, moves=False), timed(count, moves=True)) for _ in range(2 * repeat)]
    alone, work, both = map(median, zip(*turns, strict=True))
    return min(1.0, max(0.0, (alone + work - both) / min(alone, work)))


def machines(repeat: int) -> dict[str, Machine]:
    """Two processes over shared memory, over gloo, and over shared memory held back to a slow link."""
    found = {comm: machine(2, comm, repeat) for comm in ("shm", "gloo")}
    held = slow(found["shm"])
    part = median(run_processes(2, behind, held.link, repeat, comm="shm", timeout=120.0))
    return found | {"slow": held._replace(hardware=replace(held.hardware, hidden=part))}


def machine(ranks: int, comm: str, repeat: int) -> Machine:
    """The planner's hardware for this machine: medians over the figures of all ranks."""
    found = run_processes(ranks, figures, repeat, comm=comm, timeout=120.0)
    middle = {key: median(rank[key] for rank in found) for key in found[0]}
    attention = AttentionCost(
        middle["forward"], middle["backward"], 0.0, query_pairs=middle["pairs"], key_pairs=middle["fetched"],
        stage=middle["step"],
    )  # fmt: skip
    link = Link(max(0.0, middle["latency"] - middle["verb"]), middle["bandwidth"])
    switch = replace(link, latency=link.latency + middle["cold"])
    hardware = Hardware(
        comm, "measured by bench/dsp/step.py", attention, middle["linear"], switch, switch, memory=1 << 34, node=ranks,
        hidden=middle["hidden"],
    )  # fmt: skip
    return Machine(hardware, link)


def slow(fast: Machine) -> Machine:
    """The machine with a slower link, on which switches take as large a part of a step as on H100 nodes.

    The link is as many times slower as a core is than an H100, and faster by as much as a narrower model moves more.
    """
    h100 = Hardware.preset("h100")
    scale = fast.hardware.linear_rate / h100.linear_rate * (PUBLISHED / WIDTH) * (4 / 2)  # fp32 instead of bf16
    told, alone = (replace(link, bandwidth=h100.across.bandwidth * scale) for link in (fast.hardware.inside, fast.link))
    name = f"{fast.hardware.name}, slow link"
    return Machine(replace(fast.hardware, name=name, inside=told, across=told), alone)
