"""Slice `correct`: every kernel on this device against attention in float64, in the dtypes that it ships.

Inputs are views in memory that holds NaN around them, whatever a kernel must write holds NaN before, and keys come in
one buffer or several. Forward and backward run twice and must give the same bits where they are said to. A kernel is
refused whose error exceeds `TOLERANCE`, and 1.5 of that of the formulas in torch on the same inputs: where a query sees
two keys, gradients are small differences, and 16 bits leave little of them. An error of Triton's may besides be 1.05 of
that of torch's FlashAttention-2, where that can run.

    compute-sanitizer python -m bench.gpu.correct     # a few small launches, for a checker of memory or races
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

import seqpar
from bench.gpu.calls import (
    TOLERANCE,
    Nobody,
    OfKernel,
    Problem,
    Setup,
    Tensors,
    absent,
    errors,
    facts_of,
    kernels,
    oracle,
    short,
    verdict,
)
from bench.gpu.graphs import two_plans
from bench.gpu.machine import DeviceLost, Machine, unable
from bench.gpu.rivals import PEERS
from bench.gpu.rows import Case, Row
from bench.gpu.verbs import verbs
from seqpar.facts.value import Ints
from seqpar.kernels import CallSpec, Grads, Kernel, Operands, Score, Sums, acc_dtype, call_spec
from seqpar.kernels.blockwise import Blockwise
from seqpar.kernels.reference import Reference
from seqpar.kernels.vendor import Segmented
from seqpar.plan import TRANSPORTS
from seqpar.testing import dense_attention, run_threads

BESIDE_FLASH, BESIDE_PLAIN = 1.05, 1.5
TF32 = TOLERANCE[torch.bfloat16] / 8  # inputs are rounded to 10 bits, where bf16 has 7
SANITIZER_SECONDS = 100
VERB_LENGTHS = (301, 7, 1100, 640)


@dataclass(frozen=True)
class Check:
    """A call to check. splits: the number of key buffers, of neighbours or, if striped, of every n-th key."""

    kernel: str = ""
    mask: str = "causal"
    queries: int = 700
    keys: int = 700
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    v_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    splits: int = 1
    striped: bool = False
    softcap: float = 0.0
    alibi: bool = False
    dropout: float = 0.0
    sinks: bool = False
    with_lse: bool = False

    def made(self) -> seqpar.Mask:
        """The mask of the call."""
        n, m, rng = self.queries, self.keys, np.random.default_rng(5)
        if self.mask == "packed":
            return seqpar.Mask([n // 2 + 3, 1, n - n // 2 - 4])
        if self.mask == "bounds":
            lo = rng.integers(0, m + 1, n)
            return seqpar.Mask.from_bounds(lo, np.minimum(m, lo + rng.integers(0, m // 2 + 1, n)), kv_tokens=m)
        if self.mask == "tree":
            return seqpar.Mask.shared_prefix([(n // 4, [n // 3, 3, n - n // 4 - n // 3 - 3])])
        if self.mask == "ends":
            lo, until = rng.integers(0, m // 2 + 1, n), rng.integers(0, m + 1, m)
            hi = np.minimum(m, lo + rng.integers(0, m // 2 + 1, n))
            return seqpar.Mask.from_bounds(lo, hi, until=until, kv_tokens=m)
        if self.mask == "window and sinks":
            return seqpar.Mask([n], window=(m // 5, None), sink_tokens=4, kv_lengths=[m])
        window = {"window": (m // 5, None), "band": (m // 7, 3)}.get(self.mask, (None, None))
        return seqpar.Mask([n], causal=self.mask in ("causal", "window"), window=window, kv_lengths=[m])

    def covers(self) -> list[object]:
        """The calls that are not timed if this check fails."""
        options = [name for name in ("softcap", "alibi", "dropout", "sinks", "with_lse") if getattr(self, name)]
        return [short(self.dtype), self.dim, self.v_dim, *options]

    def buffers(self) -> list[Ints]:
        """The key positions of each buffer."""
        at = np.arange(self.keys)
        return [at[n :: self.splits] for n in range(self.splits)] if self.striped else np.array_split(at, self.splits)

    def score(self, device: torch.device) -> Score:
        """The options of the score."""
        wide = acc_dtype(self.dtype)
        slopes = torch.logspace(-4, -1, self.heads, base=2, dtype=wide, device=device) if self.alibi else None
        return Score(self.dim**-0.5, self.softcap, slopes, self.dropout, 77 if self.dropout else 0)

    def __str__(self) -> str:
        said = {"kernel", "mask", "queries", "keys", "dim", "v_dim", "dtype", "heads", "kv_heads"}
        rest = [f"{f.name}={getattr(self, f.name)}" for f in fields(self)
                if f.name not in said and getattr(self, f.name) != f.default]  # fmt: skip
        dim = self.dim if self.dim == self.v_dim else f"{self.dim}/{self.v_dim}"
        shape = (
            f"{self.mask} {self.queries}x{self.keys}, {self.heads}/{self.kv_heads} heads of {dim}, {short(self.dtype)}"
        )
        return ", ".join([shape, *rest])


SHIPPED = (torch.bfloat16, torch.float16, torch.float32)
OPTIONS = (
    {"softcap": 1.5},
    {"alibi": True},
    {"dropout": 0.3},
    {"sinks": True},
    {"with_lse": True},
    {"softcap": 1.5, "alibi": True, "dropout": 0.3, "sinks": True, "with_lse": True},
)


def groups(tiny: bool) -> dict[str, list[Check]]:
    """The checks of all kernels, in groups that belong together."""
    base = Check()
    if tiny:
        base = replace(base, queries=40, keys=40, dim=16, v_dim=16, heads=2, kv_heads=1, dtype=torch.float32)
        packed = replace(base, mask="packed", splits=2, sinks=True, dtype=torch.float16)
        return {"small": [base, packed], "keys that end": [replace(base, mask="tree")]}
    dims = [(d, d) for d in (32, 64, 80, 96, 128, 256)] + [(192, 128)]
    masks = ("causal", "full", "window", "band", "packed", "bounds", "tree", "ends", "window and sinks")
    across = [
        replace(base, mask=m, queries=n, keys=k) for m in ("causal", "full") for n, k in ((300, 1300), (900, 400))
    ]
    # with one key in all, gradients of q and k are zero, and errors relative to nothing
    sizes = [(2, 2), (7, 7), (129, 129), (1, 700), (700, 2), (3000, 5000), (5000, 3000)]
    return {
        "head dims": [replace(base, dim=d, v_dim=v, dtype=t) for t in SHIPPED for d, v in dims],
        "masks": [replace(base, mask=m) for m in masks] + across,
        "splits": [
            replace(base, mask=m, splits=n, striped=s, dtype=t)
            for m in ("causal", "packed", "bounds", "tree")
            for n, s in ((2, False), (3, True))
            for t in (torch.bfloat16, torch.float32)
        ],
        "options": [replace(base, dtype=t, splits=s, **o) for t in SHIPPED for s in (1, 2) for o in OPTIONS],
        "keys that end": [replace(base, mask="tree", dim=d, v_dim=v, dtype=t) for t in SHIPPED for d, v in dims]
                         + [replace(base, mask="ends", splits=2, **o) for o in OPTIONS],
        "groups of heads": [replace(base, heads=h, kv_heads=kv) for h, kv in ((6, 1), (5, 5), (28, 7), (32, 8))],
        "sizes": [replace(base, mask=m, queries=n, keys=k, dim=128, v_dim=128, heads=2, kv_heads=1)
                  for m in ("causal", "full") for n, k in sizes],
    }  # fmt: skip


def correct(tiny: bool) -> list[Case]:
    """The cases of all checks."""
    cases = [Case("correct", "not on this machine", _missing)]
    cases += [Case("correct", name, partial(_checked, checks)) for name, checks in groups(tiny).items()]
    cases.append(Case("correct", "attention on ranks as threads", partial(_verb, tiny)))
    cases.append(Case("correct", "other verbs on ranks as threads", verbs))
    made = {"heads": 2, "kv_heads": 1, "dim": 64, "v_dim": 64, "dtype": torch.float32 if tiny else torch.bfloat16}
    setup = Setup("causal", (64 if tiny else 2048,), **made)
    cases.append(Case("correct", "two plans under reduce-overhead", partial(two_plans, setup)))
    cases.append(Case("correct", "more elements than 32 bits count", partial(_far, 1000 if tiny else 1_150_000)))
    return cases + [Case("correct", tool, partial(_sanitized, tool), later=True) for tool in ("memcheck", "racecheck")]


def _missing(machine: Machine) -> Iterator[Row]:
    for name, kernel in kernels().items():
        if why := absent(kernel, machine):
            yield {"kernel": name, "mode": "check", "skipped": why}
    for peer in PEERS:
        if why := peer.missing(machine.device):
            yield {"kernel": peer.name, "mode": peer.mode, "skipped": why}


def _checked(checks: list[Check], machine: Machine) -> Iterator[Row]:
    here = [name for name, kernel in kernels().items() if not absent(kernel, machine)]
    named = [replace(check, kernel=name) for name in here for check in checks]
    for check, result in zip(named, machine.spread(partial(outcome, device=machine.device), named)):
        row = {"kernel": check.kernel, "mode": "check", "what": str(check),
               "covers": check.covers()}  # fmt: skip
        yield row | (result if isinstance(result, dict) else unable(result))


def outcome(check: Check, device: torch.device) -> Row:
    """The fields of a check in its row. Raises: DeviceLost."""
    try:
        return judged(check, device)
    except Exception as error:
        if device.type == "cuda":
            try:
                torch.cuda.synchronize()
            except RuntimeError as lost:
                raise DeviceLost(f"in {check}: {lost}") from error
        return unable(error)


def judged(check: Check, device: torch.device) -> Row:
    """The errors of a check. refused: those that make the kernel wrong; missed: those that ought to be smaller."""
    tensors = inputs(check, device)
    expected = run(Reference(), check, [x.double() for x in tensors], whole=True)
    kernel, call = _kernel(check, tensors)
    got, again = run(kernel, check, tensors), run(kernel, check, tensors)
    found, flash = errors(got, expected), _flash_errors(check, tensors, expected)
    limit = TF32 if check.kernel == "triton_tf32" else TOLERANCE[check.dtype]
    # another kernel's errors: by its own, none would ever be too large
    plain = errors(run(Blockwise() if check.kernel == "reference" else Reference(), check, tensors), expected)
    limits = {name: max(limit, BESIDE_PLAIN * plain[name]) for name in found}
    off = [said for name, error in found.items() if (said := verdict({name: error}, limits[name]))]
    off += [f"{n} differs from run to run" for n in got if call.deterministic and not torch.equal(got[n], again[n])]
    row: Row = {"ok": not off, "errors": found, "deterministic": call.deterministic, "baseline": "float64",
                "ratio": max(found[name] / limits[name] for name in found)}  # fmt: skip
    if flash:
        worst = max(found[name] / flash[name] for name in flash)
        row |= {"baseline": "aten_flash", "ratio": worst / BESIDE_FLASH}
        if check.kernel == "triton" and not worst <= BESIDE_FLASH:
            row |= {"ok": False, "missed": f"an error {worst:.3f} times that of aten_flash"}
    return row | ({"refused": "; ".join(off)} if off else {})


def _flash_errors(check: Check, tensors: list[Tensor], expected: Tensors) -> dict[str, float] | None:
    """The errors of torch's FlashAttention-2 on the same inputs, or None where it cannot compute the call."""
    flash = replace(check, kernel="aten_flash", splits=1, striped=False)
    if not check.made().plain:  # it rounds several parts
        return None
    try:
        found, call = _kernel(flash, tensors)
        assert isinstance(found, Segmented)
        alone = Segmented(found.library, rest=Nobody(), deterministic=call.deterministic, merges=call.merges)
        beside = errors(run(alone, flash, tensors), expected)
    except (NotImplementedError, KeyError):
        return None
    return {name: beside[name] for name in ("out", "dq", "dk", "dv")}


