"""What happens to a model after `parallelize`, around it, or inside its stages: right, or an error by name."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.two_tensor import TwoTensor

from seqpar.comm import Comm, LocalComm
from seqpar.dsp import parallelize
from seqpar.ops.core.compared import hashed, leaves
from seqpar.testing import run_processes, run_threads
from tests.dsp.cases import rand
from tests.dsp.models import (
    PAIRS,
    SHARDED,
    WEATHER,
    DiT,
    PairStack,
    Weather,
    compare_with_one,
    compared,
    dit,
    made,
    walks,
)
from tests.dsp.passes import (
    GRID,
    Checkpointed,
    drawn,
    dropout,
    dropped_attention,
    functional,
    numbers,
    passes,
    recomputing,
    weather,
)  # fmt: skip
from tests.dsp.planners import by_hand
from tests.ranks import error_of, errors


def copies(comm: Comm, which: str) -> dict[str, Tensor]:
    """A copy has weights of its own, and is parallelized too: its gradients are shares."""
    model = weather(comm)
    if which == "used":
        numbers(model)
        model.zero_grad()
    other = copy.deepcopy(copy.deepcopy(model))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    found = numbers(other)
    assert all(p.grad is None for p in model.parameters())
    assert not model(GRID).any()
    return found


@pytest.mark.parametrize("which", ["fresh", "used"])
def test_a_copy_is_parallelized_with_its_own_weights(which) -> None:
    compared(run_threads(3, copies, which), numbers(made(Weather)))


def pickled(comm: Comm) -> None:
    model = made(Weather)
    parallelize(model, comm, WEATHER, plan=SHARDED)
    with pytest.raises(NotImplementedError, match="a parallel .*save model.state_dict"):
        pickle.dumps(model)
    with pytest.raises(ValueError, match="is a copy of a parallel model"):
        parallelize(copy.deepcopy(model), comm, WEATHER)
    assert model.state_dict().keys() == made(Weather).state_dict().keys()
    part = pickle.loads(pickle.dumps(model.mix[0].net))
    assert torch.equal(part(GRID[..., :1].expand(-1, -1, -1, 8)), model.mix[0].net(GRID[..., :1].expand(-1, -1, -1, 8)))


def test_a_parallelized_model_is_saved_by_its_state_dict() -> None:
    run_threads(1, pickled)


def put_in(model: nn.Module) -> None:
    model.extra = nn.Linear(8, 8).double()


def taken_out(model: nn.Module) -> None:
    model.mix[0] = made(Weather).mix[0]


def statistics(model: nn.Module) -> None:
    model.mix[1].net.append(nn.BatchNorm2d(5).double())


def changed(comm: Comm, change: Callable[[nn.Module], None], x: Tensor) -> list[str]:
    """What two forwards after a change say."""
    model = weather(comm)
    model(x[:1])
    change(model)
    return [error_of(model, x) for _ in range(2)]


@pytest.mark.parametrize(
    "change, words",
    [
        (put_in, "ValueError: extra of Weather is a Linear, in no stage, not between stages and not outside"),
        (taken_out, "NotImplementedError: stage north.1 is called where mix.0 should be"),
        (dropout, "NotImplementedError: mix.0.net.4 is dropout with p=0.5 in training"),
        (statistics, "NotImplementedError: mix.1.net.4 of Weather is a BatchNorm2d"),
        (functional, "NotImplementedError: mix.0 calls dropout, which would draw other numbers"),
        (dropped_attention, "NotImplementedError: mix.0 calls scaled_dot_product_attention"),
        (drawn, "NotImplementedError: mix.0 calls rand_like"),
    ],
)
def test_changes_that_would_make_other_numbers(change, words) -> None:
    for found in run_threads(2, changed, change, GRID, timeout=60.0):
        assert all(each.startswith(words) for each in found), found


def test_a_later_forward_walks_over_the_modules_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(Weather)
    parallelize(model, LocalComm(), WEATHER, plan=SHARDED)
    for _ in range(3):  # and weights are compared
        model(GRID)
    assert walks(monkeypatch, lambda: model(GRID)) == [model]


def inserted(comm: Comm) -> dict[str, Tensor]:
    """An adapter inside a stage, and dropout in eval, are no harm; nor is another value of a table."""
    model = weather(comm)
    adapter = nn.Linear(8, 8).double()
    with torch.no_grad():
        for n, p in enumerate(adapter.parameters()):
            p.copy_(rand(*p.shape) + n)
    model.mix[0].net.append(adapter)
    model.mix[0].net.append(nn.Dropout(0.5))
    model.north[0].lon = model.north[0].lon * 2
    return numbers(model.eval())


def test_changes_that_are_no_harm() -> None:
    compare_with_one(3, inserted)


def part_again(comm: Comm, name: str, reentrant: bool) -> dict[str, Tensor]:
    """A model whose blocks recompute parts of themselves: around what is gathered or shared by heads."""
    model, spec = (made(DiT), dit(False)) if name == "core" else (made(PairStack), PAIRS)
    blocks = model.blocks if name == "core" else [layer["starting"] for layer in model.layers]
    for block in blocks:
        recomputing(block, name, reentrant)
    if comm.size > 1:
        parallelize(model, comm, spec, plan=SHARDED)
    if name == "core":
        return numbers(model, rand(1, 5, 7, 3), rand(1, 1))
    return numbers(model, rand(1, 5, 5, 5), torch.ones(1, 5, 5, 1).double())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["core", "pairs"])
@pytest.mark.sampled(2)
def test_what_is_recomputed_inside_a_stage_is_shared_as_before(name, reentrant) -> None:
    compare_with_one(3, part_again, name, reentrant)


PASSES = ["part", "retained", "double", "accumulated", "toggled", "after no grad", "together", "of some"]


@pytest.mark.parametrize("how", PASSES)
@pytest.mark.parametrize("planner", [SHARDED, by_hand])
@pytest.mark.sampled(4)
def test_backward_passes_of_every_kind(how, planner) -> None:
    def on_a_rank(comm: Comm) -> dict[str, Tensor]:
        return passes(weather(comm, planner), GRID, how)

    compare_with_one(3, on_a_rank, delay=0.001)


def test_a_second_derivative_through_the_end_is_refused() -> None:
    def on_a_rank(comm: Comm) -> None:
        x = GRID.clone().requires_grad_()
        loss = weather(comm)(x).square().sum()
        with pytest.raises(NotImplementedError, match="no double backward; call backward without create_graph=True"):
            torch.autograd.grad(loss, x, create_graph=True)

    run_threads(2, on_a_rank)


def thrown(comm: Comm, name: str) -> dict[str, Tensor]:
    """An exception in a block, or in its core, leaves nothing behind."""
    model, spec = (made(DiT), dit(False)) if name == "core" else (made(Weather), WEATHER)
    part, x = (model.blocks[0].core, [rand(1, 5, 7, 3), rand(1, 1)]) if name == "core" else (model.east[0].qkv, [GRID])
    if comm.size > 1:
        parallelize(model, comm, spec, plan=SHARDED)
    hook = part.register_forward_hook(_throw)
    with pytest.raises(KeyError):
        model(*x)
    hook.remove()
    return numbers(model, *x)


def _throw(*_: object) -> None:
    raise KeyError("thrown")


@pytest.mark.parametrize("name", ["core", "block"])
def test_a_forward_after_an_exception(name) -> None:
    compare_with_one(3, thrown, name)


class Coded(nn.Parameter):
    """As of quantised weights, whose elements are codes in a tensor of the class."""


def test_other_values_have_other_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    x = rand(4, 6)
    kinds = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.complex64]
    for chunk in (1 << 20, 16):  # all rows in one chunk, and in several
        monkeypatch.setattr("seqpar.ops.core.compared.CHUNK", chunk)
        for dtype in kinds:
            y = (10 * x).abs().to(dtype)
            assert hashed(y) == hashed(y.clone()) == hashed(y.T.contiguous().T)
            assert len({hashed(z) for z in (y, y.flip(0), y.flip(1), y.roll(2, 0), y + 1)}) == 5
    assert hashed(torch.ones(4, dtype=torch.bool)) != hashed(torch.zeros(4, dtype=torch.bool))
    assert hashed(torch.tensor([1, 2, 2, 1])) != hashed(torch.tensor([2, 1, 1, 2]))  # the same sum and center
    assert len({hashed(torch.full((4,), value)) for value in (0.0, 1.0, 2.0)}) == 3
    of_two = [TwoTensor(x, y) for y in (x, x + 1)]
    coded = [Coded(y, requires_grad=False) for y in (x, x + 1)]
    for same, other in (of_two, coded):
        assert hashed(same) and hashed(same) != hashed(other) and hashed(same) == hashed(copy.deepcopy(same))


def test_leaves_have_paths() -> None:
    found = dict(leaves({"a": [np.arange(3), None], "b": object(), "c": {"d": 1}}))
    assert found.keys() == {"a.0", "b", "c.d"} and found["b"] == "object" and torch.equal(found["a.0"], torch.arange(3))


def differing(comm: Comm, how: str) -> None:
    model, x = weather(comm), GRID
    if comm.rank:
        x = x.flip(0) if how == "order" else torch.ones_like(x)
    elif how == "masks":
        x = torch.zeros_like(x)
    model(x)


@pytest.mark.parametrize("how", ["order", "masks"])
def test_inputs_that_differ_in_order_alone_are_refused(how) -> None:
    for found in errors(differing, how):
        assert found.startswith("ValueError: a forward of Weather: ranks differ in x")


def wrapped(comm: Comm, how: str, x: Tensor = GRID, reentrant: bool | None = None) -> dict[str, Tensor]:
    """Two steps' gradients, as the wrapper leaves them. It divides by the ranks, unless it is told not to.

    reentrant: of checkpoints around stages, None without any.
    """
    model = made(Weather)
    net: nn.Module = model
    if how != "fully_shard first":
        parallelize(model, comm, WEATHER, plan=SHARDED, average_over=comm.size if how == "ddp" else 1)
    if how == "ddp":
        net = nn.parallel.DistributedDataParallel(model)
    else:
        sharded = [fully_shard(part) for part in (*model.north, *model.east, *model.mix, model)]
        for part in sharded:
            part.set_gradient_divide_factor(1.0)
    if how == "fully_shard first":
        parallelize(model, comm, WEATHER, plan=SHARDED)
    if reentrant is not None:
        model.embed.register_forward_hook(lambda *call: call[-1].transpose(1, 2).contiguous().transpose(1, 2))
        for blocks in (model.north, model.east, model.mix):
            for n, block in enumerate(blocks):
                blocks[n] = Checkpointed(block, reentrant)
    for _ in range(2):
        model.zero_grad()
        out = net(x)
        out.square().sum().backward()
    grads = {
        name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for name, p in net.named_parameters()
    }
    names = {name: name.removeprefix("module.").replace(".inner", "") for name in grads}
    return {"out": out.detach()} | {names[name]: grad for name, grad in grads.items()}


@pytest.mark.parametrize("how", ["ddp", "fully_shard first", "fully_shard last"])
@pytest.mark.sampled(2)
def test_under_wrappers_that_reduce_gradients(how) -> None:
    want = numbers(made(Weather))
    for found in run_processes(2, wrapped, how):
        for name, grad in found.items():
            torch.testing.assert_close(grad, want[name], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("how", ["fully_shard first", "fully_shard last"])
@pytest.mark.sampled(2)
def test_checkpoints_around_stages_under_fully_shard(how, reentrant) -> None:
    x = GRID[:1]  # of rows in another order in memory, FSDP2 changes the stride of a dimension of size 1
    want = numbers(made(Weather), x)
    for found in run_processes(2, wrapped, how, x, reentrant):
        for name, grad in found.items():
            torch.testing.assert_close(grad, want[name], rtol=1e-10, atol=1e-10)
