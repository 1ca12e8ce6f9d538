"""Models under PyTorch's attention whose tokens meet outside of it are refused by name; all others are not."""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqpar
from seqpar import Comm, Layout, LocalComm, Mask, Plan
from seqpar.integrations.sdpa import parallelize
from seqpar.testing import run_threads
from tests.trial.models import (
    ALONE,
    IDS,
    MASK,
    MIXING,
    TOKENS,
    VOCABULARY,
    Batch,
    Block,
    E,
    Experts,
    Gate,
    H,
    Model,
    Rather,
    Trained,
    logits,
    made,
)


@pytest.mark.parametrize("name", ["whole paths of torchvision", "whole channels"])
def test_what_drops_in_training_alone_runs_in_eval_and_is_refused_when_training_begins(name: str) -> None:
    model, plan, at = made(MIXING[name][0]).eval(), Plan(MASK, Layout.contiguous(TOKENS, 1)), torch.arange(TOKENS)[None]
    expected = model(IDS[None], at)
    parallelize(model, LocalComm(), plan=plan)
    torch.testing.assert_close(model(IDS[None], at), expected, rtol=0, atol=1e-10)
    with pytest.raises(NotImplementedError, match="it drops whole"):
        model.train()(IDS[None], at)


class Boxed(nn.Module):
    """A model that takes its arguments in a box."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, box: Any) -> Any:
        return self.model(box.ids, box.positions)


@pytest.mark.parametrize("box", [SimpleNamespace, Batch, Rather])
def test_rows_in_a_batch_of_ones_own_are_tried_too(box: Any) -> None:
    plan, comm = Plan(MASK, Layout.contiguous(TOKENS, 1)), LocalComm()
    given, counted = (Boxed(made(case)) for case in (ALONE["positions given"], MIXING["positions counted"][0]))
    batch = box(ids=IDS[None], positions=torch.arange(TOKENS)[None])
    with seqpar.sdpa(plan, comm):
        found = given(batch)
    assert found.shape == (1, TOKENS, VOCABULARY) and torch.equal(batch.ids, IDS[None])
    with (
        pytest.raises(NotImplementedError, match=r"passes to model.places \(Embedding\) depends"),
        seqpar.sdpa(plan, comm),
    ):
        counted(batch)


def test_weights_in_place_of_zeros_are_no_affair_of_the_model() -> None:
    model, comm = made(ALONE["an adapter of zeros"]), LocalComm()
    plan, at = Plan(MASK, Layout.contiguous(TOKENS, 1)), torch.arange(TOKENS)[None]
    before = {name: (x, x._version) for name, x in model.state_dict(keep_vars=True).items() if name != "calls"}
    with seqpar.sdpa(plan, comm):
        model(IDS[None], at).sum().backward()
    assert model.part.b.grad is not None and not model.part.b.any()
    now = {name: (x, x._version) for name, x in model.state_dict(keep_vars=True).items() if name != "calls"}
    assert all(now[name][0] is x and now[name][1] == version for name, (x, version) in before.items())


def test_a_model_that_fails_with_other_weights_is_tried_with_its_own() -> None:
    def only_zeros(model: Any, x: Tensor, positions: Tensor) -> Tensor:
        assert not model.part.gate.any()
        return x + model.places(positions)

    model = made(lambda: Model(only_zeros, Gate()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = logits(LocalComm(), model, "parallelize")
    torch.testing.assert_close(found, model(IDS[None], torch.arange(TOKENS)[None]), rtol=0, atol=1e-10)


def test_the_remedy_for_counted_positions_is_right() -> None:
    counted, given = made(MIXING["positions counted"][0]), made(ALONE["positions given"])
    with pytest.raises(NotImplementedError, match=r"; pass positions .*plan.rope_positions\(rank\)"):
        logits(LocalComm(), counted, "block")
    expected = counted(IDS[None], torch.arange(TOKENS)[None])
    found = torch.cat(run_threads(2, logits, given, "block"), 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


class Patches(nn.Module):
    """A small ViT: patches, positions, blocks that look both ways, a head over the first token."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.first = nn.Conv2d(3, E, 4, 4), nn.Parameter(torch.randn(1, 1, E))
        self.positions = nn.Parameter(torch.randn(1, 17, E))
        layer = nn.TransformerEncoderLayer(E, H, E, 0.0, batch_first=True, norm_first=True)
        self.blocks, self.head = nn.ModuleList(copy.deepcopy(layer) for _ in range(2)), nn.Linear(E, 5)

    def embed(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        return torch.cat([self.first, x], 1) + self.positions

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


def test_blocks_of_a_vision_transformer_whose_tokens_are_cut_by_hand() -> None:
    model, images = made(Patches), torch.randn(1, 3, 16, 16, dtype=torch.float64)
    plan = Plan(Mask([17], causal=False), Layout.contiguous(17, 2))

    def rank(comm: Comm) -> Tensor:
        own = copy.deepcopy(model)
        with seqpar.sdpa(plan, comm):
            x = seqpar.shard(own.embed(images)[0], plan, comm.rank)[None]
            for block in own.blocks:
                x = block(x)
        return own.head(seqpar.unshard(x[0], plan, comm)[:1])

    expected = model(images)
    for found in run_threads(2, rank):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_a_loss_beside_the_rows_is_taken_as_it_is() -> None:
    plan, comm = Plan(MASK, Layout.contiguous(TOKENS, 1)), LocalComm()
    given = made(lambda: Trained(lambda m, x, p: x + m.places(p)))
    counted = made(lambda: Trained(lambda m, x, p: x + m.places(torch.arange(x.shape[1]))))
    at = torch.arange(TOKENS)[None]
    with seqpar.sdpa(plan, comm):
        logits, loss = given(IDS[None], at)
    assert logits.requires_grad and loss.dim() == 0
    with pytest.raises(NotImplementedError, match="that Trained passes to places"), seqpar.sdpa(plan, comm):
        counted(IDS[None], at)


def test_a_model_is_tried_once_in_training_and_once_in_eval() -> None:
    model, comm = made(ALONE["positions given"]), LocalComm()
    handle, runs = parallelize(model, comm), []
    model.blocks[0].register_forward_hook(lambda *_: runs.append(torch.is_grad_enabled()))
    random = torch.get_rng_state()

    def call(tokens: int, training: bool = True) -> int:
        runs.clear()
        plan, x = Plan(Mask([tokens]), Layout.contiguous(tokens, 1)), torch.arange(tokens)[None]
        with seqpar.parallel(plan, comm):
            model.train(training)(x, x)
        assert runs[-1] and not any(runs[:-1])
        return len(runs)

    assert [call(n) for n in (9, 12, 33, 8)] == [4, 1, 1, 1]
    assert [call(9, training=mode) for mode in (False, True, False)] == [4, 1, 1]
    assert int(model.calls) == 7, "what is tried leaves no trace in buffers"
    assert torch.equal(torch.get_rng_state(), random)
    handle.undo()


class Noting(nn.Module):
    """Adds in place to its rows, fills its caller's list, counts in a plain tensor and draws from a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.counted, self.generator = Block(), torch.zeros(()), torch.Generator().manual_seed(3)
        self.drawn: list[float] = []

    def forward(self, x: Tensor, sums: list[Tensor], given: dict[str, Any]) -> Tensor:
        self.counted += 1
        given["calls"] = given.get("calls", 0) + 1
        given["table"] *= 2
        self.drawn.append(float(torch.rand((), generator=self.generator)))
        x += 1
        sums.append(x.square().sum())
        return self.block(x)


@pytest.mark.parametrize("way", ["block", "parallelize"])
def test_what_is_tried_leaves_no_trace_in_arguments_tensors_and_generators(way: str) -> None:
    model, x = made(Noting), torch.randn(TOKENS, E).double()

    def noted(rows: Tensor, block: Any) -> list[Any]:
        own, sums, given = copy.deepcopy(model), [], {"table": torch.ones(2)}
        out = block(own, rows, sums, given)
        generator = own.generator.get_state().tolist()
        return [out, len(sums), given["calls"], given["table"].tolist(), own.drawn, float(own.counted), generator]

    def rank(comm: Comm) -> list[Any]:
        plan = Plan(MASK, Layout.from_pieces([0, 1], [1, TOKENS - 1], [1, 0], 2))
        given = seqpar.shard(x, plan, comm.rank)[None].clone()

        def block(own: nn.Module, *arguments: Any) -> Tensor:
            if way == "parallelize":
                parallelize(own, comm, plan=plan)
                return own(*arguments)
            with seqpar.sdpa(plan, comm):
                return own(*arguments)

        out, *traces = noted(given, block)
        assert torch.equal(given[0], seqpar.shard(x, plan, comm.rank) + 1)
        return [seqpar.unshard(out[0], plan, comm), *traces]

    def alone(own: nn.Module, *arguments: Any) -> Tensor:
        with seqpar.sdpa(Plan(MASK, Layout.contiguous(TOKENS, 1)), LocalComm()):
            return own(*arguments)

    out, *traces = noted(x[None].clone(), alone)
    assert traces[:3] == [1, 1, [2.0, 2.0]] and len(traces[3]) == traces[4] == 1
    for found, *others in run_threads(2, rank):
        torch.testing.assert_close(found, out[0])
        assert others == traces


class Pooling(nn.Module):
    """A block, and the mean of rows where a flag asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor, pooled: Any) -> Tensor:
        return self.block(x) + (x.mean(1, keepdim=True) if pooled in (1, "yes") else 0.0)


