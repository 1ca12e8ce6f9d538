"""What a first forward shows of a spec that does not describe its model: refused by name, on every rank."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from seqpar.comm import Comm, LocalComm
from seqpar.dsp import Block, Exit, Spec, parallelize
from seqpar.testing import run_processes, run_threads
from tests.dsp.cases import rand
from tests.dsp.models import SHARDED, compared, gradients, made
from tests.dsp.planners import by_batch
from tests.dsp.stages import (
    ALONG_T,
    ANY,
    BY_PLACE,
    PLACES,
    SPEC,
    Clip,
    Mixing,
    Stage,
    X,
    is_one_process,
    refused,
)


@pytest.mark.parametrize("row", range(8))
def test_a_scale_of_the_largest_row_is_seen_wherever_that_row_is(row: int) -> None:
    x = X.repeat(1, 4, 1, 1)
    x[:, [row, row + 8]] *= 3  # the largest of each of two ranks
    said = refused(Clip(lambda x: (x * 127 / x.abs().max()).round() / 127 * x.abs().max()), x=x)
    assert all("second mixes t" in each for each in said), said


class Placing(Stage):
    """It adds a table of places that it has, or makes: once, for each number of rows, or in an object."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.by_size, self.kept, self.box = how, {}, None, Box()
        self.table = PLACES.double() if how == "had" else None

    def forward(self, x: Tensor) -> Tensor:
        size, places = x.shape[1], PLACES[: x.shape[1]].double()
        if self.how == "once":
            self.kept = places if self.kept is None or len(self.kept) != size else self.kept
        if self.how == "by size":
            places = self.by_size.setdefault(size, places)
        if self.how == "in an object":
            places = self.box.inside.setdefault(size, places)
        return super().forward(x) + {"had": self.table, "once": self.kept}.get(self.how, places)[:size]


@pytest.mark.parametrize("how", ["had", "once", "by size", "in an object"])
def test_a_table_of_places_that_a_stage_keeps(how: str) -> None:
    model = Clip()
    model.second = Placing(how)
    for said in refused(model):
        assert "NotImplementedError: second counts the rows of t" in said, said
    for said in refused(copy.deepcopy(model)):
        assert "NotImplementedError: second counts the rows of t" in said, said


class Averaging(Stage):
    """It keeps what it saw first, and writes to a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Tensor | None = None
        self.total = torch.zeros((), dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = x.detach().tanh() if self.kept is None else self.kept
        self.total += 1
        return super().forward(x) * float(self.total) + self.kept


def test_a_stage_that_counts_is_right_where_ranks_do_not_share_its_rows() -> None:
    """As the error says; and one that takes no other number of rows is none that counts."""
    spec = replace(SPEC, blocks=(SPEC.blocks[0], replace(SPEC.blocks[1], whole=("s", "t"))))
    is_one_process(2, partial(made, Clip, BY_PLACE["numbers of rows"]), spec, X)
    is_one_process(2, partial(made, Clip, lambda x: x.view(1, 2, -1, 8).view(x.shape) if len(x) else x), SPEC, X)


def test_rows_that_look_far_are_seen_where_a_rank_has_more() -> None:
    also: Mixing = lambda x: F.pad(x, (0, 0, 0, 0, 4, 0))[:, :-4] if x.shape[1] > 4 else x * 0  # noqa: E731
    assert all("second mixes t" in said for said in refused(Clip(also), x=rand(1, 16, 6, 3)))

    def on_a_rank(comm: Comm) -> list[str]:
        model, said = made(Clip, also), []
        parallelize(model, comm, SPEC, plan=SHARDED)
        for x in (X, rand(1, 16, 6, 3), rand(1, 16, 6, 3)):  # two rows a rank, then eight; and the same again
            try:
                said.append(str(model(x).shape))
            except (NotImplementedError, ValueError) as error:
                said.append(str(error))
        return said

    for few, more, again in run_threads(2, on_a_rank):
        assert "[1, 4, 6, 3]" in few and "second mixes t" in more and "second mixes t" in again


class Gated(Stage):
    """What it adds is multiplied by zero at first, as in DiT, and looks at earlier rows."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.linear(x.cumsum(1))


def test_a_gate_that_is_closed_hides_nothing() -> None:
    model = Clip()
    model.second = Gated()
    assert all("second mixes t" in said for said in refused(model))


class GatedInPart(Stage):
    """One layer gives a scale and a gate; the rows of the gate are zeros at first."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(8, 16)
        nn.init.zeros_(self.both.weight[8:])
        nn.init.zeros_(self.both.bias[8:])

    def forward(self, x: Tensor) -> Tensor:
        scale, gate = self.both(x).chunk(2, -1)
        return x * scale + gate * self.linear(x.cumsum(1))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", [Gated, GatedInPart])
def test_a_part_that_is_closed_hides_nothing(kind: type[Stage], mode: Any) -> None:
    model = Clip()
    model.second = kind()

    def on_a_rank(comm: Comm) -> str:
        own = copy.deepcopy(model).double()
        parallelize(own, comm, SPEC, plan=SHARDED)
        with mode(), pytest.raises(NotImplementedError) as raised:
            own(X)
        return str(raised.value)

    assert all("second mixes t" in said for said in run_threads(2, on_a_rank))


class GatedByTime(Clip):
    """Its gates follow the time, and are closed before it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.gate = GatedByArgument(), nn.Linear(1, 8)
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(torch.ones(1, 1, dtype=x.dtype))[:, None, None]
        return self.leave(self.second(self.first(self.enter(x)), gate))


class GatedByArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return x + gate * self.linear(x.cumsum(1))


@pytest.mark.parametrize("more", [{"rows": {"gate": "b 1 1 c"}}, {"shared": ("gate",)}])
def test_a_closed_gate_that_is_given_hides_nothing(more: dict[str, Any]) -> None:
    block = Block("second", {"x": "b t s c"}, ("s",), rest=ANY, **more)
    spec = replace(SPEC, model="GatedByTime", blocks=(SPEC.blocks[0], block), outside=("enter", "gate"))
    assert all("second mixes t" in said for said in refused(GatedByTime(), spec))


STILL = {"zeros": torch.zeros_like(X), "a still clip": X[:, :1].expand_as(X), "still halves": X[:, [0, 0, 2, 2]]}


@pytest.mark.parametrize("name", STILL)
def test_rows_that_are_all_alike_hide_nothing(name: str) -> None:
    for said in refused(Clip(lambda x: x - x.mean(1, keepdim=True)), x=STILL[name]):
        assert "second mixes t" in said, said


@pytest.mark.parametrize("name", STILL)
def test_rows_that_are_all_alike_stay_so_for_the_model(name: str) -> None:
    is_one_process(2, partial(made, Clip), SPEC, STILL[name])
    model, before = Clip(), torch.get_rng_state()
    assert refused(model, x=STILL[name]) == ["nothing"] * 2
    assert torch.equal(before, torch.get_rng_state())


ROUGH = [(torch.bfloat16, False), (torch.float16, False), (torch.float32, True)]  # dtypes, and autocast


def one_large(x: Tensor, scale: float = 50.0) -> Tensor:
    """Rows with one large channel, as trained transformers have."""
    return torch.cat([scale * x[..., :1], x[..., 1:]], -1)


@pytest.mark.parametrize("dtype, autocast", ROUGH)
def test_a_large_channel_hides_nothing_where_results_are_rough(dtype: torch.dtype, autocast: bool) -> None:
    model = Clip(lambda x: F.layer_norm(x, x.shape[-1:]).mean(1, keepdim=True), between=one_large)
    for said in refused(model, x=rand(1, 16, 6, 3).to(dtype), autocast=autocast):
        assert "second mixes t" in said, said


def much_larger(x: Tensor) -> Tensor:
    return one_large(x, 1e4)


def large_row(x: Tensor) -> Tensor:
    return torch.cat([1e4 * x[:, :, :1], x[:, :, 1:]], 2)


LARGE = {"channel": much_larger, "row": large_row}
SMALL: dict[str, tuple[Mixing, str]] = {
    "a gate by the mean of all": (lambda x: 1e-2 * x * x.mean((1, 2), keepdim=True).sigmoid(), "mixes t"),
    "places": (lambda x: x + 1e-2 * torch.arange(x.shape[1], dtype=x.dtype)[:, None, None], "counts the rows of t"),
}


@pytest.mark.parametrize("large", LARGE)
@pytest.mark.parametrize("name", SMALL)
def test_a_much_larger_channel_or_row_hides_nothing_in_single_precision(name: str, large: str) -> None:
    also, how = SMALL[name]
    for said in refused(Clip(also, between=LARGE[large]), x=rand(1, 16, 6, 3).float()):
        assert f"second {how}" in said, said


@pytest.mark.parametrize("large", LARGE)
@pytest.mark.parametrize("kind", [Stage, lambda: Experts()])
def test_what_is_right_beside_a_much_larger_channel_or_row_stays_so(kind: Callable[[], nn.Module], large: str) -> None:
    model = Clip(between=LARGE[large])
    model.second = kind()
    assert refused(model, x=rand(1, 16, 6, 3).float()) == ["nothing"] * 2


class Experts(nn.Module):
    """Rows go to one of three experts, each of which gets other rows if some change."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(8, 8) for _ in range(3)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 2)
        for layer in self.layers:
            out, expert = torch.zeros_like(rows), rows[:, :3].argmax(1)
            for n, linear in enumerate(layer):
                own = (expert == n).nonzero()[:, 0]
                out = out.index_add(0, own, linear(rows[own]).to(out.dtype))
            rows = rows + out
        return rows.view(x.shape)


@pytest.mark.parametrize("dtype, autocast", ROUGH)
def test_experts_are_right_where_results_are_rough(dtype: torch.dtype, autocast: bool) -> None:
    model = Clip(between=one_large)
    model.second = Experts()
    assert refused(model, x=rand(1, 16, 6, 3).to(dtype), autocast=autocast) == ["nothing"] * 2


class Drawing(Stage):
    """Left out now and then, by a generator that all ranks seed alike."""

    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.random.random() < 0.5 else x


class Counting(Stage):
    def __init__(self) -> None:
        super().__init__()
        self.state = {"calls": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.state["calls"] += 1
        return super().forward(x) * self.state["calls"]


class Remembering(Stage):
    """It keeps what it saw first."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if "x" not in self.kept:
            self.kept["x"] = x.tanh()
        return super().forward(x) + self.kept["x"]


