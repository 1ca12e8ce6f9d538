"""`share` of trees: nodes of all ranks in one union, positions along paths, labels at their own token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from seqpar import Mask, recurrent, train
from seqpar.comm import Comm
from seqpar.data import Share, back, micro_batches, prefetch, share
from seqpar.testing import run_threads
from tests.cases import examples

IGNORE = -100


def nodes(rng: np.random.Generator, least: int) -> tuple[list[int], list[int]]:
    """Lengths and parents of a few nodes; any node or tree may have no token, but not all."""
    lengths: list[int] = []
    parents: list[int] = []
    path: list[int] = []
    for node in range(int(rng.integers(least, 7))):
        path = path[: int(rng.integers(0, len(path) + 1))]
        parents.append(path[-1] if path else -1)
        lengths.append(int(rng.integers(0, 6)))
        path.append(node)
    if lengths:
        lengths[0] += not any(lengths)
    return lengths, parents


def batch_of(lengths: list[int], parents: list[int], first: int, form: str) -> dict[str, Any] | None:
    """A rank's batch with ids that count from `first`, as a list of nodes or packed."""
    ids = torch.arange(first, first + sum(lengths))
    if not lengths:
        return None if form == "packed" else {"input_ids": [], "labels": [], "parents": []}
    if form == "packed":
        cu_seqlens = torch.tensor([0, *np.cumsum(lengths)])
        return {"input_ids": ids, "labels": ids.clone(), "cu_seqlens": cu_seqlens, "parents": torch.tensor(parents)}
    several = list(torch.split(ids, lengths))
    return {"input_ids": several, "labels": [x.clone() for x in several], "parents": parents}


def shared(comm: Comm, batches: list[Any], source: str) -> tuple[Any, ...]:
    s = share(batches[comm.rank], comm, source=source)
    return s.plan, s.tensors, s.positions, s.valid, back(s, s.tensors["input_ids"])


@examples(40)
@given(st.integers(1, 4), st.integers(0, 2**16), st.sampled_from(["packed", "list"]))
def test_the_union_of_trees_is_one_mask(ranks, seed, form) -> None:
    rng = np.random.default_rng(seed)
    own = [nodes(rng, 1 if rank == 0 else 0) for rank in range(ranks)]
    before = np.cumsum([0, *(sum(lengths) for lengths, _ in own)])
    batches = [batch_of(*each, int(first), form) for each, first in zip(own, before[:-1], strict=True)]
    numbered = np.cumsum([0, *(len(lengths) for lengths, _ in own)])
    parents = [p + first if p >= 0 else -1 for (_, each), first in zip(own, numbered, strict=False) for p in each]
    mask = Mask.tree([n for lengths, _ in own for n in lengths], parents)
    depths = mask.depths(np.arange(mask.tokens))
    for rank, (plan, tensors, positions, valid, home) in enumerate(run_threads(ranks, shared, batches, "sharded")):
        assert plan.mask == mask and valid == (depths > 0).sum()
        at = plan.positions(rank)
        real = at >= 0
        assert tensors["input_ids"][real].tolist() == at[real].tolist()
        assert positions[real].tolist() == depths[at[real]].tolist() == plan.rope_positions(rank)[real].tolist()
        first = (depths[at] == 0) | ~real
        assert tensors["labels"].tolist() == np.where(first, IGNORE, at).tolist()
        flat = [id for x in (home if isinstance(home, list) else [home]) for id in x.tolist()]
        assert flat == list(range(int(before[rank]), int(before[rank + 1])))


def test_a_replicated_tree_is_shared_out() -> None:
    batch = batch_of([4, 2, 3], [-1, 0, 0], 0, "list")
    for plan, *_, home in run_threads(2, shared, [batch, batch], "replicated"):
        assert plan.mask == Mask.shared_prefix([(4, [2, 3])]) and torch.cat(home).tolist() == list(range(9))


def ahead(comm: Comm, batch: dict[str, Any]) -> list[Any]:
    shares = [*prefetch([batch, batch], comm), *micro_batches(batch, comm)]
    return [s.plan.mask for s in shares] + [shares[0].mask_for(window=(1, None))]