def pooling() -> type[Pooling]:
    """A class of its own, which a test may change."""

    class Plain(Pooling):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.part(x), 0)

    return Plain


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean(1, keepdim=True)


def mean(x: Tensor) -> Tensor:
    return Mean()(x)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "another module": lambda model: setattr(model, "part", Mean().eval()),
    "a forward": lambda model: setattr(model.part, "forward", mean),
    "the forward of a class": lambda model: setattr(type(model), "forward", lambda self, x: mean(self.block(x))),
    "a class": lambda model: setattr(model.block, "__class__", type("Other", (Block,), {"forward": forward_of_means})),
}


def forward_of_means(self: nn.Module, x: Tensor) -> Tensor:
    return Block.forward(self, mean(x))


@pytest.mark.parametrize(
    ("name", "way"), [*((name, "block") for name in CHANGES), *((name, "parallelize") for name in list(CHANGES)[:2])]
)
def test_a_model_is_tried_again_when_a_module_or_forward_is_another(name: str, way: str) -> None:
    def changed(model: nn.Module, run: Callable[[], object]) -> None:
        run()
        CHANGES[name](model)
        with pytest.raises(NotImplementedError, match="Plain cannot be computed on several ranks"):
            run()

    on_two_ranks(changed, way)


def on_two_ranks(test: Callable[[nn.Module, Callable[[], object]], None], way: str) -> None:
    """Call `test` on each rank, with a model and a function that runs it inside `sdpa`."""
    models, x, plan = (
        [made(pooling()).eval() for _ in range(2)],
        rows_of_all(),
        Plan(MASK, Layout.contiguous(TOKENS, 2)),
    )

    def rank(comm: Comm) -> None:
        model, own = models[comm.rank], seqpar.shard(x, plan, comm.rank, dim=1)

        def run() -> None:
            with seqpar.sdpa(plan, comm) if way == "block" else contextlib.nullcontext():
                model(own)

        if way == "parallelize":
            parallelize(model, comm, plan=plan)
        test(model, run)

    run_threads(2, rank)


