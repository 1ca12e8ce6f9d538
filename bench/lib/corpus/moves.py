"""Cases of the verbs that move rows, and of local ones: switch, relayout, shard, unshard, merge, rotary."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

import seqpar
from seqpar import Comm, dsp
from seqpar.testing import run_processes, run_threads

from .attention import DTYPES
from .facts import LAYOUTS, LENGTHS, PlanCase
from .groups import Cases


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (x * 50).to(dtype) if not dtype.is_floating_point else x.to(dtype)


def with_gradient(y: Tensor, *leaves: Tensor) -> list[Tensor | None]:
    """Results of a call, and the gradients of leaves for a fixed gradient of the results."""
    if y.requires_grad:
        y.backward(numbers(tuple(y.shape), y.dtype, 11))
    return [y.detach(), *(x.grad for x in leaves)]


def switched(comm: Comm, shape: tuple[int, ...], dims: tuple[int, int], uneven: bool, dtype: torch.dtype) -> Any:
    split, concat = dims
    n = comm.size
    whole, shares = shape[split] * n, [shape[concat] + (r if uneven else 0) for r in range(n)]
    local = list(shape)
    local[split], local[concat] = whole, shares[comm.rank]
    x = numbers(tuple(local), dtype, comm.rank).requires_grad_(dtype.is_floating_point)
    parts = [shape[split] + ((1 if r else 1 - n) if uneven and shape[split] >= n else 0) for r in range(n)]
    y = seqpar.switch(x, comm, split_dim=split, concat_dim=concat, sizes=(parts, shares) if uneven else None)
    return with_gradient(y, x)


SHAPES = {"a": ((6, 4, 5), (0, 1)), "b": ((3, 7, 2, 4), (2, 1)), "c": ((1, 9), (1, 0)), "d": ((2, 3, 8, 2), (-2, 0))}
MOVED = {**DTYPES, "int64": torch.int64, "uint8": torch.uint8}


def switch() -> Cases:
    calls: Cases = {}
    for ranks in (1, 2, 3, 4, 8):
        for name, (shape, dims) in SHAPES.items():
            for uneven in (False, True):
                for dtype in MOVED if ranks == 3 else ("fp32",):
                    arguments = (switched, shape, dims, uneven, MOVED[dtype])
                    calls[f"{name} {ranks} ranks {dtype} {uneven}"] = partial(run_threads, ranks, *arguments)
    for comm in ("gloo", "shm"):
        call = partial(run_processes, 2, switched, *SHAPES["a"], True, torch.float32, comm=comm)
        calls[f"{comm} switch"] = call
    return calls


def relaid(comm: Comm, src: str, dst: str, lengths: str, dtype: torch.dtype) -> Any:
    before, after = (LAYOUTS[name](LENGTHS[lengths], comm.size) for name in (src, dst))
    x = numbers((before.tokens(comm.rank), 3, 5), dtype, comm.rank).requires_grad_(dtype.is_floating_point)
    return with_gradient(seqpar.relayout(x, comm, src=before, dst=after), x)


def unsharded(comm: Comm, case: PlanCase, dim: int, side: str, dtype: torch.dtype) -> Any:
    plan = case.plan()
    tokens = plan.mask.tokens if side == "q" else plan.mask.kv_tokens
    shape = (tokens, 3) if dim == 0 else (2, tokens)
    x = numbers(shape, dtype, 5).requires_grad_()
    mine = seqpar.shard(x, plan, comm.rank, dim=dim, side=side)
    return [mine.detach(), *with_gradient(seqpar.unshard(mine, plan, comm, dim=dim, side=side), x)]


def relayout() -> Cases:
    calls: Cases = {}
    for ranks in (2, 4, 7):
        for src in LAYOUTS:
            for dst in LAYOUTS:
                dtype = list(MOVED)[(len(calls)) % len(MOVED)]
                call = partial(run_threads, ranks, relaid, src, dst, "uneven", MOVED[dtype])
                calls[f"{src} -> {dst} {ranks} ranks {dtype}"] = call
    for comm in ("gloo", "shm"):
        arguments = (relaid, "zigzag", "scattered", "long", torch.float32)
        calls[f"{comm} relayout"] = partial(run_processes, 2, *arguments, comm=comm)
    return calls


def unshard() -> Cases:
    calls: Cases = {}
    for ranks in (1, 2, 3, 8):
        for layout in LAYOUTS:
            for dim, side, mask in ((0, "q", "causal"), (1, "q", "causal"), (0, "kv", "cross")):
                case = PlanCase(ranks, layout=layout, mask=mask, pads=2 if side == "q" and layout == "blocks" else 0)
                dtype = list(DTYPES)[len(calls) % 4]
                call = partial(run_threads, ranks, unsharded, case, dim, side, DTYPES[dtype])
                calls[f"{case} dim {dim} {side} {dtype}"] = call
    return calls


def merged(dtype: torch.dtype, blind: bool) -> Any:
    leaves = [numbers(shape, dtype, seed) for seed, shape in enumerate([(9, 4, 6), (9, 4), (9, 4, 6), (9, 4)])]
    if blind:
        leaves[1][2], leaves[3][2:5] = -torch.inf, -torch.inf
    leaves = [x.requires_grad_() for x in leaves]
    out, lse = seqpar.merge(*leaves)
    (out.sum() + lse.masked_fill(lse == -torch.inf, 0.0).sum()).backward()
    return [out, lse, *(x.grad for x in leaves)]


def turned(dtype: torch.dtype, interleaved: bool, scaling: float) -> Any:
    x = numbers((12, 3, 10), dtype, 1).requires_grad_()
    frequencies = torch.logspace(0, -2, 4, dtype=torch.float64).to(torch.float32)
    y = seqpar.rotary(x, torch.arange(12) * 3, frequencies, interleaved=interleaved, scaling=scaling)
    return with_gradient(y, x)


def merge() -> Cases:
    calls: Cases = {}
    for name, dtype in DTYPES.items():
        for flag in (False, True):
            calls[f"merge {name} {flag}"] = partial(merged, dtype, flag)
            calls[f"rotary {name} {flag}"] = partial(turned, dtype, flag, 1.0 + flag)
    return calls


FORMS = ("b t s c", "(b t) s c", "b (t s) c", "(b s) t c")


def staged(comm: Comm, form: str, grad: str, dtype: torch.dtype) -> Any:
    space = dsp.Space({"b": 2, "t": 5, "s": 7}, comm)
    sizes = {"b t s c": (2, 5, 7, 3), "(b t) s c": (10, 7, 3), "b (t s) c": (2, 35, 3), "(b s) t c": (14, 5, 3)}
    x = numbers(sizes[form], dtype, 4).requires_grad_()
    y = dsp.split(x, space, form, "t", grad=grad)
    switched = dsp.switch(y * 2, space, form, "t", "s")
    started = dsp.begin_switch([switched * 3, switched], space, [form, form], "s", "t")
    first, second = started.wait()
    back = dsp.switch_all([first, second], space, [form, form], "t", "s")[0]
    return [y.detach(), switched.detach(), *with_gradient(dsp.gather(back, space, form, "s", grad=grad), x)]


def stages() -> Cases:
    return {
        f"{form} {grad} {ranks} ranks {dtype}": partial(run_threads, ranks, staged, form, grad, DTYPES[dtype])
        for form in FORMS
        for grad in ("sum", "replicated")
        for ranks in (1, 2, 3, 8)
        for dtype in ("fp64", "fp32", "bf16")
    }
