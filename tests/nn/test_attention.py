"""Attention as a layer: models on ranks are the model of one process, whatever plan, wherever it comes from."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

import seqpar
from seqpar.comm import Comm, LocalComm
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.nn import Attention
from seqpar.plan import Plan
from seqpar.planner import plan_batch
from seqpar.testing import run_processes, run_threads
from tests.cases import Case, cases, examples
from tests.nn.decoder import assert_together, decoder, one_process, rows, step

LENGTHS = (9, 1, 14, 5)


def plans(ranks: int) -> dict[str, Plan]:
    """Plans of each kind that there is."""
    mask, zigzag = Mask(LENGTHS), Layout.zigzag(LENGTHS, ranks)
    empty = Layout([list(range(29)), *([] for _ in range(ranks - 1))])
    return {
        "ring zigzag": Plan(mask, zigzag, transport="ring"),
        "ulysses": Plan(mask, Layout.contiguous(29, ranks), ulysses=ranks),
        "two dimensions": Plan(mask, zigzag, ulysses=2 if ranks % 2 == 0 else 1),
        "planned": plan_batch(LENGTHS, ranks, node=ranks).padded(),
        "pads": Plan(mask, zigzag, rows=[zigzag.tokens(r) + r for r in range(ranks)], transport="gather"),
        "one rank has all": Plan(mask, empty).padded(),
    }


@pytest.mark.parametrize("kind", plans(2))
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.sampled(3)
def test_a_decoder_on_ranks_is_that_of_one_process(kind, ranks) -> None:
    plan = plans(ranks)[kind]
    assert_together(plan, run_threads(ranks, step, plan), one_process(plan))


@examples(15)
@given(cases(max_ranks=4, max_tokens=24))
def test_any_plan(case) -> None:
    plan = case.plan().padded() if case.mask not in ("cross", "cross_full") else Case(
        "packed", case.layout, case.transport, case.ranks, case.ulysses, case.lengths, pads=True
    ).plan().padded()  # fmt: skip
    assert_together(plan, run_threads(case.ranks, step, plan), one_process(plan), 1e-9)


def test_processes() -> None:
    plan = plans(2)["two dimensions"]
    assert_together(plan, run_processes(2, step, plan), one_process(plan))


def windowed() -> nn.Module:
    return decoder({"window": (3, None)}, {}, {"window": (1, 0), "softcap": 2.0, "scale": 0.7})


@pytest.mark.parametrize("kind", ["ring zigzag", "planned"])
def test_layers_have_windows_of_their_own(kind) -> None:
    plan = plans(2)[kind]
    expected = one_process(plan, windowed)
    assert_together(plan, run_threads(2, step, plan, windowed), expected)
    assert not torch.allclose(expected[0], one_process(plan, lambda: decoder({}, {}, {}))[0])


def test_options_are_those_of_the_verb() -> None:
    plan, comm = Plan(Mask(LENGTHS), Layout.contiguous(29, 1)), LocalComm()
    q, k, v = (torch.randn(29, h, 4, dtype=torch.float64) for h in (4, 2, 2))
    sinks, slopes = torch.randn(4), torch.rand(4)
    layer = Attention(scale=0.3, softcap=1.5, window=(2, None), kernel="reference")
    expected = seqpar.attention(
        q, k, v, plan.with_mask(Mask(LENGTHS, window=(2, None))), comm, scale=0.3, softcap=1.5, sinks=sinks,
        alibi_slopes=slopes, kernel="reference",
    )  # fmt: skip
    out = layer(q, k, v, plan, comm, sinks=sinks, alibi_slopes=slopes)
    assert torch.equal(out, expected)
    batched = layer(q[None], k[None], v[None], seqpar.bind(plan, comm), sinks=sinks, alibi_slopes=slopes)
    assert torch.equal(batched, expected[None])
    assert repr(layer) == "Attention(scale=0.3, softcap=1.5, window=(2, None), kernel=reference)"


def pair(**mask: object) -> tuple[Plan, LocalComm]:
    return Plan(Mask([5, 9], **mask), Layout.contiguous(14, 1)), LocalComm()


def test_the_plan_is_the_calls_or_the_bound_or_the_innermost() -> None:
    q, layer = torch.randn(14, 2, 4), Attention()
    (a, comm), (b, _), (c, _) = pair(), pair(causal=False), pair(window=(1, None))
    wanted = {plan: seqpar.attention(q, q, q, plan, comm) for plan in (a, b, c)}
    with pytest.raises(RuntimeError, match="no plan surrounds this call"):
        layer(q, q, q)
    with seqpar.parallel(a, comm):
        assert torch.equal(layer(q, q, q), wanted[a])
        with seqpar.parallel(b, comm):
            assert torch.equal(layer(q, q, q), wanted[b])
        assert torch.equal(layer(q, q, q), wanted[a])
        layer.bind(b, comm)
        assert torch.equal(layer(q, q, q), wanted[b])
        assert torch.equal(layer(q, q, q, c, comm), wanted[c])
        assert torch.equal(layer(q, q, q, seqpar.bind(c, comm)), wanted[c])
        layer.unbind()
        assert torch.equal(layer(q, q, q), wanted[a])


def test_two_models_under_two_plans_and_degrees() -> None:
    """Side by side in one process: one over both ranks, the other on each by itself, by turns."""
    wide, own = plans(2)["ring zigzag"], Plan(Mask([4, 3]), Layout.contiguous(7, 1))

    def on_a_rank(comm: Comm) -> tuple[object, object]:
        alone, models = LocalComm(), (decoder(), decoder({}))
        for layer in models[1].layers:
            layer.attention.bind(own, alone)
        outs = []
        with seqpar.parallel(wide, comm):
            for model, plan, rank in zip(models, (wide, own), (comm.rank, 0)):
                ids, positions, _ = rows(plan, rank)
                outs.append(model(ids, positions))
        (outs[0].square().sum() + outs[1].square().sum()).backward()
        return outs[0].detach(), models[1].head.weight.grad

    def expected(plan: Plan, model: nn.Module) -> Tensor:
        ids, positions, _ = rows(plan, 0)
        with seqpar.parallel(plan, LocalComm()):
            out = model(ids, positions)
        out.square().sum().backward()
        return out.detach()

    whole = expected(Plan(wide.mask, Layout.contiguous(29, 1)), decoder())
    small = decoder({})
    expected(own, small)
    for rank, (out, grad) in enumerate(run_threads(2, on_a_rank)):
        torch.testing.assert_close(out, whole[np.array(wide.layout.positions(rank))], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(grad, small.head.weight.grad, rtol=1e-10, atol=1e-10)


def test_what_fits_no_layer() -> None:
    q, (plan, comm), layer = torch.randn(14, 2, 4), pair(), Attention()
    with pytest.raises(ValueError, match="a comm without a plan"):
        layer(q, q, q, None, comm)
    with pytest.raises(ValueError, match=r"packed \[T, heads, dim\] or \[1, T, heads, dim\], got \[2, 14, 2, 4\]"):
        layer(*[q.expand(2, -1, -1, -1)] * 3, plan, comm)
    with pytest.raises(ValueError, match="the plan is for 2 ranks, the comm has 1"):
        layer(q, q, q, Plan(Mask([14]), Layout.contiguous(14, 2)), comm)
    with pytest.raises(ValueError, match="expected a plan and a comm"):
        layer(q, q, q, "plan", comm)
    with pytest.raises(ValueError, match="a plan for the comm's 1 ranks"), seqpar.parallel(None, comm):
        pass
    with pytest.raises(TypeError, match="got a comm and a plan; give the plan first"), seqpar.parallel(comm, plan):
        pass
    with pytest.raises(TypeError, match="parallel: expected a plan and a comm, got 3 for"), seqpar.parallel(plan, 3):
        pass


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_is_a_layer_of_its_own(copied) -> None:
    (plan, comm), q = pair(), torch.randn(14, 2, 4)
    layer = Attention(window=(2, None))
    layer.bind(plan, comm)
    other = copied(layer)
    with pytest.raises(RuntimeError, match="no plan surrounds"):
        other(q, q, q)
    other.bind(Plan(Mask([14]), plan.layout), comm)
    assert torch.equal(layer(q, q, q), seqpar.attention(q, q, q, plan.with_mask(Mask([5, 9], window=(2, None))), comm))
    assert not torch.equal(other(q, q, q), layer(q, q, q))


def dropping() -> nn.Module:
    return decoder({"dropout": 0.4}, {"dropout": 0.2})


def test_dropout_is_the_same_at_any_number_of_ranks() -> None:
    plan = plans(3)["ring zigzag"]
    expected = one_process(plan, dropping)
    assert_together(plan, run_threads(3, step, plan, dropping), expected)
    assert not torch.allclose(expected[0], one_process(plan)[0])


def test_seeds_differ_by_step_and_layer_and_are_needed() -> None:
    (plan, comm), q = pair(), torch.ones(14, 2, 4)
    v = torch.randn(14, 2, 4)
    first, second = Attention(dropout=0.5), Attention(dropout=0.5)
    copied = copy.deepcopy(first)

    def out(layer: Attention, seed: int | None = None) -> Tensor:
        with seqpar.parallel(plan, comm, seed=seed):
            return layer(q, q, v)

    assert torch.equal(out(first, 1), out(first, 1))
    different = [out(first, 1), out(first, 2), out(second, 1), out(copied, 1), out(first), out(first)]
    for n, one in enumerate(different):
        assert not any(torch.equal(one, other) for other in different[:n])
    assert torch.equal(out(Attention(dropout=0.5, layer=7), 1), out(Attention(dropout=0.5, layer=7), 1))
    assert torch.equal(first(q, q, v, plan, comm, seed=1), out(first, 1))
    first.bind(plan, comm, seed=2)
    assert torch.equal(first(q, q, v), out(first, 5))
    first.bind(plan, comm)
    with pytest.raises(ValueError, match="dropout_p=0.5 needs a dropout_seed"):
        first(q, q, v)
    first.eval()
    assert torch.equal(first(q, q, v), seqpar.attention(q, q, v, plan, comm))


def test_ranks_that_count_steps_differently_say_so() -> None:
    plan = plans(2)["ring zigzag"]

    def on_a_rank(comm: Comm) -> None:
        layer, q = Attention(dropout=0.5, layer=0), torch.randn(plan.rows(comm.rank), 2, 4)
        for _ in range(comm.rank):
            with seqpar.parallel(plan, comm):
                pass
        with seqpar.parallel(plan, comm):
            layer(q, q, q)

    with pytest.raises(ValueError, match="ranks differ in dropout_seed"):
        run_threads(2, on_a_rank)


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_is_that_of_torch(compiled) -> None:
    plan, comm = Plan(Mask([14], causal=False), Layout.contiguous(14, 1)), LocalComm()
    q, layer = torch.randn(14, 2, 4), Attention()
    run: Callable[..., Tensor] = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    with torch.autocast("cpu", dtype=torch.bfloat16), seqpar.parallel(plan, comm):
        out = run(q, q.bfloat16(), q)
        heads = (x.transpose(0, 1) for x in (q, q.bfloat16(), q))
        expected = nn.functional.scaled_dot_product_attention(*heads).transpose(0, 1)
        assert out.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
        assert run(*[q.double()] * 3).dtype == torch.float64
