"""Unusual launches of the attention kernels, compiled and launched without a GPU.

Triton makes constants of integers that are 1 and looks at alignments, so that a launch may fail to compile of which the
interpreter says nothing. The driver is a stub, which keeps what it would have been told.
"""

from __future__ import annotations

import ast
import itertools
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from seqpar.facts.mask import Mask
from tests.kernels.test_compile import versions

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
    "keys that end": {"until": True},
    "keys that end, one of everything else": {**ONES, "rows": 40, "keys": 40, "until": True},
    "keys that end, every option": {"until": True, "processors": 1000, **OPTIONS},
    "every option, odd dims": {"dim": 72, "v_dim": 40, **OPTIONS},
    "seed of 1, first head of 1": {"dropout_p": 0.5, "seed": 1, "first_head": 1},
    "threshold of 0": {"dropout_p": 2.0**-33},
    "negative integer scale": {"scale": -1, "softcap": 1},
    "heads outermost": {"stored": "heads"},
    "off alignment": {"stored": "odd"},
    "expanded rows": {"stored": "expanded"},
}

GIVEN: set[int] = set()  # addresses of the tensors that launches are given


def run(what: str, where: str = "") -> str:
    """What this module prints, run with a Triton that compiles; where: its folder, unless it is the installed one."""
    paths = os.pathsep.join(filter(None, (where, str(ROOT))))
    env = os.environ | {"PYTHONPATH": paths, "TRITON_CACHE_DIR": str(ROOT / ".pytest_cache" / "triton")}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.kernels.test_triton_launches", what]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("where", versions())
def test_unusual_launches_compile_and_are_prepared_once(where: str) -> None:
    """In both dtypes; each launch compiles 10 variants."""
    assert run("all", where).split()[-1] == str(3 * 2 * len(LAUNCHES))


@pytest.mark.parametrize("where", versions())
def test_kernels_use_what_every_supported_triton_has(where: str) -> None:
    """What only a later one has is an error of the first launch that needs it, perhaps of one option alone."""
    assert run("language", where).split() == ["missing", "0"]


@pytest.mark.exhaustive
def test_all_variants_are_compiled_with_the_first_launch() -> None:
    """Forward has 4, dq 1, dk and dv 4, where keys end too; sums of parts 1. Those of a launch compile together."""
    plain = ["add_parts", "1", "dkdv", "4", "dq", "1", "forward", "4"]
    assert run("variants").split() == [*plain, "add_parts", "1", "dkdv", "8", "dq", "2", "forward", "8"]


def compile_all() -> int:
    """Prints the launches that fail, and how many of them there were in all."""
    import triton
    from triton.runtime import JITFunction

    from bench.gpu.launches import Stub

    launches, failed, looked, look = 0, 0, 0, JITFunction.run

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal looked
        looked += 1
        return look(self, *args, **options)

    stub = Stub(90)
    triton.runtime.driver.set_active(stub)
    JITFunction.run = counted
    for name, dtype in itertools.product(LAUNCHES, (torch.bfloat16, torch.float32)):
        first, again, unprepared = launches_of(dtype, **LAUNCHES[name])
        for step in range(3):
            launches += 1
            try:
                first[step]()
                looked = 0
                again[step]()
                assert looked == 0, "Triton looks at arguments of a kind that it has seen"
                unprepared[step]()
                assert looked == (2 if stub.launched[-1][0] == "add_parts" else 1)
                prepared, expected = map(plain, (stub.launched[-2 * looked : -looked], stub.launched[-looked:]))
                differences = [pair for pair in zip(prepared, expected, strict=True) if pair[0] != pair[1]]
                assert not differences, f"launched with, and expected: {differences}"
            except Exception as error:
                failed += 1
                print(f"{dtype} {name}: {error}\n{error.__cause__ or ''}")
    print(launches)
    return int(failed > 0)


def plain(x: Any) -> Any:
    """What a driver is told, as values that compare: of tensors that launches make for themselves not the address."""
    if isinstance(x, torch.Tensor):
        content = x.tolist() if x.dtype == torch.int32 else x.data_ptr() if x.data_ptr() in GIVEN else None
        return x.dtype, x.shape, x.stride(), content
    if isinstance(x, (tuple, list)):
        return [plain(value) for value in x]
    if type(x).__name__ == "TensorDescriptor":
        return plain(list(vars(x).items()))
    return type(x), x if isinstance(x, (int, float, str)) else None


def compile_variants() -> int:
    """Prints how many variants of each kernel the first launches compile; an error if a later launch compiles one."""
    import triton

    from bench.gpu.launches import Stub

    compiled: dict[str, set[str]] = {}
    main = threading.get_ident()

    def compile_(source: Any, **about: Any) -> Any:
        assert source.name == "dq" or threading.get_ident() != main, f"{source.name} is compiled alone"
        known = compiled.setdefault(source.name, set())
        known.add(str((source.signature, source.constants, source.attrs)))
        return Binary()

    triton.runtime.driver.set_active(Stub(90))
    triton.compiler.compile = compile_
    changes: list[dict[str, Any]] = [
        {}, {"last": False}, {"first": False}, {"first": False, "last": False}, {"rows": 41, "keys": 51},
        {"rows": 48, "keys": 64},
        {"processors": 1000}, {"bounds": True}, {"bounds": True, "processors": 1000},
    ]  # fmt: skip
    for until in (False, True):
        for number, change in enumerate(changes):
            for step in launches_of(torch.bfloat16, variants=True, until=until, **change)[0]:
                step()
            if not number:
                print(*(word for name in sorted(compiled) for word in (name, len(compiled[name]))))
                first = sum(map(len, compiled.values()))
        if sum(map(len, compiled.values())) != first:
            return 1
    return 0