def _kernel(check: Check, tensors: list[Tensor]) -> tuple[Kernel, CallSpec]:
    """The kernel as the package takes it, deterministic if it can be by itself."""
    kernel = kernels()[check.kernel]
    reason = None
    for deterministic in (True, False):
        score, mask = check.score(tensors[0].device), check.made()
        merges = check.splits > 1 or check.sinks or len(mask.bands) > 1
        call = call_spec(*tensors[:3], score, grads=True, deterministic=deterministic, merges=merges)
        call = replace(call, until=mask.has_until)
        reason = kernel.refuses(call) or (kernel.varies(call) if isinstance(kernel, Segmented) else None)
        if reason is None:
            return (kernel.specialised_for(call) if isinstance(kernel, Segmented) else kernel), call
    raise NotImplementedError(reason)


def inputs(check: Check, device: torch.device) -> list[Tensor]:
    """The inputs q, k, v, dout, dlse and sinks."""
    draw = torch.Generator(device).manual_seed(1)
    shapes = ((check.queries, check.heads, check.dim), (check.keys, check.kv_heads, check.dim),
              (check.keys, check.kv_heads, check.v_dim), (check.queries, check.heads, check.v_dim))  # fmt: skip
    tensors = [torch.randn(*s, generator=draw, device=device).to(check.dtype) for s in shapes]
    extra = (check.queries, check.heads), (check.heads,)
    return tensors + [torch.randn(*s, generator=draw, device=device, dtype=acc_dtype(check.dtype)) for s in extra]


