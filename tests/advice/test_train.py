"""What errors of seqpar.train say to do, done: sums, norms and means are those of one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate

import seqpar
from seqpar import Comm, Layout, LocalComm, Mask, Plan
from seqpar.testing import run_processes, run_threads
from seqpar.train import (
    Mean,
    all_sum,
    check_model,
    clip_grad_norm,
    cross_entropy,
    grad_norm,
    linear_cross_entropy,
    sync_gradients,
    token_log_probs,
)
from tests.advice.remedies import advised, default_group


def parameter(shape: tuple[int, ...], grad: float = 1.0) -> nn.Parameter:
    p = nn.Parameter(torch.zeros(shape))
    p.grad = torch.full(shape, grad)
    return p


def test_norms_over_tokens_are_frozen_or_over_channels() -> None:
    x = torch.randn(8, 4)
    model = nn.BatchNorm1d(4)
    with advised(
        NotImplementedError, "freeze them with .eval(), or use LayerNorm, RMSNorm or GroupNorm over a token's channels"
    ):
        check_model(model)
    for norm in (model.eval(), nn.LayerNorm(4), nn.RMSNorm(4), nn.GroupNorm(2, 4)):
        check_model(norm)
        assert torch.allclose(torch.cat([norm(x[:3]), norm(x[3:])]), norm(x), atol=1e-6)


def test_ranks_give_the_same_parameters() -> None:
    def rank(comm: Comm) -> list[Tensor]:
        several = [parameter((2,), 1.0 + comm.rank), parameter((3,), 3.0)]
        with advised(ValueError, "give every rank the same parameters in the same order, and one bucket_bytes"):
            sync_gradients(several[:: 1 if comm.rank else -1], comm)
        sync_gradients(several, comm)
        return [p.grad for p in several]

    for grads in run_threads(2, rank):
        assert grads[0].tolist() == [3.0] * 2 and grads[1].tolist() == [6.0] * 3


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


def test_micro_batches_are_summed_once_and_left_out_steps_start_from_zero() -> None:
    def rank(comm: Comm, last: bool, zero: bool) -> list[float]:
        p = nn.Parameter(torch.zeros(2))
        for step in range(2):
            (p.sum() * (1.0 + comm.rank)).backward()
            if step or not last:
                sync_gradients(p, comm)
            if zero and not step:
                p.grad = None
        return p.grad.tolist()  # type: ignore[union-attr, no-any-return]

    with advised(
        UserWarning,
        "call it once, after the last backward of a step, and zero_grad() where a step is left out, if only of some "
        "parameters",
    ):
        run_threads(2, rank, False, False)
    assert run_threads(2, rank, True, False) == [[6.0, 6.0]] * 2
    assert run_threads(2, rank, False, True) == [[3.0, 3.0]] * 2


def test_sparse_gradients_are_made_dense() -> None:
    def rank(comm: Comm) -> list[float]:
        p = parameter((2,))
        p.grad = (p.grad * (1.0 + comm.rank)).to_sparse()
        with advised(NotImplementedError, "give it p.grad = p.grad.to_dense().to({}) before"):
            sync_gradients(p, comm)
        with advised(NotImplementedError, "give p.grad = p.grad.to_dense() before"):
            grad_norm(p)
        p.grad = p.grad.to_dense()
        assert grad_norm(p) == p.grad.norm()
        p.grad = p.grad.to(p.dtype)
        sync_gradients(p, comm)
        return p.grad.tolist()  # type: ignore[no-any-return]

    assert run_threads(2, rank) == [[3.0, 3.0]] * 2


def test_gradients_of_eight_bits_are_kept_in_fp32() -> None:
    def rank(comm: Comm) -> list[float]:
        p = nn.Parameter(torch.zeros(2).to(torch.float8_e5m2))
        given = torch.tensor([1.0, 2.0 + comm.rank]).to(p.dtype)
        p.grad = given
        with advised(
            NotImplementedError,
            "set p.grad = None, then p.grad_dtype = torch.float32, and give it a gradient of that dtype",
        ):
            sync_gradients(p, comm)
        p.grad = None
        p.grad_dtype = torch.float32
        p.grad = given.float()
        sync_gradients(p, comm)
        return p.grad.tolist()  # type: ignore[no-any-return]

    assert run_threads(2, rank) == [[2.0, 5.0]] * 2


def test_gradients_of_dtensors_lie_as_their_parameters_do() -> None:
    with default_group():
        mesh = DeviceMesh("cpu", [0])
        p = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Replicate()]))
        p.grad = DTensor.from_local(torch.tensor([3.0, 4.0]), mesh, [Partial()])
        with advised(NotImplementedError, "redistribute it to Shard or Replicate"):
            grad_norm(p)
        with advised(NotImplementedError, "give it p.grad = p.grad.redistribute(placements=p.placements) before"):
            sync_gradients(p, LocalComm())
        p.grad = p.grad.redistribute(placements=p.placements)
        sync_gradients(p, LocalComm())
        assert float(grad_norm(p)) == 5.0 and p.grad.to_local().tolist() == [3.0, 4.0]


def test_losses_take_a_ranks_rows_of_a_dtensor() -> None:
    labels, weight = torch.tensor([0, 1, 2]), torch.randn(4, 5)
    with default_group():
        hidden = DTensor.from_local(torch.randn(3, 5), DeviceMesh("cpu", [0]), [Replicate()])
        with advised(NotImplementedError, "give this rank's rows, x.to_local()"):
            linear_cross_entropy(hidden, weight, labels, valid=3)
        loss = linear_cross_entropy(hidden.to_local(), weight, labels, valid=3)
        assert torch.allclose(loss, F.cross_entropy(hidden.to_local() @ weight.T, labels))


def test_a_mean_is_of_every_batch_on_every_rank() -> None:
    def rank(comm: Comm) -> float:
        part = Mean()
        part.add(torch.tensor(1.0), 3 + comm.rank)
        with advised(ValueError, "add every batch on every rank, with the valid of all ranks"):
            part.result(comm)
        mean = Mean()
        mean.add(torch.tensor((3.0 + comm.rank) / 7, dtype=torch.float64), 7)
        return mean.result(comm)

    assert run_threads(2, rank) == [1.0] * 2


def test_truth_values_are_summed_as_numbers() -> None:
    def rank(comm: Comm) -> list[int]:
        x = torch.tensor([True, comm.rank == 0])
        with advised(ValueError, "give x.long()"):
            all_sum(x, comm)
        return all_sum(x.long(), comm).tolist()  # type: ignore[no-any-return]

    assert run_threads(2, rank) == [[2, 1]] * 2


def test_unsigned_numbers_are_summed_as_wider_ones() -> None:
    def rank(comm: Comm) -> list[int]:
        x = torch.tensor([1, 65535], dtype=torch.uint16)
        with advised(NotImplementedError, "give x.long()"):
            all_sum(x, comm)
        return all_sum(x.long(), comm).tolist()  # type: ignore[no-any-return]

    assert run_threads(2, rank) == [[2, 131070]] * 2


def test_eight_bits_are_summed_as_wider_numbers() -> None:
    def rank(comm: Comm) -> list[float]:
        x = torch.tensor([1.5, 2.0 + comm.rank]).to(torch.float8_e4m3fn)
        with advised(NotImplementedError, "give x.float()"):
            all_sum(x, comm)
        return all_sum(x.float(), comm).tolist()  # type: ignore[no-any-return]

    assert run_threads(2, rank) == [[3.0, 5.0]] * 2


def test_a_head_lies_where_its_rows_do() -> None:
    hidden, labels = torch.eye(2), torch.tensor([0, 1])
    head = nn.Linear(2, 2, device="meta")
    with advised(ValueError, "give both on one device"):
        linear_cross_entropy(hidden, head.weight, labels, valid=2)
    weight = torch.zeros(2, 2)
    with advised(ValueError, "give both on one device"):
        linear_cross_entropy(hidden, weight, labels.to("meta"), valid=2)
    assert linear_cross_entropy(hidden, weight, labels, valid=2).isclose(torch.tensor(2.0).log())


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


def flat(comm: Comm, orig: bool) -> tuple[float, float]:
    """What FSDP1 says of the norm before and after it has clipped, of the mean of all ranks' gradients."""
    torch.manual_seed(0)
    model = FullyShardedDataParallel(nn.Linear(3, 2), use_orig_params=orig, device_id=torch.device("cpu"))
    model(torch.arange(3.0 * comm.size).reshape(comm.size, 3)[comm.rank]).sum().backward()
    for norm in (grad_norm, lambda parameters: clip_grad_norm(parameters, 0.1)):
        with advised(NotImplementedError, "call the wrapper's own clip_grad_norm_(max_norm), which returns the norm"):
            norm(model.parameters())
    with advised(
        NotImplementedError,
        "leave sync_gradients out over the same ranks, and shard with fully_shard over others",
    ):
        sync_gradients(model.parameters(), comm)
    return float(model.clip_grad_norm_(0.1)), float(model.clip_grad_norm_(1.0))


