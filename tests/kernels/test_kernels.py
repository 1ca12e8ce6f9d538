"""One suite for every kernel, through the kernel protocol, against the dense oracle in float64.

Whatever a kernel must write holds NaN before, and tensors are views into larger ones, as the schedule hands them over.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from seqpar import native
from seqpar.facts.mask import Mask
from seqpar.facts.tiles import segments, tile_tables
from seqpar.kernels import (
    KERNELS,
    CallSpec,
    Grads,
    Kernel,
    Operands,
    Score,
    StepFacts,
    Sums,
    acc_dtype,
    blockwise,
    call_spec,
    choose,
    dropout,
)  # fmt: skip
from seqpar.kernels.native import ISAS, Native
from seqpar.kernels.protocol import DTYPES
from seqpar.kernels.reference import Reference
from seqpar.kernels.vendor import Aten, varlen
from seqpar.testing import dense_attention, relative_rms
from tests.cases import some

# the compiled kernel also as processors with fewer instructions run it
OLDER = [Native(isa=isa) for isa in range(0 if native.missing() else native.ops().isa())]
LOW = (torch.bfloat16, torch.float16)
# of the relative RMS error: float64 and float32 to a few roundings, the others to that of one rounding of the result
LIMIT = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 3.2e-3, torch.float16: 4e-4}


@dataclass(frozen=True)
class Case:
    """One call of a kernel, its keys in one buffer or several."""

    mask: str = "causal"
    queries: int = 70
    keys: int = 70
    heads: int = 4
    kv_heads: int = 2
    dim: int = 8
    v_dim: int = 8
    dtype: torch.dtype = torch.float64
    splits: int = 1
    softcap: float = 0.0
    alibi: bool = False
    dropout: float = 0.0
    with_lse: bool = False
    scale: float | None = None

    def made(self) -> Mask:
        rng = np.random.default_rng(5)
        n, m = self.queries, self.keys
        if self.mask == "packed":
            return Mask([n // 2 + 3, 1, n - n // 2 - 4])
        if self.mask == "bounds":
            lo = rng.integers(0, m + 1, n)
            return Mask.from_bounds(lo, np.minimum(m, lo + rng.integers(0, m // 2, n)), kv_tokens=m)
        window = {"window": (m // 5, None), "band": (m // 7, 3)}.get(self.mask, (None, None))
        causal = self.mask in ("causal", "window")
        return Mask([n], causal=causal, window=window, kv_lengths=[m])

    def score(self) -> Score:
        slopes = torch.logspace(-4, -1, self.heads, base=2, dtype=acc_dtype(self.dtype)) if self.alibi else None
        scale = self.dim**-0.5 if self.scale is None else self.scale
        return Score(scale, self.softcap, slopes, self.dropout, 77 if self.dropout else 0, first_head=0)


def small_cases() -> list[Case]:
    """Every option with every mask somewhere, and every dtype and number of splits."""
    base = Case()
    cases = [
        replace(base, mask=mask, splits=splits, keys=70 if mask in ("packed", "causal") else 70 + 11 * splits)
        for mask in ("causal", "full", "packed", "window", "band", "bounds")
        for splits in (1, 2, 3, 4)
    ]
    cases += [replace(base, heads=h, kv_heads=kv, splits=2) for h, kv in ((1, 1), (5, 5), (6, 1), (28, 7))]
    cases += [replace(base, dim=d, v_dim=dv, splits=2) for d, dv in ((8, 4), (4, 8), (1, 3))]
    cases += [replace(base, dim=576, v_dim=512, splits=2, dtype=t) for t in (torch.float32, torch.bfloat16)]
    cases += [replace(base, keys=m, mask=mask) for m in (30, 95) for mask in ("causal", "full")]
    cases += [replace(base, splits=s, mask="bounds", **o) for s in (1, 3) for o in OPTIONS]
    cases += [replace(base, dtype=t, splits=s, dim=32, v_dim=32) for t in (torch.float32, *LOW) for s in (1, 4)]
    cases += [replace(base, dtype=t, splits=3, dim=32, v_dim=32, mask="packed", **OPTIONS[-1]) for t in LOW]
    for scale in (0.0, -0.2):
        cases += [replace(base, scale=scale, mask=m, splits=s) for m in ("causal", "full") for s in (1, 2)]
        cases += [replace(base, scale=scale, mask="packed", dtype=t, dim=32, v_dim=32) for t in (torch.float32, *LOW)]
        cases += [replace(base, scale=scale, mask="bounds", **OPTIONS[-1])]
    return cases


OPTIONS = (
    {"softcap": 1.5},
    {"alibi": True},
    {"dropout": 0.3},
    {"with_lse": True},
    {"softcap": 1.5, "alibi": True, "dropout": 0.3, "with_lse": True},
)

# Beyond one tile of 512, so that partial, full and empty tiles occur, and segments of many rows.
LARGE = [
    Case(mask, 700, m, h, kv, 16, 16, dtype, splits, **options)
    for mask, m, h, kv, dtype, splits, options in (
        ("causal", 1300, 2, 1, torch.float32, 1, {}),
        ("causal", 1300, 1, 1, torch.float64, 2, {}),
        ("full", 1300, 2, 2, torch.float32, 2, {}),
        ("packed", 700, 2, 1, torch.float64, 1, {}),
        ("window", 1300, 2, 2, torch.float64, 1, {}),
        ("bounds", 1300, 1, 1, torch.float32, 2, {}),
        ("causal", 1300, 2, 2, torch.bfloat16, 2, {}),
        ("causal", 1300, 2, 1, torch.float64, 1, {"softcap": 2.0, "alibi": True, "dropout": 0.1}),
    )
]


def named(case: Case) -> str:
    base = Case()
    fields = (f"{n}={getattr(case, n)}" for n in case.__dataclass_fields__ if getattr(case, n) != getattr(base, n))
    return ",".join(fields).replace("torch.", "") or "base"


def facts_of(mask: Mask, key_pos: np.ndarray) -> StepFacts:
    """All queries of a mask over a buffer of some keys."""
    lo, hi = mask.bounds(np.arange(mask.tokens))
    pos = mask.key_positions(np.arange(mask.tokens))
    put = [torch.from_numpy(x).to(torch.int32) for x in (pos, lo, hi, key_pos)]
    tables, cut = partial(tile_tables, lo, hi, key_pos), partial(segments, lo, hi, key_pos)
    return StepFacts(*put, tables, cut, memo())


def memo() -> Callable[[Hashable, Callable[[], object]], object]:
    """A step's memory."""
    kept: dict[Hashable, object] = {}
    return lambda key, make: kept[key] if key in kept else kept.setdefault(key, make())


