"""A model of transformers on the rows of a tree gives every path what it gives that path alone."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor

import seqpar
from seqpar import Comm, Layout, LocalComm, Mask, Plan
from seqpar.integrations.hf.forward import planned
from seqpar.integrations.hf.mask import Rule
from seqpar.integrations.transformers import KEY
from seqpar.testing import run_threads, seen_pairs
from tests.integrations.hf.models import build

MASK = Mask.tree([5, 7, 3, 2, 6, 4, 9], [-1, 0, 1, 1, 0, -1, 5])


@pytest.mark.parametrize("name", ["gemma3", "llama"])  # with windows, which count along the path, and without
def test_every_path_is_computed_as_it_would_be_alone(name: str) -> None:
    model = build(name).eval()
    ids = torch.randint(1, 60, (MASK.tokens,), generator=torch.Generator().manual_seed(0))
    seen = seen_pairs(MASK)
    leaves, _ = MASK.paths.leaves()
    expected: dict[int, Tensor] = {}
    with torch.no_grad():
        for end in leaves.tolist():
            path = np.flatnonzero(seen[end - 1])
            expected |= zip(path.tolist(), model(input_ids=ids[path][None], use_cache=False).logits[0], strict=True)
    plan = Plan(MASK, Layout.zigzag(MASK.lengths, 3)).padded()

    def rank(comm: Comm) -> Tensor:
        own = copy.deepcopy(model)
        own.set_attn_implementation(KEY)
        at = torch.from_numpy(plan.rope_positions(comm.rank))[None]
        mine = seqpar.shard(ids, plan, comm.rank)[None]
        with seqpar.parallel(plan, comm), torch.no_grad():
            return own(input_ids=mine, position_ids=at, use_cache=False).logits[0]

    for number, found in enumerate(run_threads(3, rank)):
        for row, token in enumerate(plan.layout.positions(number).tolist()):
            torch.testing.assert_close(found[row], expected[token])


@pytest.mark.parametrize("rule", [Rule(), Rule(causal=True, chunk=4)])
def test_layers_that_no_tree_has_are_refused(rule: Rule) -> None:
    with pytest.raises(NotImplementedError, match="and of a tree those with a window"):
        planned(Plan(MASK, Layout.contiguous(MASK.tokens, 1)), rule)
    with pytest.raises(NotImplementedError, match=r"the plan has Mask\(bounds"):
        crossing = Mask.from_bounds([0] * 4, [1, 2, 3, 4], until=[3, 4, 4, 4])
        planned(Plan(crossing, Layout.contiguous(4, 1)), rule)
    nothing = planned(Plan(MASK, Layout.contiguous(MASK.tokens, 1)), Rule(causal=True, left=-1))
    assert nothing.mask.area() == 0


def test_recurrent_layers_are_refused() -> None:
    from seqpar.integrations.hf.recurrent.mixers import of_documents

    plan = of_documents(Plan(MASK, Layout.contiguous(MASK.tokens, 1)))
    x = torch.zeros(MASK.tokens, 1, 4)
    with pytest.raises(NotImplementedError, match=r"linear_attention: .*Mask\(tree, .* is a tree"):
        seqpar.recurrent.linear_attention(x, x, x, plan, LocalComm())
