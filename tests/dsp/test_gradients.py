"""How gradients count at the end of a parallelized model, and outside of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from seqpar.comm import Comm
from seqpar.dsp import Space, gather, parallelize, split
from seqpar.testing import run_processes, run_threads
from seqpar.train import sync_gradients
from tests.dsp.cases import case, rand
from tests.dsp.models import SHARDED, WEATHER, Weather, compare_with_one, compared, made
from tests.dsp.passes import Checkpointed
from tests.dsp.planners import Planner, at_random, on_every_rank
from tests.ranks import error_of

GRID = rand(2, 5, 7, 3)


def weather(comm: Comm, planner: Planner = SHARDED, **options: object) -> nn.Module:
    """The model, parallel if there are several ranks."""
    model = made(Weather)
    if comm.size > 1:
        parallelize(model, comm, WEATHER, plan=planner, **options)
    return model


def rollout(a: nn.Module, b: nn.Module, x: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    out = a(a(x))
    return out, out.square().sum() / ranks


def residual(a: nn.Module, b: nn.Module, x: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """Steps so small that gradients by way of the second one hardly count, and a loss of each."""
    first = x + 1e-5 * a(x)
    second = first + 1e-5 * a(first)
    return second, (first.square().sum() + second.square().sum()) / ranks


def cascade(a: nn.Module, b: nn.Module, x: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    first = a(x)
    out = b(x=first * 2)
    return out, first.square().sum() / ranks + out.square().sum()


CHAINS = [rollout, residual, cascade]


def chained(comm: Comm, chain: Callable[..., tuple[Tensor, Tensor]], grad: str) -> dict[str, Tensor] | str:
    """Output and gradients, or the error of a backward pass."""
    a, b = weather(comm, grad=grad), weather(comm)
    x = GRID.clone().requires_grad_()
    out, loss = chain(a, b, x, comm.size if grad == "sum" else 1)
    if grad == "sum" or comm.size == 1:
        loss.backward()
        grads = {f"{name} {n}": p.grad for name, m in zip("ab", (a, b)) for n, p in m.named_parameters()}
        return {"out": out.detach(), "d x": x.grad} | {name: g for name, g in grads.items() if g is not None}
    said = error_of(loss.backward)
    torch.testing.assert_close(out, chain(made(Weather), made(Weather), GRID, 1)[0], rtol=0, atol=1e-10)
    return said


@pytest.mark.parametrize("chain", CHAINS)
def test_an_output_that_goes_into_a_parallel_model_has_shares_of_its_gradient(chain) -> None:
    compare_with_one(3, chained, chain, "sum")
    for said in run_threads(2, chained, chain, "replicated"):
        assert said.startswith(
            "NotImplementedError: dsp: each rank has a share of the gradient of the input of Weather"
        )
        assert 'give that model grad="sum", and divide by the number of ranks what' in said


def by_hand(comm: Comm) -> None:
    """A replicated gather in front of a parallel model."""
    model, space = weather(comm), Space({"h": 5}, comm)
    own = split(GRID, space, "b h w c", "h").clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="each rank has a share of the gradient"):
        model(gather(own, space, "b h w c", "h", grad="replicated")).sum().backward()


def test_a_replicated_gather_in_front_of_a_parallel_model_is_refused() -> None:
    run_threads(2, by_hand)


def beside(comm: Comm) -> dict[str, Tensor]:
    """A trainable encoder in front of the model, whose gradients are shares, and a head behind it, whose are whole."""
    model, encoder, head = weather(comm), made(nn.Linear, 3, 3), made(nn.Linear, 3, 2)
    out = head(model(encoder(GRID)))
    out.square().sum().backward()
    for part in (model, encoder):
        sync_gradients(part.parameters(), comm)
    parts = {"model": model, "encoder": encoder, "head": head}
    grads = {f"{name} {n}": p.grad for name, part in parts.items() for n, p in part.named_parameters()}
    return {"out": out.detach()} | grads


def test_parameters_outside_of_the_model() -> None:
    (want,) = run_threads(1, beside)
    for found in run_threads(3, beside):
        torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-10)


# names of cases, their planners, and how the last stage is wrapped
ENDS: dict[str, tuple[str, Planner, str]] = {
    "exit": ("weather", SHARDED, ""),
    "on every rank": ("weather", on_every_rank, ""),
    "grouped exit": ("core", SHARDED, ""),
    "last stage": ("pairs", SHARDED, ""),
    "last stage in a checkpoint": ("pairs", SHARDED, "checkpoint"),
    "last stage in a reentrant checkpoint": ("pairs", SHARDED, "reentrant"),
    "grid": ("core", partial(at_random(3, 2, "s")), ""),
}


def ended(comm: Comm, end: str, **options: object) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model that ends in one of these ways, parallel if there are several ranks or options, and its arguments."""
    name, planner, way = ENDS[end]
    model, spec, given = case(name)
    if comm.size > 1 or options:
        parallelize(model, comm, spec, plan=planner, **options)
    if way:
        model.layers[-1]["transition"] = Checkpointed(model.layers[-1]["transition"], way == "reentrant")
    return model, given


