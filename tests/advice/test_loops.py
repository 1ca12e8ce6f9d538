"""What a parallel model says of the loop around it, done: losses and gradients are those of one process."""

from __future__ import annotations

import copy
import math
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import seqpar
from seqpar import Comm
from seqpar.comm import LocalComm, PeerError
from seqpar.testing import run_processes, run_threads
from seqpar.train import all_sum, sync_gradients, token_mean
from tests.advice.remedies import advised, default_group
from tests.comm.cases import impatient

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
ALONE = float(MODEL(**EVERY[0]).loss.detach())  # of the first rank's batch


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


def test_a_run_starts_again_and_sums_gradients_before_every_step() -> None:
    def rank(comm: Comm) -> bool:
        model = copy.deepcopy(MODEL)
        with seqpar.parallelize(model, comm):
            model(**EVERY[comm.rank]).loss.backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
            with advised(
                ValueError,
                "start again from equal weights, call seqpar.train.sync_gradients(model.parameters(), comm) before "
                "every step, and load weights on every rank",
            ):
                model(**EVERY[comm.rank])
            model.load_state_dict(MODEL.state_dict())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(2):
                loss = model(**EVERY[comm.rank]).loss
                loss.backward()
                sync_gradients(model.parameters(), comm)
                assert step or is_right(loss, head(model))
                optimizer.step()
                optimizer.zero_grad()
            return float(model(**EVERY[comm.rank]).loss.detach()) < LOSS

    assert run_threads(2, rank) == [True, True]


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


def own_mean(x: Tensor, comm: Comm) -> Tensor:
    return x.mean(0)


def of_first_rank(x: Tensor, comm: Comm) -> Tensor:
    return all_sum(x.mean(0) if not comm.rank else x.new_zeros(x.shape[1:]), comm)


def test_a_buffer_is_made_from_the_tokens_of_all_ranks_or_broadcast() -> None:
    rows = torch.arange(40.0).view(2, 5, 4)

    def rank(comm: Comm, mean: Callable[[Tensor, Comm], Tensor]) -> Tensor:
        model = copy.deepcopy(MODEL)
        model.model.register_buffer("codes", torch.zeros(4))
        with seqpar.parallelize(model, comm):
            for _ in range(2):
                model(**EVERY[comm.rank]).loss.backward()
                model.zero_grad()
                model.model.codes.lerp_(mean(rows[comm.rank], comm), 0.5)
            model(**EVERY[comm.rank])
        return model.model.codes

    with advised(
        UserWarning,
        "broadcast it from one rank, and make its changes from the tokens of all ranks, as by seqpar.train.token_mean",
    ):
        run_threads(2, rank, own_mean)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole, first = run_threads(2, rank, token_mean), run_threads(2, rank, of_first_rank)
    for found in whole:
        assert torch.allclose(found, 0.75 * rows.flatten(0, 1).mean(0))
    for found in first:
        assert torch.allclose(found, 0.75 * rows[0].mean(0))


def test_gradients_are_summed_before_a_scaler_looks_at_them() -> None:
    def steps(comm: Comm, model: nn.Module, *, first: bool) -> list[float]:
        """Weights after each step with a scale at which one rank's gradients overflow."""
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler, found = torch.amp.GradScaler("cpu", init_scale=2.0**126), []
        for _ in range(4):
            loss = model(**EVERY[comm.rank]).loss * (1 if comm.rank else 1e3)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            if first:
                sync_gradients(model.parameters(), comm)
            scaler.unscale_(optimizer)
            if not first:
                sync_gradients(model.parameters(), comm)
            scaler.step(optimizer)
            scaler.update()
            found.append(float(model.lm_head.weight.detach().double().norm()))
        return found

    def rank(comm: Comm) -> list[float]:
        model = copy.deepcopy(MODEL)
        with seqpar.parallelize(model, comm):
            with advised(
                ValueError,
                "start again from equal weights, and call sync_gradients before GradScaler.unscale_, so that all ranks "
                "find the same overflow",
            ):
                steps(comm, model, first=False)
            model.load_state_dict(MODEL.state_dict())
        with seqpar.parallelize(model, comm):
            return steps(comm, model, first=True)

    first, second = run_threads(2, rank)
    assert first == second and all(math.isfinite(x) for x in first)


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


