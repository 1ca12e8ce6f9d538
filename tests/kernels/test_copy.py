"""Copies of many strided tensors at once, compiled and by torch, against indexing; all other bits are kept."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from seqpar import native
from seqpar.comm import Comm
from seqpar.kernels.memory import copy as copies
from seqpar.kernels.memory.copy import Pair, copy
from seqpar.testing import run_threads
from tests.cases import examples

DTYPES = (torch.bool, torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.complex128)
MOVED = (
    *DTYPES, torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32, torch.uint64, torch.float64,
    torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
)  # fmt: skip
VERSIONS = (
    pytest.param("compiled", marks=pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))),
    "torch",
)
versions = pytest.mark.parametrize("version", VERSIONS)


def use(version: str) -> pytest.MonkeyPatch:
    """Takes one version until `undo`."""
    patch = pytest.MonkeyPatch()
    if version == "torch":
        patch.setattr(copies, "_compiled", lambda pairs: False)
    return patch


def random(shape: list[int], dtype: torch.dtype, g: torch.Generator) -> Tensor:
    """Any bits, but for bool, which has two values."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=g).bool()
    count = dtype.itemsize * torch.Size(shape).numel()
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=g).view(dtype).view(shape)


@st.composite
def strided(draw: st.DrawFn, shape: list[int]) -> tuple[list[int], list[slice], list[int]]:
    """Memory, what of it a tensor of `shape` takes, and the order of its dims: gaps and transpositions."""
    order = draw(st.permutations(range(len(shape))))
    gaps = [draw(st.integers(0, 2)) for _ in shape]
    taken = [slice(gap // 2, gap // 2 + shape[d]) for gap, d in zip(gaps, order, strict=True)]
    return (
        [shape[d] + gap for gap, d in zip(gaps, order, strict=True)],
        taken,
        [order.index(d) for d in range(len(shape))],
    )


@st.composite
def selections(draw: st.DrawFn) -> tuple[object, ...]:
    """One pair: both sides' memory, and the row numbers of each or None."""
    shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 33]), max_size=4))
    sides, rows = [], []
    kind = draw(st.sampled_from([torch.int32, torch.int64]))
    for _ in range(2):
        total = list(shape)
        found = None
        if shape and draw(st.booleans()):
            total[0] += draw(st.integers(0, 4))
            found = torch.tensor(draw(st.permutations(range(total[0])))[: shape[0]], dtype=kind)
        sides.append(draw(strided(total)))
        rows.append(found)
    return (*sides, *rows)


def view_of(memory: Tensor, taken: list[slice], order: list[int]) -> Tensor:
    for dim, part in enumerate(taken):
        memory = memory.narrow(dim, part.start, part.stop - part.start)
    return memory.permute(order)


@versions
@examples(80)
@given(st.lists(selections(), min_size=1, max_size=4), st.sampled_from(DTYPES), st.integers(0, 999))
def test_copy_is_indexing_and_writes_nothing_else(version, pairs, dtype, seed) -> None:
    g = torch.Generator().manual_seed(seed)
    made, written = [], []
    for (dst_shape, *dst_view), (src_shape, *src_view), dst_rows, src_rows in pairs:
        memory, source = random(dst_shape, dtype, g), view_of(random(src_shape, dtype, g), *src_view)
        expected = memory.clone()
        view_of(expected, *dst_view)[... if dst_rows is None else dst_rows] = source[
            ... if src_rows is None else src_rows
        ]
        made.append(Pair(view_of(memory, *dst_view), source, dst_rows, src_rows))
        written.append((memory, expected))
    patch = use(version)
    copy(made)
    patch.undo()
    for got, want in written:
        assert torch.equal(got.view(-1).view(torch.uint8), want.view(-1).view(torch.uint8))


@versions
def test_a_lazily_conjugated_or_negated_tensor_is_what_it_stands_for(version) -> None:
    x = torch.randn(3, 4, dtype=torch.complex64)
    out, part = torch.empty_like(x), torch.empty(3, 4)
    patch = use(version)
    copy([Pair(out, x.conj())])
    copy([Pair(part, x.conj().imag)])
    patch.undo()
    assert x.conj().is_conj() and x.conj().imag.is_neg()
    assert torch.equal(out, x.conj().resolve_conj())
    assert torch.equal(part, -x.imag)


@versions
def test_more_dims_than_one_launch_takes_and_nothing_to_copy(version) -> None:
    patch = use(version)
    x, y = torch.rand(2, 1, 2, 1, 2, 1, 2).transpose(0, 6), torch.zeros(2, 1, 2, 1, 2, 1, 2)
    copy([])
    copy([Pair(torch.empty(0, 3), torch.empty(0, 3)), Pair(y, x)])
    patch.undo()
    assert torch.equal(x, y)


