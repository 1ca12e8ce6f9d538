"""Property 10: more ranks do not make attention less precise.

Relative RMS error against float64, mean over seeds, per tensor, is at most `ERROR_GROWTH` times that of the same kernel
on one rank. In bf16 and fp16 the one rounding of each result outweighs all else, so the ratio is 1 to four digits; it
would be 1.2 and more if partial results were rounded to the dtype anywhere on their way, as the control shows.

Under ``accuracy="fast"`` kernels of other libraries round each step's part of a result. Parts weigh at most 1 together,
so their errors add up to that of one rounding, and the result is rounded once more: sqrt(2), of which `ROUNDED_PARTS`
is the limit.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

import seqpar
from seqpar import Layout, Mask, Plan
from seqpar.comm import Comm
from seqpar.kernels import KERNELS, blockwise, preference
from seqpar.kernels.vendor import Segmented
from seqpar.testing import ERROR_GROWTH, dense_attention, relative_rms, run_threads
from tests.kernels.test_vendor import Flash
from tests.ops.cases import joined

LENGTHS = [200, 1, 55, 32]
HEADS, KV_HEADS, DIM = 4, 2, 32
SEEDS = range(5)
NAMES = ("out", "dq", "dk", "dv")
MASK = Mask(LENGTHS)
TOKENS = MASK.tokens

# In float32 a ring's hop is a rounding of the running lse and output like any other (an lse of 6 is known to 2.4e-7,
# and 16 hops over all rows add up). What has one or few stages grows little: only keys' gradients are sums of what up
# to 16 ranks have computed and rounded (dv by 1.078 over 40 seeds on an AMD EPYC, where one rank's is 2.1e-7).
GROWTH_OF_A_RING_IN_FLOAT32, GROWTH_IN_FLOAT32 = 1.3, 1.1
ROUNDED_PARTS = 1.5  # by which errors may grow under "fast"


def plans(ranks: int) -> dict[str, Plan]:
    """Layouts, transports and widths, with few steps and with as many as there are ranks."""
    zigzag, striped, contiguous = (
        Layout.zigzag(LENGTHS, ranks),
        Layout.striped(TOKENS, ranks),
        Layout.contiguous(TOKENS, ranks),
    )
    return {
        "zigzag-fetch-3-stages": Plan(MASK, zigzag, stage_bytes=80 * 4 * KV_HEADS * DIM * 2),
        "zigzag-nodes-3-stages": Plan(MASK, zigzag, stage_bytes=80 * 4 * KV_HEADS * DIM * 2, node=max(2, ranks // 2)),
        "striped-ring": Plan(MASK, striped, transport="ring"),
        "contiguous-gather": Plan(MASK, contiguous, transport="gather"),
        "ulysses": Plan(MASK, contiguous, ulysses=ranks),
        "ulysses-2-ring": Plan(MASK, zigzag, ulysses=2, transport="double_ring"),
    }


@cache
def inputs(seed: int, dtype: torch.dtype) -> list[Tensor]:
    """Global q, k, v, dout."""
    g = torch.Generator().manual_seed(seed)
    shapes = [(TOKENS, h, DIM) for h in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [torch.randn(*s, dtype=torch.float64, generator=g).to(dtype) for s in shapes]


@cache
def oracle(seed: int, dtype: torch.dtype) -> list[Tensor]:
    """out, dq, dk, dv in float64, of the inputs as rounded."""
    q, k, v, dout = (x.double().requires_grad_() for x in inputs(seed, dtype))
    out, _ = dense_attention(q, k, v, MASK)
    return [out.detach(), *torch.autograd.grad((out * dout.detach()).sum(), (q, k, v))]


def run_rank(comm: Comm, plan: Plan, dtype: torch.dtype, options: dict[str, str]) -> list[list[Tensor]]:
    """This rank's out, dq, dk, dv of every seed."""
    results = []
    for seed in SEEDS:
        q, k, v, dout = (seqpar.shard(x, plan, comm.rank).clone() for x in inputs(seed, dtype))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = seqpar.attention(*leaves, plan, comm, **options)
        out.backward(dout)
        assert all(x.grad.dtype == dtype for x in leaves) and out.dtype == dtype
        results.append([out.detach(), *(x.grad for x in leaves)])
    return results


def errors(plan: Plan, dtype: torch.dtype, **options: str) -> np.ndarray:
    """Relative RMS error of each tensor, mean over seeds."""
    for seed in SEEDS:
        inputs(seed, dtype), oracle(seed, dtype)  # made before the threads ask
    by_rank = run_threads(plan.ranks, run_rank, plan, dtype, options)
    found = []
    for n, seed in enumerate(SEEDS):
        row = []
        for t, expected in enumerate(oracle(seed, dtype)):
            row.append(relative_rms(joined([results[n][t] for results in by_rank], plan.layout), expected))
        found.append(row)
    return np.mean(found, axis=0)


