"""Models in whose forward ranks meet, as in FSDP and DDP, are tried by all ranks alike: on processes, or they hang."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import seqpar
from seqpar import Comm, Layout, LocalComm, Mask, Plan
from seqpar.integrations.sdpa import parallelize
from seqpar.testing import run_processes
from tests.trial.models import ALONE, MIXING, VOCABULARY, made


def meeting(model: nn.Module, how: str, ranks: int) -> nn.Module:
    """The model, in whose own forward ranks meet: its blocks are sharded, or are inside DDP and have buffers."""
    if how == "ddp":
        for block in model.blocks:
            block.register_buffer("steps", torch.zeros(3, dtype=torch.float64))
        model.blocks = nn.ModuleList(DistributedDataParallel(block) for block in model.blocks)
        return model
    mesh = init_device_mesh("cpu", (ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def inputs(rows: list[int], rank: int) -> tuple[Plan, Tensor, Tensor]:
    """A plan of so many rows on each rank, and a rank's arguments."""
    tokens = sum(rows)
    starts = [sum(rows[:r]) for r in range(len(rows))]
    plan = Plan(Mask([tokens]), Layout.from_pieces(starts, rows, range(len(rows)), len(rows)))
    ids = seqpar.shard(torch.arange(tokens) * 7 % VOCABULARY, plan, rank)[None]
    return plan, ids, torch.from_numpy(plan.rope_positions(rank))[None]


def call(model: nn.Module, comm: Comm, way: str, rows: list[int]) -> Tensor:
    """What a rank's rows come to; in a block, or in a parallelized model."""
    plan, ids, positions = inputs(rows, comm.rank)
    block = seqpar.sdpa(plan, comm) if way == "block" else seqpar.parallel(plan, comm)
    with block:
        return model(ids, positions)


def several(comm: Comm, how: str, way: str, batches: list[list[int]]) -> tuple[list[Tensor], int]:
    """What some batches come to on a rank, one after the other, and how often it ran the model's last module."""
    model, runs = meeting(made(ALONE["positions given"]), how, comm.size), []
    model.head.register_forward_hook(lambda *_: runs.append(0))
    handle = parallelize(model, comm) if way == "parallelize" else contextlib.nullcontext()
    found = []
    with handle:
        for rows in batches:
            out = call(model, comm, way, rows)
            out.sum().backward()
            found.append(out.detach())
    return found, len(runs)


BATCHES = {2: [[5, 1], [5, 0], [1, 6], [9, 12], [1, 40]], 3: [[4, 0, 1], [4, 3, 0], [1, 1, 1], [1, 9, 9]]}


@pytest.mark.parametrize(
    "ranks, way, how",
    [(2, "parallelize", "fsdp"), (2, "block", "ddp"), (3, "parallelize", "ddp"), (3, "block", "fsdp"),
     (3, "parallelize", "fsdp")],
)  # fmt: skip
@pytest.mark.sampled(2)
def test_ranks_with_few_rows_and_none_run_as_often(ranks: int, way: str, how: str) -> None:
    every = run_processes(ranks, several, how, way, BATCHES[ranks])
    assert len({runs for _, runs in every}) == 1 and every[0][1] > len(BATCHES[ranks])
    model = made(ALONE["positions given"])
    for number, rows in enumerate(BATCHES[ranks]):
        found = torch.cat([outs[number] for outs, _ in every], 1)
        at = torch.arange(sum(rows))[None]
        torch.testing.assert_close(found, model(at * 7 % VOCABULARY, at), rtol=0, atol=1e-10)


def refused(comm: Comm, how: str, way: str, rows: list[int]) -> str:
    """What is said of a model whose positions are counted."""
    model = meeting(made(MIXING["positions counted"][0]), how, comm.size)
    if way == "parallelize":
        parallelize(model, comm)
    with pytest.raises(NotImplementedError) as raised:
        call(model, comm, way, rows)
    return str(raised.value)


@pytest.mark.parametrize("how, way", [("fsdp", "parallelize"), ("ddp", "block")])
def test_what_one_rank_alone_finds_is_refused_on_all(how: str, way: str) -> None:
    for said in run_processes(3, refused, how, way, [9, 1, 0]):
        assert "passes to places (Embedding) depends on the other rows" in said


def failing(comm: Comm, how: str) -> str:
    """What is raised where the model fails on the last rank alone, after ranks have met."""
    model = meeting(made(ALONE["positions given"]), how, comm.size)
    parallelize(model, comm)
    if comm.rank == comm.size - 1:
        model.head.register_forward_hook(fails)
    with pytest.raises(RuntimeError) as raised:
        call(model, comm, "parallelize", [4, 5])
    return str(raised.value)


