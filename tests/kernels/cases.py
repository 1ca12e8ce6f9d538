"""Cases of attention on one device, run through a kernel and through the oracle."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import numpy as np
import torch
from torch import Tensor

from seqpar.facts.mask import Mask
from seqpar.kernels import (
    CallSpec,
    Grads,
    Kernel,
    Operands,
    Score,
    StepFacts,
    Sums,
    acc_dtype,
    call_spec,
)  # fmt: skip
from seqpar.kernels.blockwise import attend
from seqpar.plan.steps import BandBounds, StepBand
from seqpar.testing import dense_attention, relative_rms
from tests.cases import random_tree

LOW = (torch.bfloat16, torch.float16)
SHORT = (torch.float32, *LOW)
ENDING = (("tree", 1), ("ends", 3))  # masks whose keys end, and numbers of buffers
BANDS = ("sinks", "joined")  # masks of two bands


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
        if self.mask == "ends":
            lo, until = rng.integers(0, m // 2, n), rng.integers(0, m + 1, m)
            return Mask.from_bounds(lo, np.minimum(m, lo + rng.integers(0, m, n)), until=until, kv_tokens=m)
        if self.mask == "tree":  # the last tokens of a tree are queries
            lo, hi, until, _ = random_tree(m, rng, m // 10)
            return Mask.from_bounds(lo[m - n :], hi[m - n :], until=until, kv_tokens=m)
        if (
            self.mask == "joined"
        ):  # two bands: the first keys; and a prompt with answers of 9 tokens, without those keys
            rows, first, prompt = np.arange(n), np.minimum(4, np.arange(n) + 1), n // 3
            until = np.where(rows < prompt, n, np.minimum(n, prompt + (rows - prompt) // 9 * 9 + 9))
            return Mask.from_bounds(0 * rows, first) | Mask.from_bounds(first, rows + 1, until=until)
        if self.mask == "sinks":  # two bands, in which no key ends
            return Mask([n], window=(m // 5, None), sink_tokens=4, kv_lengths=[m])
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
        for mask in ("causal", "full", "packed", "window", "band", "bounds", "tree", "ends")
        for splits in (1, 2, 3, 4)
    ]
    cases += [replace(base, mask=m, splits=s, heads=6, kv_heads=2, **o) for m, s in ENDING for o in OPTIONS]
    cases += [replace(base, mask=m, splits=s, dtype=t, dim=32, v_dim=32) for m, s in ENDING for t in SHORT]
    cases += [replace(base, mask=m, splits=s) for m in BANDS for s in (1, 3)]
    cases += [replace(base, heads=h, kv_heads=kv, splits=2) for h, kv in ((1, 1), (5, 5), (6, 1), (28, 7))]
    cases += [replace(base, dim=d, v_dim=dv, splits=2) for d, dv in ((8, 4), (4, 8), (1, 3))]
    cases += [replace(base, dim=576, v_dim=512, splits=2, dtype=t) for t in (torch.float32, torch.bfloat16)]
    cases += [
        replace(base, keys=m, mask=mask, splits=s) for m in (30, 95) for mask in ("causal", "full") for s in (1, 2)
    ]
    cases += [replace(base, splits=2, with_lse=True)]
    cases += [replace(base, splits=s, mask="bounds", **o) for s in (1, 3) for o in OPTIONS]
    cases += [replace(base, dtype=t, splits=s, dim=32, v_dim=32) for t in SHORT for s in (1, 4)]
    cases += [replace(base, dtype=t, splits=3, dim=32, v_dim=32, mask="packed", **OPTIONS[-1]) for t in LOW]
    for scale in (0.0, -0.2):
        cases += [replace(base, scale=scale, mask=m, splits=s) for m in ("causal", "full") for s in (1, 2)]
        cases += [replace(base, scale=scale, mask="packed", dtype=t, dim=32, v_dim=32) for t in SHORT]
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
        ("tree", 1300, 2, 1, torch.float32, 2, {}),
        ("tree", 1300, 2, 2, torch.bfloat16, 1, {"softcap": 2.0, "dropout": 0.1}),
        ("ends", 1300, 1, 1, torch.float64, 2, {}),
    )
]


def named(case: Case) -> str:
    base = Case()
    fields = (f"{n}={getattr(case, n)}" for n in case.__dataclass_fields__ if getattr(case, n) != getattr(base, n))
    return ",".join(fields).replace("torch.", "") or "base"


def facts_of(mask: Mask, key_pos: np.ndarray, rows: np.ndarray | None = None, band: int = 0) -> StepFacts:
    """All queries of a mask, or some of them, over a buffer of some keys, in one band."""
    rows = np.arange(mask.tokens) if rows is None else rows
    bounds = BandBounds(*mask.bounds(rows, band=band), mask.bands[band].until)
    step = StepBand.of(mask.key_positions(rows), bounds, key_pos)
    put = [None if x is None else torch.from_numpy(x).to(torch.int32)
           for x in (step.at, step.lo, step.hi, step.pos, step.until)]  # fmt: skip
    return StepFacts(*put, step.tiles, lambda: step.segments, memo())


def seen_by(facts: StepFacts) -> Tensor:
    """Which queries see which keys of the buffer, bool [M, N]."""
    seen = (facts.key_pos >= facts.lo[:, None]) & (facts.key_pos < facts.hi[:, None])
    return seen if facts.until is None else seen & (facts.pos[:, None] < facts.until)


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


def run_forward(kernel: Kernel, case: Case, top: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Output and lse [H, M] as the schedule would make them, with what a middle step may not touch checked.

    top [H, M]: raised to the rows' largest scores.
    """
    q, k, v = inputs(case)[:3]
    mask, score, acc_type = case.made(), case.score(), acc_dtype(case.dtype)
    wide = case.dtype == acc_type
    out = blank(case.queries, case.heads, case.v_dim, dtype=case.dtype)
    lse = torch.full((case.heads + 2, case.queries + 5), torch.nan, dtype=acc_type)[1:-1, 2:-3]
    launches = list(product(split_keys(case), range(len(mask.bands))))
    acc = out if wide else blank(case.queries, case.heads, case.v_dim, dtype=acc_type) if len(launches) > 1 else None
    q = viewed(q)
    for n, (at, band) in enumerate(launches):
        facts = facts_of(mask, at, band=band)
        blind = ~seen_by(facts).any(1)
        before = None if n == 0 else (acc.clone(), lse.clone())
        last = n == len(launches) - 1
        operands = Operands(q, *packed(k[at], v[at]), facts, score)
        attend(kernel, operands, Sums(acc, lse, out if last and not wide else None, first=n == 0, top=top))
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
    for at, band in product(split_keys(case), range(len(mask.bands))):
        operands = Operands(q, *packed(k[at], v[at]), facts_of(mask, at, band=band), score)
        grads = torch.cat([dk[at], dv[at]], -1)
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


