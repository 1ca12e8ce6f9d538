"""Checks of a training step: when ranks compare their weights, and what a step of an optimizer is."""

import copy
import gc
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from seqpar import Comm
from seqpar.testing import run_threads
from seqpar.train import all_sum, clip_grad_norm, sync_gradients
from seqpar.train.checks import StepChecks

with torch.random.fork_rng():
    torch.manual_seed(0)
    MODEL = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))


def counted(checks: StepChecks) -> list[int]:
    """Counts the weights that are hashed from now on."""
    found, before = [0], checks._hashes

    def hashes() -> list[int]:
        found[0] += 1
        return before()

    checks._hashes = hashes  # type: ignore[method-assign]
    return found


def forward(checks: StepChecks, model: nn.Module, rank: int) -> Tensor:
    checks.gather("a forward", None, facts={})
    return model(torch.full((2, 3), 1.0 + rank)).sum()


@pytest.mark.parametrize("how", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_weights_that_steps_alone_have_written_are_compared_once(kind: Any, how: dict[str, bool]) -> None:
    """Some optimizers change no version of parameters."""

    def rank(comm: Comm) -> int:
        model = copy.deepcopy(MODEL)
        checks, optimizer = StepChecks(model, comm), kind(model.parameters(), lr=0.1, **how)
        count = counted(checks)
        for step in range(5):
            for _ in range(2):
                forward(checks, model, comm.rank).backward()
            sync_gradients(model.parameters(), comm)
            if step % 2:
                clip_grad_norm(model.parameters(), 1e-3)
            else:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            with torch.no_grad():
                forward(checks, model, comm.rank)
        return count[0]

    assert run_threads(2, rank) == [1, 1]


def in_place(model: Any) -> None:
    with torch.no_grad():
        model[0].weight *= 2


def loaded(model: Any) -> None:
    model.load_state_dict({name: x * 2 for name, x in model.state_dict().items()})


def assigned(model: Any) -> None:
    model[1][1].bias.data = model[1][1].bias.data * 2


def replaced(model: Any) -> None:
    model[0] = nn.Linear(3, 4)
    nn.init.ones_(model[0].weight)
    nn.init.ones_(model[0].bias)


def added(model: Any) -> None:
    model[1].append(nn.Linear(2, 2))
    nn.init.ones_(model[1][2].weight)
    nn.init.ones_(model[1][2].bias)


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("change", [in_place, loaded, assigned, replaced, added])
def test_weights_that_were_written_otherwise_are_compared_at_the_next_forward(change: Any, alike: bool) -> None:
    def rank(comm: Comm) -> int:
        model = copy.deepcopy(MODEL)
        checks = StepChecks(model, comm)
        forward(checks, model, comm.rank)
        count = counted(checks)
        if alike or comm.rank:
            change(model)
        if not alike:
            with pytest.raises(
                ValueError, match="weights differ between rank 0 and rank 1|is a parameter of rank 1, and not"
            ):
                forward(checks, model, comm.rank)
            model = copy.deepcopy(MODEL)
            return 1
        for _ in range(3):
            forward(checks, model, comm.rank)
        return count[0]

    assert run_threads(2, rank) == [1, 1]


def at_every_step(several: list[nn.Parameter], comm: Comm, step: int) -> None:
    sync_gradients(several, comm)


def by_hand(several: list[nn.Parameter], comm: Comm, step: int) -> None:
    for p in several:
        p.grad = all_sum(p.grad, comm)  # type: ignore[arg-type]


def of_a_part(several: list[nn.Parameter], comm: Comm, step: int) -> None:
    sync_gradients(several[1:], comm)


def at_the_first_step(several: list[nn.Parameter], comm: Comm, step: int) -> None:
    """Later gradients are in the same memory, on which the mark of that sum stands."""
    if not step:
        sync_gradients(several, comm)


@pytest.mark.parametrize(
    "summing, right", [(at_every_step, True), (by_hand, True), (of_a_part, False), (at_the_first_step, False)]
)
def test_a_step_by_gradients_that_were_not_summed_lets_ranks_compare(summing: Callable[..., None], right: bool) -> None:
    def rank(comm: Comm) -> bool:
        model = copy.deepcopy(MODEL)
        checks, optimizer = StepChecks(model, comm), torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            try:
                forward(checks, model, comm.rank).backward()
            except ValueError as error:
                return "stepped with gradients that were not summed over ranks" not in str(error)
            summing(list(model.parameters()), comm, step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return True

    assert run_threads(2, rank) == [right, right]


def test_a_step_that_one_rank_leaves_out_is_named() -> None:
    def rank(comm: Comm) -> None:
        model = copy.deepcopy(MODEL)
        checks, optimizer = StepChecks(model, comm), torch.optim.SGD(model.parameters(), lr=0.1)
        forward(checks, model, comm.rank).backward()
        sync_gradients(model.parameters(), comm)
        if comm.rank:
            optimizer.step()
        with pytest.raises(ValueError, match="has stepped 1 times on rank 1 and 0 times on rank 0, as .* GradScaler"):
            forward(checks, model, comm.rank)

    run_threads(2, rank)


def test_checks_keep_no_model_and_listen_no_longer_than_it_lives() -> None:
    def rank(comm: Comm) -> bool:
        model = copy.deepcopy(MODEL)
        checks = StepChecks(model, comm)
        forward(checks, model, comm.rank)
        gone = ref(model)
        del model
        gc.collect()
        return gone() is None

    assert run_threads(2, rank) == [True, True]