def test_trees_are_prefetched_and_cut_into_micro_batches() -> None:
    batches = [batch_of([4, 2, 3], [-1, 0, 0], 0, "list"), batch_of([2, 1], [-1, 0], 9, "list")]
    whole = Mask.tree([4, 2, 3, 2, 1], [-1, 0, 0, -1, 3])

    def rank(comm: Comm) -> list[Any]:
        return ahead(comm, batches[comm.rank])  # type: ignore[arg-type]

    for *masks, windowed in run_threads(2, rank):
        assert masks == [whole] * 3 and windowed == whole.windowed((1, None))


def next_token_losses(comm: Comm, batches: list[Any], table: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of a bigram model, of labels at their own tokens, and the gradient of its table of logits."""
    table = table.clone().requires_grad_()
    s: Share = share(batches[comm.rank], comm)
    logits = recurrent.shift(table[s.tensors["input_ids"]], s.plan, comm)
    loss = train.cross_entropy(logits, s.tensors["labels"], valid=s.valid)
    loss.backward()
    return loss.detach(), table.grad


def test_the_last_token_of_a_prompt_predicts_the_first_of_every_answer() -> None:
    batches = [batch_of([3, 2, 2], [-1, 0, 0], 0, "list"), batch_of([2, 3], [-1, 0], 7, "list")]
    table = torch.randn(12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = table.clone().requires_grad_()
    pairs = [(0, 1), (1, 2), (2, 3), (3, 4), (2, 5), (5, 6), (7, 8), (8, 9), (9, 10), (10, 11)]
    before, after = (torch.tensor(x) for x in zip(*pairs, strict=True))
    expected = torch.nn.functional.cross_entropy(whole[before], after)
    expected.backward()
    losses, grads = zip(*run_threads(2, next_token_losses, batches, table), strict=True)
    torch.testing.assert_close(sum(losses), expected.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(sum(grads), whole.grad, rtol=0, atol=1e-12)


def shared_of(comm: Comm, batches: list[Any], source: str) -> Share:
    return share(batches[comm.rank], comm, source=source)


def test_trees_without_a_token_are_none() -> None:
    some, none = batch_of([0, 3, 0, 2], [-1, -1, -1, 2], 0, "list"), batch_of([0], [-1], 0, "list")
    for source, batches in (("replicated", [some] * 2), ("sharded", [some, none])):
        shares = run_threads(2, shared_of, batches, source)
        assert shares[0].plan.mask == Mask.tree([3, 2], [-1, -1]) and shares[0].valid == 3


REFUSED = {
    "without parents on one rank": ({"input_ids": [torch.arange(3)], "labels": [torch.arange(3)]}, "has parents"),
    "in another order": (
        {"input_ids": [torch.arange(2)] * 3, "labels": [torch.arange(2)] * 3, "parents": [-1, -1, 0]},
        "depth-first order",
    ),
    "with shifted labels": (
        {"input_ids": [torch.arange(2)] * 2, "shift_labels": [torch.arange(2)] * 2, "parents": [-1, 0]},
        "shift_labels in a tree",
    ),
    "padded": (
        {"input_ids": torch.ones(2, 3, dtype=torch.int64), "attention_mask": torch.ones(2, 3, dtype=torch.int64),
         "parents": [-1, 0]},
        "parents with an attention_mask",
    ),
}  # fmt: skip


def refused(comm: Comm, batches: list[Any]) -> str:
    with pytest.raises(ValueError) as error:
        share(batches[comm.rank], comm)
    return str(error.value)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trees_is_refused_on_every_rank(name) -> None:
    batch, why = REFUSED[name]
    told = run_threads(2, refused, [batch_of([4, 2], [-1, 0], 0, "list"), batch])
    assert all(why in each for each in told), told


def test_further_labels_of_a_tree_are_refused() -> None:
    batch = batch_of([4, 2], [-1, 0], 0, "list")

    def rank(comm: Comm) -> str:
        with pytest.raises(NotImplementedError) as error:
            share(batch, comm, mtp_depth=1)
        return str(error.value)

    (told,) = run_threads(1, rank)
    assert "mtp_depth=1" in told