@cache
def asked(case: Case) -> CallSpec:
    q, k, v = inputs(case)[:3]
    mask = case.made()
    merges = case.splits > 1 or len(mask.bands) > 1
    spec = call_spec(q, k, v, case.score(), grads=True, deterministic=True, merges=merges)
    return replace(spec, until=mask.has_until)


def fitted(kernel: Kernel, case: Case) -> Case | None:
    """The case as a kernel can do it.

    Compiled ones have no float64; Triton's interpreter has no bf16 and is slow, so that it gets fewer rows and heads,
    and test_triton.py takes small tiles instead of large tensors.
    """
    if kernel.name.startswith(("triton", "native")) and case.dtype == torch.float64:
        case = replace(case, dtype=torch.float32)
    slow = case.queries > 70 or case.heads > 6
    if kernel.name == "triton_tf32" or (kernel.name == "triton" and (slow or case.dtype == torch.bfloat16)):
        return None
    if kernel.name == "triton":
        case = replace(case, queries=case.queries - 25, keys=case.keys - 25)
        if case.kv_heads == 2:
            case = replace(case, heads=case.heads // 2, kv_heads=1)
    return case if able(kernel, case) else None


def equals_oracle(kernel: Kernel, case: Case) -> None:
    """Assert that forward and backward are those of the oracle."""
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
        if kernel.accuracy_loss(asked(case)) is not None:
            limit *= 1.6  # several rounded parts: each has an error as that of one rounding, and so has their sum
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, expected, strict=True):
        assert relative_rms(a, b) <= limit, f"{name} is off by {relative_rms(a, b)}"
