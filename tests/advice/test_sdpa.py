"""What errors of `seqpar.sdpa` and ``parallelize(sdpa=True)`` say to do, done: attention is that of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_upper_left
from torch.utils.checkpoint import checkpoint

import seqpar
from seqpar import Comm, Layout, LocalComm, Mask, Plan
from seqpar.testing import dense_attention, run_processes, run_threads
from seqpar.train import cross_entropy, sync_gradients, token_mean
from tests.advice.advised import advised

TOKENS, HEADS, DIM = 8, 2, 4
MASK = Mask([TOKENS])
PLAN = Plan(MASK, Layout.zigzag([TOKENS], 2))
TRIANGLE = torch.ones(TOKENS, TOKENS).tril().bool()
WHOLE = torch.randn(3, TOKENS, HEADS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
MULTIHEAD = nn.MultiheadAttention(HEADS * DIM, HEADS, dtype=torch.float64)


def attended(x: Tensor, **given: Any) -> Tensor:
    """PyTorch's attention of q, k and v in one [3, T, H, D], as [T, H, D]."""
    return F.scaled_dot_product_attention(*x.transpose(1, 2), **given).transpose(0, 1)


def on_two_ranks(call: Callable[[Comm, Tensor], Tensor], plan: Plan = PLAN) -> Tensor:
    """What ranks make of their rows [3, rows, H, D] inside `seqpar.sdpa`, put together."""

    def rank(comm: Comm) -> Tensor:
        rows = seqpar.shard(WHOLE, plan, comm.rank, dim=1)
        with seqpar.sdpa(plan, comm):
            out = call(comm, rows)
        return seqpar.unshard(out, plan, comm)

    return run_threads(2, rank)[0]  # type: ignore[no-any-return]


def expected(mask: Mask = MASK) -> Tensor:
    """One process's."""
    return dense_attention(*WHOLE, mask)[0]


def sharded(mask: Tensor, comm: Comm) -> Tensor:
    return seqpar.shard(mask, PLAN, comm.rank)


def test_attention_of_a_models_own_is_replaced_by_torchs() -> None:
    def by_hand(x: Tensor) -> Tensor:
        q, k, v = x.transpose(1, 2)
        scores = (q @ k.transpose(-2, -1) / DIM**0.5).masked_fill(~TRIANGLE[: q.shape[1], : q.shape[1]], -torch.inf)
        return (scores.softmax(-1) @ v).transpose(0, 1)

    assert torch.allclose(by_hand(WHOLE), expected())
    with advised(
        RuntimeError, "call F.scaled_dot_product_attention from Python where the model has its own attention code"
    ):
        on_two_ranks(lambda comm, rows: by_hand(rows))
    assert torch.allclose(on_two_ranks(lambda comm, rows: attended(rows, is_causal=True)), expected())


def multihead(x: Tensor, **given: Any) -> Tensor:
    """torch's module of rows [T, E], with the same weights on every thread."""
    return MULTIHEAD(x, x, x, **given)[0]  # type: ignore[no-any-return]


def test_padding_of_a_multihead_module_is_left_out() -> None:
    documents = [WHOLE[0, :3].flatten(1), WHOLE[0, 3:].flatten(1)]
    padded = nn.utils.rnn.pad_sequence(documents, batch_first=False)
    keep = nn.utils.rnn.pad_sequence([torch.ones(len(d), dtype=torch.bool) for d in documents], batch_first=True)
    whole = multihead(padded, key_padding_mask=~keep)
    plan = Plan(Mask([3, 5], causal=False), Layout.contiguous(TOKENS, 1))
    with (
        advised(NotImplementedError, "pack the documents without padding, as the plan's mask keeps them apart"),
        seqpar.sdpa(plan, LocalComm()),
    ):
        multihead(padded, key_padding_mask=~keep, need_weights=False)
    with seqpar.sdpa(plan, LocalComm()):
        packed = multihead(torch.cat(documents), need_weights=False)
    assert torch.allclose(packed, torch.cat([whole[:3, 0], whole[:, 1]]))


def test_attention_over_other_rows_is_given_shards_or_stays_local() -> None:
    with advised(ValueError, "give shards, or select with local= the calls that stay on their rank"):
        on_two_ranks(lambda comm, rows: attended(WHOLE, is_causal=True))
    assert torch.allclose(on_two_ranks(lambda comm, rows: attended(rows, is_causal=True)), expected())

    def rank(comm: Comm) -> Tensor:
        with seqpar.sdpa(PLAN, comm, local=lambda q, k: q.shape[-2] == TOKENS):
            attended(seqpar.shard(WHOLE, PLAN, comm.rank, dim=1), is_causal=True)
            return attended(WHOLE, is_causal=True)

    assert all(torch.allclose(out, expected()) for out in run_threads(2, rank))