def inputs(case: Case) -> list[Tensor]:
    """q, k, v, dout, dlse in the case's dtype (dlse in that of sums)."""
    g = torch.Generator().manual_seed(1)
    shapes = [
        (case.queries, case.heads, case.dim),
        (case.keys, case.kv_heads, case.dim),
        (case.keys, case.kv_heads, case.v_dim),
        (case.queries, case.heads, case.v_dim),
    ]
    tensors = [torch.randn(*s, dtype=torch.float64, generator=g).to(case.dtype) for s in shapes]
    return [*tensors, torch.randn(case.queries, case.heads, dtype=acc_dtype(case.dtype), generator=g)]


def split_keys(case: Case) -> list[np.ndarray]:
    """Key positions of each buffer; among several the first cut is clean and the rest are shuffled."""
    if case.splits == 2:
        return np.split(np.arange(case.keys), [case.keys // 3])
    turn = np.random.default_rng(2).integers(0, case.splits, case.keys)
    return [np.flatnonzero(turn == n) for n in range(case.splits)]


def viewed(x: Tensor, fill: float = torch.nan) -> Tensor:
    """The same values as a view of a larger tensor with more heads and wider rows, NaN around."""
    big = x.new_full((x.shape[0] + 1, x.shape[1] + 2, x.shape[2] + 3), fill)
    view = big[1:, 1:-1, 2:-1]
    view.copy_(x)
    return view


def packed(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values as a received buffer holds them, side by side in one row, last rows of it unused."""
    flat = k.new_full((k.shape[0] + 3, k[0].numel() + v[0].numel()), torch.nan)
    flat[:-3] = torch.cat([k.flatten(1), v.flatten(1)], 1)
    keys, values = flat[:-3].split([k[0].numel(), v[0].numel()], 1)
    return keys.unflatten(1, k.shape[1:]), values.unflatten(1, v.shape[1:])


def blank(*shape: int, dtype: torch.dtype) -> Tensor:
    return viewed(torch.full(shape, torch.nan, dtype=dtype))


def run_forward(kernel: Kernel, case: Case) -> tuple[Tensor, Tensor]:
    """Output and lse [H, M] as the schedule would make them, with what a middle step may not touch checked."""
    q, k, v = inputs(case)[:3]
    mask, score, acc_type = case.made(), case.score(), acc_dtype(case.dtype)
    wide, buffers = case.dtype == acc_type, split_keys(case)
    out = blank(case.queries, case.heads, case.v_dim, dtype=case.dtype)
    lse = torch.full((case.heads + 2, case.queries + 5), torch.nan, dtype=acc_type)[1:-1, 2:-3]
    acc = out if wide else blank(case.queries, case.heads, case.v_dim, dtype=acc_type) if case.splits > 1 else None
    q = viewed(q)
    for n, at in enumerate(buffers):
        facts = facts_of(mask, at)
        blind = ~((facts.key_pos >= facts.lo[:, None]) & (facts.key_pos < facts.hi[:, None])).any(1)
        before = None if n == 0 else (acc.clone(), lse.clone())
        last = n == len(buffers) - 1
        operands = Operands(q, *packed(k[at], v[at]), facts, score)
        kernel.forward(operands, Sums(acc, lse, out if last and not wide else None, first=n == 0))
        assert not lse.isnan().any()
        if before is None:
            assert (lse[:, blind] == -torch.inf).all()
            assert not (out if acc is None else acc)[blind].any()
        elif wide or not last:
            assert torch.equal(acc[blind], before[0][blind]), "rows that see no key of the buffer keep what they had"
        if before is not None:
            assert torch.equal(lse[:, blind], before[1][:, blind])
    return out, lse


def run_backward(kernel: Kernel, case: Case, out: Tensor, lse: Tensor) -> list[Tensor]:
    """dq, dk, dv in the accumulation dtype."""
    q, k, v, dout, dlse = inputs(case)
    mask, score, acc_type = case.made(), case.score(), acc_dtype(case.dtype)
    unseen = lse == -torch.inf
    delta = (dout.to(acc_type) * out.to(acc_type)).sum(-1).t()
    if case.with_lse:
        delta = delta - dlse.t().masked_fill(unseen, 0.0)
    start = 0.25  # kernels add to what is there
    dq, dk, dv = (viewed(torch.full_like(x, start, dtype=acc_type)) for x in (q, k, v))
    q, dout = viewed(q), viewed(dout)
    for at in split_keys(case):
        operands = Operands(q, *packed(k[at], v[at]), facts_of(mask, at), score)
        grads = torch.full((len(at), case.kv_heads, case.dim + case.v_dim), start, dtype=acc_type)
        kernel.backward(
            operands,
            Grads(
                dout, lse, delta.contiguous(), None if case.with_lse else out,
                dq=dq, dk=grads[..., : case.dim], dv=grads[..., case.dim :],
            ),
        )  # fmt: skip
        dk[at], dv[at] = grads.split([case.dim, case.v_dim], -1)
    return [x - start for x in (dq, dk, dv)]


def oracle(case: Case) -> list[Tensor]:
    """out, lse [H, M], dq, dk, dv in float64, of the inputs as the kernel gets them."""
    q, k, v, dout, dlse = (x.double() for x in inputs(case))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    score = case.score()
    out, lse = dense_attention(
        *leaves, case.made(), scale=score.scale, softcap=case.softcap, dropout_p=case.dropout, dropout_seed=77,
        alibi_slopes=None if score.slopes is None else score.slopes.double(),
    )  # fmt: skip
    loss = (out * dout).sum()
    if case.with_lse:
        loss = loss + (lse.masked_fill(lse == -torch.inf, 0.0) * dlse).sum()
    return [out.detach(), lse.detach().t(), *torch.autograd.grad(loss, leaves)]


def able(kernel: Kernel, case: Case) -> bool:
    return kernel.refuses(asked(case)) is None


def asked(case: Case) -> CallSpec:
    q, k, v = inputs(case)[:3]
    return call_spec(q, k, v, case.score(), grads=True, deterministic=True, merges=case.splits > 1)


def fitted(kernel: Kernel, case: Case) -> Case | None:
    """The case as a kernel can do it. Compiled ones have no float64; Triton's interpreter has no bf16 and is slow, so
    that it gets fewer rows, and test_triton.py takes small tiles instead of large tensors."""
    if kernel.name.startswith(("triton", "native")) and case.dtype == torch.float64:
        case = replace(case, dtype=torch.float32)
    slow = case.queries > 70 or case.heads > 6
    if kernel.name == "triton_tf32" or (kernel.name == "triton" and (slow or case.dtype == torch.bfloat16)):
        return None
    if kernel.name == "triton":
        case = replace(case, queries=case.queries - 25, keys=case.keys - 25)
    return case if able(kernel, case) else None


def pairs(cases: list[Case]) -> list[object]:
    """Each kernel with each case that it can do."""
    found = dict.fromkeys((kernel, fitted(kernel, case)) for kernel in (*KERNELS, *OLDER) for case in cases)
    made = [(k, pytest.param(k, case, id=f"{k.name}-{named(case)}")) for k, case in found if case]
    # Triton's interpreter takes a second for what others do in some milliseconds
    slow, quick = ([p for k, p in made if (k.name == "triton") == interpreted] for interpreted in (True, False))
    return quick + some(slow, 3)


@pytest.mark.parametrize(("kernel", "case"), pairs(small_cases() + LARGE))
def test_forward_and_backward_equal_the_oracle(kernel, case) -> None:
    out, lse = run_forward(kernel, case)
    expected = oracle(case)
    unseen = expected[1] == -torch.inf
    assert torch.equal(lse == -torch.inf, unseen)
    assert not out[unseen.t()].any()
    grads = run_backward(kernel, case, out, lse)
    assert not grads[0][unseen.t()].any()
    got = [out, lse.masked_fill(unseen, 0.0), *grads]
    expected[1] = expected[1].masked_fill(unseen, 0.0)
    limit = LIMIT[case.dtype]
    if case.dtype in LOW:
        limit *= 1.0 if not case.dropout else 1.3  # delta is made of the rounded output, which dropout makes larger
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, expected, strict=True):
        assert relative_rms(a, b) <= limit, f"{name} is off by {relative_rms(a, b)}"


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *LOW], ids=str)
def test_no_rows_and_no_keys(kernel, dtype) -> None:
    case = Case(dtype=dtype)
    q, k, v = inputs(case)[:3]
    if (able := fitted(kernel, case)) is None or able.dtype != dtype:
        none = (torch.float64, torch.float16)
        known = {"native": none, "aten": LOW, "triton": (torch.float64, torch.bfloat16), "triton_tf32": DTYPES}
        assert dtype in known[kernel.name]
        return
    acc = acc_dtype(dtype)
    mask, none = Mask([70]), np.zeros(0, np.int64)
    out, lse = torch.full_like(q, torch.nan), torch.full((4, 70), torch.nan, dtype=acc)
    wide, score = dtype == acc, case.score()
    nothing = Operands(q, k[:0], v[:0], facts_of(mask, none), score)
    kernel.forward(nothing, Sums(out if wide else None, lse, None if wide else out, first=True))
    assert not out.any() and (lse == -torch.inf).all()
    held = (torch.rand(70, 4, 8, dtype=acc), torch.rand(4, 70, dtype=acc))
    total, sums = held[0].clone(), held[1].clone()
    kernel.forward(nothing, Sums(total, sums, None if wide else out, first=False))
    assert torch.equal(sums, held[1]) and torch.equal(total, held[0])
    assert torch.equal(total if dtype == acc else out, held[0].to(dtype))
    nobody = StepFacts(*(torch.zeros(0, dtype=torch.int32) for _ in range(3)), torch.arange(70, dtype=torch.int32),
                   lambda bm, bn: tile_tables(none, none, np.arange(70), bm, bn),
                   lambda: segments(none, none, np.arange(70)), memo())  # fmt: skip
    grads = [torch.zeros_like(x, dtype=acc) for x in (q[:0], k, v)]
    empty = Operands(q[:0], k, v, nobody, score)
    kernel.forward(empty, Sums(total[:0], sums[:, :0], None, first=True))
    kernel.backward(empty, Grads(q[:0], sums[:, :0], sums[:, :0], q[:0], *grads))
    assert not any(x.any() for x in grads)


@pytest.mark.parametrize("kernel", [k for k in KERNELS if "triton" not in k.name], ids=lambda k: k.name)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("row", [3, 640])
def test_what_is_not_finite_reaches_those_who_see_it_and_no_others(kernel, bad, where, row) -> None:
    """Row 640 lies in a full tile for the last queries and in partial and empty ones for others."""
    case = Case("causal", 700, 1300, 1, 1, dtype=torch.float32, v_dim=8)
    q, k, v, dout, _ = inputs(case)
    (k if where == "k" else v)[row, 0, 2] = bad
    facts = facts_of(case.made(), np.arange(1300))
    sees = (facts.lo <= row) & (row < facts.hi)
    out, lse = torch.full((700, 1, 8), torch.nan), torch.full((1, 700), torch.nan)
    kernel.forward(Operands(q, k, v, facts, case.score()), Sums(out, lse, None, first=True))
    clean = inputs(case)
    want, want_lse = torch.empty_like(out), torch.empty_like(lse)
    kernel.forward(Operands(*clean[:3], facts, case.score()), Sums(want, want_lse, None, first=True))
    assert torch.isfinite(out[~sees]).all() and torch.allclose(out[~sees], want[~sees], atol=1e-5)
    if where == "v":
        assert not torch.isfinite(out[sees][:, 0, 2]).any()
        other = [c for c in range(8) if c != 2]
        assert torch.allclose(out[..., other], want[..., other], atol=1e-5)
    elif bad != bad:
        assert out[sees].isnan().all() and lse[0, sees].isnan().all()
    else:  # a score of +inf makes NaN, one of -inf leaves the key out
        drop = q[:, 0, 2] * bad < 0
        assert out[sees & ~drop].isnan().all()
        assert torch.isfinite(out[sees & drop]).all()
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    delta = (dout * torch.nan_to_num(out)).sum(-1).t().contiguous()
    kernel.backward(Operands(q, k, v, facts, case.score()), Grads(dout, lse, delta, None, *grads))
    assert torch.isfinite(grads[0][~sees]).all()
    if bad != bad:
        assert grads[0][sees].isnan().any(-1).all()


@pytest.mark.parametrize("size", [1e2, 3e4, 1e15])
@pytest.mark.parametrize("kernel", [k for k in (*KERNELS, *OLDER) if "triton" not in k.name], ids=lambda k: k.name)
def test_large_scores_lose_no_row(kernel, size) -> None:
    """Where one key has all the weight, it has it whatever the size of its score, forward and backward."""
    case = Case(dtype=torch.float32, dim=16, v_dim=16, heads=2, kv_heads=2)
    q, k, v, dout, _ = inputs(case)
    q, k = q * size, k * size
    facts = facts_of(case.made(), np.arange(70))

    def run(by: Kernel, *tensors: Tensor) -> list[Tensor]:
        a, b, c, d = tensors
        out, lse = torch.full_like(d, torch.nan), torch.full((2, 70), torch.nan, dtype=d.dtype)
        x = Operands(a, b, c, facts, case.score())
        by.forward(x, Sums(out, lse, None, first=True))
        grads = [torch.zeros_like(y) for y in (a, b, c)]
        by.backward(x, Grads(d, lse, (d * out).sum(-1).t().contiguous(), out, *grads))
        return [out, lse, grads[2]]

    exact = run(Reference(), *(x.double() for x in (q, k, v, dout)))
    plain, found = run(Reference(), q, k, v, dout), run(kernel, q, k, v, dout)
    for name, got, own, wanted in zip(("out", "lse", "dv"), found, plain, exact, strict=True):
        assert relative_rms(got, wanted) <= 2 * relative_rms(own, wanted) + 1e-6, name


@dataclass
class Counted:
    """Tiles that a blockwise call computed, as (query tile, first key row)."""

    tiles: list[tuple[int, int]]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    result = Counted([])
    scores = blockwise._Walk.scores

    def counting(self, i, keys, scaled, seen):
        result.tiles.append((i, keys.start))
        return scores(self, i, keys, scaled, seen)

    monkeypatch.setattr(blockwise._Walk, "scores", counting)
    return result


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("mask", ["causal", "full", "packed", "window", "band"])
def test_blockwise_computes_the_tiles_of_the_table_and_no_empty_one(mask, splits, counted, monkeypatch) -> None:
    monkeypatch.setattr(blockwise, "QUERY_ROWS", 32)
    monkeypatch.setattr(blockwise, "KEY_ROWS", 16)
    case = Case(mask, 200, 200 if mask == "packed" else 330, 2, 1, splits=splits, dtype=torch.float64)
    kernel = next(k for k in KERNELS if k.name == "blockwise")
    q, k, v, dout, _ = inputs(case)
    for n, at in enumerate(np.array_split(np.arange(case.keys), splits)):
        facts = facts_of(case.made(), at)
        seen = ((facts.key_pos >= facts.lo[:, None]) & (facts.key_pos < facts.hi[:, None])).numpy()
        table = facts.tiles(16, 16)
        wanted = {(i, int(t) * 16) for i in range(len(table.begin)) for t in range(table.begin[i], table.end[i])}
        for i, first in wanted:
            assert seen[table.rows[i] : table.rows[i + 1], first : first + 16].any(), "an empty tile is not visited"
        total, lse = torch.zeros_like(dout), torch.full((2, 200), -torch.inf, dtype=torch.float64)
        del counted.tiles[:]
        operands = Operands(q, k[at], v[at], facts, case.score())
        kernel.forward(operands, Sums(total, lse, None, first=n == 0))
        assert sorted(counted.tiles) == sorted(wanted)
        del counted.tiles[:]
        grads = [torch.zeros_like(x) for x in (q, k[at], v[at])]
        kernel.backward(operands, Grads(dout, lse, lse, None, *grads))
        assert sorted(counted.tiles) == sorted(wanted)
        pairs_seen, pairs_visited = seen.sum(), len(wanted) * 16 * 16
        assert not wanted or pairs_visited <= pairs_seen + 2 * 16 * 16 * len(table.begin) + 16 * 200


@pytest.mark.parametrize("mask", ["window", "band"])
def test_full_tiles_read_no_bound(mask, monkeypatch) -> None:
    monkeypatch.setattr(blockwise, "KEY_ROWS", 16)
    read = []
    seen = blockwise._Walk.seen
    monkeypatch.setattr(blockwise._Walk, "seen", lambda self, i, keys: read.append((i, keys)) or seen(self, i, keys))
    case = Case(mask, 700, 1300, 1, 1)
    out, lse = run_forward(next(k for k in KERNELS if k.name == "blockwise"), case)
    table = facts_of(case.made(), np.arange(1300)).tiles(512, 16)
    partial = int((table.end - table.begin - (table.full_end - table.full_begin)).sum())
    assert len(read) == partial


@pytest.mark.parametrize("case", [c for c in LARGE if c.dtype == torch.float32 and c.mask != "bounds"], ids=named)
def test_aten_computes_the_attended_pairs_and_nothing_else(case, monkeypatch) -> None:
    """Rectangles and causal squares whose areas sum to the area of the step, and no tile besides."""
    area = []

    def counting(method):
        def counted(self, q, k, *others):
            n, m = q.shape[0], k.shape[0]
            causal = next(x for x in others if isinstance(x, varlen.VarlenCall)).causal
            assert not causal or n == m
            area.append(n * (n + 1) // 2 if causal else n * m)
            return method(self, q, k, *others)

        return counted

    for method in ("attend", "differentiate"):
        monkeypatch.setattr(Aten, method, counting(getattr(Aten, method)))
    monkeypatch.setattr(blockwise._Walk, "__init__", None)  # a tile would fail
    kernel = next(k for k in KERNELS if k.name == "aten")
    out, lse = run_forward(kernel, case)
    assert sum(area) == case.made().area()
    run_backward(kernel, case, out, lse)
    assert sum(area) == 2 * case.made().area()


def test_heads_far_into_a_model_drop_their_own_pairs() -> None:
    """A share of the heads counts dropout from the model's first head, in every kernel alike."""
    case = Case(dropout=0.5)
    q, k, v = inputs(case)[:3]
    facts = facts_of(case.made(), np.arange(70))
    results = []
    for kernel in (k for k in KERNELS if able(k, case)):
        whole, part = torch.empty_like(q), torch.empty_like(q[:, :2])
        lse = torch.empty(4, 70, dtype=torch.float64)
        kernel.forward(Operands(q, k, v, facts, case.score()), Sums(whole, lse, None, first=True))
        score = replace(case.score(), first_head=2)
        kernel.forward(Operands(q[:, 2:], k[:, 1:], v[:, 1:], facts, score), Sums(part, lse[2:], None, first=True))
        torch.testing.assert_close(part, whole[:, 2:])
        results.append(whole)
    assert len(results) >= 2
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])
    assert dropout.words(torch.arange(3), range(2, 4), 1, side=0).shape == (2, 3)


CALL = CallSpec("cpu", 0, torch.float32, heads=2, kv_heads=2, dim=8, v_dim=8)


def test_kernels_are_chosen_by_name_or_by_what_they_can() -> None:
    for kernel in KERNELS:
        if kernel.refuses(CALL) is None:
            assert choose(kernel.name, CALL) is kernel
    for call in (CALL, replace(CALL, dtype=torch.bfloat16), replace(CALL, softcap=True)):
        assert choose("auto", call).name == "native"
    assert choose("auto", replace(CALL, dim=1025, v_dim=1025)).name == "aten"
    with pytest.raises(NotImplementedError, match="native has head dims up to 1024, got 1025 and 8"):
        choose("native", replace(CALL, dim=1025))
    assert choose("auto", replace(CALL, dtype=torch.float64)).name == "aten"
    assert choose("auto", replace(CALL, dtype=torch.float64, softcap=True)).name == "blockwise"
    assert choose("auto", replace(CALL, dtype=torch.float16)).name == "blockwise"


def test_without_the_extension_kernels_in_python_serve(monkeypatch) -> None:
    monkeypatch.setattr(native, "missing", lambda: "seqpar._C was not built")
    assert choose("auto", CALL).name == "aten"
    assert choose("auto", replace(CALL, dtype=torch.bfloat16)).name == "blockwise"
    with pytest.raises(NotImplementedError, match="seqpar._C was not built"):
        choose("native", CALL)


def test_the_instruction_sets_are_the_extension_s() -> None:
    assert 0 <= native.ops().isa() < len(ISAS)


def test_what_a_kernel_lacks_is_named() -> None:
    with pytest.raises(ValueError, match="kernel must be auto or one of .*blockwise.*got 'magic'"):
        choose("magic", CALL)
    with pytest.raises(NotImplementedError, match="blockwise has no torch.int32"):
        choose("blockwise", replace(CALL, dtype=torch.int32))
    with pytest.raises(NotImplementedError, match="aten has no softcap"):
        choose("aten", replace(CALL, softcap=True))