class Binary:
    """A compiled kernel that launches nothing."""

    function = packed_metadata = None

    def run(self, *arguments: Any) -> None:
        """Nothing."""

    def launch_metadata(self, *arguments: Any) -> None:
        """None."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.run


def launches_of(
    dtype: torch.dtype, *, rows: int = 40, keys: int = 50, heads: int = 4, kv_heads: int = 2, dim: int = 32,
    v_dim: int = 32, scale: float = 0.25, softcap: float = 0.0, alibi: bool = False, dropout_p: float = 0.0,
    seed: int = 0, first_head: int = 0, stored: str = "rows", bounds: bool = False, first: bool = True,
    last: bool = True, processors: int = 8, variants: bool = False, until: bool = False,
) -> list[list[Any]]:  # fmt: skip
    """Forward, dq, and dk and dv: on some tensors, on others in the same step, and on the others in a fresh step."""
    from seqpar.kernels import Grads, Operands, Score, Sums
    from seqpar.kernels import triton as package
    from seqpar.kernels.triton.config import LaunchConfig
    from tests.kernels.cases import facts_of, memo

    def made(n: int, heads: int, dim: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        if stored == "heads":
            return torch.zeros(heads, n, dim, dtype=dtype).transpose(0, 1)
        if stored == "odd":
            return torch.zeros(n + 1, heads + 2, dim + 3, dtype=dtype)[1:, 1:-1, 2:-1]
        return torch.zeros(1 if stored == "expanded" else n, heads, dim, dtype=dtype).expand(n, heads, dim)

    def calls(facts: Any, seed: int) -> tuple[Operands, Sums, Grads]:
        slopes = torch.zeros(heads) if alibi else None
        score = Score(scale, softcap, slopes, dropout_p, seed, first_head)
        q, k = made(rows, heads, dim), made(keys, kv_heads, dim)
        v, dout = made(keys, kv_heads, v_dim), made(rows, heads, v_dim)
        lse, delta = torch.zeros(heads, rows), torch.zeros(heads, rows)
        acc = made(rows, heads, v_dim, torch.float32)
        out = made(rows, heads, v_dim) if dtype != torch.float32 and last else None
        sums = Sums(None if first and out is not None else acc, lse, out, first=first)
        grads = Grads(dout, lse, delta, None, *(torch.zeros(y.shape) for y in (q, k, v)))
        given = q, k, v, dout, lse, delta, acc, out, grads.dq, grads.dk, grads.dv, slopes
        GIVEN.update(y.data_ptr() for y in given if isinstance(y, torch.Tensor))
        return Operands(q, k, v, facts, score), sums, grads

    def bound(x: Operands, sums: Sums, grads: Grads) -> list[Any]:
        both = kernel._both(x, grads)
        return [
            lambda: kernel.forward(x, sums), lambda: kernel._dq(x, both), lambda: kernel._dkdv(x, grads, both)
        ]  # fmt: skip

    package._processors = lambda device: processors
    kernel = package.Triton(configure=lambda d: LaunchConfig(16, 16, 4, 1, tma=True), variants=variants)
    lo = np.random.default_rng(0).integers(0, keys, rows)
    mask = Mask.from_bounds(lo, np.minimum(lo + 9, keys), kv_tokens=keys) if bounds else Mask([rows], kv_lengths=[keys])
    if until:
        ends = np.minimum(np.arange(keys) // 16 * 16 + 24, keys)
        mask = Mask.from_bounds(*mask.bounds(np.arange(rows)), kv_tokens=keys, until=ends)
        assert mask.has_until
    facts = facts_of(mask, np.arange(keys))
    once, (x, sums, grads) = calls(facts, seed), calls(facts, seed + 1)
    fresh = replace(x, facts=replace(facts, memo=memo()))
    return [bound(*once), bound(x, sums, grads), bound(fresh, sums, grads)]


def check_language() -> int:
    """Prints the names of Triton's language that the kernels use and this Triton lacks, and how many there are."""
    import triton
    import triton.language as tl

    modules = {"tl": tl, "triton": triton}
    missing = {
        node.attr
        for path in (ROOT / "seqpar").rglob("triton/*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules
        if not hasattr(modules[node.value.id], node.attr)
    }
    print(*sorted(missing), "missing", len(missing))
    return 0


if __name__ == "__main__":
    raise SystemExit({"variants": compile_variants, "language": check_language, "all": compile_all}[sys.argv[1]]())
