"""Activation checkpoints: gradients are those without one, wherever backward runs and whatever surrounds it by then."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable
from torch.utils.checkpoint import checkpoint

import seqpar
from seqpar.comm import Comm, LocalComm
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.nn import Attention, save_attention
from seqpar.plan import Plan
from seqpar.testing import run_processes, run_threads
from tests.nn.decoder import Decoder, assert_together, decoder, loss_of, one_process, result, rows
from tests.recompute import Unknown, Whole, in_a_thread

pytestmark = pytest.mark.usefixtures("no_graphs")


def plan_of(ranks: int) -> Plan:
    """The plan of the model."""
    lengths = (9, 14, 5)
    return Plan(Mask(lengths), Layout.zigzag(lengths, ranks), transport="ring")


def other(plan: Plan) -> Plan:
    """A plan of the same shapes under which results are others."""
    return Plan(Mask([28], causal=False), plan.layout)


def checkpointed(reentrant: bool, **options: object) -> Callable[..., Tensor]:
    def run(layer: nn.Module, *arguments: object) -> Tensor:
        return checkpoint(layer, *arguments, use_reentrant=reentrant, **options)

    return run


WHERE = ("inside", "outside", "thread", "under another plan", "thread under another plan")
BY = ("surrounding", "bound", "handle", "objects")


def step(comm: Comm, plan: Plan, run: Callable[..., Tensor], by: str, where: str, make: Callable[[], Any]) -> Any:
    """A step whose plan comes ``by`` some way and whose backward runs somewhere."""
    model = make()
    ids, positions, labels = rows(plan, comm.rank)
    given = {"handle": (seqpar.bind(plan, comm),), "objects": (plan, comm)}.get(by, ())
    for layer in model.layers:
        if by == "bound":
            layer.attention.bind(plan, comm, seed=3)
    around = seqpar.parallel(plan, comm, seed=3) if by == "surrounding" else nullcontext()
    if where == "inside":
        with around:
            logits = model(ids, positions, *given, run=run)
            loss_of(logits, labels).backward()
        return result(model, logits, loss_of(logits, labels), plan.layout.tokens(comm.rank))
    with around:
        logits = model(ids, positions, *given, run=run)
        loss = loss_of(logits, labels)
    for layer in model.layers:
        if by == "bound" and "another" in where:
            layer.attention.bind(other(plan), comm, seed=4)

    def backward() -> None:
        with seqpar.parallel(other(plan), comm, seed=4) if "another" in where else nullcontext():
            loss.backward()

    in_a_thread(backward) if "thread" in where else backward()
    return result(model, logits, loss, plan.layout.tokens(comm.rank))


def dropping() -> Decoder:
    return decoder({"dropout": 0.3, "window": (5, None)}, {"dropout": 0.2})


def is_known(by: str, where: str) -> bool:
    """Whether what is recomputed knows the plan of its forward: it is given, or what was looked up is still there."""
    if by == "surrounding":
        return "thread" not in where
    return by in ("handle", "objects") or "another" not in where


UNKNOWN = "called again in a backward pass"


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.sampled(5)
def test_gradients_are_those_without_a_checkpoint_or_there_are_none(reentrant, by, where) -> None:
    plan = plan_of(2)
    make = dropping if by in ("surrounding", "bound") else decoder
    if is_known(by, where):
        results = run_threads(2, step, plan, checkpointed(reentrant), by, where, make)
        assert_together(plan, results, one_process(plan, make))
    else:
        with pytest.raises(RuntimeError, match=UNKNOWN):
            run_threads(2, step, plan, checkpointed(reentrant), by, where, make)


@pytest.mark.parametrize("by", ["handle", "objects"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.sampled(2)
def test_a_pipeline_of_micro_batches_with_plans_of_their_own(reentrant, by) -> None:
    """One forward, one backward: each backward comes after the forward of the next micro-batch."""

    def rank(comm: Comm, run: Callable[..., Tensor]) -> list[Tensor]:
        plans, model = [plan_of(2), other(plan_of(2)), plan_of(2)], decoder()
        losses = []
        for n, plan in enumerate([*plans, None]):
            if plan is not None:
                ids, positions, labels = rows(plan, comm.rank)
                given = (seqpar.bind(plan, comm),) if by == "handle" else (plan, comm)
                losses.append(loss_of(model(ids.roll(n), positions, *given, run=run), labels))
            if n:
                losses[n - 1].backward()
        return [p.grad for p in model.parameters()]

    expected = run_threads(2, rank, nn.Module.__call__)
    for got, want in zip(run_threads(2, rank, checkpointed(reentrant)), expected, strict=True):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def nested(layer: nn.Module, *arguments: object) -> Tensor:
    """Checkpoints of both kinds in each other."""

    def inner(x: Tensor, *rest: object) -> Tensor:
        return checkpoint(layer, x.sin(), *rest, use_reentrant=False) + x

    return checkpoint(lambda *x: checkpoint(inner, *x, use_reentrant=True).cos(), *arguments, use_reentrant=False)


def unnested(layer: nn.Module, x: Tensor, *rest: object) -> Tensor:
    return (layer(x.sin(), *rest) + x).cos()


def reentrant_in_reentrant(layer: nn.Module, *arguments: object) -> Tensor:
    def inner(x: Tensor, *rest: object) -> Tensor:
        return checkpoint(layer, x.sin(), *rest, use_reentrant=True) + x

    return checkpoint(inner, *arguments, use_reentrant=True).cos()


@pytest.mark.parametrize(
    ("run", "where"), [(nested, "inside"), (reentrant_in_reentrant, "inside"), (reentrant_in_reentrant, "outside")]
)
def test_checkpoints_in_checkpoints(run, where) -> None:
    plan = plan_of(2)
    expected = step(LocalComm(), Plan(plan.mask, Layout.contiguous(28, 1)), unnested, "surrounding", "inside", dropping)
    results = run_threads(2, step, plan, run, "surrounding", where, dropping)
    assert_together(plan, results, expected)


def test_processes() -> None:
    plan = plan_of(2)
    for reentrant in (False, True):
        results = run_processes(2, on_a_process, plan, reentrant)
        assert_together(plan, results, one_process(plan, dropping))


def on_a_process(comm: Comm, plan: Plan, reentrant: bool) -> Any:
    return step(comm, plan, checkpointed(reentrant), "surrounding", "inside", dropping)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_that_is_called_with_several_seeds(reentrant) -> None:
    (plan, comm), x, layer = (plan_of(1), LocalComm()), rows_of(plan_of(1)), Attention(dropout=0.4)

    def region(x: Tensor) -> Tensor:
        y = layer(x, x, x, seed=1)
        return layer(y, y, y, seed=2)

    grads = []
    for run in (region, lambda x: checkpoint(region, x, use_reentrant=reentrant)):
        with seqpar.parallel(plan, comm):
            run(x).square().sum().backward()
        grads.append(x.grad.clone())
        x.grad = None
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.sampled(3)
def test_functions_of_others_that_recompute(where) -> None:
    plan = plan_of(1)

    def run(layer: nn.Module, x: Tensor, *rest: Tensor) -> Tensor:
        return Whole.apply(lambda x: layer(x, *rest), x)

    gc.collect()  # threads of other tests, whose blocks might be meant
    if where == "thread under another plan":
        with pytest.raises(RuntimeError, match=UNKNOWN):
            step(LocalComm(), plan, run, "surrounding", where, dropping)
        return
    assert_together(plan, [step(LocalComm(), plan, run, "surrounding", where, dropping)], one_process(plan, dropping))


@pytest.mark.parametrize("reentrant", [False, True])
def test_two_models_whose_forwards_come_between_and_blocks_inside_what_is_recomputed(reentrant) -> None:
    """Backward runs in the other order, under neither's plan."""
    (plan, comm), models = (plan_of(1), LocalComm()), [Attention(dropout=0.3, layer=n) for n in range(2)]
    shared = Attention(dropout=0.2, layer=2)

    def grads(run: Callable[..., Tensor]) -> list[Tensor]:
        plans, outs, xs = [plan, other(plan)], [], [rows_of(plan) for _ in range(2)]

        def region(x: Tensor, n: int) -> Tensor:
            with seqpar.parallel(plans[n], comm, seed=n):
                x = models[n](x, x, x)
                with seqpar.parallel(plans[1 - n], comm, seed=7):
                    return x + shared(x, x, x)

        for n in range(2):
            outs.append(run(region, xs[n], n))
        for n in (1, 0):
            outs[n].square().sum().backward()
        return [x.grad for x in xs]

    expected = grads(lambda region, *given: region(*given))
    got = grads(lambda region, *given: checkpoint(region, *given, use_reentrant=reentrant))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def rows_of(plan: Plan) -> Tensor:
    g = torch.Generator().manual_seed(1)
    return torch.randn(plan.mask.tokens, 2, 4, dtype=torch.float64, generator=g).requires_grad_()


