"""`attention` under plans of every kind, with all gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

import seqpar
from seqpar import Comm
from seqpar.testing import run_processes, run_threads

from .facts import PlanCase, drawn, named
from .groups import Cases, refused

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KERNELS = ("reference", "blockwise", "native", "aten")
LACKS = {"native": ("fp64", "fp16"), "aten": ("bf16", "fp16")}  # dtypes that a kernel refuses by name


@dataclass(frozen=True)
class Call:
    """A call of attention. more: options of the verb. The name alone determines all tensors."""

    plan: PlanCase
    dtype: str = "fp32"
    heads: tuple[int, int] = (8, 4)
    dims: tuple[int, int] = (16, 16)
    sinks: bool = False
    alibi: bool = False
    lse: bool = False
    grads: str = "qkv"
    more: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        flags = [f for f in ("sinks", "alibi", "lse") if getattr(self, f)]
        flags += [f"{k}={v}" for k, v in self.more] + ([] if self.grads == "qkv" else [f"grads {self.grads}"])
        return f"{self.plan} {self.dtype} {self.heads} {self.dims} {' '.join(flags)}".strip()


def normal(g: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)


def rank_of(comm: Comm, call: Call) -> list[Tensor | None]:
    """out, lse and gradients on one rank."""
    plan, dtype = call.plan.plan(), DTYPES[call.dtype]
    g = torch.Generator().manual_seed(3)
    (h, hk), (d, dv) = call.heads, call.dims
    n, m = plan.mask.tokens, plan.mask.kv_tokens
    shapes = {"q": (n, h, d), "k": (m, hk, d), "v": (m, hk, dv), "dout": (n, h, dv), "dlse": (n, h)}
    whole = {name: normal(g, dtype, *shape) for name, shape in shapes.items()}
    q, k, v, dout, dlse = (
        seqpar.shard(x, plan, comm.rank, side="kv" if name in "kv" else "q") for name, x in whole.items()
    )
    for x, name in ((q, "q"), (k, "k"), (v, "v")):
        x.requires_grad_(name in call.grads)
    options: dict[str, Any] = dict(call.more)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if call.sinks:
        options["sinks"] = torch.linspace(-1, 2, h, dtype=dtype).requires_grad_(
            "s" in call.grads or call.grads == "qkv"
        )
    if call.alibi:
        options["alibi_slopes"] = torch.logspace(-3, 0, h, base=2, dtype=wide)
    out, lse = seqpar.attention(q, k, v, plan, comm, return_lse=True, **options)
    if out.requires_grad:
        loss = (out * dout).sum()
        if call.lse:
            loss = loss + (lse.masked_fill(lse == -torch.inf, 0.0) * dlse).sum()
        loss.backward()
    leaves = [q, k, v, *([options["sinks"]] if call.sinks else [])]
    return [out.detach(), lse.detach(), *(x.grad for x in leaves)]


def alone() -> Iterator[Call]:
    """Cases of every option by itself."""
    base = Call(PlanCase(4, transport="ring"))
    for case in (base, replace(base, plan=PlanCase(4, widths=(2,))), replace(base, plan=PlanCase(1))):
        for dtype in DTYPES:
            yield replace(case, dtype=dtype)
            yield replace(case, dtype=dtype, heads=(4, 4), dims=(8, 24))
        for grads in ("", "q", "kv", "k"):
            yield replace(case, grads=grads)
        yield replace(case, sinks=True)
        yield replace(case, alibi=True)
        yield replace(case, lse=True)
        for more in (("softcap", 5.0), ("scale", 0.3), ("deterministic", False)):
            yield replace(case, more=(more,))
        yield replace(case, more=(("dropout_p", 0.25), ("dropout_seed", 12345678901)))


def cases() -> Cases:
    calls = [Call(plan) for plan in named()]
    calls += [Call(plan, "bf16", lse=True) for plan in named()[::4]]
    calls += alone()
    rng = np.random.default_rng(16)
    for _ in range(160):
        plan = drawn(rng)
        dropout = (("dropout_p", 0.2), ("dropout_seed", 99)) if rng.random() < 0.2 else ()
        softcap = (("softcap", 4.0),) if rng.random() < 0.2 else ()
        heads = ((8, 8), (8, 2), (6, 1), (7, 7), (4, 2))[rng.integers(5)]
        dims = ((16, 16), (8, 24), (32, 32), (20, 12))[rng.integers(4)]
        sinks, alibi, lse = (bool(x) for x in rng.random(3) < (0.25, 0.25, 0.5))
        calls.append(Call(plan, list(DTYPES)[rng.integers(4)], heads, dims, sinks, alibi, lse, more=dropout + softcap))
    return {str(call): partial(run_threads, call.plan.ranks, rank_of, call) for call in calls}


def kernels() -> Cases:
    """Cases of every kernel by name, and its errors for dtypes that it lacks."""
    calls: Cases = {}
    for kernel, dtype in product(KERNELS, DTYPES):
        for ranks, mask, sinks in ((1, "causal", False), (2, "window", True), (2, "full", False)):
            plan = PlanCase(ranks, transport="ring", mask=mask)
            call = Call(plan, dtype, sinks=sinks, lse=True, more=(("kernel", kernel),))
            case = partial(run_threads, ranks, rank_of, call)
            calls[str(call)] = partial(refused, case) if dtype in LACKS.get(kernel, ()) else case
    return calls


def processes() -> Cases:
    """A handful of cases on ranks that are processes."""
    calls = [
        Call(PlanCase(ranks, transport=transport, widths=(width,)), dtype, sinks=ranks == 2, lse=True)
        for ranks, transport, width, dtype in (
            (2, "fetch", 1, "fp32"), (2, "ring", 1, "bf16"), (2, "gather", 1, "fp64"), (2, "fetch", 2, "fp32"),
            (4, "double_ring", 1, "fp32"), (4, "fetch", 2, "bf16"),
        )
    ]  # fmt: skip
    return {
        f"{comm} {call}": partial(run_processes, call.plan.ranks, rank_of, call, comm=comm)
        for comm in ("gloo", "shm")
        for call in calls
    }
