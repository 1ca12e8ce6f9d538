"""Compiles the recurrent Triton kernels for GPUs that need not be present; see bench/gpu/binaries.py.

python -m bench.gpu.recurrent_binaries --json bench/results/recurrent_binaries.jsonl
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu.binaries import DTYPES, digest, recorded, usage, write
from seqpar.kernels.recurrent import Recurrence
from seqpar.kernels.recurrent import triton as kernels

GENERATIONS = (80, 86, 90, 100)
DIMS = (64, 128, 256)  # of keys and values, whose blocks differ
GROUPS, HEADS = 2, 4
RUNS = (150, 70)


@dataclass(frozen=True)
class Case:
    """A recurrence for a generation: its part "compute" or "leave", forward and backward."""

    part: str
    dim: int
    values: int
    delta: bool
    dtype: str
    generation: int


def shipped(generation: int) -> Iterator[Case]:
    """With and without the delta rule; float32 and exported states in one of the dims."""
    for delta in (False, True):
        for dim in DIMS:
            yield Case("compute", dim, dim, delta, "bf16", generation)
        yield Case("compute", 128, 128, delta, "fp32", generation)
        yield Case("leave", 128, 128, delta, "bf16", generation)
    yield Case("compute", 128, 64, False, "fp16", generation)


def compiled(case: Case) -> list[dict[str, Any]]:
    """A row for each kernel of a case: its binary's resources, or the error of its compilation."""
    import triton

    row = asdict(case) | {"triton": triton.__version__, "sources": sources({})}
    with recorded(case.generation) as found:
        try:
            _call(case)
        except Exception as error:
            while error.__cause__ is not None:
                error = error.__cause__
            return [row | {"error": f"{type(error).__name__}: {error}"[-300:]}]
    return [
        row | {"kernel": name, **usage(made.asm["cubin"]), "shared": made.metadata.shared}
        for name, made in found.items()
    ]


def sources(row: dict[str, Any]) -> str:
    """The digest of the code that the kernels are compiled from."""
    return digest("__init__", package=Path(kernels.__file__).parent, module=kernels.__name__)


def _call(case: Case) -> None:
    """Forward and backward of a part, of two runs."""
    rows, dtype = sum(RUNS), DTYPES[case.dtype]
    q, k = (torch.zeros(rows, GROUPS, case.dim, dtype=dtype, requires_grad=True) for _ in range(2))
    v = torch.zeros(rows, HEADS, case.values, dtype=dtype)
    decay = torch.zeros(rows, HEADS)
    kernel, counts = kernels.TritonChunks(), np.array(RUNS)
    tables = kernel.tables(counts, np.arange(counts.size), v.device)
    prepared = kernel.prepare(Recurrence(q, k, v, decay, decay if case.delta else None, 1.0), tables)
    entering = torch.zeros(len(RUNS), HEADS, case.dim, case.values)
    part = kernel.compute if case.part == "compute" else kernel.leave
    sum(y.float().sum() for y in part(prepared, entering)).backward()


def main() -> int:
    """Compile the cases and print a row for each kernel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generation", type=int, choices=GENERATIONS, help="only this one")
    parser.add_argument("--dim", type=int, help="only this one, of keys")
    parser.add_argument("--dtype", choices=DTYPES, help="only this one")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cases = [case for g in GENERATIONS if args.generation in (None, g) for case in shipped(g)]
    cases = [c for c in cases if args.dim in (None, c.dim) and args.dtype in (None, c.dtype)]
    rows = []
    with ProcessPoolExecutor(args.processes) as pool:
        for made in pool.map(compiled, cases):
            rows += made
            for row in made:
                print(line(row), flush=True)
    if args.json:
        write(args.json, rows)
    return int(any("error" in row for row in rows))


def line(row: dict[str, Any]) -> str:
    """A row as a line to print."""
    what = f"sm_{row['generation']} {row['part']} {row['dim']}/{row['values']} {row['dtype']}" + " delta" * row["delta"]
    if "error" in row:
        return f"{what}: {row['error']}"
    used = f"{row['registers']} registers, {row['spilled']} spilled, {row['shared']:,} shared"
    return f"{what} {row['kernel']}: {used}"


if __name__ == "__main__":
    raise SystemExit(main())
