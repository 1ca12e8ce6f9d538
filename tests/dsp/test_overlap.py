"""Stages run in parts: what passes through them, the order of what is posted, and errors by name."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import (
    CheckpointError,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from seqpar.comm import Comm, PeerError, Stats, Work
from seqpar.dsp import Stage, StagePlan, parallelize, plan_stages
from seqpar.dsp.costs import Costs
from seqpar.dsp.plan import StageChoice
from seqpar.dsp.space import shares, sizes_of_parts
from seqpar.planner.hardware import Link
from seqpar.testing import run_processes, run_threads
from tests.dsp.cases import rand, small
from tests.dsp.models import FREE, PAIRS, WEATHER, DiT, PairStack, Weather, compared, dit, gradients, made
from tests.dsp.passes import GRID, Checkpointed, drawn, dropout, numbers, recomputing, weather
from tests.dsp.planners import Planner, at_random, by_batch, by_hand


def without(comm: Comm, how: str) -> dict[str, Tensor]:
    """Passes in which not everything needs a gradient, or nothing."""
    model, x = weather(comm, by_hand(3)), GRID.clone()
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


def side_by_side(comm: Comm) -> dict[str, Tensor]:
    """Two models, and a copy of one, with plans of their own; all forwards before all backwards."""
    model, pairs = weather(comm, by_hand(3)), made(PairStack)
    other = deepcopy(model)
    if comm.size > 1:
        parallelize(pairs, comm, PAIRS, plan=at_random(3))
    x, z, mask = GRID.clone().requires_grad_(), rand(2, 5, 5, 5).requires_grad_(), torch.ones(2, 5, 5, 1).double()
    outs = [model(x), pairs(z, mask), other(3 * x)]
    with torch.no_grad():
        assert pairs(rand(3, 3, 3, 5), torch.ones(3, 3, 3, 1).double()).shape == (3, 3, 3, 8)
    for out in outs[1:] + outs[:1]:
        out.square().sum().backward()
    found = {"out": outs[0].detach(), "d x": x.grad, "d z": z.grad}
    for n, each in enumerate((model, pairs, other)):
        found |= {f"{n} {name}": p.grad for name, p in each.named_parameters()}
    return found


def test_models_and_copies_side_by_side() -> None:
    (want,) = run_threads(1, side_by_side)
    compared(run_threads(3, side_by_side, delay=0.001), want)


def test_what_can_be_run_at_random() -> None:
    """Of what a stage neither mixes nor gathers, and not where an attention draws by the places of all rows."""

    def apart(comm: Comm, name: str) -> dict[str, frozenset[str]]:
        model, spec, given = small(name)
        parallelize(model, comm, spec, plan=(seen := Seen()))
        model(**given)
        return {stage.name: stage.apart for stage in seen.stages}

    (found,) = run_threads(1, apart, "pairs")
    assert found["layers.0.outgoing"] == found["layers.0.starting"] == found["layers.0.ending"] == {"b"}
    assert found["layers.1.transition"] == {"b", "i", "j"}
    (found,) = run_threads(1, apart, "core")
    assert found["blocks.0"] == {"b"}


class Seen:
    """A planner that keeps what it was asked."""

    def __call__(self, stages: list[Stage], dims: object, ranks: int, **given: object) -> StagePlan:
        self.stages = stages
        return plan_stages(stages, dims, ranks, **given)


class Watched:
    """A comm that notes when exchanges are posted and waited for, by the order in which they were posted."""

    def __init__(self, comm: Comm, events: list[str]) -> None:
        self._comm, self._events, self.count = comm, events, itertools.count()

    def __getattr__(self, name: str) -> object:
        return getattr(self._comm, name)

    def exchange(self, sends: object, recvs: object, *, tag: object) -> Watching:
        number = next(self.count)
        self._events.append(f"post {number}")
        return Watching(self._comm.exchange(sends, recvs, tag=tag), self._events, number)


class Watching:
    def __init__(self, work: Work, events: list[str], number: int) -> None:
        self._work, self._events, self._number = work, events, number

    def wait(self) -> None:
        self._events.append(f"wait {self._number}")
        self._work.wait()


def one_in_parts(stages, dims, ranks, *, end, training) -> StagePlan:
    """The second of three stages in three parts."""
    inside, parts = ["w", "h", "h"], [1, 3, 1]
    choices = [StageChoice("b", layout, "local", n) for layout, n in zip(inside, parts, strict=True)]
    return StagePlan(tuple(stages), tuple(choices), Costs(dict(dims), ranks, FREE, training), None, "b", 0.0, 0.0)


def watched(comm: Comm, checkpointed: bool) -> tuple[list[str], list[str]]:
    """What happens in forward and in backward around the second stage."""
    events: list[str] = []
    model = made(Weather, (6, 7), 8, 1)
    watching = Watched(comm, events)
    parallelize(model, watching, WEATHER, plan=one_in_parts)

    def note(module: nn.Module, given: object, out: Tensor) -> None:
        events.append("compute")
        if out.requires_grad:
            out.register_hook(lambda g: events.append("back"))

    model.east[0].norm.register_forward_hook(note)
    if checkpointed:
        model.east[0] = Checkpointed(model.east[0], False)
    with torch.no_grad():
        model(rand(2, 6, 7, 3))  # the first forward tries stages
    events.clear()
    watching.count = itertools.count()
    out = model(rand(2, 6, 7, 3))
    there, back = list(events), len(events)
    out.square().sum().backward()
    return there, events[back:]


FORWARD = """
    post 1, post 2, post 3,
    wait 1, compute, post 4, wait 2, compute, post 5, wait 3, compute, post 6,
    wait 4, wait 5, wait 6,
