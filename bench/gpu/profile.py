"""Slice `profile`: what the device runs in the passes of slices `ring` and `model`, kernel by kernel, from a trace.

A row is all launches of one kernel: their number, their milliseconds and ``ratio``, their share of the pass, which
lasts from the first kernel's begin to the last one's end. The row "nothing" has the time in which no kernel runs.
Attention's launches of a ring are rows by what they do with the sums in float32. Their ratio is the rate of pairs
beside that of the same kernel in one launch over all rows. So the ring tax comes apart into launches that are slower,
kernels beside them, and gaps::

    one launch |forward                                          |
    ranks      |fill|forward, first|forward, middle| |forward, last|fill|...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

from bench.cpu.timeline import ON_GPU, Event, profiled
from bench.gpu.calls import BACKWARD, FORWARD, asked, short
from bench.gpu.machine import LEAD, Machine
from bench.gpu.model import DOCUMENTS, TOKENS, WITHOUT, turns
from bench.gpu.ring import LARGE_STAGE, STAGE, Rank, Virtual, Whole, setup_of, virtual
from bench.gpu.rows import Case, Row
from bench.gpu.verb import STEP
from seqpar.kernels import choose

MOST = 16  # rows of a pass
ATTENTION = {FORWARD: ("forward",), BACKWARD: ("dq", "dkdv")}  # names of Triton's kernels


class Ran(NamedTuple):
    """A kernel's run on the device, in milliseconds."""

    name: str
    begin: float
    end: float


def profile(tiny: bool) -> list[Case]:
    """The cases: the headline rings, and the model of slice `model`."""
    rings = [("ring", STAGE), ("fetch", STAGE), ("fetch", LARGE_STAGE)]
    ranks = 2 if tiny else 8
    cases = [
        Case("profile", f"zigzag, {transport}, {ranks} ranks, stages of {stage >> 20} MiB",
             partial(_ring, transport, ranks, stage, tiny))
        for transport, stage in (rings[:1] if tiny else rings)
    ]  # fmt: skip
    tokens, documents = (32, 2) if tiny else (TOKENS, DOCUMENTS)
    return cases + [
        Case("profile", f"Qwen3, {tokens} tokens, {count} documents", partial(_model, tiny, tokens, count))
        for count in (1, documents)
    ]


def ran(machine: Machine, run: Callable[[], object]) -> list[Ran]:
    """The kernels of one run, in the order in which they began; the device waits until the host has issued it."""
    machine.once(run)
    lead = max(LEAD, 4 * machine.once(run).host)  # the trace slows the host down
    events = profiled(machine.device, lambda: machine.once(run, lead=lead))
    return kernels(events, rehearsal=machine.rehearsal)


def kernels(events: Sequence[Event], *, rehearsal: bool) -> list[Ran]:
    """The kernels, copies and fills of a trace without those that wait; on the CPU the outermost operators."""
    wanted = ("cpu_op",) if rehearsal else ON_GPU
    timed = [event for event in events if event.get("cat") in wanted and "spin" not in event["name"]]
    found: list[Ran] = []
    for event in sorted(timed, key=lambda event: (event["ts"], -event["dur"])):
        begin, end = event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3
        if not (rehearsal and found and begin < found[-1].end):
            found.append(Ran(event["name"], begin, end))
    return found


def _ring(transport: str, ranks: int, stage: int, tiny: bool, machine: Machine) -> Iterator[Row]:
    setup = setup_of(tiny)
    if known := machine.doubt("triton", short(setup.dtype), setup.dim, setup.v_dim):
        yield {"kernel": "triton", "mode": FORWARD, "ok": False, "refused": known}
        return
    kernel = choose("auto", asked(setup, machine, grads=True, deterministic=True, merges=True))
    if setup not in machine.known:
        machine.known[setup] = Whole(machine, setup, kernel)
    whole: Whole = machine.known[setup]
    many = virtual("zigzag", transport, ranks, kernel, whole.problem, stage)
    many.forward()
    for mode in (FORWARD, BACKWARD):
        one, several = (ran(machine, each.backward if mode == BACKWARD else each.forward) for each in (whole.one, many))
        yield from rows(one, kernel.name, f"{mode}, one launch")
        apart, rest = launches(several, mode, many)
        yield from rows(rest, kernel.name, f"{mode}, ranks", whole=several)
        yield from beside(apart, one, kernel.name, f"{mode}, ranks", whole.problem.made.area())


