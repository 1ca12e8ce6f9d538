"""A layer with a window of its own under a plan with another one; the product is in test_ways.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from seqpar import Comm, Layout, Mask, Plan
from seqpar.facts.value import Ints
from seqpar.testing import seen_pairs
from tests.integrations.hf.models import build
from tests.ranks import on_copies

LENGTHS = [23, 17]
S = sum(LENGTHS)


def test_a_window_that_is_also_the_layers_own_is_computed() -> None:
    model = build("mistral").double().eval()  # of 5 keys with its own
    model.set_attn_implementation("sdpa")  # whose softmax is in the model's dtype
    ids = torch.randint(1, 60, (1, S), generator=torch.Generator().manual_seed(3))

    def logits(mask: Mask) -> list[Tensor]:
        at = torch.from_numpy(mask.depths(torch.arange(S).numpy()))[None]

        @torch.no_grad()
        def step(own: torch.nn.Module, comm: Comm) -> Tensor:
            return own(input_ids=ids, position_ids=at).logits[0]

        plan = Plan(mask, Layout.zigzag(mask.lengths, 2))
        return on_copies(model, step, source="replicated", plan=lambda *_: plan)

    mask = Mask(LENGTHS, window=(4, 0))
    bias = torch.where(torch.from_numpy(seen_pairs(mask)), 0.0, -torch.inf).double()[None, None]
    at = torch.from_numpy(mask.depths(torch.arange(S).numpy()))[None]
    expected = model(input_ids=ids, attention_mask=bias, position_ids=at, use_cache=False).logits[0]
    for found in logits(mask):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    with pytest.raises(NotImplementedError, match="and the plan has Mask"):
        logits(Mask(LENGTHS, window=(5, 0)))


def test_a_mask_that_is_refused_leaves_the_comm_alive() -> None:
    ids = torch.arange(1, 25)[None]

    def plan(lengths: Ints, ranks: int) -> Plan:
        return Plan(Mask(lengths, window=(len(lengths) + 2, 0)), Layout.zigzag(lengths, ranks))

    @torch.no_grad()
    def step(own: torch.nn.Module, comm: Comm) -> None:
        two, three = ids.reshape(2, 12), ids.reshape(3, 8)
        expected = own(input_ids=two).logits
        with pytest.raises(NotImplementedError, match="and the plan has Mask"):
            own(input_ids=three)
        assert torch.equal(own(input_ids=two).logits, expected)

    on_copies(build("mistral"), step, source="replicated", plan=plan)
