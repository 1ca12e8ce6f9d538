"""`share` and `back`: every token once, what it predicts, where it goes home; and what is refused, on every rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import seqpar
from seqpar import Mask
from seqpar.comm import Comm, LocalComm
from seqpar.data import Share, back, share
from seqpar.data.batch import Reading, read
from seqpar.testing import run_processes, run_threads
from tests.cases import examples
from tests.data.cases import IGNORE, KINDS, PLANNERS, Case, batches, make, ring
from tests.data.checks import check, check_home, check_rows


def shared(comm: Comm, cases: list[Case], planner: str, shift: str) -> tuple[Share, Any, Any, Any]:
    """A rank's share, and its ids, positions and a float of two dims back home."""
    batch = cases[comm.rank].batch
    s = share(batch, comm, plan=PLANNERS[planner], shift=shift)
    return s, back(s, s.tensors["input_ids"]), back(s, s.positions), back(s, s.tensors["weight"])


@examples(80)
@given(st.data())
def test_every_token_is_computed_once_with_its_label_and_goes_home(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 4), "ranks")
    shift = data.draw(st.sampled_from(["row", "document", "none"]), "shift")
    planner = data.draw(st.sampled_from(sorted(PLANNERS)), "planner")
    cases = data.draw(batches(ranks, shift))
    check(cases, run_threads(ranks, shared, cases, planner, shift))


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.sampled(2)
def test_every_form_of_batch_goes_with_every_other(planner: str) -> None:
    for i in range(0, len(KINDS), 2):
        cases = [make(kind, i, "row") for kind in (*KINDS[i : i + 2], "right", "packed")]
        check(cases, run_threads(4, shared, cases, planner, "row"))


def test_processes_share_as_threads_do() -> None:
    cases = [make("left", 3, "row"), make("list", 4, "row"), make("none", 5, "row")]
    check(cases, run_processes(3, shared_of, cases))


def shared_of(comm: Comm, cases: list[Case]) -> tuple[Any, ...]:
    s, *home = shared(comm, cases, "ring", "row")
    s.__dict__["comm"] = None  # a comm is of its process
    return (s, *home)


def one_device(batch: dict[str, Any]) -> int:
    """Labels that the loss of a causal model counts on one device: shifted along the row (transformers' loss_utils)."""
    rows = batch["labels"] if isinstance(batch["labels"], list) else [batch["labels"]]
    return sum(int((torch.nn.functional.pad(x, (0, 1), value=IGNORE)[..., 1:] != IGNORE).sum()) for x in rows)


def valid_of(comm: Comm, cases: list[Case]) -> int:
    return share(cases[comm.rank].batch, comm, plan=ring).valid


@examples(30)
@given(st.data())
def test_as_many_labels_count_as_on_one_device(data: st.DataObject) -> None:
    cases = data.draw(batches(data.draw(st.integers(1, 3)), "row"))
    expected = sum(one_device(case.batch) for case in cases if case.batch)
    assert set(run_threads(len(cases), valid_of, cases)) == {expected}


def test_a_label_of_a_padded_token_counts_if_a_token_predicts_it() -> None:
    batch = {
        "input_ids": torch.tensor([[5, 6, 7, 0, 0]]),
        "labels": torch.tensor([[IGNORE, 6, 7, 2, IGNORE]]),
        "attention_mask": torch.tensor([[1, 1, 1, 0, 0]]),
    }
    s = share(batch, LocalComm())
    assert s.tensors["labels"].tolist() == [6, 7, 2]
    assert s.valid == one_device(batch) == 3


def test_labels_that_are_shifted_already_stay() -> None:
    batch = {"input_ids": torch.tensor([[5, 6, 7]]), "shift_labels": torch.tensor([[6, 7, 8]])}
    assert share(batch, LocalComm()).tensors["labels"].tolist() == [6, 7, 8]


def test_a_batch_without_labels_has_none() -> None:
    s = share({"input_ids": torch.tensor([[5, 6, 7]])}, LocalComm())
    assert (sorted(s.tensors), s.valid) == (["input_ids"], 0)


