"""Compiles the Triton attention kernels for GPUs that need not be present, and reads the binaries' resources.

    python -m bench.gpu.binaries --json bench/results/binaries.jsonl        # every shipped configuration
    python -m bench.gpu.binaries --search 90:128 --direction forward       # candidates for a generation and a head dim

Run the first, and `bench/gpu/small_binaries.py`, with each supported version of Triton after a change of the kernels:
PYTHONPATH=.venv/triton-3.6 is the oldest. The tests read these rows, and compile some of them again. A row carries a
digest of the code that it was compiled from: it stays valid when another kernel, a docstring or a comment changes.

The product's own launches are recorded where a driver would run them. Registers, spilled bytes (a stack in local
memory), shared memory and tensor core instructions are read from the binary. They chose the configurations that no GPU
has timed; `bench/gpu/run.py` times the candidates where there is one.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import itertools
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from seqpar import Layout, Mask, Plan
from seqpar.kernels import Grads, Operands, Score, Sums
from seqpar.kernels import triton as kernels
from seqpar.kernels.triton import Triton
from seqpar.kernels.triton.config import CLASSES, GENERATIONS, Descriptor, LaunchConfig, configure
from seqpar.ops.attention.call import uploaded

SHARED = {80: 166_912, 86: 101_376, 90: 232_448, 100: 232_448}  # bytes a block may have, CUDA programming guide
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DIRECTIONS = ("forward", "dq", "dkdv")
FILES = {"forward": "forward", "dq": "backward", "dkdv": "backward"}  # direction -> the file of its kernel
KERNELS = {
    "forward",
    "backward",
    "delta",
    "merge",
    "parts",
    "rotary",
    "rows",
}  # files of kernels, each compiled without the others
CHOICES = {"_TABLES", "_UNEVEN", "configure"}  # of attention: they choose the configuration that a row names
ROWS = 256
CANDIDATES = [
    LaunchConfig(bm, bn, warps, stages, tma)
    for (bm, bn), warps, stages, tma in itertools.product(
        ((128, 128), (128, 64), (64, 128), (64, 64), (128, 32), (32, 128), (64, 32), (32, 64), (32, 32), (16, 16)),
        (8, 4),
        (3, 2, 1),
        (True, False),
    )
]


@dataclass(frozen=True)
class Case:
    """A kernel for a generation.

    config: None for the shipped one. accumulates: whether the forward merges with earlier sums. until: whether keys end
    early, as in a tree.
    """

    direction: str
    dim: int
    v_dim: int
    dtype: str
    generation: int
    config: LaunchConfig | None = None
    accumulates: bool = False
    until: bool = False


def shipped(generation: int) -> list[Case]:
    """The shipped cases: each configuration at its largest head dim, and the options that change binaries most."""
    cases = []
    for dtype, itemsize in (("bf16", 2), ("fp32", 4)):
        for direction, dim in itertools.product(DIRECTIONS, CLASSES[itemsize]):
            cases.append(Case(direction, dim, dim, dtype, generation))
    cases += [Case("forward", d, d, "bf16", generation, accumulates=True) for d in CLASSES[2]]
    cases += [Case(direction, 192, 128, "bf16", generation) for direction in DIRECTIONS]
    cases += [Case("dkdv", 192, 128, "bf16", generation, until=True)]
    cases += [Case(direction, 128, 128, "fp16", generation) for direction in DIRECTIONS]
    cases += [Case(direction, d, d, "bf16", generation, until=True) for direction in DIRECTIONS for d in CLASSES[2]]
    cases += [Case(direction, 128, 128, "fp32", generation, until=True) for direction in DIRECTIONS]
    # 8.6 and its like are 8.0 with less shared memory: only the table of 16-bit types differs.
    return [case for case in cases if generation != 86 or case.dtype == "bf16"]


class Offline:
    """A driver for Triton that stands for an absent device."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # Triton keeps what it compiled by device

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compiled(case: Case) -> dict[str, Any]:
    """The row of a case: the binary's resources, or the error of its compilation."""
    import triton

    itemsize = DTYPES[case.dtype].itemsize
    descriptor = Descriptor(case.direction, case.dim, case.v_dim, itemsize, case.generation)
    config = case.config or configure(descriptor)
    row = asdict(case) | {"config": asdict(config), "triton": triton.__version__}
    row |= {"sources": sources(row)}
    try:
        made = _binary(case, config)
    except Exception as error:
        while error.__cause__ is not None:
            error = error.__cause__
        return row | {"error": f"{type(error).__name__}: {error}"[-300:]}
    products = len(re.findall(r"wgmma\.mma_async|mma\.sync|tcgen05\.mma", made.asm["ptx"]))
    return row | usage(made.asm["cubin"]) | {"shared": made.metadata.shared, "tensor_core_instructions": products}


def sources(row: dict[str, Any]) -> str:
    """The digest of the code that a row's kernel is compiled from: the kernel's, and that which launches attention."""
    return digest("__init__", FILES[row["direction"]])


@cache
def digest(*files: str, package: Path = Path(kernels.__file__).parent, module: str = kernels.__name__) -> str:
    """A digest of some files of a Triton package and of all that they import from it, except other kernels' files.

    Code alone counts, as the syntax tree without docstrings: comments and the formatting may change. What chooses
    attention's configurations does not count either, since every row has its own.
    """
    chosen = CHOICES if module == kernels.__name__ else set()
    waiting, code = list(files), {}
    while waiting:
        name = waiting.pop()
        tree = ast.parse((package / f"{name}.py").read_text(encoding="utf-8"))
        tree.body = [node for node in tree.body if not _names(node) & chosen]
        code[name] = _undocumented(tree)
        waiting += [other for other in _imported(tree, package, module) if other not in code and other not in KERNELS]
    return hashlib.sha256("".join(name + code[name] for name in sorted(code)).encode()).hexdigest()[:12]


