"""split, switch and gather: their specification, their gradients, how many exchanges and bytes they take."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from seqpar.comm import Comm, LocalComm
from seqpar.dsp import Space, begin_switch, gather, move, split, switch, switch_all
from seqpar.dsp.form import form_of
from seqpar.dsp.moves import share_of
from seqpar.dsp.space import shares
from seqpar.facts.layout import Layout
from seqpar.ops import bind
from seqpar.testing import run_processes, run_threads

FORMS = ("b t s c", "(b t) s c", "(t b) c s", "c (s t b)", "b (s t) c", "t 1 (b s) c")
SIZES = {"b": 2, "t": 5, "s": 7, "c": 3}


def tensor(form: str, dims: dict[str, int], seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Global values, unfolded by name and then of the form."""
    names = form_of(form).names
    x = torch.randn([dims[n] for n in sorted(dims)], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x = (x.permute([sorted(dims).index(n) for n in names]) * 100).to(dtype)
    return form_of(form).fold(_with_ones(x, form))


def _with_ones(x: Tensor, form: str) -> Tensor:
    at = 0
    for axis in form_of(form).axes:
        if not axis:
            x = x.unsqueeze(at)
        at += max(1, len(axis))
    return x


def part(x: Tensor, form: str, dims: dict[str, int], dim: str, ranks: int, rank: int) -> Tensor:
    """The oracle: a rank's share, by index and not by arithmetic on shapes."""
    numbers = torch.arange(x.numel()).view(x.shape)
    space = Space({n: dims[n] for n in form_of(form).names}, LocalComm())
    index = space.unfold(numbers, form, None)
    at = form_of(form).index(dim)
    held = torch.from_numpy(Layout.contiguous(dims[dim], ranks).positions(rank))
    return x.flatten()[form_of(form).fold(index.index_select(at, held))]


def known(dims: dict[str, int]) -> dict[str, int]:
    return {n: size for n, size in dims.items() if n != "c"}


def moves(comm: Comm, dims: dict[str, int], form: str, dtype: torch.dtype) -> None:
    space, x = Space(known(dims), comm), tensor(form, dims, dtype=dtype)
    by = {d: part(x, form, dims, d, comm.size, comm.rank) for d in ("t", "s")}
    assert torch.equal(split(x, space, form, "t"), by["t"])
    before = comm.stats.exchanges
    y = switch(by["t"], space, form, "t", "s")
    assert torch.equal(y, by["s"]) and y.dtype == dtype
    assert comm.stats.exchanges - before <= 1
    assert torch.equal(gather(y, space, form, "s"), x)
    assert torch.equal(gather(by["t"], space, form, "t", grad="replicated"), x)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([1, 2, 3, 4, 6, 8]), st.integers(1, 9), st.integers(1, 9), st.sampled_from(FORMS),
    st.sampled_from([torch.float64, torch.bfloat16, torch.int64]), st.booleans(),
)  # fmt: skip
def test_moves_are_their_specification(ranks, t, s, form, dtype, direct) -> None:
    run_threads(ranks, moves, SIZES | {"t": t, "s": s}, form, dtype, direct=direct)


@pytest.mark.parametrize("comm", ["gloo", "shm"])
def test_moves_on_processes(comm) -> None:
    run_processes(3, moves, SIZES, "(b t) s c", torch.float32, comm=comm)
    run_processes(3, moves, SIZES | {"t": 1}, "(b t) s c", torch.float32, comm=comm)


def way(comm: Comm, dims: dict[str, int], grad: str) -> tuple[Tensor, Tensor, Tensor, int]:
    """A model of two stages with a weight in each, whole at both ends: gradients of x and of the weight inside."""
    space, form = Space(known(dims), comm), "(b t) s c"
    x, g = (tensor(form, dims, seed).requires_grad_(seed == 0) for seed in (0, 1))
    w = torch.linspace(1, 2, 3, dtype=torch.float64).requires_grad_()
    y = split(x, space, form, "t", grad=grad)
    y = switch(y.sin() * w, space, form, "t", "s")
    out = gather(y.cos() * w, space, form, "s", grad=grad)
    loss = (out * g).sum() / (comm.size if grad == "sum" else 1)
    before = comm.stats.exchanges
    loss.backward()
    return out.detach(), x.grad, w.grad, comm.stats.exchanges - before


