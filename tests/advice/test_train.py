"""What errors of seqpar.train say to do, done: sums, norms and means are those of one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import seqpar
from seqpar import Comm, Layout, Mask, Plan
from seqpar.testing import run_processes, run_threads
from seqpar.train import (
    cross_entropy,
    linear_cross_entropy,
    sync_gradients,
)
from tests.advice.advised import advised


def parameter(shape: tuple[int, ...], grad: float = 1.0) -> nn.Parameter:
    p = nn.Parameter(torch.zeros(shape))
    p.grad = torch.full(shape, grad)
    return p


def test_gradients_are_summed_once_a_step_and_those_that_stay_are_cleared() -> None:
    def rank(comm: Comm) -> list[list[float]]:
        p, tied, frozen = parameter((2,), 1.0 + comm.rank), parameter((2,), 2.0), parameter((2,), 3.0)
        sync_gradients([p, frozen], comm)
        frozen.requires_grad_(False)
        for several in ([p], [p, tied], [tied, frozen]):
            with advised(
                ValueError,
                "call it once, after the last backward of a step, with all parameters and all ranks that hold them, "
                "and set gradients that no backward computes any more to None",
            ):
                sync_gradients(several, comm)
        frozen.grad, p.grad = None, torch.zeros(2)
        for _ in range(2):
            (p.sum() * (1.0 + comm.rank)).backward()
        sync_gradients([p, tied, frozen], comm)
        assert frozen.grad is None
        return [p.grad.tolist(), tied.grad.tolist()]  # type: ignore[union-attr]

    assert run_threads(2, rank) == [[[6.0, 6.0], [4.0, 4.0]]] * 2


def sharded(comm: Comm) -> bool:
    """A weight that fully_shard has sharded over the comm's ranks, and a scale beside it."""
    torch.manual_seed(0)
    plain, scale = nn.Linear(3, 2, bias=False), nn.Parameter(torch.tensor(2.0))
    x = torch.arange(3.0 * comm.size).reshape(comm.size, 3)
    (plain(x).sum() * scale).backward()
    expected, total = plain.weight.grad.clone(), scale.grad  # type: ignore[union-attr]
    plain.weight.grad = scale.grad = None
    model = fully_shard(plain, mesh=init_device_mesh("cpu", (comm.size,)))
    (model(x[comm.rank]).sum() * scale).backward()
    with advised(NotImplementedError, "leave it out"):
        sync_gradients([*model.parameters(), scale], comm)
    sync_gradients(scale, comm)
    mean = model.weight.grad.full_tensor()
    return torch.allclose(mean * comm.size, expected) and torch.allclose(scale.grad, total)  # type: ignore[arg-type]


def test_what_is_sharded_over_the_ranks_is_left_out_of_the_sum() -> None:
    assert run_processes(2, sharded) == [True, True]


def test_logits_and_labels_are_rows_of_this_rank_and_numbers_of_tokens() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(8, 5), torch.arange(8) % 5
    expected = F.cross_entropy(logits, labels)
    plan = Plan(Mask([8]), Layout.zigzag([8], 2))
    with advised(ValueError, "drop the batch dimension of both, as by x[0]"):
        cross_entropy(logits[None], labels[None], valid=8)
    with advised(ValueError, "give labels.long()"):
        cross_entropy(logits, labels.int(), valid=8)
    for given in (logits[None][0], labels[None][0]), (logits, labels.int().long()):
        assert torch.allclose(cross_entropy(*given, valid=8), expected)

    def rank(comm: Comm) -> Tensor:
        own = seqpar.shard(logits, plan, comm.rank)
        with advised(ValueError, "shard the labels too, seqpar.shard(labels, plan, rank)"):
            cross_entropy(own, labels, valid=8)
        return cross_entropy(own, seqpar.shard(labels, plan, comm.rank), valid=8)

    assert torch.allclose(sum(run_threads(2, rank)), expected)


@pytest.mark.parametrize("linear", [False, True])
def test_labels_are_counted_before_they_are_sharded(linear: bool) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(8, 3), torch.randn(5, 3)
    labels = (torch.arange(8) % 5).index_fill(0, torch.tensor(6), -100)
    plan = Plan(Mask([8]), Layout.contiguous(8, 2))

    def loss(rows: Tensor, labels: Tensor, valid: int | Tensor) -> Tensor:
        if linear:
            return linear_cross_entropy(rows, weight, labels, valid=valid)
        return cross_entropy(rows @ weight.T, labels, valid=valid)

    def rank(comm: Comm) -> Tensor:
        rows, wanted = (seqpar.shard(x, plan, comm.rank) for x in (hidden, labels))
        own = int((wanted >= 0).sum())
        for short in (0, own - 1, torch.tensor(own - 1)):
            with advised(ValueError, "count those of all ranks, before they are sharded"):
                loss(rows, wanted, short)
        assert loss(rows, wanted, torch.tensor(0.5)).isfinite(), "a divisor of one's own"
        return loss(rows, wanted, int((labels >= 0).sum()))

    assert torch.allclose(sum(run_threads(2, rank)), F.cross_entropy(hidden @ weight.T, labels))
