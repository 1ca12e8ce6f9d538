"""Kernels of other libraries without the libraries: a stand-in with FlashAttention's conventions, in plain torch.

It takes packed sequences, aligns causal masks and windows at the last query and the last key, returns lse as [H, rows]
and something else than -inf for rows that see nothing, and rounds its results to the inputs' dtype. It is plugged in
as a library of its own, and behind modules and operators with the names and arguments of flash-attn 2, 3 and 4. torch's
own operators for CUDA are called on the meta device, which checks arguments and shapes and fails if a value is read.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import seqpar
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.kernels import (
    KERNELS,
    VENDORS,
    CallSpec,
    Grads,
    Operands,
    StepFacts,
    Sums,
    available,
    choose,
    dispatch,
    explain,
    order,
    preference,
)  # fmt: skip
from seqpar.kernels.blockwise import Blockwise
from seqpar.kernels.triton import Triton
from seqpar.kernels.vendor import Aten, AtenFlash, CuDNN, Flash2, Flash3, Flash4, Library, Segmented, library, varlen
from seqpar.ops.attention.signature import Options as OpOptions
from seqpar.ops.attention.signature import signature_of
from seqpar.plan import Plan
from seqpar.planner import Hardware
from seqpar.private import flash_attn as flash_private
from seqpar.testing import relative_rms
from tests.cases import OVER_RANKS
from tests.kernels.cases import (
    BANDS,
    LARGE,
    LIMIT,
    Case,
    asked,
    blank,
    equals_oracle,
    facts_of,
    inputs,
    named,
    oracle,
    run_forward,
    small_cases,
)  # fmt: skip
from tests.ops.cases import EACH, OUT, Options, check

LIBRARIES = (AtenFlash, CuDNN, Flash2, Flash3, Flash4)


def seen_pairs(n: int, m: int, causal: bool, left: int, right: int) -> Tensor:
    """Which keys a query sees, bool [n, m], the last query beside the last key; -1 for no limit."""
    right = 0 if causal else right
    diagonal = torch.arange(n)[:, None] + m - n
    key = torch.arange(m)[None]
    seen = torch.ones(n, m, dtype=torch.bool)
    if left >= 0:
        seen &= key >= diagonal - left
    if right >= 0:
        seen &= key <= diagonal + right
    return seen


def sequences(q: Tensor, k: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int):
    """Slices of every sequence, and what FlashAttention asks of its arguments."""
    edges = [cu.tolist() for cu in (cu_q, cu_k)]
    for cu, given, x, most in zip((cu_q, cu_k), edges, (q, k), (max_q, max_k), strict=True):
        assert cu.dtype == torch.int32 and cu.is_contiguous()
        assert given[0] == 0 and given[-1] == x.shape[0] and given == sorted(given)
        assert max(np.diff(given)) <= most
    assert len(edges[0]) == len(edges[1])
    for i in range(len(edges[0]) - 1):
        yield slice(edges[0][i], edges[0][i + 1]), slice(edges[1][i], edges[1][i + 1])


def wide(x: Tensor, group: int = 1) -> Tensor:
    """[rows, H, D] -> [H, rows, D] in float64, each head ``group`` times."""
    return x.double().transpose(0, 1).repeat_interleave(group, 0)


def fits(*tensors: Tensor) -> None:
    """Rows start at multiples of 16 bytes, as vector loads want them."""
    for x in tensors:
        size = x.element_size()
        assert x.stride(-1) == 1 and x.data_ptr() % 16 == 0
        assert all(s * size % 16 == 0 for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1)


def attend(q, k, v, cu_q, cu_k, max_q, max_k, scale, causal, left, right, *, empty=torch.inf) -> tuple[Tensor, Tensor]:
    """Output in q's dtype and lse [H, rows]; rows that see nothing have output 0 and lse ``empty``."""
    fits(q, k, v)
    group = q.shape[1] // k.shape[1]
    out = q.new_full((*q.shape[:2], v.shape[2]), torch.nan)
    lse = q.new_full((q.shape[1], q.shape[0]), torch.nan, dtype=torch.promote_types(q.dtype, torch.float32))
    for rows, keys in sequences(q, k, cu_q, cu_k, max_q, max_k):
        s = wide(q[rows]) @ wide(k[keys], group).transpose(1, 2) * scale
        seen = seen_pairs(s.shape[1], s.shape[2], causal, left, right)
        s = s.masked_fill(~seen, -torch.inf)
        total = torch.logsumexp(s, -1) if s.shape[2] else s.new_full(s.shape[:2], -torch.inf)
        none = total == -torch.inf
        p = torch.exp(s - total.masked_fill(none, 0.0)[..., None])
        out[rows] = (p @ wide(v[keys], group)).transpose(0, 1).to(out.dtype)
        lse[:, rows] = total.masked_fill(none, empty).to(lse.dtype)
    return out, lse


