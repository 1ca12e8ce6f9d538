"""What a checkpoint recomputes: other calls than those of forward are an error, and nothing else is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed._composable import checkpoint as composable
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

import seqpar
from seqpar.comm import Comm, LocalComm
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.nn import save_attention
from seqpar.plan import Plan
from seqpar.testing import run_threads
from tests.recompute import in_a_thread

TOKENS = 12
LAYOUTS = [Layout.contiguous(TOKENS, 1), Layout([torch.arange(TOKENS).flip(0).numpy()])]
PLANS = [Plan(Mask([7, 5], causal=causal), LAYOUTS[0]) for causal in (True, False)]

Region = Callable[[Tensor], Tensor]
Run = Callable[[Region, Tensor], Tensor]


def rows(seed: int = 0, ranks: int = 1) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(TOKENS // ranks, 2, 4, dtype=torch.float64, generator=g).requires_grad_()


def attend(x: Tensor, plan: Plan | Tensor, comm: Comm | None = None, **options: Any) -> Tensor:
    return seqpar.attention(x.sin(), x, x, plan, comm, **options)


def plain(region: Region, x: Tensor) -> Tensor:
    return region(x)


def reentrant(region: Region, x: Tensor) -> Tensor:
    return checkpoint(region, x, use_reentrant=True)


def recorded(region: Region, x: Tensor, **options: Any) -> Tensor:
    return checkpoint(region, x, use_reentrant=False, **options)


class Module(nn.Module):
    """A region as a module."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.forward = region


def composed(region: Region, x: Tensor) -> Tensor:
    return composable(Module(region))(x)


def inside(outer: Run, inner: Run) -> Run:
    return lambda region, x: outer(partial(inner, region), x)


EACH = pytest.mark.parametrize("run", [reentrant, recorded, composed])
BOTH = pytest.mark.parametrize("run", [reentrant, recorded])
ANY = pytest.mark.parametrize(
    "run",
    [
        pytest.param(reentrant, id="reentrant"),
        pytest.param(recorded, id="not reentrant"),
        pytest.param(partial(recorded, early_stop=False), id="to the end"),
        pytest.param(inside(reentrant, reentrant), id="reentrant in reentrant"),
        pytest.param(inside(reentrant, recorded), id="not reentrant in reentrant"),
        pytest.param(inside(recorded, reentrant), id="reentrant in not reentrant"),
        pytest.param(inside(recorded, recorded), id="not reentrant in not reentrant"),
        pytest.param(inside(recorded, inside(recorded, reentrant)), id="three"),
        pytest.param(
            lambda region, x: checkpoint_sequential([region, nn.Identity()], 2, x, use_reentrant=True), id="sequence"
        ),
    ],
)


def changed(run: Run, region: Callable[[Tensor, int], Tensor]) -> None:
    """A region whose closure leads to another value by the time of its backward."""
    now, x = [0], rows()
    loss = run(lambda x: region(x, now[0]), x).square().sum()
    now[0] = 1
    loss.backward()


@ANY
def test_another_plan(run: Run) -> None:
    comm = LocalComm()
    with pytest.raises(RuntimeError, match="attention was recomputed under another plan"):
        changed(run, lambda x, n: attend(x, PLANS[n], comm))


@EACH
@pytest.mark.parametrize("name", ["scale", "softcap", "dropout_seed"])
def test_another_option(name: str, run: Run) -> None:
    comm, dropout = LocalComm(), 0.4 if name == "dropout_seed" else 0.0
    with pytest.raises(RuntimeError, match="attention was recomputed under another plan, dropout seed or scale"):
        changed(run, lambda x, n: attend(x, PLANS[0], comm, **{name: n + 1}, dropout_p=dropout))