@versions
@pytest.mark.parametrize("dims", [2, 9])  # 9: more than one launch takes
@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_rows_by_number_of_any_dtype_and_of_many_dims(version, dtype, dims) -> None:
    g = torch.Generator().manual_seed(dims)
    x, y = (random([5, *[2] * (dims - 1)], dtype, g).transpose(1, -1) for _ in range(2))
    rows, numbers = torch.tensor([4, 0, 3]), torch.tensor([1, 2, 0])
    expected = [row.clone() for row in y.unbind()]
    for to, of in zip(rows.tolist(), numbers.tolist(), strict=True):
        expected[to] = x[of]
    patch = use(version)
    copy([Pair(y, x, rows, numbers)])
    patch.undo()
    for got, want in zip(y.unbind(), expected, strict=True):
        assert torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


@versions
@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: Pair(x, x.double()), lambda x: Pair(x, x[:2]), lambda x: Pair(x, x[None]),
        lambda x: Pair(x, x, torch.tensor([0])),
    ],
)  # fmt: skip
def test_a_wrong_pair_is_named_and_nothing_written(version, wrong) -> None:
    x, y = torch.ones(3, 2), torch.zeros(3, 2)
    patch = use(version)
    with pytest.raises(RuntimeError, match=r"copy_: pair 1"):
        copy([Pair(y, x), wrong(x)])
    patch.undo()
    assert not y.any()


@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
def test_what_one_launch_does_not_take_is_refused() -> None:
    x, op = torch.zeros(3, 2), native.ops().copy_
    bad = {
        "expanded along dim 0": ([x[:1].expand(3, 2)], [x + 1], [None], [None]),
        "int64 or int32": ([x], [x + 1], [torch.ones(3)], [None]),
        "same dtype": ([x], [x + 1], [torch.arange(3)], [torch.arange(3, dtype=torch.int32)]),
        "contiguous tensor of one dim": ([x], [x + 1], [torch.arange(6)[::2]], [None]),
        "at most 6": ([torch.zeros([1] * 7)], [torch.ones([1] * 7)], [None], [None]),
        "has rows given but no dims": ([x[0, 0]], [x[0, 0] + 1], [torch.arange(1)], [None]),
        "the same number of each": ([x], [x + 1], [], [None]),
    }
    for message, arguments in bad.items():
        with pytest.raises(RuntimeError, match=message):
            op(*arguments)
    assert not x.any()


@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
@pytest.mark.parametrize("row_bytes", [100, 128, 4096, 1 << 18])
@pytest.mark.sampled(3)
def test_large_copies_are_the_same(row_bytes) -> None:
    """What is written past the caches, by several threads, of pieces that lie side by side."""
    x = torch.randint(0, 256, (2, (24 << 20) // row_bytes // 2 + 3, 2, row_bytes), dtype=torch.uint8)
    packed = torch.zeros_like(x.transpose(0, 2).contiguous())
    copy([Pair(packed[piece], x[:, :, piece].transpose(0, 1)) for piece in range(2)])
    assert torch.equal(packed, x.transpose(0, 2))
    back = torch.zeros_like(x)
    copy([Pair(back[:, :, piece].transpose(0, 1), packed[piece]) for piece in range(2)])
    assert torch.equal(back, x)


class Calls(TorchDispatchMode):
    """Counts torch's copies."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten.copy_.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("own", "expected"), [(0, 3), (3, 6)])
def test_heads_for_all_peers_are_few_calls_of_torch(own, expected) -> None:
    """q, k and v of 8 ranks, side by side for each: the peers before this rank and those after it."""
    q, k, v = torch.randn(5, 16, 4), torch.randn(5, 8, 4), torch.randn(5, 8, 4)
    memory = torch.full((7, 5 * 16 + 3), torch.nan)
    peers = [peer for peer in range(8) if peer != own]
    pairs = []
    for buffer, peer in zip(memory, peers, strict=True):
        columns = buffer[: 5 * 16].view(5, 16).split([8, 4, 4], 1)
        for column, x in zip(columns, (q, k, v), strict=True):
            share = x.shape[1] // 8
            pairs.append(Pair(column.view(5, share, 4), x[:, peer * share : (peer + 1) * share]))
    patch, calls = use("torch"), Calls()
    with calls:
        copy(pairs)
    patch.undo()
    assert calls.count == expected
    assert all(torch.equal(dst, src) for dst, src, *_ in pairs)
    assert memory[:, 5 * 16 :].isnan().all()


def test_pairs_whose_order_is_reversed_are_copied_one_by_one() -> None:
    x, y = torch.arange(6.0), torch.zeros(6)
    patch = use("torch")
    copy([Pair(y[n : n + 1], x[5 - n : 6 - n]) for n in range(6)])
    patch.undo()
    assert y.equal(x.flip(0))


def test_ranks_that_are_threads_register_the_operator_once(monkeypatch) -> None:
    started, names = threading.Barrier(4, timeout=60), []

    def register(name: str, fake: object) -> None:
        time.sleep(0.05)  # others come meanwhile
        names.append(name)

    def rank(comm: Comm) -> bool:
        started.wait()
        return copies._known_to_fake_tensors()

    monkeypatch.setattr(copies, "_registered", False)
    monkeypatch.setattr(torch.library, "register_fake", register)
    assert run_threads(4, rank) == [True] * 4 and names == ["seqpar_native::copy_"]