def viewed(x: Tensor) -> Tensor:
    """The same values as a view into a larger tensor that holds NaN around them, aligned to 16 bytes."""
    big = x.new_full((x.shape[0] + 2, x.shape[1] + 2, x.shape[2] + 16), torch.nan)
    view = big[1:-1, 1:-1, 8:-8]
    view.copy_(x)
    return view


def run(kernel: Kernel, check: Check, tensors: list[Tensor], *, whole: bool = False) -> Tensors:
    """out, lse, dq, dk and dv, computed as the schedule does. whole: all keys in one buffer."""
    q, k, v, dout, dlse, sinks = tensors
    wide, mask, score = acc_dtype(q.dtype), check.made(), check.score(q.device)
    score = replace(score, slopes=None if score.slopes is None else score.slopes.to(wide))
    buffers = [np.arange(check.keys)] if whole else check.buffers()
    q, dout, out = viewed(q), viewed(dout), viewed(torch.full_like(dout, torch.nan))
    lse = torch.full((check.heads + 1, check.queries + 8), torch.nan, dtype=wide, device=q.device)[1:, 4:-4]
    acc = out if wide == q.dtype else viewed(torch.full_like(dout, torch.nan, dtype=wide))
    if check.sinks:
        acc.zero_()
        lse.copy_(sinks[:, None].expand_as(lse))
    parts = [(at, viewed(k[torch.from_numpy(at)]), viewed(v[torch.from_numpy(at)])) for at in buffers]
    steps = [(*part, facts) for part in parts for facts in facts_of(mask, part[0], q.device)]
    for n, (_, keys, values, step) in enumerate(steps):
        first, last = n == 0 and not check.sinks, n == len(steps) - 1 and acc is not out
        sums = Sums(None if first and last else acc, lse, out if last else None, first)
        kernel.forward(Operands(q, keys, values, step, score), sums)
    unseen = lse == -torch.inf
    delta = (dout.to(wide) * out.to(wide)).sum(-1).t()
    if check.with_lse:
        delta = delta - dlse.to(wide).t().masked_fill(unseen, 0.0)
    dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
    final = None if check.with_lse else out
    for at, keys, values, step in steps:
        some = torch.zeros(len(at), check.kv_heads, check.dim + check.v_dim, dtype=wide, device=q.device)
        some_dk, some_dv = some.split([check.dim, check.v_dim], -1)
        grads = Grads(dout, lse, delta.contiguous(), final, dq, some_dk, some_dv)
        kernel.backward(Operands(q, keys, values, step, score), grads)
        dk[torch.from_numpy(at)] += some_dk
        dv[torch.from_numpy(at)] += some_dv
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


