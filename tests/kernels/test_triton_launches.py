"""Unusual launches of the attention kernels, compiled without a GPU.

Triton makes constants of integers that are 1 and looks at alignments, so that a launch may fail to compile of which the
interpreter says nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from seqpar.facts.mask import Mask

pytest.importorskip("triton", reason="triton has wheels for Linux only")

ROOT = Path(__file__).parents[2]
OPTIONS: dict[str, Any] = {"softcap": 2.0, "alibi": True, "dropout_p": 0.25, "seed": 2**63 + 5}
ONES: dict[str, Any] = dict.fromkeys(("rows", "keys", "heads", "kv_heads", "dim", "v_dim"), 1)
LAUNCHES: dict[str, dict[str, Any]] = {
    "one of everything": ONES,
    "one of everything, every option": {**ONES, **OPTIONS, "first": False},
    "one row": {"rows": 1},
    "one key": {"keys": 1},
    "a key head for each head": {"kv_heads": 4},
    "split gradients of keys": {"processors": 1000},
    "bounds": {"bounds": True},
    "every option, odd dims": {"dim": 72, "v_dim": 40, **OPTIONS},
    "seed of 1, first head of 1": {"dropout_p": 0.5, "seed": 1, "first_head": 1},
    "threshold of 0": {"dropout_p": 2.0**-33},
    "negative integer scale": {"scale": -1, "softcap": 1},
    "heads outermost": {"stored": "heads"},
    "off alignment": {"stored": "odd"},
    "expanded rows": {"stored": "expanded"},
}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("every", ["in a dtype", pytest.param("in both dtypes", marks=pytest.mark.exhaustive)])
def test_unusual_launches_compile(every: str) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(ROOT / ".pytest_cache" / "triton")}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.kernels.test_triton_launches", every]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.split()[-1] == str(3 * len(LAUNCHES) * (2 if every == "in both dtypes" else 1))


def compile_all(every: str) -> int:
    """Prints the launches that fail, and how many of them there were in all."""
    import triton
    from triton.runtime import JITFunction

    from bench.gpu.binaries import Offline

    launches, failed, run = 0, 0, JITFunction.run

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        nonlocal launches
        launches += 1
        run(self, *args, grid=grid, warmup=True, **options)

    triton.runtime.driver.set_active(Offline(90))
    JITFunction.run = compiled
    dtypes = (torch.bfloat16, torch.float32)
    for place, (name, changes) in enumerate(LAUNCHES.items()):
        for dtype in dtypes if every == "in both dtypes" else dtypes[place % 2 :][:1]:
            for step in steps(dtype, **changes):
                try:
                    step()
                except Exception as error:
                    failed += 1
                    print(f"{dtype} {name}: {error}\n{error.__cause__ or ''}")
    print(launches)
    return int(failed > 0)


def steps(
    dtype: torch.dtype, *, rows: int = 40, keys: int = 50, heads: int = 4, kv_heads: int = 2, dim: int = 32,
    v_dim: int = 32, scale: float = 0.25, softcap: float = 0.0, alibi: bool = False, dropout_p: float = 0.0,
    seed: int = 0, first_head: int = 0, stored: str = "rows", bounds: bool = False, first: bool = True,
    processors: int = 8,
) -> list[Any]:  # fmt: skip
    """Forward, dq, and dk and dv."""
    from seqpar.kernels import Grads, Operands, Score, Sums
    from seqpar.kernels import triton as package
    from seqpar.kernels.triton.config import LaunchConfig
    from tests.kernels.cases import facts_of

    def made(n: int, heads: int, dim: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        if stored == "heads":
            return torch.zeros(heads, n, dim, dtype=dtype).transpose(0, 1)
        if stored == "odd":
            return torch.zeros(n + 1, heads + 2, dim + 3, dtype=dtype)[1:, 1:-1, 2:-1]
        return torch.zeros(1 if stored == "expanded" else n, heads, dim, dtype=dtype).expand(n, heads, dim)

    package._processors = lambda device: processors
    kernel = package.Triton(configure=lambda d: LaunchConfig(16, 16, 4, 1, tma=True))
    lo = np.random.default_rng(0).integers(0, keys, rows)
    mask = Mask.from_bounds(lo, np.minimum(lo + 9, keys), kv_tokens=keys) if bounds else Mask([rows], kv_lengths=[keys])
    slopes = torch.zeros(heads) if alibi else None
    score = Score(scale, softcap, slopes, dropout_p, seed, first_head)
    q, k = made(rows, heads, dim), made(keys, kv_heads, dim)
    v, dout = made(keys, kv_heads, v_dim), made(rows, heads, v_dim)
    x, lse = Operands(q, k, v, facts_of(mask, np.arange(keys)), score), torch.zeros(heads, rows)
    acc = made(rows, heads, v_dim, torch.float32)
    narrow = dtype != torch.float32
    sums = Sums(None if first and narrow else acc, lse, made(rows, heads, v_dim) if narrow else None, first=first)
    grads = Grads(dout, lse, lse, None, *(torch.zeros(y.shape) for y in (q, k, v)))
    return [lambda: kernel.forward(x, sums), lambda: kernel._dq(x, grads), lambda: kernel._dkdv(x, grads)]


if __name__ == "__main__":
    raise SystemExit(compile_all(sys.argv[1]))