"""
BACKWARD = """
    post 12, post 13, post 14,
    wait 12, back, post 15, wait 13, back, post 16, wait 14, back, post 17,
    wait 15, wait 16, wait 17,
"""
AGAIN = """
    post 12, post 13, post 14, wait 12,
    post 15, post 16, post 17, wait 15, compute, post 18, wait 16, compute, post 19, wait 17, compute, wait 18, wait 19,
    back, post 20, wait 13, back, post 21, wait 14, back, post 22,
    wait 20, wait 21, wait 22,
"""  # what goes out of the last part is not needed, and torch stops before it


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_part_is_computed_while_others_move(checkpointed) -> None:
    for there, back in run_threads(2, watched, checkpointed):
        assert listed(FORWARD) in ", ".join(there)
        assert listed(AGAIN if checkpointed else BACKWARD) in ", ".join(back)


def listed(text: str) -> str:
    return " ".join(text.split()).removesuffix(",")


def counted(comm: Comm, count: int) -> tuple[int, Stats, Stats]:
    """Exchanges by the plan, and what was counted in the stages of a forward and a backward."""
    model = made(Weather)
    handle = parallelize(model, comm, WEATHER, plan=by_hand(count))
    at_the_end = []
    model.head.register_forward_pre_hook(lambda *_: at_the_end.append(copy(comm.stats)))
    comm.stats.reset()
    out = model(GRID)
    comm.stats.reset()
    out.square().sum().backward()
    (plan,) = handle.plans.values()
    return plan.exchanges, at_the_end[0], copy(comm.stats)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.filterwarnings("ignore:.*a hook of your own")
def test_parts_have_the_bytes_of_one_exchange(ranks) -> None:
    once, several = run_threads(ranks, counted, 1), run_threads(ranks, counted, 3)
    b, h, w = (shares(size, ranks) for size in (3, 5, 7))
    for rank, ((planned, there, back), (plain_planned, plain, plain_back)) in enumerate(
        zip(several, once, strict=True)
    ):
        assert (plain_planned, planned) == (11, {2: 33, 3: 25}[ranks])  # the first input is whole; rows are 3 or 2
        assert there.exchanges == back.exchanges == planned
        assert plain.exchanges == plain_back.exchanges == plain_planned
        assert plain.messages_sent == 11 * (ranks - 1) and there.messages_sent <= planned * (ranks - 1)
        # b to w, to b: two layers of them; b to h, to b: four; but for the first stage, whose input is whole
        to_w, to_h = b[rank] * (7 - w[rank]) * 5, b[rank] * (5 - h[rank]) * 7
        from_w, from_h = w[rank] * (3 - b[rank]) * 5, h[rank] * (3 - b[rank]) * 7
        assert plain.bytes_sent == there.bytes_sent == 64 * (to_w + 2 * from_w + 4 * to_h + 4 * from_h)
        assert plain.bytes_received == there.bytes_received == plain_back.bytes_sent == back.bytes_sent
        assert plain_back.bytes_received == back.bytes_received == there.bytes_sent


@given(size=st.integers(1, 60), ranks=st.integers(1, 9), parts=st.integers(1, 6))
def test_parts_of_a_dimension(size, ranks, parts) -> None:
    """Every part has an element, and every rank has in all parts together what it has without."""
    sizes = sizes_of_parts(size, ranks, parts)
    assert min(sizes) >= 1 and sum(sizes) == size and len(sizes) == min(parts, -(-size // ranks))
    by_rank = zip(*(shares(each, ranks) for each in sizes), strict=True)
    assert [sum(each) for each in by_rank] == shares(size, ranks)


def on_one_link(into: float, inside: float, out: float, sizes: list[float]) -> float:
    """Seconds of parts of these sizes, of 1 in all: on one link first all that comes in, then what goes out."""
    link, ready, arrived, sent = 0.0, 0.0, [], 0.0
    for size in sizes:
        link += size * into
        arrived.append(link)
    sent = link
    for size, there in zip(sizes, arrived, strict=True):
        ready = max(ready, there) + size * inside
        sent = max(sent, ready) + size * out
    return sent


@given(
    size=st.integers(2, 60), ranks=st.integers(2, 9), parts=st.integers(2, 6), inside=st.floats(0, 1e-3),
    wide=st.integers(1, 5), training=st.booleans(),
)  # fmt: skip
def test_seconds_of_parts_are_those_of_one_link(size, ranks, parts, inside, wide, training) -> None:
    """At least those, as many for equal parts, and never more than without parts but for what each part costs."""
    hardware = replace(FREE, inside=Link(1e-6, 1e9), across=Link(1e-6, 1e9), call=1e-6, hidden=1.0)
    costs = Costs({"t": wide, "s": size, "u": 7}, ranks, hardware, training)
    stage = Stage("s", {"t"}, bytes=1e6, apart={"s", "u"})
    (into, out), extra = (costs.moves[way] for way in (("t", "s"), ("s", "u"))), parts - 1
    whole = costs.through(stage, inside, "t", "s", "u", 1)
    found = costs.through(stage, inside, "t", "s", "u", parts)
    assert found <= whole + extra * (into.fixed + out.fixed + hardware.call) + 1e-12
    comes, goes = (move.seconds(1e6) + extra * move.fixed for move in (into, out))
    inside += extra * hardware.call
    rows = [-(-each // ranks) for each in sizes_of_parts(size, ranks, parts)]
    of_all = [each / sum(rows) for each in rows]
    if training:  # the other way round on the way back, where computing takes twice as long
        want = on_one_link(comes / 2, inside / 3, goes / 2, of_all)
        want += on_one_link(goes / 2, 2 * inside / 3, comes / 2, of_all[::-1])
    else:
        want = on_one_link(comes, inside, goes, of_all)
    uneven = max(of_all) - min(of_all)
    assert want - 1e-12 <= found <= want + uneven * (comes + inside + goes) + 1e-12


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
    model = weather(comm, by_hand(3))
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


@pytest.mark.exhaustive
def test_processes_recompute_too() -> None:
    compared(run_processes(3, checkpointed, "stopped early"), numbers(made(Weather)))


def part_again(comm: Comm, reentrant: bool, around: bool) -> dict[str, Tensor]:
    """Blocks that recompute themselves, with a core that a grid's groups share by heads; and again around them."""
    model = made(DiT)
    for block in model.blocks:
        recomputing(block, "core", reentrant)
    if comm.size > 1:
        parallelize(model, comm, dit(False), plan=at_random(0, 2, "t"))
    for n, block in enumerate(model.blocks):
        if around:
            model.blocks[n] = CheckpointedWith(block)
    found = gradients(model, {"x": rand(5, 3, 5, 3), "t": rand(5, 1)})
    return {name.replace(".inner", ""): x for name, x in found.items()}