def differentiate(
    dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, scale, causal, left, right, *, dlse=None
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in the inputs' dtype, from a given lse, of which nothing is taken back: -inf makes NaN."""
    fits(q, k, v, dout, out)
    assert lse.is_contiguous() and lse.dtype == torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[1]
    dq, dk, dv = (torch.full_like(x, torch.nan, memory_format=torch.contiguous_format) for x in (q, k, v))
    for rows, keys in sequences(q, k, cu_q, cu_k, max_q, max_k):
        s = wide(q[rows]) @ wide(k[keys], group).transpose(1, 2) * scale
        s = s.masked_fill(~seen_pairs(s.shape[1], s.shape[2], causal, left, right), -torch.inf)
        p = torch.exp(s - lse[:, rows].double()[..., None])
        g = wide(dout[rows])
        delta = (g * wide(out[rows])).sum(-1)
        if dlse is not None:
            delta = delta - dlse[:, rows].double()
        ds = p * (g @ wide(v[keys], group).transpose(1, 2) - delta[..., None]) * scale
        dq[rows] = (ds @ wide(k[keys], group)).transpose(0, 1).to(q.dtype)
        for total, per_head in ((dk, ds.transpose(1, 2) @ wide(q[rows])), (dv, p.transpose(1, 2) @ g)):
            grouped = per_head.unflatten(0, (k.shape[1], group)).sum(1)
            total[keys] = grouped.transpose(0, 1).to(q.dtype)
    return dq, dk, dv


class Flash(Library):
    """FlashAttention-2 as far as its conventions go, or with ``empty`` -inf 3 and 4."""

    name = "flash"
    rows_per_segment = rows_per_call = 0

    def __init__(self, empty: float = torch.inf) -> None:
        self.empty = empty
        self.calls: list[varlen.VarlenCall] = []

    def refuses(self, spec: CallSpec) -> str | None:
        return None if spec.plain else "flash has no softcap, ALiBi or dropout"

    def attend(self, q, k, v, batch, scale):
        self.calls.append(batch)
        assert batch.max_q > 1, "one says that every sequence has one row, of which no gap is"
        lengths = (batch.cu_q, batch.cu_k, batch.max_q, batch.max_k)
        return attend(q, k, v, *lengths, scale, batch.causal, batch.left, batch.right, empty=self.empty)

    def differentiate(self, q, k, v, given, batch, scale, deterministic):
        out, dlse = given.out, None
        if out is None:
            assert self.from_delta
            out, dlse = torch.zeros_like(given.dout), -given.delta
        lengths = (batch.cu_q, batch.cu_k, batch.max_q, batch.max_k)
        mask = (scale, batch.causal, batch.left, batch.right)
        return differentiate(given.dout, q, k, v, out, given.lse, *lengths, *mask, dlse=dlse)


class FlashWithLse(Flash):
    """One whose backward can be given delta."""

    name = "flash_lse"
    from_delta = True


class Squares(Flash):
    """cuDNN's conventions: a segment at a time, causal only as squares, no windows."""

    name = "squares"
    varlen = False
    squares = True
    shortest = 2

    def _lengths(self, q: Tensor, k: Tensor, batch: varlen.VarlenCall):
        assert batch.cu_q is None and batch.cu_k is None and batch.left < 0
        assert not batch.causal or q.shape[0] == k.shape[0]
        assert (batch.max_q, batch.max_k) == (q.shape[0], k.shape[0]) and min(q.shape[0], k.shape[0]) > 1
        cu = (torch.tensor([0, x.shape[0]], dtype=torch.int32) for x in (q, k))
        return (*cu, q.shape[0], k.shape[0])

    def attend(self, q, k, v, batch, scale):
        self.calls.append(batch)
        return attend(q, k, v, *self._lengths(q, k, batch), scale, batch.causal, -1, -1, empty=torch.nan)

    def differentiate(self, q, k, v, given, batch, scale, deterministic):
        mask = (scale, batch.causal, -1, -1)
        return differentiate(given.dout, q, k, v, given.out, given.lse, *self._lengths(q, k, batch), *mask)


class Nobody(Blockwise):
    """A position kernel that must not be called."""

    forward = backward = None  # type: ignore[assignment]


BASE = Case()
MADE_OF_SEGMENTS = ("causal", "full", "packed", "window")  # each query row in one


# what a library takes of the cases of all kernels; the large ones smaller, as the stand-in computes in float64
PLAIN = [
    replace(c, queries=300, keys=300 if c.mask == "packed" else 500) if c in LARGE else c
    for c in small_cases() + LARGE
    if not (c.softcap or c.alibi or c.dropout or c.made().has_until) and c.scale is None and c.v_dim > 3
]


@pytest.mark.parametrize(
    "made", [Flash, partial(Flash, -torch.inf), FlashWithLse, Squares], ids=["2", "3", "4", "cudnn"]
)
@pytest.mark.parametrize("case", PLAIN, ids=named)
@pytest.mark.sampled(8)
def test_forward_and_backward_equal_the_oracle(made, case) -> None:
    equals_oracle(Segmented(made()), case)


@pytest.mark.parametrize("case", [c for c in PLAIN if c.mask in MADE_OF_SEGMENTS + BANDS and c.splits <= 2], ids=named)
@pytest.mark.sampled(5)
def test_what_makes_segments_is_the_library_s(case) -> None:
    """Backward through lse too, where the library can be given delta."""
    equals_oracle(Segmented(FlashWithLse(), rest=Nobody()), case)


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.sampled(5)
def test_any_mask_over_any_buffers(seed) -> None:
    """Packed documents, windows and prefixes, queries and keys in any part of them: gaps on both sides, empty rows."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 30, rng.integers(1, 6))
    total = int(lengths.sum())
    mask = Mask(lengths, window=(int(rng.integers(0, 12)), None) if seed % 3 == 0 else (None, None))
    if seed % 3 == 1:
        edge = np.repeat(np.cumsum(lengths) - lengths + rng.integers(0, lengths + 1), lengths)
        lo, hi = mask.bounds(np.arange(total))
        mask = Mask.from_bounds(lo, np.maximum(hi, edge), lengths=lengths)
    rows = np.flatnonzero(np.repeat(rng.random(7) < 0.7, -(-total // 7))[:total])
    kernel = Segmented((Flash(), FlashWithLse(-torch.inf), Squares())[seed % 3 if seed % 2 else 0])
    g = torch.Generator().manual_seed(seed)
    q, dout = (torch.randn(len(rows), 4, 8, dtype=torch.float64, generator=g) for _ in range(2))
    k, v = (torch.randn(total, 2, 8, dtype=torch.float64, generator=g) for _ in range(2))
    results = []
    for each in (kernel, Blockwise()):
        out, lse = torch.full_like(q, torch.nan), q.new_full((4, len(rows)), torch.nan)
        grads = [torch.zeros_like(x) for x in (q, k, v)]
        parts = np.array_split(np.random.default_rng(seed).permutation(total), 1 + seed % 3)
        steps = [np.sort(part) for part in parts] if seed % 4 else np.array_split(np.arange(total), 1 + seed % 3)
        made = [facts_of(mask, at, rows) for at in steps]
        for n, (at, facts) in enumerate(zip(steps, made, strict=True)):
            each.forward(Operands(q, k[at], v[at], facts, BASE.score()), Sums(out, lse, None, first=n == 0))
        delta = (dout * out).sum(-1).t().contiguous()
        for at, facts in zip(steps, made, strict=True):
            dk, dv = torch.zeros_like(k[at]), torch.zeros_like(v[at])
            each.backward(
                Operands(q, k[at], v[at], facts, BASE.score()), Grads(dout, lse, delta, out, grads[0], dk, dv)
            )
            grads[1][at], grads[2][at] = dk, dv
        results.append([out, lse, *grads])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("case", OVER_RANKS, ids=str)
@pytest.mark.sampled(3)
def test_a_plan_over_ranks_equals_one_device(case, sinks, monkeypatch) -> None:
    monkeypatch.setattr(preference, "KERNELS", (*KERNELS, Segmented(FlashWithLse())))
    check(case.plan(), (4, 2), (8, 8), Options(kernel="flash_lse", sinks=sinks), uses=OUT if sinks else EACH)


@pytest.mark.parametrize(
    "mask",
    [
        Mask.shared_prefix([(30, [20, 25])]) | Mask.from_bounds([0] * 75, [3] * 75),
        Mask([75], window=(11, None), sink_tokens=4),
        Mask.tree([20, 9, 20, 6, 20], [-1, 0, 1, 1, 0]),
    ],
    ids=["prompt seen by all", "window and sinks", "tree"],
)
def test_masks_of_several_bands_and_trees_over_ranks_equal_one_device(mask, monkeypatch) -> None:
    flash = FlashWithLse()
    monkeypatch.setattr(preference, "KERNELS", (*KERNELS, Segmented(flash)))
    for ranks in (1, 3):
        check(Plan(mask, Layout.zigzag([75], ranks)), (4, 2), (8, 8), Options(kernel="flash_lse"), uses=EACH)
    assert flash.calls


def buffers(case: Case) -> tuple[Operands, Sums]:
    """A case's only step, first and last, and what it is to write, in NaN."""
    q, k, v = inputs(case)[:3]
    out = blank(case.queries, case.heads, case.v_dim, dtype=case.dtype)
    lse = torch.full((case.heads, case.queries), torch.nan)
    return Operands(q, k, v, facts_of(case.made(), np.arange(case.keys)), case.score()), Sums(
        None, lse, out, first=True
    )


@pytest.mark.parametrize("mask", MADE_OF_SEGMENTS)
def test_one_call_a_row_is_the_library_s_result_to_the_bit(mask) -> None:
    """First and last: no copy in float32, and nothing rounded twice."""
    case = replace(BASE, mask=mask, dtype=torch.bfloat16)
    x, into = buffers(case)
    one = Flash()
    Segmented(one, rest=Nobody(), merges=False).forward(x, into)
    lo, hi = (y.tolist() for y in (x.facts.lo, x.facts.hi))
    for row in (0, 35, 69):
        cu = (torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0, hi[row] - lo[row]], dtype=torch.int32))
        span = slice(lo[row], hi[row])
        lengths = (*cu, 1, hi[row] - lo[row])
        want, _ = attend(x.q[row : row + 1], x.k[span], x.v[span], *lengths, x.score.scale, False, -1, -1)
        assert torch.equal(into.out[row], want[0])


