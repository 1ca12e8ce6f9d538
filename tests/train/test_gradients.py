"""Sums over ranks, gradients, norms, evaluation losses and statistics over tokens, on threads and processes."""

from __future__ import annotations

import gc
import itertools
import math
import time
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from seqpar import native
from seqpar.comm import Comm, LocalComm, PeerError
from seqpar.testing import run_processes, run_threads
from seqpar.train import (
    Mean,
    all_sum,
    check_model,
    clip_grad_norm,
    cross_entropy,
    grad_norm,
    gradients,
    linear_cross_entropy,
    sync_gradients,
    token_log_probs,
    token_mean,
)
from seqpar.train import sums as summing

SHARED = pytest.mark.skipif(native.missing() is not None, reason=native.missing() or "")
SHAPES = [(3, 5), (1,), (), (0, 4), (7, 2, 2), (64,)]


def parameters(dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32, torch.bfloat16)) -> list[nn.Parameter]:
    """Parameters of several shapes and dtypes, one of them not contiguous, the last frozen."""
    found = [nn.Parameter(torch.zeros(s, dtype=dtypes[i % len(dtypes)])) for i, s in enumerate(SHAPES)]
    found.append(nn.Parameter(torch.zeros(4, 6, dtype=dtypes[0]).t()))
    found.append(nn.Parameter(torch.zeros(3), requires_grad=False))
    return found


def gradient(p: Tensor, index: int, rank: int) -> Tensor | None:
    """Small integers, which every dtype sums exactly; some ranks have none, and for one parameter nobody has one."""
    if not p.requires_grad or index == 1 or (index + rank) % 3 == 2:
        return None
    g = torch.Generator().manual_seed(100 * index + rank)
    return torch.randint(-8, 9, p.shape, generator=g).to(p.dtype)


def synced(comm: Comm, bucket_bytes: int) -> tuple[list[Tensor | None], int]:
    several = parameters()
    for index, p in enumerate(several):
        p.grad = gradient(p, index, comm.rank)
    comm.stats.reset()
    tied = iter([*several, several[0]])
    sync_gradients(tied, comm, bucket_bytes=bucket_bytes)
    for p in several:
        assert p.grad is None or (p.grad.dtype == p.dtype and not p.grad.requires_grad)
    return [p.grad for p in several], comm.stats.bytes_sent


def check_synced(results: list[tuple[list[Tensor | None], int]]) -> None:
    size = len(results)
    several = parameters()
    for index, p in enumerate(several):
        given = [g for rank in range(size) if (g := gradient(p, index, rank)) is not None]
        for grads, _ in results:
            if given:
                assert torch.equal(grads[index], sum(given[1:], given[0]))
            else:
                assert grads[index] is None
    reduced = [p for p, grad in zip(several, results[0][0]) if grad is not None]
    padding = len(several) * size * 8
    for _, sent in results:  # few bytes go by pairs, more than two addends of 16 bits as 32
        widest = sum(p.numel() * max(p.itemsize, 4 if size > 2 else 2) for p in reduced)
        assert sent <= math.ceil(math.log2(size)) * (widest + padding)


# with the first, gradients of few bytes are summed as those of many are: from where they lie
MANY, FEW = {"FEW": 0, "JOINED": 40}, {"FEW": 1 << 20}


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("sizes", [FEW, MANY | {"BOTH": 0}, MANY | {"BOTH": 1 << 20}], ids=["few", "many", "both"])
def test_gradients_are_summed_over_threads(sizes: dict[str, int], ranks: int, direct: bool) -> None:
    with mock.patch.multiple(summing, **sizes):
        for bucket_bytes in (1, 300, 1 << 26):
            check_synced(run_threads(ranks, synced, bucket_bytes, direct=direct))


def synced_in_sizes(comm: Comm, sizes: dict[str, int], bucket_bytes: int) -> tuple[list[Tensor | None], int]:
    with mock.patch.multiple(summing, **sizes):
        return synced(comm, bucket_bytes)


@pytest.mark.parametrize(("sizes", "bucket_bytes"), [(FEW, 300), (MANY, 1 << 26)], ids=["few", "many"])
@pytest.mark.parametrize("comm", ["gloo", pytest.param("shm", marks=SHARED)])
def test_gradients_are_summed_over_processes(comm: str, sizes: dict[str, int], bucket_bytes: int) -> None:
    check_synced(run_processes(3, synced_in_sizes, sizes, bucket_bytes, comm=comm))