class Shrinking(Stage):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.mul_(0.5)
        return super().forward(x) * self.scale


class Tabled(Stage):
    """It makes a table for its rows, and has a buffer that nothing was written to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("unset", torch.full((3,), torch.nan))

    def forward(self, x: Tensor) -> Tensor:
        self.register_buffer("turns", torch.arange(x.shape[1], dtype=x.dtype).cos().mean() * 0 + torch.ones(x.shape[1]))
        return super().forward(x) * self.turns.view(1, -1, 1, 1)


class Choosy(Stage):
    """Defined for positive numbers alone."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.abs() + 1
        if (y < 1).any():
            raise ValueError("a negative number")
        return torch.linalg.cholesky(torch.diag_embed(y)).diagonal(dim1=-2, dim2=-1) + self.linear(x)


class Writing(Stage):
    """It writes to what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return super().forward(x)


class Derived(Stage):
    """It has a derivative inside."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            z = x if x.requires_grad else x.detach().requires_grad_()
            (d,) = torch.autograd.grad(z.square().sum(), z)
        return super().forward(x) + d


class Box:
    """A plain object with what a stage keeps."""

    def __init__(self) -> None:
        self.count, self.inside = 0, {"list": [0], "kept": ()}


class Boxed(Stage):
    """It counts its calls, and keeps what it saw first, in objects inside objects, as hooks of libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.box = {"of": Box()}

    def forward(self, x: Tensor) -> Tensor:
        box = self.box["of"]
        box.count += 1
        box.inside["list"][0] += 1
        box.inside["kept"] = box.inside["kept"] or (x.tanh(),)
        return super().forward(x) * (box.count + box.inside["list"][0]) + box.inside["kept"][0]


STAGES = (Averaging, Boxed, Drawing, Counting, Remembering, Shrinking, Tabled, Choosy, Writing, Derived)


@pytest.mark.filterwarnings("ignore:Clip keeps second")
@pytest.mark.parametrize("kind", STAGES)
@pytest.mark.parametrize("ranks, rows", [(2, 8), (3, 8), (5, 4)])
def test_stages_with_a_state_or_a_domain(kind: type[Stage], ranks: int, rows: int) -> None:
    def make() -> nn.Module:
        model = made(Clip)
        model.second = made(kind)
        return model

    is_one_process(ranks, make, SPEC, rand(1, rows, 6, 3))


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def under_a_cache(comm: Comm) -> dict[str, Tensor]:
    """A weight that is computed once a step, by a stage under a checkpoint."""
    model = made(Clip)
    parametrize.register_parametrization(model.second.linear, "weight", Doubled())
    inner = model.second.forward
    model.second.forward = lambda x: checkpoint(inner, x, use_reentrant=False)
    if comm.size > 1:
        parallelize(model, comm, SPEC, plan=SHARDED)
    with parametrize.cached():
        return gradients(model, {"x": X})


def test_a_cache_is_filled_by_the_stage_and_not_by_its_trial() -> None:
    compared(run_processes(2, under_a_cache), under_a_cache(LocalComm()))


class Masked(nn.Module):
    """Rows beside a mask, which it passes on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.linear((x * m[..., None]).mean(2, keepdim=True)), m


class MaskedClip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(3, 8), nn.Linear(8, 3)
        self.first, self.second = Masked(), Masked()

    def forward(self, x: Tensor, m: Tensor) -> Tensor:
        h, m = self.first(self.enter(x), m)
        h, m = self.second(h, m)
        return self.leave(h)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
@pytest.mark.parametrize("ranks", [2, 6])
def test_streams_without_gradients(dtype: torch.dtype, ranks: int) -> None:
    stream = {"x": "b t s c", "m": "b t s"}
    blocks = tuple(Block(name, stream, ("s",), rest=ANY) for name in ("first", "second"))
    spec, m = replace(SPEC, model="MaskedClip", blocks=blocks), (rand(1, 4, 6) > -1).to(dtype)

    is_one_process(ranks, partial(made, MaskedClip), spec, X, m=m)


