"""Labels of multi-token prediction: those of the same document, counted depth by depth, whatever the layout."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import seqpar
from seqpar import Layout, Mask, Plan
from seqpar.comm import Comm, LocalComm
from seqpar.data import micro_batches, prefetch, share
from seqpar.testing import run_threads
from seqpar.train import cross_entropy, sync_gradients
from tests.cases import examples
from tests.data.cases import IGNORE, PLANNERS, Case, batches, make, ring


def shared(comm: Comm, cases: list[Case], planner: str, shift: str, depth: int) -> tuple[list[int], Tensor, Any]:
    s = share(cases[comm.rank].batch, comm, plan=PLANNERS[planner], shift=shift, mtp_depth=depth)
    return s.plan.positions(comm.rank).tolist(), s.tensors["mtp_labels"], s.mtp_valid


def later_labels(case: Case, shift: str, depth: int) -> list[list[int]]:
    """What the tokens after each token of a batch predict, inside its document: by loops over tokens."""
    packed = case.batch is not None and {"position_ids", "cu_seqlens", "cu_seq_lens_q"} & case.batch.keys()
    found = []
    for nth, document in enumerate(case.documents):
        labels = [token.label for token in document]
        if packed and shift == "row" and nth + 1 < len(case.documents):
            labels[-1] = IGNORE  # the first token of another document
        labels += [IGNORE] * depth
        found += [[labels[i + k + 1] for k in range(depth)] for i in range(len(document))]
    return found


@examples(60)
@given(st.data())
def test_every_token_has_the_labels_of_those_after_it_in_its_document(data: st.DataObject) -> None:
    ranks, depth = data.draw(st.integers(1, 4), "ranks"), data.draw(st.integers(1, 4), "depth")
    shift = data.draw(st.sampled_from(["row", "document", "none"]), "shift")
    planner = data.draw(st.sampled_from(sorted(PLANNERS)), "planner")
    cases = data.draw(batches(ranks, shift))
    want = [labels for case in cases for labels in later_labels(case, shift, depth)]
    for at, labels, valid in run_threads(ranks, shared, cases, planner, shift, depth):
        assert labels.tolist() == [want[i] if i >= 0 else [IGNORE] * depth for i in at]
        assert valid == tuple(sum(row[k] != IGNORE for row in want) for k in range(depth))


def test_labels_end_with_their_document_and_start_one_token_later_at_each_depth() -> None:
    batch = {
        "input_ids": torch.tensor([[1, 2, 3, 4, 5, 6]]),
        "labels": torch.tensor([[IGNORE, 2, 3, 4, 5, 6]]),  # the 5, a document's first token, is labelled too
        "cu_seqlens": torch.tensor([0, 4, 6]),
    }
    s = share(batch, LocalComm(), mtp_depth=2)
    assert s.tensors["labels"].tolist() == [2, 3, 4, 5, 6, IGNORE]
    assert s.tensors["mtp_labels"].T.tolist() == [[3, 4, *[IGNORE] * 4], [4, *[IGNORE] * 5]]
    assert (s.valid, s.mtp_valid) == (5, (2, 1))


def in_parts(comm: Comm, case: Case) -> tuple[Any, ...]:
    whole = share(case.batch, comm, source="replicated", plan=ring, mtp_depth=2)
    (ahead,) = prefetch([case.batch], comm, source="replicated", plan=ring, mtp_depth=2)
    parts = micro_batches(case.batch, comm, source="replicated", mtp_depth=2)
    assert torch.equal(ahead.tensors["mtp_labels"], whole.tensors["mtp_labels"])
    return whole.mtp_valid, ahead.mtp_valid, tuple(map(sum, zip(*(part.mtp_valid for part in parts), strict=True)))


def test_batches_ahead_and_micro_batches_count_the_same_labels() -> None:
    for counts in run_threads(2, in_parts, make("left", 7, "row")):
        assert len(set(counts)) == 1 and min(counts[0]) > 0


def test_labels_of_depths_need_labels_and_a_depth_that_all_ranks_give() -> None:
    ids = torch.ones(1, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="mtp_depth=2 makes 'mtp_labels' out of labels, got a batch of .'input_ids'."):
        share({"input_ids": ids}, LocalComm(), mtp_depth=2)
    with pytest.raises(ValueError, match="mtp_depth=1 makes"):
        share({"input_ids": ids, "labels": ids, "mtp_labels": ids}, LocalComm(), mtp_depth=1)
    with pytest.raises(ValueError, match="mtp_depth must be an integer of at least 0, got -1"):
        share({"input_ids": ids}, LocalComm(), mtp_depth=-1)
    for error in run_threads(2, other_depth):
        assert "mtp_depth" in error


def other_depth(comm: Comm) -> str:
    ids = torch.ones(1, 3, dtype=torch.int64)
    with pytest.raises(ValueError) as raised:
        share({"input_ids": ids, "labels": ids}, comm, mtp_depth=comm.rank)
    return str(raised.value)


WEIGHTS = (1.0, 0.3, 0.1)  # of the losses of the next token and of the two after it
DOCUMENTS = (11, 1, 6, 2)


class Model(nn.Module):
    """One layer of attention, and a head for each token ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.qkv = nn.Embedding(23, 8), nn.Linear(8, 24)
        self.heads = nn.ModuleList([nn.Linear(8, 23) for _ in WEIGHTS])

    def forward(self, tokens: Tensor, attend: Any) -> list[Tensor]:
        q, k, v = self.qkv(self.tokens(tokens)).unflatten(-1, (3, 2, 4)).unbind(-3)
        hidden = attend(q, k, v).flatten(-2)
        return [head(hidden) for head in self.heads]


