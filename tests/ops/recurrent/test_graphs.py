"""Recurrent layers in graphs of compilers: branches, compiled autograd, a budget of memory, and changes in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import softplus

import seqpar
from seqpar import Comm, Layout, LocalComm, Mask, Plan, recurrent
from seqpar.testing import run_processes, run_threads
from seqpar.train import all_sum

pytestmark = pytest.mark.usefixtures("no_graphs")
LENGTHS = [5, 9]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


WEIGHT = drawn(8, 3, seed=1)


def heads(x: Tensor) -> Tensor:
    return x.view(-1, 2, 4)


def _gated(x: Tensor, plan: Any) -> Tensor:
    decay, beta = -softplus(heads(x).sum(-1)), torch.sigmoid(heads(x)[..., 0])
    out = recurrent.linear_attention(*[heads(x)] * 3, plan, decay=decay, beta=beta, normalize=True)
    return out.flatten(1)


def _linear(x: Tensor, plan: Any, **options: Any) -> Tensor:
    return recurrent.linear_attention(*[heads(x)] * 3, plan, **options).flatten(1)


VERBS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "convolution": lambda x, plan: recurrent.causal_conv1d(x, WEIGHT, None, plan),
    "scan": lambda x, plan: recurrent.channel_scan(x, -x.abs(), plan),
    "linear": _linear,
    "chunked": partial(_linear, kernel="chunked"),
    "pipeline": partial(_linear, travel="pipeline"),
    "gated": _gated,
    "attention": lambda x, plan: seqpar.attention(*[heads(x)] * 3, plan).flatten(1),
}


def branch(verb: Callable[[Tensor, Any], Tensor], x: Tensor, handle: Tensor) -> Tensor:
    return torch.cond(x.sum() > -1e9, lambda y: verb(y, handle) * 1, lambda y: y * 2, (x,))  # type: ignore[no-any-return]


def gradient(run: Callable[[Tensor], Tensor], own: Tensor) -> Tensor:
    x = own.clone().requires_grad_()
    run(x).square().sum().backward()
    assert x.grad is not None
    return x.grad


def step_of(verb: Callable[[Tensor, Any], Tensor], handle: Tensor) -> Callable[[Tensor], None]:
    def step(x: Tensor) -> None:
        verb(x, handle).square().sum().backward()

    return step


def on_a_rank(comm: Comm) -> dict[str, list[bool]]:
    plan = Plan(Mask(LENGTHS), Layout.contiguous(14, comm.size))
    handle, own = seqpar.bind(plan, comm), seqpar.shard(drawn(14, 8), plan, comm.rank)
    found = {}
    for name, verb in VERBS.items():
        torch._dynamo.reset()
        expected = gradient(lambda x, verb=verb: verb(x, handle), own)  # type: ignore[misc]
        branched = gradient(lambda x, verb=verb: branch(verb, x, handle), own)  # type: ignore[misc]
        x = own.clone().requires_grad_()
        with torch._dynamo.config.patch(compiled_autograd=True):
            torch.compile(step_of(verb, handle), backend="aot_eager")(x)
        found[name] = [torch.allclose(got, expected, rtol=1e-12, atol=1e-12) for got in (branched, x.grad)]
    return found


def test_backward_below_autograd_computes_gradients() -> None:
    """In branches and in compiled autograd, backward ops run where PyTorch records nothing by itself."""
    for found in run_processes(2, on_a_rank):
        assert found == {name: [True, True] for name in VERBS}


def budgeted(x: Tensor, weights: list[Tensor], handle: Tensor) -> Tensor:
    """Calls whose inputs are cheap to keep and whose results are cheap to make again, as partitioners think."""
    rows = [(x * (i + 1)).sin().unsqueeze(1) @ w.sin() for i, w in enumerate(weights)]
    small = [row.cumsum(-1).cos() for row in rows]
    outs = [seqpar.attention(heads(q), heads(row), heads(q) * 2, handle) for q, row in zip(small, rows[::-1])]
    outs.append(recurrent.causal_conv1d(small[0].flatten(1), WEIGHT, None, handle).unflatten(1, (2, 4)))
    whole = outs[0] * 0
    for i, out in enumerate(outs):
        whole = whole + (i + 1) * out * outs[(i * 3) % len(outs)].tanh()
    return whole + outs[1].sin()


def within_a_budget(comm: Comm, budget: float) -> list[bool]:
    found = []
    for rows in (1, 39):
        torch._dynamo.reset()
        plan = Plan(Mask([40]), Layout([range(rows), range(rows, 40)]))
        handle, results = seqpar.bind(plan, comm), []
        for run in (torch.compile(budgeted, backend="aot_eager", dynamic=False), budgeted):
            x = seqpar.shard(drawn(40, 8), plan, comm.rank).requires_grad_()
            weights = [drawn(8, 8, seed=i).requires_grad_() for i in range(5)]
            with functorch_config.patch(activation_memory_budget=budget):
                run(x, weights, handle).square().sum().backward()
            results.append([x.grad, *(w.grad for w in weights)])
        found += [torch.allclose(a, b, rtol=1e-10, atol=1e-10) for a, b in zip(*results)]
    return found


@pytest.mark.parametrize("budget", [0.1, 0.3])
@pytest.mark.sampled(2)
def test_a_budget_of_memory_repeats_no_call_in_backward(budget: float) -> None:
    """Sizes decide what a backward repeats, and ranks have other sizes."""
    for found in run_processes(2, within_a_budget, budget):
        assert len(found) == 12 and all(found)


CHANGED: dict[str, Callable[[Tensor, Any, Comm], Tensor]] = {
    "scan": lambda x, plan, _: VERBS["scan"](x, plan),
    "linear": lambda x, plan, _: VERBS["linear"](x, plan),
    "convolution": lambda x, plan, _: VERBS["convolution"](x, plan),
    "all_sum": lambda x, _, comm: all_sum(x * x, comm),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", CHANGED)
def test_results_may_be_changed_in_place(name: str, compiled: bool) -> None:
    comm, verb = LocalComm(), CHANGED[name]
    plan = Plan(Mask(LENGTHS), Layout.contiguous(14, 1))
    handle = seqpar.bind(plan, comm)

    def residual(x: Tensor) -> Tensor:
        y = verb(x, handle, comm)
        y += x
        return y.div_(2)

    own = drawn(14, 8)
    run = torch.compile(residual, backend="aot_eager") if compiled and name != "all_sum" else residual
    expected = gradient(lambda x: (verb(x, handle, comm) + x) / 2, own)
    torch.testing.assert_close(gradient(run, own), expected, rtol=1e-12, atol=1e-12)


MISTAKES: dict[str, tuple[Callable[[Tensor, Plan, Comm], object], str]] = {
    "fetch_all of None": (
        lambda x, plan, comm: seqpar.fetch_all(None if comm.rank else [x], plan, comm),  # type: ignore[arg-type]
        "fetch_all takes a sequence of at least one tensor",
    ),
    "v of None": (
        lambda x, plan, comm: recurrent.linear_attention(
            heads(x), heads(x), None if comm.rank else heads(x), plan, comm
        ),  # type: ignore[arg-type]
        "linear_attention: v takes a tensor, got NoneType None",
    ),
    "return_state of a tensor": (
        lambda x, plan, comm: recurrent.linear_attention(
            heads(x), heads(x), heads(x), plan, comm, return_state=x if comm.rank else False
        ),
        "Boolean value of Tensor",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_one_rank_is_told_to_all_and_the_comm_works_on(name: str) -> None:
    call, message = MISTAKES[name]

    def rank(comm: Comm) -> None:
        plan = Plan(Mask(LENGTHS), Layout.contiguous(14, comm.size))
        own = seqpar.shard(drawn(14, 8), plan, comm.rank)
        with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
            call(own, plan, comm)
        assert torch.equal(seqpar.unshard(own, plan, comm), drawn(14, 8))

    run_threads(2, rank)


def test_seeds_of_64_bits_are_the_same_in_a_graph() -> None:
    handle = seqpar.bind(Plan(Mask(LENGTHS), Layout.contiguous(14, 1)), LocalComm())
    q = heads(drawn(14, 8)).float()

    def attend(seed: int) -> Tensor:
        return seqpar.attention(q, q, q, handle, dropout_p=0.5, dropout_seed=seed)

    whole = torch.compile(attend, backend="aot_eager", dynamic=False)
    for seed in (2**63 + 5, 2**64 - 1, 2**70 + 5, 5):
        assert torch.equal(whole(seed), attend(seed))
    assert torch.equal(attend(2**70 + 5), attend(5)) and torch.equal(attend(2**64 - 1), attend(-1))


def test_halos_of_fake_tensors_are_refused_by_name() -> None:
    plan = Plan(Mask(LENGTHS), Layout.contiguous(14, 1))
    with FakeTensorMode(), pytest.raises(NotImplementedError, match="halo of fake tensors, whose number of rows"):
        recurrent.halo(torch.zeros(14, 8), plan, LocalComm(), reach=2)
