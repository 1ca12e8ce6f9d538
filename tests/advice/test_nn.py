"""What errors of `seqpar.nn` say to do, done: the layers then attend as one process does."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import seqpar
from seqpar import Layout, Mask, Plan
from seqpar.comm import Comm, LocalComm
from seqpar.dsp import parallelize
from seqpar.nn import Attention, MultiheadAttention
from seqpar.ops import bind
from seqpar.testing import run_threads
from tests.advice.remedies import advised
from tests.dsp.cases import rand
from tests.dsp.models import SHARDED, made
from tests.dsp.test_trial import SPEC, Clip

PLAN = Plan(Mask([9]), Layout.contiguous(9, 1))
DOCUMENTS = [5, 4]


def test_a_layer_is_given_a_plan_and_a_comm_their_handle_or_neither() -> None:
    comm, layer = LocalComm(), Attention()
    q, k, v = torch.randn(3, 9, 2, 8).unbind()
    with advised(ValueError, "give both, their handle, or neither"):
        layer(q, k, v, comm=comm)
    expected = seqpar.attention(q, k, v, PLAN, comm)
    assert torch.equal(layer(q, k, v, PLAN, comm), expected)
    assert torch.equal(layer(q, k, v, bind(PLAN, comm)), expected)
    with seqpar.parallel(PLAN, comm):
        assert torch.equal(layer(q, k, v), expected)


def test_a_layer_is_bound_anew_after_the_backward_or_given_its_plan() -> None:
    comm, layer = LocalComm(), Attention()
    x = torch.randn(3, 9, 2, 8, requires_grad=True)

    def run(*given: object) -> Tensor:
        return checkpoint(lambda x: layer(*x.unbind(), *given), x, use_reentrant=False)

    def gradient(out: Tensor) -> Tensor:
        return torch.autograd.grad(out.square().sum(), x)[0]

    expected = gradient(seqpar.attention(*x.unbind(), PLAN, comm))
    layer.bind(PLAN, comm)
    out = run()
    layer.bind(PLAN.with_mask(Mask([9], causal=False)), comm)
    with advised(RuntimeError, "bind it after the backward, or give the layer its plan, or seqpar.bind(plan, comm)"):
        gradient(out)
    for given in ((PLAN, comm), (bind(PLAN, comm),)):
        out = run(*given)
        layer.bind(PLAN, comm)
        assert torch.allclose(gradient(out), expected)
    assert torch.allclose(gradient(run()), expected)


def attended(layer: MultiheadAttention, x: Tensor, **given: object) -> Tensor:
    with seqpar.parallel(PLAN, LocalComm()):
        return layer(x, x, x, **{"need_weights": False} | given)[0]  # type: ignore[arg-type, no-any-return]


def of_one_process(x: Tensor) -> tuple[MultiheadAttention, Tensor]:
    """A layer, and what torch's own makes of x with its weights and a causal mask."""
    torch.manual_seed(3)
    layer, own = MultiheadAttention(16, 2), torch.nn.MultiheadAttention(16, 2)
    own.load_state_dict(layer.state_dict())
    mask = torch.ones(9, 9).triu(1).bool()
    return layer, own(x, x, x, attn_mask=mask, need_weights=False)[0]


def test_the_mask_of_a_multihead_layer_is_the_plans() -> None:
    x = torch.randn(9, 16)
    layer, expected = of_one_process(x)
    with advised(NotImplementedError, "leave it out"):
        attended(layer, x, attn_mask=torch.ones(9, 9).triu(1).bool())
    assert torch.allclose(attended(layer, x), expected, atol=1e-6)


def test_a_multihead_layer_is_asked_for_no_weights() -> None:
    x = torch.randn(9, 16)
    layer, expected = of_one_process(x)
    with advised(NotImplementedError, "give False"):
        attended(layer, x, need_weights=True)
    assert torch.allclose(attended(layer, x, need_weights=False), expected, atol=1e-6)


def test_a_nested_tensor_is_given_as_this_ranks_rows() -> None:
    torch.manual_seed(4)
    documents = [torch.randn(n, 16) for n in DOCUMENTS]
    layer = MultiheadAttention(16, 2)
    plan = Plan(Mask(DOCUMENTS), Layout.zigzag(DOCUMENTS, 2))
    with advised(NotImplementedError, "give this rank's rows [T, E]"):
        attended(layer, torch.nested.nested_tensor(documents, layout=torch.jagged))

    def rank(comm: Comm) -> Tensor:
        rows = seqpar.shard(torch.cat(documents), plan, comm.rank)
        with seqpar.parallel(plan, comm), torch.no_grad():
            return seqpar.unshard(layer(rows, rows, rows, need_weights=False)[0], plan, comm)

    whole = Plan(Mask(DOCUMENTS), Layout.contiguous(9, 1))
    x = torch.cat(documents)
    with seqpar.parallel(whole, LocalComm()):
        expected = layer(x, x, x, need_weights=False)[0]
    for out in run_threads(2, rank):
        assert torch.allclose(out, expected, atol=1e-6)


class Attending(nn.Module):
    """Self-attention over [1, 9, 16], by PyTorch's function."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.view(1, 9, 2, 8).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


def test_a_model_is_exported_when_it_is_not_parallel() -> None:
    model, x = Attending(), torch.randn(1, 9, 16)
    handle = seqpar.parallelize(model, LocalComm(), sdpa=True)
    with advised(Exception, "undo() first"):
        torch.jit.script(model)
    handle.undo()
    assert torch.equal(torch.export.export(model, (x,)).module()(x), model(x))


def test_a_lazy_model_is_run_once_before_it_is_made_parallel() -> None:
    comm, model, x = LocalComm(), nn.Sequential(nn.LazyLinear(16), Attending()), torch.randn(1, 9, 5)
    with advised(ValueError, "run the model once, then make it parallel"):
        seqpar.parallelize(model, comm, sdpa=True)
    expected = model(x)
    seqpar.parallelize(model, comm, sdpa=True)
    with seqpar.parallel(PLAN, comm):
        assert torch.allclose(model(x), expected, atol=1e-6)


def test_a_hook_on_a_stage_looks_at_each_row_or_lies_inside_it() -> None:
    """The warning is for what nothing tries: a hook inside is tried, and refused if rows meet in it."""
    x = rand(1, 4, 6, 3)

    def hooked(path: str, hook: Callable[..., Tensor], ranks: int) -> Tensor:
        def rank(comm: Comm) -> Tensor:
            model = made(Clip)
            model.get_submodule(path).register_forward_hook(hook)
            if comm.size > 1:
                parallelize(model, comm, SPEC, plan=SHARDED)
            with torch.no_grad():
                return model(x)

        return run_threads(ranks, rank)[0]

    with advised(UserWarning, "let it look at each row by itself, or put it on a module inside {}, where it is tried"):
        hooked("second", lambda module, args, y: y * 2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        apart = hooked("second", lambda module, args, y: y * 2, 2)
    assert torch.allclose(apart, hooked("second", lambda module, args, y: y * 2, 1), rtol=0, atol=1e-12)
    inside = hooked("second.linear", lambda module, args, y: y * 2, 2)
    assert torch.allclose(inside, hooked("second.linear", lambda module, args, y: y * 2, 1), rtol=0, atol=1e-12)
    with pytest.raises((NotImplementedError, ValueError), match="second mixes t"):
        hooked("second.linear", lambda module, args, y: y.cumsum(1), 2)