def _undocumented(tree: ast.Module) -> str:
    """The code of a file, without docstrings and comments."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def _names(node: ast.stmt) -> set[str]:
    """The names that a statement defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _imported(tree: ast.Module, package: Path, module: str) -> set[str]:
    """The files of the package that a file imports from, function-level imports included."""
    origins = [
        f"{node.module}.{alias.name}".removeprefix(module + ".").split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(module)
        for alias in node.names
    ]
    return {name if (package / f"{name}.py").exists() else "__init__" for name in origins}


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows to a file, beside those of other versions of Triton."""
    before = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    made = {row["triton"] for row in rows}
    rows = sorted([*(row for row in before if row["triton"] not in made), *rows], key=lambda row: str(row["triton"]))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@contextmanager
def recorded(capability: int) -> Iterator[dict[str, Any]]:
    """The kernels that are launched inside the block, by name: compiled for a device, and not run."""
    import triton
    from triton.runtime import JITFunction

    triton.runtime.driver.set_active(Offline(capability))
    found: dict[str, Any] = {}
    run = JITFunction.run

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        made = run(self, *args, grid=grid, warmup=True, **options)
        bundles = [v for v in made.src.signature.values() if isinstance(v, tuple)]
        if "tensordesc" in str(bundles):
            raise NotImplementedError(f"Triton 3.6 launches no kernel with descriptors in a bundle, got {bundles}")
        found[self.fn.__name__] = made

    JITFunction.run = record
    try:
        yield found
    finally:
        JITFunction.run = run


def _binary(case: Case, config: LaunchConfig) -> Any:
    """The binary of one attention kernel, by the product's own launch."""
    kernel = Triton(configure=lambda d: config, variants=False)
    x, sums, grads = _call(case)
    with recorded(case.generation) as found:
        both = kernel._both(x, grads)
        {"forward": lambda: kernel.forward(x, sums), "dq": lambda: kernel._dq(x, both),
         "dkdv": lambda: kernel._dkdv(x, grads, both)}[case.direction]()  # fmt: skip
    return found[case.direction]


def _call(case: Case) -> tuple[Operands, Sums, Grads]:
    """A call on one rank, causal or of a prompt and two answers; 8 query heads and 2 key heads."""
    dtype, rows = DTYPES[case.dtype], np.arange(ROWS)
    until = np.repeat([ROWS, 3 * ROWS // 4, ROWS], [ROWS // 2, ROWS // 4, ROWS // 4])
    mask = Mask.from_bounds(0 * rows, rows + 1, until=until) if case.until else Mask([ROWS])
    plan = Plan(mask, Layout.contiguous(ROWS, 1))
    facts = uploaded(plan, plan.steps(0), torch.device("cpu")).facts[0][0]
    q, k, v, out = (
        torch.zeros(ROWS, heads, dim, dtype=dtype)
        for heads, dim in ((8, case.dim), (2, case.dim), (2, case.v_dim), (8, case.v_dim))
    )
    lse = torch.zeros(8, ROWS)
    sums = Sums(out.float(), lse, None, first=False) if case.accumulates else Sums(None, lse, out, first=True)
    grads = Grads(out, lse, lse, None, *(torch.zeros(x.shape) for x in (q, k, v)))
    return Operands(q, k, v, facts, Score(case.dim**-0.5)), sums, grads


def usage(binary: bytes) -> dict[str, int]:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing of registers: {text[-300:]}")
    return {"registers": int(found[1]), "spilled": int(found[2])}


def main() -> int:
    """Compile the cases and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generation", type=int, choices=GENERATIONS, help="only this one")
    parser.add_argument("--search", help="generation:head dim[/value dim]; candidates instead of the shipped ones")
    parser.add_argument("--direction", choices=DIRECTIONS, help="only this one")
    parser.add_argument("--dim", type=int, help="only this head dim")
    parser.add_argument("--dtype", choices=DTYPES, help="only this one; with --search bf16 unless given")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.search:
        generation, dims = args.search.split(":")
        dim, v_dim = (dims.split("/") * 2)[:2]
        cases = [
            Case(direction, int(dim), int(v_dim), args.dtype or "bf16", int(generation), config)
            for direction, config in itertools.product(DIRECTIONS, CANDIDATES)
        ]
    else:
        cases = [case for g in GENERATIONS if args.generation in (None, g) for case in shipped(g)]
    cases = [c for c in cases if args.direction in (None, c.direction) and args.dtype in (None, c.dtype)]
    cases = [c for c in cases if args.dim in (None, c.dim)]
    rows = []
    with ProcessPoolExecutor(args.processes) as pool:
        for row in pool.map(compiled, cases):
            rows.append(row)
            print(line(row), flush=True)
    if args.json:
        write(args.json, rows)
    return int(any("error" in row for row in rows))


def line(row: dict[str, Any]) -> str:
    """A row as a line to print."""
    c = LaunchConfig(**row["config"])
    what = f"sm_{row['generation']} {row['direction']} {row['dim']}/{row['v_dim']} {row['dtype']}"
    used = row.get("error") or (
        f"{row['registers']} registers, {row['spilled']} spilled, {row['shared']:,} shared, "
        f"{row['tensor_core_instructions']} products"
    )
    more = " tma" * c.tma + " accumulates" * row["accumulates"] + " until" * row["until"]
    return f"{what:28} {c.bm}x{c.bn} warps {c.warps} stages {c.stages}{more}: {used}"


if __name__ == "__main__":
    raise SystemExit(main())