@EACH
def test_another_move(run: Run) -> None:
    comm, plans = LocalComm(), [Plan(PLANS[0].mask, layout) for layout in LAYOUTS]
    moves: dict[str, Callable[[Tensor, int], Tensor]] = {
        "relayout .* another layout": lambda x, n: seqpar.relayout(x, comm, src=LAYOUTS[0], dst=LAYOUTS[n]),
        "unshard .* another plan": lambda x, n: seqpar.unshard(x, plans[n], comm),
        "fetch .* another plan": lambda x, n: seqpar.fetch(x, plans[n], comm),
        "switch .* another pair of dims": lambda x, n: seqpar.switch(x, comm, split_dim=n, concat_dim=2),
    }
    for message, move in moves.items():
        with pytest.raises(RuntimeError, match=message):
            changed(run, lambda x, n, move=move: move(x, n).exp())


@EACH
@pytest.mark.usefixtures("no_graphs")
def test_another_handle_of_a_compiled_function(run: Run) -> None:
    comm = LocalComm()
    handles = [seqpar.bind(plan, comm) for plan in PLANS]
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    assert_same(run, lambda x, n: compiled(x, handles[n]))
    with pytest.raises(RuntimeError, match="attention was recomputed under another plan"):
        changed(run, lambda x, n: compiled(x, handles[n]))


@BOTH
@pytest.mark.parametrize("check", ["batch", "call"])
@pytest.mark.parametrize("swapping", [[0, 1], [1]])
def test_every_rank_raises_also_for_the_plan_of_one(run: Run, swapping: list[int], check: str) -> None:
    plans = [Plan(plan.mask, Layout.contiguous(TOKENS, 2)) for plan in PLANS]
    compared_first = len(swapping) == 1 and check == "call"
    message = "ranks differ in plan" if compared_first else "recomputed under another plan"

    def rank(comm: Comm) -> None:
        comm.check_every = check
        for plan in plans:
            attend(rows(comm.rank, 2), plan, comm).sum().backward()  # all ranks know both
        now, x = [0], rows(comm.rank, 2)
        loss = run(lambda x: attend(x, plans[now[0]], comm), x).sum()
        now[0] = int(comm.rank in swapping)
        with pytest.raises((RuntimeError, ValueError), match=message):
            loss.backward()

    run_threads(2, rank)


def gradients(run: Run, region: Callable[[Tensor, int], Tensor], order: Sequence[int] = (0, 1)) -> list[Tensor]:
    """Of two runs of a region, 0 and 1, whose backward passes come in some order after both forwards."""
    xs = [rows(n) for n in (0, 1)]
    losses = [run(lambda x, n=n: region(x, n), x).square().sum() for n, x in enumerate(xs)]
    for n in order:
        losses[n].backward()
    return [x.grad for x in xs]


def assert_same(run: Run, region: Callable[[Tensor, int], Tensor], order: Sequence[int] = (0, 1)) -> None:
    """Gradients are those without a checkpoint."""
    expected = gradients(plain, region, order)
    torch.testing.assert_close(gradients(run, region, order), expected, rtol=1e-12, atol=1e-12)


@ANY
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_batches_with_their_own_plans_and_several_calls_in_a_region(run: Run, order: Sequence[int]) -> None:
    """Accumulated gradients, pipelines of micro-batches, and models that share a comm look alike from here."""
    comm = LocalComm()

    def region(x: Tensor, n: int) -> Tensor:
        x = attend(x, PLANS[n], comm) + attend(x, PLANS[1 - n], comm, scale=0.3)
        x = seqpar.relayout(x, comm, src=LAYOUTS[0], dst=LAYOUTS[n]).sin()
        return seqpar.switch(x, comm, split_dim=n, concat_dim=2).exp()

    assert_same(run, region, order)


@pytest.mark.parametrize("context", [save_attention, partial(create_selective_checkpoint_contexts, [])])
def test_selective_checkpoints(context: Callable[[], Any]) -> None:
    comm = LocalComm()
    run = partial(recorded, context_fn=context)
    assert_same(
        run, lambda x, n: seqpar.relayout(attend(x, PLANS[n], comm), comm, src=LAYOUTS[0], dst=LAYOUTS[n]).exp()
    )
    assert_same(inside(reentrant, run), lambda x, n: attend(x.cos(), PLANS[n], comm).exp())


