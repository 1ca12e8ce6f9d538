"""What errors of `seqpar.sdpa` and ``parallelize(sdpa=True)`` say to do, done: attention is that of one process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.attention.bias import causal_upper_left
from torch.utils.checkpoint import checkpoint

import seqpar
from seqpar import Comm, Layout, LocalComm, Mask, Plan
from seqpar.parallel import surrounding
from seqpar.testing import dense_attention, run_processes, run_threads
from seqpar.train import cross_entropy, sync_gradients, token_mean
from tests.advice.remedies import advised, default_group
from tests.integrations.hf.models import build
from tests.trial.models import ALONE as ALONE_BY_ROWS
from tests.trial.models import made
from tests.trial.test_rows_together import call, meeting

TOKENS, HEADS, DIM = 8, 2, 4
MASK = Mask([TOKENS])
PLAN = Plan(MASK, Layout.zigzag([TOKENS], 2))
ALONE = Plan(MASK, Layout.contiguous(TOKENS, 1))
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


def test_a_block_that_is_entered_is_made_anew_to_nest() -> None:
    comm = LocalComm()
    block = seqpar.sdpa(ALONE, comm)
    with block:
        with advised(RuntimeError, "enter a new one to nest them"):
            block.__enter__()
        with seqpar.sdpa(ALONE, comm):
            inner = attended(WHOLE, is_causal=True)
        outer = attended(WHOLE, is_causal=True)
    assert torch.allclose(inner, expected()) and torch.allclose(outer, expected())


def test_a_fused_operator_is_called_by_the_function_in_front_of_it() -> None:
    with advised(NotImplementedError, "call F.scaled_dot_product_attention"), seqpar.sdpa(ALONE, LocalComm()):
        torch._scaled_dot_product_flash_attention_for_cpu(*WHOLE.transpose(1, 2)[:, None], 0.0, True)
    with seqpar.sdpa(ALONE, LocalComm()):
        assert torch.allclose(attended(WHOLE, is_causal=True), expected())


def causally(x: Tensor) -> Tensor:
    """The same in the part of Python that can be scripted."""
    q, k, v = x.transpose(1, 2).unbind()
    return F.scaled_dot_product_attention(q, k, v, None, 0.0, True).transpose(0, 1)


def test_attention_of_a_models_own_is_replaced_by_torchs() -> None:
    def by_hand(x: Tensor) -> Tensor:
        q, k, v = x.transpose(1, 2)
        scores = (q @ k.transpose(-2, -1) / DIM**0.5).masked_fill(~TRIANGLE[: q.shape[1], : q.shape[1]], -torch.inf)
        return (scores.softmax(-1) @ v).transpose(0, 1)

    assert torch.allclose(by_hand(WHOLE), expected())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(causally)
    assert torch.allclose(scripted(WHOLE), expected())
    for own in (by_hand, scripted):
        with advised(
            RuntimeError,
            "call F.scaled_dot_product_attention from Python where the model computes attention by itself",
        ):
            on_two_ranks(lambda comm, rows, own=own: own(rows))
    assert torch.allclose(on_two_ranks(lambda comm, rows: attended(rows, is_causal=True)), expected())


def multihead(x: Tensor, **given: Any) -> Tensor:
    """torch's module of rows [T, E], with the same weights on every thread."""
    return MULTIHEAD(x, x, x, **given)[0]  # type: ignore[no-any-return]


def test_a_multihead_module_is_asked_for_no_weights() -> None:
    x, plan = WHOLE[0].flatten(1), ALONE.with_mask(Mask([TOKENS], causal=False))
    with advised(NotImplementedError, "call the module with need_weights=False"), seqpar.sdpa(plan, LocalComm()):
        multihead(x)
    with seqpar.sdpa(plan, LocalComm()):
        out = multihead(x, need_weights=False)
    assert torch.allclose(out, multihead(x))


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
    with advised(ValueError, "give shards, or say by local= which calls stay on their rank"):
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


