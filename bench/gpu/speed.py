"""Slices `ceilings`, `forward`, `backward` and `accumulate`: rates of one launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

import seqpar.kernels
from bench.gpu.calls import (
    TOLERANCE,
    Contestant,
    Label,
    Make,
    Problem,
    Setup,
    asked,
    errors,
    facts_of,
    field,
    flops,
    plainly,
    refused,
    verdict,
)
from bench.gpu.machine import Machine, Timing, unable
from bench.gpu.rows import Case, Row
from bench.lib import lengths
from seqpar.kernels import Operands, Sums
from seqpar.kernels.triton.config import Descriptor, configure, generation

TOKENS = (16384, 4096, 8192, 32768, 65536, 131072)
PACKED_TOKENS = (32768, 131072)
OTHER_HEADS = ((96, 96, 16), (192, 128, 16), (256, 256, 8))  # dim, that of values, heads
WINDOW = 4096
TINY = 64
Run = Callable[[], object]


def rate(timing: Timing, *, flops: float | None = None, bytes: float | None = None) -> Row:
    """The fields of a timing: TFLOP/s or GB/s, milliseconds and their spread, and those of the host."""
    value = {"tflops": flops / timing.ms / 1e9} if flops is not None else {"gbps": (bytes or 0.0) / timing.ms / 1e6}
    spread = {"ms": timing.ms, "ms_fastest": timing.fastest, "ms_slowest": timing.slowest, "runs": timing.runs}
    return value | spread | {"host_ms": timing.host}


def ceilings(tiny: bool) -> list[Case]:
    """The cases of the ceilings: one large product, one large copy."""
    n, size = (128, 1 << 20) if tiny else (8192, 4 << 30)
    return [
        Case("ceilings", f"bf16 product {n}", partial(_product, n)),
        Case("ceilings", f"copy of {size >> 20} MiB", partial(_copy, size)),
    ]


def _product(n: int, machine: Machine) -> Iterator[Row]:
    a, b = (torch.randn(n, n, device=machine.device, dtype=torch.bfloat16) for _ in range(2))
    times, _ = machine.times({"torch": lambda: a @ b})
    yield {"kernel": "torch", "mode": "product", **rate(times["torch"], flops=2.0 * n**3), **itself("torch")}


def _copy(size: int, machine: Machine) -> Iterator[Row]:
    a = torch.empty(size, dtype=torch.uint8, device=machine.device).random_()
    b = torch.empty_like(a)
    times, _ = machine.times({"torch": lambda: b.copy_(a)})
    yield {"kernel": "torch", "mode": "copy", **rate(times["torch"], bytes=2.0 * size), **itself("torch")}


def itself(name: str) -> Row:
    """The fields of a row that others are compared with."""
    return {"baseline": name, "ratio": 1.0}


def setups(tiny: bool) -> list[tuple[Setup, bool]]:
    """All calls to time, and whether they come later."""
    if tiny:
        made = {"heads": 2, "kv_heads": 1, "dim": 16, "v_dim": 16, "dtype": torch.float32}
        return [
            (Setup("causal", (TINY,), **made), False),
            (Setup("window", (TINY,), **made, window=9), False),
            (Setup("magi", (TINY // 2, 3, TINY // 2 - 3), **made), False),
        ]
    result = []
    for dim, heads in ((128, 16), (64, 32)):
        made = {"heads": heads, "kv_heads": heads, "dim": dim, "v_dim": dim}
        for tokens in TOKENS:
            later = tokens > 32768
            result.append((Setup("causal", (tokens,), **made), later))
            result.append((Setup("full", (tokens,), **made, causal=False), later))
            if tokens > WINDOW:
                result.append((Setup("window", (tokens,), **made, window=WINDOW), later))
        for tokens in PACKED_TOKENS:
            for name in lengths.NAMES:
                documents = tuple(lengths.packed(name, tokens).tolist())
                result.append((Setup(name, documents, **made), tokens > 32768))
    for dim, v_dim, heads in OTHER_HEADS:
        result.append((Setup("causal", (16384,), heads=heads, kv_heads=heads, dim=dim, v_dim=v_dim), False))
    return result


def forward(tiny: bool) -> list[Case]:
    """The cases of every kernel forward, in TFLOP/s."""
    return [Case("forward", str(s), partial(race, s, False), later) for s, later in setups(tiny)]


def backward(tiny: bool) -> list[Case]:
    """The cases of every kernel backward, in TFLOP/s, with what autograd's backward pays besides; see `OfKernel`."""
    return [Case("backward", str(s), partial(race, s, True), later) for s, later in setups(tiny)]


def race(setup: Setup, back: bool, machine: Machine) -> Iterator[Row]:
    """The rates of all kernels and libraries that can compute a call, timed in turns."""
    problem = Problem(setup, machine.device)
    made, rows = field(machine, setup, backward=back)
    yield from rows
    ready: dict[Label, Contestant] = {}
    for label, make in made.items():
        if label.kernel == "flex":
            row = _unequal(machine, label, make, problem, list(ready.values()), back)
        else:
            row = refused(machine, label, setup, make, backward=back)
        if row:
            yield row
        else:
            ready[label] = make(problem, True)
    causal = _causal(setup, machine, {label: made[label] for label in ready}, back)
    runs = {label: one.backward if back else one.forward for label, one in ready.items()}
    times, missing = machine.times(runs | {("causal", *label): run for label, run in causal.items()})
    yield from ({**label._asdict(), **why} for label, why in missing.items() if isinstance(label, Label))
    timed = {label: t for label, t in times.items() if isinstance(label, Label)}
    best = fastest(timed) if timed else None
    for label, timing in timed.items():
        row = {**label._asdict(), **rate(timing, flops=problem.flops(backward=back))}
        row |= {"baseline": ", ".join(best), "ratio": timed[best].ms / timing.ms}
        if ("causal", *label) in times:
            row |= _of_causal(row, setup, problem, times[("causal", *label)], machine, back)
        yield row


