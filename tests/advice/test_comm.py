"""What errors of the comms' constructors say to do, done: the comm then moves what it is given."""

from __future__ import annotations

import contextlib
import pickle
import warnings
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import seqpar
from seqpar import Comm, GroupComm, Layout, LocalComm, Mask, Plan, ShmComm
from seqpar.comm import PeerError
from seqpar.testing import run_processes
from seqpar.train import all_sum
from tests.advice.advised import advised, default_group
from tests.comm.constructor_cases import around
from tests.comm.nccl_cases import with_gpus


def works(comm: Comm) -> bool:
    """Whether the comm sums over its ranks."""
    return float(all_sum(torch.tensor([comm.rank + 1.0]), comm)) == comm.size * (comm.size + 1) / 2


def test_the_default_group_comes_first() -> None:
    with advised(ValueError, "call init_process_group first"):
        GroupComm()
    with default_group():
        assert works(GroupComm())


def test_of_a_mesh_one_dimension_is_given() -> None:
    with default_group():
        mesh = DeviceMesh("cpu", [[0]], mesh_dim_names=("data", "sequence"))
        with advised(ValueError, "give one, mesh[name]"):
            GroupComm(mesh)
        assert works(GroupComm(mesh["sequence"]))


def test_a_comm_is_made_anew_in_another_process() -> None:
    with advised(TypeError, "make another seqpar.{} there"):
        pickle.dumps(LocalComm())
    assert run_processes(2, works) == [True, True], "each process has made its own"


def absent(comm: Comm) -> bool:
    """Rank 1 makes no comm, then it does."""
    if comm.rank == 0:
        with advised(PeerError, "make it on every rank of the group"):
            type(comm)(timeout=1.0)
    comm.agree("between", {})
    return works(type(comm)(timeout=60.0))


@pytest.mark.parametrize("kind", ["gloo", "shm"])
def test_every_rank_makes_the_comm(kind: str) -> None:
    assert run_processes(2, absent, comm=kind) == [True, True]


def elsewhere(comm: Comm) -> bool:
    """Rank 1 is on another machine."""
    with (
        around("another machine") if comm.rank == 1 else contextlib.nullcontext(),
        advised(ValueError, "use GroupComm"),
    ):
        ShmComm(timeout=60.0)
    return works(GroupComm(timeout=60.0))


def on_one_gpu(comm: Comm) -> bool:
    """All ranks use GPU 0, then each has its own."""
    with with_gpus():
        with advised(ValueError, 'call torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before you make the comm'):
            GroupComm(timeout=60.0)
        torch.cuda.set_device(comm.rank)
        return works(GroupComm(timeout=60.0))


def test_every_rank_has_a_gpu_of_its_own() -> None:
    assert run_processes(2, on_one_gpu) == [True, True]


def test_ranks_on_several_machines_use_a_group() -> None:
    assert run_processes(2, elsewhere, comm="gloo") == [True, True]


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
