"""What errors of `seqpar.data` say to do, done: the shares are then those of the documents that were meant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from seqpar.comm import Comm, LocalComm
from seqpar.data import back, prefetch, share
from seqpar.testing import run_threads
from tests.advice.advised import advised
from tests.data.cases import ring

IDS = torch.arange(1, 13).reshape(2, 6)
PACKED = IDS.reshape(1, 12)
TWO = torch.tensor([[1, 1, 1, 1, 2, 2], [1, 1, 2, 2, 2, 2]])  # which document of its row a token is of


def shared(batch: Any, **options: Any) -> tuple[list[int], Tensor]:
    """The lengths of the documents that one rank finds in a batch, and the tokens that come home."""
    s = share(batch, LocalComm(), **{"plan": ring} | options)
    return s.plan.mask.lengths.tolist(), back(s, s.tensors["input_ids"])


def test_documents_are_numbered_by_a_mask_from_1_in_ascending_order() -> None:
    with advised(ValueError, "number the documents of a row from 1, and padding 0"):
        shared({"input_ids": IDS, "attention_mask": TWO - 2})
    with advised(ValueError, "number them in ascending order"):
        shared({"input_ids": IDS, "attention_mask": 3 - TWO})
    lengths, home = shared({"input_ids": IDS, "attention_mask": TWO})
    assert lengths == [4, 2, 2, 4] and torch.equal(home, IDS)


def test_positions_that_restart_go_without_a_mask_or_with_cu_seqlens() -> None:
    at = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3, 4]])
    packed = {"input_ids": PACKED, "position_ids": at}
    with advised(ValueError, "leave attention_mask out if nothing is padded, or give cu_seqlens"):
        shared(packed | {"attention_mask": torch.ones_like(PACKED)})
    for batch in (packed, packed | {"cu_seqlens": [0, 4, 7, 12], "attention_mask": torch.ones_like(PACKED)}):
        lengths, home = shared(batch)
        assert lengths == [4, 3, 5] and torch.equal(home, PACKED)


def test_an_entry_without_rows_is_kept_or_given_as_rows() -> None:
    with advised(ValueError, "give such rows, or keep=({},) to hand it on as it is"):
        shared({"input_ids": IDS, "weight": torch.ones(2)})
    s = share({"input_ids": IDS, "weight": torch.ones(2)}, LocalComm(), plan=ring, keep=("weight",))
    assert torch.equal(s.others["weight"], torch.ones(2))
    rows = share({"input_ids": IDS, "weight": torch.ones(2, 6)}, LocalComm(), plan=ring).tensors["weight"]
    assert torch.equal(rows, torch.ones(12))
    # what a batch is read by cannot be kept
    with pytest.raises(ValueError, match=r"attention_mask must be a tensor whose first dims are \[2, 6\].*\[1, 6\]$"):
        shared({"input_ids": IDS, "attention_mask": torch.ones(1, 6)})


def test_ranks_with_batches_of_their_own_are_sharded_and_others_bring_one() -> None:
    def rank(comm: Comm) -> tuple[list[int], list[int]]:
        with advised(ValueError, "load the same batch on every rank, or give source='sharded' for a batch of each"):
            share({"input_ids": IDS + comm.rank}, comm, plan=ring, source="replicated")
        one = share({"input_ids": IDS}, comm, plan=ring, source="replicated")
        own = share({"input_ids": IDS + comm.rank}, comm, plan=ring, source="sharded")
        assert torch.equal(back(own, own.tensors["input_ids"]), IDS + comm.rank)
        return one.plan.mask.lengths.tolist(), own.plan.mask.lengths.tolist()

    for lengths in run_threads(2, rank):
        assert lengths == ([6] * 2, [6] * 4)


def test_labels_of_pads_do_not_count() -> None:
    mask = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
    labels = IDS.clone()
    batch = {"input_ids": IDS, "attention_mask": mask, "labels": labels}
    with advised(ValueError, "set {}[attention_mask == 0] = {}"):
        shared(batch)
    labels[mask == 0] = -100
    assert share(batch, LocalComm(), plan=ring).tensors["labels"].tolist() == [2, 3, -100, 8, 9, 10, 11, 12, -100]


def test_the_first_label_after_pads_does_not_count() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    batch = {"input_ids": IDS, "attention_mask": mask, "labels": IDS.masked_fill(mask == 0, -100)}
    with advised(ValueError, "pad on the right, or set {}[:, 1:][attention_mask[:, :-1] == 0] = {}"):
        shared(batch)
    right = {name: torch.cat([x[:1].roll(-2, 1), x[1:]]) for name, x in batch.items()}
    first = batch["labels"].clone()
    first[:, 1:][mask[:, :-1] == 0] = -100
    for given in (right, batch | {"labels": first}):
        found = share(given, LocalComm(), plan=ring).tensors["labels"]
        assert found.tolist() == [4, 5, 6, -100, 8, 9, 10, 11, 12, -100]


def test_a_loader_that_overwrites_its_batches_yields_new_tensors() -> None:
    def reusing() -> Iterator[dict[str, Tensor]]:
        memory = torch.zeros(4, dtype=torch.int64)
        for n in range(4):
            yield {"input_ids": memory.fill_(n)}

    def copying() -> Iterator[dict[str, Tensor]]:
        for batch in reusing():
            yield {name: x.clone() for name, x in batch.items()}

    def trained(comm: Comm) -> None:  # one rank's loader alone is wrong, and both ranks are told at once
        with advised(ValueError, "yield new tensors for every batch, as a DataLoader does"):
            list(prefetch(copying() if comm.rank else reusing(), comm, plan=ring))

    run_threads(2, trained, timeout=300.0)
    assert [int(s.tensors["input_ids"][0]) for s in prefetch(copying(), LocalComm(), plan=ring)] == [0, 1, 2, 3]