@dataclass(frozen=True)
class Sharded:
    """`seqpar.attention` on ranks that are threads and share the device."""

    transport: str
    dtype: torch.dtype
    lengths: tuple[int, ...]
    ranks: tuple[tuple[int, int], ...] = ((1, 1), (3, 1), (4, 2), (4, 4))  # and their Ulysses widths


def _verb(tiny: bool, machine: Machine) -> Iterator[Row]:
    sharded = [Sharded(t, d, VERB_LENGTHS) for d in SHIPPED for t in TRANSPORTS]
    if tiny:
        sharded = [Sharded("fetch", torch.float32, (37, 3, 20), ((1, 1), (2, 2)))]
    for one, found in zip(sharded, machine.spread(partial(_sharded, device=machine.device), sharded)):
        row = {"kernel": "auto", "mode": "check", "what": f"{one.transport}, {short(one.dtype)}", "baseline": "float64"}
        if not isinstance(found, dict):
            yield row | unable(found)
            continue
        worst = max(max(each.values()) for each in found.values())
        offs = {name: verdict(each, TOLERANCE[one.dtype]) for name, each in found.items()}
        off = "; ".join(f"{name}: {what}" for name, what in offs.items() if what)
        row |= {"ok": not off, "errors": found, "ratio": worst / TOLERANCE[one.dtype]}
        yield row | ({"refused": off} if off else {})