def changed(comm: Comm, how: str, way: str) -> tuple[str, int]:
    """What is said of a forward that the last rank alone has put on a module after the model's first forward."""
    model, runs = meeting(made(ALONE["positions given"]), how, comm.size), list[int]()
    model.head.register_forward_pre_hook(lambda *_: runs.append(0))
    if way == "parallelize":
        parallelize(model, comm)
    for _ in range(3):
        call(model, comm, way, [5, 4])
    if comm.rank == comm.size - 1:
        inner = model.head.forward
        model.head.forward = lambda x: inner(x).cumsum(1)  # type: ignore[assignment]
    with pytest.raises(NotImplementedError) as raised:
        call(model, comm, way, [5, 4])
    return str(raised.value), len(runs)


@pytest.mark.parametrize("how, way", [("fsdp", "parallelize"), ("ddp", "parallelize"), ("fsdp", "block")])
def test_a_change_of_one_rank_is_tried_by_all(how: str, way: str) -> None:
    every = run_processes(2, changed, how, way)
    assert len({runs for _, runs in every}) == 1
    assert all("the output of head (Linear) depends on the other rows" in said for said, _ in every), every


class Summing(nn.Module):
    """Adds a sum over ranks that no wrapper makes, as the loss of a mixture of experts does."""

    def __init__(self, model: nn.Module, comm: Comm) -> None:
        super().__init__()
        self.model, self.comm, self.verbose = model, comm, False

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.model(ids, positions) + 0 * seqpar.train.all_sum(torch.ones((), dtype=torch.float64), self.comm)


def logged(comm: Comm, way: str) -> tuple[list[float], int]:
    """What four forwards come to, and the runs; one rank alone logs from the third on."""
    model, runs = Summing(made(ALONE["positions given"]), comm), list[int]()
    model.model.head.register_forward_pre_hook(lambda *_: runs.append(0))
    if way == "parallelize":
        parallelize(model, comm)
    found = []
    for step in range(4):
        if step == 2 and comm.rank == 0:
            model.verbose = True
            model.model.head.register_forward_hook(lambda module, args, y: None)
        found.append(float(call(model, comm, way, [5, 4]).detach().square().sum()))
    return found, len(runs)


@pytest.mark.parametrize("way", ["parallelize", "block"])
def test_a_log_of_one_rank_lets_no_rank_of_a_sum_inside_wait(way: str) -> None:
    every = run_processes(2, logged, way)
    assert every[0][1] == every[1][1]
    assert all(len(set(found)) == 1 for found, _ in every)


def fails(*_: Any) -> None:
    raise ArithmeticError("no good")


@pytest.mark.parametrize("how", ["fsdp", "ddp"])
def test_a_failure_of_one_rank_is_told_on_all(how: str) -> None:
    for said in run_processes(2, failing, how):
        assert said.endswith("Model failed on rank 1 when it was tried: ArithmeticError: no good"), said


def subsets(comm: Comm, batches: list[list[list[int]]]) -> list[Tensor]:
    """A model that all ranks shard, called under comms of some of them, which have other plans."""
    model = meeting(made(ALONE["positions given"]), "fsdp", comm.size)
    own = comm.sub([0, 1] if comm.rank < 2 else [2])
    parallelize(model, own)
    return [call(model, own, "parallelize", rows[comm.rank // 2]).detach() for rows in batches]


def test_comms_that_share_a_sharded_model_try_it_at_once_or_not_at_all() -> None:
    batches = [[[2, 1], [30]], [[9, 30], [1]], [[2, 0], [60]]]
    every = run_processes(3, subsets, batches)
    model = made(ALONE["positions given"])
    for number, (rows, _) in enumerate(batches):
        at = torch.arange(sum(rows))[None]
        found = torch.cat([every[0][number], every[1][number]], 1)
        torch.testing.assert_close(found, model(at * 7 % VOCABULARY, at), rtol=0, atol=1e-10)


def inside_fsdp1(comm: Comm, original: bool) -> float:
    """The largest deviation of a parallel model inside FSDP1 over two steps, its blocks wrapped by themselves too.

    original: whether parameters are views of FSDP's own; otherwise it leaves such views in attributes, freed.
    """
    model = made(ALONE["positions given"])
    plan, ids, positions = inputs([5, 4], comm.rank)
    expected = seqpar.shard(one(model, 9)[0], plan, comm.rank)
    parallelize(model, comm)
    how, worst = {"device_id": torch.device("cpu"), "use_orig_params": original}, 0.0
    model.blocks = nn.ModuleList(FullyShardedDataParallel(block, **how) for block in model.blocks)
    around = FullyShardedDataParallel(model, **how)
    for _ in range(2):
        with seqpar.parallel(plan, comm):
            out = around(ids, positions)[0]
        out.square().sum().backward()
        worst = max(worst, float((out.detach() - expected).abs().max()))
    return worst


def one(model: nn.Module, tokens: int) -> Tensor:
    """What one process computes."""
    plan, ids, positions = inputs([tokens], 0)
    with torch.no_grad(), seqpar.sdpa(plan, LocalComm()):
        return model(ids, positions)


@pytest.mark.parametrize("original", [True, False])
def test_a_parallel_model_goes_into_fsdp1(original: bool) -> None:
    assert max(run_processes(2, inside_fsdp1, original)) < 1e-12
