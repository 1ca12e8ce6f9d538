"""Layers in compiled models: one graph, and at most one more, for all plans, wherever they come from."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import seqpar
from seqpar.comm import Comm, LocalComm
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.nn import Attention, MultiheadAttention
from seqpar.plan import Plan
from seqpar.testing import run_processes
from tests.nn.decoder import Decoder, decoder, loss_of, rows

pytestmark = pytest.mark.usefixtures("no_graphs")


def plans(ranks: int, count: int) -> list[Plan]:
    """Batches of all sizes, some twice in a row under other plans."""
    made = []
    for n in range(count):
        lengths = [5 + n // 2, 9, 3 * (n // 4) + 1]
        layout = (Layout.zigzag(lengths, ranks), Layout.contiguous(sum(lengths), ranks))[n % 2]
        transport, ulysses = ("fetch", "ring", "gather")[n % 3], (1, ranks)[n // 2 % 2]
        made.append(Plan(Mask(lengths), layout, transport=transport, ulysses=ulysses))
    return made


def train(model: Decoder, plan: Plan, comm: Comm, by: str) -> list[torch.Tensor]:
    """Logits and gradients of a step."""
    model.zero_grad()
    ids, positions, labels = rows(plan, comm.rank)
    given = {"handle": (seqpar.bind(plan, comm),), "objects": (plan, comm)}.get(by, ())
    for layer in model.layers:
        if by == "bound":
            layer.attention.bind(plan, comm, seed=plan.mask.tokens)
    if by == "objects":
        seqpar.bind(plan, comm)
    with seqpar.parallel(plan, comm, seed=plan.mask.tokens) if by == "surrounding" else nullcontext():
        logits = model(ids, positions, *given)
    loss_of(logits, labels).backward()
    return [logits.detach(), *(p.grad.clone() for p in model.parameters())]


def compare(comm: Comm, by: str, count: int) -> int:
    """How many graphs a layer takes for these batches, forward and backward; results are those of eager mode."""
    options = {"window": (4, None), "dropout": 0.0 if by in ("handle", "objects") else 0.3}
    eager, compiled = decoder(options), decoder(options)
    counters = []
    for layer in compiled.layers:
        counters.append(CompileCounterWithBackend("aot_eager"))
        layer.compile(backend=counters[-1], fullgraph=True)
    kept = []
    for plan in plans(comm.size, count):
        kept.append(plan)
        for got, expected in zip(train(compiled, plan, comm, by), train(eager, plan, comm, by), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
    return max(counter.frame_count for counter in counters)


@pytest.mark.parametrize("by", ["surrounding", "bound", "handle", "objects"])
@pytest.mark.sampled(4)
def test_a_decoder_layer_is_compiled_at_most_once_more(by) -> None:
    assert compare(LocalComm(), by, 20) <= 2


def on_a_rank(comm: Comm) -> int:
    torch._dynamo.reset()
    return compare(comm, "surrounding", 6)


@pytest.mark.exhaustive
def test_processes() -> None:
    assert max(run_processes(2, on_a_rank)) <= 2


@pytest.mark.exhaustive
def test_inductor() -> None:
    comm, counter, layer = LocalComm(), CompileCounterWithBackend("inductor"), Attention(window=(3, None))
    run = torch.compile(lambda q: layer(q.sin(), q, q).cos(), backend=counter, fullgraph=True)
    for plan in plans(1, 6):
        q = torch.randn(plan.rows(0), 2, 4, requires_grad=True)
        torch._dynamo.mark_dynamic(q, 0)
        with seqpar.parallel(plan, comm):
            (grad,) = torch.autograd.grad(run(q).square().sum(), q)
            (expected,) = torch.autograd.grad(layer(q.sin(), q, q).cos().square().sum(), q)
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1


def test_nested_blocks_and_bindings_take_no_graph_of_their_own() -> None:
    comm, counter, layer = LocalComm(), CompileCounterWithBackend("aot_eager"), Attention()
    run, q = torch.compile(layer, backend=counter, fullgraph=True), torch.randn(14, 2, 4)
    one, two = (Plan(Mask([5, 9], causal=causal), Layout.contiguous(14, 1)) for causal in (True, False))
    wanted = [seqpar.attention(q, q, q, plan, comm) for plan in (one, two)]
    with pytest.raises(RuntimeError, match="no plan surrounds"):
        run(q, q, q)
    with seqpar.parallel(one, comm):
        assert torch.equal(run(q, q, q), wanted[0])
        with seqpar.parallel(two, comm):
            assert torch.equal(run(q, q, q), wanted[1])
            layer.bind(one, comm)
            assert torch.equal(run(q, q, q), wanted[0])
    assert counter.frame_count == 1


def test_a_step_seed_that_is_given_is_data() -> None:
    comm, counter, layer = LocalComm(), CompileCounterWithBackend("aot_eager"), Attention(dropout=0.5)
    run, q = torch.compile(layer, backend=counter, fullgraph=True), torch.randn(14, 2, 4)
    handle = seqpar.bind(Plan(Mask([14]), Layout.contiguous(14, 1)), comm)
    for seed in range(3, 9):
        assert torch.equal(run(q, q, q, handle, seed=seed), layer(q, q, q, handle, seed=seed))
    assert counter.frame_count <= 2


@pytest.mark.exhaustive
def test_a_compiled_function_may_surround_its_layers_with_a_new_plan() -> None:
    comm, layer, q = LocalComm(), Attention(), torch.randn(14, 2, 4)

    def run(plan: Plan) -> Tensor:
        with seqpar.parallel(plan, comm):
            return layer(q.sin(), q, q)

    compiled = torch.compile(run, backend="eager")
    for lengths in ([9, 5], [14]):
        plan = Plan(Mask(lengths), Layout.contiguous(14, 1))
        torch.testing.assert_close(compiled(plan), run(plan))


def test_autocast_in_a_compiled_layer() -> None:
    comm, counter = LocalComm(), CompileCounterWithBackend("aot_eager")
    module = MultiheadAttention(8, 2)
    run = torch.compile(lambda x: module(x, x, x, need_weights=False)[0], backend=counter, fullgraph=True)
    for plan in plans(1, 6):
        x = torch.randn(plan.rows(0), 8, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16), seqpar.parallel(plan, comm):
            out, expected = run(x), module(x, x, x, need_weights=False)[0]
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
        out.sum().backward()
    assert counter.frame_count <= 2
