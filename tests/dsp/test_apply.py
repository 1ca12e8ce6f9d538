"""`parallelize` itself: several models at once, recomputation, compiled stages, undo, and what it refuses."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from seqpar.comm import Comm, LocalComm
from seqpar.dsp import Block, Exit, Space, Spec, attention_plan, begin_switch, grid, move, parallelize, switch_all
from seqpar.dsp.form import form_of
from seqpar.testing import run_processes, run_threads
from tests.dsp.cases import rand
from tests.dsp.models import (
    PAIRS,
    SHARDED,
    STREAMS,
    WEATHER,
    Axial,
    PairStack,
    Streams,
    Weather,
    compare_with_one,
    compared,
    gradients,
    made,
)
from tests.dsp.passes import Checkpointed
from tests.ranks import errors

GRID = {"x": rand(2, 5, 7, 3)}


def side_by_side(comm: Comm, kind: str) -> list[dict[str, Tensor]]:
    """Two models and three shapes in one process; all forwards before all backwards, the last one first or last."""
    pairs, weather = made(PairStack), made(Weather)
    parallelize(pairs, comm, PAIRS, plan=SHARDED)
    parallelize(weather, comm, WEATHER, plan=SHARDED)
    if kind != "plain":
        for blocks in (weather.north, weather.east, weather.mix):
            for n, block in enumerate(blocks):
                blocks[n] = Checkpointed(block, kind == "reentrant")
    z, mask, x = rand(1, 6, 6, 5).requires_grad_(), torch.ones(1, 6, 6, 1).double(), GRID["x"].clone().requires_grad_()
    outs = [weather(x), pairs(z, mask), weather(x[:1])]
    with torch.no_grad():
        assert pairs(rand(2, 3, 3, 5), torch.ones(2, 3, 3, 1).double()).shape == (2, 3, 3, 8)
    for out in outs[1:] + outs[:1]:
        out.square().sum().backward()
    name = {f"w {n.replace('.inner', '')}": p.grad for n, p in weather.named_parameters()}
    name |= {f"p {n}": p.grad for n, p in pairs.named_parameters()}
    return [{"out": outs[0].detach()} | {"d x": x.grad, "d z": z.grad} | name]


@pytest.mark.parametrize("kind", ["plain", "checkpoint", "reentrant"])
@pytest.mark.sampled(3)
def test_two_models_and_several_shapes_live_side_by_side(kind) -> None:
    ((want,),) = run_threads(1, side_by_side, "plain")
    compared([found for (found,) in run_threads(3, side_by_side, kind)], want)


def compiled(comm: Comm, how: str) -> dict[str, Tensor]:
    torch._dynamo.reset()
    model = made(Weather, (5, 7), 8, 1)
    if how == "before":
        model.north[0].forward = torch.compile(model.north[0].forward, backend="eager", dynamic=True)
    parallelize(model, comm, WEATHER, plan=SHARDED)
    if how == "after":
        model.north[0].compile(backend="eager")
    return gradients(model, GRID)


@pytest.mark.exhaustive
def test_a_compiled_stage_gives_the_same_numbers() -> None:
    want = gradients(made(Weather, (5, 7), 8, 1), GRID)
    compared(run_processes(2, compiled, "before"), want)
    compared(run_threads(1, compiled, "after"), want)


def exchanges(comm: Comm) -> tuple[int, int]:
    """Exchanges of a forward, and those that its plan says."""
    model = made(Weather)
    handle = parallelize(model, comm, replace(WEATHER, exit=None, outside=("embed", "head")), plan=SHARDED)
    comm.stats.reset()
    with torch.no_grad():
        model(GRID["x"])
    (plan,) = handle.plans.values()
    assert "east.0: h" in handle.describe()
    return comm.stats.exchanges, plan.exchanges


def test_a_forward_takes_the_exchanges_of_its_plan() -> None:
    for counted, planned in run_threads(4, exchanges):
        assert counted == planned > 0


def streams(comm: Comm) -> tuple[dict[str, Tensor], list[int]]:
    """Numbers, and exchanges: forward and backward, as counted and of the plan."""
    model = made(Streams)
    handle = parallelize(model, comm, STREAMS, plan=SHARDED)
    x, y = rand(5, 7, 3).requires_grad_(), rand(5, 7, 2).requires_grad_()
    comm.stats.reset()
    x1, y1 = model(x, y)
    counts = [comm.stats.exchanges]
    comm.stats.reset()
    (x1.square().sum() + (y1 * y1.cos()).sum()).backward()
    (plan,) = handle.plans.values()
    counts += [comm.stats.exchanges, sum(None not in (src, dst) for _, src, dst, _ in plan.moves())]
    return {"out": y1.detach(), "d x": x.grad, "d y": y.grad} | {n: p.grad for n, p in model.named_parameters()}, counts


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_streams_move_together_in_one_exchange_a_switch_and_direction(ranks) -> None:
    ((want, _),) = run_threads(1, streams)
    found = run_threads(ranks, streams)
    compared([numbers for numbers, _ in found], want)
    for _, (there, back, switches) in found:
        assert switches == 3
        assert there == switches + 2  # at the end both are gathered, each by itself
        assert back == switches  # and nothing is sent for that on the way back


def undone(comm: Comm) -> None:
    model = made(Weather)
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    handle = parallelize(model, comm, WEATHER)
    with pytest.raises(ValueError, match="Weather is parallel already; call undo"):
        parallelize(model, comm, WEATHER)
    model(GRID["x"])
    comm.stats.reset()
    with handle.local():
        alone = gradients(model, GRID)
    assert comm.stats.exchanges == 0
    model.zero_grad()
    handle.undo()
    handle.undo()
    for name, module in model.named_modules():
        assert "forward" not in module.__dict__ and module.__dict__.keys() == before[name].keys()
    want = gradients(made(Weather), GRID)
    compared([alone], want)
    compared([gradients(model, GRID)], want)
    assert comm.stats.exchanges == 0


def test_undo_gives_the_model_back_and_local_for_a_while() -> None:
    run_threads(2, undone)


def ended_before_backward(comm: Comm, how: str, reentrant: bool) -> dict[str, Tensor]:
    """A model of checkpointed stages whose backward comes when the handle has ended, or inside `local`."""
    model, given = made(PairStack), {"z": rand(1, 5, 5, 5).requires_grad_(), "mask": torch.ones(1, 5, 5, 1).double()}
    with ExitStack() as stack:
        handle = parallelize(model, comm, PAIRS, plan=SHARDED)
        for layer in model.layers:
            for name in ("starting", "ending", "transition"):  # the last one ends the model
                layer[name] = Checkpointed(layer[name], reentrant)
        if how == "with":
            stack.enter_context(handle)
        out = model(**given)
        if how == "local":
            stack.enter_context(handle.local())
        if how != "with":
            out.square().sum().backward()
    if how == "with":
        out.square().sum().backward()
        assert all("forward" not in module.__dict__ for module in model.modules())
    names = {n.replace(".inner", ""): p.grad for n, p in model.named_parameters()}
    return {"out": out.detach(), "d z": given["z"].grad} | names


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("how", ["with", "local"])
def test_checkpointed_stages_are_shared_after_the_end_of_their_handle(how, reentrant) -> None:
    (want,) = run_threads(1, ended_before_backward, "", reentrant)
    compared(run_threads(3, ended_before_backward, how, reentrant), want)


def recomputed_whole(comm: Comm, what: str, reentrant: bool) -> None:
    """A checkpoint around the model, or around its exit, is an error after `undo` too."""
    model, x = made(Weather), GRID["x"].clone().requires_grad_()
    handle = parallelize(model, comm, WEATHER, plan=SHARDED)
    net: nn.Module = model
    if what == "model":
        net = Checkpointed(model, reentrant)
    else:
        model.head = Checkpointed(model.head, reentrant)
    out = net(x)
    handle.undo()
    with pytest.raises(RuntimeError, match="Weather is recomputed as a whole|head is called outside a forward"):
        out.square().sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("what", ["model", "exit"])
def test_a_checkpoint_around_more_than_a_stage_is_refused_after_undo(what, reentrant) -> None:
    run_threads(2, recomputed_whole, what, reentrant)


def summed(comm: Comm) -> dict[str, Tensor]:
    """The loss is the sum of what ranks say: each looks at its part of the output."""
    model, x = made(Weather), GRID["x"].clone().requires_grad_()
    parallelize(model, comm, WEATHER, grad="sum", plan=SHARDED)
    out = model(x)
    own = out.tensor_split(comm.size, 2)[comm.rank]
    own.square().sum().backward()
    return {"out": out.detach(), "d x": x.grad} | {n: p.grad for n, p in model.named_parameters()}


def test_a_loss_that_is_the_sum_of_the_ranks() -> None:
    compare_with_one(3, summed)


def frozen(comm: Comm) -> None:
    """What needs no gradient gets none, on ranks with rows and on those without."""
    model = made(Weather)
    for name, p in model.named_parameters():
        p.requires_grad_("qkv" in name)
    parallelize(model, comm, WEATHER, plan=SHARDED)
    model(GRID["x"][:1]).sum().backward()
    for name, p in model.named_parameters():
        assert (p.grad is not None) == ("qkv" in name), name


def test_frozen_parameters() -> None:
    run_threads(8, frozen)


def with_block(**changes: object) -> Spec:
    return replace(WEATHER, blocks=(replace(WEATHER.blocks[0], **changes), *WEATHER.blocks[1:]))


class Normed(Weather):
    def __init__(self) -> None:
        super().__init__()
        self.mix[0].net[0] = nn.BatchNorm2d(8)


class Grown(Weather):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(2, 2)


class Owning(Weather):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize(
    "make, spec, kind, words",
    [
        (Weather, None, NotImplementedError, "no spec is known for Weather"),
        (Weather, PAIRS, ValueError, "the spec is for PairStack, .*; give a Spec with model='Weather'$"),
        (Normed, WEATHER, NotImplementedError, r"mix\.0\.net\.0 of Normed is a BatchNorm2d, .*; use a norm of"),
        (Grown, WEATHER, ValueError, "extra of Grown is a Linear, in no stage, .*; make it a stage with a Block"),
        (Owning, WEATHER, ValueError, r"Owning has \['table'\] of its own, .*; list them under own"),
        (Weather, replace(WEATHER, exit=Exit("tail", "b h w c", ("h",))), ValueError, r"\['tail'\], .*; list modules"),
        (Weather, with_block(modules="south.{i}"), ValueError, "does not match its spec"),
        (Weather, with_block(rows={"t": "b c"}), ValueError, r"not \['t'\], .*; list arguments"),
        (Weather, with_block(buffers={"depth": "h c"}), ValueError, r"north\.0 has no \['depth'\], .*; list modules"),
        (Weather, with_block(gathers={"bias": ("h w", ("w",))}), ValueError, r"north\.0 has no \['bias'\]"),
    ],
)
def test_models_that_their_spec_does_not_describe(make, spec, kind, words) -> None:
    model = made(make)
    if spec is not None and make is not Weather:
        spec = replace(spec, model=make.__name__)
    with pytest.raises(kind, match=words):
        parallelize(model, LocalComm(), spec)
    assert not any("forward" in module.__dict__ for module in model.modules())


class Odd(nn.Module):
    """Two stages whose calls can be made wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Scale(), Scale()
        self.wrong = ""

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        if self.wrong == "again":
            x = self.first(x, None)
        if self.wrong == "turned":
            x = x.transpose(0, 1)
        x = self.first(x, t[:1] if self.wrong == "rows" else t, t if self.wrong == "unlisted" else None)
        if self.wrong == "sums":  # over rows that are sharded here
            x = x.sum(1)
        return x if self.wrong == "left out" else self.second(x, t)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, t: Tensor | None, other: Tensor | None = None) -> Tensor:
        return x * self.weight if t is None else x * self.weight + t[..., None]


