"""Each rank's loss may use the output, its lse or both: gradients are those of one device whichever it is."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import seqpar
from seqpar.comm import shm
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.plan import TRANSPORTS, Plan
from seqpar.testing import run_processes
from tests.ops.cases import MIXED, Options, check, inputs

MASK = Mask([64, 40, 3])  # two documents whose segments a library takes, and a short one
WIDTHS = {"one": 1, "all": 4, "some": 2, "each document's": [4, 1, 2]}


def plan_for(width: int | list[int], transport: str = "fetch") -> Plan:
    return Plan(MASK, Layout.contiguous(MASK.tokens, 4), ulysses=width, transport=transport)


@pytest.mark.parametrize("kernel", ["auto", "aten", "blockwise"])
@pytest.mark.parametrize("width", WIDTHS.values(), ids=list(WIDTHS))
def test_ranks_whose_losses_use_the_output_or_its_lse(width, kernel) -> None:
    check(plan_for(width), (4, 4), options=Options(kernel=kernel), uses=MIXED)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_under_every_transport(transport) -> None:
    check(plan_for(2, transport), (4, 4), uses=MIXED)


@pytest.mark.parametrize("comm", ["gloo", "shm"])
def test_in_processes(comm) -> None:
    if comm == "shm" and (why := shm.missing()):
        pytest.skip(why)
    check(plan_for(2), (4, 4), uses=MIXED, run=partial(run_processes, comm=comm))


def test_a_rank_alone_keeps_its_bits_whether_lse_is_returned_or_not() -> None:
    """Where no rows come from other ranks, what a library makes of the output is left to it."""
    plan = Plan(MASK, Layout.contiguous(MASK.tokens, 1))
    mine = inputs(plan, (4, 4), (8, 8), 0)
    found = []
    for return_lse in (False, True):
        leaves = [x.clone().requires_grad_() for x in mine[:3]]
        result = seqpar.attention(*leaves, plan, seqpar.LocalComm(), kernel="aten", return_lse=return_lse)
        ((result[0] if return_lse else result) * mine[3]).sum().backward()
        found.append([x.grad for x in leaves])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