def documents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(23, (n,), generator=generator) for n in DOCUMENTS]


def one_process(own: Model) -> list[Tensor]:
    """The loss and the gradients of every document alone: sums over documents, divided by the labels of each depth."""
    total = torch.zeros((), dtype=torch.float64)
    for depth, weight in enumerate(WEIGHTS):
        count = sum(max(n - depth - 1, 0) for n in DOCUMENTS)
        for tokens in documents():
            logits = own(tokens, dense)[depth]
            ahead = logits[: max(len(tokens) - depth - 1, 0)], tokens[depth + 1 :]
            total = total + weight * F.cross_entropy(*ahead, reduction="sum") / count
    total.backward()
    return [total.detach(), *(p.grad for p in own.parameters())]


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True)
    return out[0].transpose(0, 1)


def sharded(comm: Comm, model: Model, form: str, layout: str) -> list[Tensor]:
    def plan(lengths: Any, ranks: int) -> Plan:
        total = int(lengths.sum())
        of = {
            "contiguous": lambda: Layout.contiguous(total, ranks),
            "zigzag": lambda: Layout.zigzag(lengths, ranks),
            "striped": lambda: Layout.striped(total, ranks),
        }
        return Plan(Mask(lengths), of[layout](), transport="fetch")

    mine = documents()[comm.rank :: comm.size]
    if form == "list":
        batch = {"input_ids": mine, "labels": mine} if mine else None
    else:
        batch = {
            "input_ids": nn.utils.rnn.pad_sequence(mine, batch_first=True),
            "labels": nn.utils.rnn.pad_sequence(mine, batch_first=True, padding_value=IGNORE),
            "attention_mask": nn.utils.rnn.pad_sequence([torch.ones_like(x) for x in mine], batch_first=True),
        }
    s = share(batch, comm, plan=plan, mtp_depth=2)
    own = deepcopy(model)
    logits = own(s.tensors["input_ids"], lambda q, k, v: seqpar.attention(q, k, v, s.plan, comm))
    labels = [s.tensors["labels"], *s.tensors["mtp_labels"].unbind(1)]
    losses = [
        weight * cross_entropy(z, y, valid=valid)
        for weight, z, y, valid in zip(WEIGHTS, logits, labels, (s.valid, *s.mtp_valid), strict=True)
    ]
    loss = sum(losses[1:], losses[0])
    loss.backward()
    sync_gradients(own.parameters(), comm)
    return [loss.detach(), *(p.grad for p in own.parameters())]


@pytest.mark.parametrize("form", ["list", "padded"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_loss_with_heads_for_later_tokens_is_that_of_one_process_and_so_are_gradients(
    ranks: int, layout: str, form: str
) -> None:
    torch.manual_seed(3)
    model = Model().double()
    want = one_process(deepcopy(model))
    results = run_threads(ranks, sharded, model, form, layout)
    torch.testing.assert_close(sum(loss for loss, *_ in results), want[0], rtol=1e-12, atol=1e-12)
    for _, *grads in results:
        torch.testing.assert_close(grads, want[1:], rtol=1e-10, atol=1e-12)
