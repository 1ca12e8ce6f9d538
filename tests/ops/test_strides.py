"""What ops of compiled graphs return has the strides that their fakes promise, which Inductor's code relies on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd

import seqpar
from seqpar import Layout, Mask, Plan, recurrent
from seqpar.comm import Comm
from seqpar.testing import run_threads

LENGTHS, HEADS, DIM = [40, 7, 18], 2, 8
Call = Callable[[list[Tensor], Tensor], Tensor]


class Promised(fx.Interpreter):
    """Runs a graph, and compares the strides of seqpar's results with those of the fakes."""

    def run_node(self, node: fx.Node) -> Any:
        results = super().run_node(node)
        if "seqpar." in str(node.target):
            for real, fake in zip(leaves(results), leaves(node.meta["val"]), strict=True):
                if real.numel():
                    assert real.stride() == fake.stride(), f"{node.target}: {real.stride()}, promised {fake.stride()}"
        return results


def leaves(results: Any) -> list[Tensor]:
    """All tensors of an op's results."""
    return [results] if isinstance(results, Tensor) else [x for each in results for x in leaves(each)]


def checking(graph: fx.GraphModule, _: object) -> Callable[..., Any]:
    graph.forward = Promised(graph, garbage_collect_values=False).run
    return graph


def linear(travel: str) -> Call:
    def call(x: list[Tensor], handle: Tensor) -> Tensor:
        q, k, v, decay, beta = x
        options = {"decay": -decay.exp(), "beta": beta.sigmoid(), "travel": travel}
        return recurrent.linear_attention(q, k, v, handle, **options)

    return call


def channels(travel: str) -> Call:
    return lambda x, handle: recurrent.channel_scan(x[0], -x[1].exp(), handle, travel=travel)


ROW, HEAD, CHANNELS = (HEADS,), (HEADS, DIM), (DIM,)
CASES: dict[str, tuple[Call, list[tuple[int, ...]]]] = {
    "linear, pipeline": (linear("pipeline"), [HEAD, HEAD, HEAD, ROW, ROW]),
    "linear, auto": (linear("auto"), [HEAD, HEAD, HEAD, ROW, ROW]),
    "channels, pipeline": (channels("pipeline"), [CHANNELS, CHANNELS]),
    "channels, auto": (channels("auto"), [CHANNELS, CHANNELS]),
    "shift": (lambda x, handle: recurrent.shift(x[0], handle), [HEAD]),
    "attention": (lambda x, handle: seqpar.attention(*x, handle), [HEAD, HEAD, HEAD]),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(4)
def test_results_have_the_strides_that_compilers_are_told(name: str) -> None:
    call, widths = CASES[name]
    for ranks in (1, 2):
        run_threads(ranks, compiled, call, widths, timeout=120.0)


def compiled(comm: Comm, call: Call, widths: list[tuple[int, ...]]) -> None:
    """Forward and backward of tensors whose rows lie apart, head by head, beside those that lie row after row."""
    plan = Plan(Mask(LENGTHS), Layout.contiguous(sum(LENGTHS), comm.size))
    handle, rows = seqpar.bind(plan, comm), plan.rows(comm.rank)
    draw = torch.Generator().manual_seed(comm.rank)
    dense = [torch.randn(rows, *width, generator=draw) for width in widths]
    apart = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in dense]
    function = torch.compile(call, backend=aot_autograd(fw_compiler=checking))
    for here, there in zip(graded(function, apart, handle), graded(call, dense, handle), strict=True):
        torch.testing.assert_close(here, there)


def graded(call: Call, tensors: list[Tensor], handle: Tensor) -> list[Tensor]:
    """The result and all gradients."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = call(leaves, handle)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


@pytest.mark.parametrize("kernel", ["native", "triton"])
def test_rows_that_lie_far_apart(kernel: str) -> None:
    """Queries, keys or an output's gradient that are one row in many of another tensor; of the rest nothing is read."""
    if kernel == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    ranks = 1 if kernel == "triton" else 2  # Triton's interpreter is for one thread
    plan = Plan(Mask([16]), Layout.contiguous(16, ranks))
    dense = torch.randn(4, 16, 2, 16, generator=torch.Generator().manual_seed(0))

    def rank(comm: Comm, far: int | None) -> list[Tensor]:
        q, k, v, dout = (x[plan.layout.positions(comm.rank)] for x in dense)
        tensors = [q, k, v, dout]
        if far is not None and comm.rank == ranks - 1:
            rows = len(q)
            tensors[far] = torch.empty(rows << 24).as_strided(q.shape, (1 << 24, 16, 1)).copy_(tensors[far])
        *leaves, dout = tensors
        leaves = [x.detach().requires_grad_() for x in leaves]
        out = seqpar.attention(*leaves, plan, comm, kernel=kernel)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    near = run_threads(ranks, rank, None)
    for far in range(4):
        for got, expected in zip(run_threads(ranks, rank, far), near, strict=True):
            for a, b in zip(got, expected, strict=True):
                assert torch.equal(a, b)