def launches(several: Sequence[Ran], mode: str, many: Virtual) -> tuple[list[tuple[str, int, Ran]], list[Ran]]:
    """Attention's launches with what they do and how many pairs they compute, and all other runs.

    No launch is told apart if they are not as many as the ranks' steps have.
    """
    steps = [told for rank in many.ranks for told in _steps(rank, mode)]
    apart: list[tuple[str, int, Ran]] = []
    for name in ATTENTION[mode]:
        own = [each for each in several if each.name == name]
        if len(own) != len(steps):
            return [], list(several)
        apart += [(f"{name}, {what}", area, each) for (what, area), each in zip(steps, own)]
    return apart, [each for each in several if each.name not in ATTENTION[mode]]


def _steps(rank: Rank, mode: str) -> Iterator[tuple[str, int]]:
    """What each step of a rank does, and its pairs."""
    for step, _, k, *_ in rank.steps:
        if len(k):
            whose = "own keys" if step.local else "received keys"
            sums = {(True, True): "no", (True, False): "first", (False, False): "middle", (False, True): "last"}
            yield (whose if mode == BACKWARD else f"{whose}, {sums[step.first, step.last]} sums"), step.area


def beside(
    apart: Sequence[tuple[str, int, Ran]], one: Sequence[Ran], kernel: str, mode: str, area: int
) -> Iterator[Row]:
    """Rows of attention's launches by what they do, beside one launch."""
    for what, group in groupby(sorted(apart), key=lambda each: each[0]):
        several = list(group)
        name, pairs = several[0][2].name, sum(area for _, area, _ in several)
        alone = sum(each.end - each.begin for each in one if each.name == name)
        row = _together([each for *_, each in several])
        yield {"kernel": kernel, "mode": mode, "what": what, **row, "pairs": pairs,
               "ratio": alone / area * pairs / row["ms"], "baseline": "the kernel in one launch"}  # fmt: skip


def _model(tiny: bool, tokens: int, documents: int, machine: Machine) -> Iterator[Row]:
    runs = turns(tiny, tokens, documents, machine)
    if not runs:
        yield WITHOUT
    for name, run in runs.items():
        yield from rows(ran(machine, run), "auto", f"{STEP}, {name}")


def rows(several: Sequence[Ran], kernel: str, mode: str, *, whole: Sequence[Ran] = ()) -> Iterator[Row]:
    """Rows of kernels by name, those of most time first, and of the time without a kernel.

    whole: all runs of the pass, if these are some of them.
    """
    whole, by_name = whole or several, dict[str, list[Ran]]()
    for each in several:
        by_name.setdefault(each.name, []).append(each)
    span = max(each.end for each in whole) - min(each.begin for each in whole)
    found = sorted(((name, _together(group)) for name, group in by_name.items()), key=lambda each: -each[1]["ms"])
    nothing = {"launches": 0, "ms": span - sum(each.end - each.begin for each in whole)}
    for what, row in (*found[:MOST], ("nothing", nothing)):
        yield {"kernel": kernel, "mode": mode, "what": what[:80], **row, "ratio": row["ms"] / span,
               "baseline": "the pass"}  # fmt: skip


def _together(several: Sequence[Ran]) -> dict[str, Any]:
    """The fields of several launches."""
    times = [each.end - each.begin for each in several]
    return {"launches": len(times), "ms": sum(times), "ms_fastest": min(times), "ms_slowest": max(times)}
