"""Each rank's loss may use the output, its lse or both: gradients are those of one device whichever it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import seqpar
from seqpar.comm import Comm, shm
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.plan import TRANSPORTS, Plan
from seqpar.testing import dense_attention, run_processes, run_threads
from tests.ops.cases import inputs

FORMS = ("out", "lse", "both")  # of a rank's loss, by rank in turn
MASK = Mask([64, 40, 3])  # two documents whose segments a library takes, and a short one
WIDTHS = {"one": 1, "all": 4, "some": 2, "each document's": [4, 1, 2]}


def plan_for(width: int | list[int], transport: str = "fetch") -> Plan:
    return Plan(MASK, Layout.contiguous(MASK.tokens, 4), ulysses=width, transport=transport)


def rank_grads(comm: Comm, plan: Plan, kernel: str) -> list[Tensor]:
    """One rank's dq, dk, dv of the loss that its form says."""
    q, k, v, dout, dlse = (seqpar.shard(x, plan, comm.rank) for x in inputs(plan, (4, 4), (8, 8), 0))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = seqpar.attention(*leaves, plan, comm, kernel=kernel, return_lse=True)
    losses = {"out": (out * dout).sum(), "lse": (lse * dlse).sum()}
    losses["both"] = losses["out"] + losses["lse"]
    losses[FORMS[comm.rank % 3]].backward()
    return [x.grad for x in leaves]


def one_device(plan: Plan) -> list[Tensor]:
    """The gradients of all ranks' losses together."""
    q, k, v, dout, dlse = inputs(plan, (4, 4), (8, 8), 0)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = dense_attention(*leaves, plan.mask)
    for rank in range(plan.ranks):
        rows, form = torch.from_numpy(plan.layout.positions(rank)), FORMS[rank % 3]
        dout[rows] *= form != "lse"
        dlse[rows] *= form != "out"
    return list(torch.autograd.grad((out * dout).sum() + (lse * dlse).sum(), leaves))


def check(plan: Plan, kernel: str = "auto", run=run_threads) -> None:
    found = zip(*run(plan.ranks, rank_grads, plan, kernel), strict=True)
    for name, shards, expected in zip(("dq", "dk", "dv"), found, one_device(plan), strict=True):
        torch.testing.assert_close(torch.cat(shards), expected, rtol=0, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kernel", ["auto", "aten", "blockwise"])
@pytest.mark.parametrize("width", WIDTHS.values(), ids=list(WIDTHS))
def test_ranks_whose_losses_use_the_output_or_its_lse(width, kernel) -> None:
    check(plan_for(width), kernel)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_under_every_transport(transport) -> None:
    check(plan_for(2, transport))


@pytest.mark.parametrize("comm", ["gloo", "shm"])
def test_in_processes(comm) -> None:
    if comm == "shm" and (why := shm.missing()):
        pytest.skip(why)
    check(plan_for(2), run=lambda size, *arguments: run_processes(size, *arguments, comm=comm))


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