def test_a_recomputation_that_nobody_knows_of() -> None:
    (plan, comm), layer = (plan_of(1), LocalComm()), Attention()
    x = rows_of(plan)

    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return layer(x, x, x)

    (expected,) = torch.autograd.grad(layer(x, x, x, plan, comm).sum(), x)
    for run in (lambda x: Unknown.apply(lambda x: layer(x, x, x), x), composable(Block())):
        with seqpar.parallel(plan, comm):
            (got,) = torch.autograd.grad(run(x).sum(), x)
            assert torch.equal(got, expected)
            out = run(x)
        with seqpar.parallel(other(plan), comm):
            (got,) = torch.autograd.grad(out.sum(), x)
        assert torch.equal(got, expected)


def test_a_backward_that_comes_after_many_blocks() -> None:
    """As in pipelines that run all forwards first; blocks of plans that are gone do not count as theirs."""
    comm, layer, x = LocalComm(), Attention(), rows_of(plan_of(1))
    plans = [other(plan_of(1)) if n % 2 else plan_of(1) for n in range(40)]

    def total(run: Callable[..., Tensor]) -> Tensor:
        outs = []
        for plan in plans:
            with seqpar.parallel(plan, comm):
                outs.append(run(lambda x: layer(x, x, x), x))
        return torch.autograd.grad(sum(out.sum() for out in outs), x)[0]

    expected = total(lambda layer, x: layer(x))
    assert torch.equal(total(partial(checkpoint, use_reentrant=False)), expected)