ODD = Spec(
    "Odd",
    lambda model, given: {"a": 4, "b": 6},
    (
        Block("first", {"x": "a b c"}, ("a",), rows={"t": "a b"}),
        Block("second", {"x": "a b c"}, ("b",), rows={"t": "a b"}),
    ),
)


def odd(comm: Comm, wrong: str, alone: bool) -> None:
    model = made(Odd)
    parallelize(model, comm, ODD, plan=SHARDED)
    model.wrong = "" if alone and comm.rank else wrong
    model(rand(4, 6, 3), rand(4, 6))


@pytest.mark.parametrize("alone", [False, True], ids=["all ranks", "one rank"])
@pytest.mark.parametrize(
    "wrong, words",
    [
        ("", "nothing"),
        ("turned", "ValueError: x, with whole of {'a': 4, 'b': 6}, has shape [6, 4, 3]"),
        ("again", "NotImplementedError: stage first is called where second should be"),
        ("rows", "ValueError: t of first, with whole of {'a': 4, 'b': 6}, has shape [1, 6]"),
        ("unlisted", "ValueError: first got other, "),
        ("sums", "does not fit the form"),
        ("left out", "NotImplementedError: a forward of Odd ended without second"),
    ],
)
def test_forwards_that_their_spec_does_not_describe(wrong, words, alone) -> None:
    first, second = errors(odd, wrong, alone, timeout=20.0)
    assert first.startswith(words) if wrong != "sums" else words in first
    assert words in second if alone else second == first