def placed_differently(comm: Comm) -> list[bool]:
    """Sums of gradients that are strided on one rank, missing on another and one tensor for two parameters on a third.

    They end in the tensors that ranks had, where these can be written, and whoever saved one for a backward is told.
    """
    several = [nn.Parameter(torch.zeros(4, 30)) for _ in range(4)]
    values = torch.arange(120.0).view(4, 30) + comm.rank
    for index, p in enumerate(several):
        p.grad = values + (index == 1 and comm.rank != 2)
    if comm.rank == 0:
        several[0].grad = values.t().contiguous().t()
    elif comm.rank == 1:
        several[0].grad = None
    elif comm.rank == 2:
        several[2].grad = several[1].grad
    given = [p.grad for p in several]
    x = torch.ones(4, 30, requires_grad=True)
    saving = (x * given[3]).sum()
    sync_gradients(several, comm)
    ranks = range(comm.size)
    expected = [
        sum(torch.arange(120.0).view(4, 30) + rank for rank in ranks if index or rank != 1) for index in range(4)
    ]
    expected[1] = expected[1] + min(comm.size, 2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saving.backward()
    kept = [p.grad is grad for p, grad in zip(several, given)]
    kept[0] |= comm.rank == 1
    kept[2] |= comm.rank == 2
    return [*kept, *(torch.equal(p.grad, total) for p, total in zip(several, expected))]


@pytest.mark.parametrize("sizes", [MANY, FEW], ids=["many", "few"])
def test_gradients_that_lie_differently_on_ranks_are_summed(sizes: dict[str, int]) -> None:
    with mock.patch.multiple(summing, **sizes):
        for ranks, direct in itertools.product((2, 3), (True, False)):
            for found in run_threads(ranks, placed_differently, direct=direct):
                assert all(found), found


def sharing_memory(comm: Comm, bucket_bytes: int) -> list[Tensor]:
    """Sums of gradients that autograd makes as views of one another."""
    a, b, c = (nn.Parameter(torch.zeros(n)) for n in (60, 20, 40))
    ((a.view(60) + torch.cat([b, c])) * torch.ones(60)).sum().backward()
    memory = {p.grad.untyped_storage().data_ptr() for p in (a, b, c)}
    assert len(memory) == 1
    sync_gradients([a, b, c], comm, bucket_bytes=bucket_bytes)
    with pytest.raises(ValueError, match="these gradients are sums over ranks already"):
        sync_gradients([a, b, c], comm, bucket_bytes=bucket_bytes)
    return [a.grad, b.grad, c.grad]


@pytest.mark.parametrize("sizes", [MANY, FEW], ids=["many", "few"])
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 26])
def test_gradients_that_share_memory_are_summed_once(sizes: dict[str, int], bucket_bytes: int) -> None:
    with mock.patch.multiple(summing, **sizes):
        for grads in run_threads(3, sharing_memory, bucket_bytes):
            assert all(bool((grad == 3).all()) for grad in grads)