class Summing(nn.Module):
    """Its mask's rows are summed up."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return x + self.linear(x.mean(2, keepdim=True)) * w.cumsum(1)[..., None, None]


class Weighted(Clip):
    def __init__(self) -> None:
        super().__init__()
        self.second = Summing()

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.second(self.first(self.enter(x)), x[:, :, 0, 0]))


def test_other_arguments_whose_rows_meet() -> None:
    block = Block("second", {"x": "b t s c"}, ("s",), rows={"w": "b t"}, rest=ANY)
    spec = replace(SPEC, model="Weighted", blocks=(SPEC.blocks[0], block))
    assert all("second mixes t" in said for said in refused(Weighted(), spec))


class Adding(nn.Module):
    """It adds to what it is given beside its rows, or to a copy of that."""

    def __init__(self, own: bool = False) -> None:
        super().__init__()
        self.linear, self.own = nn.Linear(8, 8), own

    def forward(self, x: Tensor, total: Tensor) -> Tensor:
        total = total.clone() if self.own else total
        with torch.no_grad():
            total += 1
        return x + total * self.linear(x)


class AddingClip(Clip):
    def __init__(self, rows: bool, own: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.rows = Adding(own), Adding(own), rows

    def forward(self, x: Tensor) -> Tensor:
        total = torch.ones_like(x[..., :1] if self.rows else x[0, 0, 0, :1])
        return self.leave(self.second(self.first(self.enter(x), total), total))


def adding(rows: bool) -> Spec:
    more: dict[str, Any] = {"rows": {"total": "b t s 1"}} if rows else {"shared": ("total",)}
    mixed = {"first": ("s",), "second": ("t",)}
    blocks = tuple(Block(name, {"x": "b t s c"}, whole, rest=ANY, **more) for name, whole in mixed.items())
    return replace(SPEC, model="AddingClip", blocks=blocks)


@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("ranks", [2, 5])  # of five ranks one has no rows of t
def test_a_stage_that_writes_to_what_all_ranks_have(rows: bool, ranks: int) -> None:
    for said in refused(AddingClip(rows), adding(rows), ranks=ranks):
        assert "writes to total" in said and said.endswith("let it write to a copy, as total.clone() is"), said
    is_one_process(ranks, partial(made, AddingClip, rows, True), adding(rows), X)


def test_what_the_remedy_says_is_right() -> None:
    spec = replace(SPEC, blocks=(SPEC.blocks[0], replace(SPEC.blocks[1], whole=("s", "t"))))

    is_one_process(2, partial(made, Clip, ALONG_T["a sum of earlier rows"]), spec, X)


def test_a_stage_is_tried_once_and_keeps_its_state() -> None:
    def on_a_rank(comm: Comm) -> list[int]:
        model, calls = made(Clip), []
        model.second.linear.register_forward_hook(lambda *_: calls.append(1))
        parallelize(model, comm, SPEC, plan=SHARDED)
        found = []
        for x in (X, X, rand(1, 6, 6, 3)):
            model(x)
            found += [len(calls), model.second.calls]
            calls.clear()
        return found

    assert run_threads(2, on_a_rank) == [[7, 1, 1, 2, 7, 3]] * 2  # again where a rank has more rows


ALONE: dict[str, Mixing] = ALONG_T | {
    "a mean": lambda x: x.mean(1, keepdim=True).expand_as(x),
    "the largest of earlier rows": lambda x: x.cummax(1).values,
    "places": lambda x: x + torch.arange(x.shape[1])[:, None, None],
}
del ALONE["a pool"]  # it takes no other number of rows than it was made for


@pytest.mark.parametrize("name", ALONE)
def test_one_row_a_rank_is_tried_beside_others(name: str) -> None:
    for said in refused(Clip(ALONE[name]), x=rand(1, 2, 6, 3)):
        assert "NotImplementedError: second " in said and "rows change when" in said, said


def test_one_row_a_rank_is_one_process() -> None:
    is_one_process(2, partial(made, Clip), SPEC, rand(1, 2, 6, 3))


def test_one_row_a_rank_is_tried_again_when_there_are_more() -> None:
    far: Mixing = lambda x: F.pad(x, (0, 0, 0, 0, 4, 0))[:, :-4] if x.shape[1] > 4 else x * 0  # noqa: E731

    def on_a_rank(comm: Comm) -> str:
        model = made(Clip, far)
        parallelize(model, comm, SPEC, plan=SHARDED)
        model(rand(1, 2, 6, 3))  # a rank with one row cannot see what five would do
        with pytest.raises((NotImplementedError, ValueError), match="second (mixes|counts the rows of) t"):
            model(rand(1, 10, 6, 3))
        return "done"

    assert run_threads(2, on_a_rank) == ["done"] * 2


class Switched(Stage):
    """Looks at earlier rows where it is told to, or where a part is in training."""

    sums: bool | None = None

    def forward(self, x: Tensor, mask: Tensor | None = None, mode: object = None) -> Tensor:
        sums = mask is not None or mode or self.linear.training or self.sums
        return super().forward(x.cumsum(1) if sums else x)


class SwitchedClip(Clip):
    def __init__(self) -> None:
        super().__init__()
        self.second = Switched()

    def forward(self, x: Tensor, mask: Tensor | None = None, mode: object = None) -> Tensor:
        return self.leave(self.second(self.first(self.enter(x)), mask, mode))


class Summed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.cumsum(1))


def replaces(model: nn.Module) -> None:
    model.second.linear = Summed(8, 8).double().eval()
    for p in model.second.linear.parameters():  # ranks are threads, and share the random generator
        nn.init.constant_(p, 0.3)


def sums_in_its_forward(model: nn.Module) -> None:
    inner = model.second.linear.forward
    model.second.linear.forward = lambda x: inner(x.cumsum(1))


LATER: dict[str, Callable[[nn.Module], Any]] = {
    "training": lambda model: model.train(),
    "another module": replaces,
    "a forward": sums_in_its_forward,
}


@pytest.mark.parametrize("name", LATER)
def test_a_stage_is_tried_again_when_a_module_or_forward_is_another(name: str) -> None:
    block = Block("second", {"x": "b t s c"}, ("s",), rows={"mask": "b t"}, shared=("mode",), rest=ANY)
    spec = replace(SPEC, model="SwitchedClip", blocks=(SPEC.blocks[0], block))

    def on_a_rank(comm: Comm) -> str:
        model = made(SwitchedClip).eval()
        parallelize(model, comm, spec, plan=SHARDED)
        model(X, mode=0)
        LATER[name](model)
        with pytest.raises((NotImplementedError, ValueError), match="second mixes t"):
            model(X, mode=0)
        return "done"

    assert run_threads(2, on_a_rank) == ["done"] * 2


def test_a_stage_is_not_tried_again_if_a_setting_or_a_hook_differs() -> None:
    block = Block("second", {"x": "b t s c"}, ("s", "t"), shared=("mode",), rest=ANY)
    spec = replace(SPEC, model="SwitchedClip", blocks=(SPEC.blocks[0], block))

    def on_a_rank(comm: Comm) -> list[int]:
        model, found = made(SwitchedClip), []
        parallelize(model, comm, spec, plan=SHARDED)
        calls: list[int] = []
        model.first.linear.register_forward_hook(lambda *_: calls.append(1))
        for step in range(4):
            model.second.register_forward_hook(lambda *_: None)
            model(X, mode=step)
            found.append(len(calls))
            calls.clear()
        return found

    assert run_threads(2, on_a_rank) == [[7, 1, 1, 1]] * 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_trial_under_a_checkpoint(reentrant: bool) -> None:
    def make() -> nn.Module:
        model = made(Clip)
        inner = model.second.forward
        model.second.forward = lambda x: checkpoint(inner, x, use_reentrant=reentrant)
        return model

    is_one_process(2, make)


@pytest.mark.parametrize("returns", ["a share", "what follows a share"])
def test_a_model_that_returns_shares(returns: str) -> None:
    for said in refused(Clip(returns=returns)):
        assert (
            "NotImplementedError: Clip returns 1 [1, 2, 6, 8], which stages computed: each rank has its share" in said
        ), said


@pytest.mark.parametrize("returns", ["a skip", "a skip of the input"])
def test_a_skip_past_the_stages_counts_once_for_each_rank(returns: str) -> None:
    for said in refused(Clip(returns=returns)):
        assert said.endswith('give grad="sum" and divide the loss by the number of ranks'), said

    def on_a_rank(comm: Comm) -> dict[str, Tensor]:
        model, x = made(Clip, None, returns), X.clone().requires_grad_()
        if comm.size > 1:
            parallelize(model, comm, SPEC, grad="sum", plan=SHARDED)
        out = model(x)
        (out.square().sum() / comm.size).backward()
        return {"out": out.detach(), "d x": x.grad, **{f"d {n}": p.grad for n, p in model.named_parameters()}}

    (want,) = run_threads(1, on_a_rank)
    compared(run_threads(2, on_a_rank), want)


class Routed(nn.Module):
    """Experts by probability, whose balance loss it keeps in an attribute, or whose probabilities are a stream."""

    def __init__(self, keeps: str = "aux") -> None:
        super().__init__()
        self.router, self.experts, self.keeps = nn.Linear(8, 3), nn.Linear(3, 8), keeps
        self.aux, self.several, self.box = None, [], Box()

    def forward(self, x: Tensor, chances: Tensor | None = None) -> Any:
        p = self.router(x).softmax(-1)
        loss = balance(p)
        if self.keeps == "aux":
            self.aux = loss
        if self.keeps == "a list":
            self.several = [{"aux": loss}]
        if self.keeps == "an object":
            self.box.inside["kept"] = (loss,)
        if self.keeps == "detached":
            self.aux = loss.detach()
        if self.keeps == "features":
            self.aux = p
        x = x + self.experts(p)
        return x if chances is None else (x, chances + p)


def balance(chances: Tensor) -> Tensor:
    return chances.mean((0, 1, 2)).square().sum()


def routed(keeps: str, where: str = "second") -> nn.Module:
    model = Clip()
    setattr(model, where, Routed(keeps))
    return model


@pytest.mark.parametrize("keeps, name", [("aux", "aux"), ("a list", "several"), ("an object", "box")])
@pytest.mark.parametrize("where", ["first", "second"])
@pytest.mark.parametrize("grad", ["replicated", "sum"])
def test_a_loss_that_a_stage_keeps_aside_is_a_share(keeps: str, name: str, where: str, grad: str) -> None:
    for ranks, x in ((2, X), (3, rand(1, 2, 6, 3))):  # of three ranks one has no rows
        for said in refused(routed(keeps, where), grad=grad, x=x, ranks=ranks):
            assert f"NotImplementedError: Clip keeps {where}.{name} [], which stages computed" in said, said
            assert said.endswith("rows that are a stream of the last stage, in a spec without an exit")


def test_what_a_stage_keeps_detached_is_no_loss() -> None:
    is_one_process(2, partial(made, routed, "detached"))
    assert refused(routed("detached")) == ["nothing"] * 2


def test_features_that_a_stage_keeps_are_warned_of() -> None:
    def on_a_rank(comm: Comm) -> Tensor:
        model = made(routed, "features")
        parallelize(model, comm, SPEC, plan=SHARDED)
        return model(X)

    with pytest.warns(UserWarning, match=r"Clip keeps second.aux, which stages computed: each rank has its share"):
        run_threads(2, on_a_rank)


class Balanced(nn.Module):
    """The same as streams: the probabilities of all stages go through them beside the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.first, self.second = nn.Linear(3, 8), Routed(""), Routed("")

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chances = x.new_zeros(*x.shape[:3], 3)
        return self.second(*self.first(self.enter(x), chances))


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_balance_loss_is_computed_from_a_stream(ranks: int) -> None:
    streams = {"x": "b t s c", "chances": "b t s e"}
    blocks = tuple(Block(name, streams, ("s",), rest=ANY) for name in ("first", "second"))
    spec = replace(SPEC, model="Balanced", blocks=blocks, exit=None)

    def on_a_rank(comm: Comm) -> dict[str, Tensor]:
        model = made(Balanced)
        if comm.size > 1:
            parallelize(model, comm, spec, plan=SHARDED)
        out, chances = model(X)
        (out.square().mean() + balance(chances)).backward()
        return {"out": out.detach(), **{f"d {n}": p.grad for n, p in model.named_parameters()}}

    (want,) = run_threads(1, on_a_rank)
    compared(run_threads(ranks, on_a_rank), want)


