"""What errors of `seqpar.nn` say to do, done: the layers then attend as one process does."""

from __future__ import annotations

import torch
from torch import Tensor

import seqpar
from seqpar import Layout, Mask, Plan
from seqpar.comm import LocalComm
from seqpar.nn import Attention, MultiheadAttention
from seqpar.ops import bind
from tests.advice.advised import advised

PLAN = Plan(Mask([9]), Layout.contiguous(9, 1))


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