class Shared(nn.Module):
    """A weight that is the sum of two parameters, whose gradients autograd lets share memory."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.base, self.delta = (nn.Parameter(torch.randn(12, dtype=torch.float64, generator=draw)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ (self.base.view(4, 3) + self.delta.view(4, 3))).square().sum()


def shared_gradients(x: Tensor) -> Shared:
    model = Shared()
    model(x).backward()
    assert model.base.grad.untyped_storage().data_ptr() == model.delta.grad.untyped_storage().data_ptr()
    return model


def test_gradients_that_share_memory_are_summed_and_clipped_apart() -> None:
    xs = torch.randn(2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole = shared_gradients(xs.flatten(0, 1)).base.grad

    def rank(comm: Comm) -> None:
        model = shared_gradients(xs[comm.rank])
        own = model.delta.grad.clone()
        sync_gradients(model.base, comm)
        assert torch.equal(model.delta.grad, own)
        sync_gradients(model.delta, comm)
        assert all(torch.allclose(p.grad, whole) for p in model.parameters())
        with pytest.raises(ValueError, match="these gradients are sums over ranks already"):
            sync_gradients(model.parameters(), comm)
        model = shared_gradients(xs[comm.rank])
        norm = clip_grad_norm(model.parameters(), 1.0)
        assert torch.allclose(norm, own.norm() * 2**0.5) and math.isclose(
            grad_norm(model.parameters()), 1.0, rel_tol=1e-5
        )

    run_threads(2, rank)


def test_gradients_in_one_tensor_of_the_users_stay_there() -> None:
    def rank(comm: Comm) -> tuple[list[float], Tensor]:
        flat = torch.ones(5) * (1 + comm.rank)
        a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
        a.grad, b.grad = flat[:2], flat[2:]
        sync_gradients([a, b], comm)
        clip_grad_norm([a, b], 1e9)
        return flat.tolist(), b.grad

    for flat, grad in run_threads(2, rank):
        assert flat == [3.0] * 5 and grad.tolist() == [3.0] * 3


def test_gradients_may_be_wider_than_their_parameters() -> None:
    def rank(comm: Comm) -> list[Tensor]:
        several = [nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)) for _ in range(3)]
        several[1].grad_dtype = several[2].grad_dtype = torch.float32
        for index, p in enumerate(several):
            if comm.rank or index < 2:
                p.grad = torch.full((3,), 1 + 2.0**-20 * comm.rank, dtype=p.grad_dtype)
        sync_gradients(several, comm)
        return [p.grad for p in several]

    for narrow, wide, from_one in run_threads(2, rank):
        assert narrow.dtype == torch.bfloat16 and narrow.tolist() == [2.0] * 3
        assert wide.dtype == torch.float32 and wide.tolist() == [2 + 2.0**-20] * 3
        assert from_one.tolist() == [1 + 2.0**-20] * 3


def test_gradients_are_summed_in_the_same_order_at_every_step() -> None:
    """With as many bytes as go by pairs: the flag that later steps send along must not change that."""

    def rank(comm: Comm) -> bool:
        comm.check_every, p = "batch", nn.Parameter(torch.zeros(summing.FEW // 8))
        given, found = torch.randn(p.shape, generator=torch.Generator().manual_seed(comm.rank)), []
        for _ in range(2):
            p.grad = given.clone()
            sync_gradients(p, comm)
            found.append(p.grad)
        return torch.equal(*found)

    assert run_threads(3, rank) == [True] * 3


def test_fewer_elements_than_ranks_are_summed_by_pieces() -> None:
    """As on GPUs that exchange, where nothing goes by pairs."""

    def rank(comm: Comm) -> list[Tensor]:
        p = nn.Parameter(torch.zeros(2))
        p.grad = torch.ones(2)
        sync_gradients(p, comm)
        return [all_sum(torch.ones(n), comm) for n in (1, 3)] + [p.grad]

    with mock.patch.multiple(summing, **MANY):
        for found in run_threads(4, rank):
            assert [x.tolist() for x in found] == [[4.0], [4.0] * 3, [4.0] * 2]


def test_an_error_between_buckets_and_a_wrong_argument_are_told_to_all_ranks() -> None:
    def rank(comm: Comm, bucket_bytes: list[int]) -> str:
        several = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
        for p in several:
            p.grad = torch.ones(3)
        if comm.rank == 1:
            several[1].grad = torch.ones(1).expand(3)  # of which a copy is made
        try:
            sync_gradients(several, comm, bucket_bytes=bucket_bytes[comm.rank])
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    def failing(p: Tensor, *, changed: bool | None) -> Tensor:
        if not p.grad.is_contiguous() or p.grad.stride() == (0,):
            raise MemoryError("a test")
        return p.grad

    start = time.monotonic()
    with mock.patch.object(gradients, "_addend", failing):
        wrong, others = run_threads(2, rank, [0, 1], timeout=60.0)
        assert "bucket_bytes must be an integer of at least 1" in wrong
        assert others.startswith("ValueError: sync_gradients: rank 0 refused its arguments: ") and wrong in others
        others, failed = run_threads(2, rank, [1, 1], timeout=60.0)
    assert failed == "MemoryError: a test" and "root cause: rank 1" in others and "MemoryError" in others
    assert time.monotonic() - start < 30.0


def test_gradients_are_plain_tensors_afterwards_and_parameters_have_no_hook(tmp_path: Path) -> None:
    """Of a sum nothing is saved or kept: neither with a gradient, nor when all is gone."""

    def rank(comm: Comm) -> None:
        p = nn.Parameter(torch.ones(3))
        (2 * p).sum().backward()
        sync_gradients(p, comm)
        file = tmp_path / str(comm.rank)
        torch.save(p.grad, file)
        assert torch.load(file, weights_only=True).tolist() == [4.0] * 3 and not vars(p.grad)
        p.grad = None
        assert not p._post_accumulate_grad_hooks
        p.sum().backward()
        sync_gradients(p, comm)
        p.sum().backward()
        p.grad = None
        assert not p._post_accumulate_grad_hooks
        gone = weakref.ref(p)
        del p
        gc.collect()
        assert gone() is None

    run_threads(2, rank)


def rounded(comm: Comm, size: int) -> Tensor:
    p = nn.Parameter(torch.zeros(size))
    p.grad = torch.randn(size, generator=torch.Generator().manual_seed(comm.rank))
    sync_gradients(p, comm)
    return p.grad


@pytest.mark.parametrize("ranks", [3, 4, 5, 6])
def test_all_ranks_get_the_same_bits_summed_in_one_order(ranks: int) -> None:
    """Few by pairs, then by pairs of pairs, and before that ranks beyond a power of 2; many in the order of ranks."""
    for size in (1000, 400_000):
        given = [torch.randn(size, generator=torch.Generator().manual_seed(r)) for r in range(ranks)]
        if size == 1000:
            low = given[: 2 if ranks == 3 else 4]
            low = [x + given[n + len(low)] if n + len(low) < ranks else x for n, x in enumerate(low)]
            expected = low[0] + low[1] + (low[2] + low[3] if len(low) == 4 else torch.zeros(()))
        else:
            expected = sum(given[1:], given[0])
        for grad in run_threads(ranks, rounded, size):
            assert torch.equal(grad, expected)


def half(comm: Comm) -> Tensor:
    p = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    p.grad = torch.tensor([256.0, 1.0] if comm.rank == 0 else [0.75, 1.0]).to(torch.bfloat16)
    sync_gradients([p], comm)
    return p.grad


def test_half_precision_is_summed_in_fp32() -> None:
    # one after another in bf16, 256 + 0.75 stays 256
    assert run_threads(4, half)[0].tolist() == [258.0, 4.0]


@pytest.mark.parametrize("sizes", [MANY, FEW], ids=["many", "few"])
def test_gradients_that_are_as_before_are_summed_without_a_round_and_news_is_heard(sizes: dict[str, int]) -> None:
    """One rank may have others at any time, or what cannot be summed; parameters that have none keep none."""

    def rank(comm: Comm) -> list[int]:
        comm.check_every, gather, asked, counts = "batch", comm.gather, [], []
        comm.gather = lambda *given, **named: asked.append(given) or gather(*given, **named)
        several = [nn.Parameter(torch.zeros(n)) for n in (3, 4, 5)]
        # which have a gradient, on rank 0 and on others; the last two are known by then
        for own, others in (([0, 1], [0, 1]), ([0, 1], [0, 1]), ([0, 1], [0, 2]), ([0], [0]), ([0], [0]), ([0], [1])):
            asked.clear()
            for index, p in enumerate(several):
                p.grad = torch.full_like(p, 1.0 + comm.rank) if index in (others if comm.rank else own) else None
            sync_gradients(several, comm)
            counts.append(len(asked))
            for index, p in enumerate(several):
                whole = (index in own) + 2 * (index in others)
                assert p.grad is None if not whole else torch.equal(p.grad, torch.full_like(p, whole))
        with pytest.raises(ValueError, match="these gradients are sums over ranks already"):
            sync_gradients(several, comm)
        for p in several:
            p.grad = torch.ones_like(p)
        sync_gradients(several, comm)
        if comm.rank:
            several[2].grad = torch.ones(5).to_sparse()
        with pytest.raises((NotImplementedError, ValueError), match="has a gradient of layout"):
            sync_gradients(several, comm)
        comm.agree("afterwards", {})
        return counts

    with mock.patch.multiple(summing, **sizes):
        assert run_threads(2, rank) == [[1, 0, 1, 1, 0, 1]] * 2


@pytest.mark.parametrize("kind", ["gloo", pytest.param("shm", marks=SHARED)])
def test_other_parameters_on_one_rank_after_a_sum_are_named(kind: str) -> None:
    for text in run_processes(2, differing_later, comm=kind):
        assert "PeerError" in text and "sync_gradients" in text and "make the same calls in the same order" in text


def differing_later(comm: Comm) -> str:
    comm.check_every = "batch"
    for sizes in ([3, 4], [3, 4], [3, 4 + comm.rank]):
        several = [nn.Parameter(torch.zeros(n)) for n in sizes]
        for p in several:
            p.grad = torch.ones_like(p)
        try:
            sync_gradients(several, comm)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


def wrong_on_one_rank(comm: Comm) -> list[list[str]]:
    """The errors of arguments that are wrong on rank 1 alone, and what a sum gives after each."""
    comm.check_every = "batch"
    found: list[list[str]] = []
    for size, kind in enumerate(("None", "bucket", "iterator", "names", "float8", "sparse"), 4):
        p = nn.Parameter(torch.zeros(size), requires_grad=False)
        given, p.grad, options = [p], torch.ones_like(p), {}
        if comm.rank == 1:
            given = {"None": [None], "iterator": (1 // 0 for _ in "1"), "names": [("weight", p)]}.get(kind, given)
            options = {"bucket_bytes": 0} if kind == "bucket" else {}
        if kind in ("float8", "sparse"):
            q = nn.Parameter(torch.zeros(3, dtype=torch.float8_e5m2) if kind == "float8" else torch.zeros(3))
            wrong = torch.ones(3).to(q.dtype) if kind == "float8" else torch.ones(3).to_sparse()
            q.grad, given = (wrong if comm.rank == 1 else None), [p, q]
        with pytest.raises((ValueError, TypeError, ZeroDivisionError, NotImplementedError)) as raised:
            sync_gradients(given, comm, **options)
        assert bool((p.grad == 1).all())
        sync_gradients([p], comm)
        found.append([f"{type(raised.value).__name__}: {raised.value}", str(p.grad[:1].tolist() + [comm.next_call()])])
    return found


@pytest.mark.parametrize("kind", ["threads", "gloo", pytest.param("shm", marks=SHARED)])
def test_wrong_arguments_of_one_rank_are_told_to_all_and_the_comm_still_works(kind: str) -> None:
    run = run_threads if kind == "threads" else lambda *given: run_processes(*given, comm=kind)
    first, own, last = run(3, wrong_on_one_rank)
    assert first == last
    for (told, after), (error, still) in zip(first, own, strict=True):
        assert told == f"ValueError: sync_gradients: rank 1 refused its arguments: {error}"
        assert after == still and after.startswith("[3.0, ")
    assert [error.partition(":")[0] for error, _ in own] == [
        "TypeError", "ValueError", "ZeroDivisionError", "TypeError", "NotImplementedError", "NotImplementedError"
    ]  # fmt: skip


def test_a_tensor_that_autograd_computed_has_its_gradient_summed() -> None:
    def rank(comm: Comm) -> list[float]:
        p = nn.Parameter(torch.ones(3))
        given = 2 * p if comm.rank else p
        given.retain_grad()
        (given * (1.0 + comm.rank)).sum().backward()
        sync_gradients([given], comm)
        return given.grad.tolist()

    assert run_threads(3, rank) == [[6.0] * 3] * 3


def test_a_rank_that_does_not_come_is_named() -> None:
    def lonely(comm: Comm) -> None:
        if comm.rank == 0:
            sync_gradients([nn.Parameter(torch.zeros(1))], comm)

    with pytest.raises(PeerError, match=r"ranks \[1\]"):
        run_threads(2, lonely, timeout=0.5)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_norms_and_clipping_are_those_of_torch(norm_type: float, dtype: torch.dtype) -> None:
    ours, theirs = parameters((dtype,)), parameters((dtype,))
    for index, (a, b) in enumerate(zip(ours, theirs)):
        a.grad = gradient(a, index, 0)
        b.grad = gradient(b, index, 0) if b.numel() else None  # torch has no largest of nothing
    exact = [p.grad.double() for p in theirs if p.grad is not None]
    expected = torch.nn.utils.get_total_norm(exact, norm_type)
    torch.testing.assert_close(grad_norm(ours, norm_type=norm_type).double(), expected, rtol=1e-6, atol=0)
    norm = clip_grad_norm([*ours, ours[0]], 1.5, norm_type=norm_type)
    torch.testing.assert_close(norm.double(), expected, rtol=1e-6, atol=0)
    torch.nn.utils.clip_grad_norm_(theirs, 1.5, norm_type)
    for a, b in zip(ours, theirs):
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad)


ONE = nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: grad_norm(ONE, norm_type="largest"), ValueError, "norm_type='largest', expected a number"),
        (lambda: grad_norm(ONE, norm_type=0.5), ValueError, "norm_type=0.5"),
        (lambda: clip_grad_norm(ONE, None), TypeError, "max_norm must be a number, got None"),
        (lambda: clip_grad_norm(ONE, 1.0, error_if_nonfinite=True), RuntimeError, "norm of the gradients is nan"),
        (
            lambda: sync_gradients(torch.optim.SGD([ONE]).param_groups, LocalComm()),
            TypeError,
            "expected parameters, as",
        ),
        (lambda: sync_gradients(nn.Linear(2, 2).named_parameters(), LocalComm()), TypeError, r"got \('weight'"),
        (lambda: sync_gradients([ONE], LocalComm(), bucket_bytes=1.5), ValueError, "bucket_bytes must be an integer"),
    ],
)
def test_what_has_no_norm_or_sum_is_named(call: Any, error: type[Exception], message: str) -> None:
    ONE.grad = torch.tensor([1.0, math.nan])
    with pytest.raises(error, match=message):
        call()
    assert ONE.grad[0] == 1.0


def test_clipping_keeps_no_graph_and_takes_the_names_of_torch() -> None:
    p, largest = nn.Parameter(torch.tensor([3.0, -4.0])), torch.tensor(100.0, requires_grad=True)
    (p.square().sum() / 2).backward(create_graph=True)
    norm = clip_grad_norm([p], largest, norm_type="inf")  # type: ignore[arg-type]
    assert norm.item() == 4.0 and not norm.requires_grad


def test_small_gradients_are_not_scaled_and_none_are_no_norm() -> None:
    p = nn.Parameter(torch.zeros(3))
    assert grad_norm([p]).item() == 0.0 and clip_grad_norm(p, 1.0).item() == 0.0
    p.grad = torch.full((3,), 0.1)
    clip_grad_norm(p, 1.0)
    assert torch.equal(p.grad, torch.full((3,), 0.1))


def summed(comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.arange(5.0, dtype=torch.float64) * (comm.rank + 1)
    x.requires_grad_()
    y = all_sum(x, comm)
    (dx,) = torch.autograd.grad((y * torch.arange(5.0) * (comm.rank + 2)).sum(), x)
    return y.detach(), dx, all_sum(torch.tensor(comm.rank + 1), comm)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_sum_over_ranks_and_its_adjoint(ranks: int) -> None:
    ones = sum(range(1, ranks + 1))
    for y, dx, count in run_threads(ranks, summed):
        assert torch.equal(y, torch.arange(5.0, dtype=torch.float64) * ones)
        assert torch.equal(dx, torch.arange(5.0, dtype=torch.float64) * (ones + ranks))
        assert count.dtype == torch.int64 and count.item() == ones


def few_and_many(comm: Comm, dtype: torch.dtype) -> tuple[list[Tensor], list[int]]:
    """The sum of a few numbers by itself, and of the same ones among many; the exchanges of both."""
    x = torch.randn(7, generator=torch.Generator().manual_seed(comm.rank)).to(dtype)
    found, counts = [], []
    for padded in (x, torch.cat([x, x.new_zeros(200_000)])):
        comm.stats.reset()
        found.append(all_sum(padded, comm)[:7])
        counts.append(comm.stats.exchanges)
    return found, counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("ranks", "rounds"), [(2, [1, 1]), (5, [4, 2]), (8, [3, 2])])
def test_a_sum_of_few_numbers_is_few_messages_with_the_same_bits(
    dtype: torch.dtype, ranks: int, rounds: list[int]
) -> None:
    """Of the first rank; by pieces two exchanges with all others."""
    results = run_threads(ranks, few_and_many, dtype)
    assert results[0][1] == rounds
    for sums, _ in results:
        for x, first in zip(sums, results[0][0], strict=True):
            assert torch.equal(x, first)
        torch.testing.assert_close(*sums)


def of_views(comm: Comm, count: int) -> list[bool]:
    """Whether sums of tensors that do not lie in memory as they read are right, and leave them as they were."""
    z = torch.complex(*torch.randn(2, count, generator=torch.Generator().manual_seed(comm.rank)))
    views = [z.conj(), z.conj().imag, z.real.view(-1, 2).T, z.real[:1].expand(3), z.real[::2]]
    by_rank = comm.gather("views", [x.clone() for x in views])
    found = [all_sum(x, comm) for x in views]
    right = [torch.stack(several).sum(0) for several in zip(*by_rank)]
    alike = [torch.equal(x, before) for x, before in zip(views, by_rank[comm.rank])]
    return [*alike, *(torch.allclose(y, x, atol=1e-6) and y.shape == x.shape for x, y in zip(right, found))]


@pytest.mark.parametrize(("ranks", "count"), [(2, 8), (2, 400_000), (3, 8), (3, 400_000)])
def test_sums_of_views_are_right_and_leave_them(ranks: int, count: int) -> None:
    for direct in (True, False):
        for found in run_threads(ranks, of_views, count, direct=direct):
            assert all(found), found


def of_inference(count: int, rank: int) -> Tensor:
    with torch.inference_mode(rank == 0):
        return torch.ones(count)


def unusual(comm: Comm, count: int) -> list[list[float]]:
    """Sums of tensors that hold others, as DTensor's collectives return them, and that cannot be written."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    found = []
    for make in (
        lambda: AsyncCollectiveTensor(torch.ones(count)),
        lambda: AsyncCollectiveTensor(torch.ones(count + 3)[3:]),
        lambda: torch.ones(()).expand(count),
        lambda: of_inference(count, comm.rank),
        lambda: torch._efficientzerotensor(count) if comm.rank else torch.ones(count),
    ):
        several = [nn.Parameter(torch.zeros(count)) for _ in range(2)]
        several[0].grad, several[1].grad = make(), torch.ones(count)
        sync_gradients(several, comm)
        assert all(type(p.grad) is Tensor and len(p.grad.unique()) == 1 for p in several)
        found.append([*(float(p.grad[-1]) for p in several), float(all_sum(make(), comm)[-1])])
    return found