@pytest.mark.parametrize("grad", ["sum", "replicated"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("t", [1, 5])
def test_gradients_count_once(ranks, grad, t) -> None:
    dims = SIZES | {"t": t}
    ((want, dx, dw, _),) = run_threads(1, way, dims, grad)
    found = run_threads(ranks, way, dims, grad)
    for out, *_ in found:
        torch.testing.assert_close(out, want, rtol=0, atol=1e-10)
    torch.testing.assert_close(sum(w for *_, w, _ in found), dw, rtol=1e-10, atol=1e-10)
    inputs = [x for _, x, *_ in found]
    for got in [sum(inputs)] if grad == "sum" else inputs:
        torch.testing.assert_close(got, dx, rtol=1e-10, atol=1e-10)
    if ranks > 1:  # the switch, and either the reduce-scatter or the all-gather; a rank that has nothing posts nothing
        assert max(n for *_, n in found) == 2


def adjoint(comm: Comm, form: str) -> float:
    space = Space(known(SIZES), comm)
    x = part(tensor(form, SIZES), form, SIZES, "t", comm.size, comm.rank).requires_grad_()
    y = part(tensor(form, SIZES, 1), form, SIZES, "s", comm.size, comm.rank)
    ax = switch(x, space, form, "t", "s")
    (aty,) = torch.autograd.grad(ax, x, y)
    assert torch.equal(aty, switch(y, space, form, "s", "t"))
    return (ax * y).sum().item() - (x * aty).sum().item()


@pytest.mark.parametrize("form", FORMS)
def test_a_switch_has_its_adjoint(form) -> None:
    assert abs(sum(run_threads(4, adjoint, form))) < 1e-6


def several(comm: Comm, way: str) -> tuple[list[int], list[Tensor]]:
    """Three tensors of other shapes and dtypes, one without a gradient: exchanges and bytes there and back."""
    space, forms, dims = Space(SIZES, comm), ["(b t) s c", "b s (t c)", "t s"], SIZES
    xs = [tensor(form, {n: dims[n] for n in form_of(form).names}, n) for n, form in enumerate(forms)]
    xs[2] = xs[2].long()
    mine = [part(x, f, dims, "t", comm.size, comm.rank) for x, f in zip(xs, forms)]
    for x in mine[:2]:
        x.requires_grad_()
    counts, stats = [], comm.stats
    stats.reset()
    if way == "begin":
        pending = begin_switch(mine, space, forms, "t", "s")
        ys = pending.wait()
        assert all(torch.equal(a, b) for a, b in zip(pending.wait(), ys))  # and it may be asked again
    else:
        ys = switch_all(mine, space, forms, "t", "s")
    counts += [stats.exchanges, stats.bytes_sent]
    for y, x, f in zip(ys, xs, forms):
        assert torch.equal(y, part(x, f, dims, "s", comm.size, comm.rank))
    assert not ys[2].requires_grad
    stats.reset()
    (ys[0].sin().sum() + ys[0].sum()).backward()  # the second gets zeros: one exchange, also then
    counts += [stats.exchanges, stats.bytes_sent]
    return counts, [mine[0].grad, mine[1].grad]


@pytest.mark.parametrize("way", ["all", "begin"])
@pytest.mark.parametrize("direct", [True, False])
def test_several_tensors_take_one_exchange_and_the_bytes_of_the_formula(way, direct) -> None:
    ranks = 4
    t, s = shares(SIZES["t"], ranks), shares(SIZES["s"], ranks)
    width = SIZES["b"] * SIZES["c"]
    for rank, (counts, grads) in enumerate(run_threads(ranks, several, way, direct=direct)):
        there = t[rank] * (SIZES["s"] - s[rank]) * 8
        back = s[rank] * (SIZES["t"] - t[rank]) * 8
        assert counts == [1, there * (2 * width + 1), 1, back * 2 * width]
        x = part(tensor("(b t) s c", SIZES), "(b t) s c", SIZES, "t", ranks, rank)
        torch.testing.assert_close(grads[0], x.cos() + 1, rtol=1e-12, atol=1e-12)
        assert not grads[1].any()


class Order:
    """A comm that notes when exchanges are posted and awaited."""

    def __init__(self, comm: Comm, events: list[str]) -> None:
        self.comm, self.events = comm, events

    def __getattr__(self, name: str) -> object:
        return getattr(self.comm, name)

    def exchange(self, sends, recvs, *, tag):
        self.events.append("post")
        work = self.comm.exchange(sends, recvs, tag=tag)
        wait = work.wait

        def noted() -> None:
            self.events.append("wait")
            wait()

        work.wait = noted
        return work


class Noted(torch.autograd.Function):
    """Independent work that notes when it is done."""

    @staticmethod
    def forward(ctx, x, events):
        ctx.events = events
        events.append("work")
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        ctx.events.append("work")
        return dy * 2, None


def overlapped(comm: Comm) -> list[str]:
    events: list[str] = []
    space = Space(known(SIZES), Order(comm, events))
    x = part(tensor("b t s c", SIZES), "b t s c", SIZES, "t", comm.size, comm.rank).requires_grad_()
    z = torch.ones(3, dtype=torch.float64, requires_grad=True)
    pending = begin_switch([x.sin()], space, ["b t s c"], "t", "s")
    other = Noted.apply(z, events)
    (y,) = pending.wait()
    events.append("backward")
    (y * other).sum().backward()
    whole = tensor("b t s c", SIZES)
    own = part(whole, "b t s c", SIZES, "t", comm.size, comm.rank)
    torch.testing.assert_close(x.grad, (2 * own.cos()).expand_as(own), rtol=1e-12, atol=1e-12)
    return events


def test_work_between_begin_and_wait_runs_beside_the_exchange_in_both_directions() -> None:
    order = ["post", "work", "wait"]
    assert run_threads(3, overlapped, delay=0.01) == [[*order, "backward", *order]] * 3


def refused(comm: Comm) -> None:
    space = Space({"b": 2, "t": 5, "s": 6}, comm)
    x = torch.zeros(2 * space.local("t")["t"], 6, 3)
    cases = [
        (lambda: switch(x, space, "(b s) t c", "t", "s"), "axis 0"),
        (lambda: switch(x, space, "(b t) s", "t", "s"), "does not fit the form"),
        (lambda: switch(x, space, "(b t) s c", "s", "t"), r"axis 0 of .* must have 10 elements here \(b=2 x t=5\)"),
        (lambda: switch(x, space, "(b t) s c", "t", "c"), '"c" is not a dimension'),
        (lambda: switch(x, space, "(b t) s c", "t", "h"), '"h" is not in'),
        (lambda: switch(x, space, "(b t) s c", "t", "t"), "both 1"),
        (lambda: switch_all([x], space, [], "t", "s"), "1 tensors with 0 forms"),
        (lambda: gather(x[..., :0, :], space, "(b t) s c", "t"), "axis 1"),
        (lambda: gather(x, space, "(b t) s c", "t", grad="mean"), "grad must be one of"),
        (lambda: split(x, space, "(b t) s c", "t"), "with whole of"),
        (lambda: split(torch.zeros(5, 4), space, "t (b u)", "t"), r"\['u'\] of unknown size"),
    ]
    for call, words in cases:
        with pytest.raises(ValueError, match=words):
            call()
    assert switch(x, space, "(b t) s c", "t", "s").shape == (10, 2, 3)  # the comm lives


def test_what_does_not_fit_raises_on_every_rank_and_the_comm_lives() -> None:
    run_threads(3, refused, timeout=60.0)


def differ(comm: Comm) -> str:
    space = Space({"t": 4, "s": 6 if comm.rank else 8}, comm)
    with pytest.raises(ValueError) as error:
        switch(torch.zeros(2, space.dims["s"]), space, "t s", "t", "s")
    return str(error.value)


def test_ranks_with_other_global_sizes_are_told() -> None:
    for text in run_threads(2, differ, timeout=60.0):
        assert "ranks differ in split sizes" in text


@pytest.mark.exhaustive
def test_the_op_of_several_is_a_proper_op() -> None:
    xs = [torch.randn(4, 6, dtype=torch.float64, requires_grad=True), torch.randn(4, 2, 6)]
    opcheck(torch.ops.seqpar.switch, (xs, [bind(LocalComm())], [0, 0], [1, 2], [4], [6], 0, [True, False]))


def staged(comm: Comm, dims: dict[str, int]) -> None:
    space, form = Space(known(dims), comm), "(b t) s c"
    x, table = tensor(form, dims), tensor("t c", {"t": dims["t"], "c": 3})
    (y,) = move([x], space, [form], None, "t")
    own = part(table, "t c", dims, "t", comm.size, comm.rank)
    assert torch.equal(share_of(table, space, "t c", "t"), own)
    assert share_of(table, space, "k c", "t") is table
    (y,) = move([y], space, [form], "t", "s")
    assert torch.equal(y, part(x, form, dims, "s", comm.size, comm.rank))
    (same,) = move([y], space, [form], "s", "s")
    assert same is y
    for dst in ("s", "t"):
        with pytest.raises(ValueError, match='with "s" sharded'):
            move([x[:0]], space, [form], "s", dst)
    (y,) = move([y], space, [form], "s", None)
    assert torch.equal(y, x)


def test_tensors_are_kept_split_switched_and_gathered_by_one_verb() -> None:
    run_threads(3, staged, SIZES)
    run_threads(4, staged, SIZES | {"t": 1})


def recomputed(comm: Comm) -> None:
    space, form = Space(known(SIZES), comm), "b t s c"
    x = part(tensor(form, SIZES), form, SIZES, "t", comm.size, comm.rank).requires_grad_()
    grads = []
    for keep in (False, True):
        function = lambda x: switch(x.sin(), space, form, "t", "s").cos()  # noqa: E731
        y = checkpoint(function, x, use_reentrant=False) if keep else function(x)
        grads += torch.autograd.grad(y.sum(), x)
    assert torch.equal(*grads)


def test_verbs_are_recomputed() -> None:
    run_threads(3, recomputed)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.exhaustive
def test_a_switch_is_compiled_without_a_break(dynamic) -> None:
    comm, form = LocalComm(), "(b t) s c"
    bind(comm)

    def function(x: Tensor) -> Tensor:
        return switch(x.sin(), Space({"b": 2, "t": 5, "s": 7}, comm), form, "t", "s").cos()

    torch._dynamo.reset()
    x = tensor(form, SIZES)
    assert torch.equal(torch.compile(function, backend="eager", fullgraph=True, dynamic=dynamic)(x), x.sin().cos())


def kept(comm: Comm) -> tuple[bool, Tensor | None]:
    space = Space({"t": 4, "s": 6}, comm)
    x = torch.randn(space.local("t")["t"], 6, 3, requires_grad=True)
    sent = x * 2
    found = weakref.ref(sent)
    (y,) = begin_switch([sent], space, ["t s c"], "t", "s").wait()
    del sent
    comm.agree("it has arrived everywhere", {})
    gc.collect()
    y.sum().backward()
    return found() is not None, x.grad


def test_what_was_sent_is_let_go_when_it_has_arrived() -> None:
    """A graph that waits for backward keeps nothing of an exchange that is over."""
    for alive, gradient in run_threads(2, kept):
        assert not alive
        assert gradient is not None and bool((gradient == 2).all())