@cache
def errors_of_one_rank(dtype: torch.dtype, **options: str) -> np.ndarray:
    return errors(Plan(MASK, Layout.contiguous(TOKENS, 1)), dtype, **options)


def check(plan: Plan, dtype: torch.dtype, limit: float) -> None:
    one, several = errors_of_one_rank(dtype), errors(plan, dtype)
    assert (one > 0).all()
    for name, before, after in zip(NAMES, one, several, strict=True):
        assert after <= limit * before, f"the error of {name} is {after / before:.4f} times that of one rank"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ranks", [16, 2, 4, 8])
@pytest.mark.parametrize("name", list(plans(2)))
@pytest.mark.sampled(16)
def test_more_ranks_make_no_larger_error(name, ranks, dtype) -> None:
    plan = plans(ranks)[name]
    if name.endswith("stages"):
        assert len(plan.steps(0, row_bytes=2 * KV_HEADS * DIM * 2)) >= 3
    check(plan, dtype, ERROR_GROWTH)


@pytest.mark.parametrize("ranks", [4, 16])
@pytest.mark.parametrize("name", list(plans(2)))
@pytest.mark.sampled(8)
def test_more_ranks_make_no_larger_error_in_float32(name, ranks) -> None:
    check(plans(ranks)[name], torch.float32, GROWTH_OF_A_RING_IN_FLOAT32 if "ring" in name else GROWTH_IN_FLOAT32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.sampled(2)
def test_partial_results_rounded_on_their_way_would_be_seen(dtype, monkeypatch) -> None:
    merge = blockwise.merge
    monkeypatch.setattr(
        blockwise, "merge", lambda out, lse, part, part_lse: merge(out.to(dtype), lse, part.to(dtype), part_lse)
    )
    several = errors(plans(8)["striped-ring"], dtype, kernel="blockwise")
    assert several[0] > 1.15 * errors_of_one_rank(dtype, kernel="blockwise")[0] > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_one_rank_rounds_no_more_than_once(dtype) -> None:
    """The output's error is that of the exact output rounded to the dtype; of gradients, little more."""
    rounded = np.mean([[relative_rms(x.to(dtype), x) for x in oracle(seed, dtype)] for seed in SEEDS], axis=0)
    one = errors_of_one_rank(dtype, kernel="blockwise")
    assert one[0] <= 1.01 * rounded[0] and one[3] <= 1.01 * rounded[3]
    assert (one[1:3] <= 1.5 * rounded[1:3]).all(), (
        "delta is made of the rounded output, as in every kernel that saves it"
    )


@pytest.fixture
def library(monkeypatch) -> Flash:
    """The stand-in of a library that rounds its results, the first in the CPU's order."""
    flash = Flash()
    monkeypatch.setattr(preference, "KERNELS", (Segmented(flash), *KERNELS))
    monkeypatch.setattr(preference, "ON_CPU", (flash.name, *preference.ON_CPU))
    return flash


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ranks", [8, 2, 16])
@pytest.mark.parametrize("name", ["zigzag-fetch-3-stages", "zigzag-nodes-3-stages", "contiguous-gather", "ulysses"])
@pytest.mark.sampled(30)
def test_fast_rounds_each_part_and_no_more(name, ranks, dtype, library) -> None:
    plan = plans(ranks)[name]
    one = errors_of_one_rank(dtype, accuracy="fast")
    library.calls.clear()
    errors(plan, dtype)
    served = len(library.calls)
    assert served == 0 or not plan.merges, "exact takes it where nothing is merged"
    fast = errors(plan, dtype, accuracy="fast")
    assert len(library.calls) > served
    assert (fast <= ROUNDED_PARTS * one).all(), f"{fast / one} times the errors of one rank"
    if plan.merges:
        assert fast[0] > ERROR_GROWTH * one[0], "the parts of the output are rounded"
    else:
        assert fast[0] == one[0]


def test_fast_is_exact_to_the_bit_where_auto_takes_no_library() -> None:
    plan = plans(2)["zigzag-fetch-3-stages"]
    for dtype in (torch.bfloat16, torch.float64):
        runs = [run_threads(2, run_rank, plan, dtype, {"accuracy": accuracy}) for accuracy in ("exact", "fast")]
        for a, b in zip(*runs, strict=True):
            assert all(
                torch.equal(x, y) for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True)
            )