def beside(comm: Comm) -> float:
    """The norm of gradients that `fully_shard` leaves over other ranks, and that are then summed over the comm."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (1, comm.size), mesh_dim_names=("dp", "sp"))
    model = fully_shard(nn.Linear(3, 2), mesh=mesh["dp"])
    (model(torch.arange(3.0 * comm.size).reshape(comm.size, 3)[comm.rank]).sum() / comm.size).backward()
    sync_gradients(model.parameters(), comm)
    return float(grad_norm(model.parameters()))


def test_shards_of_fsdp1_are_clipped_by_their_wrapper() -> None:
    plain = nn.Linear(3, 2)
    (plain(torch.arange(6.0).reshape(2, 3)).sum() / 2).backward()
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None]))
    for orig in (True, False):
        for before, after in run_processes(2, flat, orig):
            assert abs(before - norm) < 1e-5 and abs(after - 0.1) < 1e-5
    assert all(abs(found - norm) < 1e-5 for found in run_processes(2, beside))


class Head(nn.Module):
    """Computes a loss of its weight in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12.0).reshape(4, 3) / 10)

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, self.weight, labels, valid=len(labels))


def test_a_loss_of_a_sharded_weight_is_computed_in_the_forward_that_gathers_it() -> None:
    hidden, labels = torch.eye(3), torch.tensor([0, 2, 3])
    expected = F.cross_entropy(hidden @ Head().weight.T, labels)
    with default_group():
        model = fully_shard(Head(), mesh=init_device_mesh("cpu", (1,)))
        with advised(
            NotImplementedError,
            "call it inside the forward of the module that fully_shard wraps, where the {} is whole",
        ):
            linear_cross_entropy(hidden, model.weight, labels, valid=3)
        assert torch.allclose(model(hidden, labels), expected)