def seen_in_row(mask: Tensor, causal: bool, window: tuple[int | None, int | None]) -> list[list[bool]]:
    """Who sees whom among the tokens of one row that count, by the places in the row as it came."""
    at = [t for t in range(len(mask)) if mask[t]]
    left, right = (float("inf") if w is None else w for w in (window[0], 0 if causal else window[1]))
    return [[-left <= key - query <= right for key in at] for query in at]


@examples(40)
@given(
    st.lists(st.lists(st.booleans(), min_size=9, max_size=9), min_size=1, max_size=4),
    st.booleans(),
    st.none() | st.integers(0, 5),
    st.none() | st.integers(0, 5),
)
def test_a_window_counts_the_tokens_that_are_masked_out(rows, causal, left, right) -> None:
    mask = torch.tensor(rows).long()
    mask[0, 4] = 1
    window = (left, None if causal else right)
    batch = {"input_ids": torch.ones_like(mask), "attention_mask": mask}
    got = share(batch, LocalComm()).mask_for(causal=causal, window=window)
    blocks = [seen_in_row(row, causal, window) for row in mask if row.any()]
    want = torch.block_diag(*[torch.tensor(block) for block in blocks]).bool().numpy()
    lo, hi = (bound[:, None] for bound in got.bounds(np.arange(got.tokens)))
    keys = np.arange(got.tokens)
    assert got.lengths.tolist() == [len(block) for block in blocks]
    assert np.array_equal((lo <= keys) & (keys < hi), want)


def windows_of(comm: Comm, masks: list[Tensor]) -> tuple[Mask, Mask]:
    mask = masks[comm.rank]
    s = share({"input_ids": torch.ones_like(mask), "attention_mask": mask}, comm)
    return s.mask_for(window=(2, None)), s.mask_for()


def test_windows_over_the_batches_of_all_ranks_are_those_of_one() -> None:
    rows = torch.tensor([[1, 0, 1, 1, 0, 1], [0, 0, 1, 1, 1, 1], [1, 1, 0, 0, 0, 1], [1, 1, 1, 1, 1, 0]])
    (alone,) = run_threads(1, windows_of, [rows])
    assert set(run_threads(3, windows_of, [rows[:1], rows[1:3], rows[3:]])) == {alone}
    assert alone[1] == Mask([4, 4, 3, 5])
    assert alone[0] != Mask([4, 4, 3, 5], window=(2, None))


def embedded(comm: Comm, source: str) -> tuple[Tensor, Tensor]:
    """The gradient of sum(w * home(3 x)) + sum(x) at this rank's batch x, and what it should be."""
    g = torch.Generator().manual_seed(0 if source == "replicated" else comm.rank)
    x = torch.randn(2, 4, 3, generator=g, dtype=torch.float64).requires_grad_()
    w = torch.randn(2, 4, 3, generator=g, dtype=torch.float64)
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]])
    batch = None if comm.rank == 1 and source == "sharded" else {"inputs_embeds": x, "attention_mask": mask}
    s = share(batch, comm, source=source, plan=ring)
    rows = s.tensors["inputs_embeds"]
    home = back(s, 3 * rows)
    loss = (w * home).sum() if batch else 0 * home.sum()
    (loss + rows.sum()).backward()
    want = (3 * w * (comm.size if source == "replicated" else 1) + 1) * mask[..., None]
    return (x.grad, want) if batch else (torch.zeros(1), torch.zeros(1))


def test_gradients_reach_the_batch_that_brought_the_rows() -> None:
    for got, want in run_threads(3, embedded, "sharded"):
        assert torch.equal(got, want)


def test_gradients_of_a_replicated_batch_sum_over_ranks() -> None:
    results = run_threads(3, embedded, "replicated")
    torch.testing.assert_close(sum(got for got, _ in results), results[0][1])


def replicated(comm: Comm, case: Case) -> tuple[Share, Any, Any, Any]:
    s = share(case.batch, comm, source="replicated", plan=ring)
    assert comm.stats.bytes_sent == 0
    return s, back(s, s.tensors["input_ids"]), back(s, s.positions), back(s, s.tensors["weight"])


