"""What passes through stages: without gradients, recomputed, in place, with hooks and buffers; errors by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import (
    CheckpointError,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from seqpar.comm import Comm
from seqpar.dsp import parallelize
from seqpar.testing import run_processes, run_threads
from tests.dsp.models import WEATHER, Weather, compare_with_one, compared, made
from tests.dsp.passes import GRID, Checkpointed, numbers, weather
from tests.dsp.planners import Planner, by_batch, by_hand
from tests.ranks import error_of, errors


def without(comm: Comm, how: str) -> dict[str, Tensor]:
    """Passes in which not everything needs a gradient, or nothing."""
    model, x = weather(comm, by_hand), GRID.clone()
    if how == "no grad":
        with torch.no_grad():
            return {"out": model(x)}
    if how == "inference":
        with torch.inference_mode():
            out = model(x)
        return {"out": out.clone()}
    if how == "frozen":
        model.requires_grad_(False)
    elif how == "some":
        for name, p in model.named_parameters():
            p.requires_grad_("qkv" in name)
    if how == "parameters":
        out = model(x)
        out.square().sum().backward()
        return {"out": out.detach()} | {name: p.grad for name, p in model.named_parameters()}
    return numbers(model)


@pytest.mark.parametrize("how", ["no grad", "inference", "frozen", "some", "parameters"])
@pytest.mark.sampled(2)
def test_passes_in_which_not_everything_needs_a_gradient(how) -> None:
    (want,) = run_threads(1, without, how)
    for ranks in (2, 3):
        compared(run_threads(ranks, without, how, delay=0.001), want)


class Selective(nn.Module):
    """A module of which products are kept and all else is recomputed in backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        kept = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]
        return checkpoint(
            self.inner, x, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, kept)
        )


def checkpointed(comm: Comm, kind: str) -> dict[str, Tensor]:
    """Several steps; numbers of the last."""
    model = weather(comm, by_hand)
    for blocks in (model.north, model.east, model.mix):
        for n, block in enumerate(blocks):
            blocks[n] = Selective(block) if kind == "selective" else Checkpointed(block, kind == "reentrant")
    for _ in range(3):
        found = numbers(model)
    comm.check()
    return {name.replace(".inner", ""): x for name, x in found.items()}


@pytest.mark.parametrize("kind", ["to the end", "stopped early", "reentrant", "selective"])
@pytest.mark.sampled(4)
def test_stages_that_are_recomputed(kind) -> None:
    want = numbers(made(Weather))
    with set_checkpoint_early_stop(kind != "to the end"):
        for ranks in (2, 3):
            compared(run_threads(ranks, checkpointed, kind, delay=0.001), want)


def misshapen(comm: Comm) -> None:
    """One rank's input of a stage has a row too many."""
    model = weather(comm, by_hand)
    if comm.rank:
        model.east[0].register_forward_pre_hook(lambda _, given: (torch.cat([given[0], given[0][:, :1]], 1),))
    model(GRID)


def test_one_ranks_rows_too_many() -> None:
    for said in errors(misshapen):
        assert 'axis 1 of "b h w c" must have 5 elements here (h=5), not 6' in said


def in_place(inner: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    return inner(z.mul_(0.7)).add_(1)


def writing(comm: Comm, grad: bool) -> dict[str, Tensor]:
    """Blocks that write to what they are given and to what they return."""
    model = made(Weather)
    for block in (*model.north, *model.east, *model.mix):
        inner = partial(in_place, block.forward)
        block.forward = inner if block in model.mix else lambda x, inner=inner: inner(x)  # as their specs name it
    if comm.size > 1:
        parallelize(model, comm, WEATHER, plan=by_hand)
    if grad:
        return numbers(model)
    with torch.no_grad():
        return {"out": model(GRID)}


@pytest.mark.parametrize("grad", [False, True])
def test_blocks_that_write_in_place(grad) -> None:
    compare_with_one(2, writing, grad, delay=0.001)


class Counted(nn.Module):
    """A row-wise module with a buffer that every forward changes, by its rows or not."""

    def __init__(self, by_rows: bool) -> None:
        super().__init__()
        self.by_rows = by_rows
        self.register_buffer("seen", torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.detach().mean() if self.by_rows else 1
        return x / self.seen


def changing(comm: Comm, planner: Planner, by_rows: bool, batch: int) -> dict[str, Tensor] | str:
    model = made(Weather)
    model.mix[0].net.append(Counted(by_rows))
    if comm.size > 1:
        parallelize(model, comm, WEATHER, plan=planner)
    for _ in range(2):
        try:
            found = numbers(model, GRID[:batch])
        except (NotImplementedError, ValueError) as error:
            found = str(error)
    return found


def test_buffers_that_a_forward_changes() -> None:
    """All ranks must change them alike, and as often as one process: none may skip it."""
    compare_with_one(2, changing, by_hand, False, 3)
    words = "mix.0.net.4.seen'] change in a forward, which each rank must make once"
    assert all(words in said for said in run_threads(2, changing, by_batch, False, 1, timeout=60.0))
    said = run_threads(2, changing, by_hand, True, 3, timeout=60.0)
    assert all("mix.0 mixes h, along which ranks share its rows" in each for each in said), said


def sharded_within(comm: Comm, batch: int) -> str:
    """What a forward says of a model whose stage holds a module that is gathered for its own forward."""
    model = weather(comm, by_batch)
    fully_shard(model.north[1].qkv)
    said = error_of(model, GRID[:batch])
    if said == "nothing":
        torch.testing.assert_close(model(GRID[:batch]), made(Weather)(GRID[:batch]), rtol=0, atol=1e-10)
    return said


def test_modules_that_all_ranks_call_are_not_within_what_some_skip() -> None:
    assert run_processes(2, sharded_within, 2) == ["nothing"] * 2
    for skipped in run_processes(2, sharded_within, 1):
        assert "['qkv'] of north.1 is under fully_shard, and would wait for ranks that have no rows" in skipped


def hooked(comm: Comm) -> dict[str, Tensor]:
    """Hooks that change what passes, around a stage and inside it."""
    model = weather(comm, by_hand)
    for part in (model.east[0], model.east[0].qkv):
        part.register_forward_hook(lambda _, given, out: 2 * out)
        part.register_full_backward_hook(lambda _, into, out: (3 * into[0],))
    return numbers(model)


def test_hooks_around_and_inside_stages() -> None:
    compare_with_one(3, hooked)


def with_tables(comm: Comm, reentrant: bool) -> None:
    """Blocks that recompute themselves with tables that follow rows, which are whole again by then."""
    model = made(Weather)
    for block in (*model.north, *model.east):
        inner = type(block).forward.__get__(block)
        block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=reentrant)
    parallelize(model, comm, WEATHER, plan=by_hand)
    numbers(model)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_inside_stages_with_tables_raise(reentrant) -> None:
    with pytest.raises((CheckpointError, RuntimeError), match="metadata|[Mm]ismatch|must match|shape"):
        run_threads(2, with_tables, reentrant)