def test_blocks_around_a_forward_and_around_its_backward() -> None:
    """Each backward finds the block of its forward, though others were open inside of it or are now."""
    (plan, comm), layer, x = (plan_of(1), LocalComm()), Attention(), rows_of(plan_of(1))
    others = other(plan)

    def forward() -> Tensor:
        return checkpoint(lambda x: layer(x, x, x), x, use_reentrant=True).sum()

    def grad(out: Tensor) -> Tensor:
        x.grad = None
        out.backward(retain_graph=True)
        return x.grad

    def expected(plan: Plan) -> Tensor:
        return torch.autograd.grad(seqpar.attention(x, x, x, plan, comm).sum(), x)[0]

    with seqpar.parallel(plan, comm):
        with seqpar.parallel(others, comm):
            inner = forward()
        outer = forward()
        assert torch.equal(grad(outer), expected(plan))
        assert torch.equal(grad(inner), expected(others))
    with seqpar.parallel(others, comm):
        assert torch.equal(grad(outer), expected(plan))
    with seqpar.parallel(Plan(plan.mask, plan.layout), comm):
        out = forward()
    gc.collect()
    with pytest.raises(RuntimeError, match=UNKNOWN):
        out.backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_that_is_bound_anew_before_its_backward(reentrant) -> None:
    (plan, comm), layer, x = (plan_of(1), LocalComm()), Attention(), rows_of(plan_of(1))
    layer.bind(plan, comm)
    for change in (lambda: layer.bind(other(plan), comm), layer.unbind):
        out = checkpoint(lambda x: layer(x, x, x), x, use_reentrant=reentrant)
        change()
        with pytest.raises(RuntimeError, match=UNKNOWN), seqpar.parallel(plan, comm):
            out.sum().backward()


CHANGES: dict[str, Callable[[Attention], object]] = {
    "seed": lambda layer: 4,
    "scale": lambda layer: setattr(layer, "scale", 0.3),
    "softcap": lambda layer: setattr(layer, "softcap", 2.0),
    "dropout": lambda layer: setattr(layer, "dropout", 0.2),
    "eval": lambda layer: layer.eval() and None,
}


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_what_else_changes_before_it_is_recomputed_is_noticed(reentrant, change, given) -> None:
    (plan, comm), x, layer, now = (plan_of(1), LocalComm()), rows_of(plan_of(1)), Attention(dropout=0.4), [3]
    call = (plan, comm) if given else ()
    with seqpar.parallel(plan, comm):
        out = checkpoint(lambda x: layer(x, x, x, *call, seed=now[0]), x, use_reentrant=reentrant)
        now[0] = CHANGES[change](layer) or now[0]
        with pytest.raises(RuntimeError, match="recomputed under another plan, dropout seed or scale"):
            out.sum().backward()


def test_a_seed_that_nothing_uses_may_change() -> None:
    (plan, comm), x, layer, now = (plan_of(1), LocalComm()), rows_of(plan_of(1)), Attention(), [3]
    out = checkpoint(lambda x: layer(x, x, x, plan, comm, seed=now[0]), x, use_reentrant=True)
    now[0] = 4
    out.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_calls_that_change_places_are_noticed_where_places_are_known(reentrant) -> None:
    (plan, comm), x = (plan_of(1), LocalComm()), rows_of(plan_of(1))
    plans = [plan, other(plan)]

    def region(x: Tensor) -> Tensor:
        for each in plans:
            x = seqpar.attention(x, x, x, each, comm)
        return x

    out = checkpoint(region, x, use_reentrant=reentrant)
    plans.reverse()
    with nullcontext() if reentrant else pytest.raises(RuntimeError, match="recomputed under another plan"):
        out.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("by", ["surrounding", "bound", "handle"])
