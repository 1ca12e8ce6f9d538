"""What `share` and `back` refuse: on every rank, with the cause's own error where it is, before a row moves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from seqpar import Layout, Mask, Plan, plan_batch
from seqpar.comm import Comm, LocalComm
from seqpar.data import back, share
from seqpar.data.batch import Reading, read
from seqpar.testing import run_threads
from tests.data.cases import IGNORE, ring

IDS = torch.arange(1, 13).reshape(2, 6)
GOOD = {"input_ids": IDS, "labels": IDS}
LEFT = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
ROW = torch.arange(6)[None]


def answer(comm: Comm, call: Callable[[Comm], Any]) -> Exception:
    """What a call raises on this rank; it moves nothing, and the comm is alive after it."""
    with pytest.raises((ValueError, NotImplementedError)) as raised:
        call(comm)
    assert comm.stats.bytes_sent == 0
    assert share(GOOD, comm, plan=ring).valid == 10 * comm.size
    return raised.value


def one_bad(comm: Comm, bad: Any, options: dict[str, Any], rank: int) -> Exception:
    return answer(comm, lambda c: share(bad if c.rank == rank else GOOD, c, plan=ring, **options))


BATCHES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "not a mapping": (IDS, {}, "a batch is a mapping"),
    "no ids": ({"labels": IDS}, {}, "a batch needs input_ids or inputs_embeds"),
    "float ids": ({"input_ids": IDS.float()}, {}, "input_ids must hold one integer per token"),
    "ids of three dims": ({"input_ids": IDS[None]}, {}, r"must be a tensor \[B, S\] or \[T\]"),
    "labels of another shape": (GOOD | {"labels": IDS[:, :5]}, {}, r"labels must be a tensor whose first dims"),
    "both labels": (GOOD | {"shift_labels": IDS}, {}, "labels and shift_labels are both given"),
    "a number": (GOOD | {"num_items": 3}, {}, r"keep=\('num_items',\)"),
    "a mask that is kept": (GOOD | {"attention_mask": LEFT}, {"keep": ["attention_mask"]}, "would leave .* unread"),
    "a 4-D mask": (GOOD | {"attention_mask": torch.ones(2, 1, 6, 6)}, {}, "attention_mask .* only"),
    "positions of three dims": (GOOD | {"position_ids": ROW.expand(3, 2, 6)}, {}, "position_ids .* only"),
    "a mask of negative numbers": (GOOD | {"attention_mask": LEFT - 1}, {}, "attention_mask must hold 0 or 1, or"),
    "numbers that go back": (GOOD | {"attention_mask": 2 - LEFT}, {}, "decreases at row 0, token 2; number them"),
    "numbers beside documents": (
        {"input_ids": IDS[:1], "attention_mask": LEFT[:1] + 1, "cu_seqlens": [0, 6]}, {}, "gives the documents twice"
    ),
    "a label after padding": (
        GOOD | {"attention_mask": LEFT, "labels": IDS.masked_fill(LEFT == 0, -100)},
        {},
        "labels at row 0, token 2 would be predicted by the token before it, .* set labels\\[:, 1:\\]",
    ),
    "labels on the left of it": (
        GOOD | {"attention_mask": LEFT}, {}, "labels of pads must be -100 .* labels at row 0, token 1 is another"
    ),
    "a label in padding": (
        GOOD | {"attention_mask": LEFT}, {"shift": "document"}, r"is another.* set labels\[attention_mask == 0\]"
    ),
    "a shifted label in padding": (
        {"input_ids": IDS, "shift_labels": IDS, "attention_mask": LEFT}, {}, "shift_labels at row 0, token 0 is another"
    ),
    "positions that restart under a mask": (
        GOOD | {"attention_mask": torch.ones(2, 6), "position_ids": ROW % 3}, {}, "restart at row 0, token 3"
    ),
    "cu_seqlens of rows": (GOOD | {"cu_seqlens": [0, 6, 12]}, {}, r"belongs to one packed row"),
    "cu_seqlens that end early": (
        {"input_ids": IDS[:1], "cu_seqlens": [0, 2, 5]}, {}, "cu_seqlens must ascend from 0 to the batch's 6"
    ),
    "cu_seqlens in floating point": (
        {"input_ids": IDS[:1], "cu_seqlens": torch.tensor([0, 6], dtype=torch.bfloat16)}, {}, "got torch.bfloat16 .2."
    ),
    "keys of other documents": (
        {"input_ids": IDS[:1], "cu_seq_lens_q": [0, 2, 6], "cu_seq_lens_k": [0, 3, 6]}, {}, "cu_seq_lens_k must be"
    ),
    "another longest": (
        {"input_ids": IDS[:1], "cu_seqlens": [0, 2, 6], "max_seqlen": 6}, {}, "max_seqlen is 6, .* has 4 tokens"
    ),
    "a longest that is no integer": (
        {"input_ids": IDS[:1], "cu_seqlens": [0, 2, 6], "max_seqlen": 4.7}, {}, "max_seqlen is 4.7, .* has 4 tokens"
    ),
    "a longest without documents": ({"input_ids": IDS[:1], "max_seqlen": 6}, {}, "max_seqlen without cu_seqlens"),
    "documents twice": (
        {"input_ids": IDS[:1], "cu_seqlens": [0, 2, 6], "attention_mask": LEFT[:1]}, {}, "gives the documents twice"
    ),
    "a list of other lengths": (
        {"input_ids": [IDS[0], IDS[1]], "labels": [IDS[0], IDS[1, :3]]}, {}, "labels must be a list of tensors"
    ),
    "a list with a mask": ({"input_ids": [IDS[0]], "attention_mask": [LEFT[0]]}, {}, "attention_mask with a list"),
}  # fmt: skip


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_that_is_wrong_on_one_rank_is_refused_on_all(name: str) -> None:
    bad, options, message = BATCHES[name]
    errors = run_threads(3, one_bad, bad, options, 1)
    with pytest.raises(type(errors[1]), match=message):
        raise errors[1]
    for rank in (0, 2) if "keep" not in options else ():  # the option is wrong on all
        assert isinstance(errors[rank], ValueError)
        assert f"rank 1 refused its arguments: {type(errors[1]).__name__}: {errors[1]}" in str(errors[rank])


def elsewhere(comm: Comm, other: dict[str, Any], options: dict[str, Any]) -> Exception:
    """Rank 1 gives another batch, or other options."""
    mine = comm.rank == 1
    return answer(comm, lambda c: share(GOOD | (other if mine else {}), c, plan=ring, **(options if mine else {})))


@pytest.mark.parametrize(
    ("other", "options", "message"),
    [
        ({"extra": IDS}, {}, r"extra is missing on rank 0 and torch.int64 \[tokens\] on cpu on rank 1"),
        ({"input_ids": IDS.int()}, {}, r"input_ids is torch.int64 \[tokens\] on cpu on rank 0 and torch.int32"),
        ({}, {"shift": "none"}, "ranks differ in the call: .*shift='row'.* on rank.*shift='none'"),
        ({}, {"source": "replicated"}, "ranks differ in the call: .*'sharded'.* on rank.*'replicated'"),
        ({}, {"ignore_index": 0}, "ranks differ in the call"),
        ({}, {"shift": "left"}, "shift must be one of row, document, none, got 'left'"),
        ({}, {"source": "local"}, "source must be one of sharded, replicated, got 'local'"),
    ],
)
def test_ranks_that_differ_are_told_so(other: dict[str, Any], options: dict[str, Any], message: str) -> None:
    for error in run_threads(3, elsewhere, other, options):
        with pytest.raises(ValueError, match=message):
            raise error


def test_a_replicated_batch_that_differs_names_the_rank() -> None:
    def call(comm: Comm) -> Exception:
        batch = GOOD | {"input_ids": IDS + (comm.rank == 2)}
        return answer(comm, lambda c: share(batch, c, source="replicated", plan=ring))

    for error in run_threads(3, call):
        assert "the batch of rank 2 is not that of rank 0;" in str(error)


def test_a_union_without_a_token_is_refused() -> None:
    empty = {"input_ids": IDS, "attention_mask": torch.zeros(2, 6)}
    for error in run_threads(2, lambda comm: answer(comm, lambda c: share([empty, None][c.rank], c))):
        assert str(error) == "share: the batches of all ranks are empty; skip this batch on every rank"


def windowed(lengths: Any, ranks: int) -> Plan:
    return Plan(Mask(lengths, window=(2, None)), Layout.zigzag(lengths, ranks))


def of_other_documents(lengths: Any, ranks: int) -> Plan:
    return ring(lengths + 1, ranks)


def apart(lengths: Any, ranks: int) -> Plan:
    queries, keys = Layout.zigzag(lengths, ranks), Layout.contiguous(int(lengths.sum()), ranks)
    return Plan(Mask(lengths), queries, kv_layout=keys)


HOLES = GOOD | {"attention_mask": torch.tensor([[1, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])}


@pytest.mark.parametrize(
    ("batch", "plan", "message"),
    [
        (GOOD, of_other_documents, "plan must return a Plan of the documents"),
        (GOOD, lambda lengths, ranks: None, "plan must return a Plan"),
        (GOOD, apart, "got a kv_layout"),
        (GOOD, partial(plan_batch, max_tokens_per_rank=3), "does not fit|at most 3"),
        (HOLES, windowed, "make the masks of layers by Share.mask_for"),
    ],
    ids=["documents", "none", "keys apart", "does not fit", "window over holes"],
)
def test_a_plan_that_does_not_serve_is_refused(batch: dict[str, Tensor], plan: Any, message: str) -> None:
    def call(comm: Comm) -> Exception:
        shown = {name: x.masked_fill(x < 3, IGNORE) if name == "labels" else x for name, x in batch.items()}
        return answer(comm, lambda c: share(shown, c, plan=plan, shift="none"))

    for error in run_threads(2, call):
        with pytest.raises(ValueError, match=message):
            raise error


def test_a_planner_that_fails_on_one_rank_fails_on_all() -> None:
    def plan(rank: int, lengths: Any, ranks: int) -> Plan:
        if rank == 1:
            raise OSError("no calibration")
        return ring(lengths, ranks)

    def call(comm: Comm) -> Exception:
        with pytest.raises((OSError, ValueError)) as raised:
            share(GOOD, comm, plan=partial(plan, comm.rank))
        return raised.value

    first, second = run_threads(2, call)
    assert isinstance(second, OSError)
    assert "rank 1 refused its arguments: OSError: no calibration" in str(first)


def test_ranks_that_plan_otherwise_are_told_so() -> None:
    def plan(rank: int, lengths: Any, ranks: int) -> Plan:
        return Plan(Mask(lengths, causal=rank != 0), Layout.zigzag(lengths, ranks))

    for error in run_threads(2, lambda comm: answer(comm, lambda c: share(GOOD, c, plan=partial(plan, c.rank)))):
        assert "ranks differ in plan" in str(error)


def test_results_of_another_number_of_rows_are_refused_on_all_ranks() -> None:
    def call(comm: Comm) -> str:
        s = share(GOOD, comm, plan=ring)
        rows = s.plan.rows(comm.rank) + (comm.rank == 1)
        with pytest.raises(ValueError) as raised:
            back(s, torch.zeros(rows, 4))
        return str(raised.value)

    for message in run_threads(2, call):
        assert "x on rank 1 must have the share's 12 rows, got [13, 4]" in message


ODD: dict[str, tuple[dict[str, Any], str]] = {
    "a sparse entry": ({"x": torch.eye(6).to_sparse()}, "expected dense tensors"),
    "a number for a name": ({3: torch.ones(1, 6)}, "got the name 3"),
    "documents of other widths": (
        {"input_ids": [torch.arange(2), torch.arange(1)], "x": [torch.zeros(2, 3), torch.zeros(1, 2)]},
        "x must have one dtype and the same dims behind the first",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_entries_are_refused_by_name(name: str) -> None:
    more, why = ODD[name]
    with pytest.raises((ValueError, NotImplementedError), match=why):
        share({"input_ids": torch.arange(6)[None]} | more, LocalComm())


@pytest.mark.parametrize("ignored", [None, -100.5, "none", True])
def test_what_is_ignored_is_a_label(ignored: Any) -> None:
    batch = {"input_ids": torch.arange(6)[None], "labels": torch.arange(6)[None]}
    with pytest.raises(ValueError, match="ignore_index must be an integer"):
        share(batch, LocalComm(), ignore_index=ignored)
    assert share(batch, LocalComm(), ignore_index=-7).valid == 5


def test_an_entry_may_have_a_dim_of_0() -> None:
    own = share({"input_ids": torch.arange(6)[None], "x": torch.zeros(1, 6, 0)}, LocalComm())
    assert own.tensors["x"].shape == (6, 0)


TREES = {"input_ids": IDS.reshape(1, 12), "cu_seqlens": [0, 4, 6, 12], "parents": torch.tensor([-1, 0, -1])}


@pytest.mark.parametrize(
    ("batch", "shift", "uncounted"),
    [
        (GOOD, "row", [0, 6]), (GOOD, "document", [0, 6]), (GOOD, "none", []),
        ({"input_ids": IDS.reshape(1, 12), "labels": IDS.reshape(1, 12), "cu_seqlens": [0, 4, 12]}, "row", [0]),
        ({"input_ids": IDS.reshape(1, 12), "labels": IDS.reshape(1, 12), "cu_seqlens": [0, 4, 12]}, "document", [0, 4]),
        (TREES | {"labels": IDS.reshape(1, 12)}, "row", [0, 6]),
        ({"input_ids": IDS, "shift_labels": IDS}, "row", []),
    ],
)  # fmt: skip
def test_labels_that_count_are_compared_with_a_vocabulary_that_is_known(
    batch: dict[str, Any], shift: str, uncounted: list[int]
) -> None:
    name = "labels" if "labels" in batch else "shift_labels"
    for wrong in (-1, 13, 1 << 40):
        for at in range(12):
            labels = batch[name].clone()
            labels.view(-1)[at] = wrong
            given, how = batch | {name: labels}, Reading(shift, vocabulary=13)
            read(given, how._replace(vocabulary=None))
            if at in uncounted:
                read(given, how)
                continue
            columns = batch["input_ids"].shape[-1]
            with pytest.raises(ValueError, match=f"^{name} at row {at // columns}, token {at % columns} are {wrong}, "):
                read(given, how)
