"""`linear_attention` beside the definition on one device: families, layouts, states, gradients, isolation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import seqpar
from seqpar import recurrent
from seqpar.comm import Comm, LocalComm
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.ops.attention.source import Given, PlanSource
from seqpar.plan import Plan
from seqpar.testing import dense_linear_attention, relative_rms, run_threads
from tests.ops.recurrent.cases import (
    Family,
    on_a_rank,
    plan_of,
    put,
)


@pytest.mark.parametrize("kernel", ["reference", "chunked", "auto"])
@pytest.mark.parametrize("learned", ["q", "k", "decay"])
def test_a_rank_without_rows_where_one_input_alone_is_learned(kernel: str, learned: str) -> None:
    plan = Plan(Mask([5]), Layout([[0, 1, 2, 3, 4], []]))
    rng = torch.Generator().manual_seed(0)
    whole = {name: torch.randn(5, 2, 3, generator=rng, dtype=torch.float64) for name in "qkv"}
    whole["decay"] = -torch.rand(5, 2, generator=rng, dtype=torch.float64)

    def rank(comm: Comm) -> Tensor:
        own = {name: seqpar.shard(x, plan, comm.rank).requires_grad_(name == learned) for name, x in whole.items()}
        out = recurrent.linear_attention(*(own[n] for n in "qkv"), plan, comm, decay=own["decay"], kernel=kernel)
        out.sum().backward()
        return seqpar.unshard(own[learned].grad, plan, comm)

    expected = {name: x.clone().requires_grad_(name == learned) for name, x in whole.items()}
    dense_linear_attention(*(expected[n] for n in "qkv"), plan.mask, decay=expected["decay"])[0].sum().backward()
    for grad in run_threads(2, rank):
        torch.testing.assert_close(grad, expected[learned].grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rank_among_several_errs_no_more_than_one_alone(dtype) -> None:
    family, lengths, errors = Family("scalar", beta=True), (40, 90, 30), []
    weights = [torch.zeros(160, 4, 2, dtype=torch.float64), torch.zeros(3, 4, 3, 2, dtype=torch.float64)]
    q, k, v, decay, beta, _ = (None if x is None else x.double() for x in family.inputs(Mask(lengths), 0, dtype))
    expected, _ = dense_linear_attention(q, k, v, Mask(lengths), decay=decay, beta=beta)
    for ranks in (1, 3):
        plan, out = plan_of("zigzag", lengths, ranks), torch.zeros_like(expected)
        results = run_threads(ranks, on_a_rank, plan, family, 0, dtype, weights, {})
        for rank, (part, *_) in enumerate(results):
            put(out, part, plan, rank)
        errors.append(relative_rms(out, expected))
    assert errors[1] <= 1.2 * errors[0]


class Latest(PlanSource):
    """Looks up the plan that was last set."""

    def __init__(self) -> None:
        self.given = []

    def now(self, given: Sequence[Any], seed: int | None) -> Given:
        return Given(*self.given, None)


@pytest.mark.usefixtures("no_graphs")
@pytest.mark.parametrize("by", ["handle", "source"])
@pytest.mark.exhaustive
def test_one_graph_serves_all_plans(by) -> None:
    comm, source, counter = LocalComm(), Latest(), CompileCounterWithBackend("aot_eager")
    looked_up = seqpar.bind(source)

    def layer(x, weight, q, k, v, decay, beta, handle):
        y = recurrent.causal_conv1d(x, weight, None, handle, activation="silu")
        y = recurrent.shift(y, handle, by=1)
        scanned = recurrent.channel_scan(2 * x, x.square(), handle, rates=-weight, keys=weight[:1].expand(16, -1))
        scanned = scanned + recurrent.channel_scan(x, -x.square(), handle)
        return recurrent.linear_attention(q, k, v, handle, decay=decay, beta=beta).sum() + (y * y + scanned).sum()

    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for lengths in ((9, 7), (4, 4, 8), (16,)):
        plan = Plan(Mask(lengths), seqpar.Layout.contiguous(16, 1))
        source.given = [plan, comm]
        handle = seqpar.bind(plan, comm) if by == "handle" else looked_up
        results = []
        for function in (layer, compiled):
            rows = [x.requires_grad_() for x in Family(beta=True).inputs(plan.mask)[:5]]
            extra = [torch.linspace(-1, 1, 48, dtype=torch.float64).view(16, 3), torch.ones(3, 4, dtype=torch.float64)]
            extra = [x.requires_grad_() for x in extra]
            loss = function(*extra, *rows, handle)
            loss.backward()
            results.append([loss.detach(), *(x.grad for x in (*extra, *rows))])
        for eager, graph in zip(*results, strict=True):
            assert torch.equal(eager, graph)
    assert counter.frame_count == 1


@pytest.mark.usefixtures("no_graphs")
@pytest.mark.parametrize("graph", [False, True])
def test_the_handle_of_other_values_says_what_was_expected(graph) -> None:
    comm = LocalComm()
    function = torch.compile(recurrent.shift, backend="aot_eager", fullgraph=True) if graph else recurrent.shift
    with pytest.raises(ValueError, match=r"expected the handle of seqpar.bind\(plan, comm\), got that of"):
        function(torch.zeros(4, 2), seqpar.bind(comm))


def test_normalized_keys_and_queries() -> None:
    comm, mask, family = LocalComm.world(1)[0], Mask((9, 7)), Family(beta=True)
    plan = Plan(mask, seqpar.Layout.contiguous(16, 1))
    q, k, v, decay, beta, _ = family.inputs(mask)
    out = recurrent.linear_attention(q, k, v, plan, comm, decay=decay, beta=beta, normalize=True, scale=1.0)
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    expected, _ = dense_linear_attention(q, k, v, mask, decay=decay, beta=beta, scale=1.0)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


def test_the_oracle_is_attention_without_softmax() -> None:
    mask, family = Mask((5, 8)), Family("none")
    q, k, v, *_ = family.inputs(mask)
    rows = torch.arange(13)
    documents = torch.from_numpy(mask.documents(rows.numpy()))
    seen = (rows[:, None] >= rows) & (documents[:, None] == documents)
    q, k = (x.repeat_interleave(2, 1) for x in (q, k))
    expected = torch.einsum("ihk,jhk,ij,jhv->ihv", q, k, seen.double(), v) * 3**-0.5
    torch.testing.assert_close(dense_linear_attention(q, k, v, mask)[0], expected, rtol=1e-12, atol=1e-12)
    shrunk = replace(family, decay="scalar")
    q, k, v, decay, *_ = shrunk.inputs(mask)
    later = dense_linear_attention(q, k, v, mask, decay=decay - 80.0)[0]
    own = (q * k).sum(-1).repeat_interleave(2, 1)[..., None] * v * 3**-0.5
    torch.testing.assert_close(later, own, rtol=1e-12, atol=1e-12)


def forgetful(comm: Comm, channel: bool, delta: bool, kernel: str, travel: str) -> list[Tensor]:
    """Output and all gradients, where some tokens forget everything, or all but nothing of it."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(90, 2, 4, dtype=torch.float64, generator=g) for _ in range(3))
    decay = -torch.rand(90, 2, *[4] * channel, dtype=torch.float64, generator=g)
    for at, value in {3: -1e9, 20: -math.inf, 21: -math.inf, 40: -1e30, 70: -800.0}.items():
        decay[at] = value
    decay[50, 1] = -math.inf
    beta = torch.rand(90, 2, dtype=torch.float64, generator=g) if delta else None
    plan = Plan(Mask([80, 10]), seqpar.Layout.contiguous(90, comm.size))
    everything = [q, k, v, decay, *([] if beta is None else [beta])]
    if kernel == "oracle":
        leaves = [x.requires_grad_() for x in everything]
        own = dict(zip(("q", "k", "v", "decay", "beta"), leaves))
        out, _ = dense_linear_attention(**own, mask=plan.mask)
    else:
        leaves = [seqpar.shard(x, plan, comm.rank).requires_grad_() for x in everything]
        own = dict(zip(("q", "k", "v", "decay", "beta"), leaves))
        out = recurrent.linear_attention(**own, plan=plan, comm=comm, kernel=kernel, travel=travel)
    out.square().sum().backward()
    found = [out.detach(), *(x.grad for x in leaves)]
    return found if kernel == "oracle" else [seqpar.unshard(x, plan, comm) for x in found]


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("channel", [False, True])
@pytest.mark.parametrize("travel", ["gather", "chain", "pipeline", "rows"])
@pytest.mark.sampled(8)
def test_tokens_that_forget_everything(channel, delta, travel) -> None:
    expected = forgetful(LocalComm(), channel, delta, "oracle", travel)
    assert all(x.isfinite().all() for x in expected)
    for ranks in (1, 3):
        for kernel in ("auto", "chunked", "reference"):
            for got in run_threads(ranks, forgetful, channel, delta, kernel, travel):
                for x, y in zip(got, expected, strict=True):
                    torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