class CheckpointedWith(Checkpointed):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner, False)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return checkpoint(self.inner, x, t, use_reentrant=False)


@pytest.mark.parametrize("reentrant, around", [(False, False), (True, False), (False, True)])
def test_what_is_recomputed_inside_a_part(reentrant, around) -> None:
    (want,) = run_threads(1, part_again, reentrant, around)
    compared(run_threads(4, part_again, reentrant, around), want)


def thrown(comm: Comm, part: int, only: int | None, *, once: bool = False) -> tuple[str, dict[str, Tensor] | str]:
    """What a forward says whose block raises in one part, on all ranks or one, and what comes after it."""
    model, calls, armed = weather(comm, by_hand(2)), itertools.count(), list[bool]()

    def throw(*_: object) -> None:
        if armed and next(calls) == part and only in (None, comm.rank):
            raise ValueError(f"thrown in part {part}")

    hook = model.east[0].qkv.register_forward_hook(throw)
    with torch.no_grad():
        model(rand(2, 5, 7, 3))  # the first forward tries stages
    armed.append(True)
    said = []
    for _ in range(1 if once else 2):
        try:
            said.append(numbers(model, rand(2, 5, 7, 3)))
        except (ValueError, PeerError) as error:
            said.append(f"{type(error).__name__}: {error}")
        hook.remove()
    return said[0], said[-1]


