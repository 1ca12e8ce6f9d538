"""Recurrent verbs under autocast: what torch casts on one device is cast, and sums stay wide."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d

import seqpar
from seqpar import recurrent
from seqpar.comm import Comm, LocalComm
from seqpar.facts.mask import Mask
from seqpar.plan import Plan
from seqpar.testing import relative_rms, run_threads
from tests.ops.recurrent.cases import Family, plan_of, put

DTYPES = (torch.bfloat16, torch.float16)


def convolved(
    comm: Comm, plan: Plan, x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    mine = seqpar.shard(x, plan, comm.rank).requires_grad_()
    parameters = [p.clone().requires_grad_() for p in (weight, bias)]
    with torch.autocast("cpu", dtype):
        y = recurrent.causal_conv1d(mine, *parameters, plan, comm)
        y.sum().backward()
    return y.detach(), mine.grad, *(p.grad for p in parameters)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_convolution_casts_as_torch_does(rows, dtype) -> None:
    parameters = torch.float64 if rows == torch.float64 else torch.float32
    plan, g = plan_of("zigzag", (11,), 2), torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*shape, generator=g) for shape in ((11, 3), (3, 4), (3,)))
    x, weight, bias = x.to(rows), weight.to(parameters), bias.to(parameters)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    padded = torch.cat([leaves[0].new_zeros(3, 3), leaves[0]]).T[None]
    with torch.autocast("cpu", dtype):
        expected = conv1d(padded, leaves[1][:, None], leaves[2], groups=3)[0].T
        expected.sum().backward()
    assert expected.dtype == (torch.float64 if rows == torch.float64 else dtype)
    y, dx = torch.zeros(11, 3, dtype=expected.dtype), torch.zeros_like(x)
    results = run_threads(2, convolved, plan, x, weight, bias, dtype)
    for rank, (part, grad, *_) in enumerate(results):
        assert part.dtype == expected.dtype and grad.dtype == rows
        put(y, part, plan, rank)
        put(dx, grad, plan, rank)
    sums = [sum(column) for column in zip(*(result[2:] for result in results))]
    assert [s.dtype for s in sums] == [parameters] * 2
    for got, want in zip((y, dx, *sums), (expected.detach(), *(leaf.grad for leaf in leaves)), strict=True):
        assert relative_rms(got, want) <= 2 * torch.finfo(expected.dtype).eps


def recurred(comm: Comm, plan: Plan, dtype: torch.dtype, by_hand: bool) -> list[Tensor]:
    family = Family("scalar", beta=True, initial=True)
    *rows, initial = family.inputs(plan.mask, 0, torch.float32)
    mine = [seqpar.shard(x, plan, comm.rank).requires_grad_() for x in rows]
    given = [x.to(dtype) for x in mine[:3]] if by_hand else mine[:3]
    with torch.autocast("cpu", dtype, enabled=not by_hand):
        out = recurrent.linear_attention(*given, plan, comm, decay=mine[3], beta=mine[4], initial_state=initial)
        out.float().square().sum().backward()
    return [out.detach(), *(x.grad for x in mine)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_recurrence_casts_queries_keys_and_values_alone(dtype) -> None:
    plan = plan_of("zigzag", (9, 14), 2)
    for autocast, cast in zip(*(run_threads(2, recurred, plan, dtype, by_hand) for by_hand in (False, True))):
        assert autocast[0].dtype == dtype and all(x.dtype == torch.float32 for x in autocast[1:])
        assert all(torch.equal(x, y) for x, y in zip(autocast, cast, strict=True))


def summed(comm: Comm, plan: Plan) -> bool:
    states, maps = torch.rand(1, 2, 3, 4), torch.rand(1, 2, 3, 3)
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found.append(recurrent.state_scan(states, maps, plan, comm))
    return found[1].dtype == torch.float32 and torch.equal(*found)


def test_states_stay_wide() -> None:
    plan = Plan(Mask((9,)), seqpar.Layout.contiguous(9, 3))
    assert all(run_threads(3, summed, plan))


@pytest.mark.usefixtures("no_graphs")
def test_graphs_cast_too() -> None:
    plan, g = Plan(Mask((9, 7)), seqpar.Layout.contiguous(16, 1)), torch.Generator().manual_seed(0)
    handle = seqpar.bind(plan, LocalComm.world(1)[0])
    x, weight, *rows = (torch.randn(*shape, generator=g) for shape in ((16, 3), (3, 4), *[(16, 2, 4)] * 3))

    def layer(x, weight, q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            y = recurrent.causal_conv1d(x, weight, None, handle)
            return y, recurrent.linear_attention(q, k, v, handle)

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for graph, eager in zip(compiled(x, weight, *rows), layer(x, weight, *rows), strict=True):
        assert graph.dtype == torch.bfloat16 and torch.equal(graph, eager)


@pytest.mark.parametrize("rates", [False, True])
@pytest.mark.parametrize("rows", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scan_casts_nothing(dtype: torch.dtype, rows: torch.dtype, rates: bool) -> None:
    plan, g = Plan(Mask([9]), seqpar.Layout.contiguous(9, 1)), torch.Generator().manual_seed(0)
    x, options = torch.randn(9, 4, generator=g).to(rows), {"rates": torch.ones(4, 2).to(rows)} if rates else {}
    expected = recurrent.channel_scan(x, -x.abs(), plan, LocalComm(), **options)
    with torch.autocast("cpu", dtype):
        assert torch.equal(recurrent.channel_scan(x, -x.abs(), plan, LocalComm(), **options), expected)
        with pytest.raises(ValueError, match="logarithms at or below 0"):
            recurrent.channel_scan(x, x.abs(), Plan(Mask([9]), plan.layout), LocalComm(), **options)