def rows_of_all() -> Tensor:
    return torch.randn(1, TOKENS, E, generator=torch.Generator().manual_seed(0)).double()


@pytest.mark.parametrize("way", ["parallelize", "block"])
def test_hooks_dtypes_and_forwards_made_anew_are_no_reason_for_another_trial(way: str) -> None:
    def same(model: nn.Module, run: Callable[[], object]) -> None:
        found, inner = [], model.part.forward
        for step in range(4):
            runs: list[Tensor] = []
            model.part.forward = lambda x, step=step: inner(x)  # type: ignore[assignment]
            hook = model.part.register_forward_hook(lambda module, args, y, runs=runs: runs.append(y))
            run()
            hook.remove()
            model.requires_grad_(step % 2 == 0)
            found.append(len(runs))
        assert found[0] > 1 and found[1:] == [1] * 3, found

    on_two_ranks(same, way)


@pytest.mark.parametrize("way", ["parallelize", "block"])
def test_one_rank_does_not_read_a_models_code(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the rows of all, and a walk through a model would take time."""
    monkeypatch.setattr("seqpar.trial.identity.kind_of", lambda module: pytest.fail("read"))
    model, comm, plan = made(pooling()).eval(), LocalComm(), Plan(MASK, Layout.contiguous(TOKENS, 1))
    x = rows_of_all()
    for _ in range(2):
        if way == "parallelize":
            with parallelize(model, comm, plan=plan):
                assert model(x).shape == x.shape
        else:
            with seqpar.sdpa(plan, comm):
                assert model(x).shape == x.shape


class Hashed(nn.Module):
    """A module with a hash of its state, as a metric has."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 1

    def __hash__(self) -> int:
        return hash(self.steps)

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return x


def test_a_part_with_a_hash_of_its_own_renews_no_trial() -> None:
    model, runs = made(pooling()).eval(), list[int]()
    model.part.register_forward_pre_hook(lambda *_: runs.append(0))
    model.part = nn.Sequential(model.part, Hashed()).eval()
    parallelize(model, LocalComm(), plan=Plan(MASK, Layout.contiguous(TOKENS, 1)))
    found, x = [], torch.randn(1, TOKENS, E).double()
    for _ in range(6):
        runs.clear()
        model(x)
        found.append(len(runs))
    assert found[0] > 1 and found[1:] == [1] * 5


def closed() -> Any:
    """A model to which functions refer, in its class and in a hook."""

    class Closed(Pooling):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x, 0)

    model = made(Closed)
    Closed.of = lambda self: model  # type: ignore[attr-defined]
    model.block.register_forward_hook(lambda module, args, y: None if model.training else y)
    with parallelize(model, LocalComm(), plan=Plan(MASK, Layout.contiguous(TOKENS, 1))):
        model(torch.ones(1, TOKENS, E).double())
    return weakref.ref(model)


