"""What errors of `seqpar.data` say to do with trees, done: the shares are then those of the trees that were meant."""

from __future__ import annotations

from typing import Any

import torch

from seqpar import Layout, Mask, Plan, plan_batch
from seqpar.comm import Comm, LocalComm
from seqpar.data import Share, share
from seqpar.testing import run_threads
from tests.advice.remedies import advised

NODES = [torch.arange(4), torch.arange(4, 6), torch.arange(6, 9)]
TREE = {"input_ids": NODES, "labels": NODES, "parents": [-1, 0, 0]}
MASK = Mask.shared_prefix([(4, [2, 3])])


def shared(batch: dict[str, Any], **options: Any) -> Share:
    """The share of one rank."""
    return share(batch, LocalComm(), **options)


def test_a_tree_has_no_labels_of_later_tokens() -> None:
    with advised(NotImplementedError, "give mtp_depth=0"):
        shared(TREE, mtp_depth=1)
    assert "mtp_labels" not in shared(TREE, mtp_depth=0).tensors


def test_padded_nodes_are_given_as_a_list() -> None:
    padded = torch.nn.utils.rnn.pad_sequence(NODES, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(x) for x in NODES], batch_first=True)
    with advised(ValueError, "leave padding out, as a list of nodes"):
        shared({"input_ids": padded, "attention_mask": mask, "parents": [-1, 0, 0]})
    assert shared(TREE).plan.mask == MASK


def test_labels_of_a_tree_are_not_shifted() -> None:
    with advised(ValueError, "give labels"):
        shared({"input_ids": NODES, "shift_labels": NODES, "parents": [-1, 0, 0]})
    assert shared(TREE).valid == 8


def test_the_mask_of_a_layer_on_a_tree_is_causal() -> None:
    mine = shared(TREE)
    with advised(ValueError, "leave causal out"):
        mine.mask_for(causal=False, window=(2, None))
    assert mine.mask_for(window=(2, None)) == MASK.windowed((2, None))


def test_the_plan_of_trees_is_made_of_their_mask() -> None:
    def of_lengths(mask: Mask, ranks: int) -> Plan:
        return Plan(Mask(mask.lengths), Layout.zigzag(mask.lengths, ranks))

    with advised(ValueError, "give plan_batch the mask that plan is called with"):
        shared(TREE, plan=of_lengths)
    assert shared(TREE, plan=plan_batch).plan.mask == MASK


def test_nodes_without_a_parent_are_roots() -> None:
    plain = {name: TREE[name] for name in ("input_ids", "labels")}

    def rank(comm: Comm, parents: list[int] | None) -> int:
        own = TREE if comm.rank == 0 else plain if parents is None else plain | {"parents": parents}
        return len(share(own, comm).plan.mask.lengths)

    def refused(comm: Comm) -> None:
        with advised(ValueError, "rows of all ranks' batches go together: give parents of -1 to nodes without one"):
            rank(comm, None)

    run_threads(2, refused)
    assert run_threads(2, rank, [-1, -1, -1]) == [4, 4]
