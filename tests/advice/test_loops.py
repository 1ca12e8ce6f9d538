"""What a parallel model says of the loop around it, done: losses and gradients are those of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import seqpar
from seqpar import Comm
from seqpar.comm import LocalComm
from seqpar.testing import run_threads
from seqpar.train import all_sum, sync_gradients
from tests.advice.advised import advised, default_group

pytest.importorskip("transformers")

from tests.integrations.hf.models import batches, build  # noqa: E402

EVERY = batches("right", 2)
MODEL = build("llama", num_hidden_layers=1)


def union() -> tuple[float, Tensor]:
    """The loss of both ranks' batches in one process, and the gradient of the head."""
    model = copy.deepcopy(MODEL)
    counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in EVERY]
    loss = sum(model(**batch).loss * n for batch, n in zip(EVERY, counts)) / sum(counts)
    loss.backward()  # type: ignore[union-attr]
    return float(loss.detach()), model.lm_head.weight.grad  # type: ignore[union-attr]


LOSS, GRADIENT = union()


def head(model: nn.Module) -> Tensor:
    return model.lm_head.weight.grad  # type: ignore[union-attr, return-value]


def is_right(loss: Tensor | float, gradient: Tensor | None = None) -> bool:
    """Whether that is the loss of the union, and its gradient."""
    near = gradient is None or torch.allclose(gradient, GRADIENT, atol=1e-5)
    return near and float(loss) == pytest.approx(LOSS, rel=1e-5)


def loaded(rank: int, given: nn.Module) -> nn.Module:
    given.load_state_dict(MODEL.state_dict())
    return given


def seeded(rank: int, given: nn.Module) -> nn.Module:
    return made[rank]


made = []
for _ in range(2):  # ranks that are threads share one generator
    torch.manual_seed(0)
    made.append(type(MODEL)(MODEL.config))


@pytest.mark.parametrize("way", [loaded, seeded])
def test_ranks_load_or_draw_the_same_weights(way: Callable[[int, nn.Module], nn.Module]) -> None:
    torch.manual_seed(1)
    others = [type(MODEL)(MODEL.config) for _ in range(2)]

    def rank(comm: Comm) -> float:
        with (
            seqpar.parallelize(others[comm.rank], comm),
            advised(
                ValueError,
                "load the same weights on every rank, or call torch.manual_seed(0) before you create the model",
            ),
        ):
            others[comm.rank](**EVERY[comm.rank])
        model = way(comm.rank, others[comm.rank])
        with seqpar.parallelize(model, comm):
            return float(model(**EVERY[comm.rank]).loss.detach())

    losses = run_threads(2, rank)
    assert losses[0] == losses[1] and (way is seeded or is_right(losses[0]))


def test_every_rank_calls_backward_even_where_no_label_counts() -> None:
    unlabelled = {**EVERY[1], "labels": torch.full_like(EVERY[1]["labels"], -100)}
    plain = copy.deepcopy(MODEL)
    plain(**EVERY[0]).loss.backward()

    def rank(comm: Comm) -> bool:
        model, batch = copy.deepcopy(MODEL), (EVERY[0], unlabelled)[comm.rank]
        with seqpar.parallelize(model, comm):
            loss = model(**batch).loss
            if not comm.rank:
                loss.backward()
            with advised(ValueError, "call backward on every rank, even where no label counts"):
                sync_gradients(model.parameters(), comm)
            if comm.rank:
                loss.backward()
            sync_gradients(model.parameters(), comm)
        return torch.allclose(head(model), head(plain), atol=1e-5)

    assert run_threads(2, rank) == [True, True]


@pytest.mark.parametrize("mistake", ["the step before the sum", "weights of one rank"])
def test_gradients_are_summed_before_every_step_and_weights_loaded_on_every_rank(mistake: str) -> None:
    def step(comm: Comm, model: nn.Module, *, wrong: str = "") -> Tensor:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(**EVERY[comm.rank]).loss
        loss.backward()
        if wrong == "the step before the sum":
            optimizer.step()
        sync_gradients(model.parameters(), comm)
        gradient = head(model).clone()
        optimizer.step()
        optimizer.zero_grad()
        if wrong == "weights of one rank" and comm.rank:
            model.load_state_dict({name: x + 1 for name, x in MODEL.state_dict().items()})
        return gradient if is_right(loss.detach(), gradient) else gradient * torch.nan

    def rank(comm: Comm) -> bool:
        model = copy.deepcopy(MODEL)
        seqpar.parallelize(model, comm)
        with advised(
            ValueError,
            "start again from equal weights, call seqpar.train.sync_gradients(model.parameters(), comm) before every "
            "step, and load weights on every rank",
        ):
            for _ in range(2):
                step(comm, model, wrong=mistake)
        model.load_state_dict(MODEL.state_dict())
        right = bool(step(comm, model).isfinite().all())
        model(**EVERY[comm.rank])  # after the step weights are equal
        return right

    assert run_threads(2, rank) == [True, True]


@pytest.mark.parametrize("averaged", [True, False])
def test_gradients_are_summed_or_averaged_by_a_wrapper(averaged: bool) -> None:
    def rank(comm: Comm) -> bool:
        model = copy.deepcopy(MODEL)
        with seqpar.parallelize(model, comm, average_over=2):
            loss = model(**EVERY[comm.rank]).loss
            loss.backward()
            with advised(
                ValueError, "leave sync_gradients out under a wrapper over these ranks, and average_over without one"
            ):
                sync_gradients(model.parameters(), comm)
            if averaged:  # as a wrapper does
                return is_right(loss, all_sum(head(model), comm) / 2)
        model.zero_grad()
        with seqpar.parallelize(model, comm):
            loss = model(**EVERY[comm.rank]).loss
            loss.backward()
            sync_gradients(model.parameters(), comm)
            return is_right(loss, head(model))

    assert run_threads(2, rank) == [True, True]


def test_a_wrapper_is_told_to_the_model() -> None:
    def step(average_over: int) -> Tensor:
        model = copy.deepcopy(MODEL)
        with seqpar.parallelize(model, LocalComm(), average_over=average_over):
            DistributedDataParallel(model)(**EVERY[0]).loss.backward()
        return head(model)

    plain = copy.deepcopy(MODEL)
    plain(**EVERY[0]).loss.backward()
    with default_group():
        with advised(UserWarning, "give seqpar.parallelize(..., average_over={})"):
            step(2)
        assert torch.allclose(step(1), head(plain), atol=1e-5)


def test_every_rank_prefetches_as_many_batches() -> None:
    def rank(comm: Comm, drop_last: bool) -> int:
        model = copy.deepcopy(MODEL)
        handle = seqpar.parallelize(model, comm)
        rows = EVERY[0]["input_ids"][:1].expand(4 + comm.rank, -1)
        loader = torch.utils.data.DataLoader(
            [{"input_ids": row, "labels": row} for row in rows], batch_size=2, drop_last=drop_last
        )
        with torch.no_grad():
            return sum(bool(model(**batch).loss.isfinite()) for batch in handle.prefetch(loader))

    def uneven(comm: Comm) -> None:
        with advised(ValueError, "give every rank the same number of batches, as drop_last=True of a DataLoader does"):
            rank(comm, False)

    run_threads(2, uneven)
    assert run_threads(2, rank, True) == [2, 2]
