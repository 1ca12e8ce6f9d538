"""Times every kernel beside torch's fused CPU operator: causal, 4,096 tokens, 4 heads of 64.

make bench ARGS="-k kernels"
"""

from __future__ import annotations

import pytest
import torch

from seqpar import Layout, Mask, Plan
from seqpar.kernels import KERNELS, CallSpec, Grads, Kernel, Operands, Score, Sums, acc_dtype
from seqpar.ops.attention.call import uploaded

TOKENS, HEADS, DIM = 4096, 4, 64
DTYPES = (torch.float32, torch.bfloat16)
FLOPS = 2 * 2 * HEADS * DIM * (TOKENS * (TOKENS + 1) // 2)  # two products of 2 D operations per pair
SCORE = Score(DIM**-0.5)


def inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(TOKENS, HEADS, DIM, generator=g).to(dtype) for _ in range(4)]


def cases() -> list[object]:
    """Every kernel with every dtype that it takes; the reference would hold the whole matrix of scores."""
    return [
        pytest.param(kernel, dtype, id=f"{kernel.name}-{str(dtype).removeprefix('torch.')}")
        for kernel in KERNELS
        for dtype in DTYPES
        if kernel.name != "reference" and kernel.refuses(CallSpec("cpu", 0, dtype, HEADS, HEADS, DIM, DIM)) is None
    ]


def step_facts():
    plan = Plan(Mask([TOKENS]), Layout.contiguous(TOKENS, 1))
    return uploaded(plan, plan.steps(0), torch.device("cpu")).facts[0][0]


def forward(kernel: Kernel, q, k, v, facts) -> tuple[torch.Tensor, torch.Tensor]:
    out, acc = torch.empty_like(q), acc_dtype(q.dtype)
    lse = torch.empty(HEADS, TOKENS, dtype=acc)
    wide = q.dtype == acc
    sums = Sums(out if wide else None, lse, None if wide else out, first=True)
    kernel.forward(Operands(q, k, v, facts, SCORE), sums)
    return out, lse


@pytest.mark.parametrize(("kernel", "dtype"), cases())
def test_forward(benchmark, kernel, dtype) -> None:
    q, k, v, _ = inputs(dtype)
    facts = step_facts()
    benchmark.pedantic(forward, (kernel, q, k, v, facts), rounds=5, warmup_rounds=1)
    benchmark.extra_info["flops"] = FLOPS


@pytest.mark.parametrize(("kernel", "dtype"), cases())
def test_backward(benchmark, kernel, dtype) -> None:
    q, k, v, dout = inputs(dtype)
    facts = step_facts()
    out, lse = forward(kernel, q, k, v, facts)
    delta = (dout.float() * out.float()).sum(-1).t().contiguous()
    grads = [torch.zeros(TOKENS, HEADS, DIM) for _ in range(3)]

    def backward() -> None:
        kernel.backward(Operands(q, k, v, facts, SCORE), Grads(dout, lse, delta, out, *grads))

    benchmark.pedantic(backward, rounds=5, warmup_rounds=1)
    benchmark.extra_info["flops"] = 5 * FLOPS // 2


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: str(t).removeprefix("torch."))
def test_torch_forward(benchmark, dtype) -> None:
    q, k, v = (x.transpose(0, 1)[None] for x in inputs(dtype)[:3])
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    benchmark.pedantic(operator, (q, k, v, 0.0, True), rounds=5, warmup_rounds=1)
    benchmark.extra_info["flops"] = FLOPS


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: str(t).removeprefix("torch."))
def test_torch_backward(benchmark, dtype) -> None:
    q, k, v, dout = (x.transpose(0, 1)[None] for x in inputs(dtype))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    benchmark.pedantic(operator, (dout, q, k, v, out, lse, 0.0, True), rounds=5, warmup_rounds=1)
    benchmark.extra_info["flops"] = 5 * FLOPS // 2