def losses(comm: Comm, end: str, how: str) -> list[str]:
    """The errors of two backward passes, each with a loss of the rank's own."""
    model, given = ended(comm, end)
    out = model(**given)
    own = out[:, comm.rank :: comm.size].sum() if how == "rows" else (1 + comm.rank) * out.square().sum()
    found = [error_of(own.backward, retain_graph=not last) for last in (False, True)]
    model(**given).sum().backward()  # the comm is as before
    return found


@pytest.mark.parametrize("how", ["rows", "factor"])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.sampled(5)
def test_losses_of_ranks_that_differ_are_refused(end, how) -> None:
    for both in run_threads(4 if end == "grid" else 2, losses, end, how):
        for error in both:
            assert "dsp: the gradient of the output of" in error and "between rank 0 and rank 1" in error
            assert 'compute the whole loss on every rank, from the same target, or give grad="sum"' in error


def test_losses_of_processes_that_differ_are_refused() -> None:
    first, second = run_processes(2, losses, "exit", "rows")
    assert first == second and len(first) == 2


def unchecked(comm: Comm) -> None:
    weather(comm, check_inputs=False)(GRID).sum().mul(1 + comm.rank).backward()


def test_gradients_are_compared_where_inputs_are() -> None:
    run_threads(2, unchecked)


def in_place(comm: Comm, end: str, average_over: int, grad: str) -> dict[str, Tensor]:
    """Numbers of an output that is changed, as a whole and in part."""
    model, given = ended(comm, end, average_over=average_over, grad=grad)
    return changed(model, given, comm.size if grad == "sum" else 1, average_over)


def changed(model: nn.Module, given: dict[str, Tensor], ranks: int = 1, times: int = 1) -> dict[str, Tensor]:
    given = {name: x.clone().requires_grad_() for name, x in given.items()}
    out = model(**given)
    out.mul_(3)
    out[:, 1:] += out[:, :1].detach()
    (out.square().sum() / ranks).backward()
    grads = {f"d {n}": x.grad for n, x in given.items()} | {n: p.grad for n, p in model.named_parameters()}
    return {"out": out.detach()} | {name.replace(".inner", ""): g / times for name, g in grads.items()}


@pytest.mark.parametrize("average_over, grad", [(1, "replicated"), (4, "replicated"), (1, "sum")])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.sampled(5)
def test_an_output_may_be_changed_in_place(end, average_over, grad) -> None:
    model, _, given = case(ENDS[end][0])
    want = changed(model, given)
    for ranks in (4,) if end == "grid" else (1, 3):
        compared(run_threads(ranks, in_place, end, average_over, grad), want)


def by_hand_in_place(comm: Comm) -> None:
    whole = rand(5, 3).requires_grad_()
    space = Space({"t": 5}, comm)
    out = gather(split(whole, space, "t c", "t"), space, "t c", "t", grad="replicated")
    out.mul_(3)
    out.sum().backward()
    expected = torch.zeros(5, 3).double()
    split(expected, space, "t c", "t").fill_(3)
    assert torch.equal(whole.grad, expected) and torch.equal(out, 3 * whole)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_gathered_by_hand_may_be_changed_in_place(ranks) -> None:
    run_threads(ranks, by_hand_in_place)
