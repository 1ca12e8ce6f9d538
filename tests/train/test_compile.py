"""Sums over ranks in compiled models, and what is not compiled: messages, and the sums of gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

import seqpar
from seqpar.comm import Comm, LocalComm, Tag
from seqpar.testing import run_processes
from seqpar.train import all_sum, clip_grad_norm, sync_gradients, token_mean

pytestmark = pytest.mark.usefixtures("no_graphs")


def statistics(x: Tensor, comm: Comm) -> Tensor:
    """What a balance loss of a mixture of experts computes: sums over ranks of what depends on a rank's rows."""
    keep = x[:, 0] > 0
    mean = token_mean(x.sin(), comm, keep=keep)
    return (all_sum((x * mean).sum(0), comm).cos() * mean).sum()


def gradients(function: Callable[[Tensor, Comm], Tensor], rows: int, comm: Comm) -> list[Tensor]:
    x = torch.randn(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * rows + comm.rank))
    x.requires_grad_()
    (function(x, comm) / comm.size).backward()
    return [function(x.detach(), comm), x.grad]


def sums_on_a_rank(comm: Comm) -> tuple[list[tuple[Tensor, Tensor]], int]:
    """Compiled beside eager, for batches of several sizes; and the number of graphs."""
    handle = seqpar.bind(comm)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(statistics, backend=counter, fullgraph=True)
    pairs = []
    for rows in (5, 6, 9):
        pairs += zip(*(gradients(f, rows + comm.rank, comm) for f in (compiled, statistics)), strict=True)
    del handle
    return pairs, counter.frame_count


def test_sums_in_a_compiled_model_are_those_of_eager_mode() -> None:
    for pairs, graphs in run_processes(2, sums_on_a_rank):
        for got, expected in pairs:
            assert torch.equal(got, expected) and got.abs().sum() > 0
        assert graphs <= 4  # with a gradient and without; the first number of rows is taken for a constant


def test_a_sum_is_a_proper_op() -> None:
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    comm = LocalComm()
    handle = seqpar.bind(comm)
    opcheck(torch.ops.seqpar.all_sum, ([x], [handle], [True]))


def test_a_comm_without_a_handle_names_bind() -> None:
    with pytest.raises(Exception, match=r"without a handle; call seqpar\.bind"):
        torch.compile(all_sum, backend="aot_eager", fullgraph=True)(torch.ones(2), LocalComm())


def derivatives(comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
    """The second derivative of a sum, and the gradient after one and after two passes through one graph."""
    x = torch.full((3,), 1.0 + comm.rank, dtype=torch.float64, requires_grad=True)
    share = (all_sum(x**3, comm) / comm.size).sum()
    (once,) = torch.autograd.grad(share, x, create_graph=True)
    (second,) = torch.autograd.grad(once.sum(), x, retain_graph=True)
    (again,) = torch.autograd.grad(share, x)
    return second, once.detach(), again


def test_a_sum_has_second_derivatives_and_several_backward_passes() -> None:
    for rank, (second, once, again) in enumerate(run_processes(3, derivatives)):
        x = torch.full((3,), 1.0 + rank, dtype=torch.float64)
        torch.testing.assert_close(once, 3 * x**2)
        torch.testing.assert_close(again, once)
        torch.testing.assert_close(second, 6 * x)


def step(net: nn.Module, x: Tensor, comm: Comm) -> tuple[Tensor, Tensor, int]:
    """A step of training with what compiled functions may surround: a sum of gradients, and messages of its own."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    arrived = torch.empty_like(x)
    work = comm.exchange({after: [x]}, {before: [arrived]}, tag=Tag(1, comm.next_call(), 0, 0, "a test"))
    net(x.sin()).square().sum().backward()
    sync_gradients(net.parameters(), comm)
    norm = clip_grad_norm(net.parameters(), 0.5)
    comm.agree("a test", {"step": 1})
    work.wait()
    return norm, arrived.cos(), sum(comm.gather("a test", comm.rank))


def steps_on_a_rank(comm: Comm) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Gradients and results of compiled and of eager steps."""
    torch.manual_seed(0)
    net = nn.Linear(4, 3).double()
    compiled = torch.compile(step, backend="aot_eager")
    found = []
    for seed in range(3):
        x = torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * seed + comm.rank))
        sides = []
        for function in (compiled, step):
            net.zero_grad()
            norm, arrived, total = function(net, x, comm)
            sides.append([norm, arrived, torch.tensor(total), *(p.grad for p in net.parameters())])
        found.append((sides[0], sides[1]))
    return found


def test_a_compiled_step_sums_gradients_and_sends_messages_between_its_graphs() -> None:
    for found in run_processes(2, steps_on_a_rank):
        for got, expected in found:
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