def test_several_samples_are_packed_into_one_row() -> None:
    samples = torch.stack([WHOLE, WHOLE.flip(1)])  # [2, 3, T, H, D]
    want = torch.stack([dense_attention(*sample, MASK)[0] for sample in samples])

    def apart(comm: Comm) -> Tensor:
        rows = seqpar.shard(samples, PLAN, comm.rank, dim=2)
        with seqpar.sdpa(PLAN, comm):
            return F.scaled_dot_product_attention(*rows.transpose(2, 3).transpose(0, 1), is_causal=True)

    with advised(ValueError, "pack the samples into one row, [1, H, T, D], and give the mask a document for each"):
        run_threads(2, apart)
    plan = Plan(Mask([TOKENS] * 2), Layout.zigzag([TOKENS] * 2, 2))

    def packed(comm: Comm) -> Tensor:
        rows = seqpar.shard(samples.transpose(0, 1).flatten(1, 2), plan, comm.rank, dim=1)
        with seqpar.sdpa(plan, comm):
            out = attended(rows, is_causal=True)
        return seqpar.unshard(out, plan, comm)

    assert torch.allclose(run_threads(2, packed)[0], want.flatten(0, 1))


def test_a_call_and_its_plan_mean_one_mask() -> None:
    with advised(ValueError, "give the plan that mask, or the call its attn_mask"):
        on_two_ranks(lambda comm, rows: attended(rows))
    full = Mask([TOKENS], causal=False)
    assert torch.allclose(on_two_ranks(lambda comm, rows: attended(rows), PLAN.with_mask(full)), expected(full))
    ones = torch.ones_like(TRIANGLE)
    assert torch.allclose(
        on_two_ranks(lambda comm, rows: attended(rows, attn_mask=sharded(ones, comm))), expected(full)
    )


def test_a_mask_is_a_shard_of_that_of_one_process_or_left_to_is_causal() -> None:
    with advised(
        ValueError, "give seqpar.shard(mask, plan, rank) of the mask of one process, or is_causal=True and no mask"
    ):
        on_two_ranks(lambda comm, rows: attended(rows, attn_mask=TRIANGLE[:4, :5]))
    with advised(
        ValueError,
        "give the model this rank's rows of one process's mask over all keys, seqpar.shard(mask, plan, rank)",
    ):
        on_two_ranks(lambda comm, rows: attended(rows, attn_mask=TRIANGLE[:4, :4]))
    sharing = on_two_ranks(lambda comm, rows: attended(rows, attn_mask=sharded(TRIANGLE, comm)))
    assert torch.allclose(sharing, expected())
    assert torch.allclose(on_two_ranks(lambda comm, rows: attended(rows, is_causal=True)), expected())


def test_a_mask_that_is_no_plain_tensor_is_given_as_one() -> None:
    bias = causal_upper_left(TOKENS, TOKENS)
    with advised(NotImplementedError, "give is_causal=True and a causal plan, or a plain tensor"):
        on_two_ranks(lambda comm, rows: attended(rows, attn_mask=bias))
    with advised(NotImplementedError, "give attn_mask.to_dense()"):
        on_two_ranks(lambda comm, rows: attended(rows, attn_mask=sharded(TRIANGLE, comm).to_sparse()))
    dense = on_two_ranks(lambda comm, rows: attended(rows, attn_mask=sharded(TRIANGLE, comm).to_sparse().to_dense()))
    assert torch.allclose(dense, expected())


class Model(nn.Module):
    """Attention over rows [1, T, H * D] and a checkpoint inside, where asked for."""

    def __init__(self, inside: bool = False) -> None:
        super().__init__()
        self.linear, self.inside = nn.Linear(HEADS * DIM, HEADS * DIM, dtype=torch.float64), inside

    def attend(self, x: Tensor) -> Tensor:
        q = self.linear(x).unflatten(-1, (HEADS, DIM)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.attend, x, use_reentrant=False) if self.inside else self.attend(x)


class Placed(Model):
    """The model, with a vector added to every row."""

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        return super().forward(x + places)


@pytest.mark.parametrize("named", [False, True])
def test_a_model_that_got_all_tokens_is_given_its_rows(named: bool) -> None:
    torch.manual_seed(1)
    model, x, places = Placed(), WHOLE[0].flatten(1), WHOLE[1].flatten(1)
    out = model(x[None], places[None])

    def rank(comm: Comm, whole: bool) -> Tensor:
        own = Placed()
        own.load_state_dict(model.state_dict())
        mine, beside = (seqpar.shard(each, PLAN, comm.rank)[None] for each in (x, places))
        first = x[None] if whole else mine
        with seqpar.parallelize(own, comm, sdpa=True, plan=PLAN):
            y = own(x=first, places=beside) if named else own(first, beside)
        return seqpar.unshard(y[0], PLAN, comm)

    def refused(comm: Comm) -> None:
        with advised(ValueError, "give its rows, seqpar.shard(x, plan, rank)"):
            rank(comm, True)

    run_threads(2, refused)
    assert torch.allclose(run_threads(2, rank, False)[0], out[0])