def test_ranks_freeze_the_same_layers() -> None:
    def rank(comm: Comm) -> bool:
        model = copy.deepcopy(MODEL)
        seqpar.parallelize(model, comm)
        model(**EVERY[comm.rank])
        model.model.layers[0].requires_grad_(not comm.rank)
        with advised(ValueError, "freeze the same parameters on every rank"):
            model(**EVERY[comm.rank])
        model.model.layers[0].requires_grad_(False)
        loss = model(**EVERY[comm.rank]).loss
        loss.backward()
        sync_gradients(model.parameters(), comm)
        return is_right(loss.detach(), head(model))

    assert run_threads(2, rank) == [True, True]


def test_every_rank_has_as_many_batches_or_a_model_of_its_own() -> None:
    ended = threading.Event()

    def uneven(comm: Comm) -> None:
        model = copy.deepcopy(MODEL)
        seqpar.parallelize(model, comm)
        with torch.no_grad():
            model(**EVERY[comm.rank])
        impatient(comm, 0.5)
        if not comm.rank:  # whose loader has ended
            assert ended.wait(60.0)
            return
        with advised(
            PeerError,
            "give every rank as many batches as the others, or run the model on one rank alone inside "
            "`with handle.local():`, where handle is what `parallelize` returned",
        ):
            model(**EVERY[comm.rank])
        ended.set()

    run_threads(2, uneven)

    def even(comm: Comm) -> bool:
        model = copy.deepcopy(MODEL)
        handle = seqpar.parallelize(model, comm)
        found = [float(model(**EVERY[comm.rank]).loss.detach()) for _ in range(2)]
        if comm.rank:
            with handle.local():
                found.append(float(model(**EVERY[0]).loss.detach()))
        return all(map(is_right, found[:2])) and found[2:] == [pytest.approx(ALONE, rel=1e-5)] * comm.rank

    assert run_threads(2, even) == [True, True]


def ends_first(comm: Comm, folder: Path) -> bool:
    """The loader of rank 1 has one batch less, and its process ends."""
    model = copy.deepcopy(MODEL)
    seqpar.parallelize(model, comm)
    with torch.no_grad():
        model(**EVERY[comm.rank])
        if comm.rank:
            os._exit(0)
        with advised(
            PeerError,
            "see in the log of {} why it ended, and if it had no batch left, give every rank as many as the others",
        ):
            model(**EVERY[comm.rank])
    (folder / "told").touch()
    return True


def evenly(comm: Comm) -> bool:
    """Both ranks have two batches."""
    model = copy.deepcopy(MODEL)
    seqpar.parallelize(model, comm)
    return all([is_right(model(**EVERY[comm.rank]).loss.detach()) for _ in range(2)])


@pytest.mark.parametrize("kind", ["gloo", "shm"])
def test_a_rank_that_ends_has_its_reason_in_its_log(kind: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="rank 1: its process died with exit code 0"):
        run_processes(2, ends_first, tmp_path, comm=kind)
    assert (tmp_path / "told").exists()
    assert run_processes(2, evenly, comm=kind) == [True, True]


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


@pytest.mark.parametrize("way", ["own", "replicated"])
def test_ranks_bring_batches_of_their_own_or_say_that_they_do_not(way: str) -> None:
    def rank(comm: Comm, source: str, own: bool) -> float:
        model = copy.deepcopy(MODEL)
        with seqpar.parallelize(model, comm, source=source):
            found = [float(model(**EVERY[comm.rank if own else 0]).loss.detach()) for _ in range(3)]
        return found[-1]

    with advised(
        UserWarning,
        "give each rank its own, or seqpar.parallelize(..., source='replicated') to compute it once on all of them",
    ):
        run_threads(2, rank, "sharded", False)
    if way == "own":
        assert all(map(is_right, run_threads(2, rank, "sharded", True)))
    else:
        assert run_threads(2, rank, "replicated", False) == pytest.approx([ALONE] * 2, rel=1e-5)


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
        with advised(ValueError, "give every rank as many batches, as by drop_last=True of a DataLoader"):
            rank(comm, False)

    run_threads(2, uneven)
    assert run_threads(2, rank, True) == [2, 2]
