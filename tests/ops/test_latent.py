"""Latent attention equals one device that expands all keys: output, lse and every gradient, and the bytes predicted."""

from __future__ import annotations

import re
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import seqpar
from seqpar import native
from seqpar.comm import Comm, shm
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.kernels.expanding import _expand
from seqpar.plan import TRANSPORTS, Plan
from seqpar.testing import ERROR_GROWTH, dense_attention, relative_rms, run_processes, run_threads
from tests.cases import LENGTHS, Case, divisors
from tests.ops.cases import RANKS, TOLERANCE, Options, joined, poisoned

NAMES = ("out", "lse", "dq", "dlatent", "drotated", "dw_k", "dw_v", "dsinks")
MASKS = ("packed", "window", "cross", "tree", "union")
LAYOUTS = ("contiguous", "zigzag", "arbitrary", "lopsided")
HEADS = (4, 5, 1)
NOPE, VALUE, RANK = 5, 7, 6  # D_n, D_v, R: E is 3 or 0
OPTIONS = Options(sinks=True, softcap=2.0, dropout=0.2)


def inputs(mask: Mask, heads: int, rotated: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Global q, latent, rotated, w_k, w_v, and the gradients of out and lse, the same on every rank."""
    g = torch.Generator().manual_seed(heads)
    n, m = mask.tokens, mask.kv_tokens
    shapes = (n, heads, NOPE + rotated), (m, RANK), (m, rotated), (heads, NOPE, RANK), (heads, VALUE, RANK)
    return [
        torch.randn(*s, dtype=torch.float64, generator=g).to(dtype) for s in (*shapes, (n, heads, VALUE), (n, heads))
    ]


def run_rank(
    comm: Comm, plan: Plan, heads: int, rotated: int, options: Options, dtype: torch.dtype, expand_bytes: int
) -> tuple[list[Tensor], list[int]]:
    """One rank's out, lse and gradients, and the bytes that it sent in forward and in backward."""
    q, latent, turned, w_k, w_v, dout, dlse = inputs(plan.mask, heads, rotated, dtype)
    arguments = options.arguments(heads)
    rows = [poisoned(x, plan, comm.rank, side) for x, side in ((q, "q"), (latent, "kv"), (turned, "kv"))]
    leaves = [x.requires_grad_() for x in (*rows, w_k, w_v)]
    if options.sinks:
        leaves.append(arguments["sinks"].requires_grad_())
    out, lse = seqpar.latent_attention(
        *leaves[:2], leaves[2] if rotated else None, w_k, w_v, plan, comm, kernel=options.kernel,
        expand_bytes=expand_bytes, return_lse=True, **arguments,
    )  # fmt: skip
    sent = comm.stats.bytes_sent
    pads = torch.from_numpy(plan.positions(comm.rank)) < 0
    grads = seqpar.shard(dout, plan, comm.rank), seqpar.shard(dlse, plan, comm.rank).to(lse.dtype)
    torch.autograd.backward((out, lse), (grads[0], grads[1].masked_fill(lse == -torch.inf, 0.0)))
    assert not out[pads].any() and not rows[0].grad[pads].any()
    of_rotated = rows[2].grad if rotated else rows[2].detach()
    found = [rows[0].grad, rows[1].grad, of_rotated, *(x.grad for x in leaves[3:])]
    return [out.detach(), lse.detach(), *found], [sent, comm.stats.bytes_sent - sent]


def expected(mask: Mask, heads: int, rotated: int, options: Options, dtype: torch.dtype) -> list[Tensor]:
    """The oracle's out, lse and gradients, in float64 of the inputs as ranks get them."""
    q, latent, turned, w_k, w_v, dout, dlse = (x.double() for x in inputs(mask, heads, rotated, dtype))
    arguments = options.arguments(heads)
    leaves = [x.requires_grad_() for x in (q, latent, turned, w_k, w_v)]
    if options.sinks:
        leaves.append(arguments["sinks"].requires_grad_())
    keys, values = (torch.einsum("nr,hdr->nhd", latent, w) for w in (w_k, w_v))
    keys = torch.cat([keys, turned[:, None].expand(-1, heads, -1)], -1)
    out, lse = dense_attention(q, keys, values, mask, **arguments)
    loss = (out * dout).sum() + (lse.masked_fill(lse == -torch.inf, 0.0) * dlse).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]


