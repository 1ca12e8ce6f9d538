"""Compiles the small Triton kernels for GPUs that need not be present; see bench/gpu/binaries.py.

python -m bench.gpu.small_binaries --json bench/results/small_binaries.jsonl
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from bench.gpu.binaries import digest, recorded, write
from seqpar import Layout, Mask, Plan
from seqpar.ops.attention.call import uploaded

GENERATIONS = (80, 90, 100)
HEADS, DIM, ROWS = 8, 128, 64
# first word of a launch -> the file of its kernel
FILES = {"merge_": "merge", "pack": "rows", "place": "rows", "add": "rows", "rotate": "rotary", "delta": "delta",
         "join": "parts"}  # fmt: skip
DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def launches() -> Iterator[tuple[str, Callable[[], None]]]:
    """The launches of the product by name: in every dtype, with row numbers of either width."""
    from seqpar.kernels.triton import delta, merge, parts, rotary, rows
    from seqpar.kernels.triton.arguments import key_sums, kinds_of

    numbers, plan = torch.arange(ROWS), Plan(Mask([ROWS]), Layout.contiguous(ROWS, 1))
    facts = uploaded(plan, plan.steps(0), torch.device("cpu")).facts[0][0]
    for dtype in DTYPES:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        x, y = torch.zeros(ROWS, HEADS, DIM, dtype=dtype), torch.zeros(ROWS, 2, HEADS, DIM, dtype=dtype)
        acc, lse = torch.zeros(ROWS, HEADS, DIM, dtype=wide), torch.zeros(HEADS, ROWS, dtype=wide)
        yield f"merge_ {dtype}", lambda x=x, a=acc, lse=lse: merge.merge_(a, lse, x, lse)
        yield f"merge_ and cast {dtype}", lambda x=x, a=acc, lse=lse: merge.merge_(a, lse, a, lse, x)
        for at in (numbers, numbers.int()):
            # keys and values side by side for a peer; what arrives, cast or added to rows
            pack = [(y[:, side], x, None, at) for side in range(2)]
            yield f"pack {dtype} {at.dtype}", lambda pack=pack: rows.write(pack)
            yield f"place {dtype} {at.dtype}", lambda x=x, a=acc, at=at: rows.write([(a, x, at, None)])
            yield f"add {dtype} {at.dtype}", lambda x=x, a=acc, at=at: rows.add((a, x, at, None))
        yield f"delta {dtype}", lambda x=x: delta.delta(x, x, facts)
        for interleaved, inverse in itertools.product((False, True), repeat=2):
            for part in (DIM // 2, DIM // 4):
                yield (
                    f"rotate {dtype} {interleaved=} {inverse=} {part=}",
                    lambda x=x, part=part, i=interleaved, v=inverse: rotary.rotate(
                        x, numbers, torch.ones(part), torch.empty_like(x), i, 1.25, v
                    ),
                )
    for dims in ((DIM, DIM), (192, 128)):
        dk, dv = (torch.zeros(ROWS, HEADS, dim) for dim in dims)
        yield (
            f"join {dims[0]}/{dims[1]}",
            lambda x=dk, y=dv: parts.joins(x, y, 1, ROWS)(
                *key_sums(x, y, kinds_of(x, y), 2 * ROWS), numbers.int(), HEADS, ROWS
            ),
        )


def sources(row: dict[str, Any]) -> str:
    """The digest of the code that a row's kernel is compiled from."""
    return digest(FILES[row["launch"].split()[0]])


def main() -> int:
    """Print a row for each launch and generation."""
    import triton

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--dtype", choices=[str(dtype) for dtype in DTYPES], help="only this one")
    parser.add_argument("--generation", type=int, choices=GENERATIONS, help="only this one")
    args, rows = parser.parse_args(), []
    for generation, (name, launch) in itertools.product(GENERATIONS, launches()):
        if args.generation not in (None, generation) or (args.dtype or "") not in name:
            continue
        row: dict[str, Any] = {"launch": name, "generation": generation}
        row |= {"triton": triton.__version__, "sources": sources(row)}
        try:
            with recorded(generation) as found:
                launch()
            ((kernel, made),) = found.items()
            widths = {int(w) for w in re.findall(r"(?:ld|st)\.global\S*\.v(\d+)", made.asm["ptx"])}
            row |= {"kernel": kernel, "widest": max(widths, default=1)}
        except Exception as error:
            row |= {"error": f"{type(error).__name__}: {error}"[-300:]}
        rows.append(row)
    write(args.json, rows)
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
