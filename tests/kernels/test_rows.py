"""Rows by number, copied, cast and added: equal to plain indexing bit by bit, and nothing around is read or written."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from seqpar.kernels.memory import copy as dispatched
from seqpar.kernels.memory.copy import Pair
from tests.cases import examples
from tests.kernels.versions import VERSIONS, version

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def functions(name: str) -> tuple[Callable[[Sequence[Pair]], None], Callable[[Pair], None], str]:
    """What writes pairs and what adds one, and their device."""
    kernels, device = version(name, "rows")
    if name == "triton":
        return kernels.write, kernels.add, device
    return lambda pairs: [kernels.cast(pair) for pair in pairs], kernels.add, device


@st.composite
def chosen(draw: st.DrawFn) -> tuple[int, list[int]]:
    """How many rows there are, and some of them in any order."""
    total = draw(st.integers(1, 40))
    return total, draw(st.permutations(range(total)))[: draw(st.integers(1, total))]


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def within(x: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """(memory full of NaN, a view of it that holds x), whose rows are dense, have a gap, or lie transposed."""
    shape = list(x.shape)
    if layout == "transposed":
        memory = torch.full([*shape[1:], shape[0] + 3], torch.nan, dtype=x.dtype)
        view = memory[..., 1 : 1 + shape[0]].movedim(-1, 0)
    else:
        gap = 2 if layout == "gap" else 0
        memory = torch.full([shape[0] + 2, shape[1] + gap, *shape[2:]], torch.nan, dtype=x.dtype)
        view = memory[1 : 1 + shape[0], gap // 2 : gap // 2 + shape[1]]
    view.copy_(x)
    return memory, view


def moved(view: Tensor, memory: Tensor, device: str) -> tuple[Tensor, Tensor]:
    """The view and its memory on another device."""
    there = memory.to(device)
    return there.as_strided(view.shape, view.stride(), view.storage_offset()), there


def same(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=0, equal_nan=True)


LAYOUTS = st.sampled_from(["dense", "gap", "transposed"])
TAILS = st.sampled_from([(1,), (5,), (2, 8), (3, 5), (1, 17)])


@pytest.mark.parametrize("name", VERSIONS)
@examples(30)
@given(chosen(), st.lists(st.tuples(TAILS, LAYOUTS), min_size=1, max_size=3), st.sampled_from(FLOATS))
def test_rows_of_several_tensors_are_read_by_number(name, choice, kinds, dtype) -> None:
    write, _, device = functions(name)
    total, rows = choice
    unread = torch.tensor(sorted(set(range(total)) - set(rows)), dtype=torch.int64)
    numbers, pairs, results = torch.tensor(rows, device=device), [], []
    for seed, (tail, layout) in enumerate(kinds):
        source = random((total, *tail), dtype, seed)
        memory, out = within(torch.full((len(rows), *tail), torch.nan, dtype=dtype), "gap")
        view, expected = moved(out, memory.clone(), "cpu")
        view.copy_(source[rows])
        x = moved(*within(source.index_fill_(0, unread, torch.nan), layout)[::-1], device)[0]
        out, memory = moved(out, memory, device)
        pairs.append(Pair(out, x, None, numbers))
        results.append((memory, expected))
    write(pairs)
    for memory, expected in results:
        same(memory, expected)


@pytest.mark.parametrize("name", VERSIONS)
@examples(30)
@given(chosen(), TAILS, LAYOUTS, LAYOUTS, st.sampled_from(FLOATS), st.sampled_from([torch.int64, torch.int32]))
def test_written_and_added_rows_are_touched_alone(name, choice, tail, there, here, dtype, width) -> None:
    write, add, device = functions(name)
    total, rows = choice
    numbers = torch.tensor(rows, device=device, dtype=width)
    values, target = random((len(rows), *tail), dtype, 1), random((total, *tail), dtype, 2)
    source = moved(*within(values, here)[::-1], device)[0]
    for added in (False, True):
        memory, view = within(target, there)
        into, expected = moved(view, memory.clone(), "cpu")
        for n, row in enumerate(rows):
            into[row] = (into[row].double() + values[n].double()).to(dtype) if added else values[n]
        x, memory = moved(view, memory, device)
        if added:
            add(Pair(x, source, numbers))
            # Two 16-bit numbers are added in float32 and rounded, by the interpreter towards zero.
            tolerance = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-23}.get(dtype, 0.0)
            torch.testing.assert_close(memory.cpu(), expected, rtol=tolerance, atol=0, equal_nan=True)
        else:
            write([Pair(x, source, numbers)])
            same(memory, expected)


@pytest.mark.parametrize("name", VERSIONS)
@pytest.mark.parametrize("low", FLOATS)
def test_values_of_another_dtype_are_cast_or_added_in_the_wider(name, low) -> None:
    write, add, device = functions(name)
    values, numbers = random((2, 3), low), torch.tensor([3, 0], device=device)
    for wide in (torch.float32, torch.float64):
        placed, added = torch.zeros(4, 3, dtype=wide, device=device), torch.ones(4, 3, dtype=wide, device=device)
        write([Pair(placed, values.to(device), numbers)])
        add(Pair(added, values.to(device), numbers))
        torch.testing.assert_close(placed[[3, 0]].cpu(), values.to(wide), rtol=0, atol=0)
        torch.testing.assert_close(added[[3, 0]].cpu(), (values.double() + 1).to(wide), rtol=2**-22, atol=2**-22)
    rounded = torch.zeros(4, 3, dtype=low, device=device)
    write([Pair(rounded, values.double().to(device), numbers)])
    torch.testing.assert_close(rounded[[3, 0]].cpu(), values, rtol=0, atol=0)


@pytest.mark.parametrize("name", VERSIONS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_integers_go_from_rows_to_rows(name, dtype) -> None:
    write, _, device = functions(name)
    x = torch.arange(24, dtype=dtype, device=device).view(6, 4)
    out = torch.zeros(3, 4, dtype=dtype, device=device)
    write([Pair(out, x, torch.tensor([2, 0], device=device), torch.tensor([5, 2], device=device))])
    assert torch.equal(out, torch.stack([x[2], torch.zeros_like(x[0]), x[5]]))


@pytest.mark.parametrize("name", VERSIONS)
def test_rows_wider_than_a_tile(name) -> None:
    write, _, device = functions(name)
    x, y = random((5, 2500), torch.float32).to(device), random((5, 3), torch.float32).to(device)
    numbers, out = torch.tensor([4, 0, 3], device=device), torch.full((3, 2503), torch.nan, device=device)
    write([Pair(out[:, :2500], x, None, numbers), Pair(out[:, 2500:], y, None, numbers)])
    assert torch.equal(out, torch.cat([x, y], 1)[[4, 0, 3]])


@pytest.mark.parametrize("name", VERSIONS)
@pytest.mark.parametrize("order", [1, -1])
def test_heads_beside_dense_rows(name, order) -> None:
    """One launch moves rows of two slices and rows of one, and neither reaches into the other."""
    write, _, device = functions(name)
    memory, numbers = torch.full((3, 16), torch.nan, device=device), torch.tensor([4, 0, 2], device=device)
    heads, dense = torch.randn(2, 4, 5, device=device).movedim(-1, 0), torch.randn(5, 6, device=device)
    pairs = [Pair(memory[:, 1:9].view(3, 2, 4), heads, None, numbers), Pair(memory[:, 9:15], dense, None, numbers)]
    write(pairs[::order])
    expected = torch.cat([x[[4, 0, 2]].flatten(1) for x in (heads, dense)], 1)
    torch.testing.assert_close(memory, torch.nn.functional.pad(expected, (1, 1), value=torch.nan), equal_nan=True)


@pytest.mark.parametrize("name", VERSIONS)
def test_a_row_may_be_one_number(name) -> None:
    write, add, device = functions(name)
    x = torch.arange(7.0, device=device)
    add(Pair(x, torch.ones(2, device=device), torch.tensor([6, 1], device=device)))
    write([Pair(x, torch.zeros(2, device=device), torch.tensor([3, 4], device=device))])
    assert x.tolist() == [0.0, 2.0, 2.0, 0.0, 0.0, 5.0, 7.0]


def test_triton_launches_once_for_tensors_with_the_same_numbers(monkeypatch) -> None:
    fused, device = pytest.importorskip("triton", reason="triton is not installed") and version("triton", "rows")
    launched = []
    monkeypatch.setattr(fused, "_launch", lambda pairs, add: launched.append((len(pairs), add)))
    x, first, second = torch.zeros(2, 1), torch.tensor([0, 1]), torch.tensor([1, 0])
    fused.write([Pair(x, x, None, first), Pair(x, x, None, first), Pair(x, x, None, second), Pair(x, x, second, first)])
    fused.add(Pair(x, x, first))
    assert launched == [(2, False), (1, False), (1, False), (1, True)]


def test_triton_takes_numbered_rows_alone(monkeypatch) -> None:
    """What its kernel does not take, and copies that torch makes in one pass, are torch's."""
    fused, device = pytest.importorskip("triton", reason="triton is not installed") and version("triton", "rows")
    monkeypatch.setattr(dispatched, "on_triton", lambda x: True)
    monkeypatch.setattr(dispatched, "_compiled", lambda pairs: False)
    written = []
    monkeypatch.setattr(fused, "write", written.extend)
    monkeypatch.setattr(fused, "add", written.append)
    numbers, source = torch.tensor([1, 0]), torch.arange(6.0).view(2, 3)
    taken = Pair(torch.zeros(2, 3), source, numbers)
    deep = torch.zeros(2, 2, 2, 2).transpose(1, 3)
    others = [
        Pair(torch.zeros(2, 3), source),
        Pair(torch.zeros(2, 3, dtype=torch.bool), source.bool(), numbers),
        Pair(torch.zeros(2, 3, dtype=torch.complex64), (source * 1j).conj(), numbers),
        Pair(deep, torch.ones(2, 2, 2, 2), numbers),
    ]
    dispatched.copy([others[0], taken, *others[1:]])
    dispatched.cast(taken)
    dispatched.add(taken)
    assert len(written) == 3 and all(pair is taken for pair in written)
    assert torch.equal(others[0].dst, source) and torch.equal(others[1].dst, source.bool().flip(0))
    assert torch.equal(others[2].dst, (source * -1j).flip(0)) and deep.all()


@pytest.mark.parametrize("layout", ["dense", "gap"])
def test_rows_beyond_the_limits_of_a_grid(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of more slices, and longer ones, than one launch may have programs for."""
    pytest.importorskip("triton", reason="triton is not installed")
    kernels, device = version("triton", "rows")
    launched: list[tuple[int, ...]] = []
    launch = kernels._launch_tiled
    monkeypatch.setattr(
        kernels, "_launch_tiled", lambda pairs, *rest: (launched.append(tuple(pairs[0][0].shape)), launch(pairs, *rest))
    )
    monkeypatch.setattr(kernels, "PROGRAMS", 3)
    several = [random((6, 7, 5), torch.float32), random((6, 2, 3000), torch.float32, seed=1)]
    held = [within(torch.zeros_like(x), layout) for x in several]
    to = torch.tensor([4, 0, 2])
    for x, (memory, view) in zip(several, held):
        there, around = moved(view, memory, device)
        kernels.write([(there, x.to(device), to.to(device), to.flip(0).to(device))])
        expected = torch.zeros_like(x)
        expected[to] = x[to.flip(0)]
        same(there, expected)
    assert len(launched) > 2 and all(x[1] <= 3 and x[2] <= 3 * 1024 for x in launched)