@pytest.mark.parametrize("kind", ["left", "holes", "list", "packed"])
def test_a_replicated_batch_is_shared_without_an_exchange_and_goes_home_to_every_rank(kind: str) -> None:
    case = make(kind, 7, "row")
    results = run_threads(3, replicated, case)
    check_rows(case.documents, [s for s, *_ in results])
    for _, *home in results:
        check_home(case, *home)


def test_a_replicated_batch_of_lazily_conjugated_rows_is_compared() -> None:
    rows = torch.arange(6).reshape(1, 6)
    batch = {"input_ids": rows, "phase": torch.complex(rows.float(), 1 + rows.float()).conj()}

    def rank(comm: Comm) -> Tensor:
        s = share(batch, comm, source="replicated", plan=ring)
        return back(s, s.tensors["phase"])

    assert all(torch.equal(got, batch["phase"]) for got in run_threads(2, rank))


def exchanges(comm: Comm) -> tuple[int, Any]:
    ids = torch.arange(12).reshape(2, 6)
    extra = {"token_type_ids": ids + 1, "scores": torch.rand(2, 6, 2), "weights": torch.rand(2, 6), "names": ["a", "b"]}
    s = share({"input_ids": ids, "labels": ids, **extra}, comm, plan=ring, keep=["names"])
    return comm.stats.exchanges, (sorted(s.tensors), s.others, s.tensors["token_type_ids"] - s.tensors["input_ids"])


def test_tensors_of_one_kind_move_together_and_other_entries_are_kept() -> None:
    for count, (names, others, one) in run_threads(2, exchanges):
        assert count == 2  # integers, floats
        assert names == ["input_ids", "labels", "scores", "token_type_ids", "weights"]
        assert others == {"names": ["a", "b"]}
        assert set(one.tolist()) == {1}


def test_rows_go_to_the_device_that_is_asked_for() -> None:
    batch = {"input_ids": torch.ones(2, 3, dtype=torch.int64), "labels": torch.ones(2, 3, dtype=torch.int64)}
    packed = read(batch, Reading(device="meta"))
    assert {x.device.type for x in packed.tensors.values()} == {"meta"}
    assert packed.valid.tolist() == [[2], [2]]


def test_without_a_planner_no_memory_is_too_small() -> None:
    ids = torch.zeros(1, 200_000, dtype=torch.int64)
    assert share({"input_ids": ids}, LocalComm()).plan.rows(0) == 200_000


def test_a_replicated_batch_may_have_its_entries_in_any_order() -> None:
    ids = torch.arange(12).view(2, 6)
    orders = ({"input_ids": ids, "a": ids * 2, "b": ids * 3}, {"input_ids": ids, "b": ids * 3, "a": ids * 2})

    def rank(comm: Comm) -> dict[str, Tensor]:
        return dict(share(orders[comm.rank], comm, source="replicated").tensors)

    one, other = run_threads(2, rank)
    whole = {name: torch.cat([x[name], y[name]]).sort().values for x, y in ((one, other),) for name in ("a", "b")}
    assert torch.equal(whole["a"], (ids * 2).flatten()) and torch.equal(whole["b"], (ids * 3).flatten())


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
@pytest.mark.parametrize("source", ["sharded", "replicated"])
def test_columns_of_unsigned_integers(dtype: torch.dtype, source: str) -> None:
    ids, mask = torch.arange(12).view(2, 6), torch.ones(2, 6, dtype=torch.long)
    mask[1, 4:] = 0

    def rank(comm: Comm) -> tuple[Tensor, Tensor]:
        batch = {"input_ids": ids, "attention_mask": mask, "speaker": ids.to(dtype)}
        tensors = share(batch, comm, source=source).tensors
        return tensors["input_ids"], tensors["speaker"]

    for tokens, speakers in run_threads(2, rank):
        assert speakers.dtype == dtype and torch.equal(speakers.long(), tokens.long())
    plan = seqpar.Plan(seqpar.Mask([12]), seqpar.Layout.zigzag([12], 2))
    rows = seqpar.shard(torch.arange(12).to(dtype), plan, 1)
    assert rows.dtype == dtype and torch.equal(rows.long(), seqpar.shard(torch.arange(12), plan, 1))