@pytest.mark.parametrize("part", [0, 1])
def test_an_error_on_all_ranks_leaves_the_comm_as_it_was(part) -> None:
    want = numbers(made(Weather), rand(2, 5, 7, 3))
    found = run_threads(2, thrown, part, None, delay=0.001)
    assert [said for said, _ in found] == [f"ValueError: thrown in part {part}"] * 2
    compared([after for _, after in found], want)


def test_it_does_on_processes() -> None:
    found = run_processes(2, thrown, 1, None)
    assert [said for said, _ in found] == ["ValueError: thrown in part 1"] * 2
    compared([after for _, after in found], numbers(made(Weather), rand(2, 5, 7, 3)))


@pytest.mark.parametrize("part", [0, 1])
def test_an_error_on_one_rank_is_heard_of(part) -> None:
    heard: list[str] = []

    def on_one(comm: Comm) -> None:
        said, _ = thrown(comm, part, 1, once=True)
        if comm.rank == 1:
            raise KeyError(said)  # what ends a rank is heard by the others
        heard.append(said)

    with pytest.raises(KeyError, match=f"ValueError: thrown in part {part}"):
        run_threads(2, on_one)
    assert "KeyError" in heard[0] and "the comm is dead" in heard[0]


def planned(comm: Comm, change: dict[str, object], end: str | None, only: int | None) -> str:
    """What a forward says to a plan whose second stage is changed, on all ranks or one."""

    def planner(*args: object, **given: object) -> StagePlan:
        plan = by_hand(3)(*args, **given)
        if only not in (None, comm.rank):
            return plan
        first, second, *others = plan.choices
        return replace(plan, choices=(first, second._replace(**change), *others), end=end)

    model = weather(comm, planner)
    try:
        model(GRID)
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    "change, end, words",
    [
        ({"parts": 0}, "b", "stage east.0 cannot run in 0 parts"),
        ({"parts": 2.0}, "b", "stage east.0 cannot run in 2.0 parts"),
        ({"sharding": "w"}, "b", "stage east.0 cannot run in 3 parts from 'b' by 'w' to 'b'"),
        ({"sharding": None}, "b", "stage east.0 cannot run in 3 parts from 'b' by None to 'b'"),
        ({"before": "h"}, "b", "stage east.0 cannot run in 3 parts from 'h' by 'h' to 'b'"),
        ({}, None, "stage mix.1 cannot run in 3 parts from 'b' by 'h' to None"),
        ({}, "h", "stage mix.1 cannot run in 3 parts from 'b' by 'h' to 'h'"),
        ({"parts": 10**9}, "b", "nothing"),
    ],
)
def test_plans_with_parts_that_cannot_be(change, end, words) -> None:
    assert all(said.startswith(words) for said in run_threads(2, planned, change, end, None, timeout=60.0))
    if words != "nothing":
        other, own = run_threads(2, planned, change, end, 1, timeout=60.0)
        assert own.startswith(words) and "rank 1 refused its arguments" in other and words in other