@pytest.mark.parametrize("count", [5, 600_000])
@pytest.mark.parametrize("kind", ["threads", "gloo", pytest.param("shm", marks=SHARED)])
def test_gradients_of_unusual_memory_are_summed(kind: str, count: int) -> None:
    run = run_threads if kind == "threads" else lambda *given: run_processes(*given, comm=kind)
    assert run(2, unusual, count) == [[[2.0] * 3] * 4 + [[1.0, 2.0, 1.0]]] * 2


EXPERTS = 4


def balance(x: Tensor, router: Tensor, comm: Comm | None, keep: Tensor | None = None) -> Tensor:
    """The balance loss of a mixture of experts, of one device's tokens or of all ranks'."""
    p = torch.softmax(x @ router, -1)
    chosen = nn.functional.one_hot(p.argmax(-1), EXPERTS).to(p.dtype)
    if comm is None:
        return EXPERTS * (chosen.mean(0) * p.mean(0)).sum()
    return EXPERTS * (token_mean(chosen, comm, keep=keep) * token_mean(p, comm, keep=keep)).sum()


def balanced(comm: Comm, x: Tensor, router: Tensor, cuts: list[int]) -> tuple[Tensor, list[Tensor]]:
    # a pad row on every rank, which must not count
    rows = torch.cat([x.split(cuts)[comm.rank], torch.full_like(x[:1], 7.0)]).requires_grad_()
    keep = torch.arange(len(rows)) < len(rows) - 1
    router = router.clone().requires_grad_()
    loss = balance(rows, router, comm, keep)
    (loss / comm.size).backward()
    return loss.detach(), [rows.grad[:-1], router.grad]