def test_squares_are_not_rounded_one_by_one_where_nothing_is_merged() -> None:
    """A causal rectangle is two calls of such a library: with one step a row the position kernel computes it."""
    for keys, merges, used in ((70, False, 1), (95, False, 0), (95, True, 2)):
        case = replace(BASE, keys=keys, dtype=torch.bfloat16)
        x, into = buffers(case)
        taken = Squares()
        Segmented(taken, merges=merges).forward(x, into)
        assert len(taken.calls) == used
        want = oracle(case)
        assert relative_rms(into.out, want[0]) <= LIMIT[case.dtype] * (1.6 if merges else 1.0)
        assert relative_rms(into.lse, want[1]) <= 1e-6


@pytest.mark.parametrize(("made", "calls"), [(Flash, 2), (Squares, 4)])
def test_a_prompt_with_answers_is_a_call_of_squares_and_one_of_rectangles(made, calls, monkeypatch) -> None:
    """Parts of a row are rounded and merged, so a call of one step that may not do so is the position kernel's."""
    case, taken = Case(queries=60, keys=60, dtype=torch.bfloat16, dim=32, v_dim=32), made()
    monkeypatch.setattr(Case, "made", lambda self: Mask.shared_prefix([(20, [25, 15])]))
    spec = asked(case)
    assert spec.until and not spec.merges
    assert "rounds each step's result" in str(Segmented(taken).accuracy_loss(spec))
    equals_oracle(Segmented(taken, rest=Nobody()), case)
    assert len(taken.calls) == calls
    equals_oracle(Segmented(taken, merges=False), case)
    assert len(taken.calls) == calls


@pytest.mark.parametrize("case", [Case("packed", 700, 700), Case("window", 300, 300), Case("bounds")], ids=named)
def test_too_many_small_segments_are_the_position_kernel_s(case) -> None:
    taken = Flash()
    taken.rows_per_segment = 10**6
    equals_oracle(Segmented(taken), case)
    assert not taken.calls


@pytest.mark.parametrize("made", [Flash, FlashWithLse, Squares])
@pytest.mark.parametrize("scale", [0.0, -0.2])
def test_scales_that_are_not_positive_are_the_position_kernel_s(made, scale) -> None:
    """A library masks by -inf before it multiplies, and takes the maximum of what is then the minimum."""
    taken = made()
    for mask in ("causal", "full"):
        equals_oracle(Segmented(taken), Case(mask, 300, 300, scale=scale))
    run_forward(Segmented(taken), Case(scale=1e-60))  # zero in float32
    assert not taken.calls


def batches_of(mask: Mask, rows: np.ndarray, keys: np.ndarray, **style: bool) -> tuple[varlen.VarlenCall, ...]:
    made = varlen.calls_of(
        facts_of(mask, keys, rows), torch.device("cpu"), **{"varlen": True, "squares": False} | style
    )
    assert made is not None
    return made.calls


def test_documents_go_in_one_call_and_gaps_are_sequences_too() -> None:
    mask, every = Mask([10, 20, 5, 30]), np.arange(65)
    (one,) = batches_of(mask, every, every)
    assert one.cu_q.tolist() == one.cu_k.tolist() == [0, 10, 30, 35, 65] and one.causal and one.seen is None
    assert (one.max_q, one.max_k) == (30, 30)
    rows = np.concatenate([np.arange(2, 10), np.arange(12, 20), np.arange(40, 65)])
    keys = np.concatenate([np.arange(0, 10), np.arange(30, 65)])  # without those of the second document
    (one,) = batches_of(mask, rows, keys)
    assert one.rows == slice(0, 41) and one.keys == slice(0, 45)
    assert np.diff(one.cu_q).tolist() == [8, 8, 0, 25] and np.diff(one.cu_k).tolist() == [10, 0, 5, 30]
    assert one.seen.tolist() == [True] * 8 + [False] * 8 + [True] * 25


def test_chunks_that_see_the_same_keys_go_in_different_calls() -> None:
    mask = Mask([40])
    rows = np.concatenate([np.arange(10, 20), np.arange(30, 40)])
    made = batches_of(mask, rows, np.arange(40))
    assert [(b.rows, b.keys, b.causal) for b in made] == [
        (slice(0, 10), slice(0, 20), True), (slice(10, 20), slice(0, 40), True),
    ]  # fmt: skip
    assert not any(b.again or b.seen is not None for b in made)
    made = batches_of(mask, rows, np.arange(40), varlen=False, squares=True)
    assert [(b.rows, b.keys, b.causal, b.again) for b in made] == [
        (slice(0, 10), slice(0, 10), False, False), (slice(0, 10), slice(10, 20), True, True),
        (slice(10, 20), slice(0, 30), False, False), (slice(10, 20), slice(30, 40), True, True),
    ]  # fmt: skip