def test_a_number_that_is_learned_elsewhere_is_detached() -> None:
    hidden, weight, labels = torch.randn(6, 4), torch.randn(9, 4), torch.arange(6)
    temperature = torch.tensor(0.5, requires_grad=True)
    with advised(NotImplementedError, "detach it"):
        token_log_probs(hidden, weight, labels, temperature=temperature)
    found = token_log_probs(hidden, weight, labels, temperature=temperature.detach())
    expected = (hidden @ weight.T / 0.5).log_softmax(-1).gather(1, labels[:, None])[:, 0]
    assert torch.allclose(found, expected, atol=1e-5)


def test_a_gradient_through_ranks_is_autograds() -> None:
    def rank(comm: Comm) -> Tensor:
        x = torch.ones(2, requires_grad=True)

        def loss(x: Tensor) -> Tensor:
            return all_sum((comm.rank + 1) * x, comm).square().sum() / comm.size

        with advised(NotImplementedError, "call it outside, and differentiate with torch.autograd.grad"):
            torch.func.grad(loss)(x)
        return torch.autograd.grad(loss(x), x)[0]

    one, two = run_threads(2, rank)
    assert torch.equal(one, torch.full((2,), 6.0)) and torch.equal(two, 2 * one)


def test_ranks_freeze_the_same_parameters() -> None:
    def rank(comm: Comm) -> bool:
        p = nn.Parameter(torch.ones(2), requires_grad=not comm.rank)
        if not comm.rank:
            p.grad = torch.ones(2)
        with advised(ValueError, "freeze the same parameters on every rank"):
            sync_gradients([p], comm)
        p.requires_grad_(True)
        p.grad = torch.ones(2)
        sync_gradients([p], comm)
        return torch.equal(p.grad, torch.full((2,), 2.0))

    assert run_threads(2, rank) == [True, True]


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


def test_parameters_are_given_in_place_of_their_model() -> None:
    def rank(comm: Comm) -> list[float]:
        model = nn.Linear(1, 2, bias=False)
        model.weight.grad = torch.full((2, 1), 1.0 + comm.rank)
        with advised(TypeError, "give model.parameters()"):
            sync_gradients(model, comm)  # type: ignore[arg-type]
        sync_gradients(model.parameters(), comm)
        return model.weight.grad[:, 0].tolist()  # type: ignore[no-any-return]

    assert run_threads(2, rank) == [[3.0, 3.0]] * 2
