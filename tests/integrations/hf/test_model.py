"""transformers models on several ranks: losses, logits and every gradient are those of one process."""

from __future__ import annotations

import pytest

from seqpar.testing import run_threads
from tests.integrations.hf.models import CASES, PLANS, batches, build, check, on_ranks, one_process

KINDS = ["left", "right", "packed", "cu", "long", "mixed"]
# Every pair of a batch and a plan with some number of ranks; each model takes a part of them, and all take every plan.
POINTS = [(kind, plan, 2 + (i + j) % 3) for i, kind in enumerate(KINDS) for j, plan in enumerate(PLANS)]
PARTS = 4


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(6)
def test_a_model_on_ranks_is_the_model_of_one_process(name: str) -> None:
    case, model = CASES[name], build(name)
    for kind, plan, ranks in POINTS[list(CASES).index(name) % PARTS :: PARTS]:
        every = batches(kind, ranks)
        found = run_threads(ranks, on_ranks, model, every, {"plan": PLANS[plan]})
        try:
            check(found, one_process(model, every, case.causal), every)
        except AssertionError as error:
            raise AssertionError(f"{kind}, {plan}, {ranks} ranks: {error}") from None