def test_decays_of_pads_are_not_checked() -> None:
    plan = Plan(Mask([6]), seqpar.Layout.contiguous(6, 2), rows=4)

    def rank(comm: Comm) -> None:
        x, decay, rates = torch.ones(4, 2), -torch.ones(4, 2), -torch.ones(2, 3)
        decay[3] = 1.0
        rows = x[..., None]
        assert recurrent.linear_attention(rows, rows, rows, plan, comm, decay=decay).isfinite().all()
        assert recurrent.channel_scan(x, decay, plan, comm).isfinite().all()
        keys = torch.ones(4, 3)
        assert recurrent.channel_scan(x, -decay, plan, comm, rates=rates, keys=keys, queries=keys).isfinite().all()
        decay[2] = 1.0
        with pytest.raises(ValueError, match="holds logarithms at or below 0, got 1.0"):
            recurrent.linear_attention(rows, rows, rows, plan, comm, decay=decay)
        with pytest.raises(ValueError, match="holds logarithms at or below 0, got 1.0"):
            recurrent.channel_scan(x, decay, plan, comm)

    run_threads(2, rank)


def test_decays_of_a_plans_first_layer_are_checked_without_a_check_of_every_call() -> None:
    def rank(comm: Comm) -> None:
        comm.check_every = "batch"
        plan = Plan(Mask([6]), seqpar.Layout.contiguous(6, 2))
        x, decay = torch.ones(3, 2), -torch.ones(3, 2)
        for growing in (decay.abs(), decay.neg().index_fill(0, torch.tensor([0, 1]), -1.0)):
            with pytest.raises(ValueError, match="holds logarithms at or below 0, got 1.0; give log"):
                recurrent.linear_attention(x[..., None], x[..., None], x[..., None], plan, comm, decay=growing)
            with pytest.raises(ValueError, match="holds logarithms at or below 0, got 1.0; give log"):
                recurrent.channel_scan(x, growing, plan, comm)
        assert recurrent.linear_attention(x[..., None], x[..., None], x[..., None], plan, comm).isfinite().all()
        assert recurrent.channel_scan(x, decay, plan, comm).isfinite().all()

    run_threads(2, rank)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kernel", ["auto", "native", "chunked", "reference"])
def test_no_values_of_a_delta_rule(kernel: str, ranks: int) -> None:
    plan = plan_of("zigzag", (9,), ranks)

    def rank(comm: Comm) -> bool:
        n = plan.rows(comm.rank)
        q, beta = torch.ones(n, 1, 3, requires_grad=True), torch.ones(n, 1, requires_grad=True)
        out = recurrent.linear_attention(
            q, q, torch.ones(n, 2, 0), plan, comm, beta=torch.cat([beta, beta], 1), kernel=kernel
        )
        out.sum().backward()
        return out.shape == (n, 2, 0) and not q.grad.any() and not beta.grad.any()  # type: ignore[union-attr]

    assert all(run_threads(ranks, rank))