def without_exit(comm: Comm) -> str:
    """The last stage's output is whole, whatever a plan says of the end."""
    model = made(Weather)
    parallelize(model, comm, replace(WEATHER, exit=None, outside=("embed", "head")), plan=by_hand(3))
    with pytest.raises(ValueError, match="stage mix.1 cannot run in 3 parts from 'b' by 'h' to None"):
        model(GRID)
    return "refused"


def test_a_last_stage_in_parts_without_an_exit() -> None:
    run_threads(2, without_exit, timeout=60.0)


def misshapen(comm: Comm, n: int) -> str:
    """What a forward says if one rank's input of a stage has rows too many."""
    model = weather(comm, by_hand(3))
    if comm.rank:
        stage = [model.north[0], model.east[0]][n]
        stage.register_forward_pre_hook(lambda _, given: (torch.cat([given[0], given[0][:, :1]], 1),))
    try:
        model(GRID)
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("n", [0, 1])
@pytest.mark.filterwarnings("ignore:.*a hook of your own")
def test_one_ranks_rows_too_many(n) -> None:
    for said in run_threads(2, misshapen, n, timeout=60.0):
        assert 'axis 1 of "b h w c" must have 5 elements here (h=5), not 6' in said


def in_its_memory(inner: Callable[[Tensor], Tensor], memory: Tensor, z: Tensor) -> Tensor:
    """What a block returns, in the same memory in every call, as a CUDA graph does."""
    out = inner(z)
    return memory[: out.numel()].view_as(out).copy_(out)


def in_kept_memory(comm: Comm, count: int) -> dict[str, Tensor]:
    model = made(Weather)
    for block in model.mix:
        block.forward = partial(in_its_memory, block.forward, torch.empty(8 * GRID.numel(), dtype=torch.float64))
    if comm.size > 1:
        parallelize(model, comm, WEATHER, plan=by_hand(count))
    with torch.inference_mode():
        return {"out": model(GRID).clone()}


def test_memory_that_is_returned_again_while_it_is_sent() -> None:
    (want,) = run_threads(1, in_kept_memory, 1)
    compared(run_threads(2, in_kept_memory, 1, delay=0.001), want)
    with pytest.raises(RuntimeError, match="mix.0 is run in parts and returned one in the memory of another"):
        run_threads(2, in_kept_memory, 3, delay=0.001)


@pytest.mark.parametrize(
    "change, words", [(dropout, "mix.0.net.4 is dropout with p=0.5"), (drawn, "mix.0 calls rand_like")]
)
def test_random_numbers_are_refused(change, words) -> None:
    def say(comm: Comm) -> list[str]:
        model, said = weather(comm, by_hand(3)), []
        model(GRID[:2])
        change(model)
        for _ in range(2):
            with pytest.raises(NotImplementedError) as error:
                model(GRID)
            said.append(str(error.value))
        return said

    assert all(words in each for said in run_threads(2, say, timeout=60.0) for each in said)


