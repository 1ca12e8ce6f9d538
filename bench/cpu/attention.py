"""GFLOP/s of attention on this CPU: seqpar's kernel beside torch's fused operator, its matmul and the measured peak.

    python -m bench.cpu.attention                              # everything, about ten minutes on two cores
    python -m bench.cpu.attention --tokens 1024 --threads 1 --repeat 3

Only attended pairs count: 4 x dim operations each forward, 10 x dim backward. The matmul is torch's of 1,024 x 1,024.
The peak is what one thread reaches with multiply-adds between registers (fp32), or with the bf16 products that our
kernel takes on this processor, times the threads. The fused operator knows no packed documents: it is called for each
of them. Everything in a row is timed in turns: a thread by its processor time, several by the clock; medians are
compared. Exit code 1 if the fused operator was faster anywhere.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

import seqpar
from bench.lib import records
from seqpar import native
from seqpar.kernels import Grads, Operands, Score, Sums
from seqpar.kernels.native import ISAS, Native
from seqpar.ops.attention.call import uploaded

ROOT = Path(__file__).parents[2]
HEADS = {
    512: 8,
    1024: 8,
    2048: 8,
    4096: 4,
    8192: 2,
    16384: 2,
}  # fewer for more tokens: no case takes minutes
MASKS = ("causal", "packed", "full")
FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16")  # as Linux calls them
MATMUL = 1024
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Case(NamedTuple):
    """A shape to measure: one row of the table."""

    threads: int
    dtype: str
    mask: str
    tokens: int
    dim: int
    direction: str

    @property
    def lengths(self) -> list[int]:
        """Lengths of the documents: a single one, or several of 100 to 2,000 tokens."""
        if self.mask != "packed":
            return [self.tokens]
        rng, lengths = np.random.default_rng(0), []
        while sum(lengths) < self.tokens:
            lengths.append(min(int(rng.integers(100, 2000)), self.tokens - sum(lengths)))
        return lengths


def seqpar_call(case: Case, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Callable[[], object], int]:
    """A call of seqpar's kernel as the schedule calls it, and the number of attended pairs."""
    mask = seqpar.Mask(case.lengths, causal=case.mask != "full")
    plan = seqpar.Plan(mask, seqpar.Layout.contiguous(mask.tokens, 1))
    facts = uploaded(plan, plan.steps(0), q.device).facts[0][0]
    kernel, x = Native(), Operands(q, k, v, facts, Score(case.dim**-0.5))
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0])
    forward = Sums(
        out if q.dtype == torch.float32 else None, lse, None if q.dtype == torch.float32 else out, first=True
    )
    kernel.forward(x, forward)
    if case.direction == "forward":
        return lambda: kernel.forward(x, forward), mask.area()
    delta = (out.float() * dout.float()).sum(-1).t().contiguous()
    grads = Grads(dout, lse, delta, out, *(torch.zeros(y.shape) for y in (q, k, v)))
    return lambda: kernel.backward(x, grads), mask.area()


def torch_call(case: Case, *tensors: Tensor) -> Callable[[], object]:
    """A call of torch's fused operator on the same tensors, document by document."""
    op, causal = torch.ops.aten, case.mask != "full"
    documents = [
        [y.contiguous() for y in split]
        for split in zip(*(x.transpose(0, 1)[None].split(case.lengths, 2) for x in tensors))
    ]
    attend = op._scaled_dot_product_flash_attention_for_cpu
    if case.direction == "forward":
        return lambda: [attend(q, k, v, 0.0, causal) for q, k, v, _ in documents]
    differentiate = op._scaled_dot_product_flash_attention_for_cpu_backward
    done = [(d, attend(*d[:3], 0.0, causal)) for d in documents]
    return lambda: [differentiate(d, q, k, v, out, lse, 0.0, causal) for (q, k, v, d), (out, lse) in done]


def timed(call: Callable[[], object], threads: int) -> float:
    """Seconds of one call: the processor's for a thread, the clock's for several, which may wait for each other."""
    clock = time.process_time if threads == 1 else time.perf_counter
    start = clock()
    call()
    return clock() - start