@BOTH
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_before_training_and_between_forward_and_backward(run: Run, mode: Callable[[], Any]) -> None:
    comm = LocalComm()

    def evaluate() -> None:
        with mode():
            for plan in PLANS:
                run(partial(attend, plan=plan, comm=comm), rows())

    def evaluating(region: Region, x: Tensor) -> Tensor:
        evaluate()
        y = run(region, x)
        evaluate()
        return y

    assert_same(evaluating, lambda x, n: attend(x, PLANS[n], comm))


@BOTH
def test_what_a_region_computes_on_the_side(run: Run) -> None:
    """Statistics under no_grad that only forward takes, and attention inside of an inner gradient."""
    comm, forwards = LocalComm(), [0, 0]

    def region(x: Tensor, n: int) -> Tensor:
        forwards[n] += 1
        if forwards[n] % 2:
            with torch.no_grad():
                attend(x, PLANS[1 - n], comm)
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            attend(y, PLANS[n], comm).sum().backward()
        return attend(x + y.grad, PLANS[n], comm)

    def unevenly(region: Region, x: Tensor) -> Tensor:
        forwards[:] = 0, 0
        return run(region, x)

    assert_same(unevenly, region)


@ANY
def test_a_retained_graph_recomputes_twice(run: Run) -> None:
    comm = LocalComm()

    def region(x: Tensor, n: int) -> Tensor:
        return attend(attend(x, PLANS[n], comm), PLANS[1 - n], comm)

    def twice(run: Run) -> list[Tensor]:
        x = rows()
        loss = run(lambda x: region(x, 0), x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return x.grad

    torch.testing.assert_close(twice(run), twice(plain), rtol=1e-12, atol=1e-12)


@BOTH
def test_saved_tensors_that_hooks_move(run: Run) -> None:
    comm = LocalComm()

    def offloaded(region: Region, x: Tensor) -> Tensor:
        with save_on_cpu():
            return region(x)

    for hooked in (inside(offloaded, run), inside(run, offloaded)):
        assert_same(hooked, lambda x, n: attend(x, PLANS[n], comm).sin())


@BOTH
def test_a_backward_on_another_thread(run: Run) -> None:
    comm, x, expected = LocalComm(), rows(), rows()
    loss = run(lambda x: attend(x, PLANS[0], comm), x).square().sum()
    in_a_thread(loss.backward)
    attend(expected, PLANS[0], comm).square().sum().backward()
    torch.testing.assert_close(x.grad, expected.grad, rtol=1e-12, atol=1e-12)


@BOTH
def test_a_region_under_autocast(run: Run) -> None:
    comm = LocalComm()

    def low(region: Region, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return run(region, x)

    def region(x: Tensor, n: int) -> Tensor:
        q = x.float().flatten(1) @ torch.eye(8)
        assert q.dtype == torch.bfloat16
        return attend(q.unflatten(1, (2, 4)), PLANS[n], comm).double()

    got, expected = (gradients(low, region) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@BOTH
@pytest.mark.parametrize("first, again", [(-1.0, -2.0), (-1, -2), (0, 2**61 - 1)])
def test_options_of_one_hash_in_python_are_told_apart(run: Run, first: float, again: float) -> None:
    """Python's hashes of -1 and -2 are the same, and those of integers that differ by 2^61 - 1."""
    kinds = {float: lambda x: {"scale": x}, int: lambda x: {"dropout_p": 0.5, "dropout_seed": x}}
    comm, now = LocalComm(), kinds[type(first)](first)
    out = run(lambda x: attend(x, PLANS[0], comm, **now), rows())
    now = kinds[type(again)](again)
    with pytest.raises(RuntimeError, match="was recomputed under another"):
        out.sum().backward()
