"""What errors of the comms' constructors say to do, done: the comm then moves what it is given."""

from __future__ import annotations

import warnings
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import seqpar
from seqpar import Comm, GroupComm, Layout, LocalComm, Mask, Plan
from seqpar.testing import run_processes
from seqpar.train import all_sum
from tests.advice.advised import advised


def works(comm: Comm) -> bool:
    """Whether the comm sums over its ranks."""
    return float(all_sum(torch.tensor([comm.rank + 1.0]), comm)) == comm.size * (comm.size + 1) / 2


def alone_by_mistake(comm: Comm) -> bool:
    """Every process has a `LocalComm`, then a comm of all, or of its own group on purpose."""
    plan = Plan(Mask([4]), Layout.contiguous(4, 1))
    own = [dist.new_group([rank]) for rank in range(2)][comm.rank]
    model = nn.MultiheadAttention(4, 1)
    with mock.patch("seqpar.comm.local.in_some_comm", return_value=False):
        for enter in (
            partial(seqpar.parallelize, model, sdpa=True),
            partial(seqpar.parallel, plan),
            partial(seqpar.sdpa, plan),
        ):
            with (
                advised(
                    UserWarning,
                    "give seqpar.GroupComm(), or seqpar.GroupComm(group) of this process if one is meant",
                ),
                enter(comm=LocalComm()),
            ):
                x = torch.randn(3, 1, 1, 4, 8)
                torch.nn.functional.scaled_dot_product_attention(*x, is_causal=True)
        with pytest.warns(UserWarning, match="each would compute alone"):
            seqpar.parallelize(model, told := LocalComm(), sdpa=True).undo()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with seqpar.parallel(plan, told):
                seqpar.parallelize(model, told, sdpa=True).undo()
            every, single = GroupComm(), GroupComm(own)
            for other in (every, single):
                with seqpar.parallelize(model, other, sdpa=True):
                    pass
            with seqpar.parallel(plan, single), seqpar.parallel(plan, single):
                pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seqpar.parallelize(model, LocalComm(), sdpa=True).undo()  # to compare with one rank
    return works(every) and works(single)


def test_a_comm_of_one_rank_is_made_on_purpose() -> None:
    assert run_processes(2, alone_by_mistake, comm="gloo") == [True, True]