def test_a_balance_loss_is_that_of_one_device() -> None:
    g = torch.Generator().manual_seed(0)
    x, router = (torch.randn(s, generator=g, dtype=torch.float64) for s in ((12, 5), (5, EXPERTS)))
    x.requires_grad_(), router.requires_grad_()
    expected = balance(x, router, None)
    expected.backward()
    results = run_threads(3, balanced, x.detach(), router.detach(), [4, 0, 8])
    for loss, _ in results:
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-13, atol=0)
    torch.testing.assert_close(torch.cat([grads[0] for _, grads in results]), x.grad, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(sum(grads[1] for _, grads in results), router.grad, rtol=1e-12, atol=1e-15)


def mistaken(comm: Comm) -> list[str]:
    texts = []
    for call in (
        lambda: all_sum(torch.ones(2, dtype=torch.bool), comm),
        lambda: token_mean(torch.ones(2, 3), comm, keep=torch.ones(2)),
        lambda: token_mean(torch.ones(2, 3), comm, keep=torch.ones(2 + comm.rank, dtype=torch.bool)),
        lambda: all_sum(torch.zeros(2 + comm.rank), comm),
        lambda: sync_gradients([nn.Parameter(torch.zeros(2 + comm.rank))], comm),
        lambda: all_sum(torch.ones(2, dtype=torch.uint16), comm),
        lambda: all_sum(torch.ones(2, device="meta"), comm),
        lambda: token_mean(torch.ones(2), comm, keep=[True, False]),
        lambda: token_mean([1.0, 2.0], comm),  # type: ignore[arg-type]
    ):
        with pytest.raises((ValueError, NotImplementedError, TypeError)) as raised:
            call()
        texts.append(str(raised.value))
    return texts


def test_sums_of_what_has_none_are_refused() -> None:
    first, last = run_threads(2, mistaken)
    assert "booleans" in first[0] and first[0] == last[0]
    assert "torch.float32[2]" in first[1] and first[1] == last[1]
    assert "rank 1 refused" in first[2] and "torch.bool[3]" in last[2]
    assert "ranks differ in shape" in first[3] and "other parameters" in first[4]
    assert "all_sum of torch.uint16" in first[5] and "give x.long()" in last[5]
    assert "holds no values to sum" in first[6] and "keep must be a tensor" in first[7]
    assert "x must be a tensor" in first[8] and first[5:] == last[5:]
    for call in (lambda: all_sum(torch.ones(2), None), lambda: token_mean(torch.ones(2), None)):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="got None for its comm; give it a seqpar.GroupComm"):
            call()