def test_a_model_is_not_kept_alive() -> None:
    alive = closed()
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("mixes", [True, False])
def test_a_model_with_a_hook_for_the_time_of_its_forward_is_tried(mixes: bool) -> None:
    class Hooking(Pooling):
        def forward(self, x: Tensor) -> Tensor:
            hook = self.block.register_forward_hook(lambda module, args, y: None)
            try:
                return super().forward(x, int(mixes))
            finally:
                hook.remove()

    model, x, comm, found = made(Hooking), torch.randn(1, TOKENS, E).double(), LocalComm(), list[int]()
    plan = Plan(MASK, Layout.contiguous(TOKENS, 1))
    told = pytest.raises(NotImplementedError, match="Hooking cannot") if mixes else contextlib.nullcontext()
    for _ in range(3):
        with warnings.catch_warnings(record=True) as said, told, seqpar.sdpa(plan, comm):
            warnings.simplefilter("always")
            model(x)
        found.append(len([each for each in said if "not known" in str(each.message)]))
    assert mixes or sum(found) <= 1


@pytest.mark.parametrize("way", ["block", "parallelize"])
def test_ranks_of_one_row_each_are_warned_that_nothing_was_tried(way: str) -> None:
    model = made(MIXING["positions counted"][0])

    def rank(comm: Comm) -> None:
        plan, rows = Plan(Mask([2]), Layout.contiguous(2, 2)), IDS[comm.rank : comm.rank + 1][None]
        own = copy.deepcopy(model)
        if way == "parallelize":
            parallelize(own, comm, plan=plan)
            own(rows, rows)
        else:
            with seqpar.sdpa(plan, comm):
                own(rows, rows)

    with pytest.warns(UserWarning, match="no rank has two of the plan's 2"):
        run_threads(2, rank)