class Keeping(Clip):
    """It keeps all its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.outs: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.outs.append(super().forward(x))
        return self.outs[-1]


def test_what_a_model_keeps_since_an_earlier_forward_is_nothing_new() -> None:
    def on_a_rank(comm: Comm) -> int:
        model = made(Keeping)
        parallelize(model, comm, replace(SPEC, model="Keeping"), plan=SHARDED)
        return len([model(x) for x in (X, rand(1, 6, 6, 3), X, rand(1, 8, 6, 3))])

    assert run_threads(2, on_a_rank) == [4, 4]


def summed(kind: type[nn.Module], spec: Spec, loss: Callable[[nn.Module, Tensor], Tensor]) -> None:
    """Compare gradients under grad="sum", of a loss divided by the ranks, with those of one process."""

    def on_a_rank(comm: Comm) -> dict[str, Tensor]:
        model = made(kind)
        if comm.size > 1:
            parallelize(model, comm, spec, grad="sum", plan=SHARDED)
        out = model(X)
        (loss(model, out) / comm.size).backward()
        return {"out": out.detach(), **{f"d {n}": p.grad for n, p in model.named_parameters()}}

    (want,) = run_threads(1, on_a_rank)
    compared(run_threads(2, on_a_rank), want)


class Penalized(Clip):
    def forward(self, x: Tensor) -> Tensor:
        self.penalty = self.enter(x).square().mean()
        return super().forward(x)


def test_a_penalty_that_the_model_keeps_counts_once_for_each_rank() -> None:
    spec = replace(SPEC, model="Penalized")
    for said in refused(Penalized(), spec):
        assert said.endswith('it keeps penalty; give grad="sum" and divide the loss by the number of ranks'), said
    summed(Penalized, spec, lambda model, out: out.square().sum() + model.penalty)


class Refined(Clip):
    """A layer after its exit, which computes the whole output."""

    def __init__(self) -> None:
        super().__init__()
        self.refine = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out + self.refine(out).tanh()


def test_parameters_after_the_exit_are_for_a_loss_that_is_summed() -> None:
    spec = replace(SPEC, model="Refined", outside=("enter", "refine"))
    for said in refused(Refined(), spec):
        assert said.endswith('comes after the exit, give grad="sum" and divide the loss by the number of ranks'), said
    summed(Refined, spec, lambda model, out: out.square().sum())


DROPS: dict[str, Mixing] = {
    "torch.dropout": lambda x: torch.dropout(x, 0.5, True),
    "torch.dropout by name": lambda x: torch.dropout(x, p=0.5, train=True),
    "binomial": lambda x: x * torch.binomial(torch.ones_like(x), torch.full_like(x, 0.5)),
    "F.gumbel_softmax": lambda x: F.gumbel_softmax(x),
}


@pytest.mark.parametrize("name", DROPS)
@pytest.mark.parametrize("place", ["inside", "between"])
def test_random_numbers_where_ranks_have_shares(name: str, place: str) -> None:
    model = Clip(DROPS[name]) if place == "inside" else Clip(between=DROPS[name])
    where = "second" if place == "inside" else "the model after first"
    for said in refused(model):
        assert f"{where} calls {name.split('.')[-1].split()[0]}, which would draw other numbers" in said, said


def test_random_numbers_in_the_exit() -> None:
    class Dropping(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x), 0.5)

    model = Clip()
    model.leave = Dropping(8, 3)
    for said in refused(model):
        assert "leave calls dropout, which would draw other numbers" in said, said


def test_dropout_that_is_off_is_no_draw() -> None:
    assert refused(Clip(lambda x: torch.dropout(x, 0.5, False) + F.dropout(x, 0.0))) == ["nothing"] * 2


@pytest.mark.parametrize("alike", [True, False])
def test_random_numbers_before_the_first_stage_are_compared(alike: bool) -> None:
    class Noisy(Clip):
        def forward(self, x: Tensor) -> Tensor:
            g = torch.Generator().manual_seed(0 if alike else self.rank)
            return super().forward(x + torch.randn(x.shape, generator=g, dtype=x.dtype))

    def on_a_rank(comm: Comm) -> str:
        model = made(Noisy)
        model.rank = comm.rank
        parallelize(model, comm, replace(SPEC, model="Noisy"), plan=SHARDED)
        try:
            model(X)
        except ValueError as error:
            return str(error)
        return "nothing"

    for said in run_threads(2, on_a_rank):
        assert said == "nothing" if alike else "ranks differ in the input of first" in said, said


def test_a_buffer_that_a_stage_assigns() -> None:
    def average(stage: Stage, x: Tensor) -> Tensor:
        stage.seen = 0.5 * stage.seen + 0.5 * x.mean().detach()
        return x + stage.linear(x)

    def on_a_rank(comm: Comm) -> str:
        model = made(Clip)
        model.second.forward = average.__get__(model.second)
        parallelize(model, comm, SPEC, plan=SHARDED)
        with pytest.raises(ValueError, match="ranks differ in buffers that stages changed: .*second.seen"):
            model(X)
        return "done"

    assert run_threads(2, on_a_rank) == ["done"] * 2


@pytest.mark.parametrize("dtype", [torch.complex128, torch.uint16, torch.float8_e4m3fn])
def test_weights_of_every_dtype_are_compared(dtype: torch.dtype) -> None:
    model = Clip()
    model.second.register_buffer("table", torch.ones(3).to(dtype))
    assert refused(model) == ["nothing"] * 2


class Ended(Clip):
    """Its last module looks at the row before."""

    def __init__(self) -> None:
        super().__init__()
        self.leave = Row()


class Row(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[..., :3] + ALONG_T["the row before"](x)[..., 3:6]


def test_an_exit_that_mixes_what_ranks_share() -> None:
    for said in refused(Ended(), replace(SPEC, model="Ended")):
        assert said.endswith("leave mixes t, along which ranks share its rows: rows change when other rows of t do; "
                             "leave t out of its rest"), said  # fmt: skip
    blocks = tuple(replace(block, rest=("s", None)) for block in SPEC.blocks)
    spec = replace(SPEC, model="Ended", blocks=blocks, exit=Exit("leave", "b t s c", ("s", None)))

    is_one_process(2, partial(made, Ended), spec, X)


@pytest.mark.parametrize("module", [nn.GroupNorm(2, 8), nn.Conv1d(8, 8, 3), nn.AvgPool2d(2), nn.GRU(8, 8)])
def test_modules_between_stages_that_may_mix_rows(module: nn.Module) -> None:
    model = Clip()
    model.norm = module
    with pytest.raises(NotImplementedError, match=f"norm of Clip is a {type(module).__name__}, which may mix rows"):
        parallelize(model, LocalComm(), replace(SPEC, between=("norm",)))
    model.norm = nn.Conv1d(8, 8, 1)
    parallelize(model, LocalComm(), replace(SPEC, between=("norm",)))


class Normed(Clip):
    """A group norm of each frame between its stages."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Frames()

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.second(self.norm(self.first(self.enter(x)))))


