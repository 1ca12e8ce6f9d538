"""CPU memory that a `GroupComm` gives out again."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from seqpar.comm.host_pool import IDLE, LEAST, MOST, HostPool

FLOATS = LEAST // 4


def at(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.float8_e4m3fn])
def test_memory_is_given_out_again_when_its_last_view_is_gone(dtype: torch.dtype) -> None:
    pool = HostPool()
    x = pool.empty((4, LEAST), dtype)
    assert x.shape == (4, LEAST)
    assert x.dtype == dtype
    assert x.is_contiguous()
    assert x.data_ptr() % 64 == 0
    first, view = at(x), x[1:].unbind()[2]
    del x
    other = pool.empty((4, LEAST), dtype)
    assert at(other) != first
    del view
    assert at(pool.empty((4, LEAST), dtype)) == first


def test_memory_that_backward_or_a_message_holds_is_not_given_out() -> None:
    pool = HostPool()
    x, weight = pool.empty((FLOATS,), torch.float32).fill_(2.0), torch.ones(FLOATS, requires_grad=True)
    product = (x * weight).sum()
    del x
    pool.empty((FLOATS,), torch.float32).fill_(9.0)
    product.backward()
    assert weight.grad is not None
    assert bool((weight.grad == 2.0).all())


def test_small_and_huge_tensors_are_not_kept() -> None:
    pool = HostPool()
    for shape in ((), (0, 3), (FLOATS - 1,), (MOST // 4 + 1,)):
        assert pool.empty(shape, torch.float32).shape == shape
    assert not pool._blocks


def test_a_block_serves_tensors_of_half_its_size_and_more() -> None:
    pool = HostPool()
    first = at(pool.empty((4 * FLOATS,), torch.float32))
    assert at(pool.empty((2, FLOATS), torch.float32)) == first
    small = pool.empty((2 * FLOATS - 1,), torch.float32)
    assert at(small) != first


def test_memory_that_waits_for_use_is_bounded() -> None:
    pool = HostPool()
    held = [pool.empty((MOST,), torch.uint8) for _ in range(2 * IDLE // MOST)]
    held.clear()
    pool.empty((LEAST,), torch.uint8)
    assert sum(block.memory.size for block in pool._blocks) <= IDLE + LEAST
    held = [pool.empty((MOST,), torch.uint8) for _ in range(2 * IDLE // MOST)]
    held.clear()
    pool.empty((MOST,), torch.uint8)  # one of them again
    assert sum(block.memory.size for block in pool._blocks) <= IDLE + MOST


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), max_size=30))
def test_no_two_tensors_share_memory(steps: list[tuple[int, int]]) -> None:
    pool, live = HostPool(), {}
    for number, (size, place) in enumerate(steps):
        live[place] = pool.empty((size, LEAST // 8), torch.int64).fill_(number), number
        assert all(bool((x == value).all()) for x, value in live.values())


def test_threads_get_memory_of_their_own() -> None:
    pool, wrong = HostPool(), []

    def work(number: int) -> None:
        for _ in range(200):
            x = pool.empty((FLOATS,), torch.float32).fill_(number)
            if not bool((x == number).all()):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
