"""What a shared batch holds, compared with the documents it was made of."""

from __future__ import annotations

from typing import Any

import torch

from seqpar.data import Share
from tests.data.cases import IGNORE, Case, Token


def check(cases: list[Case], results: list[tuple[Share, Any, Any, Any]]) -> None:
    check_rows([document for case in cases for document in case.documents], [s for s, *_ in results])
    for case, (_, ids, positions, weight) in zip(cases, results, strict=True):
        check_home(case, ids, positions, weight)


def check_rows(documents: list[list[Token]], shares: list[Share]) -> None:
    """Every token lies on one rank, with its label and position; the rest are pads."""
    tokens = [token for document in documents for token in document]
    seen = []
    for rank, s in enumerate(shares):
        assert s.plan == shares[0].plan
        assert s.plan.mask.lengths.tolist() == [len(document) for document in documents]
        assert s.valid == sum(token.label != IGNORE for token in tokens)
        at = s.plan.positions(rank).tolist()
        assert s.plan.rows(rank) == len(at) >= 1
        columns = s.tensors["input_ids"], s.tensors["labels"], s.positions, s.tensors["weight"][:, 1]
        got = list(zip(*(x.tolist() for x in columns), strict=True))
        want = [tokens[i] if i >= 0 else Token(0, IGNORE, 0, 0.0) for i in at]
        assert got == [(token.id, token.label, token.position, token.weight) for token in want]
        seen += [i for i in at if i >= 0]
    assert sorted(seen) == list(range(len(tokens)))


def check_home(case: Case, ids: Any, positions: Any, weight: Any) -> None:
    """A rank got the rows of its own batch in the batch's shape, 0 where a token is masked out."""
    same(ids, case.ids_home)
    assert sum(int(x.sum()) for x in positions) == sum(token.position for token in case.tokens)
    batch = case.batch or {}
    if "weight" in batch:
        mask = batch.get("attention_mask")
        same(weight, batch["weight"] if mask is None else batch["weight"] * mask[..., None])


def same(got: Any, want: Any) -> None:
    if isinstance(want, list):
        assert isinstance(got, list) and len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            same(one, other)
    else:
        assert got.shape == want.shape and torch.equal(got, want)