LOGITS = torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
LABELS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2], [0, -100, -100, 1, -100, -100, -100, -100], [-100] * 8])


def evaluated(comm: Comm, as_tensor: bool) -> float:
    mean = Mean()
    cut = 5
    for logits, labels in zip(LOGITS, LABELS):
        valid = (labels != -100).sum()
        rows = slice(0, cut) if comm.rank == 0 else slice(cut, cut if comm.rank == 1 else None)
        valid = valid if as_tensor else int(valid)
        mean.add(cross_entropy(logits[rows], labels[rows], valid=valid), valid)
    return mean.result(comm)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_an_evaluation_is_the_mean_over_all_tokens(as_tensor: bool) -> None:
    expected = nn.functional.cross_entropy(LOGITS.flatten(0, 1), LABELS.flatten()).item()
    found = run_threads(3, evaluated, as_tensor)
    assert len(set(found)) == 1
    assert found[0] == pytest.approx(expected, rel=1e-14)


def counted(comm: Comm) -> tuple[float, str]:
    nothing = Mean().result(comm)
    mean = Mean()
    mean.add(torch.tensor(1.0), 3 + comm.rank)
    with pytest.raises(ValueError) as raised:
        mean.result(comm)
    return nothing, str(raised.value)


@pytest.mark.parametrize(("losses", "expected"), [((math.inf, -math.inf), math.nan), ((math.inf, 1.0), math.inf)])
def test_an_evaluation_of_losses_that_are_not_finite(losses: tuple[float, ...], expected: float) -> None:
    def rank(comm: Comm) -> float:
        mean = Mean()
        mean.add(torch.tensor(losses[comm.rank]), 1)
        return mean.result(comm)

    np.testing.assert_equal(run_threads(2, rank), [expected, expected])