class Strips(nn.Module):
    """A ViT that makes its rows of a strip of an image."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.patches = norm, nn.Conv2d(3, E, 4, 4)
        self.block = nn.TransformerEncoderLayer(E, H, E, 0.0, batch_first=True)

    def forward(self, image: Tensor) -> Tensor:
        return self.block(self.patches(self.norm(image)).flatten(2).transpose(1, 2))


def strips(comm: Comm, model: nn.Module, way: str) -> Tensor:
    """What a rank makes of its strip, twice."""
    plan, own = Plan(Mask([60], causal=False), Layout.contiguous(60, comm.size)), copy.deepcopy(model)
    image = torch.randn(1, 3, 40, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    handle = parallelize(own, comm, plan=plan) if way == "parallelize" else contextlib.nullcontext()
    with handle:
        for _ in range(2):
            block = contextlib.nullcontext() if way == "parallelize" else seqpar.sdpa(plan, comm)
            with block:
                out = own(image.chunk(comm.size, 2)[comm.rank])
    return out


@pytest.mark.parametrize("way", ["block", "parallelize"])
def test_a_model_that_makes_its_rows_itself_warns_that_nothing_was_tried(way: str) -> None:
    model = made(lambda: Strips(nn.Identity()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = strips(LocalComm(), model, way)
    with pytest.warns(UserWarning, match="none of its arguments has a dim of its rank's rows") as warned:
        found = run_threads(2, strips, model, way)
    assert len(warned) == 2, "a rank warns once"
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("way", ["block", "parallelize"])
def test_statistics_over_an_image_are_refused_though_nothing_can_be_tried(way: str) -> None:
    model = made(lambda: Strips(nn.BatchNorm2d(3)))
    with pytest.raises(NotImplementedError, match=r"norm \(BatchNorm2d\): statistics over the tokens of one rank"):
        run_threads(2, strips, model, way)


@pytest.mark.parametrize("way", ["block", "parallelize"])
def test_a_rank_with_one_row_beside_others_warns_of_nothing(way: str) -> None:
    model, plan = made(ALONE["positions given"]), Plan(Mask([5]), Layout.from_pieces([0, 4], [4, 1], [0, 1], 2))

    def rank(comm: Comm) -> None:
        own, at = copy.deepcopy(model), torch.from_numpy(plan.rope_positions(comm.rank))[None]
        if way == "parallelize":
            parallelize(own, comm, plan=plan)
            own(at, at)
        else:
            with seqpar.sdpa(plan, comm):
                own(at, at)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_threads(2, rank)


def test_sizes_that_are_equal_by_accident_are_no_rows() -> None:
    class Modulated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, scale: Tensor, x: Tensor) -> Tensor:
            return self.block(x * scale[:, None]) * scale

    model = made(Modulated)
    plan = Plan(Mask([E]), Layout.contiguous(E, 1))
    with seqpar.sdpa(plan, LocalComm()):
        found = model(torch.rand(1, E).double(), torch.randn(1, E, E).double())
    assert found.shape == (1, E, E)


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("place", [0, 77, 128, 200, -3])
def test_one_special_place_among_many_rows_is_found(place: int, samples: int) -> None:
    class Separated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.randn(E))

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            x[-1, place] += self.token
            q = x.unflatten(-1, (H, -1)).transpose(1, 2)
            return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)

    plan = Plan(Mask([256] * samples, causal=False), Layout.contiguous(256 * samples, 1))
    model, x = made(Separated), torch.randn(samples, 256, E).double()
    with pytest.raises(NotImplementedError, match="attention in Separated depends"), seqpar.sdpa(plan, LocalComm()):
        model(x)


def test_rows_with_extreme_elements_follow() -> None:
    """-inf as of masked logits, one large channel, one feature."""
    plan, x = Plan(Mask([300], causal=False), Layout.contiguous(300, 1)), torch.randn(1, 300, E)
    x[..., 3] *= 1e4
    block = nn.TransformerEncoderLayer(E, H, E, 0.0, batch_first=True)
    heads = nn.Linear(E, 1), nn.Linear(E, 500)

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.heads = block, nn.ModuleList(heads)

        def forward(self, x: Tensor) -> list[Tensor]:
            y = self.block(x)
            return [self.heads[0](y), self.heads[1](y).masked_fill(torch.arange(500) > 7, -torch.inf), y.argmax(-1)]

    with seqpar.sdpa(plan, LocalComm()):
        assert len(Logits()(x)) == 3


@pytest.mark.parametrize("tokens", [4, 9, 22, 100])
@pytest.mark.parametrize("inside", [False, True])
def test_a_scale_from_one_row_is_found_wherever_that_row_is(inside: bool, tokens: int) -> None:
    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.block = nn.Linear(E, E), Block()

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x) if inside else x
            scale = x.abs().max() / 127
            return self.block((x / scale).round() * scale)

    model, plan = made(Quantised), Plan(Mask([tokens]), Layout.contiguous(tokens, 1))
    x = torch.randn(1, tokens, E, generator=torch.Generator().manual_seed(0)).double()
    for row in range(tokens):
        largest = torch.where(torch.arange(tokens) == row, 2.0, 1.0)[:, None]
        comm = LocalComm()  # tried again
        with pytest.raises(NotImplementedError, match="Quantised cannot be"), seqpar.sdpa(plan, comm):
            model(x * largest)


@pytest.mark.parametrize("way", ["block", "parallelize"])
@pytest.mark.parametrize("lengths", [[E // 2] * 2, [E]])
def test_samples_whose_rows_are_as_many_as_features_are_tried(lengths: list[int], way: str) -> None:
    model, x = made(Attending), torch.randn(2, E // 2, E).double()
    plan, comm = Plan(Mask(lengths, causal=False), Layout.contiguous(E, 1)), LocalComm()
    expected = model(x)
    alone = len(lengths) == 2
    with contextlib.nullcontext() if alone else pytest.raises(ValueError, match="do not see each other"):
        handle = parallelize(model, comm, plan=plan) if way == "parallelize" else seqpar.sdpa(plan, comm)
        with handle:
            torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-10)


class Attending(nn.Module):
    """Attention of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(E, 3 * E), nn.Linear(E, E)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Late(nn.Module):
    """A block, what a case does behind its attention, and a head whose logits another case masks."""

    def __init__(
        self, late: Callable[[Late, Tensor], Tensor], masked: Callable[[Tensor], Tensor] = lambda y: y
    ) -> None:
        super().__init__()
        self.late, self.masked, self.block, self.head = late, masked, Block(), nn.Linear(E, 16)
        self.extra, self.film = nn.Linear(E, E), nn.Linear(E, 2 * E)
        self.norm = nn.GroupNorm(2, E)

    def forward(self, x: Tensor) -> Tensor:
        return self.masked(self.head(self.late(self, self.block(x))))