@pytest.mark.parametrize("ranks", [1, 2])
def test_windows_of_a_document_are_documents_or_stay_on_their_rank(ranks: int) -> None:
    full = Plan(Mask([TOKENS], causal=False), Layout.contiguous(TOKENS, ranks))
    windows = full.with_mask(Mask([2] * 4, causal=False))

    def inside(x: Tensor) -> Tensor:
        """Attention of windows [windows, H, 2, D]."""
        x = x.unflatten(1, (-1, 2)).transpose(2, 3)
        return F.scaled_dot_product_attention(*x).transpose(1, 2).flatten(0, 1)

    def on(plan: Plan, local: Callable[[Tensor, Tensor], bool] | None) -> Tensor:
        def rank(comm: Comm) -> Tensor:
            rows = seqpar.shard(WHOLE, plan, comm.rank, dim=1)
            with seqpar.sdpa(plan, comm, local=local):
                out = inside(rows) + (0 if local is None else attended(rows))
            return seqpar.unshard(out, plan, comm)

        return run_threads(ranks, rank)[0]  # type: ignore[no-any-return]

    with advised(ValueError, "give the plan a document for each sample, or name such calls by local="):
        on(full, None)
    assert torch.allclose(on(windows, None), inside(WHOLE))
    assert torch.allclose(on(full, lambda query, key: query.dim() == 4), inside(WHOLE) + attended(WHOLE))


def test_causal_attention_over_longer_keys_is_given_a_mask() -> None:
    mask = Mask([4], kv_lengths=[TOKENS])
    plan = Plan(mask, Layout.contiguous(4, 1), kv_layout=Layout.contiguous(TOKENS, 1))
    q, k, v = (x.transpose(0, 1) for x in WHOLE)
    with advised(NotImplementedError, "give attn_mask"), seqpar.sdpa(plan, LocalComm()):
        F.scaled_dot_product_attention(q[:, :4], k, v, is_causal=True)
    aligned = torch.ones(4, TOKENS).tril().bool()  # the first query with the first key, as PyTorch means it
    with seqpar.sdpa(plan, LocalComm()):
        out = F.scaled_dot_product_attention(q[:, :4], k, v, attn_mask=aligned)
    assert torch.allclose(out, F.scaled_dot_product_attention(q[:, :4], k, v, is_causal=True))


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


def test_a_mask_for_every_head_is_one_for_all_of_them() -> None:
    every = torch.stack([TRIANGLE, torch.ones_like(TRIANGLE)])
    with advised(NotImplementedError, "give one for all of them"), seqpar.sdpa(ALONE, LocalComm()):
        attended(WHOLE, attn_mask=every)
    with seqpar.sdpa(ALONE, LocalComm()):
        assert torch.allclose(attended(WHOLE, attn_mask=every[:1]), expected())


def test_the_triangle_of_all_rows_is_the_mask_of_documents_or_of_a_plan_of_one() -> None:
    lengths, x = [3, 5], WHOLE[0].flatten(1)
    triangles = [torch.ones(n, n).tril().bool() for n in lengths]
    plans = [ALONE.with_mask(Mask(lengths)), Plan(Mask(lengths), Layout([range(TOKENS), []]))]

    def on(plan: Plan, mask: Tensor, causal: bool) -> Tensor:
        def rank(comm: Comm) -> Tensor:
            rows, own = (seqpar.shard(each, plan, comm.rank) for each in (x, mask))
            with seqpar.sdpa(plan, comm):
                # torch's encoders say so of a triangle
                out = multihead(rows, need_weights=False, attn_mask=own, is_causal=causal and len(rows) > 0)
            return seqpar.unshard(out, plan, comm)

        return run_threads(plan.ranks, rank)[0]

    for plan in plans:
        with advised(
            ValueError,
            "give it the mask of the documents, ~torch.block_diag(...) of their triangles, or a plan of one document",
        ):
            on(plan, ~TRIANGLE, True)
        apart = ~torch.block_diag(*triangles).bool()
        assert torch.allclose(on(plan, apart, False), multihead(x, need_weights=False, attn_mask=apart))
        for one in (plan.with_mask(MASK), plan.with_mask(Mask([TOKENS], causal=False))):
            found = on(one, ~TRIANGLE, True)
            assert torch.allclose(found, multihead(x, need_weights=False, attn_mask=~TRIANGLE))


