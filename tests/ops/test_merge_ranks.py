"""`merge_ranks` against attention over all keys on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import seqpar
from seqpar import Comm, Layout, LocalComm, Mask, Plan
from seqpar.launch import run_processes, run_threads
from seqpar.ops.attention.merging import part_of
from seqpar.testing.oracle import ERROR_GROWTH, dense_attention, relative_rms

T, H, D = 3, 4, 5


def parts_of(size: int, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    """Outputs and lse of each rank's keys, and of all keys; the last of several ranks sees nothing, and has NaN."""
    g = torch.Generator().manual_seed(size)
    scores = 9 * torch.randn(T, H, 24, generator=g, dtype=torch.float64)
    scores[1, 2] = -torch.inf  # a row that sees no key of any rank
    values = torch.randn(H, 24, D, generator=g, dtype=torch.float64)
    keys = torch.arange(24) % max(1, size - 1)
    outs, lses = [], []
    for rank in range(size):
        own = scores.masked_fill(keys != rank, -torch.inf)
        outs.append(torch.einsum("thn,hnd->thd", own.softmax(-1), values).to(dtype))
        lses.append(own.logsumexp(-1).to(dtype))
    whole = torch.einsum("thn,hnd->thd", scores.softmax(-1).nan_to_num(0.0), values)
    return outs, lses, whole, scores.logsumexp(-1)


def merged(comm: Comm, outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor, int]:
    out, lse = seqpar.merge_ranks(outs[comm.rank], lses[comm.rank], comm)
    return out, lse, comm.stats.bytes_sent


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_equals_one_rank(size: int) -> None:
    outs, lses, whole, total = parts_of(size)
    results = run_threads(size, merged, outs, lses)
    for out, lse, sent in results:
        torch.testing.assert_close(out.nan_to_num(0.0) if size == 1 else out, whole, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(lse, total, rtol=1e-13, atol=1e-13)
        assert out.equal(results[0][0]) or size == 1
        assert sent == (size - 1) * T * H * (D + 1) * 8


def test_processes_get_equal_bits() -> None:
    outs, lses, _, _ = parts_of(3, torch.float32)
    results = run_processes(3, merged, outs, lses)
    assert all(a.equal(b) for other in results for a, b in zip(results[0][:2], other[:2]))


def over_ranks(comm: Comm, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of all queries to all keys, of which each rank has a share, in the dtype of q."""
    own = slice(*(len(k) * n // comm.size for n in (comm.rank, comm.rank + 1)))
    keys = own.stop - own.start
    mask = Mask.from_bounds([0] * len(q), [keys] * len(q), kv_tokens=keys)
    plan = Plan(mask, Layout.contiguous(len(q), 1), kv_layout=Layout.contiguous(keys, 1))
    out, lse = part_of(q, k[own], v[own], plan)
    assert out.dtype == lse.dtype == torch.float32
    return seqpar.merge_ranks(out, lse, comm)[0].to(q.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("keys", [1, 37, 300])
def test_heads_of_a_group_are_rows_of_one_key_head(keys: int, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(n, h, d).to(dtype) for n, h, d in ((1, 8, 33), (keys, 2, 33), (keys, 2, 17)))

    def plan(rows: int) -> Plan:
        mask = Mask.from_bounds([0] * rows, [keys] * rows, kv_tokens=keys)
        return Plan(mask, Layout.contiguous(rows, 1), kv_layout=Layout.contiguous(keys, 1))

    out, lse = part_of(q.view(2, 4, 33).transpose(0, 1), k, v, plan(4))
    expected, total = part_of(q, k, v, plan(1))
    assert out.transpose(0, 1).reshape(1, 8, 17).equal(expected) and lse.t().reshape(1, 8).equal(total)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_more_ranks_round_no_more(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 2, 64, generator=g).to(dtype) for n in (64, 2048, 2048))
    every = Mask.from_bounds([0] * 64, [2048] * 64, kv_tokens=2048)
    exact, _ = dense_attention(*(x.double() for x in (q, k, v)), every)
    error = {n: relative_rms(run_threads(n, over_ranks, q, k, v)[0], exact) for n in (1, 2, 3, 4, 8)}
    assert max(error.values()) <= ERROR_GROWTH * error[1], error


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda out, lse: (out, lse[:2]), ValueError, r"lse \[T, H\]"),
        (lambda out, lse: (out.to("meta"), lse), ValueError, "on one device, got .* on meta and .* on cpu"),
        (lambda out, lse: (out, lse.half()), TypeError, "float32 or float64"),
        (lambda out, lse: (out.long(), lse), TypeError, "floating tensor"),
        (lambda out, lse: (out.clone().requires_grad_(), lse), NotImplementedError, "no backward"),
    ],
)
def test_errors_reach_all_ranks(change: Any, error: type[Exception], message: str) -> None:
    outs, lses, _, _ = parts_of(2)

    def rank(comm: LocalComm) -> None:
        given = outs[comm.rank], lses[comm.rank]
        kind = error if comm.rank == 0 else ValueError
        with pytest.raises(kind, match=message):
            seqpar.merge_ranks(*(change(*given) if comm.rank == 0 else given), comm)

    run_threads(2, rank)


def test_ranks_with_other_rows_are_named() -> None:
    def rank(comm: LocalComm) -> None:
        rows = 2 + comm.rank
        with pytest.raises(ValueError, match="ranks differ in shape"):
            seqpar.merge_ranks(torch.zeros(rows, 1, 4), torch.zeros(rows, 1), comm)

    run_threads(2, rank)


def test_what_a_rank_says_of_rows_that_see_nothing_is_ignored_on_one_rank_too() -> None:
    out, lse = torch.full((3, 2, 4), torch.nan), torch.zeros(3, 2)
    out[1], lse[0], lse[2] = 1.0, -torch.inf, -torch.inf
    merged, total = seqpar.merge_ranks(out, lse, LocalComm())
    assert torch.equal(merged, out.nan_to_num(0.0)) and torch.equal(total, lse)
