"""Compiles the Triton attention kernels for GPUs that need not be there, and reads what the binaries use.

    python bench/compile.py --json bench/results/compile.json      # every shipped configuration
    python bench/compile.py --search forward:128:90                # candidates for one of them

Registers, spilled bytes (a stack in local memory), shared memory and tensor core instructions are read from the binary.
They chose the configurations that no GPU has timed; `bench/gpu.py` times the candidates where there is one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from seqpar.kernels.triton.config import CLASSES, GENERATIONS, Config, Descriptor, configure, pieces

SHARED = {80: 166_912, 86: 101_376, 90: 232_448, 100: 232_448}  # bytes a block may have, CUDA programming guide
DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4}
CANDIDATES = [
    Config(bm, bn, warps, stages, tma)
    for (bm, bn), warps, stages, tma in itertools.product(
        ((128, 128), (128, 64), (64, 128), (64, 64), (128, 32), (32, 128), (64, 32), (32, 64), (32, 32), (16, 32)),
        (8, 4),
        (3, 2, 1),
        (True, False),
    )
]


@dataclass(frozen=True)
class Case:
    """One kernel with one configuration for one generation. accumulates: the forward that merges with earlier sums."""

    direction: str
    dim: int
    v_dim: int
    dtype: str
    generation: int
    config: Config
    accumulates: bool = False


def shipped(generation: int) -> list[Case]:
    """Every configuration at the largest head dim that takes it, and some head dims in two pieces."""
    cases = []
    for dtype in ("bf16", "fp32"):
        dims = [(d, d) for d in CLASSES[DTYPES[dtype]]] + ([(192, 128)] if dtype == "bf16" else [])
        for direction, (dim, v_dim) in itertools.product(("forward", "dq", "dkdv"), dims):
            config = configure(Descriptor(direction, dim, v_dim, DTYPES[dtype], generation))
            cases.append(Case(direction, dim, v_dim, dtype, generation, config))
    config = configure(Descriptor("forward", 128, 128, 2, generation))
    cases.append(Case("forward", 128, 128, "fp16", generation, config, accumulates=True))
    return cases


def compiled(case: Case) -> dict[str, Any]:
    """What the binary uses, or why there is none."""
    import triton
    from triton.backends.compiler import GPUTarget

    row = asdict(case) | {"triton": triton.__version__}
    options = {"num_warps": case.config.warps, "num_stages": case.config.stages, "enable_fp_fusion": True}
    try:
        made = triton.compile(_source(case), target=GPUTarget("cuda", case.generation, 32), options=options)
    except Exception as error:
        while error.__cause__ is not None:
            error = error.__cause__  # type: ignore[assignment]
        return row | {"error": f"{type(error).__name__}: {error}"[-300:]}
    products = len(re.findall(r"wgmma\.mma_async|mma\.sync|tcgen05\.mma", made.asm["ptx"]))
    return row | _usage(made.asm["cubin"]) | {"shared": made.metadata.shared, "tensor_core_instructions": products}


def _source(case: Case) -> Any:
    from triton.compiler import ASTSource

    from seqpar.kernels.triton import backward, forward

    kernel = {"forward": forward.forward, "dq": backward.dq, "dkdv": backward.dkdv}[case.direction]
    c = case.config
    (d1, d2), (v1, v2) = (pieces(d, DTYPES[case.dtype]) for d in (case.dim, case.v_dim))
    constants = {
        "D": case.dim, "D1": d1, "D2": d2, "V_": case.v_dim, "V1": v1, "V2": v2, "BM": c.bm, "BN": c.bn, "TMA": c.tma,
        "FIRST": not case.accumulates, "IN_PLACE": case.accumulates, "UNIFORM": True, "EXACT": True, "ADD": False,
        "SOFTCAP": False, "ALIBI": False, "DROPOUT": False, "UPCAST": False, "PRECISION": "ieee",
    }  # fmt: skip
    rows, looped = (c.bm, "Q Q2 Dout Dout2") if case.direction == "dkdv" else (c.bn, "K K2 V V2_")
    widths = dict(zip(looped.split(), (d1, d2 or 16, v1, v2 or 16), strict=True))
    types = {
        **dict.fromkeys(["Pos", "Lo", "Hi", "KeyPos", "Table", "Tiles", "Slopes"], "*i32"),
        **dict.fromkeys(["Lse", "Delta", "Dq", "Dk", "Dv"], "*fp32"),
        **dict.fromkeys(["Q", "Q2", "K", "K2", "V", "V2_", "Dout", "Dout2"], f"*{case.dtype}"),
        **dict.fromkeys(("Prior", "Target"), "*fp32" if case.accumulates else f"*{case.dtype}"),
        **dict.fromkeys(["pre", "post", "scale", "keep_scale"], "fp32"),
        "seed": "i64",
    }
    counts = ["first_head", "threshold", "tiles", "group", "keys", "rows", "key_tiles", "parts"]
    signature, attributes = {}, {}
    for n, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = types.get(name, "i32")
        if c.tma and name in widths:
            signature[name] = f"tensordesc<{case.dtype}[{rows}, 1, {widths[name]}]>"
        elif signature[name].startswith("*") or (name not in counts and name not in types):
            attributes[(n,)] = [["tt.divisibility", 16]]  # pointers and strides
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)


def _usage(binary: bytes) -> dict[str, int]:
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


def run(cases: list[Case], processes: int) -> list[dict[str, Any]]:
    """A row for each case, in their order."""
    with ProcessPoolExecutor(processes) as pool:
        return list(pool.map(compiled, cases))


def main() -> int:
    """Prints a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generation", type=int, choices=GENERATIONS, help="only this one")
    parser.add_argument("--search", help="direction:head dim:generation[:dtype]; candidates instead of what is shipped")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.search:
        direction, dim, generation, *dtype = args.search.split(":")
        dims = [int(d) for d in dim.split("/")]
        kind = dtype[0] if dtype else "bf16"
        cases = [Case(direction, dims[0], dims[-1], kind, int(generation), c) for c in CANDIDATES]
    else:
        cases = [case for g in GENERATIONS if args.generation in (None, g) for case in shipped(g)]
    rows = run(cases, args.processes)
    for row in rows:
        c = Config(**row["config"])
        what = f"sm_{row['generation']} {row['direction']} {row['dim']}/{row['v_dim']} {row['dtype']}"
        used = row.get("error") or (
            f"{row['registers']} registers, {row['spilled']} spilled, {row['shared']:,} shared, "
            f"{row['tensor_core_instructions']} products"
        )
        print(f"{what:28} {c.bm}x{c.bn} warps {c.warps} stages {c.stages} {'tma' if c.tma else '   '}: {used}")
    if args.json:
        args.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
