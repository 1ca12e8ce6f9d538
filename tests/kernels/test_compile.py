"""Every shipped configuration of the Triton kernels, compiled for its own generation of GPUs on both Triton versions.

No GPU is needed: this is what covers the bf16 variants where the interpreter cannot run them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLDEST = Path(sys.prefix) / "triton-3.6"  # beside the newest, which is installed; `make setup` puts it there


def versions() -> list[object]:
    """Where the supported Triton versions lie."""
    try:
        newest = version("triton")
    except PackageNotFoundError:
        return [pytest.param("", marks=pytest.mark.skip(reason="triton has wheels for Linux only"))]
    return [pytest.param("", id=newest), pytest.param(str(OLDEST), id="3.6.0")]


def rows_of(module: str, where: str, out: Path) -> list[dict[str, object]]:
    """What a module's main writes, run with a Triton that compiles instead of interpreting."""
    assert not where or Path(where).exists(), f"{where} is missing; `make setup` installs Triton 3.6.0 there"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (where, str(ROOT))))}
    env |= {"TRITON_CACHE_DIR": str(ROOT / ".pytest_cache" / "triton")}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", module, "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert out.exists(), done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("where", versions())
def test_attention_kernels_compile_for_every_generation(where, tmp_path) -> None:
    from bench.compile import SHARED, shipped
    from seqpar.kernels.triton.config import GENERATIONS

    rows = rows_of("bench.compile", where, tmp_path / "rows.json")
    assert len(rows) == sum(len(shipped(g)) for g in GENERATIONS)
    assert {row["triton"] for row in rows} == {"3.6.0" if where else version("triton")}
    wrong = []
    for row in rows:
        fits = "error" not in row and row["shared"] <= SHARED[row["generation"]]
        if row["dtype"] != "fp32":
            fits &= row.get("tensor_core_instructions", 0) > 0
        # Of a backward a few registers may go to local memory; they are reported in bench/results.
        fits &= row.get("spilled", 0) <= (0 if row["direction"] == "forward" else 96)
        if not fits:
            wrong.append(row)
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("where", versions())
def test_small_kernels_compile_for_every_generation(where, tmp_path) -> None:
    rows = rows_of("bench.compile_small", where, tmp_path / "rows.json")
    assert {row["generation"] for row in rows} == {80, 90, 100}
    assert {row["kernel"] for row in rows} == {"move", "merge_rows", "rotate_rows"}
    wrong = [row for row in rows if "error" in row]
    assert not wrong, "\n".join(map(str, wrong))
    dense = [row for row in rows if row["launch"].startswith(("pack", "merge_ t"))]
    assert dense and all(row["widest"] > 1 for row in dense), "rows are moved many bytes at a time"
