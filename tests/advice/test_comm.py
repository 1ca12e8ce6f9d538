"""What errors of the comms' constructors say to do, done: the comm then moves what it is given."""

from __future__ import annotations

import contextlib
import os
import pickle
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import seqpar
from seqpar import Comm, GroupComm, Layout, LocalComm, Mask, PeerComm, Plan, ShmComm, native
from seqpar.comm import PeerError
from seqpar.comm.peer import cuda
from seqpar.testing import run_processes, run_threads
from seqpar.train import all_sum
from tests.advice.remedies import advised, default_group
from tests.comm.constructor_cases import around
from tests.comm.device import Model, on_model
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


def test_the_comm_of_a_sub_is_closed() -> None:
    def rank(comm: Comm) -> bool:
        with advised(ValueError, "close that comm, on all ranks"):
            comm.sub([0, 1]).close()
        summed = works(comm)
        comm.close()
        return summed

    assert run_threads(2, rank) == [True, True]


def absent(comm: Comm) -> bool:
    """Rank 1 makes no comm, then it does."""
    if comm.rank == 0:
        with advised(PeerError, "make it on every rank of the group"):
            type(comm)(timeout=1.0)
    comm.agree("between", {})
    return works(type(comm)(timeout=60.0))


def without_descriptors(comm: Comm) -> bool:
    """Rank 1 can open no file, then it can."""
    if comm.rank == 1:
        with advised(RuntimeError, "raise `ulimit -n` or close some"), around("no descriptors"):
            type(comm)(timeout=60.0)
    else:
        with contextlib.suppress(RuntimeError):  # quotes rank 1
            type(comm)(timeout=60.0)
    return works(type(comm)(timeout=60.0))


@pytest.mark.parametrize("kind", ["gloo", "shm"])
def test_every_rank_makes_the_comm(kind: str) -> None:
    assert run_processes(2, absent, comm=kind) == [True, True]


@pytest.mark.parametrize("kind", ["gloo", "shm"])
def test_files_are_closed_or_allowed(kind: str) -> None:
    assert run_processes(2, without_descriptors, comm=kind) == [True, True]


def elsewhere(comm: Comm) -> bool:
    """Rank 1 is on another machine."""
    with (
        around("another machine") if comm.rank == 1 else contextlib.nullcontext(),
        advised(ValueError, "use GroupComm"),
    ):
        ShmComm(timeout=60.0)
    return works(GroupComm(timeout=60.0))


def without_memory(comm: Comm) -> bool:
    """No rank has the address space for the pool that it asks for."""
    with advised(
        RuntimeError,
        "give a smaller pool_bytes where address space is short, or use GroupComm where ranks are of several users",
    ):
        ShmComm(timeout=60.0, pool_bytes=1 << 62)
    return works(ShmComm(timeout=60.0, pool_bytes=1 << 20)) and works(GroupComm(timeout=60.0))


def without_an_interface(comm: Comm) -> bool:
    """gloo finds no network interface, then it does."""
    with (
        mock.patch.dict(os.environ, GLOO_SOCKET_IFNAME="missing0"),
        advised(
            RuntimeError,
            "set GLOO_SOCKET_IFNAME on every host to the network interface that the other hosts reach",
        ),
    ):
        GroupComm(timeout=60.0)
    with mock.patch.dict(os.environ, GLOO_SOCKET_IFNAME="lo"):
        return works(GroupComm(timeout=60.0))


def test_gloo_is_told_the_network_interface() -> None:
    assert run_processes(2, without_an_interface) == [True, True]


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


def test_a_pool_that_does_not_fit_is_smaller() -> None:
    assert run_processes(2, without_memory, comm="gloo") == [True, True]


def forked(comm: Comm, file: str) -> bool:
    """A fork uses the comm; its process goes on."""
    child = os.fork()
    if not child:
        try:
            with advised(PeerError, "use it in that process alone"):
                comm.check()
            Path(f"{file}{comm.rank}").write_text("refused")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return works(comm)


@pytest.mark.parametrize("kind", ["gloo", "shm"])
def test_a_comm_is_used_in_its_own_process(kind: str, tmp_path: Path) -> None:
    assert run_processes(2, forked, f"{tmp_path}/rank", comm=kind) == [True, True]
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["refused"] * 2


def test_a_system_without_shared_memory_uses_a_group() -> None:
    with default_group():
        with advised(NotImplementedError, "use GroupComm"), mock.patch("sys.platform", "darwin"):
            ShmComm()
        assert works(GroupComm())


def test_a_machine_without_a_device_uses_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "unusable", lambda: "no CUDA device")
    with default_group():
        with advised(NotImplementedError, "use GroupComm, which moves tensors with torch.distributed"):
            PeerComm()
        assert works(GroupComm())


def test_a_driver_that_cannot_signal_leaves_it_to_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as old:
        old.setattr(cuda, "unusable", lambda: None)
        old.setattr(native, "ops", lambda: SimpleNamespace(peer_driver_signals=lambda: False, peer_bus=str))
        old.setattr(torch.cuda, "get_device_name", lambda index: "an old one")
        with advised(NotImplementedError, 'give signals="kernel"'):
            cuda.Cuda("cuda:0", signals="driver")
        assert cuda.Cuda("cuda:0", signals="kernel")._by_kernel
    assert run_threads(2, on_model, works, (), 60.0, {"kernels": True}) == [True, True]


def unreachable(comm: Comm) -> bool:
    """The device of rank 0 cannot map that of rank 1."""
    model = Model(comm.rank, comm.size, unreachable=() if comm.rank else (1,))
    with advised(NotImplementedError, "use GroupComm, which over NCCL needs no mapping"):
        PeerComm.over(comm, model, 1 << 20, 60.0)
    return works(GroupComm(timeout=60.0))


def test_devices_that_do_not_reach_each_other_use_a_group() -> None:
    assert run_processes(2, unreachable, comm="shm") == [True, True]


def test_kernels_signal_where_the_driver_s_waits_may_pass_data(monkeypatch: pytest.MonkeyPatch) -> None:
    pcie = SimpleNamespace(
        peer_driver_signals=lambda: True, peer_bus=lambda index: "0000:00:00.0",
        peer_ordered=lambda index, bus: False, peer_can_flush=lambda index: False,
    )  # fmt: skip
    monkeypatch.setattr(cuda, "unusable", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a device")
    monkeypatch.setattr(native, "ops", lambda: pcie)
    with advised(NotImplementedError, 'give signals="auto" or "kernel"'):
        cuda.Cuda("cuda:0", signals="driver").order(["0000:01:00.0"])
    for signals in ("auto", "kernel"):
        device = cuda.Cuda("cuda:0", signals=signals)
        device.order(["0000:01:00.0"])
        assert device._by_kernel


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
