"""`prefetch`: the same shares, planned ahead by a thread that ends; loaders that end or fail at different times."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from seqpar import Plan
from seqpar.comm import Comm, LocalComm
from seqpar.data import Share, back, prefetch, share
from seqpar.data.prefetch import planning_thread
from seqpar.data.snapshot import Snapshot
from seqpar.testing import run_processes, run_threads
from tests.data.cases import KINDS, make, ring


def loader(comm: Comm, count: int) -> list[Any]:
    """A rank's batches; every step has some token."""
    kinds = [KINDS[(comm.rank + 3 * step) % len(KINDS)] for step in range(count)]
    return [make(kind, 10 * step + comm.rank, "row").batch for step, kind in enumerate(kinds)]


def told(s: Share) -> Any:
    """A share as plain values."""
    home = back(s, s.tensors["input_ids"])
    tensors = {name: x.tolist() for name, x in s.tensors.items()}
    return s.plan.digest(), s.valid, tensors, s.positions.tolist(), [x.tolist() for x in home]


def ahead(comm: Comm, depth: int) -> list[Any]:
    return [told(s) for s in prefetch(loader(comm, 6), comm, depth=depth, plan=ring)]


def one_by_one(comm: Comm) -> list[Any]:
    return [told(share(batch, comm, plan=ring)) for batch in loader(comm, 6)]


@pytest.mark.parametrize("depth", [1, 2, 9])
def test_prefetched_shares_are_those_of_share(depth: int) -> None:
    assert run_threads(3, ahead, depth) == run_threads(3, one_by_one)


def test_processes_prefetch() -> None:
    assert run_processes(2, ahead, 1) == run_threads(2, one_by_one)


IDS = torch.arange(1, 9).reshape(2, 4)


def uneven(comm: Comm) -> list[tuple[int, int]]:
    """Valid labels and own rows of every share, where rank r's loader has 2 r batches."""
    batches = [{"input_ids": IDS, "labels": IDS}] * (2 * comm.rank)
    return [(s.valid, len(back(s, s.positions))) for s in prefetch(batches, comm, plan=ring)]


def test_a_rank_whose_loader_has_ended_brings_empty_batches() -> None:
    first, second, third = run_threads(3, uneven)
    assert first == [(12, 0), (12, 0), (6, 0), (6, 0)]
    assert second == [(12, 2), (12, 2), (6, 0), (6, 0)]
    assert third == [(12, 2), (12, 2), (6, 2), (6, 2)]


def test_loaders_without_a_batch_have_no_share() -> None:
    assert run_threads(2, lambda comm: list(prefetch([], comm))) == [[], []]


def test_loaders_of_a_replicated_source_end_together() -> None:
    def call(comm: Comm) -> int:
        batches = [{"input_ids": IDS}] * (2 + comm.rank)
        count = 0
        with pytest.raises(ValueError, match="the batch of rank 1 is not that of rank 0 .one loader has ended.;"):
            for _ in prefetch(batches, comm, source="replicated", plan=ring):
                count += 1
        return count

    assert run_threads(2, call) == [2, 2]


def failing(comm: Comm, rank: int) -> Iterator[Any]:
    yield {"input_ids": IDS}
    yield {"input_ids": IDS}
    if comm.rank == rank:
        raise OSError("no such shard")
    yield {"input_ids": IDS}


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "seqpar plans ahead" in thread.name]


def test_what_a_loader_raises_comes_in_its_turn_on_every_rank() -> None:
    def call(comm: Comm) -> tuple[int, Exception]:
        count = 0
        with pytest.raises((OSError, ValueError)) as raised:
            for _ in prefetch(failing(comm, 1), comm, plan=ring):
                count += 1
        return count, raised.value

    results = run_threads(3, call)
    assert [count for count, _ in results] == [2, 2, 2]
    assert isinstance(results[1][1], OSError)
    for rank in (0, 2):
        assert "rank 1 got no batch from its loader: OSError: no such shard" in str(results[rank][1])
    assert threads() == []


