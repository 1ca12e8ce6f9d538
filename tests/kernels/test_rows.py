"""`pack`, `place`, `add_`: equal to plain indexing bit by bit, and nothing around is read or written."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from seqpar.kernels.memory import rows as dispatched
from tests.kernels.versions import VERSIONS, version

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
Rows = slice | list[int]


@st.composite
def chosen(draw: st.DrawFn) -> tuple[int, Rows]:
    """How many rows there are, and some of them: consecutive, or in any order."""
    total = draw(st.integers(0, 40))
    if draw(st.booleans()):
        first, last = sorted(draw(st.tuples(st.integers(0, total), st.integers(0, total))))
        return total, slice(first, last)
    return total, draw(st.permutations(range(total)))[: draw(st.integers(0, total))]


def listed(total: int, rows: Rows) -> list[int]:
    return list(range(total))[rows] if isinstance(rows, slice) else rows


def on(device: str, rows: Rows, kind: torch.dtype = torch.int64) -> slice | Tensor:
    return rows if isinstance(rows, slice) else torch.tensor(rows, dtype=kind, device=device)


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
@settings(max_examples=30)
@given(chosen(), st.lists(st.tuples(TAILS, LAYOUTS), min_size=1, max_size=3), st.sampled_from(FLOATS))
def test_pack_lays_rows_side_by_side(name, choice, kinds, dtype) -> None:
    kernels, device = version(name, "rows")
    total, rows = choice
    at = listed(total, rows)
    sources = [random((total, *tail), dtype, seed) for seed, (tail, _) in enumerate(kinds)]
    dirty = [x.clone().index_fill_(0, torch.tensor(sorted(set(range(total)) - set(at)), dtype=torch.int64), torch.nan)
             for x in sources]  # fmt: skip
    placed = [within(x, layout) for x, (_, layout) in zip(dirty, kinds, strict=True)]
    memory, out = within(torch.full((len(at), sum(prod(t) for t, _ in kinds)), torch.nan, dtype=dtype), "gap")
    expected, view = moved(out, memory.clone(), "cpu")[::-1]
    view.copy_(torch.cat([x[at].flatten(1) for x in sources], 1))

    out, memory = moved(out, memory, device)
    kernels.pack([moved(x, m, device)[0] for m, x in placed], on(device, rows), out)
    same(memory, expected)


@pytest.mark.parametrize("name", VERSIONS)
@settings(max_examples=30)
@given(chosen(), TAILS, LAYOUTS, LAYOUTS, st.sampled_from(FLOATS), st.sampled_from([torch.float32, torch.int32]))
def test_place_and_add_touch_their_rows_alone(name, choice, tail, there, here, dtype, other) -> None:
    kernels, device = version(name, "rows")
    total, rows = choice
    at = listed(total, rows)
    kind = torch.int32 if other == torch.int32 else torch.int64  # row numbers of either width
    values, target = random((len(at), *tail), dtype, 1), random((total, *tail), dtype, 2)
    for function in ("place", "add_"):
        memory, view = within(target, there)
        expected, into = moved(view, memory.clone(), "cpu")[::-1]
        for n, row in enumerate(at):
            into[row] = values[n] if function == "place" else (into[row].double() + values[n].double()).to(dtype)
        x, memory = moved(view, memory, device)
        source = moved(*within(values, here)[::-1], device)[0]
        if function == "place":
            kernels.place(source, on(device, rows, kind), x)
            same(memory, expected)
        else:
            kernels.add_(x, on(device, rows, kind), source)
            # Two 16-bit numbers are added in float32 and rounded, by the interpreter towards zero.
            tolerance = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-23}.get(dtype, 0.0)
            torch.testing.assert_close(memory.cpu(), expected, rtol=tolerance, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", VERSIONS)
@pytest.mark.parametrize("low", FLOATS)
@pytest.mark.parametrize("rows", [slice(1, 3), [3, 0]])
def test_values_of_another_dtype_are_cast_or_added_in_the_wider(name, low, rows) -> None:
    kernels, device = version(name, "rows")
    values, at = random((2, 3), low), listed(4, rows)
    for wide in (torch.float32, torch.float64):
        placed, added = torch.zeros(4, 3, dtype=wide, device=device), torch.ones(4, 3, dtype=wide, device=device)
        kernels.place(values.to(device), on(device, rows), placed)
        kernels.add_(added, on(device, rows), values.to(device))
        torch.testing.assert_close(placed[at].cpu(), values.to(wide), rtol=0, atol=0)
        torch.testing.assert_close(added[at].cpu(), (values.double() + 1).to(wide), rtol=2**-22, atol=2**-22)
    rounded = torch.zeros(4, 3, dtype=low, device=device)
    kernels.place(values.double().to(device), on(device, rows), rounded)
    torch.testing.assert_close(rounded[at].cpu(), values, rtol=0, atol=0)


@pytest.mark.parametrize("name", VERSIONS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_integers_are_moved_too(name, dtype) -> None:
    kernels, device = version(name, "rows")
    x = torch.arange(24, dtype=dtype, device=device).view(6, 4)
    out = torch.zeros(2, 4, dtype=dtype, device=device)
    kernels.pack([x], on(device, [5, 2]), out)
    assert torch.equal(out, x[[5, 2]])


@pytest.mark.parametrize("name", VERSIONS)
def test_rows_wider_than_a_tile(name) -> None:
    kernels, device = version(name, "rows")
    x, y = random((5, 2500), torch.float32).to(device), random((5, 3), torch.float32).to(device)
    out = torch.full((3, 2503), torch.nan, device=device)
    kernels.pack([x, y], on(device, [4, 0, 3]), out)
    assert torch.equal(out, torch.cat([x, y], 1)[[4, 0, 3]])


@pytest.mark.parametrize("name", VERSIONS)
@pytest.mark.parametrize("order", [1, -1])
def test_heads_beside_dense_rows(name, order) -> None:
    """One launch moves rows of two slices and rows of one, and neither reaches into the other."""
    kernels, device = version(name, "rows")
    heads = torch.randn(2, 4, 5, device=device).movedim(-1, 0)
    pair = [heads, torch.randn(5, 6, device=device)][::order]
    memory = torch.full((3, 16), torch.nan, device=device)
    kernels.pack(pair, on(device, [4, 0, 2]), memory[:, 1:15])
    expected = torch.cat([x[[4, 0, 2]].flatten(1) for x in pair], 1)
    torch.testing.assert_close(memory, torch.nn.functional.pad(expected, (1, 1), value=torch.nan), equal_nan=True)


@pytest.mark.parametrize("name", VERSIONS)
def test_a_row_may_be_one_number(name) -> None:
    kernels, device = version(name, "rows")
    x = torch.arange(7.0, device=device)
    kernels.add_(x, on(device, [6, 1]), torch.ones(2, device=device))
    kernels.place(torch.zeros(2, device=device), slice(3, 5), x)
    assert x.tolist() == [0.0, 2.0, 2.0, 0.0, 0.0, 5.0, 7.0]


@pytest.mark.parametrize("name", ["pack", "place", "add_"])
def test_a_device_of_tritons_takes_its_kernels(name, monkeypatch) -> None:
    fused, device = pytest.importorskip("triton", reason="triton is not installed") and version("triton", "rows")
    called = []
    monkeypatch.setattr(dispatched, "on_triton", lambda x: True)
    monkeypatch.setattr(fused, name, lambda *args: called.append(args))
    args = (torch.zeros(1, 1), slice(None), torch.zeros(1, 1))
    getattr(dispatched, name)(*args)
    assert called == [args]