class Frames(nn.GroupNorm):
    def __init__(self) -> None:
        super().__init__(2, 8)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.flatten(0, 1).movedim(-1, 1)).movedim(1, -1).view_as(input)


def test_a_norm_between_stages_is_made_a_stage() -> None:
    with pytest.raises(NotImplementedError, match="make it a stage with a Block"):
        parallelize(Normed(), LocalComm(), replace(SPEC, model="Normed", between=("norm",)))
    block = Block("norm", {"input": "b t s c"}, ("s",), rest=ANY)
    spec = replace(SPEC, model="Normed", blocks=(SPEC.blocks[0], block, SPEC.blocks[1]))
    is_one_process(2, partial(made, Normed), spec)


class Widened(Clip):
    """Its first stage has more channels behind it than before."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.first = nn.Linear(3, 4), nn.Linear(4, 8)


WIDENED = replace(SPEC, model="Widened", blocks=(replace(SPEC.blocks[0], stream={"input": "b t s c"}), SPEC.blocks[1]))


def test_a_stage_whose_output_a_rank_without_rows_cannot_know() -> None:
    assert refused(Widened(), WIDENED) == ["nothing"] * 2
    for said in refused(Widened(), WIDENED, x=rand(1, 2, 6, 3), ranks=3):
        assert "first gives input as [1, 1, 6, 8] float64 where it was [1, 1, 6, 4] float64" in said, said
        assert said.endswith("cannot know; give a planner that shards another dimension")
    is_one_process(3, partial(made, Widened), WIDENED, rand(3, 2, 6, 3), by_batch)


class Scaled(Clip):
    """It writes to what a stage was given, after it."""

    def __init__(self) -> None:
        super().__init__()
        self.second = Scaling()

    def forward(self, x: Tensor) -> Tensor:
        scale = x.mean((1, 2, 3), keepdim=True).clone()
        y = self.second(self.first(self.enter(x)), scale)
        scale.mul_(2)
        return self.leave(y)


class Scaling(Stage):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return super().forward(x) + scale


def test_a_rank_without_rows_keeps_nothing_of_what_a_stage_is_given() -> None:
    block = replace(SPEC.blocks[1], rows={"scale": "b 1 1 1"})
    spec = replace(SPEC, model="Scaled", blocks=(SPEC.blocks[0], block))

    is_one_process(3, partial(made, Scaled), spec, rand(1, 2, 6, 3))


class Residual(Clip):
    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        h = h + self.first(h)
        return self.leave(h + self.second(h))


def test_a_residual_between_stages_with_rows_that_stay_whole() -> None:
    blocks = (SPEC.blocks[0], replace(SPEC.blocks[1], rest=(None,)))
    spec = replace(SPEC, model="Residual", blocks=blocks, exit=Exit("leave", "b t s c", (None,)))

    is_one_process(2, partial(made, Residual), spec, X)


class Direct(nn.Module):
    """Its first stage gets what the caller gives."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.leave, self.reentrant = Stage(), Stage(), nn.Linear(8, 3), reentrant

    def forward(self, x: Tensor) -> Tensor:
        for stage in (self.first, self.second):
            x = checkpoint(stage, x, use_reentrant=self.reentrant)
        return self.leave(x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_parts_of_one_tensor_go_forward_before_a_backward_computes_them_again(reentrant: bool) -> None:
    x = torch.randn(3, 4, 6, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def gradients(model: nn.Module) -> list[Tensor]:
        parts = x.clone().requires_grad_()
        loss = model(parts[:2]).square().sum() + model(parts[2:]).square().sum()
        with torch.no_grad():
            model(parts[1:])
        loss.backward()
        return [parts.grad, *(p.grad for p in model.parameters())]

    def on_a_rank(comm: Comm) -> list[Tensor]:
        model = made(Direct, reentrant)
        parallelize(model, comm, replace(SPEC, model="Direct", outside=()), plan=SHARDED)
        return gradients(model)

    want, ranks = gradients(made(Direct, reentrant)), run_threads(2, on_a_rank)
    for whole, *shares in zip(want, *ranks):
        torch.testing.assert_close(sum(shares), whole, rtol=1e-10, atol=1e-12)


def test_what_a_stage_keeps_in_objects_is_as_it_was_before_the_trial() -> None:
    def on_a_rank(comm: Comm) -> list[Tensor]:
        model = made(Clip)
        model.second = made(Boxed)
        if comm.size > 1:
            parallelize(model, comm, SPEC, plan=SHARDED)
        with torch.no_grad():
            return [model(x) for x in (X, 2 * X, X)]

    (want,) = run_threads(1, on_a_rank)
    for found in run_threads(2, on_a_rank):
        for x, y in zip(found, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


class Doubling(Stage):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


def test_a_wrong_number_of_outputs_is_told_to_ranks_without_rows() -> None:
    def on_a_rank(comm: Comm) -> str:
        model = made(Clip)
        model.second = made(Doubling)
        parallelize(model, comm, SPEC, plan=SHARDED)
        with pytest.raises(ValueError) as raised:
            model(rand(1, 2, 6, 3))
        return str(raised.value)

    assert all("second returned 2 tensors, its spec has 1 streams" in said for said in run_threads(3, on_a_rank))


class Framed(Direct):
    """Rows of samples and frames [b t, s, 8]; the call says how many frames there are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (Stage(lambda x: x.mean(1, keepdim=True)) for _ in range(2))

    def forward(self, x: Tensor, frames: int) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize("own", [False, True])
def test_two_forwards_of_other_sizes_need_inputs_of_their_own(own: bool) -> None:
    """As the error says, where stages are computed again from their inputs."""
    forms = {"x": "(b t) s c"}
    spec = Spec(
        "Framed",
        lambda model, given: {"b": len(given["x"]) // given["frames"], "t": given["frames"], "s": given["x"].shape[1]},
        tuple(Block(name, forms, ("s",), rest=ANY) for name in ("first", "second")),
        exit=Exit("leave", "(b t) s c", ANY),
    )
    x = torch.randn(8, 6, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def gradients(model: nn.Module) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        one, other = (leaf.clone(), leaf.clone()) if own else (leaf, leaf)
        (model(one, frames=4).square().sum() + model(other, frames=2).pow(3).sum()).backward()
        return [leaf.grad, *(p.grad for p in model.parameters())]

    def on_a_rank(comm: Comm) -> list[Tensor] | str:
        model = made(Framed)
        parallelize(model, comm, spec, plan=SHARDED)
        try:
            return gradients(model)
        except RuntimeError as error:
            return str(error)

    found, want = run_threads(2, on_a_rank), gradients(made(Framed))
    if not own:
        assert all("give each a tensor of its own, as x.clone() is" in said for said in found)
        return
    for whole, *shares in zip(want, *found):
        torch.testing.assert_close(sum(shares), whole, rtol=1e-10, atol=1e-12)