def flags() -> list[str]:
    """The instruction sets of this processor that attention kernels may use, by Linux' names."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    known = next((line.split(":")[1].split() for line in lines if line.startswith("flags")), [])
    return [flag for flag in FLAGS if flag in known]


def measured(case: Case, repeat: int) -> dict[str, object]:
    """One row: GFLOP/s of both, of the matmul and of the peak, timed in turns, with their ratios."""
    torch.set_num_threads(case.threads)
    g = torch.Generator().manual_seed(0)
    shape = (case.tokens, HEADS[case.tokens], case.dim)
    tensors = [torch.randn(shape, generator=g).to(DTYPES[case.dtype]) for _ in range(4)]
    ours, area = seqpar_call(case, *tensors)
    a, b = (torch.randn(MATMUL, MATMUL, generator=g).to(DTYPES[case.dtype]) for _ in range(2))
    calls = {"seqpar": ours, "torch": torch_call(case, *tensors), "matmul": lambda: a @ b}
    times: dict[str, list[float]] = {name: [] for name in calls}
    peak = 0.0
    for turn in range(repeat + 1):
        for name, call in calls.items():
            seconds = timed(call, case.threads)
            if turn:  # the first turn warms up
                times[name].append(seconds)
        peak = max(peak, multiply_adds(case.dtype)(0.02))
    flops = area * shape[1] * case.dim * (4 if case.direction == "forward" else 10)
    rates = {name: flops / statistics.median(t) / 1e9 for name, t in times.items()}
    rates |= {"matmul": 2 * MATMUL**3 / statistics.median(times["matmul"]) / 1e9, "peak": case.threads * peak}
    shares = {f"of_{name}": rates["seqpar"] / rates[name] for name in ("matmul", "peak")}
    return case._asdict() | {"heads": shape[1]} | rates | {"ratio": rates["seqpar"] / rates["torch"]} | shares


@cache
def multiply_adds(dtype: str) -> Callable[[float], float]:
    """A function that measures for some seconds: GFLOP/s of multiply-adds between registers on one thread."""
    isa = ISAS[native.ops().isa()] if dtype == "bfloat16" else ""
    defined = {"avx512_bf16": ["-DSP_PAIRS"], "amx": ["-DSP_PAIRS", "-DSP_TILES"]}.get(isa, [])
    flags = ["-O3", "-std=c++17", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC", f"-I{ROOT / 'csrc'}"]
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "peak.so"
        command = ["c++", *flags, *defined, ROOT / "bench/cpu/peak.cpp", "-o", library]
        subprocess.run(command, check=True)
        measure = ctypes.CDLL(str(library)).peak
    measure.argtypes, measure.restype = [ctypes.c_double], ctypes.c_double
    return measure


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """The cases that the options select."""
    for row in product(args.threads, args.dtypes, MASKS, args.tokens, args.dims, ("forward", "backward")):
        yield Case(*row)


def table(rows: list[dict[str, object]]) -> Table:
    """The rows as a table to print."""
    processor = records.environment()["machine"]
    title = f"attention, GFLOP/s: {processor}; {' '.join(flags())}; kernels for {ISAS[native.ops().isa()]}"
    result = Table(title=title, title_justify="left", box=None)
    names = ("threads", "dtype", "mask", "tokens", "dim", "direction", "seqpar", "torch", "matmul", "peak")
    for name in (*names, "/ torch", "/ matmul", "/ peak"):
        result.add_column(name, justify="right")
    for row in rows:
        cells = [f"{row[n]:,.0f}" if isinstance(row[n], float) else str(row[n]) for n in names]
        result.add_row(*cells, *(f"{row[n]:.2f}" for n in ("ratio", "of_matmul", "of_peak")))
    return result


def main() -> int:
    """Measure all selected cases and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384], choices=list(HEADS))
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--repeat", type=int, default=3, help="timings of each variant")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    console, todo, rows = Console(width=120), list(cases(args)), []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for case in progress.track(todo, description="attention"):
            rows.append(measured(case, args.repeat))
    console.print(table(rows))
    slower = [row for row in rows if row["ratio"] < 1.0]  # type: ignore[operator]
    if args.json:
        result = records.environment() | {"flags": flags(), "vectors": ISAS[native.ops().isa()], "rows": rows}
        records.write(args.json, result)
        console.print(f"written to {args.json}")
    console.print(f"slower than torch in {len(slower)} of {len(rows)} cases")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