def test_a_stage_outside_its_model_and_a_dead_storage_are_named() -> None:
    model = made(Odd)
    parallelize(model, LocalComm(), ODD)
    with pytest.raises(RuntimeError, match="first is called outside a forward of its Odd; call the whole model"):
        model.first(rand(4, 6, 3), rand(4, 6))
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
        model.second = Moved(model.second)
        with pytest.raises(RuntimeError, match="second is recomputed from an input that is not the memory"):
            model(rand(4, 6, 3), rand(4, 6)).sum().backward()


class Moved(nn.Module):
    """Recomputed from a copy."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return checkpoint(self.inner, x, t, use_reentrant=False)


@pytest.mark.parametrize("layout", ["t", "s", "b", None])
def test_an_attention_plan_has_each_row_where_the_form_says(layout) -> None:
    space = Space({"b": 2, "t": 3, "s": 4}, LocalComm.world(2)[0])
    plan = attention_plan(space, "(b s) t c", ("t",), layout)
    assert plan.ranks == (1 if layout is None else 2)
    assert plan.mask.lengths.tolist() == [3] * 8
    rows = [plan.layout.positions(rank) for rank in range(plan.ranks)]
    assert sorted(p for each in rows for p in each) == list(range(24))
    if layout == "t":  # one of three, of every pair of batch and space, in the order of the rows
        assert rows[0].tolist() == [3 * n for n in range(8)]
    if layout == "s":
        assert rows[0].tolist() == [*range(6), *range(12, 18)]


SPACE = Space({"t": 3, "s": 4}, LocalComm())
ROWS = torch.ones(3, 4, 2)
ONE = r"expected a list of tensors, got one of shape \[3, 4, 2\]; give \[x\], and its form in a list"


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: attention_plan(SPACE, "t s c", ("t",), "q"), r"sharded='q', expected None or one of .*\['t', 's'\]"),
        (lambda: attention_plan(SPACE, "t s c", ("S",), "s"), "expected some of the dimensions .'t', 's'."),
        (lambda: move(ROWS, SPACE, ["t s c"], None, "t"), ONE),
        (lambda: switch_all(ROWS, SPACE, ["t s c"], "t", "s"), ONE),
        (lambda: begin_switch(ROWS, SPACE, ["t s c"], "t", "s"), ONE),
        (lambda: grid(LocalComm.world(6)[0], core=4), "does not divide 6 ranks"),
        (lambda: grid(LocalComm.world(6)[0], core=2.0), "does not divide 6 ranks"),
        (lambda: Space({"t": 0}, LocalComm()), "dims must be names with sizes"),
        (lambda: Space({"t": True}, LocalComm()), "dims must be names with sizes"),
        (lambda: Space({"a b": 3}, LocalComm()), "dims must be names with sizes"),
        (lambda: form_of("b b"), "is not a form"),
        (lambda: form_of("b t)"), "is not a form"),
        (lambda: form_of("(b (t s))"), "is not a form"),
        (lambda: form_of("b ... s"), "is not a form"),
        (lambda: Block("a", {}), "a block needs a stream"),
        (lambda: Block("a", {"x": "b b"}), "is not a form"),
        (lambda: Block("a", {"x": "b"}, gathers={"p": ("b c", ("d",))}), r"lacks \['d'\]"),
        (lambda: Block("a", {"x": "b"}, attention=True), "with attention it needs heads and kv_heads"),
        (lambda: Block("a", {"x": "b"}, heads=2, kv_heads=2), "with attention it needs heads and kv_heads"),
    ],
)
def test_arguments_by_hand_that_do_not_fit(call, words) -> None:
    with pytest.raises(ValueError, match=words):
        call()


class ByPosition(Axial):
    def forward(self, x: Tensor, /) -> Tensor:
        return super().forward(x)


def test_arguments_by_position_only_are_refused_at_once() -> None:
    model = made(Weather)
    model.north[0] = ByPosition(8, 2, 1, (5, 7)).double()
    with pytest.raises(NotImplementedError, match=r"north.0 takes \['x'\] by position only"):
        parallelize(model, LocalComm(), WEATHER)


@pytest.mark.parametrize("kind", ["none", "an error on one rank"])
def test_a_plan_function_that_fails_is_told_to_all_ranks(kind: str) -> None:
    def rank(comm: Comm) -> None:
        def plan(*args: Any, **named: Any) -> Any:
            if kind == "none":
                return None
            if comm.rank:
                raise KeyError("no plan")
            return SHARDED(*args, **named)

        model = made(Weather)
        parallelize(model, comm, WEATHER, plan=plan)
        message = "plan= gave None, expected a StagePlan" if kind == "none" else "no plan"
        with pytest.raises((TypeError, KeyError, ValueError), match=message):
            model(**GRID)

    run_threads(2, rank)