def _sharded(one: Sharded, device: torch.device) -> dict[str, dict[str, float]]:
    mask, heads = seqpar.Mask(one.lengths), (6, 2, 2, 6)
    draw = torch.Generator().manual_seed(0)
    wide = [torch.randn(mask.tokens, h, 64, generator=draw).to(one.dtype).double() for h in heads]
    expected = _dense(one.dtype, one.lengths, tuple(wide))
    result = {}
    for ranks, width in one.ranks:
        layout = seqpar.Layout.zigzag(one.lengths, ranks)
        plan = seqpar.Plan(mask, layout, transport=one.transport, ulysses=width)
        tensors = [x.to(device, one.dtype) for x in wide]
        got = run_threads(ranks, _one_rank, plan, tensors)[0]
        result[f"{ranks} ranks, Ulysses {width}"] = errors(got, expected)
    return result


@cache
def _dense(dtype: torch.dtype, lengths: tuple[int, ...], tensors: tuple[Tensor, ...]) -> Tensors:
    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    out, _ = dense_attention(*leaves, seqpar.Mask(lengths))
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *torch.autograd.grad(out, leaves, tensors[3]))))


def _one_rank(comm: seqpar.LocalComm, plan: seqpar.Plan, tensors: list[Tensor]) -> Tensors:
    q, k, v, dout = (seqpar.shard(x, plan, comm.rank) for x in tensors)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = seqpar.attention(*leaves, plan, comm)
    out.backward(dout)
    whole = [seqpar.unshard(x.detach(), plan, comm).cpu() for x in (out, *(x.grad for x in leaves))]
    return dict(zip(("out", "dq", "dk", "dv"), whole))


def _far(tokens: int, machine: Machine) -> Iterator[Row]:
    """A window over so many tokens that offsets exceed 32 bits; the last rows are compared with the oracle."""
    kernel = kernels().get("triton")
    row = {"kernel": "triton", "mode": "check", "what": f"window over {tokens} tokens", "baseline": "float64"}
    call = CallSpec(machine.device.type, 90, torch.bfloat16, 16, 16, 128, 128)
    reason = "triton is not installed" if kernel is None else kernel.refuses(call)
    if kernel is None or reason or machine.rehearsal:
        yield row | {"skipped": reason or "a rehearsal has no room for it"}
        return
    width, tail = 256, 2000
    problem = Problem(Setup("window", (tokens,), 16, 16, 128, 128, window=width), machine.device)
    got = {name: x[..., -tail:] if name == "lse" else x[-tail:]
           for name, x in OfKernel(kernel, problem).results(True).items()}  # fmt: skip
    end = Problem(Setup("window", (tail,), 16, 16, 128, 128, window=width), machine.device)
    end.q, end.k, end.v, end.dout = (x[-tail:] for x in (problem.q, problem.k, problem.v, problem.dout))
    expected = oracle(end, True)
    # left out: queries that see keys before the tail, and keys that such queries see
    inner = {name: (x[..., 2 * width :] if name == "lse" else x[2 * width :]) for name, x in expected.items()}
    found = errors({name: x[..., 2 * width :] if name == "lse" else x[2 * width :] for name, x in got.items()}, inner)
    off = verdict(found, TOLERANCE[torch.bfloat16])
    ratio = max(found.values()) / TOLERANCE[torch.bfloat16]
    yield row | {"ok": not off, "errors": found, "ratio": ratio} | ({"missed": off} if off else {})


def _sanitized(tool: str, machine: Machine) -> Iterator[Row]:
    row = {"kernel": "triton", "mode": "sanitizer", "what": tool, "baseline": None}
    found = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if machine.rehearsal or not found:
        yield row | {"skipped": "compute-sanitizer is not installed" if not found else "a rehearsal has no device"}
        return
    command = [found, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", "bench.gpu.correct"]
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # every tensor has its own bounds
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SANITIZER_SECONDS, env=env)
    except subprocess.TimeoutExpired:
        yield row | {"error": f"no answer within {SANITIZER_SECONDS} s"}
        return
    said = (done.stdout + done.stderr).strip()
    summary = [line for line in said.splitlines() if "SUMMARY" in line]
    if "not supported" in said or not summary or done.returncode not in (0, 9):
        yield row | {"skipped": f"exit code {done.returncode}: {said[-200:]}"}
    else:
        clean = done.returncode == 0
        yield row | {"ok": clean, "ratio": None, "said": summary[-1]} | ({} if clean else {"refused": said[-1000:]})


def launches() -> None:
    """A few small launches of every Triton attention kernel, whose results are not compared."""
    device = torch.device("cuda")
    for options in ({}, {"mask": "bounds", "splits": 2, "striped": True, **OPTIONS[-1]}):
        check = Check("triton", queries=200, keys=200, **options)
        tensors = inputs(check, device)
        run(_kernel(check, tensors)[0], check, tensors)
    torch.cuda.synchronize()


if __name__ == "__main__":
    launches()