@pytest.mark.exhaustive
def test_compiled_layers_in_checkpoints(reentrant, by) -> None:
    plan, options = plan_of(1), {} if by == "handle" else {"dropout": 0.3, "window": (5, None)}

    def make() -> Decoder:
        model = decoder(options)
        model.layers[0].compile(backend="aot_eager", fullgraph=True)
        return model

    where = "thread under another plan" if by == "handle" else "inside"
    found = step(LocalComm(), plan, checkpointed(reentrant), by, where, make)
    assert_together(plan, [found], one_process(plan, lambda: decoder(options)))


@pytest.mark.parametrize("by", ["surrounding", "bound", "handle"])
@pytest.mark.parametrize("options", [{}, {"context_fn": save_attention}])
@pytest.mark.exhaustive
def test_checkpoints_in_a_compiled_model(by, options) -> None:
    """Each layer is recomputed by the compiled backward, the last one first."""
    plan = plan_of(1)
    make = dropping if by != "handle" else decoder

    def compiled() -> Any:
        model = make()
        eager, run = model.forward, checkpointed(False, **options)
        forward = torch.compile(lambda *x: eager(*x, run=run), backend="aot_eager", fullgraph=True)
        model.forward = lambda *x, run: forward(*x)
        return model

    where = "under another plan" if by == "handle" or options else "inside"
    found = step(LocalComm(), plan, nn.Module.__call__, by, where, compiled)
    assert_together(plan, [found], one_process(plan, make))


@pytest.mark.parametrize("by", ["handle", "objects"])
def test_what_was_bound_in_inference_mode_is_saved_in_training(by) -> None:
    (plan, comm), x, layer = (plan_of(1), LocalComm()), rows_of(plan_of(1)), Attention()
    with torch.inference_mode():
        handle = seqpar.bind(plan, comm)
    given = (handle,) if by == "handle" else (plan, comm)

    def region(x: Tensor, *given: object) -> Tensor:
        return layer(x, x, x, *given)

    def run(x: Tensor, *given: object) -> Tensor:
        return checkpoint(region, x, *given, use_reentrant=False)

    (expected,) = torch.autograd.grad(region(x, plan, comm).sum(), x)
    for each in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        (got,) = torch.autograd.grad(each(x, *given).sum(), x)
        assert torch.equal(got, expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_attention_that_needs_no_gradient_is_recomputed_under_its_plan(reentrant) -> None:
    """Nothing of it is in the graph, yet what comes after it in the checkpoint depends on it."""
    (plan, comm), layer, linear = (plan_of(1), LocalComm()), Attention(), nn.Linear(4, 1).double()
    x, seen = rows_of(plan).detach(), torch.zeros((), dtype=torch.float64, requires_grad=True)

    def region(x: Tensor, seen: Tensor) -> Tensor:
        return linear(layer(x, x, x)) + seen

    def grad(run: Callable[..., Tensor], *around: Plan) -> Tensor:
        linear.zero_grad()
        with seqpar.parallel(plan, comm):
            out = run(x, seen).square().sum()
            with seqpar.parallel(*around, comm) if around else nullcontext():
                out.backward()
        return linear.weight.grad.clone()

    def checkpointed(*x: Tensor) -> Tensor:
        return checkpoint(region, *x, use_reentrant=reentrant)

    torch.testing.assert_close(grad(checkpointed), grad(region), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad(checkpointed, other(plan)), grad(region), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("by", BY)
@pytest.mark.sampled(5)
def test_saved_attention_is_exact(by, where) -> None:
    plan = plan_of(2)
    make = dropping if by in ("surrounding", "bound") else decoder
    results = run_threads(2, step, plan, checkpointed(False, context_fn=save_attention), by, where, make)
    assert_together(plan, results, one_process(plan, make))


def bytes_sent(comm: Comm, plan: Plan, run: Callable[..., Tensor]) -> int:
    step(comm, plan, run, "surrounding", "inside", decoder)
    return comm.stats.bytes_sent


@pytest.mark.parametrize("ulysses", [1, 2])
def test_saved_attention_is_not_communicated_again(ulysses) -> None:
    plan = Plan(Mask([28]), Layout.zigzag([28], 2), ulysses=ulysses, transport="ring")
    plain, again, saved = (
        run_threads(2, bytes_sent, plan, run)
        for run in (nn.Module.__call__, checkpointed(False), checkpointed(False, context_fn=save_attention))
    )
    assert plain == saved
    assert all(more > once for more, once in zip(again, plain, strict=True))
