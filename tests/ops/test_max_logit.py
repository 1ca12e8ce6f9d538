"""`return_max_logit`: the largest scaled score of each head over all ranks; everything else keeps its bits."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import seqpar
from seqpar.comm import Comm
from seqpar.plan import TRANSPORTS, Plan
from seqpar.testing import run_processes, run_threads
from seqpar.testing.oracle import seen_pairs
from tests.cases import LENGTHS, Case, divisors

MASKS = ("causal", "window", "cross", "tree", "union", "ends")
HEADS, RANKS = 5, (1, 2, 3, 4, 8)


def inputs(plan: Plan, dtype: torch.dtype) -> list[Tensor]:
    """Global q, keys and values of one head, and weights that expand these."""
    g = torch.Generator().manual_seed(plan.mask.tokens)
    n, m = plan.mask.tokens, plan.mask.kv_tokens
    shapes = (n, HEADS, 7), (m, 1, 7), (m, 1, 3), (HEADS, 4, 7), (HEADS, 6, 7)
    return [torch.randn(*s, dtype=torch.float64, generator=g).to(dtype) for s in shapes]


def call(
    comm: Comm, plan: Plan, verb: str, dtype: torch.dtype, softcap: float, wanted: bool
) -> tuple[list[Tensor], Tensor | None]:
    """One rank's out, lse and gradients; and the largest scores."""
    q, k, v, *weights = inputs(plan, dtype)
    rows = [seqpar.shard(x, plan, comm.rank, side=side) for x, side in ((q, "q"), (k, "kv"), (v, "kv"))]
    leaves = [x.clone().requires_grad_() for x in rows]
    options: dict[str, Any] = {"return_lse": True, "sinks": torch.full((HEADS,), 100.0), "softcap": softcap}
    if wanted:
        options["return_max_logit"] = True
    if verb == "attention":
        out, lse, *top = seqpar.attention(*leaves, plan, comm, **options)
    else:
        latents = [x[:, 0] for x in leaves[1:]]
        out, lse, *top = seqpar.latent_attention(leaves[0], *latents, *weights, plan, comm, expand_bytes=64, **options)
    (out.sum() + lse.sum()).backward()
    assert not top or not top[0].requires_grad
    return [out.detach(), lse.detach(), *(x.grad for x in leaves)], top[0] if top else None


def largest(plan: Plan, verb: str, dtype: torch.dtype) -> Tensor:
    """By definition, in float64; keys as ranks expand them, in the inputs' dtype."""
    q, k, v, w_k, _ = inputs(plan, dtype)
    keys = k.expand(-1, HEADS, -1)
    if verb == "latent_attention":
        made = torch.einsum("nr,hdr->nhd", k[:, 0].double(), w_k.double()).to(dtype)
        keys = torch.cat([made, v.expand(-1, HEADS, -1)], -1)
    scores = torch.einsum("ihd,jhd->hij", q.double(), keys.double()) * 7**-0.5
    return scores.masked_fill(~torch.from_numpy(seen_pairs(plan.mask)), -torch.inf).flatten(1).amax(-1)


def check(
    case: Case, verb: str, softcap: float, dtype: torch.dtype = torch.float64, run: Any = run_threads,
    limit: float = 1e-12,
) -> None:  # fmt: skip
    """With a softcap the scores are computed again, else kernels keep them."""
    plan = case.plan()
    want = largest(plan, verb, dtype)
    results, without = (run(plan.ranks, call, plan, verb, dtype, softcap, wanted) for wanted in (True, False))
    for (tensors, top), (plain, _) in zip(results, without, strict=True):
        assert torch.equal(top, results[0][1])
        assert bool(((top.double() == want) | ((top.double() - want).abs() <= limit * want.abs())).all()), (top, want)
        assert all(torch.equal(a, b) for a, b in zip(tensors, plain, strict=True))


def cases() -> list[tuple[Case, str, float]]:
    made = []
    for n, (mask, transport, ranks) in enumerate(product(MASKS, TRANSPORTS, RANKS)):
        for ulysses in divisors(ranks):
            layout = ("zigzag", "lopsided", "arbitrary")[n % 3]
            case = Case(mask, layout, transport, ranks, ulysses, LENGTHS[n % 3], n, pads=n % 4 == 0)
            made += list(product([case], ("attention", "latent_attention"), (0.0, 3.0)))
    return made


@pytest.mark.parametrize("number", range(0, len(cases()), 61))
def test_it_is_the_largest_score_of_all_ranks(number) -> None:
    check(*cases()[number])


@pytest.mark.exhaustive
def test_it_is_the_largest_score_in_the_whole_product() -> None:
    for case in cases():
        check(*case)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-8)], ids=str)
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("verb", ["attention", "latent_attention"])
def test_of_lower_precision_it_is_within_a_rounding(verb, softcap, dtype, limit) -> None:
    check(Case("window", "zigzag", "fetch", 3, 1, (40, 33)), verb, softcap, dtype, limit=limit)


def test_it_is_minus_infinity_where_nothing_is_seen() -> None:
    plan = Plan(
        seqpar.Mask([3, 0, 0], kv_lengths=[0, 3, 2]),
        seqpar.Layout.contiguous(3, 1),
        kv_layout=seqpar.Layout.contiguous(5, 1),
    )
    q, k = torch.ones(3, 2, 4), torch.ones(5, 2, 4)
    assert (seqpar.attention(q, k, k, plan, seqpar.LocalComm(), return_max_logit=True)[1] == -torch.inf).all()


@pytest.mark.exhaustive
@pytest.mark.parametrize("comm", ["gloo", "shm"])
def test_real_processes(comm) -> None:
    check(
        Case("tree", "zigzag", "fetch", 3, 1, (30, 11)), "latent_attention", 0.0, run=partial(run_processes, comm=comm)
    )