def test_a_step_is_cut_and_uploaded_once(monkeypatch) -> None:
    uploads = []
    upload = varlen.upload
    monkeypatch.setattr(varlen, "upload", lambda arrays, device: uploads.append(1) or upload(arrays, device))
    case = Case("packed", 70, 70)
    q, k, v, dout, _ = inputs(case)
    x = Operands(q, k, v, facts_of(case.made(), np.arange(70)), case.score())
    out, lse = torch.empty_like(q), torch.empty(4, 70, dtype=torch.float64)
    kernel = Segmented(Flash(), rest=Nobody())
    for _ in range(3):
        kernel.forward(x, Sums(out, lse, None, first=True))
        kernel.backward(x, Grads(dout, lse, (dout * out).sum(-1).t(), out, *(torch.zeros_like(y) for y in (q, k, v))))
    assert len(uploads) == 1


def test_no_heads_rows_or_keys() -> None:
    case = replace(BASE, dtype=torch.float32)
    q, k, v = inputs(case)[:3]
    kernel, none = Segmented(Flash(), rest=Nobody()), np.zeros(0, np.int64)
    out, lse = torch.full_like(q, torch.nan), torch.full((4, 70), torch.nan)
    nothing = Operands(q, k[:0], v[:0], facts_of(Mask([70]), none), case.score())
    kernel.forward(nothing, Sums(out, lse, None, first=True))
    assert not out.any() and (lse == -torch.inf).all()
    kernel.forward(nothing, Sums(out, lse, None, first=False))
    assert not out.any() and (lse == -torch.inf).all()
    empty = Operands(q[:0], k, v, facts_of(Mask([70]), np.arange(70), none), case.score())
    kernel.forward(empty, Sums(out[:0], lse[:, :0], None, first=True))
    grads = [torch.zeros_like(x) for x in (q[:0], k, v)]
    kernel.backward(empty, Grads(q[:0], lse[:, :0], lse[:, :0], q[:0], *grads))
    assert not any(x.any() for x in grads)


class Operators(TorchDispatchMode):
    """torch's operators for CUDA answered by the stand-in; arguments are named by the installed torch's schemas."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if not hasattr(self, name):
            return func(*args, **(kwargs or {}))
        arguments = func._schema.arguments
        call = {a.name: a.default_value for a in arguments}
        call |= {a.name: x for a, x in zip(arguments, args, strict=False)} | (kwargs or {})
        assert call["dropout_p"] == 0.0 and not call.get("return_debug_mask")
        return getattr(self, name)(call)

    @staticmethod
    def flash(call: dict) -> tuple[object, ...]:
        window = (-1 if call[f"window_size_{x}"] is None else call[f"window_size_{x}"] for x in ("left", "right"))
        lengths = (call[x] for x in ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "scale", "is_causal"))
        return (*lengths, *window)

    def _flash_attention_forward(self, call):
        out, lse = attend(*(call[x] for x in ("query", "key", "value")), *self.flash(call))
        return out, lse, out.new_empty(2, dtype=torch.uint64), out.new_empty(()), out.new_empty(0)

    def _flash_attention_backward(self, call):
        assert call["rng_state"].dtype == call["unused"].dtype == torch.uint64
        tensors = (call[x] for x in ("grad_out", "query", "key", "value", "out", "logsumexp"))
        return differentiate(*tensors, *self.flash(call))

    @staticmethod
    def cudnn(call: dict, *names: str) -> tuple[list[Tensor], tuple[object, ...]]:
        tensors = [call[x][0].transpose(0, 1) for x in names]
        n, m = call["query"].shape[2], call["key"].shape[2]
        assert min(n, m) > 1 and (n == m or not call["is_causal"])  # causal masks are aligned at the first row
        cu = (torch.tensor([0, x], dtype=torch.int32) for x in (n, m))
        return tensors, (*cu, n, m, call["scale"], call["is_causal"], -1, -1)

    def _scaled_dot_product_cudnn_attention(self, call):
        assert call["compute_log_sumexp"] and call["attn_bias"] is None
        tensors, others = self.cudnn(call, "query", "key", "value")
        out, lse = attend(*tensors, *others, empty=torch.nan)
        state = torch.empty((), dtype=torch.int64)
        return out.transpose(0, 1)[None], lse[None, ..., None], None, None, others[2], others[3], state, state, None

    def _scaled_dot_product_cudnn_attention_backward(self, call):
        tensors, others = self.cudnn(call, "grad_out", "query", "key", "value", "out")
        assert (call["max_q"], call["max_k"]) == others[2:4] and call["cum_seq_q"] is call["cum_seq_k"] is None
        assert call["logsumexp"].shape == (*call["query"].shape[:3], 1) and call["philox_seed"].dtype == torch.int64
        grads = differentiate(*tensors, call["logsumexp"][0, ..., 0], *others)
        return tuple(x.transpose(0, 1)[None] for x in grads)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("keys", [70, 95])
@pytest.mark.parametrize("mask", MADE_OF_SEGMENTS)
@pytest.mark.parametrize("made", [AtenFlash, CuDNN])
@pytest.mark.sampled(3)
def test_operators_of_torch_are_called_as_they_declare(made, mask, keys, splits) -> None:
    taken = made()
    taken.rows_per_segment = taken.rows_per_call = 0
    keys = 70 if mask == "packed" else keys
    alone = made is AtenFlash or mask in ("causal", "full")
    with Operators():
        case = Case(mask, 70, keys, dim=32, v_dim=32, dtype=torch.bfloat16, splits=splits)
        equals_oracle(Segmented(taken, rest=Nobody() if alone else None), case)


ON_META = [
    Case(mask, 700, keys, dim=64, v_dim=64, dtype=torch.bfloat16, splits=splits)
    for mask, keys in (("causal", 700), ("causal", 900), ("full", 900), ("packed", 700), ("window", 700))
    for splits in (1, 2)
]


@pytest.mark.parametrize(
    ("made", "case"),
    [
        pytest.param(made, case, id=f"{made.name}-{named(case)}")
        for case in ON_META
        for made in (AtenFlash, CuDNN)
        if made is AtenFlash or case.mask in ("causal", "full")
    ],
)
def test_operators_of_torch_take_their_arguments_and_no_value_is_read(made, case) -> None:
    """On the meta device, by the installed torch's own shapes: a read of a value, which on CUDA waits, fails there."""
    taken, used = made(), []
    taken.rows_per_segment = taken.rows_per_call = 0
    for method in ("attend", "differentiate"):
        call = getattr(taken, method)
        setattr(taken, method, lambda *a, call=call: used.append(call(*a)) or used[-1])
    kernel = Segmented(taken, rest=Nobody())
    q, k, v, dout, _ = (x.to("meta") for x in inputs(case))
    out, lse = torch.empty_like(q), torch.empty(4, 700, device="meta")
    acc = torch.empty_like(q, dtype=torch.float32) if case.splits > 1 else None
    for n, at in enumerate(np.array_split(np.arange(case.keys), case.splits)):
        x = Operands(misplaced(q), k[: len(at)], v[: len(at)], on_meta(facts_of(case.made(), at)), case.score())
        kernel.forward(x, Sums(acc, lse, out if n == case.splits - 1 else None, first=n == 0))
        grads = [torch.empty_like(y, dtype=torch.float32) for y in (x.q, x.k, x.v)]
        kernel.backward(x, Grads(dout, lse, lse, out, *grads))
    assert used
    assert all(y.is_meta and y.numel() for results in used for y in results)