def before(x: Tensor) -> Tensor:
    """The rows before."""
    return F.pad(x, (0, 0, 1, -1))


def filmed(model: Late, x: Tensor, at: int) -> Tensor:
    scale, shift = model.film(x[:, [at]]).chunk(2, -1)
    return x * (1 + scale) + shift


LATE: dict[str, Callable[[Late, Tensor], Tensor]] = {
    "rows before": lambda m, x: x + before(x),
    "a little of the rows before": lambda m, x: 0.95 * x + 0.05 * before(x),
    "mean": lambda m, x: x + x.mean(1, keepdim=True),
    "squeeze and excite": lambda m, x: x * m.extra(x.mean(1, keepdim=True)).sigmoid(),
    "global context": lambda m, x: x + m.extra(x.mean(1, keepdim=True)),
    "norm over rows": lambda m, x: m.norm(x.transpose(1, 2)).transpose(1, 2),
}
ROWWISE: dict[str, Callable[[Late, Tensor], Tensor]] = {
    "nothing": lambda m, x: x,
    "a gate": lambda m, x: x * m.extra(x).sigmoid(),
    "one large channel": lambda m, x: torch.cat([x[..., :1] * 1e4, x[..., 1:]], -1),
}
LARGE: dict[str, Callable[[Tensor], Tensor]] = {
    "-1e9 in columns": lambda y: y.masked_fill(torch.arange(16) > 12, -1e9),
    "the lowest number in columns": lambda y: y.masked_fill(torch.arange(16) > 12, torch.finfo(y.dtype).min),
    "-1e9 in most columns": lambda y: y.masked_fill(torch.arange(16) > 2, -1e9),
    "-1e9 in other columns of every row": lambda y: y.masked_fill(y > y.median(-1, keepdim=True).values, -1e9),
    "one large column": lambda y: torch.cat([y[..., :15], 1e8 * y[..., 15:]], -1),
    "as many large columns": lambda y: torch.cat([y, 1e8 * y], -1),
}