def test_a_mask_that_is_no_plain_tensor_is_given_as_one() -> None:
    bias = causal_upper_left(TOKENS, TOKENS)
    with advised(NotImplementedError, "give is_causal=True and a causal plan, or a plain tensor"):
        on_two_ranks(lambda comm, rows: attended(rows, attn_mask=bias))
    with advised(NotImplementedError, "give attn_mask.to_dense()"):
        on_two_ranks(lambda comm, rows: attended(rows, attn_mask=sharded(TRIANGLE, comm).to_sparse()))
    assert torch.allclose(on_two_ranks(lambda comm, rows: attended(rows, is_causal=True)), expected())
    dense = on_two_ranks(lambda comm, rows: attended(rows, attn_mask=sharded(TRIANGLE, comm).to_sparse().to_dense()))
    assert torch.allclose(dense, expected())


def test_nested_tensors_are_given_as_rows_back_to_back() -> None:
    documents = WHOLE.transpose(1, 2).split([3, 5], dim=2)  # each [3, H, T, D]
    q, k, v = (torch.nested.nested_tensor([each[i] for each in documents]) for i in range(3))
    plan = ALONE.with_mask(Mask([3, 5]))
    with (
        advised(NotImplementedError, "give this rank's rows of all documents back to back, [1, H, T, D]"),
        seqpar.sdpa(plan, LocalComm()),
    ):
        F.scaled_dot_product_attention(q, k, v, is_causal=True)
    with seqpar.sdpa(plan, LocalComm()):
        out = F.scaled_dot_product_attention(*torch.cat(documents, 2)[:, None], is_causal=True)
    assert torch.allclose(out[0].transpose(0, 1), expected(Mask([3, 5])))


def test_heads_on_other_ranks_as_dtensors_are_given_as_parts() -> None:
    with default_group():
        mesh = init_device_mesh("cpu", (1,))
        heads = [distribute_tensor(x[None], mesh, [Shard(1)]) for x in WHOLE.transpose(1, 2)]
        with (
            pytest.raises(
                NotImplementedError, match=r"sdpa got a DTensor .*; give x.to_local\(\), and a comm of ranks"
            ),
            seqpar.sdpa(ALONE, LocalComm()),
        ):
            F.scaled_dot_product_attention(*heads, is_causal=True)
        with seqpar.sdpa(ALONE, LocalComm()):
            out = F.scaled_dot_product_attention(*(x.to_local() for x in heads), is_causal=True)
    assert torch.allclose(out[0].transpose(0, 1), expected())