def test_a_loader_that_cannot_begin_is_told_to_all() -> None:
    def call(comm: Comm) -> str:
        with pytest.raises((TypeError, ValueError)) as raised:
            next(iter(prefetch([None, 3][comm.rank] or [], comm)))  # type: ignore[arg-type]
        return f"{type(raised.value).__name__}: {raised.value}"

    first, second = run_threads(2, call)
    assert second.startswith("TypeError: 'int' object is not iterable")
    assert "rank 1 got no batch from its loader: TypeError" in first


def test_the_next_plan_is_made_while_a_share_is_computed() -> None:
    def call(comm: Comm) -> tuple[set[str], bool]:
        names: list[str] = []
        planned = threading.Event()

        def plan(lengths: Any, ranks: int) -> Plan:
            names.append(threading.current_thread().name)
            if len(names) == 2:
                planned.set()
            return ring(lengths, ranks)

        shares = prefetch([{"input_ids": IDS}] * 4, comm, plan=plan)
        next(shares)
        in_time = planned.wait(60)
        return {*names, *[threading.current_thread().name for _ in shares if not names]}, in_time

    for names, in_time in run_threads(2, call):
        assert in_time
        assert all("seqpar plans ahead" in name for name in names)


def test_an_iterator_that_is_closed_leaves_no_thread() -> None:
    def call(comm: Comm) -> None:
        shares = prefetch([{"input_ids": IDS}] * 4, comm, plan=ring)
        next(shares)
        assert threads()
        shares.close()  # type: ignore[attr-defined]

    run_threads(2, call)
    assert threads() == []


def test_a_loop_after_the_end_is_another_epoch() -> None:
    def call(comm: Comm) -> list[Any]:
        shares = prefetch(loader(comm, 3), comm, plan=ring)
        first = next(iter(shares))  # a loop that begins in an epoch goes on with it
        epochs = [[told(first), *(told(s) for s in shares)], [told(s) for s in shares]]
        assert next(shares, None) is None  # no loop begins
        next(iter(shares))
        shares.close()  # type: ignore[attr-defined]
        epochs.append([told(s) for s, _ in zip(shares, range(3))])  # a loop that leaves the last batch by a break
        return [*epochs, [told(s) for s in shares]]

    for one, *others in run_threads(2, call):
        assert len(one) == 3 and others == [one, one, one]
    assert threads() == []


def test_a_block_may_end_in_the_thread_itself() -> None:
    """As that of an iterator that the thread collects."""
    kept = [planning_thread()]
    pool = kept[0].__enter__()
    pool.submit(kept.pop().__exit__, None, None, None).result(60)


def test_a_loop_after_an_error_is_another_epoch() -> None:
    def call(comm: Comm) -> list[int]:
        seen: list[int] = []
        for _ in range(2):
            with pytest.raises((ZeroDivisionError, ValueError)):
                for share in shares_of(comm):
                    seen.append(len(share.positions))
        return seen

    def shares_of(comm: Comm) -> Any:
        return kept.setdefault(comm.rank, prefetch(Failing(), comm, plan=ring))

    kept: dict[int, Any] = {}
    assert [sum(rows) for rows in zip(*run_threads(2, call))] == [6, 6]  # in each epoch


class Failing:
    """A loader whose second batch fails."""

    def __iter__(self) -> Iterator[Any]:
        yield {"input_ids": torch.arange(1, 4)[None]}
        raise ZeroDivisionError


def reusing(name: str, fill: Callable[[Tensor, int], object]) -> Iterator[dict[str, Tensor]]:
    """Batches of which one entry lies in memory that is filled anew."""
    memory = torch.zeros(1, 3, dtype=torch.int64)
    for n in range(4):
        fill(memory, n)
        yield {"input_ids": torch.full((1, 3), n), name: memory}


def by_numpy(memory: Tensor, n: int) -> None:
    memory.numpy().fill(n)  # unseen by the tensor's version


