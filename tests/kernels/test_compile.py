"""Every shipped configuration of the Triton kernels, compiled for its own generation of GPUs on both Triton versions.

No GPU is needed: this is what covers the bf16 variants where the interpreter cannot run them. Compiling all takes
twenty minutes of a processor, and is done after a change of the kernels: the rows are in bench/results and say from
which sources they were made. Here they are held to what is promised, and some of them are compiled again, all
of them by `make binaries`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
OLDEST = Path(sys.prefix) / "triton-3.6"  # beside the newest, which is installed; `make setup` puts it there

Row = dict[str, Any]


def versions() -> list[object]:
    """Where the supported Triton versions lie."""
    try:
        newest = version("triton")
    except PackageNotFoundError:
        return [pytest.param("", marks=pytest.mark.skip(reason="triton has wheels for Linux only"))]
    return [pytest.param("", id=newest), pytest.param(str(OLDEST), id="3.6.0")]


def committed(name: str, where: str) -> list[Row]:
    """The rows of bench/results for a Triton, made from the kernels as they are."""
    module = import_module(f"bench.gpu.{name}")
    made = "3.6.0" if where else version("triton")
    path = RESULTS / f"{name}.jsonl"
    rows = [row for row in map(json.loads, path.read_text().splitlines()) if row["triton"] == made]
    assert rows and all(row["sources"] == module.sources(row) for row in rows), (
        f"the kernels have changed: run `python -m bench.gpu.{name} --json {path.relative_to(ROOT)}` with Triton {made}"
    )
    return rows


def compiled(name: str, where: str, out: Path, *flags: object) -> list[Row]:
    """The rows of a module's main, run with a Triton that compiles instead of interpreting."""
    assert not where or Path(where).exists(), f"{where} is missing; `make setup` installs Triton 3.6.0 there"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (where, str(ROOT))))}
    env |= {"TRITON_CACHE_DIR": str(ROOT / ".pytest_cache" / "triton")}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", f"bench.gpu.{name}", "--json", str(out), *map(str, flags)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert out.exists(), done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.parametrize("where", versions())
def test_attention_kernels_compile_for_every_generation(where) -> None:
    from bench.gpu.binaries import DTYPES, SHARED, shipped
    from seqpar.kernels.triton.config import GENERATIONS, Descriptor, configure

    rows, wrong = committed("binaries", where), []
    cases = [case for generation in GENERATIONS for case in shipped(generation)]
    assert [{name: row[name] for name in asdict(cases[0]) if name != "config"} for row in rows] == [
        {name: value for name, value in asdict(case).items() if name != "config"} for case in cases
    ]
    for row in rows:
        itemsize = DTYPES[row["dtype"]].itemsize
        chosen = configure(Descriptor(row["direction"], row["dim"], row["v_dim"], itemsize, row["generation"]))
        fits = "error" not in row and row["shared"] <= SHARED[row["generation"]] and row["config"] == asdict(chosen)
        if row["dtype"] != "fp32":
            fits &= row.get("tensor_core_instructions", 0) > 0
        # Of a backward, and where keys end, a few registers may go to local memory; they are reported in bench/results.
        limit = 0 if row["direction"] == "forward" and not row["until"] else 96
        if (row["generation"], row["direction"], row["dim"], row["v_dim"]) == (90, "dkdv", 128, 128):
            limit = 120  # after its loops, where dk and dv are added to the present values
        if (row["generation"], row["dim"], row["accumulates"]) == (90, 256, True):
            limit = 512  # outside its loop
        fits &= row.get("spilled", 0) <= limit
        if not fits:
            wrong.append(row)
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("where", versions())
def test_small_kernels_compile_for_every_generation(where) -> None:
    from bench.gpu.small_binaries import GENERATIONS, launches

    rows = committed("small_binaries", where)
    names = [name for name, _ in launches()]
    assert [(row["generation"], row["launch"]) for row in rows] == [(g, name) for g in GENERATIONS for name in names]
    wrong = [row for row in rows if "error" in row]
    assert not wrong, "\n".join(map(str, wrong))
    assert {row["kernel"] for row in rows} == {"move", "merge_rows", "rotate_rows", "delta_rows", "add_parts"}
    dense = [row for row in rows if row["launch"].startswith(("pack", "merge_ t"))]
    assert dense and all(row["widest"] > 1 for row in dense), "rows are moved many bytes at a time"


ALL = [pytest.mark.exhaustive, pytest.mark.binaries]
# capability 9.0 has all that launches differ by: tensor descriptors and asynchronous products
SAMPLES = [
    pytest.param("binaries", ["--dim", 64, "--generation", 90, "--dtype", "bf16", "--direction", "dq"], id="attention"),
    pytest.param("binaries", [], id="all attention", marks=ALL),
    pytest.param("small_binaries", [], id="all small", marks=ALL),
]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("where", versions())
@pytest.mark.parametrize(("name", "flags"), SAMPLES)
@pytest.mark.sampled(2)
def test_what_compiles_here_is_what_was_committed(name, flags, where, tmp_path) -> None:
    rows, known = compiled(name, where, tmp_path / "rows.jsonl", *flags), committed(name, where)
    assert len(rows) >= 2
    for row in rows:
        assert row in known