def test_an_evaluation_of_nothing_and_of_different_counts() -> None:
    for nothing, text in run_threads(2, counted):
        assert math.isnan(nothing)
        assert "ranks counted [3, 4] labels" in text


def test_a_model_with_statistics_over_tokens_is_refused_by_name() -> None:
    model = nn.Sequential(nn.LayerNorm(4), nn.BatchNorm1d(4), nn.Sequential(nn.InstanceNorm1d(4), nn.RMSNorm(4)))
    with pytest.raises(NotImplementedError, match=r"1 \(BatchNorm1d\), 2.0 \(InstanceNorm1d\)"):
        check_model(model)
    with pytest.raises(NotImplementedError, match="2.0"):
        check_model(model.eval())
    check_model(model[:2])
    with pytest.raises(NotImplementedError, match=r"the model \(SyncBatchNorm\)"):
        check_model(nn.SyncBatchNorm(4))
    check_model(nn.TransformerEncoderLayer(8, 2))


SIZES = (9, 400_000)  # by pairs, and by pieces


def in_turns(comm: Comm, dtype: torch.dtype) -> list[Tensor]:
    """Sums of few and of many elements, with another rank late each time, and of gradients of both sizes."""
    found = []
    for late in range(comm.size):
        several = [torch.randn(n, generator=torch.Generator().manual_seed(comm.rank)).to(dtype) for n in SIZES]
        for x in several:
            if comm.rank == late:
                time.sleep(0.02)
            found.append(all_sum(x, comm))
        parameters = [nn.Parameter(torch.zeros_like(x)) for x in several]
        for p, x in zip(parameters, several):
            p.grad = x
        sync_gradients(parameters, comm)
        found += several
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.sampled(2)
def test_sums_have_the_same_bits_on_all_ranks_and_over_every_transport(ranks: int, dtype: torch.dtype) -> None:
    kinds = ["gloo", *([] if native.missing() else ["shm"])]
    results = [
        run_threads(ranks, in_turns, dtype),
        *(run_processes(ranks, in_turns, dtype, comm=kind) for kind in kinds),
    ]
    several = [torch.randn(SIZES[1], generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(ranks)]
    few, many, few_gradients, many_gradients = results[0][0][:4]
    expected = several[0].float()
    for x in several[1:]:
        expected = expected + x.float()
    assert torch.equal(many, expected.to(dtype)) and torch.equal(many_gradients, many)
    torch.testing.assert_close(few_gradients, few)
    for found in [each for by_rank in results for each in by_rank]:
        for x, first in zip(found, results[0][0][:4] * ranks, strict=True):
            assert torch.equal(x, first)


def of_other_size(comm: Comm, other: int) -> str:
    """One rank sums another number of elements than the rest; ranks know both kinds of calls, and do not compare."""
    comm.check_every = "batch"
    sizes = [300_000, 400_000]
    for n in sizes:
        all_sum(torch.zeros(n), comm)
    try:
        all_sum(torch.zeros(sizes[comm.rank == other]), comm)
    except PeerError as error:
        return str(error)
    return "nothing was noticed"


@pytest.mark.parametrize(("ranks", "other"), [(2, 0), (3, 1)])
@pytest.mark.sampled(2)
def test_tensors_of_other_sizes_never_meet(ranks: int, other: int) -> None:
    for text in run_processes(ranks, of_other_size, other):
        assert "make different calls" in text and "all_sum (forward)" in text, text


class FailingSums:
    """Sums of a rank that fails when all others are in theirs."""

    def sum_(self, flat: Tensor, tag: object) -> None:
        raise ArithmeticError("a test")


def leaves(comm: Comm) -> str:
    if comm.rank == 1:
        comm.sums = lambda like: FailingSums()
    try:
        all_sum(torch.zeros(1 << 20), comm)
    except (PeerError, ArithmeticError) as error:
        return str(error)
    return "nothing was noticed"


def test_a_rank_that_fails_in_a_sum_is_named() -> None:
    waiting, failing, _ = run_processes(3, leaves)
    assert failing == "a test"
    assert (
        "all_sum (forward), call 0 stage 0, lost the connection to rank 1; root cause: rank 1: a sum over ranks, "
        "call 0: ArithmeticError" in waiting
    )  # in the exchange, or while it posts it


def through_numpy(grad: Tensor, value: Tensor) -> None:
    grad.numpy()[:] = value.numpy()


@pytest.mark.parametrize("write", [lambda grad, value: grad.data.copy_(value), through_numpy])
@pytest.mark.parametrize("clip", [False, True])
def test_gradients_that_are_written_without_a_version_are_summed_at_every_step(write: Any, clip: bool) -> None:
    """As the gradients of fp32 copies of weights are, from those of a model in fp16."""

    def rank(comm: Comm) -> list[float]:
        several = [nn.Parameter(torch.zeros(n)) for n in (3, 200, 2)]
        found = []
        for p in several:
            p.grad = torch.zeros_like(p)
        for step in range(1, 4):
            for p in several:
                write(p.grad, torch.full_like(p, 3.0**step))
            sync_gradients(several, comm)
            found += [float(p.grad.unique()) for p in several]
            if clip:
                clip_grad_norm(several, 1e-3)
            with pytest.raises(ValueError, match="these gradients are sums over ranks already"):
                sync_gradients(several, comm)
        several[0].grad.fill_(math.nan)
        sync_gradients(several[:1], comm)
        with pytest.raises(ValueError, match="these gradients are sums over ranks already"):
            sync_gradients(several[:1], comm)
        return found

    assert run_threads(2, rank) == [[6.0] * 3 + [18.0] * 3 + [54.0] * 3] * 2


def test_a_gradient_that_stays_is_told_beside_others_written_without_a_version() -> None:
    def rank(comm: Comm) -> None:
        several = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
        for p in several:
            p.grad = torch.ones(3)
            sync_gradients(p, comm)
        several[0].grad.data.fill_(5.0)
        with pytest.raises(ValueError, match="already \\(1 of 2"):
            sync_gradients(several, comm)

    run_threads(2, rank)


def test_clipping_takes_gradients_that_cannot_be_written_and_a_norm_of_one_element() -> None:
    p, q, r = (nn.Parameter(torch.zeros(4)) for _ in range(3))
    p.grad = torch.ones(()).expand(4)
    with torch.inference_mode():
        q.grad = torch.ones(4)
    r.grad = torch._efficientzerotensor(4)
    assert clip_grad_norm([p, q, r], torch.tensor([2**0.5])) == 8**0.5
    for x, value in ((p, 0.5), (q, 0.5), (r, 0.0)):
        torch.testing.assert_close(x.grad, torch.full((4,), value))
    with pytest.raises(TypeError, match="max_norm must be a number, got tensor"):
        clip_grad_norm(p, torch.ones(2))


def test_norms_and_means_of_complex_numbers() -> None:
    p = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    p.grad = torch.tensor([3 + 4j, 0])
    assert float(grad_norm(p)) == 5.0 and grad_norm(p).dtype == torch.float32
    clip_grad_norm(p, 1.0)
    torch.testing.assert_close(p.grad, torch.tensor([0.6 + 0.8j, 0]))
    x = torch.tensor([[2 + 3j], [4 + 5j]])
    assert run_threads(2, lambda comm: complex(token_mean(x + comm.rank, comm))) == [3.5 + 4j] * 2


@pytest.mark.parametrize("label", [-1, 7, 1 << 40])
def test_a_label_outside_the_vocabulary_is_named(label: int) -> None:
    hidden, weight, labels = torch.ones(3, 4), torch.ones(7, 4), torch.tensor([6, label, -100])
    for call in (
        lambda: linear_cross_entropy(hidden, weight, labels, valid=2),
        lambda: cross_entropy(hidden @ weight.t(), labels, valid=2),
        lambda: token_log_probs(hidden, weight, labels),
    ):
        with pytest.raises(ValueError, match=f"the label of row 1 is {label}, expected 0 to 6, or ignore_index=-100"):
            call()


@pytest.mark.parametrize("since", [0, 2])
def test_a_parameter_that_one_rank_froze_is_told(since: int) -> None:
    """Its share would be missing from the sum."""

    def rank(comm: Comm) -> None:
        several = [nn.Parameter(torch.ones(3)) for _ in range(3)]
        several[2].requires_grad_(comm.rank == 0)  # without a gradient on any rank
        for step in range(since + 1):
            if step == since and comm.rank == 1:
                several[1].requires_grad_(False)
            for p in several[:2]:
                p.grad = torch.ones(3) if p.requires_grad else None
            if step < since:
                sync_gradients(several, comm)
                assert all(torch.equal(p.grad, torch.full((3,), 2.0)) for p in several[:2])
        with pytest.raises(ValueError, match=r"parameter 1 of shape \[3\] is frozen on rank 1 and not on rank 0"):
            sync_gradients(several, comm)
        assert several[1].grad is None or torch.equal(several[1].grad, torch.ones(3))
        several[1].requires_grad_(False)
        sync_gradients(several[:1], comm)

    run_threads(2, rank)


@pytest.mark.parametrize("stale", [(1,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("used", [(0, 1, 2), (1,)])
def test_a_sum_that_one_rank_alone_has_kept_is_refused(stale: tuple[int, ...], used: tuple[int, ...]) -> None:
    """A rank that left out `zero_grad` and `backward` would give the last step's sum for its share."""
    named = "every rank" if len(stale) == 3 else "rank 1 " if len(stale) == 1 else "ranks 0, 2"

    def rank(comm: Comm) -> list[float]:
        p, later = (nn.Parameter(torch.ones(3)) for _ in range(2))
        for step in range(2):
            for each in (p, later):
                if not step or comm.rank not in stale:
                    each.grad = None
                    if each is p or comm.rank in used:
                        (each * (comm.rank + 1)).sum().backward()
            if not step:
                sync_gradients([p, later], comm)
                assert (p.grad[0], later.grad[0]) == (6.0, sum(rank + 1 for rank in used))
        with pytest.raises(ValueError, match=f"on {named}.*sums over ranks already.*2 of 2"):
            sync_gradients([p, later], comm)
        return p.grad.tolist()

    found = run_threads(3, rank)
    assert found == [[6.0 if rank in stale else rank + 1.0] * 3 for rank in range(3)]