@pytest.mark.parametrize("fill", [Tensor.fill_, by_numpy])
@pytest.mark.parametrize("name", ["shift_labels", "weight", "kept"])
def test_a_batch_that_its_loader_fills_anew_is_an_error(name: str, fill: Callable[[Tensor, int], object]) -> None:
    def rank(comm: Comm) -> None:
        with pytest.raises(ValueError, match="a batch that was read ahead has been written to since"):
            list(prefetch(reusing(name, fill), comm, plan=ring, keep=["kept"]))

    run_threads(2, rank)


@pytest.mark.parametrize("padded", [False, True])
def test_a_loop_may_write_to_its_own_part_of_a_tensor_that_all_batches_are_parts_of(padded: bool) -> None:
    ids, old = torch.randint(1, 64, (4, 12)), torch.zeros(4, 12)
    more = {"attention_mask": torch.ones(1, 12, dtype=torch.int64)} if padded else {}
    batches = [{"input_ids": ids[k : k + 1], "old": old[k : k + 1], **more} for k in range(4)]
    seen = []
    for k, each in enumerate(prefetch(batches, LocalComm(), plan=ring)):
        seen.append(float(each.tensors["old"].sum()))
        old[k] = torch.nan
    assert seen == [0.0] * 4 and old.isnan().all()


def test_values_that_are_no_numbers_are_not_taken_for_written() -> None:
    batches = [{"input_ids": IDS[:1], "weight": torch.full((1, 4), torch.nan)} for _ in range(3)]
    assert len(list(prefetch(batches, LocalComm(), plan=ring))) == 3


def test_a_snapshot_holds_until_values_change_however_they_lie() -> None:
    kinds = [
        torch.zeros(()), torch.zeros(0), torch.zeros(3, dtype=torch.complex64).conj(), torch.zeros(4, dtype=torch.bool),
        torch.zeros(300, 300, 2), torch.zeros(300, 300, 2).permute(2, 0, 1), torch.zeros(3).expand(200_000, 3),
        torch.zeros(5, 5).T, torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), torch.zeros(3).to_sparse(),
        "text", [torch.zeros(3)], torch.full((4,), torch.nan), torch.empty(4, dtype=torch.uint4),
    ]  # fmt: skip
    with torch.inference_mode():
        kinds.append(torch.zeros(3))
    assert Snapshot(kinds).holds()
    for x in (*kinds[:8], kinds[11][0], kinds[12]):
        snapshot = Snapshot(kinds)
        if x.numel():
            (x if 0 not in x.stride() else x[:1]).fill_(1)
            assert not snapshot.holds(), x


@pytest.mark.parametrize("strided", [False, True])
def test_every_column_of_a_large_tensor_is_compared(strided: bool) -> None:
    x = torch.zeros(1, 64, 3000).transpose(1, 2) if strided else torch.zeros(1, 3000, 64)
    for column in range(64):
        snapshot = Snapshot([x, torch.zeros(1)])
        x.data[:, :, column] += 1  # which changes no version
        assert not snapshot.holds(), column


def test_a_write_beside_the_values_that_are_compared_is_seen_unless_others_have_the_same_memory() -> None:
    x, shared = torch.zeros(200, 1000), torch.zeros(2, 200, 1000)
    parts = Snapshot([shared[0], x.view(-1)])
    shared[1].fill_(1)
    assert parts.holds()
    for write in range(1, 4):
        snapshot = Snapshot([x])
        assert snapshot.holds()
        x[0, write] = 1
        assert not snapshot.holds()
    assert not parts.holds()


def test_a_depth_that_differs_is_named() -> None:
    def rank(comm: Comm) -> str:
        with pytest.raises(ValueError) as error:
            list(prefetch([{"input_ids": torch.arange(1, 4)[None]}] * 4, comm, depth=1 + 2 * comm.rank))
        return str(error.value)

    assert all("depth=1" in text and "depth=3" in text for text in run_threads(2, rank))


def test_depth_is_a_number() -> None:
    for error in ("0", "1.5"):
        with pytest.raises(ValueError, match=f"depth must be an integer of at least 1, got {error}"):
            run_threads(1, lambda comm: list(prefetch([], comm, depth=eval(error))))  # noqa: B023