def on_meta(facts: StepFacts) -> StepFacts:
    moved = (getattr(facts, name).to("meta") for name in ("pos", "lo", "hi", "key_pos"))
    return StepFacts(*moved, None, facts.tiles, facts.segments, facts.memo)


def misplaced(x: Tensor) -> Tensor:
    """The same shape with rows that start where no vector load can."""
    return torch.empty(x.shape[0], x.shape[1], x.shape[2] + 3, dtype=x.dtype, device="meta")[..., 1:-2]


@pytest.mark.parametrize("name", ["_flash_attention_forward", "_flash_attention_backward",
                                  "_scaled_dot_product_cudnn_attention",
                                  "_scaled_dot_product_cudnn_attention_backward"])  # fmt: skip
def test_arguments_by_name_are_those_of_every_supported_torch(name) -> None:
    """Names given are in the schema, and by position stand only arguments that no version moved."""
    schema = getattr(torch.ops.aten, name).default._schema
    named_only = {a.name for a in schema.arguments if a.kwarg_only}
    flash = name.startswith("_flash")
    assert named_only >= ({"scale", "window_size_left", "window_size_right"} if flash else {"scale"})
    by_position = [a.name for a in schema.arguments if not a.kwarg_only]
    assert len(by_position) == {"_flash_attention_forward": 10, "_flash_attention_backward": 14,
                                "_scaled_dot_product_cudnn_attention": 8,
                                "_scaled_dot_product_cudnn_attention_backward": 15}[name]  # fmt: skip


@pytest.fixture
def flash2(monkeypatch) -> list[dict[str, object]]:
    """flash_attn.flash_attn_interface of 2.8.3: its functions' names, arguments and results."""
    calls: list[dict[str, object]] = []

    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
        block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False,
    ):  # fmt: skip
        assert dropout_p == 0.0 and softcap == 0.0 and alibi_slopes is None and not return_softmax
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        out, lse = attend(q, k, v, *lengths, softmax_scale, causal, window_size_left, window_size_right)
        calls.append({"forward": True})
        return out, lse, q.new_empty(0), torch.empty(2, dtype=torch.int64)

    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
        rng_state=None, zero_tensors=False,
    ):  # fmt: skip
        assert dropout_p == 0.0 and softcap == 0.0 and alibi_slopes is None and softmax_lse.dtype == torch.float32
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        mask = (softmax_scale, causal, window_size_left, window_size_right)
        results = differentiate(dout, q, k, v, out, softmax_lse, *lengths, *mask)
        for target, result in zip((dq, dk, dv), results, strict=True):
            target.copy_(result)
        calls.append({"deterministic": deterministic})
        return torch.empty(q.shape[1], q.shape[0])

    module = ModuleType("flash_attn.flash_attn_interface")
    module._flash_attn_varlen_forward = _flash_attn_varlen_forward
    module._flash_attn_varlen_backward = _flash_attn_varlen_backward
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls


@pytest.fixture
def flash3(monkeypatch):
    """The operators of flash-attn-3 as its extension declares them, and the module that holds it."""
    calls: list[dict[str, object]] = []
    space = torch.library.Library("flash_attn_3", "FRAGMENT")
    optional = "Tensor? {} = None".format
    lengths = ", ".join(optional(x) for x in ("cu_seqlens_q", "cu_seqlens_k"))
    window = "bool is_causal=False, int window_size_left=-1, int window_size_right=-1"
    others = ", ".join(optional(x) for x in ("page_table", "kv_batch_idx", "leftpad_k", "rotary_cos", "rotary_sin",
                                             "seqlens_rotary", "q_descale", "k_descale", "v_descale"))  # fmt: skip
    space.define(
        f"fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new=None, Tensor? v_new=None, Tensor? q_v=None, "
        f"Tensor? out=None, {lengths}, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, Tensor? seqused_k=None, "
        f"int? max_seqlen_q=None, int? max_seqlen_k=None, {others}, float? softmax_scale=None, {window}, "
        f"int attention_chunk=0, float softcap=0.0, bool is_rotary_interleaved=False, "
        f"Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, int sm_margin=0) "
        f"-> (Tensor, Tensor, Tensor, Tensor)"
    )
    space.define(
        f"bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq=None, "
        f"Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, {lengths}, Tensor? seqused_q=None, Tensor? seqused_k=None, "
        f"int? max_seqlen_q=None, int? max_seqlen_k=None, float? softmax_scale=None, {window}, float softcap=0.0, "
        f"bool deterministic=False, int sm_margin=0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    )

    def forward(q, k, v, *others, **named):
        call = bound("fwd", (q, k, v, *others), named)
        lengths = [call[x] for x in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")]
        mask = [call[x] for x in ("softmax_scale", "is_causal", "window_size_left", "window_size_right")]
        calls.append(call)
        if call["num_splits"] == 2:
            assert lengths == [None] * 4, "of several sequences some may have one split"
            return split_in_two(q, k, v, *mask)
        assert call["num_splits"] == 1
        return (*attend(q, k, v, *lengths, *mask, empty=-torch.inf), q.new_empty(0), q.new_empty(0))

    def backward(dout, q, k, v, *others, **named):
        call = bound("bwd", (dout, q, k, v, *others), named)
        lengths = [call[x] for x in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")]
        mask = [call[x] for x in ("softmax_scale", "is_causal", "window_size_left", "window_size_right")]
        results = differentiate(dout, q, k, v, call["out"], call["softmax_lse"], *lengths, *mask)
        for target, result in zip((call["dq"], call["dk"], call["dv"]), results, strict=True):
            target.copy_(result)
        calls.append(call)
        return tuple(q.new_empty(0) for _ in range(5))

    space.impl("fwd", forward, "CPU")
    space.impl("bwd", backward, "CPU")
    for name in ("flash_attn_3", "flash_attn_3._C"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    yield calls
    space._destroy()


def split_in_two(q, k, v, scale, causal, left, right) -> tuple[Tensor, ...]:
    """What forward returns of a batch of one with two splits: out, lse, and the splits in float32.

    A split whose keys a row does not see has an lse of -inf, and no output.
    """
    (q, k, v), group = (x[0] for x in (q, k, v)), q.shape[2] // k.shape[2]
    s = wide(q) @ wide(k, group).transpose(1, 2) * scale
    seen = seen_pairs(s.shape[1], s.shape[2], causal, left, right)
    outs, lses = [], []
    for keys in (slice(0, len(k) // 2), slice(len(k) // 2, None), slice(None)):
        some = s[..., keys].masked_fill(~seen[:, keys], -torch.inf)
        lse = torch.logsumexp(some, -1) if some.shape[2] else some.new_full(some.shape[:2], -torch.inf)
        p = torch.exp(some - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
        out = (p @ wide(v[keys], group)).masked_fill((lse == -torch.inf)[..., None], torch.nan)
        outs, lses = [*outs, out.float()[None]], [*lses, lse.float()[None]]
    return outs[2].transpose(1, 2).to(q.dtype), lses[2], torch.stack(outs[:2]), torch.stack(lses[:2])


@pytest.mark.parametrize("mask", ["causal", "full", "window"])
def test_flash3_gives_the_parts_of_one_sequence_in_float32(mask, flash3, monkeypatch) -> None:
    taken = Flash3()
    taken.rows_per_segment = taken.rows_per_call = 0
    case = Case(mask, dim=32, v_dim=32, dtype=torch.bfloat16, splits=2)
    want = oracle(case)[0]
    out, _ = run_forward(Segmented(taken, rest=Nobody()), case)
    whole = relative_rms(out, want)
    assert {c["num_splits"] for c in flash3} == {2} and whole <= LIMIT[case.dtype]
    monkeypatch.setattr(taken, "splits", False)
    rounded, _ = run_forward(Segmented(taken, rest=Nobody()), case)
    assert flash3[-1]["num_splits"] == 1 and relative_rms(rounded, want) > whole


def test_a_flash3_without_splits_rounds_each_part(flash3, monkeypatch) -> None:
    def without(*others, num_splits, **named):
        if num_splits > 1:
            raise RuntimeError("This flash attention build does not support splits.")
        return operators.fwd(*others, num_splits=num_splits, **named)

    operators = flash_private.operators_of_3()
    monkeypatch.setattr(flash_private, "operators_of_3", lambda: SimpleNamespace(fwd=without, bwd=operators.bwd))
    taken = Flash3()
    taken.rows_per_segment = taken.rows_per_call = 0
    equals_oracle(Segmented(taken, rest=Nobody()), Case("full", dim=32, v_dim=32, dtype=torch.bfloat16, splits=2))
    assert not taken.splits and {c["num_splits"] for c in flash3 if "num_splits" in c} == {1}


def bound(operator: str, given: tuple[object, ...], named: dict[str, object]) -> dict[str, object]:
    """Arguments by name, defaults included, as the operator's schema has them."""
    arguments = getattr(torch.ops.flash_attn_3, operator).default._schema.arguments
    found = {a.name: a.default_value for a in arguments}
    found |= {a.name: x for a, x in zip(arguments, given, strict=False)}
    return found | named


@pytest.fixture
def flash4(monkeypatch) -> list[dict[str, object]]:
    """flash_attn.cute.interface at beta27: the functions below its public ones, arguments that are used and others."""
    calls: list[dict[str, object]] = []

    def limit(x):
        return -1 if x is None else x

    def _flash_attn_fwd(
        q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
        max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None,
        window_size_left=None, window_size_right=None, learnable_sink=None, tile_mn=None, mma_pv_is_rs=None,
        intra_wg_overlap=None, num_threads=384, num_splits=1, pack_gqa=None, _arch=None, score_mod=None,
        mask_mod=None, block_sparse_tensors=None, return_lse=False, out=None, lse=None, aux_tensors=None,
    ):  # fmt: skip
        assert return_lse and qv is None and out is None and lse is None
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        window = (limit(window_size_left), limit(window_size_right))
        calls.append({"forward": True})
        return (*attend(q, k, v, *lengths, softmax_scale, causal, *window, empty=-torch.inf), None, None)

    def _flash_attn_bwd(
        q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
        window_size_right=None, m_block_size=64, n_block_size=128, num_threads=256, pack_gqa=False, num_stages_Q=2,
        num_stages_dO=2, SdP_swapAB=False, dKV_swapAB=False, dQ_swapAB=False, AtomLayoutMSdP=2, AtomLayoutNdKV=2,
        AtomLayoutMdQ=2, V_in_regs=False, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
        max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None, score_mod=None,
        score_mod_bwd=None, mask_mod=None, aux_tensors=None, block_sparse_tensors=None, dlse=None,
    ):  # fmt: skip
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        window = (limit(window_size_left), limit(window_size_right))
        calls.append({"deterministic": deterministic, "dlse": dlse})
        return differentiate(dout, q, k, v, out, lse, *lengths, softmax_scale, causal, *window, dlse=dlse)

    module = ModuleType("flash_attn.cute.interface")
    module._flash_attn_fwd, module._flash_attn_bwd = _flash_attn_fwd, _flash_attn_bwd
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("mask", MADE_OF_SEGMENTS)
@pytest.mark.parametrize(("made", "module"), [(Flash2, "flash2"), (Flash3, "flash3"), (Flash4, "flash4")])
@pytest.mark.sampled(3)
def test_flash_attention_is_called_as_its_releases_declare(made, module, mask, splits, request) -> None:
    """Names, order and results; and that a call's wish for determinism gets there."""
    calls = request.getfixturevalue(module)
    taken = made()
    taken.rows_per_segment = taken.rows_per_call = 0
    for deterministic in (True, False):
        kernel = Segmented(taken, rest=Nobody(), deterministic=deterministic)
        equals_oracle(kernel, Case(mask, dim=32, v_dim=32, dtype=torch.bfloat16, splits=splits))
        told = {c["deterministic"] for c in calls if "dq" in c or "deterministic" in c}
        assert told == {deterministic}
        del calls[:]


def test_flash4_is_given_delta_where_lse_has_a_gradient(flash4) -> None:
    taken = Flash4()
    taken.rows_per_segment = taken.rows_per_call = 0
    equals_oracle(Segmented(taken, rest=Nobody()), Case(dim=32, v_dim=32, dtype=torch.bfloat16, with_lse=True))
    assert flash4[-1]["dlse"] is not None


HOPPER = CallSpec("cuda", 90, torch.bfloat16, heads=32, kv_heads=8, dim=128, v_dim=128, merges=False)


@pytest.fixture
def all_here(monkeypatch) -> None:
    """A machine with a CUDA device and every library."""
    versions = {"flash-attn": (2, 8, 3, 1 << 30), "flash-attn-3": (3, 0, 0, 1 << 30), "flash-attn-4": (4, 0, 0, 27)}
    monkeypatch.setattr(library, "installed", versions.get)
    for module in ("aten", "flash"):
        monkeypatch.setattr(sys.modules[f"seqpar.kernels.vendor.{module}"], "no_cuda", lambda: None)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(preference, "KERNELS", (KERNELS[0], FakeTriton(), *KERNELS[2:]))
    monkeypatch.setattr(preference, "FIRST_USE", SimpleNamespace(fault=lambda *_: None, known=lambda *_: None))


class FakeTriton(Triton):
    """Triton as if it were on CUDA."""

    def refuses(self, spec: CallSpec) -> str | None:
        return None


FREE = replace(HOPPER, deterministic=False)


@pytest.mark.parametrize(
    ("name", "spec", "reason"),
    [
        *((made.name, replace(FREE, device="cpu"), "CUDA devices, q is on cpu") for made in LIBRARIES),
        *((made.name, replace(FREE, dtype=torch.float32), "has no torch.float32") for made in LIBRARIES),
        *((made.name, replace(FREE, softcap=True), "no softcap") for made in LIBRARIES),
        *((made.name, replace(FREE, alibi=True), "ALiBi") for made in LIBRARIES),
        *((made.name, replace(FREE, dim=60, v_dim=60), "multiples of 8") for made in LIBRARIES),
        *((made.name, replace(FREE, dim=264, v_dim=264), "264") for made in LIBRARIES),
        *((made.name, replace(FREE, capability=75), "7.5") for made in LIBRARIES),
        ("flash2", replace(HOPPER, v_dim=64), "values as wide as keys"),
        ("aten_flash", replace(FREE, v_dim=64), "values as wide as keys"),
        ("flash3", replace(FREE, v_dim=64), "192 with values of 128"),
        ("flash4", replace(FREE, capability=100, dim=192, v_dim=192), "head dims up to 128"),
        ("flash3", replace(FREE, capability=100), "capability 9.0 to 9.0, the device has 10.0"),
        ("flash4", replace(FREE, capability=120), "the device has 12.0"),
        ("aten_flash", replace(FREE, capability=89, dim=200, v_dim=200), "no backward for head dim 200"),
    ],
)  # fmt: skip
def test_a_call_that_cannot_be_done_is_refused_with_the_reason(name, spec, reason, all_here) -> None:
    with pytest.raises(NotImplementedError, match=f"{name}.*{reason}"):
        choose(name, spec)


VARY = [
    ("aten_flash", HOPPER, "only for a whole process"),
    ("cudnn", HOPPER, "no deterministic backward"),
    ("flash3", replace(HOPPER, dim=256, v_dim=256), "deterministic backward for head dims up to 192"),
]


@pytest.mark.parametrize(("name", "spec", "reason"), VARY)
def test_triton_computes_gradients_that_a_library_would_vary(name, spec, reason, all_here, monkeypatch) -> None:
    kernel = choose(name, spec)
    assert kernel.borrows and isinstance(kernel.rest, Triton)
    several = replace(spec, merges=True)
    assert "gradients" not in choose(name, several).accuracy_loss(several)
    for other in (replace(spec, deterministic=False), replace(spec, grads=False)):
        assert not choose(name, other).borrows
    monkeypatch.setattr(Triton, "refuses", lambda self, spec: "triton is not installed")
    with pytest.raises(NotImplementedError, match=f"{name}.*{reason}.*, and triton is not installed"):
        choose(name, spec)


@pytest.mark.parametrize("case", [BASE, Case("packed", splits=2), Case("causal", with_lse=True)], ids=named)
def test_forward_of_a_library_and_backward_of_the_position_kernel_equal_the_oracle(case) -> None:
    class Forward(Flash):
        differentiate = None  # type: ignore[assignment]

    equals_oracle(Segmented(Forward(), borrows=True), case)
    assert Segmented(Forward()).tables(HOPPER, None) == {}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        *((name, HOPPER) for name in ("flash2", "flash3", "flash4")),
        *((made.name, FREE) for made in LIBRARIES),
        *((made.name, replace(HOPPER, grads=False)) for made in LIBRARIES),
        *((name, replace(HOPPER, dim=192)) for name in ("flash3", "flash4")),
        *((name, replace(FREE, dim=256, v_dim=256)) for name in ("aten_flash", "flash2", "flash3", "flash4")),
        ("flash4", replace(HOPPER, capability=103)),
        ("flash2", replace(HOPPER, capability=80)),
    ],
)  # fmt: skip
def test_a_call_that_can_be_done_is_taken_by_name_also_where_it_rounds(name, spec, all_here) -> None:
    kernel = choose(name, spec)
    assert kernel.name == name and kernel.accuracy_loss(spec) is None
    assert isinstance(kernel, Segmented) and isinstance(kernel.rest, (Triton, Blockwise))
    assert (kernel.deterministic, kernel.merges) == (spec.deterministic, spec.merges)
    several = replace(spec, merges=True)
    rounding = "rounds each step's result to bfloat16 before they are merged"
    assert choose(name, several).accuracy_loss(several).startswith(f"{name} {rounding}")
    assert ("gradients" in kernel.accuracy_loss(several)) == spec.grads


SEVERAL, FAST, STEADY = {"merges": True}, {"merges": True, "fast": True}, {"few_shapes": True}


@pytest.mark.parametrize(
    ("installed", "spec", "name"),
    [
        (True, HOPPER, "flash3"), (True, replace(FREE, dim=96, v_dim=96), "flash3"),
        (True, replace(HOPPER, **FAST), "flash3"), (True, replace(HOPPER, until=True, fast=True), "flash3"),
        # it rounds parts, which only "fast" allows; the rows of a tree have several parts even in one step
        (True, replace(HOPPER, **SEVERAL), "triton"), (True, replace(HOPPER, until=True), "triton"),
        # on Blackwell flash4 is published with the highest figure; other GPUs have none to compare
        (True, replace(HOPPER, capability=100), "flash4"), (True, replace(HOPPER, **FAST, capability=103), "flash4"),
        (False, replace(HOPPER, **STEADY, capability=100), "cudnn"), (False, replace(HOPPER, capability=100), "triton"),
        (True, replace(HOPPER, capability=80), "triton"), (True, replace(HOPPER, **FAST, capability=120), "triton"),
        # they take neither all dtypes nor all options
        (True, replace(HOPPER, softcap=True), "triton"), (True, replace(HOPPER, **FAST, softcap=True), "triton"),
        (True, replace(HOPPER, **FAST, dtype=torch.float32), "triton"),
        # every new length takes cuDNN a plan; with Triton's backward it is deterministic
        (False, replace(FREE, **STEADY), "cudnn"), (False, replace(HOPPER, **STEADY), "cudnn"),
        (False, replace(HOPPER, grads=False, **STEADY), "cudnn"), (False, replace(FREE, **FAST, **STEADY), "cudnn"),
        (False, FREE, "triton"), (False, replace(HOPPER, grads=False), "triton"),
        (False, replace(FREE, **FAST), "triton"), (False, replace(FREE, **SEVERAL, **STEADY), "triton"),
    ],
)  # fmt: skip
def test_auto_takes_the_fastest_that_rounds_nothing_and_is_deterministic_if_asked(
    installed, spec, name, all_here, monkeypatch
) -> None:
    if not installed:
        monkeypatch.setattr(library, "installed", lambda package: None)
    kernel = choose("auto", spec)
    assert kernel.name == name
    if name == "flash3" and spec.fast:
        assert kernel.merges and isinstance(kernel.rest, Triton)


@pytest.mark.parametrize(
    ("name", "capability"),
    [("h100", 90), ("h100-fast", 90), ("h200", 90), ("h200-fast", 90), ("a100", 80), ("b200", 100)],
)
def test_a_preset_has_the_kernel_that_auto_takes_for_several_steps(name, capability, all_here) -> None:
    call = replace(HOPPER, capability=capability, merges=True, fast=name.endswith("-fast"))
    assert Hardware.preset(name).kernel == choose("auto", call).name
    assert choose("auto", replace(call, fast=True)).name == choose("auto", call).name or capability in (90, 100)


def test_keys_of_many_lengths_and_of_odd_ones_keep_cudnn_away() -> None:
    q, k = torch.empty(8, 4, 16), torch.empty(12, 4, 16)
    options = OpOptions(None, 0.0, 0.0, None, True, "auto", "fast", False)
    signature = signature_of(q, k, k, None, None, options, [True, True, True, False, False])
    for keys, few_shapes in (([256, 256], True), ([384, 128], False), ([258, 258], False)):
        mask = Mask([128, 128], kv_lengths=keys)
        plan = Plan(mask, Layout.contiguous(256, 2), kv_layout=Layout.contiguous(sum(keys), 2))
        spec = signature.spec(plan)
        assert spec.few_shapes == few_shapes and spec.fast


@pytest.mark.parametrize("transport", ["ring", "fetch"])
def test_documents_of_one_length_give_a_library_of_squares_few_shapes(transport) -> None:
    """So cuDNN, which builds a plan for each, does so once: other batches of such documents have the same shapes."""
    by_batch = []
    for documents in (8, 12):
        lengths = [512] * documents
        plan = Plan(Mask(lengths), Layout.zigzag(lengths, 8), transport=transport)
        shapes = [set() for _ in range(8)]
        for rank, of_rank in enumerate(shapes):
            for step in plan.steps(rank):
                segments = step.bands[0].segments
                assert not len(segments.remainder)
                of_rank.update((p.n, p.m, p.mask) for p in varlen._pieces(segments, squares=True))
        by_batch.append(shapes)
    assert by_batch[0] == by_batch[1] and max(map(len, by_batch[0])) <= (3 if transport == "ring" else 8)


def test_the_order_on_cuda_is_that_of_figures_where_there_are_some() -> None:
    """Published ones count once the kernel is right on the machine; here none was checked."""
    assert order(replace(HOPPER, few_shapes=True)) == (
        "cudnn", "triton", "aten_flash", "flash3", "flash4", "flash2", "blockwise", "reference",
    )  # fmt: skip
    for call in (HOPPER, FREE, replace(FREE, dim=64, v_dim=64)):
        assert order(call)[:3] == ("triton", "aten_flash", "flash3")
    for capability in (100, 103):
        call = replace(HOPPER, capability=capability, few_shapes=True)
        assert order(call)[:3] == ("flash4", "cudnn", "triton")
    for capability in (80, 89, 120):
        assert order(replace(HOPPER, capability=capability))[0] == "triton"
    assert order(replace(HOPPER, dim=256))[0] == "triton", "no figure for that head dim"
    assert order(replace(HOPPER, device="cpu")) == ("native", "aten", "blockwise", "reference")


def test_every_kernel_has_a_place_in_an_order() -> None:
    names = {k.name for k in (*KERNELS, *VENDORS)} - {"triton_tf32"}  # by name only
    for spec in (replace(HOPPER, few_shapes=True), replace(FREE, few_shapes=True, capability=80)):
        assert {*order(spec), *order(replace(spec, device="cpu"))} == names


def test_explain_has_a_line_for_every_kernel(all_here) -> None:
    lines = dict(line.split(maxsplit=1) for line in explain(HOPPER).splitlines())
    assert set(lines) == {k.name for k in (*preference.KERNELS, *VENDORS)}
    assert lines["flash3"] == "chosen by auto" and lines["triton"] == "yes"
    assert lines["cudnn"] == "yes; gradients are triton's, as cudnn has no deterministic backward"
    lines = dict(line.split(maxsplit=1) for line in explain(replace(HOPPER, merges=True)).splitlines())
    told = 'by name, or with accuracy="fast": flash3 rounds'
    assert lines["flash3"].startswith(told) and lines["triton"] == "chosen by auto"
    lines = dict(line.split(maxsplit=1) for line in explain(replace(HOPPER, merges=True, fast=True)).splitlines())
    assert lines["flash3"].startswith("chosen by auto: flash3 rounds each step's result to bfloat16")
    assert lines["flash2"].startswith("yes: flash2 rounds") and lines["triton"] == "yes"
    with pytest.raises(NotImplementedError, match="(?s)no kernel for int32 on cpu.*blockwise +no: blockwise has no"):
        choose("auto", replace(HOPPER, device="cpu", dtype=torch.int32))


@pytest.mark.parametrize(
    ("made", "version", "why"),
    [
        (Flash2, "2.8.3.post2", None),
        (Flash2, "2.7.4", "flash-attn 2.7.4 is installed, it needs 2.8 or later and below 3"),
        (Flash2, "3.0.0", "flash-attn 3.0.0 is installed, it needs 2.8 or later and below 3"),
        (Flash3, "3.0.0", None),
        (Flash4, "4.0.0b12", None),
        (Flash4, "4.0.0.beta27", None),
        (Flash4, "4.0.0", None),
        (Flash4, "4.0.0b9", "flash-attn-4 4.0.0b9 is installed, it needs 4.0.0b12 or later"),
    ],
)
def test_versions_are_read_from_what_is_installed(made, version, why, monkeypatch) -> None:
    monkeypatch.setattr(library, "version", lambda package: version)
    monkeypatch.setattr(library, "installed", library.installed.__wrapped__)
    monkeypatch.setattr(sys.modules[made.__module__], "no_cuda", lambda: None)
    assert made().missing() == why


def test_rocm_is_not_cuda(monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4", raising=False)
    assert "ROCm 6.4" in dispatch.no_cuda.__wrapped__()


def test_libraries_are_not_imported_with_seqpar() -> None:
    """Nor by asking what is available."""
    assert seqpar and available()
    loaded = {name.split(".")[0] for name in sys.modules}
    assert not loaded & {"flash_attn", "flash_attn_3", "flash_attn_interface", "fa3_fwd"}


def test_the_cpu_operator_takes_what_is_finite(monkeypatch) -> None:
    """In a square it multiplies unseen values by zero."""
    x = torch.ones(3)
    assert Aten().accepts(x, x) and not Aten().accepts(x, torch.tensor([1.0, torch.nan]))
    assert not Aten().accepts(torch.tensor([torch.inf]))