def collect(results: list[list[Tensor]], plan: Plan) -> list[Tensor]:
    """Ranks' rows put together; the gradients of weights and sinks, of which every rank has a share, summed."""
    by_name = list(zip(*results, strict=True))
    sides = (plan.layout,) * 3 + (plan.kv_layout,) * 2
    whole = [joined(shards, layout) for shards, layout in zip(by_name, sides, strict=False)]
    return whole + [torch.stack(shares).sum(0) for shares in by_name[5:]]


def check(
    plan: Plan,
    heads: int = 4,
    rotated: int = 3,
    options: Options = OPTIONS,
    expand_bytes: int = 256,
    run: Any = run_threads,
) -> None:
    """Every element to 1e-10 of the oracle in float64, and every rank's bytes as predicted."""
    results = run(plan.ranks, run_rank, plan, heads, rotated, options, torch.float64, expand_bytes)
    want = expected(plan.mask, heads, rotated, options, torch.float64)
    for name, a, b in zip(NAMES, collect([r[0] for r in results], plan), want, strict=False):
        assert bool(((a == b) | ((a - b).abs() <= TOLERANCE)).all()), f"{name} in {plan!r}, {heads} heads, E={rotated}"
    for rank, (_, sent) in enumerate(results):
        call = dict(heads=heads, kv_heads=1, dim=NOPE + rotated, v_dim=VALUE, latent=(RANK, rotated), dtype="float64")
        assert sent == [plan.bytes(rank, **call, return_lse=True, backward=back) for back in (False, True)]