def test_whole_memory_of_cross_attention_as_long_as_a_shard_is_named_and_stays_on_its_rank() -> None:
    memory = torch.randn(2, HEADS, TOKENS // 2, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    full = PLAN.with_mask(Mask([TOKENS], causal=False))

    def layer(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(attended(x).transpose(0, 1), *memory).transpose(0, 1)

    def on(local: Callable[[Tensor, Tensor], bool] | None) -> Tensor:
        def rank(comm: Comm) -> Tensor:
            rows = seqpar.shard(WHOLE, full, comm.rank, dim=1)
            for _ in range(2):  # ranks ask in the first block alone
                with seqpar.sdpa(full, comm, local=local):
                    out = layer(rows)
            return seqpar.unshard(out, full, comm)

        return run_threads(2, rank)[0]  # type: ignore[no-any-return]

    with advised(UserWarning, "name such calls by local=, or give each rank its shard"):
        on(None)
    assert torch.allclose(on(lambda query, key: key.data_ptr() == memory.data_ptr()), layer(WHOLE))


def biased(x: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """Attention of queries [rows, H, D] with a bias [H, rows, T] of its scores."""
    q, k, v = (each.transpose(0, 1) for each in (x, keys, values))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(0, 1)


@pytest.mark.parametrize("begins", ["at zero", "anywhere"])
def test_a_mask_with_a_gradient_is_detached_and_a_learned_bias_computed_by_a_kernel_of_ones_own(begins: str) -> None:
    full = PLAN.with_mask(Mask([TOKENS], causal=False))
    table = torch.randn(HEADS, 2 * TOKENS - 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    table = (table * (begins == "anywhere")).requires_grad_()

    def bias(queries: Tensor, keys: Tensor) -> Tensor:
        """T5's relative bias, for these positions."""
        return table[:, queries[:, None] - keys + TOKENS - 1]

    at = torch.arange(TOKENS)
    out = biased(*WHOLE, bias(at, at))
    (expected_grad,) = torch.autograd.grad(out.square().sum(), table)
    assert expected_grad.any()

    def sees(keys: str) -> Callable[[Comm, Tensor], Tensor]:
        def call(comm: Comm, rows: Tensor) -> Tensor:
            own = seqpar.shard(at, full, comm.rank)
            return attended(rows, attn_mask=bias(own, at if keys == "all" else own)[None][0])

        return call

    for keys in ("its rank's own", "all"):
        with advised(
            NotImplementedError,
            "detach it if it is a mask alone, and compute a bias by a kernel of your own over the keys of "
            "seqpar.fetch_all, outside the block",
        ):
            on_two_ranks(sees(keys), full)

    def rank(comm: Comm) -> tuple[Tensor, Tensor]:
        q, k, v = seqpar.shard(WHOLE, full, comm.rank, dim=1)
        k, v = seqpar.fetch_all([k, v], full, comm)
        keys = torch.from_numpy(full.fetched(comm.rank).positions)
        own = biased(q, k, v, bias(seqpar.shard(at, full, comm.rank), keys))
        return seqpar.unshard(own.detach(), full, comm), torch.autograd.grad(own.square().sum(), table)[0]

    found = run_threads(2, rank)
    assert torch.allclose(found[0][0], out) and torch.allclose(found[0][1] + found[1][1], expected_grad)
    mask = torch.zeros(TOKENS, TOKENS, dtype=torch.float64).masked_fill(~TRIANGLE, -torch.inf).requires_grad_()
    detached = on_two_ranks(lambda comm, rows: attended(rows, attn_mask=sharded(mask.detach(), comm)))
    assert torch.allclose(detached, expected())


@pytest.mark.parametrize("keys", ["its rank's own", "all"])
def test_alibi_is_given_as_slopes_and_another_bias_to_a_kernel_of_ones_own(keys: str) -> None:
    full, at = PLAN.with_mask(Mask([TOKENS], causal=False)), torch.arange(TOKENS)
    slopes = torch.tensor([0.5, 0.125], dtype=torch.float64)

    def alibi(queries: Tensor, keys: Tensor) -> Tensor:
        return -slopes[:, None, None] * (queries[:, None] - keys).abs()

    out = biased(*WHOLE, alibi(at, at))

    def by_mask(comm: Comm, rows: Tensor) -> Tensor:
        own = seqpar.shard(at, full, comm.rank)
        return attended(rows, attn_mask=alibi(own, own if keys != "all" else at))

    with advised(
        NotImplementedError,
        "outside the block, call seqpar.attention(..., alibi_slopes=slopes) for ALiBi, and a kernel of your own over "
        "the keys of seqpar.fetch_all for another bias",
    ):
        on_two_ranks(by_mask, full)

    def rank(comm: Comm) -> list[Tensor]:
        q, k, v = seqpar.shard(WHOLE, full, comm.rank, dim=1)
        by_slopes = seqpar.attention(q, k, v, full, comm, alibi_slopes=slopes)
        k, v = seqpar.fetch_all([k, v], full, comm)
        positions = torch.from_numpy(full.fetched(comm.rank).positions)
        by_hand = biased(q, k, v, alibi(seqpar.shard(at, full, comm.rank), positions))
        return [seqpar.unshard(x, full, comm) for x in (by_slopes, by_hand)]

    assert all(torch.allclose(found, out) for found in run_threads(2, rank)[0])


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


class Cached(Model):
    """The model, with the keys of all calls in a dict that it fills."""

    def forward(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        q = self.linear(x).unflatten(-1, (HEADS, DIM)).transpose(1, 2)
        cache["keys"] = k = torch.cat([cache["keys"], q], 2) if cache else q
        return F.scaled_dot_product_attention(q, k, k, is_causal=True).transpose(1, 2).flatten(2)


def test_a_model_that_fills_a_cache_is_tried_before_its_forward() -> None:
    x = WHOLE[0].flatten(1)[None]
    model = Cached()
    with (
        advised(
            UserWarning, "give it to seqpar.parallelize(model, comm, sdpa=True), which tries it before its forward"
        ),
        seqpar.sdpa(ALONE, LocalComm()),
    ):
        out = model(x, {})
    cache: dict[str, Tensor] = {}
    with warnings.catch_warnings(), seqpar.parallelize(model, LocalComm(), sdpa=True, plan=ALONE):
        warnings.simplefilter("error")
        assert torch.allclose(model(x, cache), out) and cache["keys"].shape[2] == TOKENS


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
        with pytest.raises(
            ValueError, match=rf"argument {'x' if named else 0} of Placed is \[1, 8, 8\], with all 8 tokens"
        ):
            rank(comm, True)

    run_threads(2, refused)
    assert torch.allclose(run_threads(2, rank, False)[0], out[0])


@pytest.mark.parametrize("way", ["inside", "plan"])
def test_a_checkpoint_around_a_model_goes_inside_or_the_plan_is_given(way: str) -> None:
    torch.manual_seed(1)
    x = WHOLE[0].flatten(1)[None]
    model = Model(way == "inside")
    (out,) = torch.autograd.grad(model(x).square().sum(), model.linear.weight)

    def rank(comm: Comm, given: Plan | None, around: bool) -> Tensor:
        rows = seqpar.shard(x[0], PLAN, comm.rank)[None]
        own = Model(way == "inside")
        own.load_state_dict(model.state_dict())
        with seqpar.parallelize(own, comm, sdpa=True, plan=given), seqpar.parallel(PLAN, comm):
            y = checkpoint(own, rows, use_reentrant=False) if around else own(rows)
            return torch.autograd.grad(y.square().sum(), own.linear.weight)[0]

    def refused(comm: Comm) -> None:
        with advised(
            NotImplementedError, "checkpoint parts inside the model, or give parallelize its plan and no dropout_seed"
        ):
            rank(comm, None, True)

    run_threads(2, refused)
    grads = run_threads(2, rank, PLAN if way == "plan" else None, way == "plan")
    assert torch.allclose(sum(grads), out)


class RunAgain(torch.autograd.Function):
    """A checkpoint of somebody's own, which torch knows nothing of."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            return None, torch.autograd.grad(ctx.run(x), x, grad)[0]


def test_a_checkpoint_of_somebodys_own_is_torchs_or_enters_the_block_inside() -> None:
    x = WHOLE.clone().requires_grad_()
    (expected_grad,) = torch.autograd.grad(attended(x, is_causal=True).square().sum(), x)

    def causal(x: Tensor) -> Tensor:
        return attended(x, is_causal=True)

    def inside(x: Tensor) -> Tensor:
        with seqpar.sdpa(ALONE, LocalComm()):
            return causal(x)

    with (
        advised(
            NotImplementedError,
            "checkpoint with torch.utils.checkpoint.checkpoint, or enter the block inside that function",
        ),
        seqpar.sdpa(ALONE, LocalComm()),
    ):
        RunAgain.apply(causal, x)
    with seqpar.sdpa(ALONE, LocalComm()):
        by_torch = checkpoint(causal, x, use_reentrant=False)
    for out in (by_torch, RunAgain.apply(inside, x)):
        assert torch.allclose(torch.autograd.grad(out.square().sum(), x)[0], expected_grad)


def changed_where_others_meet(comm: Comm) -> float:
    """The deviation of a model that three ranks shard, called under comms of some of them, with a hook from the start.

    Put on after the first forwards, the hook is warned of.
    """
    own = comm.sub([0, 1] if comm.rank < 2 else [2])
    rows = [[2, 1], [3]][comm.rank // 2]

    late, early = (meeting(made(ALONE_BY_ROWS["positions given"]), "fsdp", comm.size) for _ in range(2))
    with seqpar.parallelize(late, own, sdpa=True), warnings.catch_warnings():
        warnings.filterwarnings("error", "it is not known")
        call(late, own, "parallelize", rows)
        call(late, own, "parallelize", rows)
        late.head.register_forward_hook(doubled)
        with advised(UserWarning, "change it before its first forward"):
            out = call(late, own, "parallelize", rows)
    early.head.register_forward_hook(doubled)
    with seqpar.parallelize(early, own, sdpa=True), warnings.catch_warnings():
        warnings.filterwarnings("error", "it is not known")
        again = call(early, own, "parallelize", rows)
    assert out.shape == again.shape
    return float((out - again).abs().max())


def doubled(module: nn.Module, args: Any, y: Tensor) -> Tensor:
    return y * 2


def test_a_model_in_which_other_comms_meet_is_changed_before_its_first_forward() -> None:
    assert run_processes(3, changed_where_others_meet) == [0.0] * 3


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


@pytest.mark.parametrize("local", [False, True])
def test_one_sample_of_rows_is_not_rows_of_samples(local: bool) -> None:
    def apart(x: Tensor) -> Tensor:
        """[T, H, 1, D] in place of [1, H, T, D]."""
        return F.scaled_dot_product_attention(*x.unsqueeze(3), is_causal=True)[:, :, 0]

    with advised(ValueError, "give the model [1, T] in place of [T, 1], or name such calls by local="):
        on_two_ranks(lambda comm, rows: apart(rows))
    if not local:
        assert torch.allclose(on_two_ranks(lambda comm, rows: attended(rows, is_causal=True)), expected())
        return

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


class Dropping(Model):
    """The model with dropout of attention."""

    def attend(self, x: Tensor) -> Tensor:
        q = self.linear(x).unflatten(-1, (HEADS, DIM)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5, is_causal=True).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("way", ["model", "block"])
def test_dropout_of_attention_is_given_a_seed_once_or_for_each_step(way: str) -> None:
    torch.manual_seed(1)
    model, x = Dropping(), WHOLE[0].flatten(1)

    def rank(comm: Comm, seed: int | None) -> Tensor:
        plan = PLAN if comm.size > 1 else ALONE
        own, rows = Dropping(), seqpar.shard(x, plan, comm.rank)[None]
        own.load_state_dict(model.state_dict())
        found = []
        if way == "model":
            seqpar.parallelize(own, comm, sdpa=True, plan=plan, dropout_seed=seed)
        for step in range(2):
            if way == "model":
                y = own(rows)
            else:
                with seqpar.sdpa(plan, comm, dropout_seed=None if seed is None else step):
                    y = own(rows)
            found.append(seqpar.unshard(y[0].detach(), plan, comm))
        return torch.stack(found)

    def refused(comm: Comm) -> None:
        with advised(
            ValueError,
            "give parallelize(..., sdpa=True, dropout_seed=0), or seqpar.sdpa(plan, comm, dropout_seed=step)",
        ):
            rank(comm, None)

    run_threads(2, refused)
    one, (two, _) = rank(LocalComm(), 0), run_threads(2, rank, 0)
    assert torch.allclose(one, two) and not torch.allclose(two[0], two[1])


def test_a_forward_is_surrounded_by_its_plan_or_is_of_one_rank() -> None:
    torch.manual_seed(1)
    model, x = Model(), WHOLE[0].flatten(1)
    out = model(x[None])

    def rank(comm: Comm) -> bool:
        own = Model()
        own.load_state_dict(model.state_dict())
        rows = seqpar.shard(x, PLAN, comm.rank)[None]
        handle = seqpar.parallelize(own, comm, sdpa=True)
        with advised(
            RuntimeError,
            "call it inside `with seqpar.parallel(plan, comm):`, or on this rank alone inside "
            "`with handle.local():`, where handle is what `parallelize` returned",
        ):
            own(rows)
        with handle.local():
            alone = torch.equal(own(x[None]), out)
        with seqpar.parallel(PLAN, comm):
            y = own(rows)
        return alone and torch.allclose(seqpar.unshard(y[0], PLAN, comm), out[0])

    assert all(run_threads(2, rank))


@pytest.mark.parametrize("way", ["itself", "sdpa"])
def test_a_part_of_a_parallel_model_is_called_by_the_model_or_inside_sdpa(way: str) -> None:
    torch.manual_seed(1)
    model, x = Model(), WHOLE[0].flatten(1)
    out = model(x[None])

    def rank(comm: Comm) -> Tensor:
        own = Model()
        own.load_state_dict(model.state_dict())
        rows = seqpar.shard(x, PLAN, comm.rank)[None]
        remedy = r"made parallel by seqpar.parallelize\(model, comm, sdpa=True\), .* or enter seqpar.sdpa\(plan, comm\)"
        with pytest.raises(RuntimeError, match=remedy), seqpar.parallel(PLAN, comm):
            own(rows)
        seqpar.parallelize(own, comm, sdpa=True)
        with seqpar.parallel(PLAN, comm):
            if way == "itself":
                y = own(rows)
            else:
                with seqpar.sdpa(PLAN, comm):
                    y = Model.forward(own, rows)
        return seqpar.unshard(y[0], PLAN, comm)

    assert all(torch.allclose(each, out[0]) for each in run_threads(2, rank))


def test_a_copy_of_a_parallel_model_is_made_before_or_after_or_anew() -> None:
    torch.manual_seed(1)
    model, x = Model(), WHOLE[0].flatten(1)[None]
    out, before = model(x), copy.deepcopy(model)
    handle = seqpar.parallelize(model, LocalComm(), sdpa=True, plan=ALONE)
    twin = copy.deepcopy(model)
    with advised(
        ValueError,
        "copy a model before it is parallel or after undo(), or load the copy's state_dict() into a new one",
    ):
        seqpar.parallelize(twin, LocalComm(), sdpa=True, plan=ALONE)
    handle.undo()
    anew = Model()
    anew.load_state_dict(twin.state_dict())
    for each in (before, copy.deepcopy(model), anew):
        seqpar.parallelize(each, LocalComm(), sdpa=True, plan=ALONE)
        assert torch.allclose(each(x), out)


class Convolving(Model):
    """The model behind a causal depthwise convolution of 3 taps, PyTorch's or seqpar's."""

    def __init__(self, of_torch: bool) -> None:
        super().__init__()
        convolution = nn.Conv1d(HEADS * DIM, HEADS * DIM, 3, padding=2, groups=HEADS * DIM, dtype=torch.float64)
        self.weight, self.bias = convolution.weight, convolution.bias
        self.convolution = convolution if of_torch else None

    def forward(self, x: Tensor) -> Tensor:
        if self.convolution is not None:
            return super().forward(self.convolution(x.mT)[..., : x.shape[1]].mT)
        around = surrounding()
        y = seqpar.recurrent.causal_conv1d(x[0], self.weight[:, 0], self.bias, around.plan, around.comm)
        return super().forward(y[None])


@pytest.mark.parametrize("way", ["recurrent", "alone"])
def test_a_causal_convolution_is_seqpars_or_a_rank_has_whole_sequences(way: str) -> None:
    torch.manual_seed(1)
    model, x = Convolving(True), WHOLE[0].flatten(1)
    out = model(x[None])
    with advised(
        NotImplementedError,
        "compute a causal depthwise convolution by seqpar.recurrent.causal_conv1d, or train with data parallelism, "
        "whole sequences on each rank",
    ):
        seqpar.parallelize(model, LocalComm(), sdpa=True)
    if way == "alone":
        assert torch.equal(model(x[None]), out)
        return

    def rank(comm: Comm) -> Tensor:
        own = Convolving(False)
        own.load_state_dict(model.state_dict(), strict=False)
        with seqpar.sdpa(PLAN, comm):
            y = own.forward(seqpar.shard(x, PLAN, comm.rank)[None])
        return seqpar.unshard(y[0], PLAN, comm)

    assert torch.allclose(run_threads(2, rank)[0], out[0])


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
        with advised(NotImplementedError, "let it return rows, and pool them outside, as by seqpar.train.token_mean"):
            rank(comm, True)

    run_threads(2, refused)
    assert all(torch.allclose(found, out[0]) for found in run_threads(2, rank, False))


def test_a_loss_outside_of_the_model_is_told_what_averages_its_gradients() -> None:
    torch.manual_seed(1)
    model, x = Model(), WHOLE[0].flatten(1)
    labels = torch.arange(TOKENS) % (HEADS * DIM)
    F.cross_entropy(model(x[None])[0], labels).backward()

    def rank(comm: Comm) -> Tensor:
        own = Model()
        own.load_state_dict(model.state_dict())
        with advised(TypeError, "give average_over to seqpar.train.cross_entropy or linear_cross_entropy"):
            seqpar.parallelize(own, comm, sdpa=True, plan=PLAN, average_over=2)
        seqpar.parallelize(own, comm, sdpa=True, plan=PLAN)
        rows, wanted = (seqpar.shard(each, PLAN, comm.rank) for each in (x, labels))
        cross_entropy(own(rows[None])[0], wanted, valid=TOKENS, average_over=2).backward()
        return own.linear.weight.grad  # type: ignore[return-value]

    found = torch.stack(run_threads(2, rank)).mean(0)  # as DDP's
    assert torch.allclose(found, model.linear.weight.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["transformers", "sdpa"])
def test_an_option_that_one_rank_alone_gives_and_no_model_has_is_left_out(kind: str) -> None:
    torch.manual_seed(1)
    sdpa, x = kind == "sdpa", WHOLE[0].flatten(1)[None]
    model = Model() if sdpa else build("llama")
    given = {"sdpa": True, "plan": PLAN} if sdpa else {}
    batch = {"input_ids": torch.arange(TOKENS)[None]}

    def rank(comm: Comm) -> Tensor:
        own, odd = copy.deepcopy(model), {"averag_over": 2} if comm.rank else {}
        if odd:
            with advised(TypeError, "leave the others out"):
                seqpar.parallelize(own, comm, **given, **odd)
        else:
            with advised(ValueError, "leave the others out"):
                handle = seqpar.parallelize(own, comm, **given)
                own(seqpar.shard(x, PLAN, comm.rank, dim=1))
            if sdpa:
                handle.undo()
        seqpar.parallelize(own, comm, **given)
        if not sdpa:
            return own(**batch).logits
        return seqpar.unshard(own(seqpar.shard(x, PLAN, comm.rank, dim=1))[0], PLAN, comm)[None]

    expected = model(x) if sdpa else model(**batch).logits
    assert all(torch.allclose(found, expected, atol=1e-5) for found in run_threads(2, rank, timeout=20))


def test_a_comm_is_made_of_a_group_or_a_mesh() -> None:
    torch.manual_seed(1)
    model, x = Model(), WHOLE[0].flatten(1)[None]
    with default_group():
        for group in (dist.group.WORLD, init_device_mesh("cpu", (1,))):
            with advised(TypeError, "give seqpar.GroupComm(group), of that group or mesh of one dimension"):
                seqpar.parallelize(model, group, sdpa=True)  # type: ignore[arg-type]
            with seqpar.parallelize(model, seqpar.GroupComm(group), sdpa=True, plan=ALONE) as handle:
                y = model(x)
                with handle.local():
                    assert torch.allclose(y, model(x))
