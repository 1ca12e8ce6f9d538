"""PyTorch's attention functions under a plan: equal to one process, or refused by name."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint

import seqpar
from seqpar import Comm, Layout, LocalComm, Mask, Plan, attention
from seqpar.integrations.sdpa import parallelize, sdpa
from seqpar.integrations.sdpa.mask import samples_meet
from seqpar.testing import run_threads
from tests.comm.cases import impatient
from tests.recompute import Unknown, Whole, in_a_thread

E, H = 16, 4
DOCUMENTS = [9, 1, 7]
TOKENS = sum(DOCUMENTS)


class Block(nn.Module):
    """A residual block of grouped-query attention on [1, T, E]."""

    def __init__(self, causal: bool = True, dropout_p: float = 0.0) -> None:
        super().__init__()
        self.causal, self.dropout_p = causal, dropout_p
        self.qkv, self.out = nn.Linear(E, 2 * E), nn.Linear(E, E)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (2 * H, -1)).transpose(1, 2)
        q, k, v = qkv.split((H, H // 2, H // 2), dim=1)
        y = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=self.causal and mask is None, enable_gqa=True, scale=0.3, dropout_p=self.dropout_p
        )
        return x + self.out(y.transpose(1, 2).flatten(2))


class Stack(nn.Module):
    """Blocks, each inside a checkpoint if `reentrant` is given."""

    def __init__(self, reentrant: bool | None = None, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(**options) for _ in range(2))
        self.reentrant = reentrant

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x, mask) if self.reentrant is None else checkpoint(block, x, mask, use_reentrant=self.reentrant)
        return x


def made(kind: Callable[..., nn.Module] = Stack, **options: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind(**options).double()


def encoder(train: bool = True, batch_first: bool = True) -> nn.Module:
    layer = nn.TransformerEncoderLayer(E, H, 32, 0.0, batch_first=batch_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(train)


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(TOKENS, E, dtype=torch.float64, generator=generator) for _ in range(2))  # type: ignore[return-value]


def seen(mask: Mask) -> Tensor:
    lo, hi = (torch.from_numpy(x)[:, None] for x in mask.bounds(range(mask.tokens)))
    return (torch.arange(mask.kv_tokens) >= lo) & (torch.arange(mask.kv_tokens) < hi)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters()]


def one(model: nn.Module, mask: Mask, **options: Any) -> tuple[Tensor, list[Tensor]]:
    """Output and gradients of one process, documents and all, by PyTorch alone."""
    x, target = inputs()
    y = model(x[None], mask=seen(mask), **options)[0]
    (y * target).sum().backward()
    return y.detach(), gradients(model)


def backward(y: Tensor, target: Tensor) -> None:
    (y * target).sum().backward()


def whole(y: Tensor, model: nn.Module, plan: Plan, comm: Comm) -> tuple[Tensor, list[Tensor]]:
    """The output of all ranks, and the gradients summed over them."""
    everywhere = Plan(Mask([comm.size]), Layout.contiguous(comm.size, comm.size))
    summed = [seqpar.unshard(g[None], everywhere, comm).sum(0) for g in gradients(model)]
    return seqpar.unshard(y.detach(), plan, comm), summed


def same(got: tuple[Tensor, list[Tensor]], expected: tuple[Tensor, list[Tensor]], bound: float = 1e-10) -> None:
    for a, b in zip([got[0], *got[1]], [expected[0], *expected[1]], strict=True):
        assert float((a - b).abs().max()) <= bound * max(1.0, float(b.abs().max()))


PLANS: dict[str, Callable[[Mask, int], Plan]] = {
    "ring": lambda mask, ranks: Plan(mask, Layout.zigzag(mask.lengths, ranks), transport="ring"),
    "ulysses": lambda mask, ranks: Plan(mask, Layout.contiguous(mask.tokens, ranks), ulysses=ranks),
    "one rank": lambda mask, ranks: Plan(mask, Layout([range(mask.tokens), *[range(0)] * (ranks - 1)])),
    "pads": lambda mask, ranks: Plan(mask, Layout([range(mask.tokens), *[range(0)] * (ranks - 1)])).padded(),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.sampled(3)
def test_a_model_is_that_of_one_process(name: str, ranks: int, causal: bool) -> None:
    mask = Mask(DOCUMENTS, causal=causal)
    model = made(causal=causal)
    results = run_threads(ranks, step, model, PLANS[name](mask, ranks))
    expected = one(model, mask)
    for got in results:
        same(got, expected)


def step(comm: Comm, model: nn.Module, plan: Plan, **options: Any) -> tuple[Tensor, list[Tensor]]:
    """A rank's step with a copy of the model: the output of all ranks and the sums of their gradients."""
    model = copy.deepcopy(model)
    x, target = (seqpar.shard(t, plan, comm.rank) for t in inputs())
    with seqpar.sdpa(plan, comm):
        y = model(x[None], **options)[0]
    backward(y, target)
    return whole(y, model, plan, comm)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_samples_of_one_length_are_documents(ranks: int) -> None:
    samples, length = 3, 5
    model = made(causal=False)
    x, target = (t[: samples * length].view(samples, length, E) for t in inputs())
    bounds = [length * r // ranks for r in range(ranks + 1)]
    rows = torch.arange(samples * length).view(samples, length)
    parts = [rows[:, a:b].flatten().numpy() for a, b in zip(bounds, bounds[1:])]
    plan = Plan(Mask([length] * samples, causal=False), Layout(parts))

    def rank(comm: Comm) -> tuple[Tensor, list[Tensor]]:
        own, at = copy.deepcopy(model), slice(bounds[comm.rank], bounds[comm.rank + 1])
        with seqpar.sdpa(plan, comm):
            y = own(x[:, at])
        backward(y, target[:, at])
        return whole(y.flatten(0, 1), own, plan, comm)

    results = run_threads(ranks, rank)
    y = model(x)
    backward(y, target)
    for got in results:
        same(got, (y.detach().flatten(0, 1), gradients(model)))


BOUNDS = np.repeat([0, 4], 4), np.repeat([4, 8], 4)
SAMPLES: dict[str, tuple[Mask, Layout, int, bool]] = {
    "one document": (Mask([8], causal=False), Layout.contiguous(8, 1), 2, True),
    "documents of two samples": (Mask([4, 4], causal=False), Layout.contiguous(8, 1), 4, True),
    "documents across samples": (Mask([2, 4, 2]), Layout.contiguous(8, 1), 2, True),
    "documents interleaved": (Mask([4, 4], causal=False), Layout([[0, 4, 1, 5, 2, 6, 3, 7]]), 4, True),
    "several documents in a sample": (Mask([2, 2, 4], causal=False), Layout.contiguous(8, 1), 2, False),
    "a part of each": (Mask([4, 4], causal=False), Layout([[0, 1, 4, 5], [2, 3, 6, 7]]), 2, False),
    "bounds apart": (Mask.from_bounds(*BOUNDS), Layout.contiguous(8, 1), 2, False),
    "bounds across samples": (Mask.from_bounds(*BOUNDS), Layout.contiguous(8, 1), 4, True),
    "bounds across documents": (Mask.from_bounds(*BOUNDS, lengths=[2] * 4), Layout.contiguous(8, 1), 4, True),
    "only other ranks' rows": (Mask([8], window=(1, 0)), Layout([[0, 1, 4, 5], [2, 3, 6, 7]]), 2, False),
    "a union": (
        Mask([8], causal=False, window=(0, 0)) | Mask.from_bounds(*BOUNDS, lengths=[8]), Layout.contiguous(8, 1), 2,
        False,
    ),
    "a union across": (Mask([8], window=(1, 0), sink_tokens=1), Layout.contiguous(8, 1), 2, True),
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_that_see_each_other_under_the_plan_are_refused(name: str) -> None:
    mask, layout, samples, refused = SAMPLES[name]
    plan = Plan(mask, layout)
    assert any(samples_meet(plan, rank, samples) for rank in range(plan.ranks)) == refused


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.sampled(3)
def test_the_encoder_of_pytorch_is_that_of_one_process(train: bool, batch_first: bool, ranks: int) -> None:
    mask = Mask([TOKENS], causal=False)
    plan = PLANS["ring" if train else "one rank"](mask, ranks)
    model = made(encoder, train=train, batch_first=batch_first)
    dim = 0 if batch_first else 1

    def rank(comm: Comm) -> tuple[Tensor, list[Tensor]]:
        own = copy.deepcopy(model)
        x, target = (seqpar.shard(t, plan, comm.rank) for t in inputs())
        with torch.set_grad_enabled(train), seqpar.sdpa(plan, comm):
            batched, alone = own(x.unsqueeze(dim)).squeeze(dim), own(x)
        torch.testing.assert_close(batched, alone, rtol=0, atol=1e-12)
        if train:
            backward(batched, target)
        else:
            assert not batched.requires_grad
        return whole(batched, own, plan, comm) if train else (seqpar.unshard(batched, plan, comm), [])

    x, target = inputs()
    with torch.set_grad_enabled(train):
        y = model(x.unsqueeze(dim)).squeeze(dim)
    if train:
        backward(y, target)
    for got in run_threads(ranks, rank):
        same(got, (y.detach(), gradients(model) if train else []))


def test_a_mask_is_read_once_while_it_comes_unchanged() -> None:
    calls: list[str] = []

    class Counted(LocalComm):
        def gather(self, what: str, value: Any, error: Exception | None = None) -> list[Any]:
            calls.append(what)
            return [value]

    q = torch.randn(1, TOKENS, 4, generator=torch.Generator().manual_seed(4))
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    with sdpa(Plan(Mask([TOKENS]), Layout.contiguous(TOKENS, 1)), Counted()):
        first = call(q, attn_mask=mask)
        assert torch.equal(call(q, attn_mask=mask), first) and len(calls) == 1
        mask[:, 3] = False
        mask[:3] = False
        mask[3:, :3] = False
        assert not torch.equal(call(q, attn_mask=mask), first) and len(calls) == 2
        with torch.inference_mode():
            later = mask.clone()
            call(q, attn_mask=later)
            later[-1] = False
            assert not call(q, attn_mask=later)[0, -1].any()


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_encoder_takes_its_triangle_with_the_hint(ranks: int) -> None:
    mask = Mask([TOKENS])
    plan = Plan(mask, Layout.zigzag([TOKENS], ranks))
    model = made(encoder)

    def rank(comm: Comm) -> Tensor:
        x, _ = (seqpar.shard(t, plan, comm.rank) for t in inputs())
        triangle = nn.Transformer.generate_square_subsequent_mask(plan.rows(comm.rank), dtype=torch.float64)
        with seqpar.sdpa(plan, comm), torch.no_grad():
            return seqpar.unshard(model(x[None], mask=triangle)[0], plan, comm)

    x, _ = inputs()
    with torch.no_grad():
        expected = model(x[None], mask=nn.Transformer.generate_square_subsequent_mask(TOKENS, dtype=torch.float64))[0]
    for got in run_threads(ranks, rank):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def banded(tokens: int) -> Tensor:
    """A mask that the plan does not have: a window that crosses documents, and a row that sees nothing."""
    i, j = torch.arange(tokens)[:, None], torch.arange(tokens)
    band = (i - j).abs() <= 3
    band[5] = False
    return band


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("form", ["boolean", "additive", "least", "four dims", "broadcast"])
@pytest.mark.sampled(3)
def test_an_explicit_mask_is_taken_as_it_is(form: str, ranks: int) -> None:
    mask = Mask(DOCUMENTS)
    plan = PLANS[{"boolean": "pads", "additive": "one rank"}.get(form, "ring")](mask, ranks)
    given = banded(TOKENS)
    if form in ("least", "broadcast"):
        given[5] = True
    if form == "broadcast":
        given[:] = torch.arange(TOKENS) < 6
    model = made()

    def rank(comm: Comm) -> tuple[Tensor, list[Tensor]]:
        mine = seqpar.shard(given, plan, comm.rank)
        if form in ("additive", "least"):
            hidden = -torch.inf if form == "additive" else torch.finfo(torch.float64).min
            mine = torch.zeros(mine.shape, dtype=torch.float64).masked_fill(~mine, hidden)
        if form == "four dims":
            mine = mine.expand(1, H, *mine.shape)
        if form == "broadcast":
            mine = given[:1]
        return step(comm, model, plan, mask=mine)

    results = run_threads(ranks, rank)
    x, target = inputs()
    y = model(x[None], mask=given)[0]
    backward(y, target)
    for got in results:
        same(got, (y.detach(), gradients(model)))


class Cross(nn.Module):
    """Attention of the rows over a context that every rank holds whole, then over each other."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.proj = Block(), nn.Linear(E, E)

    def forward(self, x: Tensor, context: Tensor, mask: Tensor | None = None) -> Tensor:
        k = self.proj(context).unflatten(-1, (H, -1)).transpose(1, 2)
        q = x.unflatten(-1, (H, -1)).transpose(1, 2)
        return self.block(x + F.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2), mask)


UNLISTED = r"8 rows attend over 5 \(query \[1, 4, 8, \d+\], key \[1, 4, 5, \d+\]\), the plan has 8 and 8.*local="


@pytest.mark.parametrize("rows", [5, 8])
def test_a_call_listed_as_local_stays_on_its_rank(rows: int) -> None:
    plan = Plan(Mask([16]), Layout.contiguous(16, 2))
    model = made(Cross)
    x, target = (t[:16] for t in inputs())
    context = inputs()[1][:rows]

    def rank(comm: Comm) -> tuple[Tensor, list[Tensor]]:
        own = copy.deepcopy(model)
        with seqpar.sdpa(plan, comm, local=lambda query, key: key.shape[1] == H):
            y = own(seqpar.shard(x, plan, comm.rank)[None], context[None])[0]
        backward(y, seqpar.shard(target, plan, comm.rank))
        return whole(y, own, plan, comm)

    def unlisted(comm: Comm) -> None:
        with seqpar.sdpa(plan, comm):
            copy.deepcopy(model)(seqpar.shard(x, plan, comm.rank)[None], context[None])

    results = run_threads(2, rank)
    y = model(x[None], context[None], seen(plan.mask))[0]
    backward(y, target)
    for got in results:
        same(got, (y.detach(), gradients(model)))
    with pytest.raises(ValueError, match=UNLISTED if rows == 5 else "is_causal=False"):
        run_threads(2, unlisted)


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_dropout_drops_the_same_pairs_at_any_number_of_ranks(reentrant: bool | None) -> None:
    model, mask = made(dropout_p=0.4, reentrant=reentrant), Mask(DOCUMENTS)

    def rank(comm: Comm, seed: int) -> tuple[Tensor, list[Tensor]]:
        own, plan = copy.deepcopy(model), PLANS["ring"](mask, comm.size)
        x, target = (seqpar.shard(t, plan, comm.rank) for t in inputs())
        with seqpar.sdpa(plan, comm, dropout_seed=seed):
            y = own(x[None].requires_grad_())[0]
        backward(y, target)
        return whole(y, own, plan, comm)

    expected = rank(LocalComm(), 3)
    for got in run_threads(3, rank, 3):
        same(got, expected)
    plain = made(dropout_p=0.4)
    plan = PLANS["ring"](mask, 1)
    with seqpar.sdpa(plan, LocalComm(), dropout_seed=3):
        y = plain(inputs()[0][None])[0]
    backward(y, inputs()[1])
    same((y.detach(), gradients(plain)), expected)
    assert not torch.equal(rank(LocalComm(), 4)[0], expected[0])


@pytest.mark.parametrize("through", ["block", "parallelize"])
@pytest.mark.parametrize("where", ["inside", "outside", "thread", "another plan"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.sampled(3)
def test_a_checkpoint_recomputes_under_the_plan_of_its_forward(reentrant: bool, where: str, through: str) -> None:
    mask = Mask(DOCUMENTS)
    model = made(reentrant=reentrant)
    # the same rows on every rank, and other documents
    other = Mask([TOKENS - 4, 4])

    def rank(comm: Comm) -> tuple[Tensor, list[Tensor]]:
        plan = Plan(mask, Layout.contiguous(TOKENS, comm.size))
        own = copy.deepcopy(model)
        x, target = (seqpar.shard(t, plan, comm.rank) for t in inputs())
        x = x[None].requires_grad_()
        if through == "parallelize":
            parallelize(own, comm)
            block = partial(seqpar.parallel, plan, comm)
        else:
            block = partial(seqpar.sdpa, plan, comm)
        with block():
            y = own(x)[0]
            if where == "inside":
                backward(y, target)
        if where == "outside":
            backward(y, target)
        elif where == "thread":
            in_a_thread(partial(backward, y, target))
        elif where == "another plan":
            with seqpar.sdpa(plan.with_mask(other), comm):
                backward(y, target)
                call(x.unflatten(-1, (H, -1)).transpose(1, 2).detach(), is_causal=True)
        return whole(y, own, plan, comm)

    results = run_threads(3, rank)
    expected = one(made(), mask)
    for got in results:
        same(got, expected)


def test_a_checkpoint_inside_a_checkpoint_recomputes_under_the_plan_of_its_forward() -> None:
    mask = Mask(DOCUMENTS)
    model = made(reentrant=False)

    def rank(comm: Comm) -> tuple[Tensor, list[Tensor]]:
        plan, own = PLANS["ring"](mask, comm.size), copy.deepcopy(model)
        x, target = (seqpar.shard(t, plan, comm.rank) for t in inputs())
        with seqpar.sdpa(plan, comm):
            y = checkpoint(own, x[None], use_reentrant=False)[0]
        backward(y, target)
        return whole(y, own, plan, comm)

    results = run_threads(2, rank)
    expected = one(made(), mask)
    for got in results:
        same(got, expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_block_inside_a_checkpoint_is_entered_again_by_what_it_is_in(reentrant: bool) -> None:
    model, comm = made(), LocalComm()
    plans = [Plan(Mask(lengths), Layout.contiguous(TOKENS, 1)) for lengths in (DOCUMENTS, [TOKENS])]

    def forward(x: Tensor) -> Tensor:
        with sdpa(plans[1], comm):
            x = model(x)
        return model(x)

    results = []
    for run in (forward, partial(checkpoint, forward, use_reentrant=reentrant)):
        x, target = inputs()
        x = x[None].requires_grad_()
        model.zero_grad()
        with sdpa(plans[0], comm):
            y = run(x)[0]
        backward(y, target)
        results.append((y.detach(), [x.grad, *gradients(model)]))
    same(results[1], results[0])


def test_pytorchs_composable_checkpoint_recomputes_under_the_plan_of_its_forward() -> None:
    mask, (x, target), comm = Mask(DOCUMENTS), inputs(), LocalComm()
    plan = PLANS["ring"](mask, 1)
    for around in (contextlib.nullcontext(), sdpa(plan.with_mask(Mask([TOKENS])), comm)):
        model = made()
        for block in model.blocks:  # type: ignore[union-attr]
            composable_checkpoint(block)
        with sdpa(plan, comm):
            y = model(x[None])[0]
        with around as other:
            backward(y, target)
            if other is not None:
                call(QKV, is_causal=True)
        same((y.detach(), gradients(model)), one(made(), mask))


@pytest.mark.parametrize("function", [Whole, Unknown])
def test_autograd_functions_that_may_run_it_again_enter_their_block_inside_or_raise(function: type) -> None:
    mask, (x, target) = Mask(DOCUMENTS), inputs()
    (plan, comm), model, x = (PLANS["ring"](mask, 1), LocalComm()), made(), x[None].requires_grad_()

    def inside(x: Tensor) -> Tensor:
        with sdpa(plan, comm):
            return model(x)

    refused = pytest.raises(NotImplementedError, match="inside an autograd function whose backward")
    with refused, sdpa(plan, comm):
        function.apply(model, x)  # type: ignore[attr-defined]
    parallelized = made()
    handle = parallelize(parallelized, comm)
    with pytest.raises(NotImplementedError, match="checkpoint around"), seqpar.parallel(plan, comm):
        function.apply(parallelized, x)  # type: ignore[attr-defined]
    handle.undo()
    parallelize(parallelized, comm, plan=plan)
    for run, own in ((inside, model), (parallelized, parallelized)):
        y = function.apply(run, x)[0]  # type: ignore[attr-defined]
        backward(y, target)
        same((y.detach(), gradients(own)), one(made(), mask))
    with torch.inference_mode(), sdpa(plan, comm):  # no backward will come
        torch.testing.assert_close(function.apply(model, x.detach())[0], y, rtol=0, atol=1e-12)  # type: ignore[attr-defined]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_outside_the_block_is_not_rerouted_by_a_backward_inside(reentrant: bool) -> None:
    (x, target), results = inputs(), []
    for around in (contextlib.nullcontext(), sdpa(PLANS["ring"](Mask(DOCUMENTS), 1), LocalComm())):
        model, rows = made(reentrant=reentrant), x[None].requires_grad_()
        y = model(rows)[0]
        with around:
            torch.autograd.backward((y * target).sum())
            call(QKV, is_causal=True)
        results.append((y.detach(), gradients(model)))
    same(results[1], results[0])


@pytest.mark.exhaustive
def test_a_compiler_leaves_rerouted_calls_alone() -> None:
    comm, block, x = LocalComm(), made(Block), inputs()[0][None]
    compiled = torch.compile(block, backend="eager")
    with torch.no_grad():
        for lengths in (DOCUMENTS, [TOKENS], [4, TOKENS - 4]):
            with sdpa(Plan(Mask(lengths), Layout.contiguous(TOKENS, 1)), comm):
                torch.testing.assert_close(compiled(x), block(x), rtol=0, atol=1e-12)
    whole_graph = torch.compile(block, backend="eager", fullgraph=True)
    with pytest.raises(Unsupported), sdpa(Plan(Mask(DOCUMENTS), Layout.contiguous(TOKENS, 1)), comm):
        whole_graph(x)


class Encoder(nn.Module):
    """A layer with a fused path in eval, and attention without one."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.last = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x)
        return x + self.last(x, x, x, need_weights=False)[0]


@pytest.mark.usefixtures("no_graphs")
def test_a_compiled_encoder_in_eval_takes_no_fused_path_inside_the_block() -> None:
    model = made(Encoder).eval()
    x = torch.randn(1, TOKENS, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plan = Plan(Mask(DOCUMENTS, causal=False), Layout.contiguous(TOKENS, 1))
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        alone = torch.cat([model(part) for part in x.split(DOCUMENTS, 1)], 1)
        whole = compiled(x)  # before and after the block
        with sdpa(plan, LocalComm()):
            torch.testing.assert_close(compiled(x), alone, rtol=0, atol=1e-12)
            assert not torch.backends.mha.get_fastpath_enabled()
        torch.testing.assert_close(compiled(x), whole, rtol=0, atol=1e-12)
    assert torch.backends.mha.get_fastpath_enabled()


def test_fused_paths_that_are_switched_on_inside_the_block_are_an_error() -> None:
    block = sdpa(PLANS["ring"](Mask(DOCUMENTS), 1), LocalComm())
    with pytest.raises(RuntimeError, match=r"set_fastpath_enabled\(True\) inside the block"), block:
        call(QKV, is_causal=True)
        torch.backends.mha.set_fastpath_enabled(True)
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.usefixtures("no_graphs")
def test_a_compiled_model_with_a_plan_of_its_own_needs_no_call_before() -> None:
    model, x = made(), inputs()[0][None]
    with torch.no_grad(), sdpa(Plan(Mask(DOCUMENTS), Layout.contiguous(TOKENS, 1)), LocalComm()):
        expected = model(x)
    with torch.no_grad(), parallelize(model, LocalComm(), plan=Plan(Mask(DOCUMENTS), Layout.contiguous(TOKENS, 1))):
        torch.testing.assert_close(torch.compile(model, backend="eager")(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("given", [True, False])
def test_a_parallelized_model_runs_under_its_plan_or_the_surrounding_one(given: bool) -> None:
    mask = Mask(DOCUMENTS)
    model = made()

    def rank(comm: Comm) -> tuple[Tensor, list[Tensor]]:
        plan = PLANS["ring"](mask, comm.size)
        own = copy.deepcopy(model)
        parallelize(own, comm, plan=plan if given else None)
        x, target = (seqpar.shard(t, plan, comm.rank) for t in inputs())
        if given:
            y = own(x[None])[0]
        else:
            with seqpar.parallel(plan, comm):
                y = own(x[None])[0]
        backward(y, target)
        return whole(y, own, plan, comm)

    results = run_threads(2, rank)
    expected = one(made(), mask)
    for got in results:
        same(got, expected)


def test_a_surrounding_plan_of_another_comm_raises() -> None:
    model = made()
    parallelize(model, LocalComm())
    with (
        pytest.raises(ValueError, match="another comm"),
        seqpar.parallel(PLANS["ring"](Mask(DOCUMENTS), 1), LocalComm()),
    ):
        model(inputs()[0][None])


def test_undo_restores_the_model_exactly_and_a_copy_is_on_its_own() -> None:
    comm, plan = LocalComm(), PLANS["ring"](Mask(DOCUMENTS), 1)
    model, second = made(), made()
    x = inputs()[0][None]
    attributes, keys, plain = set(vars(model)), list(model.state_dict()), model(x)
    handle = parallelize(model, comm, plan=plan)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        next(copied.parameters()).zero_()
    assert not torch.equal(copied(x), model(x)), "the copy runs its own parameters"
    assert not torch.equal(model(x), plain), "documents are kept apart"
    assert torch.equal(second(x), plain)
    assert list(model.state_dict()) == keys
    with pytest.raises(ValueError, match="parallel already"):
        parallelize(model, comm)
    handle.undo()
    handle.undo()
    assert set(vars(model)) == attributes and torch.equal(model(x), plain)


def test_a_model_that_is_restored_inside_local_stays_so() -> None:
    model = made()
    handle = parallelize(model, LocalComm(), plan=Plan(Mask(DOCUMENTS), Layout.contiguous(TOKENS, 1)))
    with handle.local():
        handle.undo()
    assert handle.inactive and "forward" not in vars(model)


def test_a_forward_that_somebody_wraps_meanwhile_stays_and_is_the_models_own_again() -> None:
    model, x = made(), inputs()[0][None]
    plain = model(x)
    with parallelize(model, LocalComm(), plan=PLANS["ring"](Mask(DOCUMENTS), 1)) as handle:
        parallel = model.forward
        wrapper = model.forward = lambda *args: parallel(*args)  # type: ignore[method-assign, assignment]
        assert not torch.equal(model(x), plain), "documents are kept apart"
        with handle.local():
            assert torch.equal(model(x), plain)
        assert not torch.equal(model(x), plain)
    assert model.forward is wrapper and torch.equal(model(x), plain)


def test_a_model_that_had_a_forward_of_its_own_gets_it_back() -> None:
    model = made()
    before = model.forward = model.blocks[0].forward  # type: ignore[union-attr, method-assign]
    parallelize(model, LocalComm(), plan=PLANS["ring"](Mask(DOCUMENTS), 1)).undo()
    assert model.forward is before


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_a_parallelized_model_needs_its_plan(reentrant: bool) -> None:
    mask = Mask(DOCUMENTS)
    comm, plan, model = LocalComm(), PLANS["ring"](mask, 1), made()
    x, target = inputs()
    x = x[None].requires_grad_()
    handle = parallelize(model, comm)
    with pytest.raises(NotImplementedError, match="checkpoint around"), seqpar.parallel(plan, comm):
        checkpoint(model, x, use_reentrant=reentrant)
    handle.undo()
    parallelize(model, comm, plan=plan)
    y = checkpoint(model, x, use_reentrant=reentrant)[0]
    backward(y, target)
    same((y.detach(), gradients(model)), one(made(), mask))


def test_forwards_of_a_parallelized_model_drop_pairs_of_their_own() -> None:
    comm, plan = LocalComm(), PLANS["ring"](Mask(DOCUMENTS), 1)
    model, x = made(dropout_p=0.5), inputs()[0][None]
    parallelize(model, comm, plan=plan, dropout_seed=1)
    first, second = model(x), model(x)
    assert not torch.equal(first, second)
    again = made(dropout_p=0.5)
    parallelize(again, comm, plan=plan, dropout_seed=1)
    assert torch.equal(again(x), first) and torch.equal(again(x), second)


class Halves(nn.Sequential):
    """Blocks on [1, T, E], with a method that runs them."""

    def run(self, x: Tensor) -> Tensor:
        return nn.Sequential.forward(self, x)  # type: ignore[no-any-return]


def halves() -> Halves:
    return Halves(nn.Linear(E, E), Block(), Block())


def with_another_forward(model: Halves) -> Halves:
    model.forward = MethodType(lambda self, x: self.run(x), model)  # type: ignore[method-assign]
    return model


OUTSIDE: dict[str, Callable[[Halves, Tensor], Tensor]] = {
    "method": lambda model, x: model.run(x),
    "part": lambda model, x: model[1](x),
    "slices": lambda model, x: model[2:](model[:2](x)),
    "forward of the class": lambda model, x: type(model).forward(model, x),
    "later forward": lambda model, x: with_another_forward(model)(x),
    "function": lambda model, x: F.scaled_dot_product_attention(*[model[0](x)[None]] * 3, is_causal=True),
}


IDLE = "parallel: nothing in this block used its plan"


@pytest.mark.parametrize("way", [*OUTSIDE, "forgotten", "undone", "without gradients"])
def test_a_block_that_only_attends_to_a_shard_is_an_error(way: str) -> None:
    model, mask = made(halves), Mask(DOCUMENTS)

    def rank(comm: Comm) -> None:
        own, plan = copy.deepcopy(model), PLANS["ring"](mask, comm.size)
        x = seqpar.shard(inputs()[0], plan, comm.rank)[None]
        if way != "forgotten":
            handle = parallelize(own, comm)
        if way == "undone":
            handle.undo()
        for _ in range(2):
            run = torch.no_grad() if way == "without gradients" else contextlib.nullcontext()
            with run, pytest.raises(RuntimeError, match=IDLE), seqpar.parallel(plan, comm):
                OUTSIDE.get(way, lambda model, x: model.run(x))(own, x)

    run_threads(2, rank)


@pytest.mark.filterwarnings("error")
def test_blocks_whose_plan_is_used_or_in_which_nothing_is_computed_are_none() -> None:
    model, mask = made(halves), Mask(DOCUMENTS)

    def rank(comm: Comm) -> None:
        own, plan = copy.deepcopy(model), PLANS["ring"](mask, comm.size)
        x = seqpar.shard(inputs()[0], plan, comm.rank)[None]
        handle = parallelize(own, comm)
        with seqpar.parallel(plan, comm):
            loss = checkpoint(lambda y: y.sin(), own(x).sum(), use_reentrant=False)
        with seqpar.parallel(plan, comm):
            loss.backward()
        with seqpar.parallel(plan, comm):
            pass
        with seqpar.parallel(plan, comm), seqpar.sdpa(plan, comm):
            own.run(x)
        with seqpar.parallel(plan, comm):
            own.run(x)
            attention(*[x[0, :, None]] * 3, plan, comm)
        with seqpar.parallel(plan, comm):
            seqpar.unshard(x[0], plan, comm)
        for several in ([handle.local(), seqpar.parallel(plan, comm)], [seqpar.parallel(plan, comm), handle.local()]):
            with several[0], several[1]:
                own.run(x)
        with pytest.raises(KeyError), seqpar.parallel(plan, comm):
            own.run(x)
            raise KeyError
        handle.undo()

    run_threads(2, rank)
    alone, plan = LocalComm(), PLANS["ring"](mask, 1)
    with seqpar.parallel(plan, alone):
        model.run(inputs()[0][None])


def call(q: Tensor, rows: int | None = None, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, q if rows is None else q[..., :rows, :], q[..., :rows, :], **options)


def mha(x: Tensor, options: dict[str, Any] | None = None, **call: Any) -> Any:
    module = nn.MultiheadAttention(E, H, dtype=torch.float64, **(options or {}))
    return module(x, x, x, **({"need_weights": False} | call))


def fused(q: Tensor) -> Any:
    return torch._scaled_dot_product_flash_attention_for_cpu(q, q, q)


def varlen() -> Any:
    bounds = torch.tensor([0, TOKENS], dtype=torch.int32)
    return varlen_attn(QKV[0], QKV[0], QKV[0], bounds, bounds, TOKENS, TOKENS)


def flex() -> Any:
    return torch._higher_order_ops.flex_attention(QKV, QKV, QKV, lambda s, *_: s, (), 1.0, {})


B = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
QKV = torch.zeros(1, 2, TOKENS, 4, dtype=torch.float64)
X = torch.zeros(TOKENS, 1, E, dtype=torch.float64)
GAP = B.clone()
GAP[3, 1] = False
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "full under causal": (partial(call, QKV), ValueError, "is_causal=False and no attn_mask"),
    "rows": (partial(call, QKV[:, :, :5], is_causal=True), ValueError, "5 rows attend over 5 .*, the plan has 17"),
    "key rows": (partial(call, QKV, 4, is_causal=True), ValueError, "17 rows attend over 4"),
    "batch": (partial(call, QKV.expand(2, -1, -1, -1), is_causal=True), ValueError, "got 2 x 17 rows, .* 17 in all"),
    "samples": (
        lambda: F.scaled_dot_product_attention(QKV.expand(2, -1, -1, -1), QKV, QKV), ValueError, "number of samples",
    ),
    "mask of samples": (
        partial(call, QKV.expand(2, -1, -1, -1), attn_mask=B), NotImplementedError, "got 2 samples",
    ),
    "five dims": (partial(call, QKV[None], is_causal=True), ValueError, r"\[B, H, T, D\] or \[H, T, D\]"),
    "both": (partial(call, QKV, attn_mask=B, is_causal=True), ValueError, "not both"),
    "heads": (
        lambda: F.scaled_dot_product_attention(QKV, QKV[:, :1], QKV[:, :1], is_causal=True), ValueError, "enable_gqa",
    ),
    "dropout": (partial(call, QKV, is_causal=True, dropout_p=0.1), ValueError, "dropout_seed="),
    "mask shape": (partial(call, QKV, attn_mask=B[:, :5]), ValueError, "17 rows over all 17 keys"),
    "mask gap": (partial(call, QKV, attn_mask=GAP), NotImplementedError, "row 3 .* expected one interval"),
    "mask heads": (
        partial(call, QKV, attn_mask=torch.stack([B, B.tril()])), NotImplementedError, "differs between heads",
    ),
    "bias": (partial(call, QKV, attn_mask=B.double()), NotImplementedError, "bias"),
    "blind row of least numbers": (
        partial(call, QKV, attn_mask=torch.full((TOKENS, TOKENS), torch.finfo(torch.float64).min, dtype=torch.float64)),
        NotImplementedError, "bias",
    ),
    "integer mask": (partial(call, QKV, attn_mask=B.long()), ValueError, "boolean or floating"),
    "mask gradient": (
        partial(call, QKV, attn_mask=torch.zeros(TOKENS, TOKENS, requires_grad=True)), NotImplementedError, "detach",
    ),
    "fused": (partial(fused, QKV), NotImplementedError, "_scaled_dot_product_flash_attention_for_cpu"),
    "operator": (
        lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(QKV, QKV, QKV), NotImplementedError,
        "aten._scaled_dot_product_flash_attention_for_cpu is not rerouted",
    ),
    "varlen": (varlen, NotImplementedError, "_varlen_attn is not rerouted"),
    "flex": (flex, NotImplementedError, "flex_attention is not rerouted"),
    "flex_attention": (
        lambda: flex_attention(QKV, QKV, QKV), NotImplementedError, "sdpa: flex_attention is not rerouted",
    ),
    "need_weights": (partial(mha, X, need_weights=True), NotImplementedError, "need_weights"),
    "key_padding_mask": (partial(mha, X, key_padding_mask=~B[:1]), NotImplementedError, "key_padding_mask"),
    "add_zero_attn": (partial(mha, X, {"add_zero_attn": True}), NotImplementedError, "add_zero_attn"),
    "bias_k": (partial(mha, X, {"add_bias_kv": True}), NotImplementedError, "bias_k and bias_v"),
    "mha batch": (partial(mha, X.expand(-1, 2, -1)), ValueError, "one packed batch"),
    "mha full under causal": (partial(mha, X), ValueError, "is_causal=False and no attn_mask"),
    "mha hint alone": (partial(mha, X, is_causal=True), ValueError, "hint"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_rerouted_raises_by_name(name: str) -> None:
    function, kind, message = REFUSED[name]
    plan = Plan(Mask([TOKENS]), Layout.contiguous(TOKENS, 1))
    with pytest.raises(kind, match=message), sdpa(plan, LocalComm()):
        function()


@pytest.mark.parametrize(
    ("mask", "options"),
    [
        (Mask([TOKENS], causal=False), {"is_causal": True}),
        (Mask([TOKENS], window=(2, None)), {"is_causal": True}),
        (Mask([TOKENS], causal=False, window=(2, 2)), {}),
    ],
)
def test_a_call_that_means_another_mask_than_the_plan_raises(mask: Mask, options: dict[str, Any]) -> None:
    with (
        pytest.raises(ValueError, match=r"means Mask\(.*as of Mask\(lengths, causal="),
        sdpa(Plan(mask, Layout.contiguous(TOKENS, 1)), LocalComm()),
    ):
        call(QKV, **options)


def test_keys_of_another_number_are_full_or_masked_but_not_causal() -> None:
    comm = LocalComm()
    x = torch.randn(1, 2, 9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    q, k = x[:, :, :4], x
    full = Plan(Mask([4], causal=False, kv_lengths=[9]), Layout.contiguous(4, 1), kv_layout=Layout.contiguous(9, 1))
    band = torch.ones(4, 9, dtype=torch.bool).tril(2)
    with sdpa(full, comm):
        torch.testing.assert_close(F.scaled_dot_product_attention(q, k, k), _plain(q, k), rtol=0, atol=1e-12)
        got = F.scaled_dot_product_attention(q, k, k, band)
        torch.testing.assert_close(got, _plain(q, k, band), rtol=0, atol=1e-12)
        with pytest.raises(NotImplementedError, match="aligns"):
            F.scaled_dot_product_attention(q, k, k, is_causal=True)


def _plain(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
    with torch._C.DisableTorchFunction(), sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, k, mask)


def test_a_rank_that_refuses_tells_the_others() -> None:
    plan = Plan(Mask([TOKENS]), Layout.contiguous(TOKENS, 2))

    def rank(comm: Comm) -> str:
        q = torch.zeros(2, plan.rows(comm.rank), 4)
        with pytest.raises((ValueError, NotImplementedError)) as caught, sdpa(plan, comm):
            call(q, is_causal=True, dropout_p=0.1 * comm.rank)
        return str(caught.value)

    said = run_threads(2, rank)
    assert all("dropout_seed=" in text for text in said)


@pytest.mark.parametrize("way", ["sdpa", "parallelize", "parallel"])
@pytest.mark.parametrize("together", [True, False], ids=["all ranks", "one rank"])
def test_a_rank_that_goes_on_after_an_error_of_its_own_meets_nobody_in_the_middle(way: str, together: bool) -> None:
    class Two(nn.Module):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                q = x[0] if way == "parallel" else x.transpose(1, 2)
                x = seqpar.nn.Attention()(q, q, q)[None] if way == "parallel" else attend(q).transpose(1, 2)
                if self.fails:
                    raise MemoryError("too long")
            return x

    def attend(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    def rank(comm: Comm) -> list[str]:
        model, plan = Two(), Plan(Mask([8]), Layout.contiguous(8, 2))
        if way == "parallelize":
            parallelize(model, comm)
        block = sdpa if way == "sdpa" else seqpar.parallel
        found = []
        for batch in range(5):
            if batch == 1 and not together:
                impatient(comm, 1.0)  # for what never comes, and not for the first batch
            model.fails = batch == 1 and (together or comm.rank == 1)
            x = torch.full((1, 4, 2, 4), float(batch))
            try:
                with block(plan, comm):
                    found.append("right" if torch.equal(model(x), x) else "wrong")
            except (ValueError, MemoryError, seqpar.PeerError) as error:
                found.append(type(error).__name__)
                if not together and comm.rank == 0:
                    assert "after one that ended with an error" in str(error)
        return found

    zero, one = run_threads(2, rank)
    if together:
        assert zero == one == ["right", "MemoryError", "right", "right", "right"]
    else:
        assert "wrong" not in zero + one and zero.count("right") == one.count("right") == 1


@pytest.mark.parametrize("training", [False, True])
def test_an_error_at_the_end_of_one_ranks_forward_leaves_later_forwards_right(training: bool) -> None:
    class Fails(nn.Module):
        on: int | None = None

        def forward(self, x: Tensor) -> Tensor:
            q = x.transpose(1, 2)
            out = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2)
            if self.on == 1:
                raise MemoryError("no room for the logits")
            return out

    def rank(comm: Comm) -> None:
        model, plan = Fails().train(training), Plan(Mask([8]), Layout.contiguous(8, 2))
        parallelize(model, comm, plan=plan)
        x = torch.ones(1, 4, 2, 4)
        for batch in range(4):
            model.on = comm.rank if batch == 1 else None
            fails = (batch, comm.rank) == (1, 1)
            with pytest.raises(MemoryError) if fails else contextlib.nullcontext():
                assert torch.equal(model(x), x)

    run_threads(2, rank)


def test_a_mask_that_one_rank_refuses_raises_on_all() -> None:
    plan = Plan(Mask([TOKENS]), Layout.contiguous(TOKENS, 2))

    def rank(comm: Comm) -> str:
        q = torch.zeros(2, plan.rows(comm.rank), 4)
        with pytest.raises((ValueError, NotImplementedError)) as caught, sdpa(plan, comm):
            call(q, attn_mask=seqpar.shard(GAP, plan, comm.rank))
        return str(caught.value)

    assert all("expected one interval" in text for text in run_threads(2, rank))


def test_leaving_the_block_with_no_call_rerouted_raises() -> None:
    plan, comm = Plan(Mask([TOKENS]), Layout.contiguous(TOKENS, 1)), LocalComm()
    with pytest.raises(RuntimeError, match="no attention was rerouted"), sdpa(plan, comm):
        pass
    with pytest.raises(RuntimeError, match="no attention was rerouted"), sdpa(plan, comm, local=lambda q, k: True):
        call(QKV)
    with pytest.raises(KeyError), sdpa(plan, comm):
        raise KeyError("the error of the block is the one that is seen")
    with pytest.raises(RuntimeError, match="no plan surrounds"):
        parallelize(made(), comm).model(QKV)


def test_blocks_nest_and_end() -> None:
    comm = LocalComm()
    outer, inner = (Plan(Mask([TOKENS], causal=causal), Layout.contiguous(TOKENS, 1)) for causal in (True, False))
    q = torch.randn(2, TOKENS, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    with sdpa(outer, comm):
        first = call(q, is_causal=True)
        with sdpa(inner, comm):
            second = call(q)
        assert torch.equal(call(q, is_causal=True), first)
    block = sdpa(outer, comm)
    for _ in range(2):
        with block:
            assert torch.equal(call(q, is_causal=True), first)
    with pytest.raises(RuntimeError, match="no attention was rerouted"), block:
        pass
    with pytest.raises(RuntimeError, match="entered already"), block, block:
        pass
    with torch.inference_mode(), block:
        torch.testing.assert_close(call(q, attn_mask=B.tril()), first, rtol=0, atol=1e-12)
    several = torch.zeros(3, *q.shape)
    with (
        pytest.raises(ValueError, match="got 3 x 17 rows, the plan has 17 in all"),
        sdpa(outer, comm, local=lambda q, k: True),
        sdpa(inner, comm),
    ):
        call(several)
    torch.testing.assert_close(call(q, is_causal=True), first, rtol=0, atol=1e-12)
    torch.testing.assert_close(call(q), second, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_casts_as_pytorch_does(dtype: torch.dtype) -> None:
    model = made(encoder).float()
    x = inputs()[0][None].float()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        expected = model(x)
        with sdpa(Plan(Mask([TOKENS], causal=False), Layout.contiguous(TOKENS, 1)), LocalComm()):
            got = model(x)
            q = call(QKV.float())
    assert got.dtype == expected.dtype and q.dtype == dtype
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize("around", [contextlib.nullcontext, torch.inference_mode])
@pytest.mark.parametrize("amp", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dtypes_under_autocast_and_inference_mode_are_those_of_pytorch(
    dtype: torch.dtype, amp: Any, around: Any
) -> None:
    mask, comm = Mask(DOCUMENTS), LocalComm()
    plan = PLANS["ring"](mask, 1)
    x = torch.randn(1, 2, TOKENS, 4, generator=torch.Generator().manual_seed(6)).to(dtype)
    rows = x[0].transpose(0, 1)
    with around(), torch.autocast("cpu", amp or torch.bfloat16, enabled=amp is not None):
        expected = F.scaled_dot_product_attention(x, x, x, seen(mask))
        with sdpa(plan, comm):
            got = call(x, is_causal=True)
        layer = seqpar.nn.Attention()(rows, rows, rows, plan, comm).transpose(0, 1)[None]
    bound = 8 * torch.finfo(expected.dtype).eps * float(expected.abs().max())
    for each in (got, layer):
        torch.testing.assert_close(each, expected, rtol=0, atol=bound)


def test_ranks_that_drew_other_weights_are_told() -> None:
    plan = Plan(Mask(DOCUMENTS), Layout.contiguous(TOKENS, 2))
    models = [made(), made()]  # before the threads, which share the random generator

    def rank(comm: Comm) -> str:
        model = models[comm.rank]
        with torch.no_grad():
            model.blocks[1].out.bias += comm.rank
        with (
            parallelize(model, comm, plan=plan),
            pytest.raises(ValueError, match="and nothing has trained yet") as said,
        ):
            model(torch.randn(1, plan.rows(comm.rank), E, dtype=torch.float64))
        assert said.value.__context__ is None  # no other error is printed above this one
        return str(said.value)

    first, second = run_threads(2, rank)
    assert first == second and "blocks.1.out.bias first (1 in all)" in first


def test_other_weights_are_told_again_after_they_were_told() -> None:
    plan, models = Plan(Mask(DOCUMENTS), Layout.contiguous(TOKENS, 2)), [made(), made()]

    def rank(comm: Comm) -> int:
        model, told = models[comm.rank], 0
        next(model.parameters()).data += comm.rank
        parallelize(model, comm, plan=plan)
        for _ in range(3):
            with pytest.raises(ValueError, match="weights|differ"), torch.no_grad():
                model(torch.zeros(1, plan.rows(comm.rank), E, dtype=torch.float64))
            told += 1
        return told

    assert run_threads(2, rank) == [3, 3]


@pytest.mark.parametrize("summed", [True, False])
@pytest.mark.parametrize("backwards", [1, 3])
@pytest.mark.parametrize("validated", [0, 20])
def test_a_step_by_gradients_that_nobody_summed_is_told(summed: bool, backwards: int, validated: int) -> None:
    plan = Plan(Mask(DOCUMENTS), Layout.contiguous(TOKENS, 2))
    whole = torch.randn(1, TOKENS, E, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    models = [made(), made()]  # before the threads, which share the random generator

    def rank(comm: Comm) -> int:
        """How many forwards were right."""
        model, forwards = models[comm.rank], 0
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        x = seqpar.shard(whole, plan, comm.rank, dim=1)
        told = contextlib.nullcontext() if summed else pytest.raises(ValueError, match="not summed over ranks")
        with parallelize(model, comm, plan=plan), told:
            with torch.no_grad():
                for _ in range(validated):
                    model(x)
            for _ in range(3):
                for _ in range(backwards):
                    model(x).square().sum().backward()
                    forwards += 1
                if summed:
                    seqpar.train.sync_gradients(model.parameters(), comm)
                optimizer.step()
                optimizer.zero_grad()
        return forwards

    assert run_threads(2, rank) == [3 * backwards if summed else backwards] * 2


@pytest.mark.parametrize("forwards", [1, 3])
def test_an_argument_that_the_forward_does_not_take_is_told_to_all_ranks(forwards: int) -> None:
    model, x, plan = made(), inputs()[0], Plan(Mask(DOCUMENTS), Layout.striped(TOKENS, 2))

    def rank(comm: Comm) -> tuple[str, bool]:
        own = copy.deepcopy(model)
        parallelize(own, comm, plan=plan)
        rows = seqpar.shard(x, plan, comm.rank)[None]
        for _ in range(forwards - 1):
            own(rows)
        with pytest.raises((TypeError, ValueError)) as error:
            own(rows, **({"maks": None} if comm.rank else {}))
        out = seqpar.unshard(own(rows)[0], plan, comm)
        return str(error.value), torch.allclose(out, one(model, Mask(DOCUMENTS))[0], atol=1e-5)

    for told, right in run_threads(2, rank, timeout=20):
        assert "unexpected keyword argument 'maks'" in told and right