class Block(nn.Module):
    """A linear layer after attention over rows [1, T, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3, bias=False)
        nn.init.zeros_(self.out.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None]
        return self.out(F.scaled_dot_product_attention(x, x, x, is_causal=True)[:, 0])


def averaged(comm: Comm) -> bool:
    rows, labels = torch.arange(12.0).view(1, 3, 4), torch.arange(3)
    plan, plain = seqpar.plan_batch([3], comm.size), Block()
    F.cross_entropy(plain(rows)[0], labels).backward()
    own, wanted = seqpar.shard(rows, plan, comm.rank, dim=1), seqpar.shard(labels, plan, comm.rank)
    model = Block()
    seqpar.parallelize(model, comm, sdpa=True, plan=plan)
    wrapper = nn.parallel.DistributedDataParallel(model)
    with advised(UserWarning, "give it average_over={}{}"):
        cross_entropy(wrapper(own)[0], wanted, valid=3).backward()
    wrapper.zero_grad()
    cross_entropy(wrapper(own)[0], wanted, valid=3, average_over=2).backward()
    with advised(ValueError, "leave sync_gradients out"):
        sync_gradients(wrapper.parameters(), comm)
    return torch.allclose(model.out.weight.grad, plain.out.weight.grad, atol=1e-5)  # type: ignore[arg-type]


def test_a_loss_is_told_what_averages_its_gradients() -> None:
    assert run_processes(2, averaged) == [True, True]


def test_samples_heads_and_rows_come_in_torchs_order() -> None:
    with advised(ValueError, "give [B, H, T, D], as by x.transpose(1, 2)"):
        on_two_ranks(lambda comm, rows: F.scaled_dot_product_attention(*rows[:, None], is_causal=True))

    def turned(comm: Comm, rows: Tensor) -> Tensor:
        x = rows[:, None].transpose(2, 3)
        return F.scaled_dot_product_attention(*x, is_causal=True)[0].transpose(0, 1)

    assert torch.allclose(on_two_ranks(turned), expected())


def test_one_sample_of_rows_is_not_rows_of_samples() -> None:
    def apart(x: Tensor) -> Tensor:
        """[T, H, 1, D] in place of [1, H, T, D]."""
        return F.scaled_dot_product_attention(*x.unsqueeze(3), is_causal=True)[:, :, 0]

    with advised(ValueError, "give the model [1, T] in place of [T, 1], or select such calls with local="):
        on_two_ranks(lambda comm, rows: apart(rows))
    assert torch.allclose(on_two_ranks(lambda comm, rows: attended(rows, is_causal=True)), expected())

    def rank(comm: Comm) -> bool:
        rows = seqpar.shard(WHOLE, PLAN, comm.rank, dim=1)
        with seqpar.sdpa(PLAN, comm, local=lambda query, key: query.shape[-2] == 1):
            attended(rows, is_causal=True)
            return torch.equal(apart(rows), rows[2])

    assert all(run_threads(2, rank))


def test_a_layer_of_a_batch_is_built_with_batch_first() -> None:
    full = PLAN.with_mask(Mask([TOKENS], causal=False))
    want = multihead(WHOLE[0].flatten(1), need_weights=False)
    layer = nn.MultiheadAttention(HEADS * DIM, HEADS, dtype=torch.float64, batch_first=True)
    layer.load_state_dict(MULTIHEAD.state_dict())

    def with_batch(layer: nn.MultiheadAttention) -> Callable[[Comm, Tensor], Tensor]:
        def attend(comm: Comm, rows: Tensor) -> Tensor:
            x = rows[0].flatten(1)[None]
            return layer(x, x, x, need_weights=False)[0][0]

        return attend

    with advised(ValueError, "build the layer with batch_first=True"):
        on_two_ranks(with_batch(MULTIHEAD), full)
    assert torch.allclose(on_two_ranks(with_batch(layer), full), want)


class Pooling(Model):
    """The model, of whose rows it returns the mean, or all."""

    pools = True

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.mean(1) if self.pools else y


def test_a_model_returns_rows_which_are_pooled_outside() -> None:
    torch.manual_seed(1)
    model, x = Pooling(), WHOLE[0].flatten(1)
    out = model(x[None])

    def rank(comm: Comm, pools: bool) -> Tensor:
        own = Pooling()
        own.load_state_dict(model.state_dict())
        own.pools = pools
        rows = seqpar.shard(x, PLAN, comm.rank)[None]
        with seqpar.parallelize(own, comm, sdpa=True, plan=PLAN):
            return token_mean(own(rows)[0], comm)

    def refused(comm: Comm) -> None:
        with advised(
            NotImplementedError, "return rows, and pool them outside the model, as by seqpar.train.token_mean"
        ):
            rank(comm, True)

    run_threads(2, refused)
    assert all(torch.allclose(found, out[0]) for found in run_threads(2, rank, False))