def in_place(inner: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    return inner(z.mul_(0.7)).add_(1)


def writing(comm: Comm, grad: bool) -> dict[str, Tensor]:
    """Blocks that write to what they are given and to what they return."""
    model = made(Weather)
    for block in (*model.north, *model.east, *model.mix):
        inner = partial(in_place, block.forward)
        block.forward = inner if block in model.mix else lambda x, inner=inner: inner(x)  # as their specs name it
    if comm.size > 1:
        parallelize(model, comm, WEATHER, plan=by_hand(3))
    if grad:
        return numbers(model)
    with torch.no_grad():
        return {"out": model(GRID)}


@pytest.mark.parametrize("grad", [False, True])
def test_blocks_that_write_in_place(grad) -> None:
    (want,) = run_threads(1, writing, grad)
    compared(run_threads(2, writing, grad, delay=0.001), want)


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
    """All ranks must change them alike, and as often as one process: not for every part, and none may skip it."""
    (want,) = run_threads(1, changing, by_hand(1), False, 3)
    compared(run_threads(2, changing, by_hand(1), False, 3), want)
    words = "mix.0.net.4.seen'] change in a forward, which each rank must make once"
    for planner, batch in ((by_hand(2), 3), (by_batch, 1)):
        assert all(words in said for said in run_threads(2, changing, planner, False, batch, timeout=60.0))
    said = run_threads(2, changing, by_hand(1), True, 3, timeout=60.0)
    assert all("mix.0 mixes h, along which ranks share its rows" in each for each in said), said


def sharded_within(comm: Comm, batch: int) -> list[str]:
    """What forwards say of a model whose stages hold modules that are gathered for their own forward."""
    said = []
    for planner in (by_batch, by_hand(3)):
        model = weather(comm, planner)
        fully_shard(model.north[1].qkv)
        try:
            torch.testing.assert_close(model(GRID[:batch]), made(Weather)(GRID[:batch]), rtol=0, atol=1e-10)
            said.append("right")
        except (ValueError, NotImplementedError) as error:
            said.append(str(error))
    return said


def test_modules_that_all_ranks_call_are_not_within_what_some_skip() -> None:
    for filled, parts in run_processes(2, sharded_within, 2):
        assert filled == "right" and parts.startswith("stage north.1 cannot run in 3 parts")
    for skipped, _ in run_processes(2, sharded_within, 1):
        assert skipped.startswith("['qkv'] of north.1 is under fully_shard, and would wait for ranks that have no rows")


def hooked(comm: Comm) -> dict[str, Tensor]:
    """Hooks that change what passes, around a stage and inside it."""
    model = weather(comm, by_hand(3))
    for part in (model.east[0], model.east[0].qkv):
        part.register_forward_hook(lambda _, given, out: 2 * out)
        part.register_full_backward_hook(lambda _, into, out: (3 * into[0],))
    return numbers(model)


def compiled(comm: Comm) -> dict[str, Tensor]:
    torch._dynamo.reset()
    model = made(Weather)
    model.east[0].forward = torch.compile(model.east[0].forward, backend="eager", dynamic=True)
    parallelize(model, comm, WEATHER, plan=by_hand(3))
    return numbers(model)


@pytest.mark.exhaustive
def test_hooks_and_compiled_stages() -> None:
    (want,) = run_threads(1, hooked)
    compared(run_threads(3, hooked), want)
    compared(run_processes(2, compiled), numbers(made(Weather)))


def with_tables(comm: Comm, count: int, reentrant: bool) -> None:
    """Blocks that recompute themselves with tables that follow rows, which are whole again by then."""
    model = made(Weather)
    for block in (*model.north, *model.east):
        inner = type(block).forward.__get__(block)
        block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=reentrant)
    parallelize(model, comm, WEATHER, plan=by_hand(count))
    numbers(model)


@pytest.mark.parametrize("count, reentrant", [(1, False), (1, True), (3, False), (3, True)])
def test_checkpoints_inside_stages_with_tables_raise(count, reentrant) -> None:
    with pytest.raises((CheckpointError, RuntimeError), match="metadata|[Mm]ismatch|must match|shape"):
        run_threads(2, with_tables, count, reentrant)