def fastest(times: dict[Label, Timing]) -> Label:
    """The fastest kernel of other libraries; of all kernels if there are none."""
    own = {"triton", "blockwise", "reference"}
    others = {label: t for label, t in times.items() if label.kernel not in own} or times
    return min(others, key=lambda label: others[label].ms)


def _unequal(
    machine: Machine, label: Label, make: Make, problem: Problem, checked: list[Contestant], back: bool
) -> Row | None:
    """The reason why flex attention is not timed, or None if it agrees with a checked kernel. It is compiled once."""
    if not checked:
        return {**label._asdict(), "skipped": "nothing to check it with"}
    try:
        found = errors(make(problem, True).results(back), checked[0].results(back))
    except Exception as error:
        machine.wait()
        return {**label._asdict(), **unable(error)}
    off = verdict(found, 2 * TOLERANCE[problem.setup.dtype])
    return {**label._asdict(), "ok": False, "refused": off, "errors": found} if off else None


def _causal(setup: Setup, machine: Machine, made: dict[Label, Make], back: bool) -> dict[Label, Run]:
    """For packed documents: the same contestants on one causal document of at most 32K tokens."""
    if len(setup.lengths) == 1:
        return {}
    one = Setup("causal", (min(setup.tokens, 32768),), setup.heads, setup.kv_heads, setup.dim, setup.v_dim, setup.dtype)
    problem = Problem(one, machine.device)
    ready = {
        label: make(problem, True)
        for label, make in made.items()
        if label.kernel != "flex" and not refused(machine, label, one, make, backward=back)
    }
    return {label: contestant.backward if back else contestant.forward for label, contestant in ready.items()}


def _of_causal(row: Row, setup: Setup, problem: Problem, causal: Timing, machine: Machine, back: bool) -> Row:
    """The rate beside the causal rate times the cover: the part of the tiles' pairs that is attended."""
    bm, bn = tile(row["kernel"], setup, machine, back)
    cover = problem.cover(bm, bn)
    tokens = min(setup.tokens, 32768)
    work = flops(tokens * (tokens + 1) // 2, setup.heads, setup.dim, setup.v_dim, backward=back)
    causal_rate = rate(causal, flops=work)["tflops"]
    return {
        "tile": [bm, bn], "cover": cover, "causal_tflops": causal_rate, "causal_tokens": tokens,
        "of_causal_and_cover": row["tflops"] / (causal_rate * cover),
    }  # fmt: skip


def tile(kernel: str, setup: Setup, machine: Machine, back: bool) -> tuple[int, int]:
    """The tile of Triton's kernel, in backward that of dk and dv; 128 x 128 for other kernels."""
    if kernel != "triton":
        return 128, 128
    made_for = 0 if machine.rehearsal else generation(asked(setup, machine, grads=back, deterministic=True).capability)
    direction = "dkdv" if back else "forward"
    config = configure(Descriptor(direction, setup.dim, setup.v_dim, setup.dtype.itemsize, made_for))
    return config.bm, config.bn


def accumulate(tiny: bool) -> list[Case]:
    """The cases of a launch that adds to float32 sums, beside one that writes its output, at sizes of ring steps."""
    sizes = (
        [(TINY, TINY)] if tiny else [(8192, 8192), (4096, 4096), (2048, 2048), (1024, 1024), (1024, 8192), (8192, 1024)]
    )
    return [Case("accumulate", f"{m} rows on {n} keys", partial(_accumulate, m, n, tiny)) for m, n in sizes]


def _accumulate(rows: int, keys: int, tiny: bool, machine: Machine) -> Iterator[Row]:
    heads, kv, dim, dtype = (2, 1, 16, torch.float16) if tiny else (32, 8, 128, torch.bfloat16)
    setup = Setup("full", (max(rows, keys),), heads, kv, dim, dim, dtype, causal=False)
    call = asked(setup, machine, grads=True, deterministic=True, merges=True)
    kernel = seqpar.kernels.choose("auto", call)
    row = refused(machine, Label(kernel.name, "accumulating"), setup, plainly(kernel), backward=False)
    if row:
        yield row
        return
    whole = Problem(setup, machine.device)
    mask = seqpar.Mask([rows], causal=False, kv_lengths=[keys])
    (facts,) = facts_of(mask, np.arange(keys), machine.device)
    x = Operands(whole.q[:rows], whole.k[:keys], whole.v[:keys], facts, whole.score)
    out, lse = torch.empty_like(x.q), torch.empty(heads, rows, device=machine.device)
    acc, total = torch.zeros_like(x.q, dtype=torch.float32), torch.zeros(heads, rows, device=machine.device)
    variants = {
        "plain": Sums(None, lse, out, first=True),
        "first": Sums(acc, total, None, first=True),
        "accumulating": Sums(acc, total, None, first=False),
        "last": Sums(acc, total, out, first=False),
    }
    times, missing = machine.times({n: partial(kernel.forward, x, s) for n, s in variants.items()}, most=50)
    yield from ({"kernel": kernel.name, "mode": name, **why} for name, why in missing.items())
    work = flops(rows * keys, heads, dim, dim)
    for name, timing in times.items():
        ratio = times["plain"].ms / timing.ms if "plain" in times else None
        yield {"kernel": kernel.name, "mode": name, **rate(timing, flops=work), "baseline": "plain", "ratio": ratio}
