"""A check of slice `correct`: a compiled function whose parts are captured in CUDA graphs serves every plan.

The function is called with plans of equal shapes in turn, often enough that graphs are captured and replayed. A plan
that was frozen into a graph would give its own results under the other plan.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import seqpar
from bench.gpu.calls import TOLERANCE, Setup, errors, verdict
from bench.gpu.machine import Machine
from bench.gpu.rows import Row

CALLS = 6  # of each plan: inductor warms up, captures and replays


def layer(q: Tensor, k: Tensor, v: Tensor, handle: Tensor) -> Tensor:
    """Attention between operators that go into graphs."""
    return seqpar.attention(q.sin(), k, v.cos(), handle).exp()


def two_plans(setup: Setup, machine: Machine) -> Iterator[Row]:
    """The row of the check: one document and two halves of it, compiled beside uncompiled."""
    tokens, comm = setup.tokens, seqpar.LocalComm()
    layout = seqpar.Layout.contiguous(tokens, 1)
    plans = [seqpar.Plan(seqpar.Mask(lengths), layout) for lengths in ([tokens], [tokens // 2] * 2)]
    handles = [seqpar.bind(plan, comm) for plan in plans]
    draw = torch.Generator().manual_seed(0)
    shapes = ((setup.heads, setup.dim), (setup.kv_heads, setup.dim), (setup.kv_heads, setup.v_dim))
    wide = [torch.randn(tokens, *shape, generator=draw).to(machine.device, setup.dtype) for shape in shapes]
    # a rehearsal compiles nothing, as inductor takes half a minute on a CPU
    how = {"backend": "aot_eager"} if machine.rehearsal else {"mode": "reduce-overhead"}
    compiled, found = torch.compile(layer, **how), {}
    for call in range(CALLS):
        for name, handle in zip(("one document", "two"), handles):
            got, want = (_trained(function, wide, handle) for function in (compiled, layer))
            off = verdict(errors(got, want), TOLERANCE[setup.dtype])
            if off and name not in found:
                found[name] = f"call {call} with {name}: {off}"
    row = {"kernel": "auto", "mode": "check", "what": "two plans under reduce-overhead", "baseline": "uncompiled"}
    yield row | ({"ok": False, "refused": "; ".join(found.values())} if found else {"ok": True, "ratio": None})


def _trained(function: object, tensors: list[Tensor], handle: Tensor) -> dict[str, Tensor]:
    """Output and gradients, copied out of memory that a graph may write again."""
    torch.compiler.cudagraph_mark_step_begin()
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = function(*leaves, handle)  # type: ignore[operator]
    out.float().square().sum().backward()
    return {"out": out.detach().clone()} | {f"d{n}": x.grad.clone() for n, x in zip("qkv", leaves)}