def called(model: nn.Module, x: Tensor) -> None:
    plan = Plan(Mask([x.shape[1]]), Layout.contiguous(x.shape[1], 1))
    with torch.no_grad(), seqpar.sdpa(plan, LocalComm()):
        model(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("large", LARGE)
@pytest.mark.parametrize("late", LATE)
@pytest.mark.sampled(3)
def test_large_elements_hide_nothing_beside_them(late: str, large: str, dtype: torch.dtype) -> None:
    model, x = made(lambda: Late(LATE[late], LARGE[large])).to(dtype), torch.randn(1, 300, E, dtype=dtype)
    with pytest.raises(NotImplementedError, match="Late cannot be .*: in a trial with some of its rows"):
        called(model, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("large", LARGE)
@pytest.mark.parametrize("late", ROWWISE)
@pytest.mark.sampled(2)
def test_rows_with_large_elements_follow(late: str, large: str, dtype: torch.dtype) -> None:
    called(made(lambda: Late(ROWWISE[late], LARGE[large])).to(dtype), torch.randn(1, 300, E, dtype=dtype))


def test_a_place_that_no_sample_has_is_found_beside_large_elements() -> None:
    """Sums over the elements of every row see it."""

    def special(model: Late, x: Tensor) -> Tensor:
        return x + F.one_hot(torch.tensor(77), x.shape[1])[:, None] * model.extra.bias

    model = made(lambda: Late(special, LARGE["-1e9 in columns"]))
    with pytest.raises(NotImplementedError, match=r"passes to head \(Linear\) depends|output of Late depends"):
        called(model, torch.randn(1, 256, E).double())


@pytest.mark.parametrize("tokens", [2, 3, 4, 7, 8, 40, 60, 440, 442])
@pytest.mark.parametrize("at", [0, -1])
def test_what_reads_one_row_is_found_at_every_number_of_rows(at: int, tokens: int) -> None:
    model = made(lambda: Late(lambda m, x: filmed(m, x, at)))
    with pytest.raises(NotImplementedError, match="Late cannot be .*: in a trial with some of its rows"):
        called(model, torch.randn(1, tokens, E).double())


@pytest.mark.parametrize("way", ["bfloat16", "float16", "autocast", "high"])
@pytest.mark.parametrize("late", LATE)
@pytest.mark.sampled(3)
def test_what_mixes_a_little_is_found_though_products_are_rough(late: str, way: str) -> None:
    for rows in (64, 600):
        with pytest.raises(NotImplementedError, match="in a trial with some of its rows"):
            roughly(Late(LATE[late]), way, rows)


@pytest.mark.parametrize("way", ["bfloat16", "float16", "autocast", "high"])
@pytest.mark.parametrize("late", ROWWISE)
@pytest.mark.sampled(2)
def test_rows_of_rough_products_follow(late: str, way: str) -> None:
    deep = nn.Sequential(*(Block() for _ in range(6)))

    def case(model: Late, x: Tensor) -> Tensor:
        return ROWWISE[late](model, deep.to(x.dtype)(x))

    for rows in (3, 64, 301):
        roughly(Late(case, LARGE["-1e9 in columns"] if way != "float16" else lambda y: y), way, rows)


def roughly(model: nn.Module, way: str, rows: int) -> None:
    """Call a model with products of that kind."""
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(way, torch.float32)
    kept = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if way == "high" else kept)
    try:
        with torch.autocast("cpu", enabled=way == "autocast"):
            called(model.to(dtype), torch.randn(1, rows, E, dtype=dtype))
    finally:
        torch.set_float32_matmul_precision(kept)


class Rounded(nn.Linear):
    """A layer whose sums come in another order every time."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x.float(), self.weight.float(), self.bias.float())
        noise = np.random.default_rng(self.calls).standard_normal(y.shape, np.float32)
        Rounded.calls += 1
        return (y + 1e-6 * y.square().mean(-1, keepdim=True).sqrt() * torch.from_numpy(noise)).to(x.dtype)

    calls = 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_that_round_otherwise_in_every_run_follow(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn, "Linear", Rounded)
    model = Late(lambda m, x: m.deep(x), LARGE["-1e9 in columns"])
    model.deep = nn.Sequential(*(Block() for _ in range(12)))
    with torch.no_grad():
        called(model.to(dtype), torch.randn(1, 200, E, dtype=dtype))


class Weighted(nn.Module):
    """Rows by weights without a dim of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return self.block(x) * weights[None, :, None]


@pytest.mark.parametrize("way", ["block", "parallelize"])
def test_a_vector_of_a_number_for_every_row_is_an_argument_like_others(way: str) -> None:
    model, x, weights = made(Weighted), torch.randn(TOKENS, E).double(), torch.rand(TOKENS).double()
    expected = model(x[None], weights)

    def rank(comm: Comm) -> Tensor:
        own, plan = copy.deepcopy(model), Plan(MASK, Layout.contiguous(TOKENS, comm.size))
        given = [seqpar.shard(value, plan, comm.rank) for value in (x, weights)]
        handle = parallelize(own, comm, plan=plan) if way == "parallelize" else seqpar.sdpa(plan, comm)
        with warnings.catch_warnings(), handle:
            warnings.simplefilter("error")
            return own(given[0][None], given[1])

    torch.testing.assert_close(torch.cat(run_threads(2, rank), 1), expected, rtol=0, atol=1e-10)


class Capacity(Experts):
    """Experts that take as many rows as their share is, and let the others pass."""

    def forward(self, x: Tensor) -> Tensor:
        rows, out = x.flatten(0, 1), x.flatten(0, 1).clone()
        choice = self.router(rows).argmax(-1)
        for number, expert in enumerate(self.experts):
            at = torch.where(choice == number)[0][: len(rows) // 9]
            out.index_add_(0, at, expert(rows[at]))
        return out.view_as(x)


def test_experts_that_are_full_are_not_told_that_positions_are_the_cause() -> None:
    model = made(lambda: Late(lambda m, x: m.experts(x)))
    model.experts = Capacity().double()
    for tokens in (9, 18, 22, 40):
        with pytest.raises(NotImplementedError) as raised:
            called(model, torch.randn(1, tokens, E).double())
        assert "positions" not in str(raised.value), tokens


def test_rows_that_follow_by_half_precision_too() -> None:
    model = made(ALONE["experts"]).bfloat16()
    with seqpar.sdpa(Plan(MASK, Layout.contiguous(TOKENS, 1)), LocalComm()):
        model(IDS[None], torch.arange(TOKENS)[None])
    counted = made(MIXING["positions counted"][0]).bfloat16()
    with pytest.raises(NotImplementedError, match="places"):
        logits(LocalComm(), counted, "parallelize")
