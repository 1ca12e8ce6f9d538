"""Documents and losses are those that transformers finds in the same batch on one device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from seqpar.comm import Comm, LocalComm
from seqpar.data import share
from seqpar.testing import run_threads
from tests.cases import examples
from tests.data.cases import IGNORE, ring

pytest.importorskip("transformers")

from transformers import DataCollatorWithFlattening  # noqa: E402
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss  # noqa: E402
from transformers.masking_utils import find_packed_sequence_indices  # noqa: E402

VOCAB = 11


@examples(60)
@given(st.integers(1, 3), st.integers(1, 9), st.data())
def test_documents_are_those_of_the_position_ids(count: int, width: int, data: st.DataObject) -> None:
    steps = st.lists(st.sampled_from([1, 1, 1, -2, 0, 3]), min_size=width, max_size=width)
    rows = torch.tensor([np.cumsum(data.draw(steps)).tolist() for _ in range(count)]) + 30
    found = find_packed_sequence_indices(rows)
    expected = torch.zeros_like(rows) if found is None else found
    documents = torch.unique_consecutive(expected + 100 * torch.arange(count)[:, None], return_counts=True)[1]
    s = share({"input_ids": rows, "position_ids": rows}, LocalComm(), plan=ring)
    assert s.plan.mask.lengths.tolist() == documents.tolist()
    assert torch.equal(s.positions, rows.reshape(-1)[s.plan.layout.positions(0)])


def features(seed: int) -> list[dict[str, list[int]]]:
    """Documents as a tokenizer makes them."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 9, (3,), generator=g).tolist()
    return [{"input_ids": torch.randint(0, VOCAB, (n,), generator=g).tolist()} for n in lengths]


def padded(seed: int, side: str) -> dict[str, Tensor]:
    documents = [torch.tensor(each["input_ids"]) for each in features(seed)]
    width = max(map(len, documents))

    def stacked(rows: list[Tensor], value: int) -> Tensor:
        pads = [(width - len(x), 0) if side == "left" else (0, width - len(x)) for x in rows]
        return torch.stack([F.pad(x, pad, value=value) for x, pad in zip(rows, pads, strict=True)])

    labels = [torch.cat([torch.tensor([IGNORE]), x[1:]]) for x in documents]
    mask = [torch.ones_like(x) for x in documents]
    return {
        "input_ids": stacked(documents, 0), "labels": stacked(labels, IGNORE), "attention_mask": stacked(mask, 0)
    }  # fmt: skip


def flattened(seed: int, **options: Any) -> dict[str, Any]:
    return DataCollatorWithFlattening(return_tensors="pt", **options)(features(seed))


def packed_without_marks(seed: int) -> dict[str, Tensor]:
    """Packed documents whose first labels are not masked: one device predicts them from the document before."""
    batch = flattened(seed)
    return {"input_ids": batch["input_ids"], "labels": batch["input_ids"], "position_ids": batch["position_ids"]}


BATCHES = {
    "right": lambda seed: padded(seed, "right"),
    "left": lambda seed: padded(seed, "left"),
    "flattened": flattened,
    "cu_seq_lens": lambda seed: flattened(seed, return_flash_attn_kwargs=True, return_seq_idx=True),
    "flash without positions": lambda seed: flattened(seed, return_flash_attn_kwargs=True, return_position_ids=False),
    "packed without marks": packed_without_marks,
}
TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def loss_of(comm: Comm, kind: str, shift: str) -> tuple[float, int, list[int]]:
    """This rank's part of the loss, with logits that are a table of ids."""
    s = share(BATCHES[kind](comm.rank), comm, plan=ring, shift=shift)
    logits = TABLE[s.tensors["input_ids"]]
    loss = F.cross_entropy(logits, s.tensors["labels"], ignore_index=IGNORE, reduction="sum") / s.valid
    return float(loss), s.valid, s.plan.mask.lengths.tolist()


@pytest.mark.parametrize("shift", ["row", "none"])
@pytest.mark.parametrize("kind", BATCHES)
def test_the_loss_is_that_of_one_device(kind: str, shift: str) -> None:
    ranks = 3
    results = run_threads(ranks, loss_of, kind, shift)
    loss = ForCausalLMLoss if shift == "row" else ForMaskedLMLoss
    batches = [BATCHES[kind](rank) for rank in range(ranks)]
    counts = [int((b["labels"][..., shift == "row" :] != IGNORE).sum()) for b in batches]
    total = sum(loss(TABLE[b["input_ids"]], b["labels"], VOCAB, num_items_in_batch=sum(counts)) for b in batches)
    assert {valid for _, valid, _ in results} == {sum(counts)}
    assert sum(part for part, _, _ in results) == pytest.approx(float(total), rel=1e-6)  # its logits are fp32
    lengths = [len(each["input_ids"]) for rank in range(ranks) for each in features(rank)]
    assert [found for _, _, found in results] == [lengths] * ranks