def points(heads: tuple[int, ...] = HEADS) -> list[tuple[Case, tuple[int, int]]]:
    """masks x layouts x transports x ranks x widths x heads; the second number is E."""
    made = []
    for n, (mask, layout, transport, ranks, h) in enumerate(product(MASKS, LAYOUTS, TRANSPORTS, RANKS, heads)):
        for ulysses in divisors(ranks):
            stage = (64 << 20, 5 * 72)[n % 2]  # some in stages of 5 rows
            case = Case(mask, layout, transport, ranks, ulysses, LENGTHS[n % 3], n, stage_bytes=stage, pads=n % 5 == 0)
            made.append((case, (h, (3, 0)[n // 2 % 2])))
    return made


@pytest.mark.parametrize("number", range(0, len(points()), 97))
def test_a_sample_of_the_product_equals_one_device(number) -> None:
    case, heads = points()[number]
    check(case.plan(), *heads)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_full_product_equals_one_device(mask, layout) -> None:
    for case, (heads, rotated) in points():
        if (case.mask, case.layout) == (mask, layout):
            check(case.plan(), heads, rotated, expand_bytes=(256, 1 << 20)[case.seed % 2])


def test_widths_per_document_nodes_and_direct_comms() -> None:
    check(Case("packed", "contiguous", "fetch", 4, 1, (4, 4, 4, 4, 12), mixed=True).plan(), 5)
    check(Case("union", "zigzag", "fetch", 8, 2, (24, 9), stage_bytes=2 * 72, node=4).plan(), 5)
    check(Case("tree", "striped", "double_ring", 8, 2, (24, 9), node=4, pads=True).plan(), 3)
    check(Case("window", "blocks", "ring", 6, 3, (24, 9)).plan(), 5, run=partial(run_threads, direct=True))


@pytest.mark.parametrize("comm", ["shm", pytest.param("gloo", marks=pytest.mark.exhaustive)])
def test_real_processes_equal_one_device(comm) -> None:
    if comm == "shm" and (why := shm.missing()):
        pytest.skip(why)
    plan = Case("packed", "zigzag", "fetch", 2, 1, (30, 11), pads=True).plan()
    check(plan, run=partial(run_processes, comm=comm))


@pytest.mark.parametrize("kernel", ["auto", "blockwise", "reference"])
def test_kernels_in_float32(kernel) -> None:
    plan, options = Case("packed", "zigzag", "fetch", 3, 1, (50, 33)).plan(), Options(sinks=True, kernel=kernel)
    results = run_threads(3, run_rank, plan, 4, 3, options, torch.float32, 4096)
    want = expected(plan.mask, 4, 3, options, torch.float32)
    for name, a, b in zip(NAMES, collect([r[0] for r in results], plan), want, strict=True):
        assert relative_rms(a, b) <= 3e-6, name


HEADS_OF_MEAN = (13, 14, 15, 16, 17)


def errors(plan: Plan) -> np.ndarray:
    """Relative RMS error of each tensor in bf16, mean over calls."""
    found = []
    for heads in HEADS_OF_MEAN:
        results = run_threads(plan.ranks, run_rank, plan, heads, 3, Options(), torch.bfloat16, 1 << 20)
        got = collect([[x.double() for x in tensors] for tensors, _ in results], plan)
        want = expected(plan.mask, heads, 3, Options(), torch.bfloat16)
        found.append([relative_rms(a, b) for a, b in zip(got, want, strict=True)])
    return np.mean(found, axis=0)


def test_bf16_is_as_precise_on_several_ranks_as_on_one() -> None:
    mask = Mask([200, 1, 55])
    one = errors(Plan(mask, Layout.contiguous(256, 1)))
    for ranks, transport, ulysses in ((2, "fetch", 1), (4, "ring", 2), (16, "gather", 1)):
        plan = Plan(mask, Layout.zigzag(mask.lengths.tolist(), ranks), transport=transport, ulysses=ulysses)
        growth = errors(plan) / one
        assert (growth <= ERROR_GROWTH).all(), (ranks, transport, growth)


class Largest(TorchDispatchMode):
    """The bytes of the largest memory that an operator returns."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for x in found if isinstance(found, (list, tuple)) else [found]:
            if isinstance(x, Tensor):
                self.most = max(self.most, x.untyped_storage().nbytes())
        return found


@pytest.mark.parametrize("widens", [True, False])
def test_expanded_rows_are_rounded_once(widens, monkeypatch) -> None:
    monkeypatch.setattr(native, "widens_bf16", lambda: widens)
    g = torch.Generator().manual_seed(3)
    latents, weights = (torch.randn(*s, generator=g).bfloat16() for s in ((9, 64), (2, 5, 64)))
    made = torch.full((2, 9, 7), torch.nan, dtype=torch.bfloat16)
    _expand(latents, weights, made[..., :5])
    exact = torch.einsum("nr,hdr->hnd", latents.double(), weights.double())
    assert ((made[..., :5] - exact).abs() <= 2.0**-8 * exact.abs() + 1e-5).all() and made[..., 5:].isnan().all()


def few_queries(comm: Comm, keys: int, expand_bytes: int, stage_bytes: int) -> tuple[int, int]:
    """The largest memory of an operator in a call of 8 heads, and the bytes saved for backward."""
    plan = Plan(
        Mask([4], kv_lengths=[keys]), Layout.contiguous(4, comm.size), kv_layout=Layout.contiguous(keys, comm.size),
        stage_bytes=stage_bytes,
    )  # fmt: skip
    own = keys // comm.size
    leaves = [
        torch.zeros(*s).requires_grad_() for s in ((4 // comm.size, 8, 32), (own, 6), (own, 2), (8, 30, 6), (8, 32, 6))
    ]
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with Largest() as largest:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = seqpar.latent_attention(*leaves, plan, comm, expand_bytes=expand_bytes)
        out.sum().backward()
    return largest.most, sum(kept.values())


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage_bytes", [1 << 20, 64 << 20])
def test_no_expanded_buffer_exceeds_its_bytes_and_none_is_saved(ranks, stage_bytes) -> None:
    keys, row, most = 1 << 16, 8 * 4, 20 << 20
    for largest, kept in run_threads(ranks, few_queries, keys, most, stage_bytes):
        assert keys // ranks * row <= largest <= most < keys * 8 * (32 + 32) * 4
        assert kept < keys // ranks * row + (1 << 17)  # latents, rotated parts, queries, weights and results


def wrong(
    change: str, q: Tensor, latent: Tensor, rotated: Tensor, w_k: Tensor, w_v: Tensor
) -> tuple[Any, dict[str, Any]]:
    """The arguments of a call with one change."""
    more = {"expand_bytes": 0} if change == "bytes" else {}
    if change == "kernel":
        more, q, w_k = {"kernel": "native"}, torch.zeros(len(q), 4, 2000 + 3), torch.zeros(4, 2000, RANK)
    w_k = {"dtype": w_k.double(), "device": w_k.to("meta")}.get(change, w_k)
    w_v = {"rank": w_v[..., 1:], "weights": w_v + 1}.get(change, w_v)
    return (q, latent[:, None] if change == "heads" else latent, rotated, w_k, w_v), more


def refused(comm: Comm, change: str) -> str:
    """The error of a call of which rank 1 alone has changed arguments, or of both ranks for a kernel."""
    plan = Plan(Mask([8]), Layout.contiguous(8, comm.size))
    q, latent, rotated, *weights = inputs(Mask([8]), 4, 3, torch.float32)[:5]
    arguments = [*(seqpar.shard(x, plan, comm.rank) for x in (q, latent, rotated)), *weights]
    more: dict[str, Any] = {}
    if comm.rank == 1 or change == "kernel":
        arguments, more = wrong(change, *arguments)
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        seqpar.latent_attention(*arguments, plan, comm, **more)
    assert comm.stats.bytes_sent == 0
    return str(caught.value)


SHAPES = r"expected q \[T, H, D_n \+ E\], latent \[T_kv, R\].*, got q \[4, 4, 8\], "


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("rank", SHAPES + r"latent \[4, 6\], .*w_v \[4, 7, 5\]"),
        ("heads", SHAPES + r"latent \[4, 1, 6\]"),
        ("dtype", "q, latent, rotated, w_k, w_v must have one dtype, got torch.float32, .*torch.float64"),
        ("device", "must be on one device, got cpu, cpu, cpu, meta, cpu"),
        ("weights", "latent_attention.*w_v"),
        ("bytes", "expand_bytes must be an integer of at least 1, got 0"),
        ("kernel", "native has head dims up to 1024, got 2003 and 7"),
    ],
)
def test_wrong_arguments_are_errors_on_all_ranks_before_a_byte_moves(change, words) -> None:
    for said in run_threads(2, refused, change):
        assert re.search(words, said), said


def test_large_weights_are_compared_by_a_hash() -> None:
    def run(comm: Comm) -> str:
        plan, one = Plan(Mask([8]), Layout.contiguous(8, comm.size)), torch.ones(4, 4, 12)
        w_k, w_v = torch.ones(4, 12, 12), torch.ones(4, 8, 12)
        w_k[-1, -1, -1] += comm.rank
        with pytest.raises(ValueError, match="a hash of w_k") as caught:
            seqpar.latent_attention(one, one[:, 0], None, w_k, w_v, plan, comm)
        return str(caught.value)

    run_threads(2, run)


class Layer(torch.nn.Module):
    """Latent attention with its weights, knowing nothing of ranks."""

    def __init__(self) -> None:
        super().__init__()
        *_, w_k, w_v, _, _ = inputs(Mask([8]), 4, 3, torch.float32)
        self.w_k, self.w_v = torch.nn.Parameter(w_k), torch.nn.Parameter(w_v)

    def forward(self, q: Tensor, latent: Tensor, rotated: Tensor, plan: Any, comm: Any = None) -> Tensor:
        out, lse = seqpar.latent_attention(q, latent * 2, rotated, self.w_k, self.w_v, plan, comm, return_lse=True)
        return out + lse.tanh()[..., None]


def gradients(comm: Comm, how: str) -> list[Tensor]:
    layer, plan = Layer(), Plan(Mask([9, 4]), Layout.striped(13, comm.size))
    q, latent, rotated = (seqpar.shard(x, plan, comm.rank) for x in inputs(Mask([9, 4]), 4, 3, torch.float32)[:3])
    leaves = [x.clone().requires_grad_() for x in (q, latent, rotated)]
    if how == "compiled":
        out = torch.compile(layer, backend="aot_eager", fullgraph=True)(*leaves, seqpar.bind(plan, comm))
    elif how == "checkpoint":
        out = checkpoint(layer, *leaves, plan, comm, use_reentrant=False)
    else:
        out = layer(*leaves, plan, comm)
    out.square().sum().backward()
    return [out.detach(), *(x.grad for x in (*leaves, *layer.parameters()))]


@pytest.mark.parametrize("how", ["compiled", "checkpoint"])
def test_compiled_and_checkpointed_layers_have_the_same_bits(how) -> None:
    ranks = 1 if how == "compiled" else 2  # threads would compile one after another
    for want, got in zip(run_threads(ranks, gradients, "plain"), run_threads(ranks, gradients, how), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