def empty_on_rank_1(comm: Comm, empty: Any) -> tuple[bool, Tensor]:
    s = share({"input_ids": [torch.arange(5)]} if comm.rank == 0 else empty, comm, plan=ring)
    x = torch.ones(s.plan.rows(comm.rank), 3, requires_grad=True)
    home = back(s, x)
    results = home if isinstance(home, list) else [home]
    torch.stack([(2 * each).sum() for each in results]).sum().backward()
    return isinstance(home, list), x.grad  # type: ignore[return-value]


@pytest.mark.parametrize("empty", [None, {"input_ids": torch.zeros(0, 4, dtype=torch.long)}, {"input_ids": []}])
def test_gradients_come_to_a_rank_whose_batch_is_empty(empty: Any) -> None:
    found = run_threads(2, empty_on_rank_1, empty, timeout=10)
    assert [several for several, _ in found] == [True, bool(empty) and isinstance(empty["input_ids"], list)]
    assert all(torch.equal(grad, torch.full_like(grad, 2)) for _, grad in found)
    assert sum(len(grad) for _, grad in found) == 5


@pytest.mark.parametrize("source", ["sharded", "replicated"])
@pytest.mark.parametrize("rows", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_move_under_autocast_as_they_are(dtype: torch.dtype, rows: torch.dtype, source: str) -> None:
    def rank(comm: Comm) -> tuple[bool, Tensor]:
        given = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(0)).to(rows).requires_grad_()
        with torch.autocast("cpu", dtype):
            s = share({"inputs_embeds": given}, comm, source=source, plan=ring)
            home = back(s, s.tensors["inputs_embeds"])
        home.sum().backward()  # type: ignore[union-attr]
        return torch.equal(home, given), given.grad  # type: ignore[arg-type, return-value]

    results = run_threads(2, rank)
    assert all(same for same, _ in results)
    grads = [grad for _, grad in results]
    total = grads[0] if source == "sharded" else sum(grads) / 2
    assert torch.equal(total, torch.ones_like(total))


@pytest.mark.parametrize("shift", ["row", "document", "none"])
@pytest.mark.parametrize("given", [False, True], ids=["counted", "given"])
def test_a_mask_that_numbers_documents_is_as_documents(given: bool, shift: str) -> None:
    """Rows of 4 + 3 tokens and one pad, and of one pad, 2, a pad and 4."""
    mask = torch.tensor([[1, 1, 1, 1, 2, 2, 2, 0], [0, 1, 1, 0, 3, 3, 3, 3]])
    ids = torch.arange(1, 17).view(2, 8)
    labels = ids.masked_fill(mask.diff(dim=1, prepend=mask.new_zeros(2, 1)) != 0, IGNORE).masked_fill(mask == 0, IGNORE)
    batch = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    documents = [ids[0, :4], ids[0, 4:7], ids[1, 1:3], ids[1, 4:]]
    expected = {"input_ids": documents, "labels": [x.clone() for x in documents]}
    for each in expected["labels"]:
        each[0] = IGNORE
    if given:
        batch["position_ids"] = torch.tensor([[5, 6, 7, 8, 0, 1, 2, 0], [0, 3, 4, 0, 0, 1, 2, 3]])
        expected["position_ids"] = [
            batch["position_ids"][row, at]
            for row, at in ((0, slice(4)), (0, slice(4, 7)), (1, slice(1, 3)), (1, slice(4, 8)))
        ]

    def rank(comm: Comm, given: Any) -> tuple[list[int], dict[str, Tensor], int, Any]:
        s = share(given if comm.rank else None, comm, plan=ring, shift=shift)
        return (
            s.plan.mask.lengths.tolist(),
            {**s.tensors, "position_ids": s.positions},
            s.valid,
            back(s, s.tensors["input_ids"]),
        )

    for one, other in zip(run_threads(2, rank, batch), run_threads(2, rank, expected), strict=True):
        assert one[0] == other[0] == [4, 3, 2, 4] and one[2] == other[2]
        assert one[1].keys() == other[1].keys() and all(torch.equal(one[1][name], other[1][name]) for name in one[1])
    assert torch.equal(run_threads(2, rank, batch)[1][3], ids * (mask > 0))
